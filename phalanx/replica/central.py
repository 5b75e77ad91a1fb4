"""The team of an asynchronous run: what its replicas learn is in central parameters, which outlive each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx.config import Experiment
from phalanx.parameters.chunked import CentralLayout, CentralParameters
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import State, make_rule
from phalanx.replica.report import Snapshot
from phalanx.replica.team import EMPTY, Team
from phalanx.runtime.share import Share


@dataclass(frozen=True)
class Central:
    """What a replica is told of the central parameters."""

    layout: CentralLayout
    own_rule: State  # what a learner alone knows of the rule, to begin with


class CentralTeam(Team):
    """Replicas around central parameters."""

    def __init__(
        self,
        *,
        experiment: Experiment,
        target: str,
        shares: list[Share],
        model: FlatParameters,
        central: CentralParameters,
        event: Callable[[str], None],
    ) -> None:
        layout = central.layout
        super().__init__(
            experiment=experiment,
            target=target,
            shares=shares,
            model=model,
            event=event,
            descriptors=[layout.descriptor, layout.locks],
        )
        self.central = central
        initial = make_rule(experiment.optimizer).init(0)
        self.own_rule = {name: value for name, value in initial.items() if name not in layout.vectors}
        """What no chunk holds of the rule's state, Adam's count of steps: the newest that is known of any learner."""

    def __enter__(self) -> CentralTeam:
        return self

    def notes(self) -> list[str]:
        sizes = f"{self.central.layout.size:,} parameters in {self.central.layout.chunks} chunks"
        return [f"{len(self.shares)} replicas around central {sizes}"]

    def weights(self) -> dict[str, Tensor]:
        self._refresh_model()
        return self.model.named_tensors()

    def snapshot(self, with_envs: bool = True) -> Snapshot:
        """The central store as it is, and each replica as it is after the iteration it is at. Without environments
        nobody is asked: replicas begin anew around the same parameters."""
        replicas = [EMPTY for _ in self.shares]
        if with_envs:
            replicas = [self._state_of(rank) or EMPTY for rank in range(len(self.shares))]
        version, vectors = self._refresh_model()
        store = {"version": version, "rule": {**vectors, **self.own_rule}}
        return Snapshot(self.model.named_tensors(), self.progress, store, replicas)

    def restore(self, snapshot: Snapshot, directory: Path) -> None:
        self.model.load(snapshot.weights)
        self.clocks.restore(snapshot.clocks)
        saved = snapshot.store["rule"]
        vectors = {name: saved[name] for name in self.central.layout.vectors}
        self.own_rule.update({name: value for name, value in saved.items() if name not in vectors})
        self.central.begin(self.model.flat, vectors, snapshot.store["version"])
        self._restore_states(snapshot)

    def _shared(self) -> Central:
        return Central(self.central.layout, self.own_rule)

    def _refresh_model(self) -> tuple[int, State]:
        """Bring the model of this process to the central parameters; their version, and the rule's vectors of the same
        moment."""
        version = self.central.version
        flat, vectors = self.central.vectors()
        self.model.flat.copy_(flat)
        self.model.refresh()
        return version, vectors

    def _guilty(self, hung: list[int]) -> list[int]:
        """Those that hold the lock of a chunk, if any do: the others may be waiting for it."""
        holders = {self.central.holder(chunk) for chunk in range(self.central.layout.chunks)} - {None}
        return [rank for rank in hung if self.children[rank].pid in holders] or hung

    def _state_of(self, rank: int) -> dict[str, Any] | None:
        """A replica's state, or none if it dies meanwhile; others' reports are kept."""
        child = self.children[rank]
        child.tell("state")
        while self.children[rank] is child and child.is_reachable:
            answer = self._hear(rank)
            if answer is not None and answer[0] == "state":
                state, self.own_rule = answer[1]
                return dict(state)
            if answer is not None and answer[0] == "report":
                self.backlog.append(self._as_of_now(answer[1]))
        return None

"""The parameter store of a learner whose parameters live in shards: it clips and checks a gradient, cuts it, asks all
shards at once, and brings the learner's own parameters to what came of it.

    gradient -> finite check, clip, outlier guard -> [slice 0 | slice 1 | ...] -> shards -> the newest parameters

How slices reach a shard is the business of a `Shards`: `ShardsHere` for shards in this process, and
`phalanx/cluster/transport.py` for shards in other processes and on other hosts.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from phalanx.errors import NotFinite, RunError, UserError
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.guard import LossGuard
from phalanx.parameters.rules import Clip, Rule
from phalanx.parameters.shards import ParameterShard, Receipt, Verdict
from phalanx.types import Gradient

PATIENCE = 1.0  # seconds for which a push waits for its step to be over, before it looks again
STEP_TIMEOUT = 600.0  # seconds after which a step that never ends is an error
TRIES = 200  # to read one step of all shards, while none of them makes a step, before the newest of each is taken
READ_TIMEOUT = 10.0  # seconds of that while they make steps too fast for this reader


class Whole(NamedTuple):
    """What all shards have, put together."""

    values: Tensor
    state: dict[str, Any]  # as `LocalStore.state` has it
    apart: int = 0  # steps between the shards, if they make steps together and none was to be had of all of them


class Shards(Protocol):
    """The way to all shards of a vector. Calls go to all of them at once and come back when all have answered."""

    parts: Sequence[slice]  # of the flat vector, one for each shard

    def push(
        self, worker: int, sequence: int, versions: Sequence[int], gradient: Tensor, rate: float, patience: float
    ) -> list[Receipt]: ...

    def read(self, into: Tensor, steps: Sequence[int | None]) -> list[int]:
        """Bring each part of a vector to the newest parameters, or to those of a step; their versions, -1 where a shard
        has that step no longer."""

    def versions(self) -> list[int]:
        """Of the newest parameters of each; -1 of a shard that was lost and has come back, until it is read."""

    def states(self) -> list[dict[str, Any]]: ...

    def restore(self, states: Sequence[dict[str, Any]]) -> None: ...


class ShardsHere:
    """Shards in this process."""

    def __init__(self, shards: Sequence[ParameterShard]) -> None:
        self.shards = shards
        stops = torch.tensor([len(shard.values) for shard in shards]).cumsum(0).tolist()
        self.parts = [slice(stop - len(shard.values), stop) for shard, stop in zip(shards, stops, strict=True)]

    def push(
        self, worker: int, sequence: int, versions: Sequence[int], gradient: Tensor, rate: float, patience: float
    ) -> list[Receipt]:
        """To all of them first; only then is any step waited for."""
        calls = list(zip(self.shards, self.parts, versions, strict=True))
        receipts = [shard.push(worker, sequence, version, gradient[part], rate) for shard, part, version in calls]
        for number, (shard, part, version) in enumerate(calls):
            if receipts[number].verdict is Verdict.WAITING and patience:
                waited = shard.push(worker, sequence, version, gradient[part], rate, patience)
                shard.counts["repeated"] -= waited.repeated  # it was asked for by nobody but this loop
                receipts[number] = waited._replace(age=receipts[number].age, repeated=receipts[number].repeated)
        return receipts

    def read(self, into: Tensor, steps: Sequence[int | None]) -> list[int]:
        versions = []
        for shard, part, step in zip(self.shards, self.parts, steps, strict=True):
            found = shard.read(step)
            versions.append(-1 if found is None else found[0])
            if found is not None:
                into[part].copy_(found[1])
        return versions

    def versions(self) -> list[int]:
        return [shard.version for shard in self.shards]

    def states(self) -> list[dict[str, Any]]:
        return [shard.state() for shard in self.shards]

    def restore(self, states: Sequence[dict[str, Any]]) -> None:
        for shard, state in zip(self.shards, states, strict=True):
            shard.restore(state)


class ShardedStore:
    """One learner's way to the shards; others have stores of their own, with other numbers as `worker`."""

    capturable = False

    def __init__(
        self,
        shards: Shards,
        parameters: FlatParameters,
        rule: Rule,
        clip: Clip,
        worker: int = 0,
        consistent: bool = False,
        bfloat16: bool = False,
        guard: LossGuard | None = None,
        sequence: int = 0,
    ) -> None:
        self.shards = shards
        self.parameters = parameters
        self.rule = rule
        self.clip = clip
        self.worker = worker
        self.consistent = consistent  # do shards make steps together? Then a pull is one step of all
        self.bfloat16 = bfloat16  # do numbers travel with 8 bits of mantissa?
        self.guard = guard
        self.sequence = sequence  # of the last push; a successor of a dead worker has another number or goes on
        self.seen = [-1] * len(shards.parts)  # versions of the learner's own parameters
        self.heard = [-1] * len(shards.parts)  # versions that were read last
        self.lost = [0] * len(shards.parts)  # updates of each shard that were lost whenever it came back without them
        self.version = 0  # updates that every shard has applied, those counted in that are lost
        self.counts: Counter[str] = Counter({"outliers": 0} if guard else {})  # what became of the learner's gradients
        self.staleness: Counter[int] = Counter()  # others' updates between pull and push -> times
        self.seconds = 0.0  # in pushes and pulls
        self.pull(parameters)

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        gradient.norm = self.clip(gradient.flat)
        if not bool(torch.isfinite(gradient.loss + gradient.norm)):
            raise NotFinite("the loss or the gradient norm is not finite", None)
        started = time.perf_counter()
        self.counts["pushes"] += 1
        if self.guard is not None and self.guard.refuses(float(gradient.loss)):
            self.counts["outliers"] += 1
        else:
            self._send(self._on_the_wire(gradient.flat), learning_rate)
        self.seconds += time.perf_counter() - started
        return self.pull(self.parameters)

    def _send(self, flat: Tensor, learning_rate: float) -> None:
        """To all shards, again to those whose step is not over or who died meanwhile: a push counts once."""
        self.sequence += 1
        deadline = time.monotonic() + STEP_TIMEOUT
        first: list[Receipt] = []
        while True:
            receipts = self.shards.push(self.worker, self.sequence, self.seen, flat, learning_rate, PATIENCE)
            first = first or receipts
            if not any(receipt.verdict is Verdict.WAITING for receipt in receipts):
                break
            if time.monotonic() > deadline:
                raise RunError(f"a step of the parameter servers did not end within {STEP_TIMEOUT:g} s")
        for verdict in (Verdict.STALE, Verdict.LATE):
            self.counts[verdict.value] += any(receipt.verdict is verdict for receipt in receipts)
        self.staleness[max(0, *(receipt.age for receipt in first))] += 1

    def pull(self, parameters: FlatParameters) -> int:
        """The newest parameters; from shards that make steps together those of one step."""
        started = time.perf_counter()
        own = parameters is self.parameters
        if not (own and min(self.seen) >= 0 and self.shards.versions() == self.seen):
            versions = self._read(parameters.flat)
            if self.bfloat16:
                parameters.flat.copy_(parameters.flat.bfloat16())
            if own:
                self.seen = versions
            parameters.refresh()
            self._count(versions)
        self.seconds += time.perf_counter() - started
        return self.version

    def _count(self, versions: list[int]) -> None:
        """A shard that came back from an older copy counts on from where it was: schedules and lags go by the version,
        and threads that share parameters know newer ones by it. Where shards make steps together, the next push gives
        it their number."""
        if not self.consistent:
            news = zip(self.lost, self.heard, versions, strict=True)
            self.lost = [lost + max(0, heard - version) for lost, heard, version in news]
            self.heard = versions
        self.version = max(self.version, min(map(sum, zip(versions, self.lost, strict=True))))

    def follow(self, other: ShardedStore) -> None:
        """Another store, of a thread beside this one's, has pulled newer parameters: take them without asking."""
        self.parameters.flat.copy_(other.parameters.flat)
        self.parameters.refresh()
        self.seen, self.heard, self.lost = list(other.seen), list(other.heard), list(other.lost)
        self.version = other.version

    def _read(self, flat: Tensor) -> list[int]:
        """Bring a vector to the newest parameters; their versions."""
        steps: list[int | None] = [None for _ in self.shards.parts]
        versions = self.shards.read(flat, steps)
        if not self.consistent:
            return versions
        stood, deadline = 0, time.monotonic() + READ_TIMEOUT
        while not one_step(versions):
            oldest = [min(versions) for _ in versions]
            if min(oldest) >= 0 and self.shards.read(flat, oldest) == oldest:
                return oldest
            before, versions = versions, self.shards.read(flat, steps)
            stood = stood + 1 if versions == before and min(versions) >= 0 else 0
            if stood >= TRIES:  # a shard came back from an older copy, and made no step since
                self.counts["torn"] += 1
                return [max(versions) for _ in versions]  # the next push tells it at which step the others are
            if time.monotonic() > deadline:  # each has its step: the next push is late where it is, and ends none
                self.counts["torn"] += 1
                return versions
        return versions

    def _on_the_wire(self, flat: Tensor) -> Tensor:
        return flat.bfloat16().float() if self.bfloat16 else flat

    def take_staleness(self) -> Counter[int]:
        """The histogram since the last call."""
        taken, self.staleness = self.staleness, Counter()
        return taken

    def take_seconds(self) -> dict[str, float]:
        """Those since the last call, in pushes and pulls."""
        taken, self.seconds = self.seconds, 0.0
        return {"exchange": taken}

    def state(self) -> dict[str, Any]:
        """Everything an update reads besides the parameters, in the order of the flat vector, as `LocalStore` has it.
        Of numbers that each shard counts for itself, Adam's t, the greatest."""
        return self.whole().state

    def whole(self) -> Whole:
        """The parameters and everything an update reads; from shards that make steps together all of it of one step,
        if that can be had while they go on."""
        states = self.shards.states()
        for _ in range(TRIES if self.consistent else 0):
            if len({state["version"] for state in states}) == 1:
                break
            states = self.shards.states()
        rule = {name: joined([state["rule"][name] for state in states]) for name in states[0]["rule"]}
        versions = [state["version"] for state in states]
        apart = max(versions) - min(versions) if self.consistent else 0
        return Whole(torch.cat([state["values"] for state in states]), {"version": min(versions), "rule": rule}, apart)

    def restore(self, state: dict[str, Any]) -> None:
        """Begin with the learner's own parameters and this state, before others are at work."""
        self.shards.restore(states_of(self.parameters.flat, state, self.shards.parts, self.rule))
        self.seen = [-1] * len(self.seen)
        self.heard, self.lost, self.version = list(self.seen), [0] * len(self.seen), 0
        self.pull(self.parameters)


def one_step(versions: Sequence[int]) -> bool:
    return min(versions) >= 0 and len(set(versions)) == 1


def joined(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values[0].dim() else torch.stack(values).amax(0)


def states_of(flat: Tensor, state: dict[str, Any], parts: Sequence[slice], rule: Rule) -> list[dict[str, Any]]:
    """What each shard begins with, from the parameters and what `LocalStore.state` gives."""
    saved = state["rule"]
    ours = {name: value.shape for name, value in rule.init(len(flat)).items()}
    if ours != {name: value.shape for name, value in saved.items()}:
        raise UserError(
            f"the saved optimiser state holds {', '.join(saved) or 'nothing'}, but this rule keeps "
            f"{', '.join(ours) or 'nothing'} for {len(flat)} parameters; "
            "use the optimiser and model configuration it was saved with"
        )
    return [
        {
            "version": state["version"],
            "values": flat[part].clone(),
            "rule": {name: value[part].clone() if value.dim() else value.clone() for name, value in saved.items()},
            "seen": {},
        }
        for part in parts
    ]

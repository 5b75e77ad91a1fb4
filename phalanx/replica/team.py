"""A team: replicas in processes of their own, as the process that looks after them sees it.

    with CentralTeam(...) as team: team.start(); while ...: for report in team.reports(0.2): ...

It starts the replicas, takes in their reports and events, replaces those that die, and asks them for their states when
a checkpoint is due. What they count is in shared clocks: a dead replica does not take it along. How they share what
they learn makes the difference between the kinds: `CentralTeam` (replica/central.py) around central parameters, and
`LockstepTeam` (replica/lockstep.py) with updates made together. A session records a team as it records a single replica
(`Source`).
"""

from __future__ import annotations

import mmap
import os
import select
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from phalanx.config import Experiment
from phalanx.errors import RunError
from phalanx.parameters.flat import FlatParameters
from phalanx.replica.report import Report, Snapshot
from phalanx.runtime.child import START_TIMEOUT, Child, Parent
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.deaths import DIED, DeathBudget
from phalanx.runtime.seeds import Role, number
from phalanx.runtime.share import Share
from phalanx.sampling.output import WorkerOutput
from phalanx.types import Progress

STOP_SECONDS = 5.0  # that replicas may take to end what they are at
LONGEST_LOOK = 1.0  # seconds that count between two looks at replicas, however long it was
Answer = tuple[str, Any]
"""What a replica sends: ("report", Report), ("event", sentence), ("failed", sentence), ("done", None) once the budget
is used up and everything reported, or what its kind of team adds."""


@dataclass(frozen=True)
class ReplicaOrder:
    """What a replica's process is told when it starts."""

    experiment: Experiment  # of the whole run
    share: Share
    clocks: int  # descriptor of the shared clocks
    state: dict[str, Any] | None  # what a checkpoint holds of it
    shared: Any  # how it shares what it learns: the kind of team knows

    def clock_rows(self) -> np.ndarray:
        return shared_rows(self.clocks, self.share.count)


class Team(ABC):
    """The replicas of a run."""

    def __init__(
        self,
        *,
        experiment: Experiment,
        target: str,
        shares: list[Share],
        model: FlatParameters,
        event: Callable[[str], None],
        descriptors: Sequence[int] = (),
    ) -> None:
        self.experiment = experiment
        self.target = target
        self.shares = shares
        self.model = model
        self.event = event
        self.descriptor = os.memfd_create("phalanx-clocks")
        os.ftruncate(self.descriptor, 8 * 4 * len(shares))
        self.inherited = [self.descriptor, *descriptors]
        self.clocks = Clocks(shared_rows(self.descriptor, len(shares)))
        sampler = experiment.sampler
        self.budget = DeathBudget("replica", len(shares), sampler.max_deaths, sampler.max_deaths_in_a_row)
        self.children: list[Child] = []
        self.births = 0
        self.done: set[int] = set()  # replicas that have used up the budget and told all
        self.failed = False  # has a replica met what ends the run?
        self.steps_at_birth = [0] * len(shares)
        self.awake, self.looked_at = 0.0, time.monotonic()
        self.heard = [0.0] * len(shares)  # when a replica was last known to be alive
        self.steps_heard = [0] * len(shares)
        self.states: list[dict[str, Any] | None] = [None] * len(shares)  # to begin with
        self.backlog: list[Report] = []  # that came while something else was waited for
        self.poll = select.poll()
        self.output = WorkerOutput()

    def start(self) -> None:
        """Start all replicas; they get ready while the caller goes on."""
        for rank in range(len(self.shares)):
            self.children.append(self._start(rank, self.experiment, self.states[rank]))

    def reports(self, timeout: float) -> Iterator[Report]:
        """What replicas have done; waits for so many seconds at most. Those that died, or hang, are replaced."""
        backlog, self.backlog = self.backlog, []
        yield from backlog
        for rank in self._ready(0.0 if backlog else timeout):
            answer = self._hear(rank)
            if answer is not None and answer[0] == "report":
                yield self._as_of_now(answer[1])
        self._replace_hung()

    @abstractmethod
    def weights(self) -> dict[str, Tensor]: ...

    @abstractmethod
    def snapshot(self, with_envs: bool = True) -> Snapshot: ...

    @abstractmethod
    def restore(self, snapshot: Snapshot, directory: Path) -> None:
        """Before `start`."""

    @abstractmethod
    def _shared(self) -> Any:
        """What a replica that starts now is told of how they share what they learn."""

    def _take(self, rank: int, kind: str, content: Any) -> None:  # noqa: B027  (most kinds of team need none)
        """A message that is special to the kind of team."""

    def _lost(self, rank: int) -> None:  # noqa: B027
        """A replica died; its successor is not started yet."""

    def __exit__(self, *exception: object) -> None:
        """Stop every replica; one that does not leave in time is killed."""
        for child in self.children:
            child.say_goodbye()
        deadline = time.monotonic() + STOP_SECONDS
        for child in self.children:
            child.join(deadline - time.monotonic())
        self.output.close()
        os.close(self.descriptor)

    # What a session asks of whatever it records.

    @property
    def progress(self) -> Progress:
        return self.clocks.now()

    @property
    def pulse(self) -> object:
        return self.clocks.rows.tobytes()

    @property
    def quiescent(self) -> bool:
        """When the budget is used up, not before every replica has told all there was."""
        return not self._is_over or len(self.done) == len(self.shares)

    @property
    def _is_over(self) -> bool:
        return self.progress.steps >= self.experiment.run.steps

    def leave(self) -> None:  # noqa: B027
        """Nothing of a team has to be finished first."""

    def _restore_states(self, snapshot: Snapshot) -> None:
        """States of as many replicas are theirs again; of another number, all begin anew."""
        if len(snapshot.replicas) == len(self.shares):
            self.states = [state if state["sampling"] is not None else None for state in snapshot.replicas]

    def _start(self, rank: int, experiment: Experiment, state: dict[str, Any] | None) -> Child:
        child = Child(f"replica {rank}")
        order = ReplicaOrder(experiment, self.shares[rank], self.descriptor, state, self._shared())
        child.start(self.target, order, output=self.output.writer, descriptors=self.inherited)
        assert child.control is not None
        self.poll.register(child.control, select.POLLIN)
        self.steps_at_birth[rank] = self._steps(rank)
        self.heard[rank] = self._now()
        return child

    def _steps(self, rank: int) -> int:
        return int(self.clocks.rows[rank, 0])

    def _ready(self, timeout: float) -> list[int]:
        """Replicas that have something to say; a dead one has."""
        places = {child.control.fileno(): rank for rank, child in enumerate(self.children) if child.control}
        return [places[descriptor] for descriptor, _ in self.poll.poll(timeout * 1000) if descriptor in places]

    def _hear(self, rank: int) -> Answer | None:
        """The next message of a replica. Events are passed on; one that failed for a reason ends the run; one that died
        is replaced, and there is no message."""
        message = self.children[rank].hear(lambda: float(self.clocks.rows[rank].sum()))  # who counts on is alive
        self.heard[rank] = self._now()
        if message is None or message[0] == "error":
            self._replace(rank)
            return None
        kind, content = message
        if kind == "event":
            self.event(f"replica {rank}: {content}")
        elif kind == "done":
            self.done.add(rank)
        elif kind == "failed":
            if self.failed:  # what ends the run was said already
                return None
            self.failed = True
            raise RunError(f"replica {rank}: {content}")
        else:
            self._take(rank, kind, content)
        return kind, content

    def _as_of_now(self, report: Report) -> Report:
        return replace(report, progress=self.progress)

    def _replace(self, rank: int) -> None:
        """Name the death of a replica and start a successor, whose environments play other games."""
        dead = self.children[rank]
        dead.kill()
        words = dead.last_words().strip()
        if dead.control is not None:
            self.poll.unregister(dead.control)
        dead.release()
        if self.failed:  # the run is about to end, of what a successor would run into as well
            self.done.add(rank)
            return
        rows = self.shares[rank].rows(self.experiment.sampler.environments // len(self.shares))
        self.event(f"replica {rank} (environments {rows.start} to {rows.stop - 1}){DIED}{words}")
        if self._is_over:
            self.done.add(rank)
            return
        self._lost(rank)
        self.budget.count(rank, did_something=self._steps(rank) > self.steps_at_birth[rank])
        self.births += 1
        seed = number(self.experiment.run.seed, Role.SUCCESSOR, self.births, self.progress.steps)
        experiment = replace(self.experiment, run=replace(self.experiment.run, seed=seed))
        self.children[rank] = self._start(rank, experiment, None)

    def _replace_hung(self) -> None:
        """Those that have neither spoken nor stepped for long."""
        limit = longest_silence(self.experiment)
        now = self._now()
        hung = []
        for rank in range(len(self.children)):
            steps = self._steps(rank)
            if steps != self.steps_heard[rank]:
                self.steps_heard[rank], self.heard[rank] = steps, now
            elif now - self.heard[rank] > limit and rank not in self.done:
                hung.append(rank)
        guilty = self._guilty(hung)
        for rank in hung:
            if rank in guilty:
                self.event(f"replica {rank} gave no sign of life for {limit:g} s; it is killed")
                self._replace(rank)
            else:
                self.heard[rank] = now

    def _guilty(self, hung: list[int]) -> list[int]:
        """Which of those that gave no sign of life are to be replaced: others may only wait for them."""
        return hung

    def _now(self) -> float:
        """Seconds for which this process was awake: one that is stopped, and continues, must not take its replicas,
        which were stopped with it, for dead."""
        now = time.monotonic()
        self.awake += min(now - self.looked_at, LONGEST_LOOK)
        self.looked_at = now
        return self.awake


def longest_silence(experiment: Experiment) -> float:
    """Seconds without a step or a word after which a replica is taken to hang."""
    return START_TIMEOUT + experiment.sampler.step_timeout


EMPTY: dict[str, Any] = {"learner": {}, "experience": {}, "sampling": None, "pending": None}
"""The state of a replica that begins anew."""


class Mailbox:
    """A replica's way to report: reports are merged while the parent does not listen, so that nobody waits."""

    def __init__(self, parent: Parent) -> None:
        self.parent = parent
        self.unsent: Report | None = None

    def post(self, report: Report) -> None:
        self.unsent = report if self.unsent is None else self.unsent.merged_with(report)
        if select.select([], [self.parent.control], [], 0)[1]:
            self.parent.tell(("report", self.unsent))
            self.unsent = None

    def post_the_rest(self) -> None:
        """The budget is used up; waits until the parent takes what there is."""
        if self.unsent is not None:
            self.parent.tell(("report", self.unsent))
            self.unsent = None
        self.parent.tell(("done", None))

    def messages(self) -> Iterator[Any]:
        """What the parent has asked for meanwhile."""
        while select.select([self.parent.control], [], [], 0)[0]:
            yield self.parent.hear()


def shared_rows(descriptor: int, count: int) -> np.ndarray:
    """The rows of the clocks that replicas share."""
    return np.frombuffer(mmap.mmap(descriptor, 8 * 4 * count), np.int64).reshape(count, 4)

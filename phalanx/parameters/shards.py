"""Parameter servers without a network: shards of the flat parameter vector, each with the state of its update rule.

    worker -> push(worker, sequence, version, gradient, rate) -> Receipt        ParameterShard applies it as it comes,
                                                                  QuorumShard the mean of the first k fresh ones
    worker -> read(step) -> the newest parameters, or those of one of the last steps

Plain Python: threads of one process call them in tests, and `phalanx/cluster` puts each into a process of its own. A
push has a key (worker, sequence) and counts once, however often it arrives, so that whoever lost an answer asks again.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections import Counter
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from phalanx.errors import UserError
from phalanx.parameters.rules import Rule

ALIGNMENT = 16  # a rule gives the same bits for parts that begin at multiples of it
SLOTS = 3  # copies of the parameters: the newest, the one before it, and the one that is written

COPY_TIMEOUT = 60.0  # seconds for which a push waits until a copy of the shard is made, before it goes on without
PASSED_OVER = 1.0  # seconds after which a step that has gradients is given up, if somebody says that others are further


class Verdict(Enum):
    """What became of a gradient."""

    APPLIED = "applied"
    WAITING = "waiting"  # it counts for its step, which has not enough of them yet
    STALE = "stale"  # older than the bound
    LATE = "late"  # its step was over


class Receipt(NamedTuple):
    """A shard's answer to a push."""

    verdict: Verdict
    version: int  # of the shard's parameters now
    age: int  # updates between the pull and the push of this gradient
    repeated: bool = False  # it had come before, and was not counted again
    incarnation: int = 0  # of the shard; one that was lost comes back with the next


def cut(size: int, count: int) -> list[slice]:
    """So many slices of a vector, balanced by bytes and cut at multiples of 16."""
    blocks = -(-size // ALIGNMENT)
    cuts = [min(size, blocks * number // count * ALIGNMENT) for number in range(count + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]


def readable(wanted: int, newest: int, oldest: int) -> bool:
    """Is a version still in its slot? The one before the newest is, but not the one before that."""
    return oldest <= wanted and 0 <= newest - wanted < SLOTS - 1


class ParameterShard:
    """Applies gradients as they come, each at once. Its version counts them.

    `slots` [SLOTS, size] and `header` may lie in memory that others read: version v stands in slot v % SLOTS, and is
    written before the header says so. The header has the version, and the oldest one that may be read: what came before
    it was lost with another shard, or passed over.
    """

    def __init__(
        self,
        values: Tensor,
        rule: Rule,
        bound: int = 0,
        slots: Tensor | None = None,
        header: Any = None,
    ) -> None:
        self.rule = rule
        self.bound = bound  # updates that a gradient may be old; 0: any number
        self.slots = torch.empty((SLOTS, len(values))) if slots is None else slots
        self.header = torch.zeros(2, dtype=torch.int64) if header is None else header
        self.rule_state = rule.init(len(values))
        self.counts: Counter[str] = Counter()  # verdicts, and what was repeated
        self.seen: dict[int, tuple[int, Verdict]] = {}  # worker -> its last push
        self.incarnation = 0
        self.limit: float = math.inf  # version that it may not pass before somebody has a copy of a newer one
        self.changed = threading.Condition()
        self._begin_at(0, values)

    @property
    def version(self) -> int:
        return int(self.header[0])

    @property
    def values(self) -> Tensor:
        """The newest parameters; a view, which stays as it is until two more versions were made."""
        return self.slots[self.version % SLOTS]

    def push(
        self, worker: int, sequence: int, version: int, gradient: Tensor, rate: float, patience: float = 0.0
    ) -> Receipt:
        """A gradient that was computed at `version`. A repeated one is answered, and changes nothing."""
        with self.changed:
            self._wait_for_copy()
            last, verdict = self.seen.get(worker, (-1, Verdict.STALE))
            age = self.version - version
            repeated = sequence <= last
            if repeated:
                self.counts["repeated"] += 1
            else:
                taken = self._take(worker, version, gradient, rate)
                if taken is None:
                    self.changed.wait_for(lambda: self.version >= version, timeout=patience)
                    return Receipt(Verdict.WAITING, self.version, age, False, self.incarnation)
                verdict = taken
                self.seen[worker] = sequence, verdict
                self.counts[verdict.value] += 1
                self.changed.notify_all()
            if verdict is Verdict.WAITING:
                verdict = self._wait(worker, sequence, version, patience)
            return Receipt(verdict, self.version, age, repeated, self.incarnation)

    def read(self, step: int | None = None) -> tuple[int, Tensor] | None:
        """The newest parameters with their version, or those of `step` if they are still there: the last two are."""
        with self.changed:
            newest = self.version
            wanted = newest if step is None else step
            if not readable(wanted, newest, int(self.header[1])):
                return None
            return wanted, self.slots[wanted % SLOTS].clone()

    def state(self) -> dict[str, Any]:
        """Everything an update reads, as copies."""
        with self.changed:
            rule = {name: value.clone() for name, value in self.rule_state.items()}
            seen = {  # what waits for its step is no part of the state, and must be taken when it comes again
                worker: (number - 1, Verdict.LATE) if verdict is Verdict.WAITING else (number, verdict)
                for worker, (number, verdict) in self.seen.items()
            }
            return {"version": self.version, "values": self.values.clone(), "rule": rule, "seen": seen}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state; whoever waits for a step looks again."""
        with self.changed:
            ours = {name: value.shape for name, value in self.rule_state.items()}
            if ours != {name: value.shape for name, value in state["rule"].items()}:
                raise UserError("the saved optimiser state is that of another rule or of other parameters")
            self._begin_at(state["version"], state["values"])
            for name, value in state["rule"].items():
                self.rule_state[name].copy_(value)
            self.seen = dict(state["seen"])
            self._forget()
            self.changed.notify_all()

    def allow(self, limit: float) -> None:
        """Somebody has a copy now: go on to this version."""
        with self.changed:
            self.limit = limit
            self.changed.notify_all()

    def _wait_for_copy(self) -> None:
        self.changed.wait_for(lambda: self.version < self.limit, timeout=COPY_TIMEOUT)

    def _begin_at(self, version: int, values: Tensor) -> None:
        """Older versions are not here; said first, so that nobody reads one meanwhile."""
        self.header[1] = version
        self.slots[version % SLOTS] = values
        self.header[0] = version

    def _take(self, worker: int, version: int, gradient: Tensor, rate: float) -> Verdict | None:
        """None if it cannot be judged yet, and must come again."""
        if self.bound and self.version - version > self.bound:
            return Verdict.STALE
        self._apply(gradient, rate)
        return Verdict.APPLIED

    def _apply(self, gradient: Tensor, rate: float) -> None:
        """The rule works on the next slot; only then does the header name it."""
        number = self.version + 1
        following = self.slots[number % SLOTS]
        following.copy_(self.values)
        self.rule.apply(following, gradient, self.rule_state, rate)
        self.header[0] = number

    def _wait(self, worker: int, sequence: int, version: int, patience: float) -> Verdict:
        return Verdict.WAITING

    def _forget(self) -> None:
        """Of what is no part of the state."""


class QuorumShard(ParameterShard):
    """Takes the mean of the first `quorum` fresh gradients of a step, applies it, and goes on to the next step. Its
    version is the number of that step, so that a gradient is fresh if it was computed at the present version; one of an
    earlier step is dropped and counted."""

    def __init__(self, *args: Any, quorum: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.quorum = quorum
        self.pending: dict[int, tuple[Tensor, float]] = {}  # worker -> its gradient and learning rate, of this step
        self.told: tuple[int, float] | None = None  # the step of which it was first told that it is over, and when

    def set_quorum(self, quorum: int) -> None:
        """Fewer workers may be alive than were asked for; what has come may then be enough."""
        with self.changed:
            self._wait_for_copy()
            self.quorum = quorum
            self._advance()
            self.changed.notify_all()

    def _take(self, worker: int, version: int, gradient: Tensor, rate: float) -> Verdict | None:
        if version < self.version:
            return Verdict.LATE
        if version > self.version:  # this shard came back from an older copy: its steps are numbered like the others'
            if self.pending and not self._is_over():
                return None
            self._settle(Verdict.LATE)
            self._begin_at(version, self.values.clone())
            self.counts["skipped"] += 1
        self.pending[worker] = gradient.clone(), rate
        return Verdict.APPLIED if self._advance() else Verdict.WAITING

    def _is_over(self) -> bool:
        """Nobody else needs to come for a step that has begun here, if others make later ones. But it may be another
        shard that came back, and this one about to end its step like the rest: that takes a moment."""
        if self.told is None or self.told[0] != self.version:
            self.told = self.version, time.monotonic()
        return time.monotonic() - self.told[1] > PASSED_OVER

    def _advance(self) -> bool:
        """Make the step if there are enough gradients. They are added in the order of workers, so that the sum does not
        depend on who came first."""
        if len(self.pending) < max(1, self.quorum):
            return False
        first, *others = (self.pending[worker][0] for worker in sorted(self.pending))
        for other in others:
            first.add_(other)
        rate = max(rate for _, rate in self.pending.values())  # one schedule, read at slightly different moments
        self._apply(first.div_(len(self.pending)), rate)
        self._settle(Verdict.APPLIED)
        return True

    def _settle(self, verdict: Verdict) -> None:
        """What became of the gradients that waited, for whoever asks again."""
        for worker in self.pending:
            if worker in self.seen:  # not yet the one whose gradient ends the step
                self.seen[worker] = self.seen[worker][0], verdict
        self.pending.clear()

    def _wait(self, worker: int, sequence: int, version: int, patience: float) -> Verdict:
        """Until the step is over, for so many seconds at most. A shard that was given another state meanwhile has
        never heard of the push, which will be sent again."""
        self.changed.wait_for(lambda: self.version != version or worker not in self.pending, timeout=patience)
        last, verdict = self.seen.get(worker, (-1, Verdict.WAITING))
        return verdict if last == sequence else Verdict.WAITING

    def _forget(self) -> None:
        """A gradient that waited for its step is no part of a state: whoever pushed it does so again, and it counts."""
        self.pending.clear()
        self.seen = {worker: push for worker, push in self.seen.items() if push[1] is not Verdict.WAITING}

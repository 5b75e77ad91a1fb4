"""The central parameters of asynchronous learners, in shared memory of one host, and the store that learners push to.

    gradient -> finite check, clip -> for every chunk, in the order in which locks come free:
                                      lock, pull, rule on the learner's device, write back, unlock

Parameters and the vectors of the rule's state lie in anonymous shared memory, cut into a few chunks with a lock each
(Stooke & Abbeel, appendix B). Each chunk is there twice: the holder of its lock reads the current copy, writes the
other, and makes that the current one by counting up a number. So a learner that dies in the middle leaves the chunk as
it was, and readers need no lock. Locks are the system's record locks: they know their owner, and are free when it is
dead.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import struct
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phalanx.errors import NotFinite, RunError, UserError
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import Adam, Clip, Rule, State
from phalanx.runtime.pages import lock_pages_for
from phalanx.types import Gradient

ALIGNMENT = 16  # a rule gives the same bits for parts that begin at multiples of it
LOCK_TIMEOUT = 60.0  # seconds for which a learner waits for a chunk, before it is an error; nobody replaces the holder
LONGEST_LOOK = 1.0  # seconds that count between two looks: a process that was stopped, and continues, has not waited
LOOK_AGAIN = 50e-6  # seconds between two looks at locks that others hold
FLOCK = "hhqqi4x"  # the system's struct flock: type, whence, start, length, process
MOST_READS = 10_000  # of a chunk, each disturbed by a writer, before it is an error


@dataclass(frozen=True)
class CentralLayout:
    """How the shared memory is divided; a value, so that it can be sent to another process."""

    size: int  # parameters
    vectors: tuple[str, ...]  # of the rule's state, each as long as the parameters
    chunks: int
    descriptor: int = -1  # of the memory
    locks: int = -1  # descriptor of the file whose bytes are locked

    @property
    def bounds(self) -> list[slice]:
        """The chunks, of about equal size, cut at multiples of 16."""
        blocks = -(-self.size // ALIGNMENT)
        cuts = [min(self.size, blocks * number // self.chunks * ALIGNMENT) for number in range(self.chunks + 1)]
        return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]

    @property
    def padded(self) -> int:
        return -(-self.size // ALIGNMENT) * ALIGNMENT


class CentralParameters:
    """The shared memory itself: parameters and rule state by chunk, each in two copies, of which one is current."""

    def __init__(self, layout: CentralLayout) -> None:
        self.layout = layout
        self.bounds = layout.bounds
        self.close: Callable[[], Any] = lambda: None  # processes that inherited the descriptors keep them to their end
        rows = 1 + len(layout.vectors)
        numbers = 2 * rows * layout.padded
        header = -(-8 * layout.chunks // 64) * 64
        self._memory = mmap.mmap(layout.descriptor, header + 4 * numbers)
        self.pushes = np.frombuffer(self._memory, np.int64, layout.chunks)  # of each chunk; odd: the second is current
        self._copies = torch.from_numpy(np.frombuffer(self._memory, np.float32, numbers, header)).view(2, rows, -1)

    @classmethod
    def create(cls, flat: Tensor, state: State, chunks: int) -> CentralParameters:
        """New ones, with these values; what is no vector of the rule's state stays with each learner."""
        vectors = tuple(name for name, value in state.items() if value.shape == flat.shape)
        layout = CentralLayout(len(flat), vectors, chunks)
        size = -(-8 * chunks // 64) * 64 + 8 * (1 + len(vectors)) * layout.padded
        descriptor = os.memfd_create("phalanx-parameters")
        os.ftruncate(descriptor, size)
        layout = replace(layout, descriptor=descriptor, locks=os.memfd_create("phalanx-chunk-locks"))
        central = cls(layout)
        central.close = weakref.finalize(central, close_all, [layout.descriptor, layout.locks])
        central.begin(flat, state)
        return central

    @property
    def version(self) -> int:
        """Gradients that every chunk has taken in."""
        return int(self.pushes.min())

    def current(self, chunk: int) -> Tensor:
        """[1 + vectors, length of the chunk]: its parameters and rule state."""
        return self._copies[int(self.pushes[chunk]) % 2, :, self.bounds[chunk]]

    def other(self, chunk: int) -> Tensor:
        """The copy to be written; only for who holds the lock. `publish` makes it the current one."""
        return self._copies[1 - int(self.pushes[chunk]) % 2, :, self.bounds[chunk]]

    def publish(self, chunk: int) -> None:
        self.pushes[chunk] += 1

    def read(self, chunk: int, into: Tensor) -> int:
        """Copy a chunk as it was at one moment; how many pushes it had taken by then. It waits for nobody: a read
        during which the chunk was replaced is repeated."""
        for _ in range(MOST_READS):
            before = int(self.pushes[chunk])
            into.copy_(self.current(chunk)[: len(into)])
            if int(self.pushes[chunk]) == before:
                return before
        raise RunError("the central parameters change faster than they can be read; use fewer replicas")

    def begin(self, flat: Tensor, state: State, version: int = 0) -> None:
        """Replace everything, while nobody else is at work."""
        self.pushes[:] = version
        for chunk, part in enumerate(self.bounds):
            into = self.current(chunk)
            into[0].copy_(flat[part])
            for row, name in enumerate(self.layout.vectors, start=1):
                into[row].copy_(state[name][part])

    def vectors(self) -> tuple[Tensor, State]:
        """Copies of the parameters and of the rule's vectors; each chunk as it was at one moment."""
        everything = torch.empty((1 + len(self.layout.vectors), self.layout.size))
        for chunk, part in enumerate(self.bounds):
            own = torch.empty((len(everything), part.stop - part.start))
            self.read(chunk, own)
            everything[:, part] = own
        return everything[0], dict(zip(self.layout.vectors, everything[1:], strict=True))

    def lock_pages(self) -> None:
        """Have a GPU read and write the memory directly."""
        lock_pages_for(self, np.frombuffer(self._memory, np.uint8))

    def lock(self, chunk: int) -> bool:
        """Take the lock of a chunk, if nobody else has it."""
        try:
            fcntl.lockf(self.layout.locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, chunk)
        except OSError:
            return False
        return True

    def holder(self, chunk: int) -> int | None:
        """The process that holds the lock of a chunk; this one's own locks are not seen."""
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, chunk, 1, 0)
        kind, _, _, _, process = struct.unpack(FLOCK, fcntl.fcntl(self.layout.locks, fcntl.F_GETLK, asked))
        return None if kind == fcntl.F_UNLCK else int(process)

    def unlock(self, chunk: int) -> None:
        fcntl.lockf(self.layout.locks, fcntl.LOCK_UN, 1, chunk)


def close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class ChunkLockedStore:
    """Applies a learner's gradients to the central parameters, chunk by chunk. The learner's own vector follows.

    With `local_steps` greater than 1 a learner makes so many updates by itself before it brings their sum to the
    central parameters (multi-step asynchronous Adam, appendix B); fewer, if it is to pull before.
    """

    capturable = False

    def __init__(
        self,
        central: CentralParameters,
        parameters: FlatParameters,
        rule: Rule,
        clip: Clip,
        local_steps: int = 1,
        own_rule: State | None = None,
        lock_timeout: float = LOCK_TIMEOUT,
    ) -> None:
        self.lock_timeout = lock_timeout
        self.central = central
        self.parameters = parameters
        self.rule = rule
        self.clip = clip
        self.local_steps = local_steps
        self.vectors = central.layout.vectors
        size, device = parameters.flat.numel(), parameters.flat.device
        # Its vectors are copies of central ones; the rest, Adam's t, is this learner's own.
        self.rule_state = rule.init(size, device)
        self.rule_state.update({name: value.to(device) for name, value in (own_rule or {}).items()})
        self.sums = StepSums(rule, size, device) if local_steps > 1 else None
        self.seen = np.zeros(central.layout.chunks, np.int64)  # pushes that each chunk had when it was last read
        self.staleness: Counter[int] = Counter()  # others' pushes between pull and push of a chunk -> times
        self.seconds = {"blocked": 0.0, "updating": 0.0}  # while all chunks that were left were locked; in own updates
        if device.type == "cuda":
            central.lock_pages()
        self.pull(parameters)

    @property
    def version(self) -> int:
        """Of this learner's own parameters."""
        return int(self.seen.min())

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        gradient.norm = self.clip(gradient.flat)
        if not bool(torch.isfinite(gradient.loss + gradient.norm)):
            raise NotFinite("the loss or the gradient norm is not finite", None)
        if self.sums is None:
            self._update_central(gradient.flat, learning_rate)
        else:
            self.sums.add(self.parameters.flat, gradient.flat, self.rule_state, learning_rate)
            if self.sums.count == self.local_steps:
                self._bring_sums()
        self.parameters.refresh()
        return self.version

    def _update_central(self, gradient: Tensor, learning_rate: float) -> None:
        """Under the lock of each chunk: pull it, apply the rule, write it back."""
        own = {name: value for name, value in self.rule_state.items() if name not in self.vectors}
        scalars: State = {}
        for chunk in self._locked_chunks():
            scalars = {name: value.clone() for name, value in own.items()}  # every chunk counts the same step
            values = self._values(chunk)
            self._read(chunk, values)
            state = {**scalars, **dict(zip(self.vectors, values[1:], strict=True))}
            self.rule.apply(values[0], gradient[self.central.bounds[chunk]], state, learning_rate)
            self._write_back(chunk, values)
        self.rule_state.update(scalars)

    def _bring_sums(self) -> None:
        """Under the lock of each chunk: add the sums of the local steps to it, and take it over."""
        assert self.sums is not None
        for chunk in self._locked_chunks():
            values = self._values(chunk)
            if int(self.central.pushes[chunk]) != self.seen[chunk]:  # else what is local is the sum already
                self._read(chunk, values)
                self.sums.apply(values[0], dict(zip(self.vectors, values[1:], strict=True)), self.central.bounds[chunk])
            self._write_back(chunk, values)
        self.sums.clear()

    def _locked_chunks(self) -> Iterator[int]:
        """Every chunk once, with its lock, in the order in which locks come free."""
        started, blocked = time.perf_counter(), 0.0
        left = list(range(self.central.layout.chunks))
        while left:
            looked = time.perf_counter()
            chunk = self._lock_one(left, looked)
            blocked += time.perf_counter() - looked
            try:
                yield chunk
            finally:
                self.central.unlock(chunk)
            left.remove(chunk)
        self.seconds["blocked"] += blocked
        self.seconds["updating"] += time.perf_counter() - started - blocked

    def _lock_one(self, chunks: list[int], before: float) -> int:
        waited = 0.0
        while True:
            for chunk in chunks:
                if self.central.lock(chunk):
                    return chunk
            now = time.perf_counter()
            waited, before = waited + min(now - before, LONGEST_LOOK), now
            if waited > self.lock_timeout:
                raise RunError(f"no chunk of the central parameters came free within {self.lock_timeout:g} s")
            time.sleep(LOOK_AGAIN)

    def _values(self, chunk: int) -> list[Tensor]:
        """The learner's own parameters and rule vectors of a chunk."""
        part = self.central.bounds[chunk]
        return [self.parameters.flat[part], *(self.rule_state[name][part] for name in self.vectors)]

    def _read(self, chunk: int, values: list[Tensor]) -> None:
        """The chunk's values become the learner's; a GPU need not be waited for, as the chunk stays until it writes."""
        for value, central in zip(values, self.central.current(chunk), strict=True):
            value.copy_(central, non_blocking=True)

    def _write_back(self, chunk: int, values: list[Tensor]) -> None:
        """The learner's values become the chunk's."""
        for value, central in zip(values, self.central.other(chunk), strict=True):
            central.copy_(value, non_blocking=True)
        if self.parameters.flat.is_cuda:
            torch.cuda.current_stream().synchronize()
        before = int(self.central.pushes[chunk])
        self.staleness[before - int(self.seen[chunk])] += 1
        self.central.publish(chunk)
        self.seen[chunk] = before + 1

    def pull(self, parameters: FlatParameters) -> int:
        """Bring a vector to the newest central parameters, each chunk as it was at one moment."""
        own = parameters is self.parameters
        if own and self.sums is not None and self.sums.count:
            self._bring_sums()  # fewer local steps than there might have been; none is lost
        rows = 1 + len(self.vectors) if own else 1  # local steps begin with the central moments
        for chunk, part in enumerate(self.central.bounds):
            values = torch.empty((rows, part.stop - part.start))
            pushes = self.central.read(chunk, values)
            if own:
                for value, central in zip(self._values(chunk), values, strict=True):
                    value.copy_(central)
                self.seen[chunk] = pushes
            else:
                parameters.flat[part].copy_(values[0])
        parameters.refresh()
        return self.version if own else self.central.version

    def take_staleness(self) -> Counter[int]:
        """The histogram since the last call."""
        taken, self.staleness = self.staleness, Counter()
        return taken

    def take_seconds(self) -> dict[str, float]:
        """Those since the last call: blocked by others' locks, and in updates."""
        taken, self.seconds = self.seconds, dict.fromkeys(self.seconds, 0.0)
        return taken

    def own_state(self) -> State:
        """What this learner alone knows: Adam counts a learner's own steps, although its moments are central."""
        return {name: value.clone() for name, value in self.rule_state.items() if name not in self.vectors}

    def state(self) -> dict[str, Any]:
        """Everything an update reads besides the parameters, what is central and what is this learner's own."""
        return {"version": self.central.version, "rule": {**self.central.vectors()[1], **self.own_state()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Begin with the learner's own parameters and this state, before others are at work."""
        saved = state["rule"]
        if {k: v.shape for k, v in self.rule_state.items()} != {k: v.shape for k, v in saved.items()}:
            raise UserError(
                f"the saved optimiser state holds {', '.join(saved) or 'nothing'}, but this rule keeps "
                f"{', '.join(self.rule_state) or 'nothing'} for {self.parameters.flat.numel()} parameters; "
                "use the optimiser and model configuration it was saved with"
            )
        for name, value in saved.items():
            self.rule_state[name].copy_(value)
        self.central.begin(self.parameters.flat, self.rule_state, state["version"])
        self.pull(self.parameters)


class StepSums:
    """What a learner's local steps of Adam come to: their sum, and the gradients that central moments have to take in.

    After n local steps the central values become theta - sum of steps, beta1^n m + (1 - beta1) sum of beta1^i g and
    beta2^n v + (1 - beta2) sum of beta2^i g^2, whatever others have done to them meanwhile.
    """

    def __init__(self, rule: Rule, size: int, device: torch.device) -> None:
        assert isinstance(rule, Adam)
        self.rule = rule
        self.steps, self.gradients, self.squares = (torch.zeros(size, device=device) for _ in range(3))
        self.count = 0

    def add(self, parameters: Tensor, gradient: Tensor, state: State, learning_rate: float) -> None:
        """One local step."""
        before = parameters.clone()
        self.gradients.mul_(self.rule.beta1).add_(gradient)
        self.squares.mul_(self.rule.beta2).addcmul_(gradient, gradient)
        self.rule.apply(parameters, gradient, state, learning_rate)
        self.steps.add_(before.sub_(parameters))
        self.count += 1

    def apply(self, parameters: Tensor, moments: State, part: slice) -> None:
        """To a part of the central parameters and moments."""
        beta1, beta2 = self.rule.beta1, self.rule.beta2
        parameters.sub_(self.steps[part])
        moments["mean"].mul_(beta1**self.count).add_(self.gradients[part], alpha=1 - beta1)
        moments["square"].mul_(beta2**self.count).add_(self.squares[part], alpha=1 - beta2)

    def clear(self) -> None:
        for total in (self.steps, self.gradients, self.squares):
            total.zero_()
        self.count = 0

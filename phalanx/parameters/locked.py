"""One set of parameters that several threads of a process learn: updates and copies take turns, nothing else does.

    trainer thread -> push: take the lock, then as LocalStore; the trainer's own copy is of the new version
    predictor thread -> pull: take the lock, copy

Each thread computes on a copy of its own, so no forward ever sees half an update, and gradients are made side by side.
On a GPU each thread has a stream of its own, too: there the lock says in which order work is launched, and an event has
each thread's work wait for that of the one before.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.types import Gradient


class Turns:
    """The lock of parameters that several threads use: nobody else reads or writes them meanwhile, neither the host
    nor, on a stream, the device."""

    def __init__(self, flat: Tensor) -> None:
        self.lock = threading.Lock()
        self.done = torch.cuda.Event() if flat.is_cuda else None  # with what was launched last

    @contextlib.contextmanager
    def take(self, wait: bool = True) -> Iterator[bool]:
        """A turn; without waiting for one, False if it is somebody else's."""
        if not self.lock.acquire(blocking=wait):
            yield False
            return
        try:
            if self.done is not None:
                self.done.wait()
            yield True
        finally:
            if self.done is not None:
                self.done.record()
            self.lock.release()


class SharedParameters:
    """The parameters themselves, their update rule, and the lock."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self.turns = Turns(store.parameters.flat)
        self.staleness: Counter[int] = Counter()  # others' updates between pull and push -> times

    @property
    def version(self) -> int:
        return self.store.version

    def newest(self) -> int:
        """The version of the newest parameters there are."""
        return self.store.version

    def store_of(self, parameters: FlatParameters) -> LockedStore:
        """The store of a thread with that copy of the parameters."""
        return LockedStore(self, parameters)

    def take_staleness(self) -> Counter[int]:
        """Of all threads, since the last call."""
        with self.turns.take():
            taken, self.staleness = self.staleness, Counter()
        return taken


class LockedStore:
    """The store as one thread sees it, with that thread's copy of the parameters."""

    capturable = False

    def __init__(self, shared: SharedParameters, parameters: FlatParameters) -> None:
        self.shared = shared
        self.parameters = parameters
        self.pulled = shared.version  # the version of this thread's copy

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        if self.shared.turns.done is not None:
            torch.cuda.current_stream().synchronize()  # before others would have to wait for this gradient, too
        store = self.shared.store
        with self.shared.turns.take():
            self.shared.staleness[store.version - self.pulled] += 1
            self.pulled = store.push(gradient, learning_rate)
            store.pull(self.parameters)
            return self.pulled

    def pull(self, parameters: FlatParameters) -> int:
        with self.shared.turns.take():
            version = self.shared.store.pull(parameters)
            if parameters is self.parameters:
                self.pulled = version
            return version

    def state(self) -> dict[str, Any]:
        with self.shared.turns.take():
            return self.shared.store.state()

    def restore(self, state: dict[str, Any]) -> None:
        """What this thread's copy holds becomes the parameters, as with every store that has some of its own."""
        store = self.shared.store
        with self.shared.turns.take():
            store.restore(state)
            if self.parameters is not store.parameters:
                store.parameters.flat.copy_(self.parameters.flat)
                store.parameters.refresh()

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
from collections.abc import Iterator
from typing import Any

import torch

from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.types import Gradient


class SharedParameters:
    """The parameters themselves, their update rule, and the lock."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self.lock = threading.Lock()
        self.done = torch.cuda.Event() if store.parameters.flat.is_cuda else None  # with what was launched last

    @contextlib.contextmanager
    def turn(self) -> Iterator[LocalStore]:
        """Nobody else reads or writes the parameters meanwhile, neither the host nor, on a stream, the device."""
        with self.lock:
            if self.done is not None:
                self.done.wait()
            try:
                yield self.store
            finally:
                if self.done is not None:
                    self.done.record()

    @property
    def version(self) -> int:
        return self.store.version


class LockedStore:
    """The store as one thread sees it, with that thread's copy of the parameters."""

    capturable = False

    def __init__(self, shared: SharedParameters, parameters: FlatParameters) -> None:
        self.shared = shared
        self.parameters = parameters

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        if self.shared.done is not None:
            torch.cuda.current_stream().synchronize()  # before others would have to wait for this gradient, too
        with self.shared.turn() as store:
            version = store.push(gradient, learning_rate)
            store.pull(self.parameters)
        return version

    def pull(self, parameters: FlatParameters) -> int:
        with self.shared.turn() as store:
            return store.pull(parameters)

    def state(self) -> dict[str, Any]:
        with self.shared.turn() as store:
            return store.state()

    def restore(self, state: dict[str, Any]) -> None:
        """What this thread's copy holds becomes the parameters, as with every store that has some of its own."""
        with self.shared.turn() as store:
            store.restore(state)
            if self.parameters is not store.parameters:
                store.parameters.flat.copy_(self.parameters.flat)
                store.parameters.refresh()

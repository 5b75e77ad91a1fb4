"""One set of parameters that several threads of a process learn: updates and copies take turns, nothing else does.

    trainer thread -> push: take the lock, then as LocalStore; the trainer's own copy is of the new version
    predictor thread -> pull: take the lock, copy

Each thread computes on a copy of its own, so no forward ever sees half an update, and gradients are made side by side.
"""

from __future__ import annotations

import threading
from typing import Any

from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.types import Gradient


class SharedParameters:
    """The parameters themselves, their update rule, and the lock."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store
        self.lock = threading.Lock()

    @property
    def version(self) -> int:
        return self.store.version

    def newest(self) -> int:
        """The version of the newest parameters there are."""
        return self.store.version

    def store_of(self, parameters: FlatParameters) -> LockedStore:
        """The store of a thread with that copy of the parameters."""
        return LockedStore(self, parameters)


class LockedStore:
    """The store as one thread sees it, with that thread's copy of the parameters."""

    capturable = False

    def __init__(self, shared: SharedParameters, parameters: FlatParameters) -> None:
        self.shared = shared
        self.parameters = parameters

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        with self.shared.lock:
            version = self.shared.store.push(gradient, learning_rate)
            self.shared.store.pull(self.parameters)
        return version

    def pull(self, parameters: FlatParameters) -> int:
        with self.shared.lock:
            return self.shared.store.pull(parameters)

    def state(self) -> dict[str, Any]:
        with self.shared.lock:
            return self.shared.store.state()

    def restore(self, state: dict[str, Any]) -> None:
        with self.shared.lock:
            self.shared.store.restore(state)

"""One set of parameters that several threads of a process use, and that parameter servers own: a worker of Distributed
BA3C is a GA3C node with this in the place of `SharedParameters`.

    trainer thread -> push: to the servers, wait for the step; then everybody here has the parameters it brought
    predictor thread -> pull: take the lock, copy

So parameters cross the network once a step, however many predictors there are. A node whose trainer has to wait for
data still acts with the newest parameters: once in a while a predictor asks whether others have made steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from phalanx.parameters.client import ShardedStore
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.locked import Turns
from phalanx.types import Gradient

LOOK = 0.1  # seconds without a step of its own trainer, after which a node asks the servers for newer parameters

Connect = Callable[[FlatParameters], ShardedStore]
"""A way to the parameter servers for whoever has these parameters."""


class FollowedParameters:
    """The copy of a node, and the lock."""

    def __init__(self, parameters: FlatParameters, connect: Connect) -> None:
        self.parameters = parameters
        self.connect = connect
        self.follower = connect(parameters)  # pushes nothing
        self.trainers: list[ShardedStore] = []
        self.turns = Turns(parameters.flat)
        self.looked = time.monotonic()

    @property
    def version(self) -> int:
        return self.follower.version

    def newest(self) -> int:
        """The version of the newest parameters there are. One of the threads that ask looks for them, if nobody has for
        a while; the others do not wait for it."""
        if time.monotonic() - self.looked > LOOK:
            with self.turns.take(wait=False) as taken:
                if taken:
                    self.looked = time.monotonic()
                    self.follower.pull(self.parameters)
        return self.version

    def take(self, store: ShardedStore) -> None:
        """A trainer has newer parameters: everybody here gets them."""
        with self.turns.take():
            self.looked = time.monotonic()
            if store.version > self.follower.version:
                self.follower.follow(store)

    def store_of(self, parameters: FlatParameters) -> NodeStore:
        """The store of a thread with that copy of the parameters. With the node's own it only reads."""
        if parameters is self.parameters:
            return NodeStore(self, self.follower)
        self.trainers.append(self.connect(parameters))
        return NodeStore(self, self.trainers[-1])

    def take_staleness(self) -> Counter[int]:
        """Of all trainers, since the last call."""
        return sum((store.take_staleness() for store in self.trainers), Counter[int]())

    def counts(self) -> dict[str, int]:
        """What became of the gradients of all trainers."""
        return dict(sum((store.counts for store in self.trainers), Counter[str]()))


class NodeStore:
    """The store as one thread sees it, with that thread's copy of the parameters."""

    capturable = False

    def __init__(self, shared: FollowedParameters, own: ShardedStore) -> None:
        self.shared = shared
        self.own = own

    @property
    def parameters(self) -> FlatParameters:
        return self.own.parameters

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        """Waits for the step as the servers make it; predictors go on meanwhile."""
        version = self.own.push(gradient, learning_rate)
        self.shared.take(self.own)
        return version

    def pull(self, parameters: FlatParameters) -> int:
        """A trainer takes the newest for itself, a predictor those that the node has."""
        if parameters is self.own.parameters and self.own is not self.shared.follower:
            version = self.own.pull(parameters)
            self.shared.take(self.own)
            return version
        with self.shared.turns.take():
            parameters.flat.copy_(self.shared.parameters.flat)
            parameters.refresh()
            return self.shared.version

    def state(self) -> dict[str, Any]:
        with self.shared.turns.take():
            return self.shared.follower.state()

    def restore(self, state: dict[str, Any]) -> None:
        with self.shared.turns.take():
            self.shared.follower.restore(state)

"""A replica whose parameters change by themselves, for a test that its peers notice."""

from __future__ import annotations

from typing import Any

from phalanx.parameters.allreduce import AllReduceStore
from phalanx.replica import lockstep
from phalanx.topologies.lockstep import serve as serve_rightly


def serve(order: Any, parent: Any) -> None:
    push = AllReduceStore.push

    def damaging(self: AllReduceStore, *arguments: Any) -> int:
        version = push(self, *arguments)
        if version == 5:
            self.parameters.flat[0] += 1
        return version

    AllReduceStore.push = damaging  # type: ignore[method-assign]
    lockstep.CHECK_EVERY = 1
    serve_rightly(order, parent)

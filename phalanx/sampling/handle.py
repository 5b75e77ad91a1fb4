"""An env worker as its owner sees it: a child process that is woken by a descriptor and has a place in the run.

`sampling/processes.py` holds one for each worker; `sampling/worker.py` is the other side.
"""

from __future__ import annotations

from typing import Any

from phalanx.runtime.child import Child
from phalanx.sampling.worker import Orders


class WorkerHandle(Child):
    """One worker process, from its start to its last words."""

    def __init__(self, number: int, incarnation: int, wake: int) -> None:
        super().__init__(f"env worker {number}")
        self.number = number
        self.incarnation = incarnation
        self.wake = wake

    def begin(self, orders: Orders, output: int) -> None:
        """Start the process; `wait_ready` tells when its environments are made."""
        self.start(
            "phalanx.sampling.worker:serve",
            orders,
            output=output,
            descriptors=[orders.memory, orders.wake, orders.owner_wake],
            # One thread each: a worker must not compete with the others for cores.
            environment={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def question(self, kind: str, content: Any = None) -> Any:
        """Ask for something rare: a state, say."""
        return self.ask((kind, content))

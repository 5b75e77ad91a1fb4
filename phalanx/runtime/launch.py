"""What torchrun tells the processes that it starts. Nothing here needs torch before the processes meet."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """What torchrun tells each of the processes it starts."""

    rank: int
    size: int
    local_rank: int  # on this host
    local_size: int
    restarts: int  # of the whole job, after a process died

    @classmethod
    def by_torchrun(cls) -> Launch | None:
        """None in a process that torchrun has not started."""
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return None
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
        return cls(*(int(os.environ[name]) for name in names))

    def meeting_point(self) -> Any:
        """Where the processes of the job find each other."""
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(rendezvous("env://"))
        return store

    @property
    def address(self) -> str:
        """Of this host, as the others reach it: where it sends from when it writes to the first one."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
            return str(probe.getsockname()[0])

"""Parameter servers on Ray: how they are started, and how they come back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray

from phalanx.cluster.server import RETRY, ShardOrder, ShardServer
from phalanx.cluster.standby import Kept, Standby
from phalanx.cluster.transport import RayShards
from phalanx.cluster.watched import GONE, Watched
from phalanx.runtime.child import START_TIMEOUT

STANDBY = "standby"  # its name; every run has a namespace of its own
STANDBY_TIMEOUT = 20.0  # seconds for which a server waits until its copy is at the standby
REPEAT = 5.0  # seconds between two times that servers are told their quorum
SPARE_CALLS = 8  # that a server answers at once, besides those of workers that wait for a step


class Server(ShardServer):
    """A shard whose copies go to a standby on Ray."""

    def __init__(self, order: ShardOrder) -> None:
        self.standby = ray.get_actor(STANDBY)  # by name: Ray cannot start again what was given a handle
        super().__init__(order, self._send_copy, self._fetch_copy)

    def _send_copy(self, shard: int, state: Kept) -> bool:
        try:
            ray.get(self.standby.keep.remote(shard, state), timeout=STANDBY_TIMEOUT)
        except GONE:
            return False
        return True

    def _fetch_copy(self, shard: int) -> Kept | None:
        """None only if the standby says that it has none, as after its own death, or is not to be reached for long."""
        deadline = time.monotonic() + 3 * STANDBY_TIMEOUT
        while time.monotonic() < deadline:
            with contextlib.suppress(*GONE):
                copy: Any = ray.get(self.standby.kept.remote(shard), timeout=STANDBY_TIMEOUT)
                return copy
            time.sleep(RETRY)
        return None


@dataclass
class Servers:
    """The parameter servers of a run."""

    handles: list[Any]
    parts: list[slice]
    standby: Watched
    told: dict[int, Any] = field(default_factory=dict)  # servers -> the call that told them their quorum last
    told_at: float = 0.0

    def reach(self, bfloat16: bool) -> Callable[[], RayShards]:
        """A value that makes a process's way to them."""
        return partial(RayShards, self.handles, self.parts, bfloat16)

    def set_quorum(self, quorum: int) -> None:
        self.told = {number: handle.set_quorum.remote(quorum) for number, handle in enumerate(self.handles)}
        self.told_at = time.monotonic()

    def repeat_quorum(self, quorum: int) -> None:
        """Once it differed from what servers begin with they are told again and again: a call may get lost with the
        server that got it, and a step that waits for too many would not end."""
        if not self.told or time.monotonic() - self.told_at < REPEAT:
            return
        answered, _ = ray.wait(list(self.told.values()), num_returns=len(self.told), timeout=0)
        for number in [number for number, call in self.told.items() if call in answered]:
            with contextlib.suppress(*GONE):
                ray.get(self.told[number], timeout=STANDBY_TIMEOUT)
            self.told[number] = self.handles[number].set_quorum.remote(quorum)
        self.told_at = time.monotonic()

    def look_after_standby(self) -> str:
        """Has the standby died, or come back? Then it gets copies of all servers at once. Waits for nobody."""
        news = self.standby.look()
        if news == "came back":
            for handle in self.handles:
                handle.copy.remote()
        return news

    def end(self) -> None:
        for handle in [*self.handles, self.standby.handle]:
            ray.kill(handle)


def start_servers(orders: Sequence[ShardOrder], parts: list[slice], copies: Sequence[Kept], workers: int) -> Servers:
    """Parameter servers, on as many hosts as there are. They begin with what the standby is given first, and when one
    dies Ray starts it again, and it does the same."""
    options = {"num_cpus": 0, "max_restarts": -1, "scheduling_strategy": "SPREAD"}
    standby: Any = ray.remote(Standby).options(**options, name=STANDBY).remote()
    for order, copy in zip(orders, copies, strict=True):
        standby.keep.remote(order.number, copy)  # calls of one caller are served in their order
    ray.get(standby.kept.remote(len(orders)), timeout=START_TIMEOUT)
    server: Any = ray.remote(Server).options(**options, max_concurrency=workers + SPARE_CALLS)
    return Servers([server.remote(order) for order in orders], parts, Watched(standby))

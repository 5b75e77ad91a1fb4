"""What Ray itself costs on this machine: `phalanx study cluster` asks.

Times are of processors, not of the clock, but for a message on its way: so they hold on a machine that others use, too.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from phalanx.cluster.engine import running
from phalanx.cluster.member import Done
from phalanx.cluster.post import Post
from phalanx.config.presets import preset
from phalanx.parameters.flat import FlatParameters
from phalanx.replica.report import Report
from phalanx.runtime.share import Share
from phalanx.types import Progress

WARM_UP = 100  # calls that are not measured
PATIENCE = 120.0  # seconds for an answer
AT_ONCE = 16  # calls that are asked for together, so that nobody waits between them
MEMBERS, TURNS = 500, 20  # of a fleet whose sums are measured
SUMS = 3  # over all members, that the driver makes for each turn of one


@dataclass(frozen=True)
class RayTimes:
    """Seconds."""

    call: float  # of a server, to answer a call that asks for next to nothing
    send: float  # of whoever calls, for call and answer
    latency: float  # of a message between two processes of one host
    tell: float  # of the driver, to take in what a member has done and to ask it to go on
    tell_each: float  # and for each member of the fleet, because it adds up what all have done


class Answering:
    """A process that is called."""

    def nothing(self, number: int) -> int:
        return number

    def done(self) -> Done:
        report = Report(Progress(), [0.0], Counter({0: 64}), {"env": 0.1, "infer": 0.1, "learn": 0.1}, {"loss": 0.0})
        return Done(Progress(), report, {"pushes": 1}, [])

    def used(self) -> float:
        return time.process_time()


def measure_ray(calls: int) -> RayTimes:
    """So many calls of each kind on a Ray of its own."""
    with running("") as ray:
        actor: Any = ray.remote(Answering).options(num_cpus=0).remote()
        ray.get([actor.nothing.remote(0) for _ in range(WARM_UP)], timeout=PATIENCE)
        server, caller = ray.get(actor.used.remote(), timeout=PATIENCE), time.process_time()
        for number in range(0, calls, AT_ONCE):
            ray.get([actor.nothing.remote(number) for _ in range(AT_ONCE)], timeout=PATIENCE)
        made = -(-calls // AT_ONCE) * AT_ONCE
        send = (time.process_time() - caller) / made
        call = (ray.get(actor.used.remote(), timeout=PATIENCE) - server) / made
        trips = []
        for number in range(calls // 4):
            began = time.perf_counter()
            ray.get(actor.nothing.remote(number), timeout=PATIENCE)
            trips.append(time.perf_counter() - began)
        trip = sorted(trips)[len(trips) // 4]  # few of them met anybody else
        caller = time.process_time()
        for _ in range(0, calls, AT_ONCE):
            ray.get([actor.done.remote() for _ in range(AT_ONCE)], timeout=PATIENCE)
        tell = (time.process_time() - caller) / made
        return RayTimes(call, send, max(0.0, trip - call - send) / 2, tell, adding_up())


def adding_up() -> float:
    """The driver's time for each member, with every turn of any."""
    from phalanx.cluster.fleet import Fleet

    posts = [Post("bundle", rank, "", Share(rank, MEMBERS)) for rank in range(MEMBERS)]
    layer = FlatParameters(nn.Linear(1, 1))
    fleet = Fleet(experiment=preset("gorila-catch"), model=layer, posts=posts, event=lambda _: None)
    began = time.process_time()
    for _ in range(TURNS):
        _ = fleet.progress
    return SUMS * (time.process_time() - began) / TURNS / MEMBERS

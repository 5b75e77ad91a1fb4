"""A discrete-event model of a cluster that learns: workers around parameter servers, with queues, links and a driver.

    worker: acts, pulls now and then -> gradient -> push -> pull -> ...         a round; several make a turn, which the
       |                                   |         |                          worker tells the driver of
       '-- its link --> latency --> link of a server --> its processor --> link --> latency --> its link

It is pure: times come from `Cluster` and from the random generator that is handed in. Servers are equal and are asked
all at once, so that one stands for all of them: it holds a slice of the parameters. `phalanx study cluster` uses it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Generator
from dataclasses import dataclass, field

import numpy as np

Doing = Generator[float | None, None, None]
"""What somebody does: yields the seconds that the next part takes, or None to wait until it is resumed."""


@dataclass(frozen=True)
class Cluster:
    """How large a cluster is, and how long everything takes. All times are in seconds."""

    workers: int = 1
    servers: int = 1
    act: float = 0.0  # of one round, between two gradients
    learn: float = 0.1  # to make a gradient
    spread: float = 0.0  # deviation of both by their mean; they have a gamma distribution: 1 is exponential, 0 constant
    slow: float = 0.0  # share of workers that are slower, rounded
    slowness: float = 1.0  # times as slow
    gradients: int = 1  # of a round
    points: int = 1  # data points of a gradient
    polls: int = 0  # pulls while acting, besides the one after each push
    size: int = 0  # numbers of the whole parameter vector
    width: int = 4  # bytes of each as it travels
    bandwidth: float = math.inf  # bytes per second of each host's link, in each direction
    latency: float = 0.0  # of a message
    send: float = 0.0  # a worker's own time to call one server
    call: float = 0.0  # a server's own time to answer a call
    apply: float = 0.0  # a server's time to apply an update, for each number
    take: float = 0.0  # a server's time to add a gradient to its step, for each number; with a quorum only
    copy: float = 0.0  # to copy a parameter, for each number: a server's for a pull, or the worker's on the same host
    one_host: bool = False  # workers read parameters from the servers' memory, and nothing crosses a link
    quorum: int = 0  # gradients that make a step; 0: each is applied as it comes
    bound: int = 0  # a gradient is dropped if it is so many updates old; 0: none
    turn: float = math.inf  # seconds after which a worker tells the driver what it has done
    tell: float = 0.0  # the driver's time to take that in
    tell_each: float = 0.0  # and for each worker, because it adds up what all have done
    credits: int = 2  # turns that a worker may have begun before the driver took one in

    @property
    def slice(self) -> int:
        """Numbers of one server."""
        return -(-self.size // self.servers)

    @property
    def on_link(self) -> float:
        """Seconds that a slice occupies the link of a server."""
        return 0.0 if self.one_host else self.slice * self.width / self.bandwidth

    @property
    def whole_on_link(self) -> float:
        """Seconds that all parameters occupy the link of a worker."""
        return 0.0 if self.one_host else self.size * self.width / self.bandwidth

    @property
    def telling(self) -> float:
        """The driver's time for a turn."""
        return self.tell + self.workers * self.tell_each

    @property
    def call_time(self) -> float:
        """Of a call to all servers that nobody else calls, without what it carries and causes."""
        return self.servers * self.send + 2 * self.latency + self.call

    @property
    def push_time(self) -> float:
        """Of a push that meets nobody."""
        taken = self.take if self.quorum else 0.0
        return self.call_time + self.whole_on_link + self.slice * (self.apply + taken)

    @property
    def pull_time(self) -> float:
        """Of a pull that meets nobody and brings new parameters."""
        if self.one_host:
            return self.size * self.copy
        return 2 * self.call_time + self.slice * self.copy + self.whole_on_link

    @property
    def asking_time(self) -> float:
        """Of a pull that finds no new parameters."""
        return 0.0 if self.one_host else self.call_time

    @property
    def round_time(self) -> float:
        """Of a worker that is alone."""
        updates = self.gradients * (self.learn + self.push_time + self.pull_time)
        return self.act + self.polls * self.asking_time + updates


@dataclass
class Course:
    """What came of it, while it was measured. `sent`, `dropped` and `in_flight` are of the whole course."""

    seconds: float = 0.0
    applied: int = 0
    points: int = 0
    updates: int = 0
    sent: int = 0
    all_applied: int = 0
    dropped: int = 0
    in_flight: int = 0
    staleness: Counter[int] = field(default_factory=Counter)  # of gradients that were applied -> times
    busy: dict[str, float] = field(default_factory=dict)  # share of the time, by station

    @property
    def points_per_second(self) -> float:
        return self.points / self.seconds

    @property
    def updates_per_second(self) -> float:
        return self.updates / self.seconds

    @property
    def mean_staleness(self) -> float:
        return sum(age * times for age, times in self.staleness.items()) / max(1, self.staleness.total())


class Simulation:
    """The clock, and everybody who does something."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order = 0  # of events at the same moment: as they were planned
        self.events: list[tuple[float, int, Doing]] = []
        self.current: Doing | None = None

    def start(self, doing: Doing, after: float = 0.0) -> None:
        """Let somebody begin, or go on, after so many seconds."""
        self.order += 1
        heapq.heappush(self.events, (self.now + after, self.order, doing))

    def step(self) -> bool:
        """The next event; False when there is none."""
        if not self.events:
            return False
        self.now, _, self.current = heapq.heappop(self.events)
        pause = next(self.current, None)
        if pause is not None:
            self.start(self.current, pause)
        return True


class Station:
    """What serves one at a time, in the order in which they come."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.held = False
        self.queue: deque[Doing] = deque()
        self.busy = 0.0  # seconds so far

    def hold(self) -> Doing:
        if self.held:
            assert self.simulation.current is not None
            self.queue.append(self.simulation.current)
            yield None  # whoever lets go hands it over
        self.held = True

    def work(self, seconds: float) -> Doing:
        self.busy += seconds
        yield seconds

    def let_go(self) -> None:
        if self.queue:
            self.simulation.start(self.queue.popleft())
        else:
            self.held = False

    def serve(self, seconds: float) -> Doing:
        yield from self.hold()
        yield from self.work(seconds)
        self.let_go()


class Running:
    """A cluster at work."""

    def __init__(self, cluster: Cluster, generator: np.random.Generator) -> None:
        self.cluster = cluster
        self.generator = generator
        self.simulation = Simulation()
        self.stations = {name: Station(self.simulation) for name in ("inward", "processor", "outward", "driver")}
        self.version = 0
        self.course = Course()
        self.waiting: dict[int, Doing] = {}  # workers whose gradient counts for a step that is not over
        self.pushing = [False] * cluster.workers
        slow = round(cluster.slow * cluster.workers)
        for worker in range(cluster.workers):
            self.simulation.start(self.work(worker, cluster.slowness if worker < slow else 1.0))

    def work(self, worker: int, slowness: float) -> Doing:
        """A worker, as long as the cluster lives."""
        cluster, simulation = self.cluster, self.simulation
        known = [0]
        credits, began, waits = [cluster.credits], simulation.now, [False]
        while True:
            for _ in range(cluster.polls):
                yield slowness * self.draw(cluster.act / (cluster.polls + 1))
                yield from self.pull(known)
            yield slowness * self.draw(cluster.act / (cluster.polls + 1))
            for _ in range(cluster.gradients):
                yield slowness * self.draw(cluster.learn)
                yield from self.push(worker, known[0])
                yield from self.pull(known)
            if simulation.now - began >= cluster.turn:
                credits[0] -= 1
                assert simulation.current is not None
                simulation.start(self.tell(simulation.current, credits, waits))
                if not credits[0]:
                    waits[0] = True
                    yield None
                began = simulation.now

    def tell(self, worker: Doing, credits: list[int], waits: list[bool]) -> Doing:
        """The driver takes a turn in, and asks for another one."""
        yield from self.stations["driver"].serve(self.cluster.telling)
        credits[0] += 1
        if waits[0]:
            waits[0] = False
            self.simulation.start(worker)

    def push(self, worker: int, known: int) -> Doing:
        cluster, course = self.cluster, self.course
        processor = self.stations["processor"]
        course.sent += 1
        self.pushing[worker] = True
        yield from self.upwards(cluster.on_link, cluster.whole_on_link)
        yield from processor.hold()
        age = self.version - known
        waits = False
        if cluster.quorum:
            yield from processor.work(cluster.call + cluster.slice * cluster.take)
            if age:
                self.drop(worker)
            elif len(self.waiting) + 1 < cluster.quorum:
                assert self.simulation.current is not None
                self.waiting[worker] = self.simulation.current
                waits = True
            else:
                yield from processor.work(cluster.slice * cluster.apply)
                self.end_step(worker)
        elif cluster.bound and age > cluster.bound:
            yield from processor.work(cluster.call)
            self.drop(worker)
        else:
            yield from processor.work(cluster.call + cluster.slice * cluster.apply)
            self.count(worker, age)
            self.version += 1
            course.updates += 1
        processor.let_go()
        if waits:
            yield None
        yield cluster.latency

    def end_step(self, last: int) -> None:
        """The quorum is there: everybody who waits goes on."""
        self.version += 1
        self.course.updates += 1
        for worker in (last, *self.waiting):
            self.count(worker, 0)
        for doing in self.waiting.values():
            self.simulation.start(doing)
        self.waiting.clear()

    def count(self, worker: int, age: int) -> None:
        self.pushing[worker] = False
        self.course.applied += 1
        self.course.all_applied += 1
        self.course.staleness[age] += 1

    def drop(self, worker: int) -> None:
        self.pushing[worker] = False
        self.course.dropped += 1

    def pull(self, known: list[int]) -> Doing:
        cluster = self.cluster
        processor = self.stations["processor"]
        if cluster.one_host:
            if known[0] != self.version:
                known[0] = self.version
                yield cluster.size * cluster.copy
            return
        yield from self.upwards(0.0, 0.0)
        yield from processor.serve(cluster.call)
        newest = self.version
        yield cluster.latency
        if newest == known[0]:
            return
        yield from self.upwards(0.0, 0.0)
        yield from processor.serve(cluster.call + cluster.slice * cluster.copy)
        known[0] = self.version
        yield from self.through("outward", cluster.on_link, cluster.whole_on_link)
        yield cluster.latency

    def upwards(self, on_link: float, whole: float) -> Doing:
        """From a worker to all servers."""
        yield self.cluster.servers * self.cluster.send
        yield from self.through("inward", on_link, whole)
        yield self.cluster.latency

    def through(self, station: str, on_link: float, whole: float) -> Doing:
        """Slices pass the links of all servers side by side, and the one link of the worker one after the other, both
        at the same time."""
        began = self.simulation.now
        if on_link:
            yield from self.stations[station].serve(on_link)
            yield max(0.0, began + whole - self.simulation.now)

    def draw(self, mean: float) -> float:
        spread = self.cluster.spread
        if not spread or not mean:
            return mean
        return float(self.generator.gamma(1 / spread**2, mean * spread**2))


def simulate(cluster: Cluster, updates: int, generator: np.random.Generator, warm_up: int = 0) -> Course:
    """So many updates of a cluster, after some that are not measured."""
    running = Running(cluster, generator)
    simulation, course = running.simulation, running.course

    def go_on(until: int) -> None:
        while running.version < until and simulation.step():
            pass

    go_on(warm_up)
    began, version = simulation.now, running.version
    before = {name: station.busy for name, station in running.stations.items()}
    course.applied, course.updates = 0, 0
    course.staleness.clear()
    go_on(warm_up + updates)
    course.seconds = simulation.now - began
    course.updates = running.version - version
    course.points = course.applied * cluster.points
    course.in_flight = sum(running.pushing)
    course.busy = {
        name: min(1.0, (station.busy - before[name]) / course.seconds) for name, station in running.stations.items()
    }
    return course


def limits(cluster: Cluster) -> dict[str, float]:
    """Gradients per second that each station lets through at most, however many workers there are."""
    applied = cluster.take + cluster.apply / cluster.quorum if cluster.quorum else cluster.apply
    processor = cluster.call + cluster.slice * applied
    if not cluster.one_host:
        processor += 2 * cluster.call + cluster.slice * cluster.copy + cluster.polls / cluster.gradients * cluster.call
    if math.isfinite(cluster.turn):  # a turn ends with the first round after its time
        rounds = max(1, math.ceil(cluster.turn / cluster.round_time))
        driver = cluster.telling / rounds / cluster.gradients
    else:
        driver = 0.0
    seconds = {"inward": cluster.on_link, "processor": processor, "outward": cluster.on_link, "driver": driver}
    return {name: 1 / each if each else math.inf for name, each in seconds.items()}

"""The fleet of a run on Ray: parameter servers, and members that act and learn. The session records it like a single
replica (`Source`); it replaces who dies, and adds up what all have done.

    fleet -> work(others, seconds) -> member -> Done -> fleet -> Report -> session
                                       |
                                       +-- push, pull --> parameter servers
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayTaskError
from torch import Tensor

from phalanx.cluster.member import Done, Host, MemberOrder
from phalanx.cluster.post import EVALUATOR, WORKER, Post
from phalanx.cluster.quorum import Quorum
from phalanx.cluster.server import ShardOrder, with_arrays, with_tensors
from phalanx.cluster.servers import Servers, start_servers
from phalanx.cluster.standby import Kept
from phalanx.cluster.transport import RayShards
from phalanx.cluster.watched import GONE, Watched
from phalanx.config import DBA3CConfig, Experiment, GorilaConfig
from phalanx.errors import RunError, UserError
from phalanx.parameters.client import ShardedStore, Whole, states_of
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.rules import make_rule
from phalanx.parameters.shards import cut
from phalanx.replica.report import Report, Snapshot
from phalanx.replica.team import EMPTY
from phalanx.runtime.child import START_TIMEOUT
from phalanx.runtime.deaths import DeathBudget
from phalanx.runtime.seeds import Role, number
from phalanx.types import Progress

TURN = 0.25  # seconds that a member works before it tells what it has done
CALLS = 2  # asked of a member at once, so that it never waits for the next one
ROOM_SECONDS = 30.0  # after which a member that finds no room in the cluster is named
CHIEF_TIMEOUT = 10.0  # seconds that the chief may take to say what the servers have
STATE_TIMEOUT = 30.0  # seconds that a member may take to give its state
LONGEST_EVALUATION = 7200.0  # seconds
SUPERVISOR = -1  # number of the fleet's own store, which never pushes


class Fleet:
    """Everybody who works on a run."""

    def __init__(
        self,
        *,
        experiment: Experiment,
        model: FlatParameters,
        posts: list[Post],
        event: Callable[[str], None],
        bound: int = 0,
        quorum: int = 0,
        replays: Sequence[Any] = (),
    ) -> None:
        assert isinstance(experiment.topology, GorilaConfig | DBA3CConfig)
        self.experiment = experiment
        self.topology = experiment.topology
        self.model = model
        self.posts = posts
        self.event = event
        self.bound = bound
        self.quorum = Quorum(quorum, self.topology.too_few if isinstance(self.topology, DBA3CConfig) else "lower")
        sampler = experiment.sampler
        self.budget = DeathBudget("member", len(posts), sampler.max_deaths, sampler.max_deaths_in_a_row)
        self.births = 0
        self.gone = Progress()  # what members did that are dead, and the run before it was resumed
        self.counts_of_gone: dict[str, int] = {}
        self.counts: dict[int, dict[str, int]] = {}
        self.replays = [Watched(handle) for handle in replays]
        self.version = 0
        self.named: set[int] = set()  # parameter servers that are gone, as the events say
        self.given: set[int] = set()  # parameter servers that had to be given parameters, and have not come back yet
        self.states: list[dict[str, Any] | None] = [None] * len(posts)
        self.saved_store: dict[str, Any] | None = None
        self.servers: Servers | None = None
        self.shards: RayShards | None = None
        self.store: ShardedStore | None = None
        self.reached = ""  # why the run has reached what it was for
        self.evaluation: dict[str, float] = {}  # the newest

    # Before and after

    def start(self) -> None:
        """Start all processes; they get ready while the caller goes on."""
        optimizer, topology, quorum = self.experiment.optimizer, self.topology, self.quorum.asked
        parts = [part for part in cut(self.model.flat.numel(), topology.shards) if part.stop > part.start]
        orders = [
            ShardOrder(number, part.stop - part.start, optimizer, self.bound, quorum, topology.snapshot_every)
            for number, part in enumerate(parts)
        ]
        self.servers = start_servers(orders, parts, self._copies(parts), len(self.posts))
        self._start_those_that_are_due()

    def _start_those_that_are_due(self) -> None:
        """Everybody at once, but an evaluator only when others are at work: their start would take longer beside it."""
        under_way = any(post.begun for post in self.posts)
        for post in self.posts:
            if post.handle is None and (under_way or post.kind != EVALUATOR):
                self._start(post, self.experiment)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exception: object) -> None:
        for post in self.posts:
            if post.handle is not None:
                with contextlib.suppress(Exception):
                    ray.kill(post.handle)
        for replay in self.replays:
            with contextlib.suppress(Exception):
                ray.kill(replay.handle)
        if self.servers is not None:
            with contextlib.suppress(Exception):
                self.servers.end()

    def _start(self, post: Post, experiment: Experiment) -> None:
        assert self.servers is not None
        bfloat16 = self.topology.wire == "bfloat16"
        place = self.posts.index(post)
        worker = self.births * len(self.posts) + place
        state, self.states[place] = self.states[place], None
        order = MemberOrder(experiment, post.share, self.servers.reach(bfloat16), worker, state, post.extra)
        cores = self.topology.cores if self.topology.address else 0  # a local Ray has no hosts to choose from
        host = ray.remote(Host).options(num_cpus=cores, max_restarts=0, scheduling_strategy="SPREAD")
        post.handle = host.remote(post.target, order)
        post.own, post.begun, post.silent, post.waits_for_room = Progress(), False, False, False
        post.born = post.heard = time.monotonic()
        post.calls, post.arrival = [], post.handle.process.remote()
        self._ask(post)

    def _ask(self, post: Post) -> None:
        while len(post.calls) < CALLS:
            post.calls.append(post.handle.work.remote(self._others(post), TURN))

    def _others(self, post: Post) -> Progress:
        now, own = self.progress, post.own
        return Progress(now.steps - own.steps, 0, self.version, now.episodes - own.episodes)

    # While it runs

    def reports(self, timeout: float) -> Iterator[Report]:
        """What members have done; waits for so many seconds at most. Those that died, or hang, are replaced."""
        self._look_after_servers()
        self._start_those_that_are_due()
        first = {post.calls[0]: post for post in self.posts if post.calls}
        if not first:
            time.sleep(timeout)
            return
        ready, _ = ray.wait(list(first), num_returns=1, timeout=timeout)
        if ready:  # and whoever else is
            ready, _ = ray.wait(list(first), num_returns=len(first), timeout=0)
        heard = [self._hear(first[call]) for call in ready]  # all of them, before anybody is thought to be silent
        self._replace_hung()
        self._look_after_quorum()
        for done in heard:
            if done is not None and done.report is not None:
                yield self._as_of_now(done.report)

    def _hear(self, post: Post) -> Done | None:
        """What a member has done. One that failed for a reason ends the run; one that died is replaced."""
        try:
            done: Done = ray.get(post.calls.pop(0), timeout=STATE_TIMEOUT)  # it may lie on a host that is gone
        except GONE as error:
            self._replace(post, in_short(error))
            return None
        except RayTaskError as error:
            self._replace(post, str(error.cause if isinstance(error, UserError | RunError) else error).strip())
            return None
        post.heard, post.begun, post.silent = time.monotonic(), True, False
        post.own = done.own
        self.version = max(self.version, done.own.version)
        self.counts[self.posts.index(post)] = done.counts
        for sentence in done.events:
            self.event(f"{post.name}: {sentence}")
        if done.failed:
            raise RunError(f"{post.name}: {done.failed}")
        self.reached = self.reached or done.over
        if done.report is not None and post.kind == EVALUATOR:
            self.evaluation, done.report = done.report.numbers, None
        self._ask(post)
        return done

    def _replace(self, post: Post, words: str) -> None:
        """Name the death of a member and start a successor, whose environments play other games."""
        was_chief = post is self.chief
        self.event(f"{post.name} died: {words}")
        with contextlib.suppress(Exception):
            ray.kill(post.handle)
        post.begun = False
        if was_chief:
            successor = "the first worker that is back" if self.chief is None else self.chief.name
            self.event(f"{post.name} was the chief; {successor} is from now on")
        self.gone = plus(self.gone, post.own)
        for name, count in self.counts.pop(self.posts.index(post), {}).items():
            self.counts_of_gone[name] = self.counts_of_gone.get(name, 0) + count
        did_something = post.own != Progress()
        post.own = Progress()
        post.calls = []
        self.budget.count(self.posts.index(post), did_something)
        self.births += 1
        seed = number(self.experiment.run.seed, Role.SUCCESSOR, self.births)
        self._start(post, replace(self.experiment, run=replace(self.experiment.run, seed=seed)))

    def _replace_hung(self) -> None:
        """Those that do not answer; one that has no process yet waits for room in the cluster, which may come back."""
        usual = START_TIMEOUT + self.experiment.sampler.step_timeout
        for post in [post for post in self.posts if post.handle is not None]:
            self._look_for_arrival(post)
            limit = LONGEST_EVALUATION if post.kind == EVALUATOR else usual
            if post.arrival is not None and self.topology.address:
                if time.monotonic() - post.born > ROOM_SECONDS and not post.waits_for_room:
                    post.waits_for_room = True
                    self.event(f"{post.name} waits for {self.topology.cores} free cores in the cluster")
            elif time.monotonic() - post.heard > limit:
                self._replace(post, f"no answer for {limit:g} s")

    def _look_for_arrival(self, post: Post) -> None:
        """From the moment in which it has a process a member has its time to get ready."""
        if post.arrival is not None and ray.wait([post.arrival], timeout=0)[0]:
            post.arrival, post.waits_for_room, post.heard = None, False, time.monotonic()

    def _look_after_quorum(self) -> None:
        """Fewer members than a step needs must not hang it. At the start all are given time to begin."""
        if not self.quorum.asked:
            return
        assert self.servers is not None
        workers = [post for post in self.posts if post.kind == WORKER]
        starting = not any(post.begun for post in workers) or not self.births
        alive = sum(post.answers if post.begun else starting and self._may_begin(post) for post in workers)
        if sentence := self.quorum.look(alive):
            self.event(sentence)
            self.servers.set_quorum(self.quorum.present)
        else:
            self.servers.repeat_quorum(self.quorum.present)

    def _may_begin(self, post: Post) -> bool:
        """Is it worth while to wait for a worker that has never answered? To lower the quorum too early costs next to
        nothing. To end the run does, so as long as nobody has died a slow start is none, nor is a full cluster."""
        if self.births or self.quorum.too_few != "stop":
            return time.monotonic() - post.born < ROOM_SECONDS
        return post.waits_for_room or time.monotonic() - post.heard < START_TIMEOUT

    @property
    def chief(self) -> Post | None:
        """The worker that has checkpoints made: the first one that has answered. When it dies the next one is."""
        return next((post for post in self.posts if post.kind == WORKER and post.answers), None)

    def _whole(self) -> Whole:
        """What the parameter servers have, from the chief; from the servers themselves where there is none."""
        while (chief := self.chief) is not None:
            call, deadline = chief.handle.whole.remote(), time.monotonic() + CHIEF_TIMEOUT
            while time.monotonic() < deadline and not ray.wait([call], timeout=TURN)[0]:
                self._look_after_servers()  # the chief may wait for one of them
            try:
                state = with_tensors(ray.get(call, timeout=TURN))
                return Whole(state.pop("values"), state, state.pop("apart"))
            except GetTimeoutError:
                chief.silent = True
                self.event(f"{chief.name}, the chief, gives no answer; the next worker is the chief")
            except (RayTaskError, *GONE) as error:
                self._replace(chief, in_short(error))
        return self._own_store().whole()

    def _look_after_servers(self) -> None:
        """Name those that died and came back; give one that has lost its standby, too, what the run knows of it."""
        assert self.servers is not None
        shards = self._own_shards()
        shards.look()
        for shard in sorted(shards.gone - self.named):
            self.event(f"parameter server {shard} died; Ray starts it again")
        self.named = set(shards.gone)
        if news := self.servers.look_after_standby():
            what = "; Ray starts it again" if news == "died" else " and came back; it gets copies of all of them"
            self.event(f"the standby of the parameter servers died{what}")
        for place, replay in enumerate(self.replays):
            if news := replay.look():
                what = "; Ray starts it again" if news == "died" else " and came back empty"
                self.event(f"replay shard {place} died{what}")
        copies = self._copies(self.servers.parts) if shards.ignorant else []
        for shard in list(shards.ignorant):
            self.event(f"parameter server {shard} died with its standby: it goes on from the newest checkpoint")
            with contextlib.suppress(*GONE):  # one that died again is found again
                ray.get(self.servers.handles[shard].restore.remote(copies[shard]), timeout=STATE_TIMEOUT)
            shards.ignorant.discard(shard)
            self.given.add(shard)
        came_back, shards.came_back = shards.came_back, {}
        for shard, (sentence, lost) in came_back.items():
            most = self.topology.snapshot_every
            bound = f" (at most {most} can be)" if lost <= most else ", as its standby was out of reach"
            self.event(sentence + ("" if shard in self.given else bound))
            self.given.discard(shard)
            if self.quorum.asked:
                self.servers.set_quorum(self.quorum.present)

    def _copies(self, parts: list[slice]) -> list[Kept]:
        """What each parameter server begins with: the newest checkpoint, or the beginning of the run."""
        rule, flat = make_rule(self.experiment.optimizer), self.model.flat.cpu()
        store = self.saved_store or {"version": 0, "rule": rule.init(len(flat))}
        return [with_arrays(state) for state in states_of(flat, store, parts, rule)]

    def _own_shards(self) -> RayShards:
        """Nobody else gives a server parameters: whoever waits for one here must look after all of them meanwhile."""
        if self.shards is None:
            assert self.servers is not None
            self.shards = self.servers.reach(False)()
            self.shards.meanwhile = self._look_after_servers
        return self.shards

    def _own_store(self) -> ShardedStore:
        if self.store is None:
            rule, consistent = make_rule(self.experiment.optimizer), self.quorum.asked > 0
            shards = self._own_shards()
            self.store = ShardedStore(shards, self.model, rule, lambda flat: flat.norm(), SUPERVISOR, consistent)
        return self.store

    # What a session asks of whatever it records

    @property
    def progress(self) -> Progress:
        total = self.gone
        for post in self.posts:
            total = plus(total, post.own)
        return Progress(total.steps, self.version, self.version, total.episodes)

    @property
    def pulse(self) -> object:
        return self.progress

    @property
    def quiescent(self) -> bool:
        return True

    def notes(self) -> list[str]:
        kinds: dict[str, int] = {}
        for post in self.posts:
            kinds[post.kind] = kinds.get(post.kind, 0) + 1
        members = ", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in kinds.items())
        where = f"the cluster at {self.topology.address}" if self.topology.address else "a local Ray"
        asked = self.quorum.asked
        quorum = f"; a step takes the gradients of {asked}" if asked else ""
        size = self.model.flat.numel()
        return [f"{members} around {self.topology.shards} parameter servers of {size:,} numbers on {where}{quorum}"]

    def leave(self) -> None:
        """Nothing of a fleet has to be finished first."""

    def weights(self) -> dict[str, Tensor]:
        if self.servers is not None:
            self._own_store().pull(self.model)
        return self.model.named_tensors()

    def snapshot(self, with_envs: bool = True) -> Snapshot:
        """The parameter servers as they are, and each member after the iteration it is at."""
        rule = make_rule(self.experiment.optimizer)
        store = self.saved_store or {"version": 0, "rule": rule.init(self.model.flat.numel())}
        replicas: list[dict[str, Any]] = [EMPTY for _ in self.posts]
        if self.servers is not None:
            values, store, apart = self._whole()
            if apart:
                self.event(f"a checkpoint has slices of steps up to {apart} apart: none was to be had of all servers")
            self.model.flat.copy_(values)
            self.model.refresh()
            self.saved_store = store = {**store, "version": max(store["version"], self.version)}  # never counts back
            if with_envs and not isinstance(self.topology, DBA3CConfig):  # its workers begin new games
                replicas = self._member_states()
        return Snapshot(self.model.named_tensors(), self.progress, store, replicas)

    def restore(self, snapshot: Snapshot, directory: Path) -> None:
        """Before `start`."""
        self.model.load(snapshot.weights)
        self.gone = replace(snapshot.clocks, updates=0, version=0)
        self.version = snapshot.store["version"]
        self.saved_store = snapshot.store
        if len(snapshot.replicas) == len(self.posts):
            self.states = [state if state["sampling"] is not None else None for state in snapshot.replicas]

    def _member_states(self) -> list[dict[str, Any]]:
        calls = {place: post.handle.state.remote() for place, post in enumerate(self.posts) if post.begun}
        states = []
        deadline = time.monotonic() + STATE_TIMEOUT
        for place in range(len(self.posts)):
            state = None
            if place in calls:
                with contextlib.suppress(RayTaskError, *GONE):
                    state = ray.get(calls[place], timeout=max(0.1, deadline - time.monotonic()))
            states.append(state or EMPTY)
        return states

    def _as_of_now(self, report: Report) -> Report:
        counts = dict(self.counts_of_gone)
        for of_one in self.counts.values():
            for name, count in of_one.items():
                counts[name] = counts.get(name, 0) + count
        numbers = {
            **report.numbers,
            **self.evaluation,
            **{f"gradients_{name}": float(count) for name, count in counts.items()},
        }
        numbers |= {"quorum": float(self.quorum.present)} if self.quorum.asked else {}
        return replace(report, progress=self.progress, numbers=numbers)


def plus(one: Progress, other: Progress) -> Progress:
    return Progress(one.steps + other.steps, 0, 0, one.episodes + other.episodes)


def in_short(error: Exception) -> str:
    """Ray's account of a death, without the advice."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:1]) if lines else type(error).__name__

"""Environments in worker processes: one shared step buffer, groups that alternate, death as an event.

    owner (model)                              worker w (one core, its rows of every group)
    send(g): action[rows] = a; request += 1  -> wakes, steps its rows of g straight into the shared buffer
    recv(g): sleeps until done == request    <- done += 1, wakes the owner

Workers of a squad wait for each other; squads do not, they have groups of their own. Nothing is pickled and nothing
is allocated per step. A worker that dies, raises or hangs is replaced; its environments begin new episodes and the
step that was cut off is marked, so that nobody learns from it.
"""

from __future__ import annotations

import os
import select
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from phalanx.errors import RunError
from phalanx.runtime.affinity import keep_to
from phalanx.runtime.child import ChildFailed
from phalanx.sampling.balance import Speeds, moves
from phalanx.sampling.exchange import Layout
from phalanx.sampling.handle import WorkerHandle
from phalanx.sampling.pool import WorkerPool
from phalanx.sampling.slot import EnvFactory, SlotRules, group_slices, too_long_to_restore
from phalanx.types import EnvStep

STOPPED = 1.0  # seconds a sleep may last longer than asked; after more, the whole job was stopped and continued
LOOK_AGAIN = 0.05  # seconds after which the owner looks without having been woken; a look takes time from a worker


class ProcessEnvs(WorkerPool):
    """VectorEnvs on worker processes. The owner wakes for a finished group, and for every worker's death."""

    shared_memory = True

    def __init__(
        self,
        factory: EnvFactory,
        workers: int,
        envs_per_worker: int,
        groups: int = 1,
        rules: SlotRules | None = None,
        squads: int = 1,
        timeout: float = 30.0,
        max_deaths: int = 1000,
        max_deaths_in_a_row: int = 10,
        cores: list[int] | None = None,
        owner_core: int | None = None,
        balance: float = 0.0,
        report: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__(
            factory,
            workers,
            envs_per_worker,
            groups * squads,
            rules,
            timeout,
            max_deaths,
            max_deaths_in_a_row,
            cores,
            report,
        )
        self.owner_core = owner_core
        self.owner_cores: set[int] = set()  # where the owner ran before it kept to its own
        self.squads = squads
        self.groups = group_slices(self.layout.environments, groups * squads)
        self.rows = shares(self.groups, workers, squads)
        self.steps = [self.exchange.step[rows] for rows in self.groups]
        self.speeds = Speeds(balance)
        self.started = False
        self._find_members()
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def ready(self, groups: Sequence[int], wait: bool = True) -> int | None:
        """Wait until every worker has finished its rows of one of these groups; replace those that die meanwhile, or
        hang while nobody else gets ready."""
        self._wait_until_ready()
        looks, deadline, heartbeats = 0, 0.0, self.exchange.heartbeat
        while True:
            for group in groups:
                if self.exchange.finished(group):
                    return group
            if not wait:
                return None
            now = time.monotonic()
            if looks == 1:  # only now: mostly one look is enough, and this takes time
                deadline, heartbeats = now + self.timeout, self.exchange.heartbeat.copy()
            elif looks > 1 and deadline <= now:
                self._replace_hung(groups, heartbeats)
                looks = 0
            looks += 1
            events = self.epoll.poll(LOOK_AGAIN)
            if time.monotonic() - now > STOPPED:
                deadline = time.monotonic() + self.timeout
            for descriptor, _ in events:
                if descriptor != self.owner_wake:
                    self._replace(self._worker_behind(descriptor))
                    deadline = time.monotonic() + self.timeout

    def recv(self, group: int) -> EnvStep:
        self.ready([group])
        return self.steps[group]

    def send(self, group: int, actions: np.ndarray) -> None:
        self.exchange.action[self.groups[group]] = actions
        self.request(group)

    def request(self, group: int) -> None:
        """Have a group step with the actions that stand in the shared memory."""
        counters = self.exchange.request
        for number in self.members[group]:
            counters[group, number] += 1
            os.eventfd_write(self.workers[number].wake, 1)

    def unbalanced(self) -> bool:
        return self.speeds.due()

    def balance(self) -> None:
        """Between rollouts: move environments from workers on slow cores to those on fast ones. Where an environment
        is simulated changes nothing about it."""
        if not self.unbalanced():
            return
        cost = self.speeds.look(self.rows, self.exchange.busy)
        gone: dict[int, list[int]] = defaultdict(list)
        come: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for source, target, group in moves(self.rows, cost) if cost is not None else ():
            index = self.rows[source][group].pop()
            self.rows[target][group].append(index)
            gone[source].append(index)
            come[target].append((index, group))
        states: dict[int, Any] = {}
        for answer in self._ask_all("give", dict(gone)):
            states.update(answer if isinstance(answer, dict) else {})
        # what a dying worker could not hand over begins anew where it was to go
        for index in {index for of in gone.values() for index in of} - states.keys():
            states[index] = self._birth()
        self._find_members()  # first: one that begins anew counts on from what stands there
        self._ask_all("take", {to: [(i, group, states[i]) for i, group in of] for to, of in come.items()})
        self.speeds.looked(self.exchange.busy)

    def state(self) -> dict[str, Any]:
        """States by environment, so that a run can be resumed with another number of workers."""
        self._wait_until_ready()
        slots: dict[int, Any] = {}
        for worker in list(self.workers):
            answer = worker.question("state")
            while not isinstance(answer, dict):  # it died since its last step, or of this
                self._kill(self.workers[worker.number])
                answer = self.workers[worker.number].question("state")
            slots.update(answer)
        return {"slots": [slots[index] for index in range(self.layout.environments)], "births": self.births}

    def restore(self, state: dict[str, Any]) -> None:
        for group in range(len(self.groups)):
            self.recv(group)  # the first step was asked for already; it must not hit restored environments
        self.births = max(state.get("births", 0), *(slot.get("incarnation", 0) for slot in state["slots"]))
        numbers = range(len(self.workers))
        rows = {number: {index: state["slots"][index] for index in self._rows(number)} for number in numbers}
        for number, answer in zip(rows, self._ask_all("restore", rows), strict=True):
            while answer is not True:
                worker = self.workers[number]
                if worker.traceback:
                    raise RunError(f"env worker {number} cannot restore its environments: {worker.traceback}")
                self._kill(worker)  # it was killed from outside; a successor may take its place
                (answer,) = self._ask_all("restore", {number: rows[number]})
        if sentence := too_long_to_restore(state["slots"]):
            self.report(sentence)

    def __enter__(self) -> ProcessEnvs:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every worker; twice does no harm. A worker that does not leave in time is killed."""
        if self.owner_cores and not self.closed:
            keep_to(self.owner_cores)
        super().close()

    def _start_all(self) -> None:
        """Start every worker and ask for the first step; they make their environments while the owner goes on."""
        for number in range(self.layout.workers):
            handle = WorkerHandle(number, 0, os.eventfd(0, os.EFD_NONBLOCK))
            self.workers.append(handle)
            self._begin(handle)
            self.epoll.register(handle.death_watch, select.EPOLLIN)
        for group in range(self.layout.groups):
            self.request(group)

    def _wait_until_ready(self) -> None:
        """Until every worker has made its environments; free once they have."""
        if self.started:
            return
        for worker in list(self.workers):
            try:
                worker.wait_ready(partial(self._heartbeat, worker.number))
            except ChildFailed:
                self._kill(worker)
        self.started = True
        if self.owner_core is not None:  # only this thread: elsewhere it would wait behind workers, which keep a core
            self.owner_cores = keep_to({self.owner_core})

    def _find_members(self) -> None:
        """Workers with rows of each group. Who has none does not count its steps, so it catches up when it might get
        some; nobody steps then."""
        numbers = range(self.layout.workers)
        self.members = [[w for w in numbers if self.rows[w][group]] for group in range(self.layout.groups)]
        self.exchange.requests[:] = self.exchange.requests.max(1, keepdims=True)
        self.exchange.dones[:] = self.exchange.requests

    def _squad_groups(self, number: int) -> list[int]:
        return groups_of_squad(number, self.layout, self.squads)

    def _worker_behind(self, death_watch: int) -> WorkerHandle:
        return next(worker for worker in self.workers if worker.death_watch == death_watch)

    def _replace_hung(self, groups: Sequence[int], heartbeats: np.ndarray) -> None:
        """Those that are late and have not taken a single step since they had those heartbeats."""
        exchange = self.exchange
        for worker in list(self.workers):
            number = worker.number
            late = any(exchange.request[group, number] != exchange.done[group, number] for group in groups)
            if late and exchange.heartbeat[number] == heartbeats[number]:
                self.report(f"env worker {worker.number} gave no step for {self.timeout:g} s; it is killed")
                self._kill(worker)

    def _kill(self, worker: WorkerHandle) -> None:
        """Replace a worker that is dead, dying or stuck."""
        worker.kill()
        self._replace(worker)

    def _replace(self, dead: WorkerHandle) -> None:
        """Name the death, then start a successor whose environments begin new episodes; one that dies while it starts
        is a death as well."""
        while True:
            self._note_death(dead)
            dead = self._successor(dead)
            self._begin(dead)
            try:
                dead.wait_ready(partial(self._heartbeat, dead.number))
            except ChildFailed:
                dead.kill()
            else:
                self.epoll.register(dead.death_watch, select.EPOLLIN)
                return


def groups_of_squad(worker: int, layout: Layout, squads: int) -> list[int]:
    """The groups of a worker's squad: squads of neighbours, and every squad-th group."""
    return list(range(worker * squads // layout.workers, layout.groups, squads))


def shares(groups: list[slice], workers: int, squads: int = 1) -> list[list[list[int]]]:
    """rows[worker][group]: contiguous parts; what is left over when a group does not divide goes to the workers after
    those that got more of the squad's group before, so that all hold as equal a number as can be."""
    rows: list[list[list[int]]] = [[[] for _ in groups] for _ in range(workers)]
    size = workers // squads
    turns = [0] * squads
    for number, group in enumerate(groups):
        squad = number % squads
        least, extra = divmod(group.stop - group.start, size)
        start = group.start
        for member in range(size):
            count = least + ((member - turns[squad]) % size < extra)
            rows[squad * size + member][number] = list(range(start, start + count))
            start += count
        turns[squad] += extra
    return rows

"""Env worker processes on one shared step buffer: how they are started, named when they die, asked and stopped.

`ProcessEnvs` (processes.py) is a pool whose workers step in lock step, `Agents` (agents.py) one whose workers wait for
nobody.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from phalanx.errors import RunError
from phalanx.runtime.child import STOP_TIMEOUT
from phalanx.runtime.deadline import Deadline
from phalanx.runtime.deaths import DIED, DeathBudget
from phalanx.sampling.exchange import WAKE, Exchange, Layout
from phalanx.sampling.handle import WorkerHandle
from phalanx.sampling.output import WorkerOutput
from phalanx.sampling.slot import EnvFactory, SlotRules
from phalanx.sampling.worker import Orders


class WorkerPool:
    """The processes, and the memory they share with their owner. What is asked of them is for the kind of pool."""

    free_running = False  # does each worker wake the owner after its own steps, without waiting for others?

    def __init__(
        self,
        factory: EnvFactory,
        workers: int,
        envs_per_worker: int,
        groups: int,
        rules: SlotRules | None,
        timeout: float,
        max_deaths: int,
        max_deaths_in_a_row: int,
        cores: list[int] | None,
        report: Callable[[str], None],
    ) -> None:
        self.factory = factory
        self.rules = rules or SlotRules()
        self.timeout = timeout
        self.budget = DeathBudget("env worker", workers, max_deaths, max_deaths_in_a_row)
        self.cores = cores
        self.report = report
        probe = factory(self.rules.first, 0)
        self.spec = probe.spec
        probe.close()
        self.layout = Layout(self.spec, workers * envs_per_worker, workers, groups)
        self.rows: list[list[list[int]]] = []  # by worker and group
        self.exchange = Exchange(self.layout)
        self.owner_wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.done_at_birth = np.zeros((workers, groups), np.int64)  # what `dones` said when a worker started
        self.output = WorkerOutput()
        self.births = 0  # incarnations so far; no seed is used twice
        self.closed = False
        self.end: Deadline | None = None  # by which workers that were told to leave must be gone
        self.workers: list[WorkerHandle] = []
        self.epoll = select.epoll()
        self.epoll.register(self.owner_wake, WAKE)

    def dismiss(self, end: Deadline) -> None:
        """Tell every worker to leave by then; `close` waits for them."""
        self.end = end
        for worker in self.workers:
            worker.say_goodbye()

    def close(self) -> None:
        """Stop every worker; twice does no harm. A worker that does not leave in time is killed."""
        if self.closed:
            return
        self.closed = True
        if self.end is None:
            self.dismiss(Deadline(STOP_TIMEOUT))
        assert self.end is not None
        for worker in self.workers:
            worker.join(self.end.left)
            os.close(worker.wake)
        self.output.close()
        os.close(self.owner_wake)
        self.epoll.close()
        self.exchange.close()

    def _squad_groups(self, number: int) -> list[int]:
        """The groups that a worker serves first."""
        return [0]

    def _orders(self, handle: WorkerHandle) -> Orders:
        cores = self.cores or None
        if cores is not None and len(cores) >= self.layout.workers:
            cores = [cores[handle.number]]
        return Orders(
            worker=handle.number,
            incarnation=handle.incarnation,
            factory=self.factory,
            layout=self.layout,
            rows=self.rows[handle.number],
            squad_groups=self._squad_groups(handle.number),
            rules=self.rules,
            cores=cores,
            memory=self.exchange.descriptor,
            wake=handle.wake,
            owner_wake=self.owner_wake,
            free_running=self.free_running,
        )

    def _ask_all(self, kind: str, questions: dict[int, Any]) -> list[Any]:
        """Ask several workers at once; one that is dead gives an error."""
        for number, content in questions.items():
            self.workers[number].tell((kind, content))
        return [self.workers[number].hear(partial(self._heartbeat, number)) for number in questions]

    def _heartbeat(self, number: int) -> float:
        return float(self.exchange.heartbeat[number])

    def _rows(self, worker: int) -> list[int]:
        """Every environment of a worker, in its own order."""
        return [row for rows in self.rows[worker] for row in rows]

    def _birth(self) -> int:
        self.births += 1
        return self.births

    def _begin(self, handle: WorkerHandle) -> None:
        """Start a worker's process; its environments are made while the owner goes on."""
        self.done_at_birth[handle.number] = self.exchange.dones[:, handle.number]
        try:
            handle.begin(self._orders(handle), self.output.writer)
        except OSError as error:
            if not handle.incarnation:
                raise
            raise RunError(f"env worker {handle.number} could not be replaced: {error}") from None

    def _successor(self, dead: WorkerHandle) -> WorkerHandle:
        """Takes the place of one whose death was noted; it is not started yet."""
        handle = self.workers[dead.number] = WorkerHandle(dead.number, self._birth(), dead.wake)
        return handle

    def _note_death(self, dead: WorkerHandle) -> None:
        """Report a death and count it, or end the run if it is one too many, or the environment cannot work at all."""
        dead.wait_for_death()
        rows, words = self._rows(dead.number), dead.last_words().strip()
        with contextlib.suppress(OSError, ValueError):  # closing is not enough, if somebody has forked meanwhile
            self.epoll.unregister(dead.death_watch)
        dead.release()
        if dead.failed_at_once:
            raise RunError(
                f"an environment of env worker {dead.number} ({rows}) failed before its first step:\n{words}"
            )
        actions = self.exchange.action[rows].tolist()
        self.report(
            f"env worker {dead.number} (environments {rows}, seed {self.rules.seed}, incarnation {dead.incarnation}, "
            f"last actions {actions}){DIED}{words}"
        )
        # The first request of a group begins an episode; only what comes after it is a step.
        steps = self.exchange.dones[:, dead.number] - self.done_at_birth[dead.number]
        exception = words if dead.has_confessed else ""
        self.budget.count(dead.number, did_something=bool((steps > 1).any()), exception=exception)

"""An env worker: a process that steps its rows of every group whenever the owner asks for it.

A child (`runtime/child.py`) that `sampling/handle.py` starts. It inherits the shared memory, its own wake-up descriptor
and one to wake the owner, and has a socket for what is rare: its orders, environment states, the traceback it dies
with. It sleeps on the socket too, so it notices at once when the owner is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.envs import Env
from phalanx.runtime.child import Parent
from phalanx.sampling.exchange import WAKE, Exchange, Layout
from phalanx.sampling.slot import EnvFactory, Slot, SlotRules

SLICE = 0.05  # seconds a worker runs before another one does that waits for the same core
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}  # numbers of a system call Python does not know


@dataclass(frozen=True)
class Orders:
    """What a worker is told when it starts."""

    worker: int
    incarnation: int
    factory: EnvFactory
    layout: Layout
    rows: list[list[int]]  # environments of each group
    squad_groups: list[int]  # of its squad; it may hold environments of other groups, to relieve a slow core
    rules: SlotRules
    cores: list[int] | None  # where it may run
    memory: int  # descriptors
    wake: int
    owner_wake: int
    free_running: bool = False  # wakes the owner after its own steps, without waiting for others


class Worker:
    """The rows of one worker and the loop that serves them."""

    def __init__(self, orders: Orders, parent: Parent) -> None:
        self.orders = orders
        self.parent = parent
        self.exchange = Exchange(orders.layout, orders.memory)
        self.number = orders.worker
        self.actions = self.exchange.action.data  # memoryviews: they give single numbers faster than numpy
        self.busy: Any = self.exchange.busy.data
        self.heartbeat = counter(self.exchange.heartbeat, self.number)
        self.serving: Slot | None = None  # whose environment is at work, or was the last to be
        self.groups = [
            [self._slot(index, group, orders.incarnation) for index in rows] for group, rows in enumerate(orders.rows)
        ]
        self.spares: list[Env] = []  # of environments that moved away
        self.squad_groups = list(orders.squad_groups)  # the longest waiting first
        self.extra_groups: list[int] = []
        self._find_extra_groups()
        self.epoll = select.epoll()
        self.epoll.register(orders.wake, WAKE)
        self.epoll.register(parent.control.fileno(), select.EPOLLIN)

    def _slot(self, index: int, group: int, incarnation: int) -> Slot:
        orders = self.orders
        env = orders.factory(orders.rules.first + index, incarnation)
        slot = Slot(index, env, self.exchange.step, orders.rules)
        slot.incarnation, slot.heartbeat = incarnation, self.heartbeat
        slot.requests = self.exchange.done[group, self.number]  # a successor counts on
        self.heartbeat()
        return slot

    def serve(self) -> None:
        """Step what was asked for; prepare resets while nothing is; sleep when nothing is left to do."""
        while True:
            if not self.serve_groups() and not self.use_idle_moment():
                self.sleep(None)

    def serve_groups(self) -> bool:
        """One pass over the groups, the longest waiting first; was anything asked for?"""
        started = time.perf_counter()
        served = bool(self.extra_groups) and self.serve_extra_groups()
        for group in tuple(self.squad_groups):
            if self.groups[group] and self._asked(group):
                self.serve_group(group)
                self.squad_groups.remove(group)
                self.squad_groups.append(group)
                served = True
        if served:
            self.busy[self.number] += time.perf_counter() - started
        return served

    def serve_extra_groups(self) -> bool:
        """The few environments held for other squads: these must not wait for a whole group of this one."""
        asked = [group for group in self.extra_groups if self._asked(group)]
        for group in asked:
            self.serve_group(group)
        return bool(asked)

    def serve_group(self, group: int) -> None:
        exchange, actions = self.exchange, self.actions
        for slot in self.groups[group]:
            self.serving = slot
            slot.advance(actions[slot.index])
            self.heartbeat()
            if self.extra_groups and group not in self.extra_groups:
                self.serve_extra_groups()
        exchange.done[group, self.number] += 1
        # the last one wakes the owner; should two miss each other, the owner looks again by itself
        if self.orders.free_running or exchange.finished(group):
            os.eventfd_write(self.orders.owner_wake, 1)

    def _asked(self, group: int) -> bool:
        return self.exchange.request[group, self.number] != self.exchange.done[group, self.number]

    def _find_extra_groups(self) -> None:
        self.extra_groups = [
            group for group, slots in enumerate(self.groups) if slots and group not in self.squad_groups
        ]

    def use_idle_moment(self) -> bool:
        """Prepare one environment's next reset; False when all are prepared."""
        slot = next((slot for group in self.groups for slot in group if not slot.prepared), None)
        if slot is None:
            return False
        self.serving = slot
        slot.prepare()
        self.sleep(0)
        return True

    def sleep(self, timeout: float | None) -> None:
        """Until the owner asks for a step or sends a message; exits when the owner is gone."""
        for descriptor, _ in self.epoll.poll(timeout):
            if descriptor != self.orders.wake:
                self.answer(*self.parent.hear())

    def answer(self, kind: str, content: Any) -> None:
        answers: dict[str, Callable[[Any], Any]] = {
            "state": self.state,
            "restore": self.restore,
            "give": self.give,
            "take": self.take,
        }
        self.parent.tell(answers[kind](content))

    def never_stepped(self) -> bool:
        """Has the environment that is at work never completed a step? Its forerunners' steps count as its own."""
        return self.serving is not None and self.serving.requests <= 1

    def slots(self) -> list[Slot]:
        return [slot for group in self.groups for slot in group]

    def state(self, _: None) -> dict[int, Any]:
        return {slot.index: slot.state() for slot in self.slots()}

    def restore(self, states: dict[int, Any]) -> bool:
        for slot in self.slots():
            slot.restore(states[slot.index])
            self.heartbeat()
        return True

    def give(self, indices: list[int]) -> dict[int, Any]:
        """Hand over environments to another worker; their simulators stay here as spares."""
        states = {}
        for group in self.groups:
            for slot in [slot for slot in group if slot.index in indices]:
                states[slot.index] = slot.state()
                self.spares.append(slot.env)
                group.remove(slot)
        self._find_extra_groups()
        return states

    def take(self, arrivals: list[tuple[int, int, Any]]) -> None:
        """Take over environments (index, group, state); one whose state was lost begins anew, with the incarnation that
        stands in its place."""
        for index, group, state in arrivals:
            if isinstance(state, int):
                slot = self._slot(index, group, state)
            else:
                env = self.spares.pop() if self.spares else self.orders.factory(self.orders.rules.first + index, 0)
                slot = Slot(index, env, self.exchange.step, self.orders.rules)
                slot.heartbeat = self.heartbeat
                slot.restore(state)
            self.groups[group].append(slot)
        self._find_extra_groups()


def counter(table: np.ndarray, place: int) -> Callable[[], None]:
    """Counts up a number in a table. No method of the worker: environments that knew it would outlive its end."""

    numbers = table.data

    def count() -> None:
        numbers[place] += 1

    return count


def stay_on_core() -> None:
    """A worker that wakes on the owner's core must not take it before the owner has woken the other workers; and one
    that shares its core with another must not be changed for it every few ms, as its caches are cold each time."""
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        call = SCHED_SETATTR.get(os.uname().machine)
        if call is not None:  # a Linux before 6.12 takes no notice of the slice
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            attributes = struct.pack("=IIQiIQQQ", 48, os.SCHED_BATCH, 0, nice, 0, int(SLICE * 1e9), 0, 0)
            ctypes.CDLL(None).syscall(call, 0, attributes, 0)


def keep_garbage_rare() -> None:
    """What is there by now stays, and steps leave no cycles behind: the usual search for garbage shows in a profile."""
    gc.freeze()
    gc.set_threshold(100_000)


def serve(orders: Orders, parent: Parent) -> None:
    """What a worker process does, from its orders to its end."""
    parent.failed_at_once = lambda: orders.incarnation == 0
    if orders.cores is not None:
        os.sched_setaffinity(0, orders.cores)
    stay_on_core()
    worker = Worker(orders, parent)
    keep_garbage_rare()
    parent.tell("ready")
    try:
        worker.serve()
    except BaseException:
        never_stepped = worker.never_stepped()
        parent.failed_at_once = lambda: never_stepped  # it must not know the worker, whose emulators would outlive it
        raise

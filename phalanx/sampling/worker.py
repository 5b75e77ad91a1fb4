"""An env worker: a process that steps its rows of every group whenever the owner asks for it.

Started by `sampling/processes.py` as `python -m phalanx.sampling.worker`, it inherits the shared memory, its own
wake-up descriptor, one per group to wake the owner, and a socket for what is rare: its orders, environment states,
the traceback it dies with. It sleeps in `poll` on the socket too, so it notices at once when the owner is gone.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

from phalanx.sampling.exchange import Exchange, Layout, worker_rows
from phalanx.sampling.serial import EnvFactory, Slot, SlotRules, group_slices


@dataclass(frozen=True)
class Orders:
    """What a worker is told when it starts."""

    worker: int
    incarnation: int
    factory: EnvFactory
    layout: Layout
    rules: SlotRules
    core: int | None
    memory: int  # descriptors
    wake: int
    owner_wakes: list[int]


class Worker:
    """The rows of one worker and the loop that serves them."""

    def __init__(self, orders: Orders, control: socket.socket) -> None:
        self.orders = orders
        self.control = control
        self.exchange = Exchange(orders.layout, orders.memory)
        layout = orders.layout
        self.groups = [
            [self._slot(index, group) for index in worker_rows(layout, rows, orders.worker)]
            for group, rows in enumerate(group_slices(layout.environments, layout.groups))
        ]
        self.slots = [slot for group in self.groups for slot in group]
        self.next_group = 0
        self.poll = select.poll()
        self.poll.register(orders.wake, select.POLLIN)
        self.poll.register(control.fileno(), select.POLLIN)

    def _slot(self, index: int, group: int) -> Slot:
        orders = self.orders
        slot = Slot(index, orders.factory(index, orders.incarnation), self.exchange.step, orders.rules)
        slot.incarnation = orders.incarnation
        slot.requests = int(self.exchange.done[orders.worker, group])  # a successor counts on
        return slot

    def serve(self) -> None:
        """Step what was asked for; prepare resets while nothing is; sleep when nothing is left to do."""
        while True:
            if not self.serve_groups() and not self.use_idle_moment():
                self.sleep(None)

    def serve_groups(self) -> bool:
        """One pass over the groups, the longest waiting first; was anything asked for?"""
        worker, exchange = self.orders.worker, self.exchange
        served = False
        for _ in self.groups:
            group = self.next_group
            self.next_group = (group + 1) % len(self.groups)
            if exchange.request[worker, group] == exchange.done[worker, group]:
                continue
            started = time.perf_counter()
            actions = exchange.action
            for slot in self.groups[group]:
                slot.advance(int(actions[slot.index]))
            exchange.busy[worker] += time.perf_counter() - started
            exchange.done[worker, group] += 1
            os.eventfd_write(self.orders.owner_wakes[group], 1)
            served = True
        return served

    def use_idle_moment(self) -> bool:
        """Prepare one environment's next reset; False when all are prepared."""
        for slot in self.slots:
            if not slot.prepared:
                slot.prepare()
                self.sleep(0)
                return True
        return False

    def sleep(self, timeout_ms: int | None) -> None:
        """Until the owner asks for a step or sends a message; exits when the owner is gone."""
        for descriptor, _ in self.poll.poll(timeout_ms):
            if descriptor == self.orders.wake:
                os.eventfd_read(descriptor)
            else:
                self.answer(receive(self.control))

    def answer(self, message: Any) -> None:
        if message is None:
            sys.exit(0)  # the owner closed the socket, or died
        kind, content = message
        if kind == "state":
            send(self.control, [slot.state() for slot in self.slots])
        elif kind == "restore":
            for slot, state in zip(self.slots, content, strict=True):
                slot.restore(state)
            send(self.control, None)


def send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(struct.pack("<Q", len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """The next message, or None when the other side is gone."""
    header = read_exactly(connection, 8)
    if header is None:
        return None
    data = read_exactly(connection, struct.unpack("<Q", header)[0])
    return None if data is None else pickle.loads(data)


def read_exactly(connection: socket.socket, size: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = connection.recv(min(size - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)


def die_with_parent() -> None:
    """Ask Linux to kill this process when the owner dies, should it hang in an environment at that moment."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):
        pass


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the owner decides
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        orders = receive(control)
        if orders is None:
            return
        if orders.core is not None:
            os.sched_setaffinity(0, {orders.core})
        worker = Worker(orders, control)
        send(control, "ready")
        worker.serve()
    except Exception:
        try:
            send(control, ("error", traceback.format_exc()))
        except OSError:
            pass
        sys.exit(1)


if __name__ == "__main__":
    main()

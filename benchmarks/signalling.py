"""What it costs to wake another process and be woken: the round trip of each way, on an idle and on a busy machine.

    python benchmarks/signalling.py

Two processes on two cores pass a token back and forth. Busy means that a third process wants every core.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable

import numpy as np

from phalanx.runtime.affinity import core_list

ROUNDS = 3000
Wait = Callable[[], object]


def eventfds() -> tuple[Wait, Wait, Wait, Wait]:
    there, back = os.eventfd(0), os.eventfd(0)
    return (
        lambda: os.eventfd_write(there, 1),
        lambda: os.eventfd_read(there),
        lambda: os.eventfd_write(back, 1),
        lambda: os.eventfd_read(back),
    )


def semaphores() -> tuple[Wait, Wait, Wait, Wait]:
    there, back = multiprocessing.Semaphore(0), multiprocessing.Semaphore(0)
    return there.release, there.acquire, back.release, back.acquire


def pipes() -> tuple[Wait, Wait, Wait, Wait]:
    (read_there, write_there), (read_back, write_back) = os.pipe(), os.pipe()
    return (
        lambda: os.write(write_there, b"x"),
        lambda: os.read(read_there, 1),
        lambda: os.write(write_back, b"x"),
        lambda: os.read(read_back, 1),
    )


def spinning(give_up: float) -> tuple[Wait, Wait, Wait, Wait]:
    """Counters in shared memory; after `give_up` seconds of looking the waiter sleeps on an eventfd."""
    counters = np.frombuffer(mmap.mmap(-1, 4096), np.int64)
    sleepers = [os.eventfd(0), os.eventfd(0)]

    def signal(which: int) -> Wait:
        def run() -> None:
            counters[which * 8] += 1
            os.eventfd_write(sleepers[which], 1)

        return run

    def wait(which: int) -> Wait:
        seen = 0

        def run() -> None:
            nonlocal seen
            end = time.perf_counter() + give_up
            while counters[which * 8] == seen and time.perf_counter() < end:
                pass
            while counters[which * 8] == seen:
                os.eventfd_read(sleepers[which])
            seen += 1

        return run

    return signal(0), wait(0), signal(1), wait(1)


def round_trip(make: Callable[[], tuple[Wait, Wait, Wait, Wait]], cores: list[int]) -> float:
    """Microseconds there and back, median of blocks."""
    signal_there, wait_there, signal_back, wait_back = make()
    child = os.fork()
    if child == 0:
        os.sched_setaffinity(0, {cores[1 % len(cores)]})
        for _ in range(ROUNDS):
            wait_there()
            signal_back()
        os._exit(0)
    os.sched_setaffinity(0, {cores[0]})
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        signal_there()
        wait_back()
        times.append(time.perf_counter() - started)
    os.waitpid(child, 0)
    os.sched_setaffinity(0, set(cores))
    return statistics.median(times) * 1e6


def hog() -> None:
    while True:
        pass


def main() -> None:
    cores = core_list()
    ways = {
        "eventfd": eventfds,
        "semaphore": semaphores,
        "pipe": pipes,
        "spin 50 us, then eventfd": lambda: spinning(50e-6),
        "spin 2 ms, then eventfd": lambda: spinning(2e-3),
    }
    for state in ("idle", "busy"):
        hogs = [multiprocessing.Process(target=hog, daemon=True) for _ in cores] if state == "busy" else []
        for process in hogs:
            process.start()
        for name, make in ways.items():
            print(f"{state}: {name:<26} {round_trip(make, cores):8.1f} us", flush=True)
        for process in hogs:
            process.kill()


if __name__ == "__main__":
    main()

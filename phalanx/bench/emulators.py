"""The limit of every sampler: bare emulators on as many cores, cycling under random actions without reading a pixel.

`phalanx bench` measures them beside everything else. They are made once and wait between measurements. Making an
emulator takes as long as hundreds of steps, so `python -m phalanx.bench.emulators GAME EMULATORS CORE...` makes them
for one core only and then forks for each of the cores. It answers each line of its input, a number of seconds, with
the steps per second of each process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from phalanx.errors import RunError
from phalanx.runtime.affinity import core_list
from phalanx.runtime.child import die_with_parent

FRAMES_PER_STEP = 4
PATIENCE = 120.0  # seconds for an answer, besides those measured
NOTICE = 0.02  # seconds between an order and the begin of its window: by then everyone has read it
FIRST_USE = 0.2  # seconds in which a forked process gets pages of its own


class BareEmulators:
    """So many processes with so many emulators each, one process to a core as far as there are enough."""

    def __init__(self, game: str, processes: int, emulators: int) -> None:
        cores = core_list()
        command = [sys.executable, "-m", "phalanx.bench.emulators", game, str(emulators)]
        self.process = subprocess.Popen(
            command + [str(cores[number % len(cores)]) for number in range(processes)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            self.speeds(FIRST_USE)
        except BaseException:
            self.close()
            raise

    def speeds(self, seconds: float) -> list[float]:
        """Steps per second by process, within the same window of time."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # its answer will be missed
            self.process.stdin.write(f"{seconds}\n".encode())
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        line = self.process.stdout.readline() if poll.poll((PATIENCE + seconds) * 1000) else b""
        if not line:
            raise RunError("the bare emulators gave no answer; what they say themselves stands above")
        speeds: list[float] = json.loads(line)
        return speeds

    def speed(self, seconds: float) -> float:
        return sum(self.speeds(seconds))

    def __enter__(self) -> BareEmulators:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Those that were forked die with it."""
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


def main() -> None:
    game, emulators, cores = sys.argv[1], int(sys.argv[2]), [int(core) for core in sys.argv[3:]]
    steps = cycle(game, emulators)
    next(steps)
    links = [fork(core, steps) for core in cores]
    for line in sys.stdin:
        begin = time.monotonic() + NOTICE
        window = begin, begin + float(line)
        for orders, _ in links:
            orders.write(json.dumps(window) + "\n")
            orders.flush()
        print(json.dumps([int(answers.readline()) / float(line) for _, answers in links]), flush=True)


def fork(core: int, steps: Iterator[None]) -> tuple[Any, Any]:
    """A process on that core with emulators of its own: where it reads its orders, and where it answers."""
    (their_orders, orders), (answers, their_answers) = os.pipe(), os.pipe()
    if os.fork():
        os.close(their_orders)
        os.close(their_answers)
        return os.fdopen(orders, "w"), os.fdopen(answers)
    die_with_parent()
    os.close(orders)
    os.close(answers)
    os.sched_setaffinity(0, {core})
    with os.fdopen(their_orders) as read, os.fdopen(their_answers, "w") as write:
        for line in read:
            begin, end = json.loads(line)
            time.sleep(max(0.0, begin - time.monotonic()))
            print(count(steps, end), file=write, flush=True)
    os._exit(0)


def count(steps: Iterator[None], end: float) -> int:
    """Steps until that time."""
    number = 0
    for _ in steps:
        if time.monotonic() >= end:
            break
        number += 1
    return number


def cycle(game: str, emulators: int) -> Iterator[None]:
    """One step after the other, of one emulator after the other."""
    from phalanx.envs.atari import emulator

    machines = []
    for _ in range(emulators):
        machine = emulator(game)
        machine.reset_game()
        machines.append((machine, machine.cloneState()))
    legal = machines[0][0].getMinimalActionSet()
    actions = itertools.cycle([legal[i] for i in np.random.default_rng(0).integers(len(legal), size=4096)])
    yield
    for (machine, start), action in zip(itertools.cycle(machines), actions, strict=False):
        for _ in range(FRAMES_PER_STEP):
            machine.act(action)
        if machine.game_over():
            machine.restoreState(start)
        yield


if __name__ == "__main__":
    main()

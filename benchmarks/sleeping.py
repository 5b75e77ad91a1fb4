"""What a pause costs besides its length: the time of a step after the core has slept, or has looked for work instead.

    python benchmarks/sleeping.py [game] [rounds]

One pinned process per core steps 16 environments as a worker does (104x80, raw screens) and pauses now and then. All
processes are in the same kind of window at the same time; only the time spent stepping counts.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time

import numpy as np

from phalanx.config import AtariConfig
from phalanx.registry import MakeEnv
from phalanx.runtime.affinity import core_list
from phalanx.sampling.serial import Slot, SlotRules, allocate_step
from phalanx.sampling.worker import keep_garbage_rare

ENVIRONMENTS = 16
WINDOW = 0.4  # seconds
KINDS = [  # steps between two pauses, milliseconds of a pause, does it sleep?
    (8, 0.0, False),
    (8, 0.5, True),
    (8, 0.5, False),
    (8, 2.0, True),
    (2, 0.3, True),
    (2, 0.3, False),
]


class Stepper:
    """The environments of one process."""

    def __init__(self, game: str) -> None:
        make = MakeEnv(AtariConfig(game, frame="104x80"), 0, raw=True)
        envs = [make(index) for index in range(ENVIRONMENTS)]
        step = allocate_step(envs[0].spec, ENVIRONMENTS)
        self.slots = [Slot(index, env, step, SlotRules()) for index, env in enumerate(envs)]
        for slot in self.slots:
            slot.begin()
        self.actions = np.random.default_rng(0).integers(envs[0].spec.actions, size=4096).tolist()
        self.count = 0

    def window(self, chunk: int, pause: float, sleeps: bool, end: float) -> float:
        """Microseconds of a step, until `end`."""
        busy, begun = 0.0, self.count
        while time.time() < end:
            started = time.perf_counter()
            for _ in range(chunk):
                self.slots[self.count % ENVIRONMENTS].advance(self.actions[self.count % 4096])
                self.count += 1
            paused = time.perf_counter()
            busy += paused - started
            if sleeps:
                time.sleep(pause)
            while time.perf_counter() - paused < pause:
                pass
        return busy / max(self.count - begun, 1) * 1e6


def process(core: int, game: str, rounds: int) -> None:
    """One process: a line with the medians over all rounds."""
    os.sched_setaffinity(0, {core})
    stepper, times = Stepper(game), [[] for _ in KINDS]
    keep_garbage_rare()
    print("ready", flush=True)
    start = float(sys.stdin.readline())
    for number in range(rounds * len(KINDS)):
        chunk, milliseconds, sleeps = KINDS[number % len(KINDS)]
        end = start + (number + 1) * WINDOW
        times[number % len(KINDS)].append(stepper.window(chunk, milliseconds / 1000, sleeps, end))
    print(*(statistics.median(kind) for kind in times), flush=True)


def main() -> None:
    game, rounds = (sys.argv[1:] + ["breakout", "10"][len(sys.argv) - 1 :])[:2]
    command = [sys.executable, __file__, "process"]
    started = [
        subprocess.Popen([*command, str(core), game, rounds], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for core in core_list()
    ]
    for child in started:
        assert child.stdout is not None
        child.stdout.readline()
    begin = time.time() + 0.2
    for child in started:
        assert child.stdin is not None
        child.stdin.write(f"{begin}\n")
        child.stdin.flush()
    limit = 60 + int(rounds) * len(KINDS) * WINDOW
    lines = [child.communicate(timeout=limit)[0] for child in started]
    results = np.array([[float(value) for value in line.split()] for line in lines])
    for (chunk, milliseconds, sleeps), mean in zip(KINDS, results.mean(0), strict=True):
        pause = (
            f"{chunk} steps, then {milliseconds} ms {'asleep' if sleeps else 'awake'}" if milliseconds else "no pause"
        )
        print(f"{pause:32s} {mean:6.1f} us a step, {mean - results[:, 0].mean():+.1f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["process"]:
        process(int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        main()

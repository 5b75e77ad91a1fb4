"""The limit of every sampler: bare emulators on as many cores, cycling under random actions without reading a pixel.

`phalanx bench` measures them beside everything else. They are made once and wait between measurements, because making
an emulator takes as long as hundreds of steps. `python -m phalanx.emulators GAME EMULATORS CORE` makes some in one
process, says so, and then answers each line of its input, a number of seconds, with its steps per second.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time

import numpy as np

from phalanx.errors import RunError
from phalanx.runtime.affinity import core_list

FRAMES_PER_STEP = 4
PATIENCE = 120.0  # seconds for an answer, besides those measured


class BareEmulators:
    """So many processes with so many emulators each, one process to a core as far as there are enough."""

    def __init__(self, game: str, processes: int, emulators: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        cores = core_list()
        try:
            for number in range(processes):
                self.processes.append(_start(game, emulators, cores[number % len(cores)]))
            for process in self.processes:
                _line(process, PATIENCE)
        except BaseException:
            self.close()
            raise

    def speeds(self, seconds: float) -> list[float]:
        """Steps per second by process; all begin together."""
        for process in self.processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # `_line` will miss its answer
                process.stdin.write(f"{seconds}\n".encode())
        return [float(_line(process, PATIENCE + seconds)) for process in self.processes]

    def speed(self, seconds: float) -> float:
        return sum(self.speeds(seconds))

    def __enter__(self) -> BareEmulators:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.communicate(timeout=PATIENCE)


def _start(game: str, emulators: int, core: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx.emulators", game, str(emulators), str(core)],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def _line(process: subprocess.Popen[bytes], limit: float) -> bytes:
    """The next line a process prints; an error if it ends, or takes too long."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    answered = poll.poll(limit * 1000)
    line = process.stdout.readline() if answered else b""
    if not line:
        raise RunError("the bare emulators gave no answer; what they say themselves stands above")
    return line


def main() -> None:
    from phalanx.envs.atari import emulator

    game, emulators, core = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    os.sched_setaffinity(0, {core})
    machines, starts = [], []
    for _ in range(emulators):
        machine = emulator(game)
        machine.reset_game()
        machines.append(machine)
        starts.append(machine.cloneState())
    legal = machines[0].getMinimalActionSet()
    actions = [legal[i] for i in np.random.default_rng(0).integers(len(legal), size=4096)]
    print("ready", flush=True)
    count = 0
    for line in sys.stdin:
        first, begin = count, time.perf_counter()
        end = begin + float(line)
        while time.perf_counter() < end:
            for machine, start in zip(machines, starts, strict=True):
                action = actions[count % 4096]
                for _ in range(FRAMES_PER_STEP):
                    machine.act(action)
                if machine.game_over():
                    machine.restoreState(start)
                count += 1
        print((count - first) / (time.perf_counter() - begin), flush=True)


if __name__ == "__main__":
    main()

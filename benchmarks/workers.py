"""Where a worker's time goes: emulator alone, then env workers of several kinds, side by side.

    python benchmarks/workers.py [game] [workers] [environments per worker] [seconds]
"""

from __future__ import annotations

import dataclasses
import sys
import time

import numpy as np

from phalanx.bench import emulator_speeds
from phalanx.config import AtariConfig
from phalanx.registry import MakeEnv
from phalanx.runtime.affinity import core_list
from phalanx.sampling.processes import ProcessEnvs


def speed(
    config: AtariConfig, workers: int, per_worker: int, groups: int, raw: bool, first_core: int | None, seconds: float
) -> float:
    cores = None if first_core is None else core_list()[first_core : first_core + workers]
    envs = ProcessEnvs(MakeEnv(config, 0, raw), workers, per_worker, groups, cores=cores)
    actions = np.random.default_rng(0).integers(envs.spec.actions, size=(4096, workers * per_worker))
    count = 0
    try:
        for group, rows in enumerate(envs.groups):
            envs.recv(group)
            envs.send(group, actions[0, rows])
        begin = time.perf_counter()
        while time.perf_counter() - begin < 1.5:  # warm-up
            for group, rows in enumerate(envs.groups):
                envs.recv(group)
                envs.send(group, actions[0, rows])
        envs.exchange.busy[:] = 0
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for group, rows in enumerate(envs.groups):
                envs.recv(group)
                envs.send(group, actions[count % 4096, rows])
            count += 1
        wall = time.perf_counter() - begin
        busy = np.sort(envs.exchange.busy / wall)
        print(f"    busy share of workers: min {busy[0]:.2f} median {np.median(busy):.2f} max {busy[-1]:.2f}")
        return count * workers * per_worker / wall
    finally:
        envs.close()


def main() -> None:
    game = sys.argv[1] if len(sys.argv) > 1 else "breakout"
    workers, per_worker = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 3 else (len(core_list()), 8)
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 4.0
    small = AtariConfig(game, frame="104x80")
    large = dataclasses.replace(small, frame="84x84")
    reserve = len(core_list()) - workers
    emulator(game, workers, per_worker, seconds)
    for name, config, groups, raw, first in [
        ("104x80, 1 group, pinned", small, 1, False, reserve),
        ("104x80, 2 groups, pinned", small, 2, False, reserve),
        ("104x80, 2 groups, not pinned", small, 2, False, None),
        ("104x80, 2 groups, pinned, raw", small, 2, True, reserve),
        ("84x84, 2 groups, pinned", large, 2, False, reserve),
        ("84x84, 2 groups, pinned, raw", large, 2, True, reserve),
        ("104x80, 4 groups, pinned, raw", small, 4, True, reserve),
    ]:
        print(f"{name}: {speed(config, workers, per_worker, groups, raw, first, seconds):,.0f}", flush=True)
    emulator(game, workers, per_worker, seconds)


def emulator(game: str, workers: int, per_worker: int, seconds: float) -> None:
    speeds = sorted(emulator_speeds(game, workers, per_worker, seconds))
    print(f"emulator alone: {sum(speeds):,.0f}, by process {[round(speed) for speed in speeds]}", flush=True)


if __name__ == "__main__":
    main()

"""Where a worker's time goes: emulator alone, then env workers of several kinds, side by side.

python benchmarks/workers.py [game] [workers] [environments per worker] [seconds]
"""

from __future__ import annotations

import dataclasses
import sys
import time

import numpy as np

from phalanx.bench.emulators import BareEmulators
from phalanx.config import AtariConfig
from phalanx.registry import MakeEnv
from phalanx.runtime.affinity import core_list
from phalanx.sampling.processes import ProcessEnvs


def speed(
    config: AtariConfig, workers: int, per_worker: int, groups: int, raw: bool, balanced: bool, seconds: float
) -> float:
    """Steps per second under random actions; with or without balancing."""
    cores = core_list()[len(core_list()) - workers :]
    balance = 1.0 if balanced else 0.0
    envs = ProcessEnvs(MakeEnv(config, 0, raw), workers, per_worker, groups, cores=cores, balance=balance)
    actions = np.random.default_rng(0).integers(envs.spec.actions, size=(4096, workers * per_worker))

    def run(seconds: float) -> float:
        count, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for group, rows in enumerate(envs.groups):  # a rollout of 32 steps, then a moment of rest
                envs.send(group, actions[count % 4096, rows])
            for _ in range(31):
                count += 1
                for group, rows in enumerate(envs.groups):
                    envs.recv(group)
                    envs.send(group, actions[count % 4096, rows])
            count += 1
            for group in range(groups):
                envs.recv(group)
            envs.balance()
        return count * workers * per_worker / (time.perf_counter() - begin)

    try:
        for group in range(groups):
            envs.recv(group)
        run(5.0)
        envs.exchange.busy[:] = 0
        envs.speeds.looked(envs.exchange.busy)
        begin = time.perf_counter()
        result = run(seconds)
        busy = np.sort(envs.exchange.busy / (time.perf_counter() - begin))
        counts = sorted(sum(len(group) for group in worker) for worker in envs.rows)
        print(f"    busy: min {busy[0]:.2f} median {np.median(busy):.2f} max {busy[-1]:.2f}; environments {counts}")
        return result
    finally:
        envs.close()


def main() -> None:
    game = sys.argv[1] if len(sys.argv) > 1 else "breakout"
    workers, per_worker = (int(sys.argv[2]), int(sys.argv[3])) if len(sys.argv) > 3 else (len(core_list()), 8)
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 4.0
    small = AtariConfig(game, frame="104x80")
    large = dataclasses.replace(small, frame="84x84")
    emulator(game, workers, per_worker, seconds)
    for name, config, groups, raw, balanced in [
        ("104x80, 1 group", small, 1, False, False),
        ("104x80, 2 groups", small, 2, False, False),
        ("104x80, 2 groups, balanced", small, 2, False, True),
        ("104x80, 2 groups, balanced, raw", small, 2, True, True),
        ("84x84, 2 groups, balanced", large, 2, False, True),
        ("84x84, 2 groups, balanced, raw", large, 2, True, True),
    ]:
        print(f"{name}: {speed(config, workers, per_worker, groups, raw, balanced, seconds):,.0f}", flush=True)
    emulator(game, workers, per_worker, seconds)


def emulator(game: str, workers: int, per_worker: int, seconds: float) -> None:
    with BareEmulators(game, workers, per_worker) as emulators:
        speeds = sorted(emulators.speeds(seconds))
    print(f"emulator alone: {sum(speeds):,.0f}, by process {[round(speed) for speed in speeds]}", flush=True)


if __name__ == "__main__":
    main()

"""Resident memory of a full replay: 1,000,000 frames of 84x84, filled through the code that training uses.

python benchmarks/replay_memory.py [--frames N] [--environments B] [--prioritized]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from phalanx.config import DQNConfig
from phalanx.replay.memory import make_replay
from phalanx.types import EnvSpec, Rollout

SPEC = EnvSpec(frame_shape=(1, 84, 84), frame_dtype=np.uint8, actions=4, frames_per_step=4)
STACK, HORIZON, BATCH = 4, 100, 32
GAME_STEPS = 200  # every environment ends a game about so often


def main() -> int:
    """Fill the memory, draw from it, print what it takes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="steps remembered")
    parser.add_argument("--environments", type=int, default=16, help="simulators")
    parser.add_argument("--prioritized", action="store_true", help="with the tree of priorities")
    options = parser.parse_args()

    rollout = random_rollout(options.environments)
    before = resident_bytes()
    config = DQNConfig(replay_size=options.frames, prioritized=options.prioritized)
    replay = make_replay(config, SPEC, STACK, options.environments, torch.device("cpu"))
    start, rollouts = time.perf_counter(), -(-options.frames // (HORIZON * options.environments))
    for _ in range(rollouts):
        replay.put(rollout)
    put_rate = rollouts * HORIZON * options.environments / (time.perf_counter() - start)
    taken = resident_bytes() - before

    draws, generator, start = 500, torch.Generator().manual_seed(0), time.perf_counter()
    for _ in range(draws):
        replay.draw(BATCH, 1.0, generator)
    draw_rate = draws / (time.perf_counter() - start)

    stacked = replay.size * 2 * STACK * int(np.prod(SPEC.frame_shape))
    print(f"steps stored              {replay.size:,}")
    print(f"resident memory           {taken / 1e9:.2f} GB ({taken / replay.size:,.0f} bytes per step)")
    print(f"with two stacks per step  {stacked / 1e9:.2f} GB, which is {stacked / taken:.1f} times as much")
    print(f"steps put per second      {put_rate:,.0f}")
    print(f"batches of {BATCH} per second  {draw_rate:,.0f}")
    return 0


def random_rollout(environments: int, horizon: int = HORIZON, seed: int = 0) -> Rollout:
    """Noise instead of pixels: no page can be shared or compressed away."""
    rng = torch.Generator().manual_seed(seed)
    shape = (horizon, environments)
    no = torch.zeros(shape, dtype=torch.bool)
    return Rollout(
        frames=torch.randint(
            256, (STACK - 1 + horizon + 1, environments, *SPEC.frame_shape), dtype=torch.uint8, generator=rng
        ),
        history=torch.full((horizon + 1, environments), STACK, dtype=torch.uint8),
        action=torch.randint(SPEC.actions, shape, generator=rng),
        log_prob=torch.zeros(shape),
        value=torch.zeros(horizon + 1, environments),
        reward=torch.randn(shape, generator=rng),
        terminated=torch.rand(shape, generator=rng) < 1 / GAME_STEPS,
        truncated=no,
        last_value=torch.zeros(shape),
        cut=no,
        version=torch.zeros(shape, dtype=torch.int64),
    )


def resident_bytes() -> int:
    """Memory of this process that is really there."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmRSS")


if __name__ == "__main__":
    sys.exit(main())

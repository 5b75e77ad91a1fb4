"""What priorities cost: a prioritised draw and the update of its priorities beside a uniform draw, from a full memory.

python benchmarks/replay_draw.py [--frames N] [--batch N] [--rounds N]

Both indices lie over one memory of 1,000,000 frames of 84x84 and are measured in turn; medians of the rounds. `index`
is the choice of the rows alone, `with reading` also gathers both stacks of every row, as a training step does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replay_memory import SPEC, STACK, random_rollout

from phalanx.config import DQNConfig
from phalanx.learning.learner import materialise
from phalanx.replay.indexing import PrioritizedIndex
from phalanx.replay.memory import Replay, make_replay

ENVIRONMENTS = 16
EXPONENT, IMPORTANCE = 0.5, 0.4
CALLS = 40  # per round


def main() -> int:
    """Fill, measure in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="steps remembered")
    parser.add_argument("--batch", type=int, default=512, help="rows per draw")
    parser.add_argument("--rounds", type=int, default=15, help="times each is measured")
    options = parser.parse_args()

    device = torch.device("cpu")
    uniform = make_replay(DQNConfig(replay_size=options.frames), SPEC, STACK, ENVIRONMENTS, device)
    rows = uniform.storage.rows
    prioritized = Replay(uniform.storage, PrioritizedIndex(rows, EXPONENT, "max", device))
    rollout = random_rollout(ENVIRONMENTS)
    while uniform.size < rows:
        uniform.put(rollout)
    generator = torch.Generator().manual_seed(0)
    prioritized.index.move(uniform.storage.drawable, uniform.storage.cut.view(-1))
    spread_priorities(prioritized, generator)
    priorities = torch.rand(options.batch, generator=generator)

    def draw(memory: Replay) -> torch.Tensor:
        chance = torch.rand(options.batch, generator=generator, dtype=torch.float64)
        return memory.index.draw(chance, IMPORTANCE)[0]

    def with_feedback() -> None:
        ids = draw(prioritized)
        prioritized.index.update(ids, priorities)

    def drawn_with_feedback() -> None:
        batch = materialise(prioritized.draw(options.batch, IMPORTANCE, generator))
        prioritized.feedback(batch.ids, priorities)

    cases: dict[tuple[str, str], Callable[[], object]] = {
        ("index", "uniform"): lambda: draw(uniform),
        ("index", "prioritised"): with_feedback,
        ("with reading", "uniform"): lambda: uniform.draw(options.batch, IMPORTANCE, generator),
        ("with reading", "prioritised"): drawn_with_feedback,
    }
    times = measure(cases, options.rounds)
    print(f"{uniform.size:,} steps, batches of {options.batch}, {torch.get_num_threads()} torch threads")
    for kind in ("index", "with reading"):
        plain, costly = times[kind, "uniform"], times[kind, "prioritised"]
        print(f"{kind:13} uniform {plain * 1e3:.2f} ms, prioritised {costly * 1e3:.2f} ms, ratio {costly / plain:.2f}")
    return 0


def spread_priorities(replay: Replay, generator: torch.Generator) -> None:
    """Give every row a priority of its own, as after long training."""
    ids = torch.arange(replay.storage.drawable.start, replay.storage.drawable.stop)
    replay.feedback(ids, torch.rand(len(ids), generator=generator))


def measure(cases: dict[tuple[str, str], Callable[[], object]], rounds: int) -> dict[tuple[str, str], float]:
    """Seconds per call of each, in turn; medians."""
    found: dict[tuple[str, str], list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            started = time.perf_counter()
            for _ in range(CALLS):
                call()
            found[name].append((time.perf_counter() - started) / CALLS)
    return {name: statistics.median(values) for name, values in found.items()}


if __name__ == "__main__":
    sys.exit(main())

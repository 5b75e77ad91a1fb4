"""The longest stop of a training loop while a checkpoint with a full replay memory is written in the background.

python benchmarks/replay_save.py [--frames N] [--directory D]

A memory of 1,000,000 frames of 84x84 is filled, a checkpoint is begun as a run begins it, and the loop of training
goes on without its network: rollouts are put, batches are drawn. Then the checkpoint is loaded into a fresh memory,
whose contents must be those of the moment at which the checkpoint was begun. The files are removed at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from replay_memory import SPEC, STACK, random_rollout

from phalanx.config import DQNConfig
from phalanx.replay.memory import Replay, make_replay
from phalanx.replay.storage import TABLES, ring_slices
from phalanx.runs.background import BackgroundWriter
from phalanx.runs.checkpoint import Checkpoints

ENVIRONMENTS, HORIZON, BATCH = 16, 4, 32
BATCHES = 16  # per rollout: each step is learnt from 8 times
QUIET_SECONDS = 5.0
FRESH_ROLLOUTS = 8  # put in turn while the checkpoint is written


class Loop:
    """What training does with its memory, without the network; remembers the longest call."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay
        self.rollouts = [random_rollout(ENVIRONMENTS, HORIZON, seed) for seed in range(1, 1 + FRESH_ROLLOUTS)]
        self.generator = torch.Generator().manual_seed(0)
        self.iterations = 0
        self.seconds = 0.0
        self.longest = (0.0, "")

    def run(self, goes_on: Callable[[], bool]) -> None:
        started = time.perf_counter()
        while goes_on():
            rollout = self.rollouts[self.iterations % FRESH_ROLLOUTS]
            self._timed("put", lambda rollout=rollout: self.replay.put(rollout))
            for _ in range(BATCHES):
                self._timed("draw", lambda: self.replay.draw(BATCH, 1.0, self.generator))
            self.iterations += 1
            self.seconds = time.perf_counter() - started

    def _timed(self, name: str, call: Callable[[], object]) -> None:
        started = time.perf_counter()
        call()
        self.longest = max(self.longest, (time.perf_counter() - started, name))

    def describe(self) -> str:
        rate = self.iterations * ENVIRONMENTS * HORIZON / self.seconds
        return f"{self.longest[0] * 1e3:,.0f} ms (a {self.longest[1]}), at {rate:,.0f} steps/s"


def main() -> int:
    """Fill, save while the loop goes on, restore, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="steps remembered")
    parser.add_argument("--directory", default=None, help="where the checkpoint is written for a while")
    options = parser.parse_args()
    torch.set_num_threads(1)

    replay, restored = full_memory(options.frames), empty_memory(options.frames)
    quiet, saving = Loop(replay), Loop(replay)
    quiet.run(lambda: quiet.seconds < QUIET_SECONDS)
    expected = digest(replay)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        checkpoints = Checkpoints(Path(directory), keep=1)
        writer = BackgroundWriter(checkpoints)
        started = time.perf_counter()
        state, saver = replay.state(), replay.saver()
        assert saver is not None
        writer.write({"weight": torch.zeros(1)}, state, 1, None, saver)
        begun = time.perf_counter() - started
        saving.run(lambda: writer.busy)
        writer.finish()
        saved = time.perf_counter() - started
        size = sum(path.stat().st_size for path in Path(directory).rglob("replay-*"))
        started = time.perf_counter()
        loaded = checkpoints.load()
        restored.restore(loaded.state, loaded.path)
        restoring = time.perf_counter() - started
    same = digest(restored) == expected and digest(replay) != expected

    print(f"saved                        {size / 1e9:.2f} GB in {saved:.1f} s, loaded in {restoring:.1f} s")
    print(f"the save was begun within    {begun * 1e3:.1f} ms")
    print(f"longest stop without a save  {quiet.describe()}")
    print(f"longest stop during the save {saving.describe()}")
    print(f"the restored memory is {'' if same else 'NOT '}that of the moment at which the save began")
    return 0 if same else 1


def empty_memory(frames: int) -> Replay:
    config = DQNConfig(replay_size=frames, checkpoint_replay=True)
    return make_replay(config, SPEC, STACK, ENVIRONMENTS, torch.device("cpu"))


def full_memory(frames: int) -> Replay:
    replay, rollout = empty_memory(frames), random_rollout(ENVIRONMENTS)
    while replay.size < replay.storage.rows:
        replay.put(rollout)
    return replay


def digest(replay: Replay) -> str:
    """Of everything stored, from the oldest step to the newest."""
    storage, result = replay.storage, hashlib.sha256()
    for name in TABLES:
        for rows in ring_slices(range(storage.written - storage.filled, storage.written), storage.length):
            for part in getattr(storage, name)[rows].split(64):
                result.update(part.contiguous().view(-1).view(torch.uint8).numpy())
    return result.hexdigest()


if __name__ == "__main__":
    sys.exit(main())

"""The replay memory: the experience that value-based algorithms draw from, and how far it is from being full enough."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from phalanx.config import DQNConfig, Experiment
from phalanx.deferred import DeferredBatch
from phalanx.errors import require
from phalanx.replay.indexing import Index, PrioritizedIndex, UniformIndex, index_bytes
from phalanx.replay.storage import FrameStorage, frame_bytes, free_bytes, storage_bytes
from phalanx.seams import Saver
from phalanx.types import EnvSpec, ReplayBatch, Rollout

RESERVE = 2 << 30  # bytes of a GPU left to networks, rollouts and graphs; of page-locked host memory to all others
FRAMES_ON_HOST = "frames lie in page-locked memory of the host, as the GPU has no room for them"
ADVICE = "lower algorithm.replay_size"


@dataclass
class DrawnRows(DeferredBatch):
    """A batch of a memory before it is known which rows it has: that depends on the priorities when it is gathered."""

    INPUTS: ClassVar = ("uniform", "importance_exponent")

    uniform: Tensor  # [N], drawn from [0, 1)
    importance_exponent: Tensor
    memory: Replay

    def __getitem__(self, rows: slice) -> DrawnRows:
        """Some of them; prioritised ones are drawn from equal parts of the whole batch, which cannot be divided."""
        return replace(self, uniform=self.uniform[rows])

    def gather(self) -> ReplayBatch:
        return self.memory.read(self.uniform, self.importance_exponent)

    def addresses(self) -> tuple[int, ...]:
        """Of the memory's tables only that of truncated episodes' last frames grows."""
        table = self.memory.storage.last_frames
        return id(self.memory), table.data_ptr(), len(table)

    def feedback(self, ids: Tensor, priorities: Tensor) -> None:
        self.memory.feedback(ids, priorities)

    def mutated_tensors(self) -> list[Tensor]:
        return self.memory.index.mutated_tensors()


class Replay:
    """A memory of many rollouts: the storage holds the rows, the index chooses among them."""

    def __init__(self, storage: FrameStorage, index: Index, checkpointed: bool = True) -> None:
        self.storage = storage
        self.index = index
        self.checkpointed = checkpointed  # is the memory part of the state?

    @property
    def size(self) -> int:
        """Rows stored."""
        return self.storage.filled * self.storage.environments

    def ready(self, rows: int) -> bool:
        """Are so many rows stored (or as many as fit), and can one be drawn?"""
        return self.size >= min(rows, self.storage.rows) and len(self.index) > 0

    def put(self, rollout: Rollout) -> None:
        self.storage.put(rollout)
        self._move()

    def mark_gap(self) -> None:
        """The next rollout does not continue the last one: environments began anew."""
        self.storage.mark_gap()

    def draw(self, batch_size: int, importance_exponent: float, generator: torch.Generator) -> ReplayBatch | DrawnRows:
        """A batch drawn from memory; the exponent 1 undoes the bias of prioritised draws. For a GPU it is drawn later,
        as part of the update."""
        if len(self.index) == 0:
            raise RuntimeError("nothing can be drawn yet")
        device = self.storage.device
        uniform = torch.rand(batch_size, generator=generator, device=device, dtype=torch.float64)
        if self.storage.may_look:
            return self.read(uniform, importance_exponent)
        return DrawnRows(uniform, torch.full((), importance_exponent, device=device, dtype=torch.float64), self)

    def read(self, uniform: Tensor, importance_exponent: float | Tensor) -> ReplayBatch:
        """The rows that such numbers lead to now."""
        return self.storage.read(*self.index.draw(uniform, importance_exponent))

    def feedback(self, ids: Tensor, priorities: Tensor) -> None:
        self.index.update(ids, priorities)

    def state(self) -> dict[str, Any]:
        """What is small of the memory, or nothing if it is not part of checkpoints."""
        return {"storage": self.storage.state(), "index": self.index.state()} if self.checkpointed else {}

    def saver(self) -> Saver | None:
        """Writes the large part into a checkpoint's directory."""
        return self.storage.saver() if self.checkpointed else None

    def restore(self, state: dict[str, Any], directory: Path) -> None:
        """Fill a fresh memory; without a saved one it stays empty."""
        if state:
            self.storage.restore(state["storage"], directory)
            self._move()
            self.index.restore(state["index"])

    def _move(self) -> None:
        self.index.move(self.storage.drawable, self.storage.cut.view(-1))


def replay_bytes(config: DQNConfig, spec: EnvSpec, environments: int) -> int:
    """Of a full memory, rows and index."""
    rows = config.replay_size // environments * environments
    return storage_bytes(spec, environments, config.replay_size) + index_bytes(rows, config.prioritized)


def frames_on_host(config: DQNConfig, spec: EnvSpec, environments: int, device: torch.device) -> bool:
    """Must the frames, nearly all of a memory, lie in page-locked memory of the host because the device has no room?
    A memory that fits nowhere is refused, before anything is allocated."""
    frames = frame_bytes(spec, environments, config.replay_size)
    needed = replay_bytes(config, spec, environments)
    host = free_bytes(torch.device("cpu"))
    if device.type == "cpu":
        free = f"{gigabytes(host)} are free"
        require(needed <= host, f"the replay memory needs {gigabytes(needed)}, but {free}; {ADVICE}")
        return False
    here, host = free_bytes(device) - RESERVE, host - RESERVE
    if needed <= here:
        return False
    split = f"{gigabytes(frames)} of the host and {gigabytes(needed - frames)} of the GPU"
    require(
        needed - frames <= here and frames <= host,
        f"the replay memory needs {gigabytes(needed)} of the GPU, or {split}, but {gigabytes(here)} of the GPU and "
        f"{gigabytes(host)} of the host are free ({gigabytes(RESERVE)} of each are left to everything else); {ADVICE}",
    )
    return True


def gigabytes(size: int) -> str:
    return f"{max(size, 0) / 1e9:.2f} GB"


def make_replay(config: DQNConfig, spec: EnvSpec, stack: int, environments: int, device: torch.device) -> Replay:
    """The memory a configuration describes."""
    rows = config.replay_size // environments * environments
    on_host = frames_on_host(config, spec, environments, device)
    storage = FrameStorage(
        spec, stack, environments, config.replay_size, config.n_step, config.discount, device, on_host
    )
    index: Index = UniformIndex(rows, device)
    if config.prioritized:
        index = PrioritizedIndex(rows, config.priority_exponent, config.new_priority, device)
    return Replay(storage, index, config.checkpoint_replay)


def make_memory(experiment: Experiment, spec: EnvSpec, environments: int, device: torch.device) -> Replay:
    assert isinstance(experiment.algorithm, DQNConfig)
    return make_replay(experiment.algorithm, spec, experiment.env.stack, environments, device)


class WarmUp:
    """How far a memory is from being learnt from: at the start, and after a resume without it. The replica tells the
    session."""

    def __init__(self, config: DQNConfig, spec: EnvSpec, memory: Replay) -> None:
        self.starts = config.learning_starts
        self.memory = memory
        self.bytes = replay_bytes(config, spec, memory.storage.environments)

    def missing(self, steps: int) -> int:
        """Steps still to be collected before the memory is learnt from, when `steps` were."""
        return max(0, self.starts - steps, min(self.starts, self.memory.storage.rows) - self.memory.size)

    def numbers(self, steps: int) -> dict[str, float]:
        """For a record: the share of those steps that is done, until all are."""
        missing = self.missing(steps)
        return {"warmup": (self.starts - missing) / self.starts} if missing else {}

    def sentence(self, steps: int) -> str:
        """What the memory takes, and when learning will start, or go on."""
        storage = self.memory.storage
        sentence = f"the replay memory of {storage.rows:,} steps takes up to {self.bytes / 1e9:.2f} GB"
        if storage.frames_on_host:
            sentence += f"; its {FRAMES_ON_HOST}"
        if missing := self.missing(steps):
            sentence += f"; learning {'goes on' if steps else 'starts'} after {missing:,} steps"
        return sentence

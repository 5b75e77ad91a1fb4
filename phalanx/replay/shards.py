"""Global replay: a memory in shards, which actors write to and learners draw from (Gorila).

    actor -> put(actor, number, rollout) -> ReplayShard: a memory for each of its actors
    learner <- rows, in proportion to what each shard holds <- ReplayShard   (SharedMemory is the learner's side)

Rows are drawn uniformly from all shards, or by priority: then in proportion to the sum of priorities that a shard
holds, and within it likewise, so that a row's chance does not depend on where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.config import DQNConfig
from phalanx.replay.indexing import PrioritizedIndex
from phalanx.replay.memory import Replay, make_replay
from phalanx.types import EnvSpec, ReplayBatch, Rollout

ACTOR_SHIFT = 40  # bits of an id within the memory of one actor
ID_MASK = (1 << ACTOR_SHIFT) - 1


class EmptyReplayError(Exception):
    """Shards have nothing that could be drawn: all of them died just now, and fill again."""


class Holding(NamedTuple):
    """What a shard has."""

    rows: int  # stored
    mass: float  # of all rows that can be drawn: their number, or the sum of their priorities


class ReplayShard:
    """Holds the rollouts of some actors. Plain Python: `phalanx/cluster` puts it into a process of its own."""

    def __init__(self, config: DQNConfig, spec: EnvSpec, stack: int, environments: int, seed: int) -> None:
        self.config = config  # with the memory that each actor has
        self.spec = spec
        self.stack = stack
        self.environments = environments  # of an actor
        self.memories: dict[int, Replay] = {}
        self.numbers: dict[int, int] = {}  # of the newest rollout of each actor
        self.generator = torch.Generator().manual_seed(seed)

    def put(self, actor: int, number: int, arrays: dict[str, Any], last_frames: dict[tuple[int, int], Any]) -> Holding:
        """The next rollout of an actor. If one is missing, or the actor is another one now, nothing is learnt across
        the gap."""
        if actor not in self.memories:
            device = torch.device("cpu")
            self.memories[actor] = make_replay(self.config, self.spec, self.stack, self.environments, device)
        memory = self.memories[actor]
        if number != self.numbers.get(actor, -1) + 1:
            memory.mark_gap()
        self.numbers[actor] = number
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
        frames = {key: torch.from_numpy(np.array(array)) for key, array in last_frames.items()}
        memory.put(Rollout(**tensors, last_frames=frames))
        return self.holding()

    def holding(self) -> Holding:
        return Holding(sum(memory.size for memory in self.memories.values()), sum(self._masses().values()))

    def draw(self, rows: int) -> tuple[Holding, dict[str, np.ndarray], np.ndarray]:
        """So many rows, as arrays, and the mass of each. No more are drawn from any memory than fall to it."""
        masses = self._masses()
        actors = [actor for actor, mass in masses.items() if mass > 0]
        if not actors:
            return self.holding(), {}, np.empty(0)
        weights = torch.tensor([masses[actor] for actor in actors], dtype=torch.float64)
        chosen = torch.multinomial(weights, rows, replacement=True, generator=self.generator)
        parts, rows_mass = [], []
        for place, actor in enumerate(actors):
            count = int((chosen == place).sum())
            if count:
                batch, mass = self._draw_from(self.memories[actor], count)
                batch.ids += actor << ACTOR_SHIFT
                parts.append(batch)
                rows_mass.append(mass)
        arrays = {
            field.name: torch.cat([getattr(part, field.name) for part in parts]).numpy()
            for field in fields(ReplayBatch)
        }
        return self.holding(), arrays, torch.cat(rows_mass).numpy()

    def feedback(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """New priorities of rows that were drawn; those that are gone are left alone."""
        all_ids, all_priorities = torch.from_numpy(np.array(ids)), torch.from_numpy(np.array(priorities))
        owners = all_ids >> ACTOR_SHIFT
        for actor in owners.unique().tolist():
            if actor in self.memories:
                mine = owners == actor
                self.memories[actor].feedback(all_ids[mine] & ID_MASK, all_priorities[mine])

    def _masses(self) -> dict[int, float]:
        return {
            actor: float(memory.index.sums.sum()) if isinstance(memory.index, PrioritizedIndex) else len(memory.index)
            for actor, memory in self.memories.items()
        }

    def _draw_from(self, memory: Replay, count: int) -> tuple[ReplayBatch, Tensor]:
        uniform = torch.rand(count, generator=self.generator, dtype=torch.float64)
        batch = memory.read(uniform, 0.0)
        if isinstance(memory.index, PrioritizedIndex):
            return batch, memory.index.leaves.view(-1)[batch.ids % memory.index.rows].double()
        return batch, torch.ones(count, dtype=torch.float64)


class ReplayShards(Protocol):
    """The way to all replay shards. One that is gone for the moment gives None, and what is sent there is lost."""

    count: int

    def put(self, shard: int, *arguments: Any) -> None: ...

    def holdings(self) -> list[Holding | None]: ...

    def draw(self, rows: Sequence[int]) -> list[tuple[Holding, dict[str, np.ndarray], np.ndarray] | None]: ...

    def feedback(self, shard: int, ids: np.ndarray, priorities: np.ndarray) -> None: ...


class ReplayShardsHere:
    """Shards in this process."""

    def __init__(self, shards: Sequence[ReplayShard]) -> None:
        self.shards = shards
        self.count = len(shards)

    def put(self, shard: int, *arguments: Any) -> None:
        self.shards[shard].put(*arguments)

    def holdings(self) -> list[Holding | None]:
        return [shard.holding() for shard in self.shards]

    def draw(self, rows: Sequence[int]) -> list[tuple[Holding, dict[str, np.ndarray], np.ndarray] | None]:
        return [shard.draw(count) if count else None for shard, count in zip(self.shards, rows, strict=True)]

    def feedback(self, shard: int, ids: np.ndarray, priorities: np.ndarray) -> None:
        self.shards[shard].feedback(ids, priorities)


class SharedMemory:
    """Global replay as an actor or a learner sees it: a `Memory` (`phalanx/seams.py`). An actor's rollouts all go to
    one shard, so that they stay in order."""

    def __init__(self, shards: ReplayShards, capacity: int, device: torch.device, actor: int = 0) -> None:
        self.shards = shards
        self.capacity = capacity  # rows of all shards together
        self.device = device
        self.actor = actor
        self.number = -1  # of the last rollout that was put
        self.known: list[Holding] = [Holding(0, 0.0)] * shards.count

    def put(self, rollout: Rollout) -> None:
        self.number += 1
        arrays = {name: value.cpu().numpy() for name, value in rollout.tensors().items()}
        frames = {key: value.cpu().numpy() for key, value in rollout.last_frames.items()}
        self.shards.put(self.actor % self.shards.count, self.actor, self.number, arrays, frames)

    def mark_gap(self) -> None:
        """The next rollout does not continue the last one."""
        self.number += 1

    def ready(self, rows: int) -> bool:
        for number, holding in enumerate(self.shards.holdings()):
            self.known[number] = holding or Holding(0, 0.0)
        stored = sum(holding.rows for holding in self.known)
        return stored >= min(rows, self.capacity) and any(holding.mass > 0 for holding in self.known)

    def draw(self, batch_size: int, importance_exponent: float, generator: torch.Generator) -> ReplayBatch:
        """Rows from all shards that are there. If one of them dies meanwhile, the others are drawn from instead."""
        batches: list[dict[str, np.ndarray]] = []
        masses: list[np.ndarray] = []
        missing = batch_size
        while missing:
            weights = torch.tensor([holding.mass for holding in self.known], dtype=torch.float64)
            if not weights.sum() > 0:
                raise EmptyReplayError
            seed = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator, device=self.device)))
            chosen = torch.multinomial(weights, missing, replacement=True, generator=seed)
            asked = chosen.bincount(minlength=self.shards.count).tolist()
            for number, answer in enumerate(self.shards.draw(asked)):
                if not asked[number]:
                    continue
                self.known[number] = Holding(0, 0.0) if answer is None else answer[0]
                if answer is not None and answer[1]:
                    batches.append(answer[1])
                    masses.append(answer[2])
            missing = batch_size - sum(len(mass) for mass in masses)
        joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        order = torch.randperm(batch_size, generator=seed)  # rows came by shard and actor; a batch may be divided
        tensors = {name: torch.from_numpy(array)[order].to(self.device) for name, array in joined.items()}
        mass = torch.from_numpy(np.concatenate(masses))[order]
        tensors["weight"] = (mass / mass.min()).pow(-importance_exponent).float().to(self.device)
        return ReplayBatch(**tensors)

    def feedback(self, ids: Tensor, priorities: Tensor) -> None:
        """To the shard that each row is of."""
        owners = (ids.cpu() >> ACTOR_SHIFT) % self.shards.count
        for shard in owners.unique().tolist():
            mine = owners == shard
            self.shards.feedback(shard, ids.cpu()[mine].numpy(), priorities.detach().cpu()[mine].float().numpy())

    def state(self) -> dict[str, Any]:
        return {}

    def saver(self) -> None:
        """Shards fill again when a run is resumed."""

    def restore(self, state: dict[str, Any], directory: Any) -> None: ...

"""What tests of whole runs share: reading a run directory, comparing states, the processes of a run."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.runs.checkpoint import Checkpoints, Loaded

sys.path.append(str(Path(__file__).parent / "sampling"))
from faulty import FaultyFactory, descendants

__all__ = ["ATARI", "FaultyFactory", "Moody", "descendants", "nan_reward", "newest", "records", "same"]

ATARI = (
    *("--env.frame", "104x80", "--model.torso", "nips", "--sampler.environments", 4, "--sampler.horizon", 5),
    *("--sampler.decorrelation", 20, "--sampler.workers", 2),
)
"""Flags of a small run on an Atari game."""


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def newest(run: Path) -> Loaded:
    return Checkpoints(run / "checkpoints", keep=1, report=pytest.fail).load()


def same(a: Any, b: Any) -> bool:
    """Equal in value and in type, tuples counting as lists and NaN as itself."""
    if isinstance(a, list | tuple):
        return type(b) is list and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and a.shape == b.shape and tensor_bytes(a) == tensor_bytes(b))
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return repr(a) == repr(b)
    return bool(a == b)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def nan_reward(step: Any, count: list[int]) -> Any:
    """An environment's step whose reward is NaN after 300 of them."""

    def poisoned(self: Any, action: int, frame: np.ndarray) -> Any:
        count[0] += 1
        outcome = step(self, action, frame)
        return outcome._replace(reward=math.nan) if count[0] > 300 else outcome

    return poisoned


class Moody:
    """Environments whose groups come back in any order, some much more often than others."""

    def __init__(self, envs: Any, seed: int) -> None:
        self.envs = envs
        self.chance = np.random.default_rng(seed)
        self.favour = self.chance.random(len(envs.groups)) ** 4 + 0.01
        self.waits_for_balance = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.envs, name)

    def ready(self, groups: list[int], wait: bool = True) -> int | None:
        if not wait and self.chance.random() < 0.5:
            return None
        favour = self.favour[groups]
        return int(self.chance.choice(groups, p=favour / favour.sum()))

    def unbalanced(self) -> bool:
        return self.waits_for_balance

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

from phalanx.logs.checkpoint import Checkpoints, Loaded

sys.path.append(str(Path(__file__).parent / "sampling"))
from faulty import descendants

__all__ = ["ATARI", "alike", "descendants", "nan_reward", "newest", "records"]

ATARI = (
    *("--env.frame", "104x80", "--model.torso", "nips", "--sampler.environments", 4, "--sampler.horizon", 5),
    *("--sampler.decorrelation", 20, "--sampler.workers", 2),
)
"""Flags of a small run on an Atari game."""


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def newest(run: Path) -> Loaded:
    return Checkpoints(run / "checkpoints", keep=1, report=pytest.fail).load()


def alike(ours: Any, theirs: Any) -> bool:
    """Are two states the same, bit for bit?"""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(alike(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, np.ndarray):
        return np.array_equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs


def nan_reward(step: Any, count: list[int]) -> Any:
    """An environment's step whose reward is NaN after 300 of them."""

    def poisoned(self: Any, action: int, frame: np.ndarray) -> Any:
        count[0] += 1
        outcome = step(self, action, frame)
        return outcome._replace(reward=math.nan) if count[0] > 300 else outcome

    return poisoned

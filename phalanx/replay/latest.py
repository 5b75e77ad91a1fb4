"""The newest rollout: the experience that on-policy algorithms learn from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from phalanx.config import Experiment
from phalanx.seams import Saver
from phalanx.types import EnvSpec, Rollout


class LatestRollout:
    """Holds the newest rollout until the next one comes."""

    def __init__(self) -> None:
        self.rollout: Rollout | None = None

    def put(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def take(self) -> Rollout:
        if self.rollout is None:
            raise RuntimeError("nothing was collected yet")
        return self.rollout

    def mark_gap(self) -> None:
        """Nothing outlives a rollout."""

    def state(self) -> dict[str, Any]:
        return {}

    def saver(self) -> Saver | None:
        """Nothing is large."""

    def restore(self, state: dict[str, Any], directory: Path) -> None: ...


def make_latest(experiment: Experiment, spec: EnvSpec, environments: int, device: torch.device) -> LatestRollout:
    return LatestRollout()

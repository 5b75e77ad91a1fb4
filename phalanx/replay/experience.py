"""Experience that keeps nothing: the newest rollout, for on-policy algorithms."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from phalanx.types import Rollout


class Latest:
    """Holds the newest rollout until the next one comes."""

    def __init__(self) -> None:
        self.rollout: Rollout | None = None

    def put(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def take(self) -> Rollout:
        if self.rollout is None:
            raise RuntimeError("nothing was collected yet")
        return self.rollout

    def feedback(self, ids: Tensor, priorities: Tensor) -> None:
        """On-policy rows have no priorities."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...

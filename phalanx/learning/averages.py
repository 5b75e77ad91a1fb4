"""Averages of the numbers an algorithm logs, between two reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def explained_variance(means: dict[str, float]) -> dict[str, float]:
    """The same with the share of the returns' variance that values explain: 1 is all of it, and below 0 a constant
    would do better. The share of mean variances, since one rollout's may be next to nothing."""
    variance, rest = means.get("returns/variance"), means.get("returns/unexplained")
    others = {name: mean for name, mean in means.items() if not name.startswith("returns/")}
    return others if not variance or rest is None else {"explained_variance": 1 - rest / variance, **others}


class MetricAverager:
    """Means of metrics between two log records. Sums stay on their device: only `take` waits for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}  # a tensor, or a float
        self._counts: dict[str, int] = {}

    @torch.no_grad()
    def add(self, metrics: Mapping[str, Tensor | float]) -> None:
        for name, value in metrics.items():
            # float32, since sums of half precision lose digits; a new tensor, since the caller may reuse its own.
            number = value.detach().float() if isinstance(value, Tensor) else float(value)
            self._sums[name] = self._sums.get(name, 0.0) + number
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, float]:
        """The means since the last call, in one copy per device, and start again."""
        sums, counts = self._sums, self._counts
        self._sums, self._counts = {}, {}
        on_device: dict[torch.device, list[str]] = {}
        for name, total in sums.items():
            if isinstance(total, Tensor):
                on_device.setdefault(total.device, []).append(name)
        for names in on_device.values():
            sums.update(zip(names, torch.stack([sums[name] for name in names]).tolist(), strict=True))
        return {name: total / counts[name] for name, total in sums.items()}

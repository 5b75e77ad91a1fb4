"""What a session's reports add up to between two records: lags, staleness, shares of the time, means of metrics."""

from __future__ import annotations

from collections import Counter
from typing import Any

from phalanx.learning.averages import MetricAverager, explained_variance
from phalanx.replica.report import Report, summed
from phalanx.runtime.timing import Timing


class Interval:
    """Takes in reports, and gives the numbers of a record."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}  # of the newest report
        self.begin()

    def begin(self) -> None:
        """Forget what was added up."""
        self.lags: Counter[int] = Counter()
        self.staleness: Counter[int] = Counter()
        self.store_seconds: dict[str, float] = {}
        self.averages = MetricAverager()
        self.timing = Timing()

    def add(self, report: Report) -> None:
        self.lags += report.lags
        self.staleness += report.staleness
        self.store_seconds.update(summed(self.store_seconds, report.store_seconds))
        self.numbers = report.numbers
        self.averages.add(report.metrics)
        self.timing.add_all(report.seconds)

    def take(self) -> dict[str, Any]:
        """The numbers of a record; the next interval begins."""
        shares, rows = self.timing.shares(), self.lags.total()
        taken = {
            "lag_mean": sum(lag * count for lag, count in self.lags.items()) / rows if rows else 0.0,
            "lag_max": max(self.lags, default=0),
            **self._staleness(),
            "env_share": shares["env"],
            "infer_share": shares["infer"],
            "learn_share": shares["learn"],
            **self.numbers,
            **explained_variance(self.averages.take()),
        }
        self.begin()
        return taken

    def _staleness(self) -> dict[str, float]:
        """Of a central store: how many updates of others came between pull and push, and the seconds that all replicas
        together were blocked by others and spent in their own updates."""
        times = self.staleness.total()
        if not times:
            return {}
        mean = sum(updates * count for updates, count in self.staleness.items()) / times
        seconds = {f"{what}_seconds": value for what, value in self.store_seconds.items()}
        return {"staleness_mean": mean, "staleness_max": max(self.staleness), **seconds}

"""Reports: two as one hold what both held."""

from __future__ import annotations

from collections import Counter

from phalanx.replica.report import Report
from phalanx.types import Progress


def report(steps: int, score: float, lag: int, blocked: float) -> Report:
    return Report(
        Progress(steps),
        [score],
        Counter({lag: steps}),
        {"env": 1.0, "learn": 0.5},
        {"loss": score},
        {"learning_rate": score},
        Counter({lag: 3}),
        {"blocked": blocked, "updating": 1.0},
    )


def test_two_reports_as_one_hold_what_both_held():
    both = report(10, 1.0, 0, 0.25).merged_with(report(20, 2.0, 4, 0.5))
    assert both == Report(
        Progress(20),
        [1.0, 2.0],
        Counter({0: 10, 4: 20}),
        {"env": 2.0, "learn": 1.0},
        {"loss": 2.0},
        {"learning_rate": 2.0},
        Counter({0: 3, 4: 3}),
        {"blocked": 0.75, "updating": 2.0},
    )


def test_seconds_that_only_one_report_has_stay():
    alone = Report(Progress(5), [], Counter(), {"env": 0.0, "learn": 0.0}, {})
    assert alone.merged_with(report(5, 0.0, 0, 2.0)).store_seconds == {"blocked": 2.0, "updating": 1.0}
    assert report(5, 0.0, 0, 2.0).merged_with(alone).store_seconds == {"blocked": 2.0, "updating": 1.0}

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx.learning.averages import MetricAverager
from phalanx.runs.metrics import ScoreWindow
from phalanx.runtime.timing import Timing


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestTiming:
    def test_shares(self) -> None:
        clock = Clock()
        timing = Timing(clock)
        timing.add("env", 4.0)
        timing.add("learn", 2.0)
        timing.add("infer", 0.5)
        clock.now += 8
        assert timing.shares() == pytest.approx({"env": 0.5, "infer": 0.0625, "learn": 0.25, "other": 0.1875})

    def test_reset(self) -> None:
        clock = Clock()
        timing = Timing(clock)
        clock.now += 4
        timing.add("env", 4.0)
        timing.reset()
        clock.now += 1
        timing.add("infer", 1.0)
        assert timing.shares() == {"env": 0.0, "infer": 1.0, "learn": 0.0, "other": 0.0}

    def test_no_time_at_all(self) -> None:
        assert Timing(Clock()).shares() == {"env": 0.0, "infer": 0.0, "learn": 0.0, "other": 1.0}

    def test_stages_that_overlap_never_exceed_the_whole(self) -> None:
        clock = Clock()
        timing = Timing(clock)
        clock.now += 1
        timing.add("env", 3.0)
        timing.add("learn", 1.0)
        assert timing.shares() == {"env": 0.75, "infer": 0.0, "learn": 0.25, "other": 0.0}

    def test_unknown_stage(self) -> None:
        with pytest.raises(KeyError):
            Timing().add("environment", 1.0)


class TestScoreWindow:
    @given(st.lists(st.lists(st.one_of(st.just(math.nan), st.floats(-1e6, 1e6)), min_size=1, max_size=4)))
    def test_agrees_with_the_plain_list(self, steps: list[list[float]]) -> None:
        window = ScoreWindow(5)
        scores = [score for step in steps for score in step if not math.isnan(score)]
        added = sum(window.add(np.array(step, np.float64)) for step in steps)
        assert added == window.count == len(scores)
        assert window.best == max(scores, default=None)
        assert window.mean == (pytest.approx(np.mean(scores[-5:])) if scores else None)

    def test_one_number(self) -> None:
        window = ScoreWindow()
        assert window.add(7.0) == 1
        assert window.mean == 7.0

    def test_state_survives(self) -> None:
        window, other = ScoreWindow(3), ScoreWindow(3)
        window.add(np.array([9.0, 1.0, 2.0, 3.0], np.float32))
        other.add(100.0)
        other.restore(json.loads(json.dumps(window.state())))
        assert (other.mean, other.count, other.best) == (2.0, 4, 9.0)
        other.add(5.0)
        assert other.mean == pytest.approx(10 / 3)


class TestMetricAverager:
    def test_means_of_tensors_and_floats(self) -> None:
        averager = MetricAverager()
        averager.add({"loss": torch.tensor(1.0, requires_grad=True), "rate": 0.5, "mixed": 1.0})
        averager.add({"loss": torch.tensor(2.0, dtype=torch.bfloat16), "rate": 1.5, "mixed": torch.tensor(3)})
        averager.add({"rare": torch.tensor(7)})
        assert averager.take() == {"loss": 1.5, "rate": 1.0, "mixed": 2.0, "rare": 7.0}
        assert averager.take() == {}

    def test_a_tensor_may_be_reused_by_its_owner(self) -> None:
        averager, tensor = MetricAverager(), torch.tensor(1.0)
        for value in (1.0, 2.0, 6.0):
            tensor.fill_(value)
            averager.add({"loss": tensor})
        assert averager.take() == {"loss": 3.0}
        assert tensor.item() == 6.0

    def test_half_precision_sums_do_not_stall(self) -> None:
        averager = MetricAverager()
        for _ in range(600):
            averager.add({"loss": torch.tensor(1.0, dtype=torch.bfloat16)})
        assert averager.take() == {"loss": 1.0}

    def test_adding_never_reads_a_tensor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        averager = MetricAverager()

        def refuse(*args: Any) -> None:
            raise AssertionError("the host waited for the device")

        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__float__", "__bool__", "cpu", "numpy"):
                patch.setattr(torch.Tensor, name, refuse)
            averager.add({"loss": torch.ones(())})
            averager.add({"loss": torch.ones(())})
        assert averager.take() == {"loss": 1.0}

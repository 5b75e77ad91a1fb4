"""The number that says how well values fit returns."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phalanx.algorithms.returns import value_fit
from phalanx.learning.averages import explained_variance
from phalanx.types import PolicyBatch


def rows(returns: np.ndarray, value: np.ndarray, weight: np.ndarray) -> PolicyBatch:
    empty = torch.zeros(len(returns))
    tensors = {name: torch.from_numpy(array) for name, array in (("returns", returns), ("value", value))}
    others = dict.fromkeys(("stacks", "history", "action", "log_prob", "advantage"), empty)
    return PolicyBatch(**tensors, **others, weight=torch.from_numpy(weight))


def test_it_is_that_of_the_rows_that_count():
    chance = np.random.default_rng(0)
    returns, value = chance.normal(3, 2, 200), chance.normal(size=200)
    value += returns
    weight = (chance.random(200) < 0.7).astype(np.float64)
    counted = weight > 0
    fit = {name: float(number) for name, number in value_fit(rows(returns, value, weight)).items()}
    expected = 1 - np.var((returns - value)[counted]) / np.var(returns[counted])
    assert explained_variance(fit) == {"explained_variance": pytest.approx(expected)}


@pytest.mark.parametrize(("value", "expected"), [([1.0, 2.0, 4.0], 1.0), ([7.0, 7.0, 7.0], 0.0), ([4.0, 2.0, 1.0], -3)])
def test_perfect_constant_and_worse_values(value, expected):
    returns = np.array([1.0, 2.0, 4.0])
    fit = value_fit(rows(returns, np.array(value), np.ones(3)))
    shown = explained_variance({name: float(number) for name, number in fit.items()})
    if expected == -3:
        expected = 1 - np.var(returns - value) / np.var(returns)
    assert shown["explained_variance"] == pytest.approx(expected)


def test_returns_that_do_not_vary_tell_nothing():
    fit = value_fit(rows(np.ones(4), np.arange(4.0), np.ones(4)))
    assert explained_variance({name: float(number) for name, number in fit.items()} | {"loss/policy": 2.0}) == {
        "loss/policy": 2.0
    }
    assert explained_variance({}) == {}


def test_no_row_that_counts_is_no_nan():
    fit = value_fit(rows(np.ones(4), np.arange(4.0), np.zeros(4)))
    assert all(float(number) == 0 for number in fit.values())

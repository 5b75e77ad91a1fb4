"""Returns in closed form, with terminations, truncations and cuts in every position."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.algorithms.returns import generalized_advantage

GOES_ON, TERMINATED, TRUNCATED, CUT = range(4)


def slow_advantage(reward, value, ends, last_value, discount, gae_lambda):
    """Sum over k of (discount * lambda)^k * delta, written out for one environment and each start."""
    advantages = []
    for start in range(len(reward)):
        total, factor = 0.0, 1.0
        for t in range(start, len(reward)):
            if ends[t] == CUT:
                break
            following = {GOES_ON: value[t + 1], TERMINATED: 0.0, TRUNCATED: last_value[t]}[ends[t]]
            total += factor * (reward[t] + discount * following - value[t])
            if ends[t] != GOES_ON:
                break
            factor *= discount * gae_lambda
        advantages.append(total)
    return advantages


def fast_advantage(reward, value, ends, last_value, discount, gae_lambda):
    ends = torch.tensor(ends)[:, None]
    return generalized_advantage(
        torch.tensor(reward, dtype=torch.float64)[:, None],
        torch.tensor(value, dtype=torch.float64)[:, None],
        ends == TERMINATED,
        ends == TRUNCATED,
        torch.tensor(last_value, dtype=torch.float64)[:, None] * (ends == TRUNCATED),
        ends == CUT,
        discount,
        gae_lambda,
    )[:, 0].tolist()


@pytest.mark.parametrize("ends", itertools.product(range(4), repeat=4))
def test_every_position_of_an_end(ends):
    reward, value = [1.0, -2.0, 0.5, 3.0], [0.1, 0.2, -0.3, 0.4, 0.7]
    last_value = [5.0, 6.0, 7.0, 8.0]
    for gae_lambda in (0.0, 0.95, 1.0):
        expected = slow_advantage(reward, value, ends, last_value, 0.9, gae_lambda)
        assert fast_advantage(reward, value, ends, last_value, 0.9, gae_lambda) == pytest.approx(expected)


def test_lambda_one_gives_the_n_step_return():
    reward, value = [1.0, 2.0, 4.0], [10.0, 20.0, 30.0, 40.0]
    advantage = fast_advantage(reward, value, [GOES_ON] * 3, [0.0] * 3, 0.5, 1.0)
    assert advantage[0] + value[0] == pytest.approx(1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 40)


def test_a_truncated_episode_bootstraps_from_its_last_observation():
    advantage = fast_advantage([1.0], [0.0, 99.0], [TRUNCATED], [7.0], 0.9, 1.0)
    assert advantage == pytest.approx([1 + 0.9 * 7])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_against_the_slow_reference(data):
    steps = data.draw(st.integers(1, 8))
    numbers = st.floats(-5, 5)
    reward, last_value = (data.draw(st.lists(numbers, min_size=steps, max_size=steps)) for _ in range(2))
    value = data.draw(st.lists(numbers, min_size=steps + 1, max_size=steps + 1))
    ends = data.draw(st.lists(st.integers(0, 3), min_size=steps, max_size=steps))
    discount, gae_lambda = data.draw(st.floats(0.5, 1)), data.draw(st.floats(0, 1))
    expected = slow_advantage(reward, value, ends, last_value, discount, gae_lambda)
    assert fast_advantage(reward, value, ends, last_value, discount, gae_lambda) == pytest.approx(expected, abs=1e-9)

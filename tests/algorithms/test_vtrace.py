"""V-trace in closed form: beside the sum of its paper, and where it must be the n-step return."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.algorithms.returns import generalized_advantage, vtrace

NEVER = torch.zeros(4, 1, dtype=torch.bool)
REWARD = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
VALUE = torch.tensor([[0.5], [1.0], [1.5], [2.0], [2.5]])


def targets(ratio, terminated=NEVER, truncated=NEVER, last_value=None, cut=NEVER, discount=0.9, trace_lambda=1.0):
    last_value = torch.zeros(4, 1) if last_value is None else last_value
    parts = terminated, truncated, last_value, cut, discount, trace_lambda
    return vtrace(torch.tensor(ratio).log().view(4, 1), REWARD, VALUE, *parts)


def at(*steps):
    marks = NEVER.clone()
    marks[list(steps)] = True
    return marks


def test_where_the_policies_agree_it_is_the_n_step_return():
    target, advantage = targets([1.0] * 4)
    expected, returns = 2.5, []
    for reward in (4.0, 3.0, 2.0, 1.0):
        expected = reward + 0.9 * expected
        returns.insert(0, expected)
    torch.testing.assert_close(target[:, 0], torch.tensor(returns))
    torch.testing.assert_close(advantage[:, 0], torch.tensor(returns) - VALUE[:-1, 0])


def test_actions_that_became_more_probable_weigh_no_more():
    torch.testing.assert_close(targets([3.0, 1.0, 7.0, 1.0]), targets([1.0] * 4))


def test_an_action_that_is_no_longer_taken_leaves_the_value_as_it_was():
    target, advantage = targets([1.0, 1e-30, 1.0, 1.0])
    assert float(target[1]) == 1.0 and abs(float(advantage[1])) < 1e-20
    assert math.isclose(float(target[0]), 1.0 + 0.9 * 1.0, rel_tol=1e-6)  # and what is after it counts for nothing


def test_a_terminated_episode_is_worth_its_rewards_and_a_truncated_one_its_last_observation_too():
    target, _ = targets([1.0] * 4, terminated=at(1))
    torch.testing.assert_close(target[:2, 0], torch.tensor([1 + 0.9 * 2, 2.0]))
    target, advantage = targets([1.0] * 4, truncated=at(1), last_value=10.0 * at(1))
    torch.testing.assert_close(target[:2, 0], torch.tensor([1 + 0.9 * 11, 2 + 0.9 * 10]))
    assert math.isclose(float(advantage[1]), 2 + 0.9 * 10 - 1.0, rel_tol=1e-6)


def test_a_cut_step_teaches_nothing_and_what_came_before_bootstraps_from_it():
    target, advantage = targets([1.0] * 4, cut=at(2))
    assert float(advantage[2]) == 0 and float(target[2]) == 1.5
    assert math.isclose(float(target[1]), 2 + 0.9 * 1.5, rel_tol=1e-6)


@st.composite
def rollouts(draw):
    steps = draw(st.integers(1, 6))
    numbers = st.lists(st.floats(-3, 3, width=32), min_size=steps + 1, max_size=steps + 1)
    column = [torch.tensor(draw(numbers)) for _ in range(4)]
    kinds = torch.tensor(draw(st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), min_size=steps, max_size=steps)))
    return column, kinds, draw(st.floats(0, 1)), draw(st.floats(0, 1))


@settings(deadline=None, max_examples=100)
@given(rollouts())
def test_beside_the_sum_of_the_paper(drawn):
    """v_s = V(s) + sum over t of discount^(t-s) (product of c_i, s <= i < t) delta_t."""
    (ratio, reward, value, last), kinds, discount, trace_lambda = drawn
    ratio, reward, last = ratio[:-1], reward[:-1], last[:-1] * (kinds == 2)
    ends = [(kinds == kind)[:, None] for kind in (1, 2, 3)]
    target, advantage = vtrace(
        ratio[:, None], reward[:, None], value[:, None], *ends[:2], last[:, None], ends[2], discount, trace_lambda
    )
    rho = ratio.clamp(max=0).exp()

    def bootstrap(t, after):
        return [after, 0.0, float(last[t]), after][int(kinds[t])]

    def delta(t):
        counts = int(kinds[t]) != 3
        return (
            counts * float(rho[t]) * (float(reward[t]) + discount * bootstrap(t, float(value[t + 1])) - float(value[t]))
        )

    expected = []
    for s in range(len(kinds)):
        total, product = float(value[s]), 1.0
        for t in range(s, len(kinds)):
            total += discount ** (t - s) * product * delta(t)
            product *= trace_lambda * float(rho[t])
            if kinds[t]:
                break
        expected.append(total)
    torch.testing.assert_close(target[:, 0], torch.tensor(expected), rtol=1e-4, atol=1e-4)
    following = [*expected[1:], float(value[-1])]
    for t, kind in enumerate(kinds.tolist()):
        after = bootstrap(t, following[t])
        own = 0.0 if kind == 3 else float(rho[t]) * (float(reward[t]) + discount * after - float(value[t]))
        assert math.isclose(float(advantage[t]), own, rel_tol=1e-3, abs_tol=1e-3)


@settings(deadline=None, max_examples=50)
@given(rollouts())
def test_with_one_policy_targets_are_generalised_advantages_with_the_value(drawn):
    (_, reward, value, last), kinds, discount, trace_lambda = drawn
    ends = [(kinds == kind)[:, None] for kind in (1, 2, 3)]
    parts = reward[:-1, None], value[:, None], *ends[:2], last[:-1, None], ends[2], discount, trace_lambda
    target, _ = vtrace(torch.zeros(len(kinds), 1), *parts)
    torch.testing.assert_close(target, generalized_advantage(*parts) + value[:-1, None], rtol=1e-4, atol=1e-4)

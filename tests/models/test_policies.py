"""Actions drawn from a distribution: the inverse of its cumulative sum, in closed form."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from phalanx.models.policies import draw

NEVER = -200.0  # a logarithm whose probability float32 takes for zero
LARGEST = 1 - 2**-24  # the greatest float32 below 1


def log_probabilities(weights: list[float]) -> Tensor:
    return torch.tensor([[NEVER if weight == 0 else weight for weight in weights]]).where(
        torch.tensor([weights]) == 0, torch.tensor([weights]).log()
    )


def drawn(weights: list[float], uniform: float) -> int:
    return int(draw(log_probabilities(weights), torch.tensor([uniform])))


@pytest.mark.parametrize(
    ("weights", "first", "last"),
    [
        ([0.0, 0.25, 0.75], 1, 2),
        ([0.0, 0.0, 1.0], 2, 2),
        ([0.5, 0.0, 0.5], 0, 2),
        ([0.5, 0.5, 0.0, 0.0], 0, 1),
        ([0.0, 1.0, 0.0], 1, 1),
        ([1.0], 0, 0),
    ],
)
def test_the_least_and_the_greatest_number_choose_actions_that_are_possible(weights, first, last):
    assert drawn(weights, 0.0) == first
    assert drawn(weights, LARGEST) == last


def test_numbers_choose_by_the_cumulative_distribution():
    uniform = torch.tensor([0.0, 2**-24, 0.25, 0.26, 0.5, 0.51, 0.74, LARGEST])
    rows = log_probabilities([0.25, 0.0, 0.25, 0.5]).expand(len(uniform), 4)
    assert draw(rows, uniform).tolist() == [0, 0, 0, 2, 2, 3, 3, 3]


weights_of_actions = st.lists(st.sampled_from([0.0, 1e-6, 0.1, 0.3, 1.0]), min_size=1, max_size=18).filter(any)


@given(weights_of_actions, st.one_of(st.just(0.0), st.just(LARGEST), st.floats(0, LARGEST, width=32)))
def test_no_number_chooses_an_action_of_probability_zero(weights, uniform):
    total = sum(weights)
    assert weights[drawn([weight / total for weight in weights], uniform)] > 0


def test_numbers_other_than_zero_choose_as_a_plain_search_does():
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(1_000_000, generator=generator).clamp(min=2**-24)
    log_probs = torch.log_softmax(torch.randn(1_000_000, 6, generator=generator) * 3, dim=1)
    cumulative = log_probs.exp().cumsum(1)
    plain = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:]).squeeze(1)
    assert torch.equal(draw(log_probs, uniform), plain)

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.algorithms.c51 import C51, expectation, of_action, project
from phalanx.config import C51Config, ModelConfig
from phalanx.models.q_heads import make_q_model
from phalanx.types import EnvSpec, ReplayBatch

SUPPORT = torch.tensor([-1.0, 0.0, 1.0])


def project_by_loop(probabilities: np.ndarray, returns: float, discount: float, support: np.ndarray) -> np.ndarray:
    """One row, atom by atom, as in the paper."""
    step = support[1] - support[0]
    result = np.zeros(len(support))
    for probability, atom in zip(probabilities, support, strict=True):
        place = (min(max(returns + discount * atom, support[0]), support[-1]) - support[0]) / step
        place = min(place, len(support) - 1)  # the division may round up past the end
        low, high = math.floor(place), math.ceil(place)
        if low == high:
            result[low] += probability
        else:
            result[low] += probability * (high - place)
            result[high] += probability * (place - low)
    return result


@given(
    seed=st.integers(0, 2**32 - 1),
    atoms=st.integers(2, 60),
    low=st.floats(-20, 0),
    width=st.floats(0.5, 30),
)
@settings(max_examples=60, deadline=None)
def test_projection_against_a_loop(seed: int, atoms: int, low: float, width: float) -> None:
    random = np.random.default_rng(seed)
    support = torch.linspace(low, low + width, atoms)
    probabilities = random.dirichlet(np.full(atoms, 0.3), size=6)
    returns = random.normal(scale=width, size=6)
    discount = np.where(random.random(6) < 0.3, 0.0, random.random(6))
    result = project(
        torch.from_numpy(probabilities).float(),
        torch.from_numpy(returns).float(),
        torch.from_numpy(discount).float(),
        support,
    )
    exact = np.linspace(low, low + width, atoms)
    expected = [project_by_loop(*row, exact) for row in zip(probabilities, returns, discount, strict=True)]
    assert np.allclose(result.numpy(), np.array(expected), atol=1e-3)
    assert torch.allclose(result.sum(1), torch.ones(6), atol=1e-4)


def test_a_terminated_row_puts_all_mass_around_its_return() -> None:
    result = project(torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([0.25]), torch.tensor([0.0]), SUPPORT)
    assert result[0].tolist() == pytest.approx([0.0, 0.75, 0.25])


def test_projection_keeps_the_mean_inside_the_grid() -> None:
    probabilities = torch.tensor([[0.2, 0.3, 0.5]])
    result = project(probabilities, torch.tensor([0.1]), torch.tensor([0.5]), SUPPORT)
    assert expectation(result, SUPPORT).item() == pytest.approx(0.1 + 0.5 * 0.3)


class Table(nn.Module):
    """Distributions looked up by the number in the newest frame: two states, two actions, three atoms."""

    support = SUPPORT

    def __init__(self, probabilities: list[list[list[float]]]) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities).log())

    def log_probabilities(self, stacks: Tensor, history: Tensor) -> Tensor:
        return torch.log_softmax(self.logits[stacks[:, -1, 0].long()], dim=2)

    def forward(self, stacks: Tensor, history: Tensor) -> Tensor:
        return expectation(self.log_probabilities(stacks, history).exp(), self.support)


LEARNT = [[[0.2, 0.5, 0.3], [0.6, 0.2, 0.2]], [[0.1, 0.1, 0.8], [0.8, 0.1, 0.1]]]
TARGET = [[[0.3, 0.4, 0.3], [0.3, 0.4, 0.3]], [[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]]


def make_batch(weight: list[float]) -> ReplayBatch:
    ones = torch.ones(2, dtype=torch.uint8)
    return ReplayBatch(
        stacks=torch.zeros(2, 1, 1),
        history=ones,
        action=torch.tensor([0, 1]),
        returns=torch.tensor([0.5, -1.0]),
        next_stacks=torch.ones(2, 1, 1),
        next_history=ones,
        next_discount=torch.tensor([0.5, 0.0]),
        weight=torch.tensor(weight),
        ids=torch.arange(2),
    )


@pytest.mark.parametrize(("double", "best"), [(False, 1), (True, 0)])
def test_loss_in_closed_form(double: bool, best: int) -> None:
    """The target likes action 1 of state 1 best, the learnt network action 0."""
    model = Table(LEARNT)
    algorithm = C51(C51Config(double=double, atoms=3, v_min=-1, v_max=1), model, rollout_steps=32)
    algorithm.target = Table(TARGET)
    loss = algorithm.loss(model, make_batch([1.0, 0.5]), {})
    rows, divergences = [], []
    for state_action, returns, discount in ((LEARNT[0][0], 0.5, 0.5), (LEARNT[0][1], -1.0, 0.0)):
        target = project_by_loop(np.array(TARGET[1][best]), returns, discount, SUPPORT.numpy())
        rows.append(-float((target * np.log(state_action)).sum()))
        divergences.append(rows[-1] + float(sum(p * math.log(p) for p in target if p > 0)))
    assert loss.total.item() == pytest.approx((rows[0] + 0.5 * rows[1]) / 2, rel=1e-5)
    assert loss.priorities is not None
    assert loss.priorities.tolist() == pytest.approx(divergences, rel=1e-4)
    assert not loss.priorities.requires_grad


def test_a_perfect_prediction_has_the_smallest_priority_and_no_gradient() -> None:
    model = Table([[[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]], [[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]])
    algorithm = C51(C51Config(), model, rollout_steps=32)
    batch = make_batch([1.0, 1.0])
    batch.returns, batch.next_discount = torch.zeros(2), torch.ones(2)
    loss = algorithm.loss(model, batch, {})
    loss.total.backward()
    assert loss.priorities is not None and loss.priorities.tolist() == pytest.approx([1e-6, 1e-6], abs=1e-6)
    assert model.logits.grad is not None and model.logits.grad.abs().max() < 1e-6


def test_a_hopeless_prediction_stays_finite() -> None:
    """No mass where the target is: log-softmax keeps the loss and its gradient alive."""
    model = Table(LEARNT)
    with torch.no_grad():
        model.logits[0, 0] = torch.tensor([0.0, 0.0, -200.0])
    algorithm = C51(C51Config(), model, rollout_steps=32)
    batch = make_batch([1.0, 1.0])
    batch.returns, batch.next_discount = torch.ones(2), torch.zeros(2)
    loss = algorithm.loss(model, batch, {})
    loss.total.backward()
    assert loss.priorities is not None and loss.priorities[0].item() == pytest.approx(200.7, abs=0.1)
    assert model.logits.grad is not None and model.logits.grad[0, 0, 2].item() == pytest.approx(-0.5, abs=1e-4)


def test_of_action_picks_one_distribution_per_row() -> None:
    distributions = torch.arange(12.0).view(2, 2, 3)
    assert of_action(distributions, torch.tensor([1, 0])).tolist() == [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]


@pytest.mark.parametrize("dueling", [False, True])
def test_the_network_gives_distributions_and_their_means(dueling: bool) -> None:
    config = C51Config(atoms=11, v_min=-5, v_max=5, dueling=dueling)
    spec = EnvSpec((4,), np.float32, actions=3)
    model = make_q_model(ModelConfig(torso="mlp"), config, spec, stack=2)
    stacks, history = torch.randn(6, 2, 4), torch.full((6,), 2)
    probabilities = model.log_probabilities(stacks, history).exp()  # type: ignore[union-attr, operator]
    assert probabilities.shape == (6, 3, 11)
    assert torch.allclose(probabilities.sum(2), torch.ones(6, 3))
    assert torch.allclose(model(stacks, history), expectation(probabilities, torch.arange(-5.0, 6.0)), atol=1e-5)
    assert "support" not in model.state_dict()


def test_one_state_converges_to_its_distribution() -> None:
    """Rewards of -1 and 1 in equal parts, episodes of one step: half the mass at either end."""
    model = Table([[[1 / 3] * 3] * 2] * 2)
    algorithm = C51(C51Config(), model, rollout_steps=32)
    batch = make_batch([1.0, 1.0])
    batch.action, batch.returns, batch.next_discount = torch.zeros(2).long(), torch.tensor([-1.0, 1.0]), torch.zeros(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    for _ in range(200):
        optimizer.zero_grad()
        algorithm.loss(model, batch, {}).total.backward()
        optimizer.step()
    learnt = model.log_probabilities(batch.stacks[:1], batch.history[:1]).exp()[0, 0]
    assert learnt.tolist() == pytest.approx([0.5, 0.0, 0.5], abs=0.01)

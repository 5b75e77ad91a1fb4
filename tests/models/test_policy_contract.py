"""What every Policy does, whatever its actions are worth: chance comes from outside, and grouping changes nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from phalanx.config.presets import preset
from phalanx.registry import make_evaluation_policy, make_network, make_policy, memory_of
from phalanx.runtime.device import Compute
from phalanx.types import EnvSpec, Progress

ROWS, ACTIONS = 12, 4
SPEC = EnvSpec((6,), np.float32, ACTIONS)
COMPUTE = Compute(torch.device("cpu"))
EXPERIMENTS = {
    "actor-critic": preset("a2c-gym"),
    "epsilon-greedy": preset("dqn-gym"),
    "epsilon-greedy with a spread": dataclasses.replace(
        preset("dqn-gym"), algorithm=dataclasses.replace(preset("dqn-gym").algorithm, epsilon_spread=7.0)
    ),
    "distributions": preset("c51-gym"),
}


@pytest.fixture(params=EXPERIMENTS)
def experiment(request):
    return EXPERIMENTS[request.param]


@pytest.fixture
def model(experiment):
    torch.manual_seed(0)
    return make_network(experiment, SPEC)


@pytest.fixture
def policy(experiment, model):
    policy = make_policy(experiment, model, COMPUTE, ROWS)
    policy.begin(Progress(steps=2_000))
    return policy


@pytest.fixture
def seen():
    generator = torch.Generator().manual_seed(1)
    stacks = torch.randn(ROWS, 1, 6, generator=generator)
    return stacks, torch.ones(ROWS, dtype=torch.uint8), torch.rand(ROWS, generator=generator)


def test_it_gives_an_action_a_log_probability_and_a_value_for_each_row(policy, seen):
    output = policy.act(*seen, slice(0, ROWS))
    assert output.action.shape == output.log_prob.shape == output.value.shape == (ROWS,)
    assert output.action.dtype == torch.int64
    assert output.log_prob.dtype == output.value.dtype == torch.float32
    assert bool(((output.action >= 0) & (output.action < ACTIONS)).all())
    assert bool((output.log_prob <= 0).all())
    assert not output.value.requires_grad


def test_the_same_numbers_choose_the_same_actions(policy, seen):
    """So it has no chance of its own, and asking it changes nothing."""
    state = torch.get_rng_state()
    first, again = policy.act(*seen, slice(0, ROWS)), policy.act(*seen, slice(0, ROWS))
    assert torch.equal(first.action, again.action)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("kind", ["slice", "tensor"])
def test_actions_do_not_depend_on_the_group_a_row_is_in(policy, seen, size, kind):
    whole = policy.act(*seen, slice(0, ROWS))
    for start in range(0, ROWS, size):
        part = slice(start, start + size)
        rows = part if kind == "slice" else torch.arange(start, start + size)
        output = policy.act(*(tensor[part] for tensor in seen), rows)
        assert torch.equal(output.action, whole.action[part])
        torch.testing.assert_close(output.value, whole.value[part])
        torch.testing.assert_close(output.log_prob, whole.log_prob[part])


def test_evenly_spread_numbers_give_each_action_its_share(policy, experiment, model, seen):
    """Of a softmax, or of epsilon shared among all and the rest for the best one."""
    count = 4_000
    stacks = seen[0][:1].expand(count, 1, 6)
    history, uniform = torch.ones(count, dtype=torch.uint8), (torch.arange(count) + 0.5) / count
    rows = torch.zeros(count, dtype=torch.int64)
    shares = torch.bincount(policy.act(stacks, history, uniform, rows).action, minlength=ACTIONS) / count
    with torch.no_grad():
        output = model(stacks[:1], history[:1])
    if isinstance(output, tuple):
        expected = torch.softmax(output[0][0], 0)
    else:
        algorithm = experiment.algorithm
        done = 2_000 / algorithm.epsilon_length
        epsilon = algorithm.epsilon_start + (algorithm.epsilon_final - algorithm.epsilon_start) * done
        expected = torch.full((ACTIONS,), epsilon / ACTIONS)
        expected[output[0].argmax()] += 1 - epsilon
    torch.testing.assert_close(shares, expected, rtol=0, atol=2 / count)


def test_it_acts_with_the_model_as_it_is_now(policy, model, seen):
    """The next action sees every push: a policy keeps no copy of the parameters."""
    before = policy.act(*seen, slice(0, ROWS))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    after = policy.act(*seen, slice(0, ROWS))
    assert not torch.equal(before.value, after.value)


def test_values_are_those_of_acting_where_steps_bootstrap_from_them(policy, experiment, seen):
    stacks, history, uniform = seen
    values = policy.value(stacks, history)
    assert values.shape == (ROWS,)
    acting = policy.act(stacks, history, uniform, slice(0, ROWS)).value
    torch.testing.assert_close(values, acting if memory_of(experiment) is None else torch.zeros(ROWS))


def test_a_greedy_evaluation_takes_the_best_action_whatever_the_numbers_say(experiment, model, seen):
    policy = make_evaluation_policy(experiment, model, COMPUTE, greedy=True)
    policy.begin(Progress())
    stacks, history, uniform = seen
    with torch.no_grad():
        output = model(stacks, history)
    best = (output[0] if isinstance(output, tuple) else output).argmax(1)
    assert torch.equal(policy.act(stacks, history, uniform, slice(0, ROWS)).action, best)

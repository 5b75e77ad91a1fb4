from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from phalanx.config import OptimizerConfig
from phalanx.errors import UserError
from phalanx.parameters.rules import Adam, average_norm_clip, global_norm_clip, make_rule

STEPS, SIZE, RATE = 100, 257, 0.01

CONFIGS = {
    "rmsprop": OptimizerConfig(rule="rmsprop", decay=0.95, epsilon=1e-3),
    "rmsprop-inside": OptimizerConfig(rule="rmsprop-inside", epsilon=0.1, initial_accumulator=1.0),
    "adam": OptimizerConfig(rule="adam", epsilon=1e-3),
    "adam-tf": OptimizerConfig(rule="adam-tf", epsilon=1e-3, beta1=0.8, beta2=0.75),
    "adagrad": OptimizerConfig(rule="adagrad", epsilon=1e-6, initial_accumulator=0.1),
    "sgd": OptimizerConfig(rule="sgd", momentum=0.9),
    "plain sgd": OptimizerConfig(rule="sgd"),
}

TORCH: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, RATE, alpha=0.95, eps=1e-3),
    "adam": lambda p: torch.optim.Adam(p, RATE, eps=1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, RATE, eps=1e-6, initial_accumulator_value=0.1),
    "sgd": lambda p: torch.optim.SGD(p, RATE, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, RATE),
}


def gradients(dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)
    scale = torch.logspace(-4, 1, SIZE)
    for _ in range(STEPS):
        yield (torch.randn(SIZE, generator=generator) * scale).to(dtype)


def start() -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(4))


def trained(name: str, rate: float | Tensor = RATE) -> Tensor:
    rule, params = make_rule(CONFIGS[name]), start()
    state = rule.init(SIZE)
    for gradient in gradients():
        rule.apply(params, gradient, state, rate)
    return params


@pytest.mark.parametrize("name", TORCH)
def test_rule_equals_torch(name: str) -> None:
    reference = start().requires_grad_()
    optimizer = TORCH[name]([reference])
    for gradient in gradients():
        reference.grad = gradient
        optimizer.step()
    torch.testing.assert_close(trained(name), reference.detach(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-18, 1e-14, 1e-10])
def test_adam_equals_torch_where_gradients_vanish(scale: float) -> None:
    rule, params, reference = make_rule(OptimizerConfig(rule="adam", epsilon=1e-8)), start(), start().requires_grad_()
    state, optimizer = rule.init(SIZE), torch.optim.Adam([reference], RATE, eps=1e-8)
    for gradient in gradients():
        reference.grad = gradient * scale
        optimizer.step()
        rule.apply(params, gradient * scale, state, RATE)
    torch.testing.assert_close(params - start(), reference.detach() - start(), atol=1e-6, rtol=1e-5)


def test_rmsprop_with_epsilon_inside_equals_float64() -> None:
    params, square = start().double().numpy(), np.ones(SIZE)
    for gradient in gradients(torch.float64):
        g = gradient.numpy()
        square = 0.99 * square + 0.01 * g * g
        params = params - RATE * g / np.sqrt(square + 0.1)
    np.testing.assert_allclose(trained("rmsprop-inside").numpy(), params, atol=1e-6, rtol=1e-6)


def test_adam_in_tensorflow_form_equals_float64() -> None:
    params, mean, square = start().double().numpy(), np.zeros(SIZE), np.zeros(SIZE)
    for t, gradient in enumerate(gradients(torch.float64), start=1):
        g = gradient.numpy()
        mean = 0.8 * mean + 0.2 * g
        square = 0.75 * square + 0.25 * g * g
        rate = RATE * np.sqrt(1 - 0.75**t) / (1 - 0.8**t)
        params = params - rate * mean / (np.sqrt(square) + 1e-3)
    np.testing.assert_allclose(trained("adam-tf").numpy(), params, atol=1e-6, rtol=1e-6)


def test_adam_in_tensorflow_form_on_a_device_equals_the_one_in_one_pass() -> None:
    rule, params = make_rule(CONFIGS["adam-tf"]), start()
    assert isinstance(rule, Adam)
    state = rule.init(SIZE)
    for gradient in gradients():
        t = state["t"].add_(1)
        rule._apply_without_waiting(params, gradient, state["mean"], state["square"], t, RATE)
    torch.testing.assert_close(params, trained("adam-tf"), atol=1e-6, rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rate", [RATE, torch.tensor(RATE)])
@pytest.mark.parametrize("name", CONFIGS)
def test_rules_on_a_gpu_equal_those_on_a_cpu(name: str, rate: float | Tensor) -> None:
    rule, params = make_rule(CONFIGS[name]), start().cuda()
    state = rule.init(SIZE, "cuda")
    for gradient in gradients():
        rule.apply(params, gradient.cuda(), state, rate.cuda() if isinstance(rate, Tensor) else rate)
    torch.testing.assert_close(params.cpu(), trained(name), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adam-tf"])
def test_adam_of_a_device_is_that_of_a_cpu(name: str, monkeypatch: Any) -> None:
    """In passes that do not look at the number of the update."""
    rule, params = make_rule(CONFIGS[name]), start()
    monkeypatch.setattr(Adam, "_apply_in_one_pass", Adam._apply_without_waiting)
    state = rule.init(SIZE)
    for gradient in gradients():
        rule.apply(params, gradient, state, RATE)
    monkeypatch.undo()
    torch.testing.assert_close(params, trained(name), atol=1e-6, rtol=1e-6)


def test_the_forms_with_torch_names_differ_from_their_variants() -> None:
    def one_step(**settings: Any) -> Tensor:
        rule, params = make_rule(OptimizerConfig(epsilon=0.1, **settings)), torch.zeros(SIZE)
        rule.apply(params, next(gradients()), rule.init(SIZE), RATE)
        return params

    assert not torch.allclose(one_step(rule="adam"), one_step(rule="adam-tf"))
    assert not torch.allclose(one_step(rule="rmsprop"), one_step(rule="rmsprop-inside"))
    assert not torch.allclose(one_step(rule="rmsprop"), one_step(rule="rmsprop", initial_accumulator=1.0))


@pytest.mark.parametrize("name", CONFIGS)
def test_learning_rate_may_be_a_tensor_and_may_be_zero(name: str) -> None:
    torch.testing.assert_close(trained(name, torch.tensor(RATE)), trained(name), atol=1e-6, rtol=1e-6)
    assert torch.equal(trained(name, torch.tensor(0.0)), start())
    assert torch.equal(trained(name, 0.0), start())


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(CONFIGS)), cuts=st.lists(st.integers(0, SIZE // 16), max_size=6))
def test_chunks_equal_the_whole(name: str, cuts: list[int]) -> None:
    rule, params = make_rule(CONFIGS[name]), start()
    edges = [0, *(16 * cut for cut in sorted(cuts)), SIZE]
    parts = [slice(a, b) for a, b in pairwise(edges)]
    whole = rule.init(SIZE)
    states = [{key: value[part] if value.dim() else value.clone() for key, value in whole.items()} for part in parts]
    for gradient in gradients():
        for part, state in zip(parts, states, strict=True):
            rule.apply(params[part], gradient[part], state, RATE)
    assert torch.equal(params, trained(name))


def test_unknown_rule_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean adam"):
        make_rule(OptimizerConfig(rule="adamm"))  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_global_norm_clip_equals_torch(max_norm: float) -> None:
    gradient = next(gradients())
    reference = torch.zeros(SIZE, requires_grad=True)
    reference.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_([reference], max_norm)
    torch.testing.assert_close(global_norm_clip(gradient, max_norm), norm)
    torch.testing.assert_close(gradient, reference.grad)


def test_average_norm_clip_scales_each_tensor_to_its_limit() -> None:
    gradient = torch.cat([torch.full((4,), 3.0), torch.full((100,), 0.5), torch.zeros(5)])
    # norms / sizes: 6 / 4 = 1.5 (clipped), 5 / 100 = 0.05 (kept), 0 (kept)
    average_norm_clip(gradient, [slice(0, 4), slice(4, 104), slice(104, 109)], 0.1)
    torch.testing.assert_close(gradient[:4], torch.full((4,), 3.0 * 0.1 / 1.5))
    assert torch.equal(gradient[4:104], torch.full((100,), 0.5))
    assert torch.equal(gradient[104:], torch.zeros(5))

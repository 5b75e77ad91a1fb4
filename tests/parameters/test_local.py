from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.config import OptimizerConfig
from phalanx.errors import UserError
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.types import Gradient

RULES = ["rmsprop", "rmsprop-inside", "adam", "adam-tf", "adagrad", "sgd"]


def store_of(model: nn.Module, **flags: Any) -> LocalStore:
    parameters, config = FlatParameters(model), OptimizerConfig(**flags)
    return LocalStore(parameters, make_rule(config), make_clip(config, parameters.slices.values()))


def make_store(rule: str = "adam") -> LocalStore:
    torch.manual_seed(0)
    return store_of(nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(4, 2)), rule=rule, momentum=0.9, clip="none")


def gradient_of(flat: Tensor, version: int = 0) -> Gradient:
    return Gradient(flat, torch.tensor(0.0), version)


def push(store: LocalStore, seeds: range) -> None:
    for seed in seeds:
        flat = torch.randn(store.parameters.flat.shape, generator=torch.Generator().manual_seed(seed))
        store.push(gradient_of(flat, store.version), 0.01)


def test_push_changes_the_model_and_counts_versions() -> None:
    model = nn.Linear(2, 1, bias=False)
    store = store_of(model, rule="sgd", clip="none")
    before = model.weight.detach().clone()
    assert store.pull(store.parameters) == 0
    assert store.push(gradient_of(torch.tensor([1.0, -2.0])), 0.5) == 1
    torch.testing.assert_close(model.weight.detach(), before - torch.tensor([[0.5, -1.0]]))
    assert store.pull(store.parameters) == store.version == 1


@pytest.mark.parametrize("rule", RULES)
def test_restore_goes_on_bit_for_bit(rule: str) -> None:
    store = make_store(rule)
    push(store, range(5))
    saved, weights = store.state(), store.parameters.named_tensors()
    vectors = {key: value.clone() for key, value in saved["rule"].items()}
    push(store, range(5, 10))

    other = make_store(rule)
    other.parameters.flat.zero_()
    other.parameters.load(weights)
    other.restore(saved)
    assert other.version == 5
    push(other, range(5, 10))
    assert torch.equal(other.parameters.flat, store.parameters.flat)
    assert other.version == store.version == 10
    assert saved["version"] == 5 and vectors
    assert all(torch.equal(saved["rule"][key], vector) for key, vector in vectors.items()), "what is saved is a copy"
    assert not any(torch.equal(store.state()["rule"][key], vector) for key, vector in vectors.items())


def test_state_of_another_rule_or_model_is_refused() -> None:
    with pytest.raises(UserError, match="holds velocity, but this rule keeps mean, square, t"):
        make_store("adam").restore(make_store("sgd").state())
    small = store_of(nn.Linear(1, 1), rule="adam")
    with pytest.raises(UserError, match="for 2 parameters"):
        small.restore(make_store("adam").state())

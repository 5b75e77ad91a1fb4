from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.config import OptimizerConfig
from phalanx.errors import UserError
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_rule
from phalanx.types import Gradient

RULES = ["rmsprop", "rmsprop-inside", "adam", "adam-tf", "adagrad", "sgd"]


def make_store(rule: str = "adam") -> LocalStore:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Linear(4, 2))
    return LocalStore(FlatParameters(model), make_rule(OptimizerConfig(rule=rule, momentum=0.9)))  # type: ignore[arg-type]


def push(store: LocalStore, seeds: range) -> None:
    for seed in seeds:
        flat = torch.randn(store.parameters.flat.shape, generator=torch.Generator().manual_seed(seed))
        store.push(Gradient(flat, store.version), 0.01)


def test_push_changes_the_model_and_counts_versions() -> None:
    model = nn.Linear(2, 1, bias=False)
    store = LocalStore(FlatParameters(model), make_rule(OptimizerConfig(rule="sgd")))
    before = model.weight.detach().clone()
    assert store.pull(model) == 0
    assert store.push(Gradient(torch.tensor([1.0, -2.0]), 0), 0.5) == 1
    torch.testing.assert_close(model.weight.detach(), before - torch.tensor([[0.5, -1.0]]))
    assert store.pull(model) == store.version == 1


@pytest.mark.parametrize("rule", RULES)
def test_restore_goes_on_bit_for_bit(rule: str) -> None:
    store = make_store(rule)
    push(store, range(5))
    saved = store.state()
    push(store, range(5, 10))

    other = make_store(rule)
    other.parameters.flat.zero_()
    other.restore(saved)
    assert other.version == 5
    push(other, range(5, 10))
    assert torch.equal(other.parameters.flat, store.parameters.flat)
    assert other.version == store.version == 10
    assert saved["version"] == 5 and not torch.equal(
        saved["parameters"]["1.weight"], store.state()["parameters"]["1.weight"]
    )


def test_state_of_another_rule_or_model_is_refused() -> None:
    with pytest.raises(UserError, match="holds velocity, but this rule keeps mean, square, t"):
        make_store("adam").restore(make_store("sgd").state())
    small = LocalStore(FlatParameters(nn.Linear(1, 1)), make_rule(OptimizerConfig(rule="adam")))
    with pytest.raises(UserError, match="for 2 parameters"):
        small.restore(make_store("adam").state())

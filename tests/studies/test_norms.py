"""The study of norms: what is noted of an update is what the update did."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.config import OptimizerConfig
from phalanx.config.presets import preset
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.studies.norms import StudyOptions, WeighedStore, variant
from phalanx.studies.variants import largest, layers, with_batch_size
from phalanx.types import Gradient


def weighed(rule: str = "sgd") -> WeighedStore:
    torch.manual_seed(0)
    parameters = FlatParameters(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 20)))
    config = OptimizerConfig(rule=rule, clip="global", clip_norm=1.0)
    clip = make_clip(config, parameters.slices.values())
    return WeighedStore(LocalStore(parameters, make_rule(config), clip))


def test_norms_are_those_of_each_layer_before_the_clip():
    """Under SGD the step is the clipped gradient times the learning rate."""
    store = weighed()
    gradient = torch.arange(16 + 100, dtype=torch.float32)
    parts = {"0": slice(0, 16), "1": slice(16, 116), "all": slice(0, 116)}
    assert store.layers == parts
    store.push(Gradient(gradient.clone(), torch.zeros(()), 0), 0.1)
    rows = {row["layer"]: row for row in store.take()}
    for layer, part in parts.items():
        norm = float(gradient[part].norm())
        assert rows[layer]["gradient"] == pytest.approx(norm)
        assert rows[layer]["step"] == pytest.approx(0.1 * norm / float(gradient.norm()), rel=1e-4)
        assert rows[layer]["parameters"] == pytest.approx(float(store.parameters.flat[part].norm()))


def test_means_are_of_the_updates_since_they_were_last_taken():
    store = weighed()
    for size in (1.0, 3.0):
        store.push(Gradient(torch.full((116,), size), torch.zeros(()), 0), 0.1)
    assert store.take()[-1]["gradient"] == pytest.approx(2 * 116**0.5)
    store.push(Gradient(torch.full((116,), 5.0), torch.zeros(()), 0), 0.1)
    assert store.take()[-1]["gradient"] == pytest.approx(5 * 116**0.5)


@pytest.mark.parametrize("rule", ["adam-tf", "rmsprop-inside"])
def test_weighing_changes_nothing(rule):
    store, plain = weighed(rule), weighed(rule)
    for seed in range(5):
        gradient = torch.randn(116, generator=torch.Generator().manual_seed(seed))
        for one, push in ((store, store.push), (plain, lambda *it: LocalStore.push(plain, *it))):
            assert push(Gradient(gradient.clone(), torch.zeros(()), 0), 0.01) == seed + 1
            assert one.version == seed + 1
    assert torch.equal(store.parameters.flat, plain.parameters.flat)


def test_layers_are_modules_and_the_largest_is_found():
    parts = layers(
        {"a.weight": slice(0, 6), "a.bias": slice(6, 8), "b.c.weight": slice(8, 100), "alone": slice(100, 101)}
    )
    assert parts == {"a": slice(0, 8), "b.c": slice(8, 100), "alone": slice(100, 101), "all": slice(0, 101)}
    assert largest(parts) == "b.c"


@pytest.mark.parametrize("batch", [32, 64, 512, 2048])
def test_the_intensity_stays_while_batches_grow(batch):
    experiment = with_batch_size(preset("dqn-catch"), batch, exponent=0.5).validate()
    updates = experiment.algorithm.updates_per_rollout(experiment.sampler.rollout_steps)
    assert (
        updates >= 1 and updates * batch / experiment.sampler.rollout_steps == preset("dqn-catch").algorithm.intensity
    )
    rate = preset("dqn-catch").optimizer.learning_rate * (batch / preset("dqn-catch").algorithm.batch_size) ** 0.5
    assert experiment.optimizer.learning_rate == pytest.approx(rate)


def test_two_batch_sizes_have_whole_updates_in_the_same_rollout():
    one = with_batch_size(preset("dqn-catch"), 96, 0.0, also=160).validate()
    other = with_batch_size(preset("dqn-catch"), 160, 0.0, also=96).validate()
    assert one.sampler == other.sampler


def test_learning_rates_follow_the_batch_size_as_told():
    options = StudyOptions(batch_sizes=(32, 512))
    rates = {
        (rule, batch): variant(preset("dqn-catch"), rule, batch, options).validate().optimizer.learning_rate
        for rule in ("adam", "rmsprop")
        for batch in (32, 512)
    }
    assert rates["adam", 512] == rates["adam", 32] == options.adam_rate
    assert rates["rmsprop", 512] == pytest.approx(16 * rates["rmsprop", 32])
    assert variant(preset("dqn-catch"), "adam", 512, options).optimizer.epsilon == 0.01 / 512

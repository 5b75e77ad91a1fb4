"""What every parameter store promises, checked for all of them.

A later store is one more row of `STORES`. It must do with one learner what the reference says: the clip, the rule and
the version are its own business. Many learners are the subject of its own tests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.config import OptimizerConfig
from phalanx.errors import NotFinite, UserError
from phalanx.parameters.allreduce import AllReduceStore
from phalanx.parameters.chunked import CentralParameters, ChunkLockedStore
from phalanx.parameters.client import ShardedStore, ShardsHere
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.parameters.locked import LockedStore, SharedParameters
from phalanx.parameters.rules import make_clip, make_rule
from phalanx.parameters.shards import ParameterShard, QuorumShard, cut
from phalanx.runtime.group import Group, meeting_point
from phalanx.seams import CapturableStore, ParameterStore
from phalanx.types import Gradient

MakeStore = Callable[[FlatParameters, OptimizerConfig], ParameterStore]


def make_local(parameters: FlatParameters, config: OptimizerConfig) -> ParameterStore:
    return LocalStore(parameters, make_rule(config), make_clip(config, parameters.slices.values()))


def make_locked(parameters: FlatParameters, config: OptimizerConfig) -> ParameterStore:
    """As one thread sees it: the parameters themselves are elsewhere."""
    theirs = nn.Module()
    theirs.vector = nn.Parameter(parameters.flat.clone())
    clip = make_clip(config, parameters.slices.values())
    shared = SharedParameters(LocalStore(FlatParameters(theirs), make_rule(config), clip))
    return LockedStore(shared, parameters)


def make_chunked(chunks: int) -> MakeStore:
    def make(parameters: FlatParameters, config: OptimizerConfig) -> ParameterStore:
        rule = make_rule(config)
        central = CentralParameters.create(parameters.flat, rule.init(parameters.flat.numel()), chunks)
        return ChunkLockedStore(central, parameters, rule, make_clip(config, parameters.slices.values()))

    return make


@functools.cache
def group_of_one() -> Group:
    return Group(meeting_point(), 0, 0, 1, timeout=60.0)


def make_allreduce(parameters: FlatParameters, config: OptimizerConfig) -> ParameterStore:
    clip = make_clip(config, parameters.slices.values())
    store = AllReduceStore(parameters, make_rule(config), clip, learners=1, capturable=False)
    store.join(group_of_one(), source=0)
    return store


def make_sharded(count: int, quorum: bool = False) -> MakeStore:
    def make(parameters: FlatParameters, config: OptimizerConfig) -> ParameterStore:
        rule, flat = make_rule(config), parameters.flat
        parts = cut(flat.numel(), count)
        shards = [QuorumShard(flat[p], rule, quorum=1) if quorum else ParameterShard(flat[p], rule) for p in parts]
        clip = make_clip(config, parameters.slices.values())
        return ShardedStore(ShardsHere(shards), parameters, rule, clip, consistent=quorum)

    return make


STORES: dict[str, MakeStore] = {
    "local": make_local,
    "all-reduce": make_allreduce,
    "locked": make_locked,
    "chunk-locked, one chunk": make_chunked(1),
    "chunk-locked, three chunks": make_chunked(3),
    "chunk-locked, a chunk for every 16 numbers": make_chunked(10),
    "sharded, one shard": make_sharded(1),
    "sharded, four shards": make_sharded(4),
    "sharded, a shard for every 16 numbers": make_sharded(10),
    "sharded with a quorum of one, three shards": make_sharded(3, quorum=True),
}
RULES: dict[str, dict[str, Any]] = {
    "rmsprop": {"decay": 0.95, "epsilon": 1e-3},
    "rmsprop-inside": {"epsilon": 0.1, "initial_accumulator": 1.0},
    "adam": {"epsilon": 1e-3},
    "adam-tf": {"epsilon": 1e-3, "beta1": 0.8, "beta2": 0.75},
    "adagrad": {"epsilon": 1e-3, "initial_accumulator": 0.1},
    "sgd": {"momentum": 0.9},
    "sgd without momentum": {"rule": "sgd"},
}
CLIPS: dict[str, float] = {"none": 0.5, "global": 0.5, "average": 0.02}
BAD = [math.nan, math.inf, -math.inf]


def small_model(seed: int = 0) -> nn.Module:
    """153 parameters in tensors of different sizes and layouts; no multiple of 16."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 5, 2), nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(4, 1, bias=False))


def settings_of(rule: str, clip: str = "global", clip_norm: float | None = None) -> OptimizerConfig:
    values = {"rule": rule, "clip": clip, "clip_norm": CLIPS[clip] if clip_norm is None else clip_norm}
    return OptimizerConfig(**{**values, **RULES[rule]})


class Learner:
    """A store with the parameters it moves, as a learner has them."""

    def __init__(self, make: MakeStore, config: OptimizerConfig, seed: int = 0) -> None:
        self.parameters = FlatParameters(small_model(seed))
        self.store = make(self.parameters, config)

    def gradient(self, flat: Tensor, loss: float = 1.0) -> Gradient:
        return Gradient(flat.clone(), torch.tensor(loss), self.version)

    def push(self, flat: Tensor, rate: float = 0.01, loss: float = 1.0) -> Gradient:
        """Push, and bring the learner's own parameters to what came of it."""
        gradient = self.gradient(flat, loss)
        version = self.store.push(gradient, rate)
        assert self.store.pull(self.parameters) == version
        return gradient

    @property
    def version(self) -> int:
        return self.store.pull(self.parameters)

    def everything(self) -> list[Any]:
        """Parameters, version and rule state, as values that can be compared."""
        version = self.version
        return [version, plain(self.parameters.flat), plain(self.store.state())]


def plain(value: Any) -> Any:
    """Tensors as bytes, so that equal means equal to the last bit."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def gradients(count: int, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    """Of very different sizes within one vector."""
    size = sum(p.numel() for p in small_model().parameters())
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-2, 1, size)[torch.randperm(size, generator=generator)]
    return [torch.randn(size, generator=generator) * spread * scale for _ in range(count)]


class Reference:
    """Clip and rule in float64, parameter by parameter as the configuration's sentences say it."""

    def __init__(self, parameters: FlatParameters, config: OptimizerConfig) -> None:
        self.config = config
        self.slices = list(parameters.slices.values())
        self.values = parameters.flat.double().numpy().copy()
        self.start = self.values.copy()
        self.mean = np.zeros_like(self.values)
        self.square = np.zeros_like(self.values)
        if config.rule in ("rmsprop", "rmsprop-inside", "adagrad"):
            self.square += config.initial_accumulator
        self.t = 0

    def clip(self, gradient: np.ndarray) -> None:
        config, norm = self.config, math.sqrt((gradient**2).sum())
        if config.clip == "global" and norm > config.clip_norm:
            gradient *= config.clip_norm / norm
        elif config.clip == "average":
            for part in self.slices:
                norm, size = math.sqrt((gradient[part] ** 2).sum()), part.stop - part.start
                if norm > config.clip_norm * size:
                    gradient[part] *= config.clip_norm * size / norm

    def push(self, flat: Tensor, rate: float) -> None:
        c, g = self.config, flat.double().numpy().copy()
        self.clip(g)
        self.t += 1
        if c.rule.startswith("rmsprop"):
            self.square = c.decay * self.square + (1 - c.decay) * g**2
            inside = c.rule == "rmsprop-inside"
            step = g / (np.sqrt(self.square + c.epsilon) if inside else np.sqrt(self.square) + c.epsilon)
        elif c.rule.startswith("adam"):
            self.mean = c.beta1 * self.mean + (1 - c.beta1) * g
            self.square = c.beta2 * self.square + (1 - c.beta2) * g**2
            first, second = 1 - c.beta1**self.t, math.sqrt(1 - c.beta2**self.t)
            if c.rule == "adam":
                step = self.mean / first / (np.sqrt(self.square) / second + c.epsilon)
            else:
                step = second / first * self.mean / (np.sqrt(self.square) + c.epsilon)
        elif c.rule == "adagrad":
            self.square = self.square + g**2
            step = g / (np.sqrt(self.square) + c.epsilon)
        else:
            step = self.mean = c.momentum * self.mean + g
        self.values = self.values - rate * step

    def check(self, flat: Tensor) -> None:
        change, expected = flat.double().numpy() - self.start, self.values - self.start
        # float32 parameters of size 1 are rounded at each push; what the rule adds up is much more exact
        np.testing.assert_allclose(change, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest) -> MakeStore:
    return STORES[request.param]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("store", STORES)
def test_a_push_is_clip_and_rule(store: str, clip: str, rule: str) -> None:
    """Whatever the sizes of gradients and learning rates; what the clip measures is told."""

    @settings(max_examples=15, deadline=None)
    @given(
        seed=st.integers(0, 2**32),
        scale=st.sampled_from([1e-2, 1.0, 1e2]),
        clip_norm=st.sampled_from([CLIPS[clip], 1e-3, 3.0, 1e6]),
        rates=st.lists(st.sampled_from([0.0, 1e-3, 1e-2, 0.1]), min_size=1, max_size=8),
    )
    def check(seed: int, scale: float, clip_norm: float, rates: list[float]) -> None:
        config = settings_of(rule, clip, clip_norm)
        learner = Learner(STORES[store], config)
        reference = Reference(learner.parameters, config)
        for rate, flat in zip(rates, gradients(len(rates), seed, scale), strict=True):
            gradient = learner.push(flat, rate)
            assert gradient.norm is not None
            assert float(gradient.norm) == pytest.approx(float(flat.double().norm()), rel=1e-5)
            reference.push(flat, rate)
            reference.check(learner.parameters.flat)

    check()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", CLIPS)
def test_a_gradient_of_zero_leaves_finite_parameters(make: MakeStore, clip: str, rule: str) -> None:
    config = settings_of(rule, clip)
    learner = Learner(make, config)
    reference = Reference(learner.parameters, config)
    (one,) = gradients(1)
    for flat in (torch.zeros_like(one), one, torch.zeros_like(one)):
        assert float(learner.push(flat).norm) == pytest.approx(float(flat.norm()), rel=1e-5)  # type: ignore[arg-type]
        reference.push(flat, 0.01)
        reference.check(learner.parameters.flat)


def test_the_version_counts_up_by_one(make: MakeStore) -> None:
    learner = Learner(make, settings_of("sgd"))
    assert learner.version == 0
    for version, flat in enumerate(gradients(5), start=1):
        gradient = learner.gradient(flat)
        assert learner.store.push(gradient, 0.01) == version
        assert learner.version == learner.version == version  # a pull counts nothing


@settings(max_examples=30, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("store", STORES)
def test_what_is_not_finite_changes_nothing(store: str, clip: str, data: st.DataObject) -> None:
    """Nor does a push that was refused show in any later one."""
    config = settings_of(data.draw(st.sampled_from(sorted(RULES))), clip)
    learner, untroubled = (Learner(STORES[store], config) for _ in range(2))
    count = data.draw(st.integers(0, 3))
    flats = gradients(count + 2)
    for flat in flats[:count]:
        learner.push(flat)
        untroubled.push(flat)
    before = learner.everything()
    bad, place = flats[count].clone(), data.draw(st.integers(0, flats[0].numel() - 1))
    loss = 1.0
    if data.draw(st.booleans()):
        bad[place] = data.draw(st.sampled_from(BAD))
    else:
        loss = data.draw(st.sampled_from(BAD))
    for _ in range(2):
        with pytest.raises(NotFinite):
            learner.store.push(learner.gradient(bad, loss), 0.01)
        assert learner.everything() == before
    for flat in flats[count:]:
        learner.push(flat)
        untroubled.push(flat)
    assert learner.everything() == untroubled.everything()


def test_a_gradient_that_cancels_what_is_not_finite_is_refused_all_the_same(make: MakeStore) -> None:
    learner = Learner(make, settings_of("sgd", "none"))
    before, (flat,) = learner.everything(), gradients(1)
    flat[3], flat[4] = math.inf, -math.inf
    with pytest.raises(NotFinite):
        learner.store.push(learner.gradient(flat, math.inf), 0.01)
    assert learner.everything() == before


def test_a_pull_brings_another_vector_to_the_same_numbers(make: MakeStore) -> None:
    """And leaves it there until the next pull; a model's rounded copies follow."""
    learner = Learner(make, settings_of("adam"))
    model = small_model(seed=7)
    rounded = model[1].weight
    other = FlatParameters(model, rounded=[rounded])
    assert not torch.equal(other.flat, learner.parameters.flat)
    for version, flat in enumerate(gradients(3), start=1):
        stale = other.flat.clone()
        learner.push(flat)
        assert torch.equal(other.flat, stale)
        assert learner.store.pull(other) == version
        assert torch.equal(other.flat, learner.parameters.flat)
        assert rounded.dtype == torch.bfloat16
        assert torch.equal(rounded, other.named_tensors()["1.weight"].bfloat16())
    assert learner.parameters.flat.data_ptr() != other.flat.data_ptr()


def test_the_model_of_the_learner_follows_its_own_pushes(make: MakeStore) -> None:
    model = small_model()
    rounded = model[1].weight
    parameters = FlatParameters(model, rounded=[rounded])
    store = make(parameters, settings_of("sgd"))
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    (flat,) = gradients(1)
    store.push(Gradient(flat, torch.tensor(0.0), 0), 0.5)
    store.pull(parameters)
    for name, value in parameters.named_tensors().items():
        held = dict(model.named_parameters())[name].detach()
        assert not torch.equal(held, before[name])
        assert torch.equal(held, value.to(held.dtype))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pushes", [0, 4])
def test_a_restored_store_goes_on_bit_for_bit(make: MakeStore, rule: str, pushes: int) -> None:
    config = settings_of(rule)
    learner = Learner(make, config)
    flats = gradients(pushes + 5)
    for flat in flats[:pushes]:
        learner.push(flat)
    weights, saved = learner.parameters.named_tensors(), learner.store.state()
    taken = plain(saved)
    for flat in flats[pushes:]:
        learner.push(flat)
    assert plain(saved) == taken  # it is a copy
    other = Learner(make, config, seed=5)
    other.push(flats[0])  # whatever it did before is gone
    other.parameters.load(weights)
    other.store.restore(saved)
    assert other.version == pushes
    for version, flat in enumerate(flats[pushes:], start=pushes + 1):
        other.push(flat)
        assert other.version == version
    assert other.everything() == learner.everything()
    assert plain(saved) == taken  # nor did the other one take it over


def test_a_state_of_another_rule_or_size_is_refused(make: MakeStore) -> None:
    store = Learner(make, settings_of("adam")).store
    with pytest.raises(UserError, match="optimiser"):
        store.restore(Learner(make, settings_of("sgd")).store.state())
    with pytest.raises(UserError, match="optimiser"):
        make(FlatParameters(nn.Linear(1, 1)), settings_of("adam")).restore(store.state())


# What a store that can be part of a CUDA graph promises besides


CAPTURABLE = [name for name, make in STORES.items() if Learner(make, settings_of("sgd")).store.capturable]


class Launcher(Learner):
    """Pushes in the two parts of a captured update, on a CPU."""

    store: CapturableStore

    def __init__(self, make: MakeStore, config: OptimizerConfig, seed: int = 0) -> None:
        super().__init__(make, config, seed)
        self.good = torch.tensor(True)

    def launch(self, flat: Tensor, rate: float = 0.0078125, loss: float = 1.0) -> Gradient:
        gradient = self.gradient(flat, loss)
        self.store.launch(gradient, torch.tensor(rate), self.good)
        return gradient


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("store", CAPTURABLE)
def test_launch_and_count_are_a_push(store: str, clip: str, rule: str) -> None:
    config = settings_of(rule, clip)
    whole, parts = Learner(STORES[store], config), Launcher(STORES[store], config)
    for version, flat in enumerate(gradients(6), start=1):
        rate = 2.0**-version  # the same number in any precision
        pushed, launched = whole.push(flat, rate), parts.launch(flat, rate)
        assert parts.version == version - 1  # until the host counts it
        assert parts.store.count_push() == version
        assert pushed.norm is not None and launched.norm is not None
        assert torch.equal(pushed.norm, launched.norm)
        assert bool(parts.good)
        assert parts.everything() == whole.everything()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", ["gradient", "loss"])
@pytest.mark.parametrize("store", CAPTURABLE)
def test_after_a_launch_that_is_not_finite_parameters_stay(store: str, bad: str, rule: str) -> None:
    """Those of all later launches, too; with the rule state put back nothing has happened since the backup."""
    learner = Launcher(STORES[store], settings_of(rule))
    flats = gradients(5)
    for flat in flats[:2]:
        learner.store.back_up_rule_state()  # each backup takes the place of the last
        learner.launch(flat)
        learner.store.count_push()
    learner.store.back_up_rule_state()
    before = learner.everything()
    for value in BAD:
        if bad == "gradient":
            spoilt = flats[2].clone()
            spoilt[-1] = value
            learner.launch(spoilt)
        else:
            learner.launch(flats[2], loss=value)
        assert not bool(learner.good)
        learner.launch(flats[3])
        assert not bool(learner.good)
        assert plain(learner.parameters.flat) == before[1]
        learner.store.put_rule_state_back()
        assert learner.everything() == before
        learner.good.fill_(True)
    learner.launch(flats[4])
    assert plain(learner.parameters.flat) != before[1]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("store", CAPTURABLE)
def test_the_mutated_tensors_are_all_that_a_launch_changes(store: str, rule: str) -> None:
    """A capture launches a few times to warm up, and undoes it by writing these back."""
    learner = Launcher(STORES[store], settings_of(rule))
    flats = gradients(4)
    learner.launch(flats[0])
    learner.store.count_push()
    before = learner.everything()
    tensors = learner.store.mutated_tensors()
    copies = [tensor.clone() for tensor in tensors]
    for flat in flats[1:]:
        learner.launch(flat)
    assert learner.everything() != before
    again = learner.store.mutated_tensors()
    assert [t.data_ptr() for t in again] == [t.data_ptr() for t in tensors]  # a graph writes where they were
    for tensor, copy in zip(tensors, copies, strict=True):
        tensor.copy_(copy)
    assert learner.everything() == before

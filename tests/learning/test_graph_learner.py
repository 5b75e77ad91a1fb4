"""The learner of a GPU without one: its updates run eagerly, as after a capture that failed, or are played from a tape,
as from a graph. More is in `tests/gpu`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tape import TapeCapturer

from phalanx.config import ToyConfig
from phalanx.config.presets import preset
from phalanx.errors import NotFinite
from phalanx.learning import graph_learner
from phalanx.learning.graph_learner import GraphLearner
from phalanx.parameters import rules
from phalanx.parameters.local import LocalStore
from phalanx.replay import storage
from phalanx.replay.memory import Replay
from phalanx.replica.build import make_replica
from phalanx.replica.replica import Replica
from phalanx.runtime.device import Compute
from phalanx.topologies import serial

ON_TAPE = "rmsprop-inside"  # a rule that does the same on a CPU as on a GPU


class Eager:
    """A capturer that never succeeds."""

    def __init__(self, what: str, report: Any) -> None: ...

    def capture(self, work: Any, undo: Any, stream: Any) -> Any:
        return work


def clip_without_a_look(gradient: torch.Tensor, max_norm: float) -> torch.Tensor:
    """As on a GPU."""
    norm = torch.linalg.vector_norm(gradient)
    gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
    return norm


@pytest.fixture
def replica_of(monkeypatch):
    """A replica of a preset, with the graph learner or without; with a tape for a graph it also draws from memory as
    it does on a GPU."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)

    def make(
        name: str, captured: bool = True, taped: bool = False, rule: str = "", env: Any = None, **algorithm: Any
    ) -> Replica:
        monkeypatch.setattr(graph_learner, "Capturer", TapeCapturer if taped else Eager)
        experiment, compute = preset(name), Compute(torch.device("cpu"), graphs=captured)
        experiment = dataclasses.replace(
            experiment,
            env=env or experiment.env,
            algorithm=dataclasses.replace(experiment.algorithm, **algorithm),
            optimizer=dataclasses.replace(experiment.optimizer, rule=rule or experiment.optimizer.rule),
        ).validate()
        replica = make_replica(experiment, serial.make_envs(experiment, compute, print), compute, print)
        assert isinstance(replica.learner, GraphLearner) == captured
        if taped:
            monkeypatch.setattr(rules, "global_norm_clip", clip_without_a_look)
        if taped and isinstance(replica.experience, Replay):
            replica.experience.storage.may_look = False
        return replica

    return make


def poison(replica: Replica, monkeypatch: Any, field: str) -> list[Any]:
    """Spoil the first batch of the next iteration; the batches of it."""
    loss, seen = replica.learner.algorithm.loss, []

    def spoilt(model: Any, batch: Any, scalars: Any) -> Any:
        if not seen or batch is seen[0]:
            getattr(batch, field)[0] = math.nan
        seen.append(batch)
        return loss(model, batch, scalars)

    monkeypatch.setattr(replica.learner.algorithm, "loss", spoilt)
    return seen


def iterate_until_it_learns(replica: Replica) -> None:
    while replica.progress.updates < 20:
        replica.iterate()


@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch", "dqn-catch", "c51-catch", "eps-rainbow-catch"])
def test_it_learns_what_the_learner_learns(replica_of, name):
    flats = []
    for captured in (True, False):
        replica = replica_of(name, captured)
        iterate_until_it_learns(replica)
        flats.append(replica.parameters.flat.clone())
    torch.testing.assert_close(*flats, rtol=0, atol=1e-5)  # it keeps the learning rate in float32


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch", "dqn-catch", "c51-catch", "eps-rainbow-catch"])
def test_what_is_captured_learns_what_the_learner_learns(replica_of, monkeypatch, name, truncates):
    """Through a memory that is full and goes round, so that what graphs read of it moves, with and without episodes
    that are cut short, for whose last frames there is a table that grows."""
    monkeypatch.setattr(storage, "MIN_LAST_FRAMES", 8)
    env = ToyConfig("counter", stack=2, length=5) if truncates else None
    memory = {"replay_size": 600, "learning_starts": 200} if hasattr(preset(name).algorithm, "replay_size") else {}
    replicas = [replica_of(name, captured, captured, ON_TAPE, env, **memory) for captured in (True, False)]
    for replica in replicas:
        while replica.progress.steps < 1500:
            replica.iterate()
    taped, eager = replicas
    assert taped.progress.updates == eager.progress.updates > 10
    assert len(taped.learner.graphs) < 4
    torch.testing.assert_close(taped.parameters.flat, eager.parameters.flat, rtol=0, atol=1e-5)
    if name == "eps-rainbow-catch":
        torch.testing.assert_close(
            taped.experience.index.leaves[:-1], eager.experience.index.leaves[:-1], rtol=1e-3, atol=1
        )


@pytest.mark.parametrize("name", ["a2c-catch", "ppo-catch", "eps-rainbow-catch"])
def test_a_graph_that_ends_with_the_gradient_learns_the_same(replica_of, monkeypatch, name):
    """As with a store whose push no graph can hold."""
    flats, metrics = [], []
    for whole in (True, False):
        monkeypatch.setattr(LocalStore, "capturable", whole)
        replica = replica_of(name, taped=True, rule=ON_TAPE)
        assert replica.learner.whole_updates == whole
        iterate_until_it_learns(replica)
        flats.append(replica.parameters.flat.clone())
        metrics.append(replica.learner.take_metrics() or replica.iterate().metrics)
        assert replica.progress.version == replica.progress.updates == replica.store.version
    torch.testing.assert_close(*flats, rtol=0, atol=1e-5)
    assert metrics[0].keys() == metrics[1].keys()
    for key, value in metrics[0].items():
        assert metrics[1][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("field", ["returns"])
def test_a_gradient_that_is_not_finite_is_refused_by_a_store_outside_of_the_graph(replica_of, monkeypatch, field):
    monkeypatch.setattr(LocalStore, "capturable", False)
    replica = replica_of("a2c-catch")
    poison(replica, monkeypatch, field)
    before = replica.parameters.flat.clone()
    with pytest.raises(NotFinite) as raised:
        replica.iterate()
    assert bool(torch.isnan(getattr(raised.value.batch, field)).any())
    assert torch.equal(replica.parameters.flat, before)


def test_a_table_that_grows_makes_a_captured_update_stale(replica_of):
    replica = replica_of("dqn-catch", taped=True, rule=ON_TAPE)
    iterate_until_it_learns(replica)
    (before,) = replica.learner.graphs.values()
    memory = replica.experience.storage
    memory._keep_last_frames([memory.drawable[0]], memory.frames.view(-1, *memory.frames.shape[2:])[:1] + 1)
    replica.iterate()
    (after,) = replica.learner.graphs.values()
    assert after is not before


@pytest.mark.parametrize("name", ["dqn-catch", "eps-rainbow-catch"])
def test_a_batch_drawn_late_that_was_not_finite_is_shown(replica_of, name):
    """And nothing is learnt from then on, so that the same rows are drawn again when it is to be shown."""
    replica = replica_of(name, taped=True, rule=ON_TAPE)
    iterate_until_it_learns(replica)
    memory = replica.experience.storage
    memory.reward.view(-1)[memory.drawable[5] % memory.rows] = math.nan
    before = replica.parameters.flat.clone()
    with pytest.raises(NotFinite, match="one of the updates before") as error:
        for _ in range(200):
            before = replica.parameters.flat.clone()
            replica.iterate()
    assert not torch.isfinite(error.value.batch.returns).all()
    assert torch.isfinite(replica.parameters.flat).all() and torch.isfinite(before).all()


@pytest.mark.parametrize("name", ["dqn-catch", "eps-rainbow-catch"])
def test_what_was_not_finite_is_shown_and_nothing_is_learnt_from_then_on(replica_of, monkeypatch, name):
    replica = replica_of(name)
    iterate_until_it_learns(replica)
    seen = poison(replica, monkeypatch, "returns")
    before = replica.parameters.flat.clone()
    rule_before = replica.store.state()["rule"]
    with pytest.raises(NotFinite, match="one of the updates before") as error:
        replica.iterate()
    assert len(seen) > 2  # more updates followed
    assert not torch.isfinite(error.value.batch.returns).all()
    assert torch.equal(replica.parameters.flat, before)
    for key, value in replica.store.rule_state.items():
        assert torch.equal(value, rule_before[key]), key
    if name == "eps-rainbow-catch":
        assert (replica.experience.index.sums >= 0).all()


def test_the_batch_is_found_among_those_of_several_graphs(replica_of, monkeypatch):
    replica = replica_of("dqn-catch")
    iterate_until_it_learns(replica)
    learner, progress = replica.learner, replica.progress
    batches = [replica.experience.draw(count, 1.0, torch.Generator().manual_seed(0)) for count in (8, 16, 8, 16)]
    for batch in batches[:2]:
        learner.update(batch, progress, replica.experience)
    learner.check()
    batches[2].returns[3] = math.nan
    before = replica.parameters.flat.clone()
    for batch in batches[2:]:
        learner.update(batch, progress, replica.experience)
    with pytest.raises(NotFinite) as error:
        learner.check()
    assert torch.equal(error.value.batch.ids, batches[2].ids)
    assert torch.equal(replica.parameters.flat, before)


def test_graphs_read_the_numbers_of_their_update(replica_of):
    """Learning rate and clip move from one iteration to the next, and stay within one."""
    replica = replica_of("ppo-catch", taped=True, rule=ON_TAPE, final_clip=0.0)
    learner, read = replica.learner, []
    learner.learning_rate = lambda progress: 1e-3 / (1 + progress.steps)
    run = graph_learner.CapturedUpdate.run

    def watched(update, batch, good):
        read.append((float(learner.rate), float(learner.scalars["clip"])))
        return run(update, batch, good)

    for _ in range(3):
        steps = replica.progress.steps + replica.collector.last_rollout.action.numel()
        read.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graph_learner.CapturedUpdate, "run", watched)
            replica.iterate()
        assert replica.progress.steps == steps and len(read) > 1
        expected = (1e-3 / (1 + steps), learner.algorithm.scalars(replica.progress)["clip"])
        assert read == [pytest.approx(expected)] * len(read)

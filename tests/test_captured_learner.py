"""The learner of a GPU without one: its updates run eagerly, as after a capture that failed. More is in `tests/gpu`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from phalanx import captured_learner
from phalanx.captured_learner import CapturedLearner
from phalanx.errors import NotFinite
from phalanx.presets import preset
from phalanx.replica import Replica
from phalanx.runtime.device import Compute
from phalanx.topologies import serial


class Eager:
    """A capturer that never succeeds."""

    def __init__(self, what: str, report: Any) -> None: ...

    def capture(self, work: Any, undo: Any, stream: Any) -> Any:
        return work


@pytest.fixture
def replica_of(monkeypatch):
    """A replica of a preset, with the captured learner or without."""
    monkeypatch.setattr(captured_learner, "Capturer", Eager)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)

    def make(name: str, captured: bool = True) -> Replica:
        experiment, compute = preset(name).validate(), Compute(torch.device("cpu"))
        replica = Replica(experiment, serial.make_envs(experiment, compute, print), compute, print)
        mine = replica.learner
        if captured:
            replica.learner = CapturedLearner(
                *(mine.model, mine.parameters, mine.store, mine.algorithm, mine.optimizer, mine.learning_rate),
                *(compute, experiment.run.seed + 2, mine.timing),
                report=print,
            )
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


@pytest.mark.parametrize("name", ["dqn-catch", "eps-rainbow-catch"])
def test_what_was_not_finite_is_shown_and_nothing_is_learnt_from_then_on(replica_of, monkeypatch, name):
    replica = replica_of(name)
    iterate_until_it_learns(replica)
    seen = poison(replica, monkeypatch, "returns")
    before = replica.parameters.flat.clone()
    with pytest.raises(NotFinite, match="one of the updates before") as error:
        replica.iterate()
    assert len(seen) > 2  # more updates followed
    assert not torch.isfinite(error.value.batch.returns).all()
    assert torch.equal(replica.parameters.flat, before)
    if name == "eps-rainbow-catch":
        assert (replica.experience.index.sums >= 0).all()


def test_the_batch_is_found_among_those_of_several_graphs(replica_of, monkeypatch):
    replica = replica_of("dqn-catch")
    iterate_until_it_learns(replica)
    learner, progress = replica.learner, replica.progress
    batches = [replica.experience.take(count, 1.0, torch.Generator().manual_seed(0)) for count in (8, 16, 8, 16)]
    for batch in batches[:2]:
        learner.update(batch, progress)
    learner.check(progress)
    batches[2].returns[3] = math.nan
    before = replica.parameters.flat.clone()
    for batch in batches[2:]:
        learner.update(batch, progress)
    with pytest.raises(NotFinite) as error:
        learner.check(progress)
    assert torch.equal(error.value.batch.ids, batches[2].ids)
    assert torch.equal(replica.parameters.flat, before)

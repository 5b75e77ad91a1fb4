"""The study of gradients: closed forms of the cosine, and halves that add up to the gradient the learner uses."""

from __future__ import annotations

import csv
import math

import pytest
import torch

from phalanx.bench.machine import running_replica
from phalanx.cli.main import main
from phalanx.config.presets import preset
from phalanx.studies.gradients import ORTHOGONAL, Cosines, cosine, gradient_of, halves


def synthetic(signal: float, batch: int, updates: int = 200, size: int = 4000) -> Cosines:
    """Gradients of half-batches of a source with a mean of norm `signal` and noise of norm 1 a row."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.zeros(size)
    mean[0] = signal
    cosines = Cosines()
    for _ in range(updates):
        noise = torch.randn(2, size, generator=generator) / math.sqrt(size * batch / 2)
        cosines.add(mean + noise[0], mean + noise[1])
    return cosines


@pytest.mark.parametrize("batch", [2, 64, 1024])
def test_halves_of_nothing_but_noise_are_orthogonal(batch):
    """Zero-centred random vectors: 1/sqrt 2 with the whole, whatever the batch size."""
    cosines = synthetic(0.0, batch)
    assert sum(cosines.with_whole) / 200 == pytest.approx(ORTHOGONAL, abs=2e-3)
    assert sum(cosines.between_halves) / 200 == pytest.approx(0.0, abs=3e-3)
    assert cosines.together == pytest.approx(ORTHOGONAL, abs=2e-3)


@pytest.mark.parametrize("batch", [2, 16, 128, 1024, 8192])
def test_the_cosine_rises_as_batches_outgrow_the_noise(batch):
    """With a mean of norm s and noise n = 2 / batch of a half: sqrt((s^2 + n/2) / (s^2 + n)), and s^2 / (s^2 + n)."""
    signal, noise = 0.1**2, 2 / batch
    cosines = synthetic(0.1, batch)
    expected = math.sqrt((signal + noise / 2) / (signal + noise))
    assert sum(cosines.with_whole) / 200 == pytest.approx(expected, abs=5e-3)
    assert sum(cosines.between_halves) / 200 == pytest.approx(signal / (signal + noise), abs=1e-2)
    assert cosines.together == pytest.approx(expected, abs=5e-3)


def test_halves_of_unequal_length_lower_single_cosines_but_not_that_of_all_updates():
    """Orthogonal ones, of which either may be ten times as long: (1 + 10) / 2 / sqrt(1 + 100), and 1/sqrt 2."""
    generator, cosines = torch.Generator().manual_seed(0), Cosines()
    for number in range(200):
        pair = torch.randn(2, 4000, generator=generator)
        pair[number % 2] *= 10
        cosines.add(pair[0], pair[1])
    assert sum(cosines.with_whole) / 200 == pytest.approx(11 / 2 / math.sqrt(101), abs=5e-3)
    assert cosines.together == pytest.approx(ORTHOGONAL, abs=2e-3)


def test_a_gradient_agrees_with_itself():
    vector = torch.randn(100, generator=torch.Generator().manual_seed(0))
    cosines = Cosines()
    cosines.add(vector, vector)
    assert cosines.together == pytest.approx(1.0)
    assert cosines.with_whole[0] == pytest.approx(1.0) and cosines.between_halves[0] == pytest.approx(1.0)
    assert cosine(vector, -vector) == pytest.approx(-1.0)


def test_halves_are_of_different_environments_and_add_up_to_the_whole():
    experiment = preset("a2c-catch").validate()
    with running_replica(experiment) as replica:
        for _ in range(3):
            replica.iterate()
        learner, count = replica.learner, experiment.sampler.environments
        (batch,) = learner.algorithm.batches(replica.experience, replica.clocks.now, learner.shuffle)
        first, second = halves(batch, count)
        rows = batch.returns.view(-1, count)
        assert torch.equal(first.returns.view(-1, count // 2), rows[:, : count // 2])
        assert torch.equal(second.returns.view(-1, count // 2), rows[:, count // 2 :])
        whole = gradient_of(learner, batch)
        parts = gradient_of(learner, first) + gradient_of(learner, second)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
        assert float(whole.norm()) > 0


def test_looking_at_gradients_changes_nothing_of_what_is_learnt(tmp_path):
    """The scores of the study are those of a run that nobody looks into."""
    flags = ("--topology", "serial", "--run.threads", "1", "--sampler.environments", "8")
    place = ("--run.directory", str(tmp_path), "--run.name", "run", "--run.log-every", "1000", "--run.steps", "2560")
    assert main(["train", "a2c-catch", *flags, *place]) == 0
    study = ("--environments", "8", "--steps", "2560", "--points", "1", "--directory", str(tmp_path / "study"))
    assert main(["study", "gradients", "--preset", "a2c-catch", *study, *flags[:4]]) == 0
    from whole_runs import records

    with (tmp_path / "study/gradients.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["score"]) == pytest.approx(records(tmp_path / "run")[-1]["score"])
    assert int(row["updates"]) == records(tmp_path / "run")[-1]["updates"]

"""Each study from the command line to its figure, on Catch, and what it refuses."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from typing import Any

import pytest
import torch

from phalanx.bench.machine import running_replica
from phalanx.cli.main import main
from phalanx.config.presets import preset
from phalanx.studies import STUDIES
from phalanx.studies.lag import mean_of
from phalanx.studies.secondary import SecondaryLearner
from phalanx.studies.variants import with_batch_size
from phalanx.types import Progress

SERIAL = ("--topology", "serial", "--run.threads", "1", "--sampler.decorrelation", "10")
SMALL: dict[str, tuple[Any, ...]] = {
    "gradients": ("--preset", "a2c-catch", "--environments", 4, 16, "--steps", 1024, "--points", 3, *SERIAL),
    "norms": ("--preset", "dqn-catch", "--batch-sizes", 32, 64, "--steps", 1024, "--points", 3, *SERIAL),
    "secondary": ("--primary", 32, "--secondary", 128, "--steps", 1024, "--points", 2, "--games", 3, *SERIAL),
    "lag": ("--preset", "a2c-catch", "--learners", 1, 2, "--environments", 2, "--steps", 2000, "--run.threads", 1),
}


@pytest.fixture
def study(tmp_path):
    def run(name: str, *flags: Any) -> int:
        return main(["study", name, "--directory", str(tmp_path / name), *map(str, flags)])

    return run


def rows(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_there_is_a_small_one_of_each():
    assert SMALL.keys() <= STUDIES.keys()


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "lag")) for name in SMALL])
def test_a_study_writes_figures_and_their_data(study, tmp_path, name, capsys):
    assert study(name, *SMALL[name]) == 0
    directory = tmp_path / name
    assert str(directory) in capsys.readouterr().out
    tables = list(directory.glob("*.csv"))
    assert directory / f"{name}.csv" in tables and all(map(rows, tables))
    figures = list(directory.glob("*.svg"))
    assert directory / f"{name}.svg" in figures
    for figure in figures:
        marks = [mark for mark in ElementTree.parse(figure).getroot().iter("{http://www.w3.org/2000/svg}circle")]
        assert len(marks) >= 2
    asked = json.loads((directory / "study.json").read_text())
    assert asked["options"]["steps"] and asked["experiment"]["preset"]


def test_the_figure_holds_the_data_of_the_table(study, tmp_path):
    assert study("lag", *SMALL["lag"]) == 0
    words = [
        e.text for e in ElementTree.parse(tmp_path / "lag/lag.svg").getroot().iter("{http://www.w3.org/2000/svg}title")
    ]
    for row in rows(tmp_path / "lag/lag.csv"):
        assert f"staleness: {row['learners']}, {float(row['staleness_mean']):.6g}" in words
    histogram = rows(tmp_path / "lag/histograms.csv")
    steps = sum(int(row["times"]) for row in histogram if (row["learners"], row["quantity"]) == ("2", "lag"))
    assert steps == int(rows(tmp_path / "lag/lag.csv")[1]["steps"])
    assert [row["versions"] for row in histogram if (row["learners"], row["quantity"]) == ("1", "staleness")] == ["0"]


def test_a_secondary_learner_with_the_same_batch_size_uses_each_step_as_often():
    """It begins with the same parameters, draws other batches, and never touches the first one's."""
    experiment = with_batch_size(preset("dqn-catch"), 64, 0.0).validate()
    with running_replica(experiment) as replica:
        second = SecondaryLearner(experiment, replica)
        start = second.parameters.flat.clone()
        assert torch.equal(start, replica.parameters.flat)
        while replica.progress.updates == 0:
            replica.iterate()
            second.follow()
        first = replica.progress
        assert second.clocks.now() == Progress(first.steps, first.updates, first.version, episodes=0)
        assert not torch.equal(second.parameters.flat, start)
        assert not torch.equal(second.parameters.flat, replica.parameters.flat)
        before = replica.parameters.flat.clone()
        second.learner.learn(replica.experience)
        assert torch.equal(before, replica.parameters.flat)


def test_what_is_learnt_by_the_primary_learner_does_not_depend_on_the_second(study, tmp_path):
    flags = SMALL["secondary"][4:]
    for directory, batch in (("one", 32), ("two", 128)):
        place = ("--directory", str(tmp_path / directory))
        pair = ("--primary", "64", "--secondary", str(batch), "--preset", "dqn-catch")
        assert main(["study", "secondary", *place, *pair, *map(str, flags), "--sampler.horizon", "32"]) == 0
    one, two = (rows(tmp_path / directory / "secondary.csv") for directory in ("one", "two"))
    assert [row["primary_norm"] for row in one] == [row["primary_norm"] for row in two]
    assert [row["secondary_norm"] for row in one] != [row["secondary_norm"] for row in two]


def test_the_mean_of_a_histogram():
    assert mean_of(Counter({0: 3, 4: 1})) == 1.0
    assert mean_of(Counter()) == 0.0


def test_without_a_name_studies_are_listed(capsys):
    assert main(["study"]) == 0
    words = capsys.readouterr().out
    assert all(name in words and row.text in words for name, row in STUDIES.items())


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("gradient", (), "unknown study 'gradient'; did you mean gradients"),
        ("gradients", ("--environments", 3), "--environments 3 cannot be halved"),
        ("gradients", ("--preset", "ppo-catch"), "is of A2C"),
        ("gradients", ("--steps", 0), "steps is 0, but must be at least 1"),
        ("gradients", ("--preset", "a2c-katch"), "unknown preset"),
        ("norms", ("--preset", "a2c-catch"), "is of learning from a replay memory"),
        ("norms", ("--batch-sizes", 0), "--batch-sizes needs one or more numbers greater than 0"),
        ("secondary", ("--primary", 32, 64, "--secondary", 32), "--primary names 2 batch sizes and --secondary 1"),
        ("secondary", ("--preset", "eps-rainbow-catch"), "priorities belong to one learner"),
        ("norms", ("--algorithm.batch_size=32",), "the study sets algorithm.batch-size itself; use --batch-sizes"),
        ("lag", ("--run.steps", 10), "the study sets run.steps itself; use --steps"),
        ("lag", ("--preset", "a2c-catch", "--topology", "serial"), "is of the topology asynchronous"),
    ],
)
def test_what_makes_no_sense_is_refused(study, tmp_path, capsys, name, flags, sentence):
    assert study(name, *flags) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (tmp_path / name).exists()


def test_what_is_in_a_directory_stays(study, tmp_path, capsys):
    (tmp_path / "gradients").mkdir()
    (tmp_path / "gradients/mine").write_text("dear")
    assert study("gradients", *SMALL["gradients"]) == 2
    assert "is not empty; choose another --directory" in capsys.readouterr().err
    assert (tmp_path / "gradients/mine").read_text() == "dear"

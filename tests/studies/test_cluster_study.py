"""`phalanx study cluster` from the command line, with times that are given and with some that are measured."""

from __future__ import annotations

import csv
import dataclasses
import json
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from phalanx.cli.main import main
from phalanx.config import PPOConfig, SamplerConfig
from phalanx.config.presets import preset
from phalanx.studies.cluster import given, why
from phalanx.studies.events import Cluster
from phalanx.studies.times import measure_server, measure_worker, worker_of

GIVEN = ("--server", 1, 0.5, 0.1, "--ray", 100, 50, 20, 100, 1)
SMALL = ("--nodes", 1, 4, 64, "--at", 8, "--servers", 1, 4, "--neurons", 256, 16, "--quorums", 1, 0.75)
FAST = ("--presets", "gorila-catch", "dba3c-catch", *SMALL, *GIVEN, "--gradients", 200, "--spread", 0)


@pytest.fixture
def study(tmp_path):
    def run(*flags: Any) -> int:
        return main(["study", "cluster", "--directory", str(tmp_path / "found"), *map(str, flags)])

    return run


def rows(path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_it_predicts_both_systems_and_says_where_they_stop_scaling(study, tmp_path, capsys):
    assert study(*FAST, "--act", 0.01, 0.01, "--learn", 0.01, 0.02) == 0
    said = capsys.readouterr()
    assert "64 nodes have" in said.err and "of linear speed" in said.err
    found = rows(tmp_path / "found/cluster.csv")
    assert len({row["system"] for row in found}) == 3  # Gorila, the quorum, and the same without one
    assert [row["nodes"] for row in found[:3]] == ["1", "4", "64"]
    catch = preset("gorila-catch").algorithm
    assert 64 / 0.03 < float(found[0]["points_per_second"]) < catch.batch_size * 2 / 0.03
    times = json.loads((tmp_path / "found/study.json").read_text())["times"]
    assert times["gorila-catch"]["act"] == 0.01 and times["dba3c-catch"]["learn"] == 0.02
    assert times["gorila-catch"]["size"] == 7619  # as the run itself says
    figure = ElementTree.parse(tmp_path / "found/cluster.svg").getroot()
    words = {element.text for element in figure.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Speed", "Staleness", "Parameter servers, 8 nodes"} <= words
    assert len(rows(tmp_path / "found/servers.csv")) == 4 and len(rows(tmp_path / "found/quorum.csv")) == 2


def test_what_is_not_given_is_measured():
    experiment = preset("gorila-catch")
    own = worker_of(experiment)
    assert own.sampler.environments == experiment.sampler.environments // 2 and own.topology.name == "serial"
    worker = measure_worker(experiment, 0.3)
    assert worker.act > 0 and worker.learn > 0 and worker.size == 7619
    assert worker.points == experiment.algorithm.batch_size
    assert worker.gradients == own.algorithm.updates_per_rollout(own.sampler.rollout_steps)
    assert worker == given(experiment, worker.act, worker.learn)
    server = measure_server(experiment.optimizer)
    assert min(server.copy, server.apply, server.take) > 0


PPO_ON_CATCH = dataclasses.replace(
    preset("dba3c-catch"),
    algorithm=PPOConfig(epochs=2, minibatches=4),
    sampler=SamplerConfig(environments=8, horizon=12),
)


@pytest.mark.parametrize(
    ("experiment", "simulators", "points", "gradients"),
    [
        (preset("dba3c"), 7, 35, 1),  # segments of 5 steps, until there are 32
        (preset("dba3c-local"), 8, 64, 64),  # four epochs of 16 minibatches of 1,024 steps
        (PPO_ON_CATCH, 3, 9, 8),
    ],
    ids=["a2c", "ppo", "ppo in small"],
)
def test_a_worker_of_dba3c_learns_from_whole_segments(experiment, simulators, points, gradients):
    """However many simulators it has."""
    worker = given(experiment.validate(), 0.1, 0.1)
    assert (worker.points, worker.gradients) == (points, gradients)
    assert worker_of(experiment.validate()).sampler.environments == simulators


def test_a_rollout_of_ppo_makes_many_gradients():
    worker = measure_worker(PPO_ON_CATCH.validate(), 0.2)
    assert worker == given(PPO_ON_CATCH.validate(), worker.act, worker.learn)


@pytest.mark.slow
def test_ray_is_measured():
    from phalanx.cluster.timing import measure_ray

    pytest.importorskip("ray")
    times = measure_ray(64)
    assert all(seconds > 0 for seconds in (times.call, times.send, times.tell, times.tell_each))


def test_the_reason_is_named():
    row = {"nodes": 8, "of_linear": 0.5, "dropped": 0.0, "driver_busy": 0.0, "inward_busy": 0.1, "outward_busy": 0.1}
    cluster = Cluster(workers=8, learn=1e-3, call=1e-3, one_host=True)
    busy = why({**row, "processor_busy": 0.99}, cluster)
    assert "the processors of the parameter servers are busy" in busy and "1,000 gradients/s" in busy
    together = Cluster(workers=8, quorum=8, learn=1e-3, call=1e-3, one_host=True)
    assert "wait for each other" in why({**row, "processor_busy": 0.2}, together)
    assert "are dropped" in why({**row, "processor_busy": 0.2, "dropped": 0.4}, together)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--presets", "a2c-catch"), "is of the topologies gorila and dba3c, not of serial"),
        (("--presets", "gorila-catch", "--topology.bundles", 0), "use --nodes"),
        (("--act", 0.1), "--act needs 2 numbers, or none"),
        (("--ray", 1, 2), "--ray needs 5 numbers, or none"),
        (("--server", -1, 1, 1), "which are not negative"),
        (("--quorums", 0), "--quorums needs shares of the workers"),
        (("--nodes", 0), "--nodes needs one or more numbers greater than 0"),
    ],
)
def test_what_makes_no_sense_is_refused(study, tmp_path, capsys, flags, sentence):
    assert study(*flags) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (tmp_path / "found").exists()

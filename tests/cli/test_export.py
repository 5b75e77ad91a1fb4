"""`phalanx export`: a directory to give away, with a card that the Hub can read."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import phalanx
from phalanx.cli.main import main
from phalanx.config.stored import load, load_origin
from phalanx.runs.card import Facts, card
from whole_runs import newest

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    flags = ("--run.steps", "600", "--topology", "serial", "--run.directory", str(directory), "--run.name", "run")
    assert main(["train", "dqn-catch", *flags]) == 0
    assert main(["export", str(directory / "run"), str(directory / "out"), "--games", "7", "--seed", "3"]) == 0
    return directory


def head(text: str) -> dict:
    begin, metadata, _ = text.split("---\n", 2)
    assert begin == ""
    return yaml.safe_load(metadata)


def test_the_metadata_is_what_the_hub_reads(runs):
    found = head((runs / "out/README.md").read_text())
    assert found["library_name"] == "phalanx"
    assert {"reinforcement-learning", "deep-reinforcement-learning", "catch"} <= set(found["tags"])
    (model,) = found["model-index"]
    (result,) = model["results"]
    (metric,) = result["metrics"]
    assert model["name"] == "DQN"
    assert result["task"] == {"type": "reinforcement-learning", "name": "reinforcement-learning"}
    assert result["dataset"] == {"name": "catch", "type": "catch"}
    assert metric["type"] == metric["name"] == "mean_reward" and metric["verified"] is False
    mean, between, deviation = metric["value"].split()
    assert between == "+/-" and -1 <= float(mean) <= 1 and 0 <= float(deviation) <= 1.1


def test_the_weights_are_those_of_the_run(runs):
    (weights,) = (runs / "out/checkpoints").glob("step-*/model.safetensors")
    trained, exported = newest(runs / "run").weights, load_file(weights)
    assert list(trained) == list(exported) and all(torch.equal(trained[name], exported[name]) for name in trained)
    assert str(weights.relative_to(runs / "out")) in (runs / "out/README.md").read_text()


def test_only_what_playing_needs_is_given_away(runs):
    names = {path.name for path in (runs / "out").iterdir()}
    assert names == {"README.md", "config.json", "checkpoints", "replay.mp4"}
    assert str(runs) not in "".join(
        path.read_text() for path in (runs / "out").rglob("*") if path.suffix in (".md", ".json")
    )
    experiment = load(runs / "out/config.json", pytest.fail)
    assert (experiment.preset, experiment.run.directory, experiment.run.name) == ("dqn-catch", "runs", "")
    assert load_origin(runs / "out/config.json") == load_origin(runs / "run/config.json")
    assert (runs / "out/replay.mp4").read_bytes()[4:8] == b"ftyp"


def test_the_commands_on_the_card_work_and_give_the_score_on_it(runs, monkeypatch, capsys, tmp_path):
    text = (runs / "out/README.md").read_text()
    monkeypatch.chdir(runs / "out")
    evaluate, play = [line for line in text.splitlines() if line.startswith(("phalanx eval", "phalanx play"))]
    assert main([*shlex.split(evaluate)[1:], "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert f"{result['mean']:.2f} +/- {result['deviation']:.2f}" in text
    assert main([*shlex.split(play)[1:-1], str(tmp_path / "again.gif")]) == 0


def test_an_export_does_not_learn(runs, capsys):
    assert main(["resume", str(runs / "out"), "--run.steps", "900"]) == 2
    assert "was exported: it can play, but not learn; resume the run that it comes from" in capsys.readouterr().err


def test_a_directory_that_exists_is_left_alone(runs, capsys):
    before = (runs / "out/README.md").read_bytes()
    assert main(["export", str(runs / "run"), str(runs / "out")]) == 2
    assert "exists already; choose another directory, or remove it" in capsys.readouterr().err
    assert (runs / "out/README.md").read_bytes() == before


@pytest.mark.parametrize("arguments", [("nowhere", "x"), ("{runs}/run", "x", "--games", "0")])
def test_what_cannot_be_exported_leaves_nothing(runs, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(["export", *(word.format(runs=runs) for word in arguments)]) == 2
    assert not list(tmp_path.iterdir())


def test_an_environment_without_pictures_is_exported_without_a_video(runs, tmp_path, monkeypatch, capsys):
    def blind(self: object) -> None:
        raise phalanx.errors.UserError("it has no pictures")

    monkeypatch.setattr("phalanx.envs.toy.Catch.render", blind)
    assert main(["export", str(runs / "run"), str(tmp_path / "out"), "--games", "1"]) == 0
    assert "the export has no video: it has no pictures" in capsys.readouterr().err
    assert not (tmp_path / "out/replay.mp4").exists()
    assert "One game is shown" not in (tmp_path / "out/README.md").read_text()


def test_any_name_of_an_environment_is_text_in_yaml():
    facts = Facts("PPO", "serial", "x", 'mine:A-v0 # "é": [1]', [1.0, 3.0], True, 0, 10, 5, "w", None, {})
    found = head(card(facts))
    assert found["model-index"][0]["results"][0]["dataset"]["name"] == facts.environment
    assert found["model-index"][0]["results"][0]["metrics"][0]["value"] == f"2.00 +/- {math.sqrt(2):.2f}"

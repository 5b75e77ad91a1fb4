"""The whole loop learns: Catch within seconds, CartPole to its limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phalanx.cli.main import main


def last_record(directory: Path, preset: str, *flags: str) -> dict:
    """The last line of metrics.jsonl of a run of a preset as it is; `score` is the mean of the last 100 games."""
    place = ["--run.directory", str(directory), "--run.name", "run"]
    assert main(["train", preset, "--topology", "serial", *place, *flags]) == 0
    return json.loads((directory / "run/metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("preset", ["a2c-catch", "ppo-catch"])
def test_catch_is_learnt(tmp_path, preset, seed):
    assert last_record(tmp_path, preset, "--run.seed", str(seed))["score"] >= 0.8


def test_an_untrained_agent_catches_little(tmp_path):
    assert last_record(tmp_path, "a2c-catch", "--run.steps", "1000")["score"] < 0


@pytest.mark.parametrize("preset", ["dqn-catch", "c51-catch", "eps-rainbow-catch"])
def test_catch_is_learnt_from_memory(tmp_path, preset):
    assert last_record(tmp_path, preset, "--run.target-score", "0.8")["score"] >= 0.8


@pytest.mark.slow
def test_ppo_balances_the_pole(tmp_path):
    record = last_record(tmp_path, "ppo-gym", "--run.target-score", "475")
    assert record["score"] >= 475
    assert record["steps"] < 200_000


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["dqn-gym", "c51-gym"])
def test_the_pole_is_balanced_from_memory(tmp_path, preset):
    """Judged in training, with a share of random actions; about a minute on one core."""
    record = last_record(tmp_path, preset, "--run.target-score", "475")
    assert record["score"] >= 475
    assert record["steps"] < 250_000

"""A run from its first step to its end: budgets and records."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.config import AtariConfig, GymnasiumConfig
from phalanx.logs.metrics import ScoreWindow
from phalanx.replica import Replica
from phalanx.sampling.evaluator import evaluation_env
from runs import ATARI, newest, records, same

REQUIRED = (
    *("time_s", "steps", "frames", "updates", "version", "episodes", "score", "sps", "lag_mean", "lag_max"),
    *("env_share", "infer_share", "learn_share"),
)


class TestEnd:
    def test_by_steps(self, train, tmp_path, capsys):
        assert train("a2c-catch", steps=600) == 0
        assert records(tmp_path / "run")[-1]["steps"] == 640  # the first whole rollout that reaches the budget
        assert newest(tmp_path / "run").steps == 640
        assert "600 steps done" in capsys.readouterr().out

    def test_by_seconds(self, train, tmp_path, capsys):
        assert train("a2c-catch", "--run.seconds", 0.3, steps=10**9) == 0
        last = records(tmp_path / "run")[-1]
        assert last["time_s"] >= 0.3
        assert 0 < last["steps"] < 10**9
        assert "0.3 seconds are over" in capsys.readouterr().out

    def test_by_target_score(self, train, tmp_path, capsys):
        assert train("a2c-catch", "--run.target-score", -0.9, steps=10**9) == 0
        last = records(tmp_path / "run")[-1]
        assert last["score"] >= -0.9
        assert last["episodes"] >= 100  # the mean of fewer games is no reason to stop
        assert "target score -0.9 reached" in capsys.readouterr().out


class TestRecords:
    @pytest.mark.parametrize("topology", ["serial", "synchronous"])
    def test_every_promised_number_is_there(self, train, tmp_path, topology):
        assert train("ppo-catch", "--topology", topology, "--run.log-every", 0.001, steps=2000) == 0
        lines = records(tmp_path / "run")
        assert len(lines) >= 4
        for line in lines:
            assert set(REQUIRED) <= line.keys()
        for name in ("time_s", "steps", "updates", "version", "episodes"):
            values = [line[name] for line in lines]
            assert values == sorted(values)
            assert values[-1] > 0
        last = lines[-1]
        assert last["frames"] == last["steps"]
        assert last["version"] == last["updates"] == last["steps"] // 512 * 16
        assert last["episodes"] == last["steps"] // 72 * 8 + last["steps"] % 72 // 72
        assert -1 <= last["score"] <= 1
        assert last["lag_max"] == 0
        busiest = max(lines[:-1], key=lambda line: line["steps"])
        assert 0.5 < sum(busiest[f"{stage}_share"] for stage in ("env", "infer", "learn")) <= 1

    def test_atari_steps_are_four_frames(self, train, tmp_path):
        assert train("a2c", *ATARI, "--topology", "serial", steps=20) == 0
        last = records(tmp_path / "run")[-1]
        assert last["frames"] == 4 * last["steps"] == 80

    def test_overlap_has_a_lag_of_one_rollout(self, train, tmp_path):
        assert train("ppo-catch", "--topology", "synchronous", "--topology.overlap", "True", steps=2000) == 0
        assert records(tmp_path / "run")[-1]["lag_max"] == 16

    def test_evaluations_are_made_where_others_are_ahead(self, train, tmp_path, early):
        flags = ("--run.eval-every", 704, "--run.eval-games", 2, "--run.checkpoint-updates", 1)
        assert train(*early, *flags, steps=704) == 0
        assert [line["steps"] for line in records(tmp_path / "run") if "eval/score" in line] == [704]

    def test_there_is_one_of_the_moment_a_target_is_reached(self, train, tmp_path, early, monkeypatch):
        """Rollouts that were under way end after it, and their games may have gone worse."""
        reached = []  # the number of games at which it is

        def once(window):
            if window.count >= 100 and not reached:
                reached.append(window.count)
            return 1.0 if [window.count] == reached else -1.0

        monkeypatch.setattr(ScoreWindow, "mean", property(once))
        assert train(*early, "--run.target-score", 1.0, "--run.log-every", 1000, steps=100_000) == 0
        at_target, at_the_end = records(tmp_path / "run")
        assert (at_target["episodes"], at_target["score"]) == (*reached, 1.0)
        assert at_the_end["episodes"] > reached[0]

    @pytest.mark.parametrize("end", [("--run.seconds", 0.5), ("--run.target-score", -0.6)], ids=["time", "score"])
    def test_the_last_record_is_of_the_last_checkpoint(self, train, tmp_path, early, end):
        assert train(*early, *end, steps=100_000) == 0
        assert records(tmp_path / "run")[-1]["steps"] == newest(tmp_path / "run").steps < 100_000

    def test_evaluations_are_recorded_and_change_nothing(self, train, tmp_path):
        assert train("a2c-catch", "--run.eval-every", 256, "--run.eval-games", 3, steps=1000) == 0
        assert train("a2c-catch", name="plain", steps=1000) == 0
        evaluations = [line for line in records(tmp_path / "run") if "eval/score" in line]
        assert [line["steps"] for line in evaluations] == [256, 512, 768, 1024]
        assert all(line["eval/games"] == 3 for line in evaluations)
        assert same(newest(tmp_path / "run").weights, newest(tmp_path / "plain").weights)


def test_the_weights_of_a_checkpoint_are_read_after_its_state(train, monkeypatch):
    """Which waits for updates that may be under way on a device after an interruption."""
    calls = []
    for name in ("state", "weights"):
        monkeypatch.setattr(Replica, name, recording(calls, name, getattr(Replica, name)))
    assert train("a2c-catch", "--topology", "serial") == 0
    assert calls == ["state", "weights"]


def recording(calls, name, method):
    def recorded(*arguments):
        calls.append(name)
        return method(*arguments)

    return recorded


def test_games_of_an_evaluation_have_an_end():
    """Those of training need none, but a greedy policy may do the same for ever."""
    endless = AtariConfig("breakout", max_steps=0)
    assert evaluation_env(endless).max_steps == 27_000
    assert evaluation_env(dataclasses.replace(endless, max_steps=100)).max_steps == 100
    assert evaluation_env(GymnasiumConfig()).max_steps == 27_000

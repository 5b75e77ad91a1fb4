"""Resuming: exact where it can be, refused or told where it cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from phalanx.envs.toy import Catch
from phalanx.runs.checkpoint import Checkpoints
from phalanx.runtime.device import restore_generator
from phalanx.topologies import serial
from whole_runs import ATARI, nan_reward, newest, records, same

ATARI_A2C = ("a2c", *ATARI)
OVERLAP = ("--sampler.overlap", "True")
CASES = {
    "a2c-catch": ("a2c-catch",),
    "ppo-catch": ("ppo-catch", "--sampler.horizon", 16),
    "a2c-wait": ("a2c-catch", "--sampler.resets", "wait", "--sampler.groups", 2),
    "a2c-cartpole": ("a2c-gym",),
    "a2c-counter": ("a2c-catch", "--env.name", "counter", "--env.stack", 3),
    "dqn-catch": ("dqn-catch", "--algorithm.checkpoint-replay", "True", "--algorithm.learning-starts", 100),
    "rainbow": ("eps-rainbow-catch", "--algorithm.checkpoint-replay", "True", "--algorithm.learning-starts", 100),
    "a2c-pong": ATARI_A2C,
    "ppo-pong": ("ppo", *ATARI),
}


class TestResume:
    """A run that was interrupted ends as if it had not been."""

    @pytest.mark.parametrize("topology", ["serial", "synchronous"])
    @pytest.mark.parametrize("case", CASES)
    def test_is_bit_identical(self, train, resume, tmp_path, case, topology):
        self.compare(train, resume, tmp_path, (*CASES[case], "--topology", topology), "pong" in case)

    @pytest.mark.parametrize(
        "flags",
        [
            ("a2c-catch", "--topology", "synchronous", *OVERLAP, "--algorithm.importance", "True"),
            ("ppo-catch", "--topology", "synchronous", *OVERLAP, "--sampler.horizon", 16),
            (*CASES["dqn-catch"], "--topology", "synchronous", *OVERLAP),
        ],
        ids=["a2c", "ppo", "dqn"],
    )
    def test_is_bit_identical_with_overlap(self, train, resume, tmp_path, flags):
        self.compare(train, resume, tmp_path, flags, atari=False)

    def test_is_bit_identical_where_others_are_ahead(self, train, resume, tmp_path, early):
        """The run is resumed from a checkpoint in its midst, not from its end."""
        often = ("--run.checkpoint-updates", 100, "--run.keep-checkpoints", 9)
        assert train(*early, *often, steps=2304) == 0
        whole = newest(tmp_path / "run")
        shutil.rmtree(whole.path)
        assert 0 < newest(tmp_path / "run").steps < whole.steps
        assert resume() == 0
        again = newest(tmp_path / "run")
        assert again.steps == whole.steps == 2304
        assert same(again.weights, whole.weights)
        assert again.state["scores"] == whole.state["scores"]

    def compare(self, train: Any, resume: Any, tmp_path: Path, flags: tuple[Any, ...], atari: bool) -> None:
        first, second = (100, 200) if atari else (1100, 2300)
        assert train(*flags, steps=second, name="whole") == 0
        assert train(*flags, steps=first) == 0
        halfway = newest(tmp_path / "run")
        assert resume("--run.steps", second) == 0
        ours, theirs = newest(tmp_path / "run"), newest(tmp_path / "whole")
        assert ours.steps == theirs.steps > halfway.steps
        assert not same(halfway.weights, ours.weights)  # something was learnt after the interruption
        assert same(ours.weights, theirs.weights)
        assert ours.state["scores"] == theirs.state["scores"]
        for name in ("clocks", "store"):
            assert same(ours.state[name], theirs.state[name]), name
        (replica,), (reference,) = ours.state["replicas"], theirs.state["replicas"]
        for name in ("learner", "experience"):
            assert same(replica[name], reference[name]), name

    @pytest.mark.parametrize("flags", [("--sampler.horizon", 16), ("--sampler.batch", 64)])
    def test_with_overlap_keeps_the_shape_of_its_rollout(self, train, resume, capsys, flags):
        overlap = ("--topology", "synchronous", "--sampler.workers", 1, "--sampler.overlap", True)
        assert train("ppo-catch", *overlap) == 0
        assert resume(*flags) == 2
        assert f"a resumed run keeps its {flags[0][2:]}" in capsys.readouterr().err

    def test_keeps_its_batch(self, train, resume, capsys):
        """The horizon that followed from it would win, and the batch would be a number that nobody reads."""
        assert train("ppo-catch", "--sampler.horizon", 0, "--sampler.batch", 64) == 0
        assert resume("--sampler.batch", 128) == 2
        assert "a resumed run keeps its sampler.batch" in capsys.readouterr().err

    def test_with_a_saved_memory_keeps_its_kind(self, train, resume, capsys):
        assert train("dqn-catch", "--algorithm.checkpoint-replay", True) == 0
        assert resume("--algorithm.prioritized", True) == 2
        assert "a resumed run keeps its algorithm.prioritized" in capsys.readouterr().err

    @pytest.mark.parametrize("n_step", [1, 5])
    def test_with_a_saved_memory_may_look_less_or_further_ahead(self, train, resume, n_step):
        memory = ("--algorithm.checkpoint-replay", True, "--algorithm.learning-starts", 100)
        assert train("eps-rainbow-catch", *memory, steps=1000) == 0
        assert resume("--run.steps", 1500, "--algorithm.n-step", n_step) == 0

    @pytest.mark.parametrize(("saved", "random_actions"), [(True, 0), (False, 20)])
    def test_decorrelates_no_environments_that_are_restored(
        self, train, resume, tmp_path, monkeypatch, saved, random_actions
    ):
        make_envs, seen = serial.make_envs, []

        def noted(experiment: Any, *arguments: Any) -> Any:
            seen.append(experiment.sampler.decorrelation)
            return make_envs(experiment, *arguments)

        assert train("a2c-catch", "--topology", "serial", "--sampler.decorrelation", 20) == 0
        monkeypatch.setattr(serial, "make_envs", noted)
        if not saved:
            load = Checkpoints.load

            def without(self: Checkpoints) -> Any:
                loaded = load(self)
                loaded.state["replicas"][0]["sampling"] = None
                return loaded

            monkeypatch.setattr(Checkpoints, "load", without)
        assert resume("--run.steps", 1000) == 0
        assert seen == [random_actions]

    def test_on_another_kind_of_device_goes_on_with_other_numbers(self):
        state = torch.arange(16, dtype=torch.uint8)  # of a GPU's generator
        first, second = torch.Generator(), torch.Generator()
        for generator in (first, second):
            restore_generator(generator, state)
        assert first.get_state().equal(second.get_state())
        assert not first.get_state().equal(torch.Generator().get_state())

    def test_may_change_the_topology(self, train, resume, tmp_path):
        assert train("ppo-catch", "--topology", "serial", steps=2000, name="whole") == 0
        assert train("ppo-catch", "--topology", "serial", steps=1000) == 0
        assert resume("--run.steps", 2000, "--topology", "synchronous") == 0
        assert same(newest(tmp_path / "run").weights, newest(tmp_path / "whole").weights)
        assert json.loads((tmp_path / "run/config.json").read_text())["topology"]["name"] == "synchronous"

    def test_continues_the_records(self, train, resume, tmp_path):
        assert train("a2c-catch", steps=1000) == 0
        before, scores = records(tmp_path / "run"), newest(tmp_path / "run").state["scores"]
        assert resume("--run.steps", 1100) == 0
        after, window = records(tmp_path / "run"), newest(tmp_path / "run").state["scores"]
        assert after[: len(before)] == before
        first, last = before[-1], after[-1]
        assert (first["steps"], last["steps"]) == (1024, 1152)
        assert last["updates"] == last["version"] == 9
        assert last["time_s"] > first["time_s"]
        assert (first["episodes"], last["episodes"]) == (112, 128)
        assert window["count"] == 128
        assert window["scores"][:84] == scores["scores"][16:]  # the last 100 games, 16 of them new

    def test_without_the_memory_shows_how_it_is_filled_again(self, train, resume, tmp_path, capsys):
        often = ("--run.log-every", 1e-9, "--topology", "serial")
        assert train("dqn-catch", *often, steps=1000) == 0
        fresh = [line["warmup"] for line in records(tmp_path / "run") if "warmup" in line]
        assert "learning starts after 500 steps" in capsys.readouterr().out
        before = len(records(tmp_path / "run"))
        assert resume("--run.steps", 2000) == 0
        refilled = records(tmp_path / "run")[before:]
        assert [line["warmup"] for line in refilled if "warmup" in line] == fresh
        assert fresh == sorted(fresh)
        assert refilled[0]["warmup"] == 32 / 500  # one rollout
        assert "learning goes on after 500 steps" in capsys.readouterr().out

    def test_with_the_memory_has_no_warm_up(self, train, resume, tmp_path, capsys):
        often = ("--run.log-every", 1e-9, "--topology", "serial", "--algorithm.checkpoint-replay", "True")
        assert train("dqn-catch", *often, steps=1000) == 0
        before = len(records(tmp_path / "run"))
        capsys.readouterr()
        assert resume("--run.steps", 1200) == 0
        assert not any("warmup" in line for line in records(tmp_path / "run")[before:])
        assert "; learning" not in capsys.readouterr().out

    def test_without_the_environments_plays_other_games_each_time_the_same(self, train, resume, tmp_path, monkeypatch):
        """An emergency checkpoint has no environments: the resumed run must not begin with the first games again."""
        reset, balls = Catch.reset, []

        def recorded(self: Catch, frame: np.ndarray) -> None:
            reset(self, frame)
            balls.append(self._column)

        monkeypatch.setattr(Catch, "reset", recorded)
        with monkeypatch.context() as poisoned:
            poisoned.setattr(Catch, "step", nan_reward(Catch.step, [0]))
            assert train("a2c-catch", "--topology", "serial", steps=10_000) == 1
        assert newest(tmp_path / "run").state["replicas"][0]["sampling"] is None
        shutil.copytree(tmp_path / "run", tmp_path / "again")
        first = balls[:24]
        played = []
        for name in ("run", "again"):
            balls.clear()
            assert resume("--run.steps", 1000, name=name) == 0
            played.append(list(balls))
        assert played[0][:24] != first
        assert played[0] == played[1]
        assert same(newest(tmp_path / "run").weights, newest(tmp_path / "again").weights)
        assert json.loads((tmp_path / "run/config.json").read_text())["run"]["seed"] == 0

    def test_of_a_finished_run_changes_nothing(self, train, resume, tmp_path):
        assert train("a2c-catch", steps=1000) == 0
        before = newest(tmp_path / "run")
        assert resume() == 0
        after = newest(tmp_path / "run")
        assert same(before.weights, after.weights)
        assert before.state["clocks"] == after.state["clocks"]

    def test_of_a_finished_run_keeps_its_configuration(self, train, resume, tmp_path, capsys):
        config = tmp_path / "run/config.json"
        assert train("a2c-catch", "--topology", "serial", steps=1000) == 0
        before = config.read_bytes()
        assert resume("--run.steps", 1010, "--optimizer.learning-rate", 0.1) == 0
        assert config.read_bytes() == before
        assert "changed from here on" not in capsys.readouterr().out

    def test_tells_what_flags_have_changed(self, train, resume, tmp_path, capsys):
        assert train("a2c-catch", "--topology", "serial", steps=1000) == 0
        before = json.loads((tmp_path / "run/config.json").read_text())["optimizer"]["learning_rate"]
        assert resume("--run.steps", 1100, "--optimizer.learning-rate", 0.1) == 0
        words = f"changed from here on: optimizer.learning_rate {before} -> 0.1, run.steps 1000 -> 1100"
        assert words in " ".join(capsys.readouterr().out.split())
        assert words in (tmp_path / "run/events.log").read_text()
        config = json.loads((tmp_path / "run/config.json").read_text())
        assert (config["optimizer"]["learning_rate"], config["run"]["steps"]) == (0.1, 1100)

    def test_reports_a_damaged_checkpoint_and_uses_the_one_before(self, train, resume, tmp_path, capsys):
        assert train("a2c-catch", "--run.checkpoint-updates", 2, "--run.log-every", 0.001, steps=1000) == 0
        assert train("a2c-catch", name="whole", steps=2000) == 0
        damaged = tmp_path / "run/checkpoints/step-000000001024/model.safetensors"
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        capsys.readouterr()
        assert resume("--run.steps", 2000) == 0
        error = capsys.readouterr().err
        assert str(damaged) in error
        assert "is damaged" in error
        steps = [line["steps"] for line in records(tmp_path / "run")]
        assert steps == sorted(set(steps))  # what came after the older checkpoint was forgotten
        assert same(newest(tmp_path / "run").weights, newest(tmp_path / "whole").weights)

    def test_of_a_run_without_any_whole_checkpoint_is_one_sentence(self, train, resume, tmp_path, capsys):
        assert train("a2c-catch") == 0
        (tmp_path / "run/checkpoints/step-000000000512/model.safetensors").write_bytes(b"")
        assert resume() == 2
        assert "can be used; start the run anew" in capsys.readouterr().err

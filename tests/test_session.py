"""A run from its first step to its end: budgets, records, values that are not finite, resuming."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from phalanx.__main__ import main
from phalanx.algorithms.a2c import A2C
from phalanx.envs.toy import Catch, Identity
from phalanx.errors import RunError
from phalanx.replica import OverlappedReplica
from phalanx.runtime.device import restore_generator
from phalanx.session import Session, locked
from runs import ATARI, alike, descendants, newest, records

REQUIRED = (
    *("time_s", "steps", "frames", "updates", "version", "episodes", "score", "sps", "lag_mean", "lag_max"),
    *("env_share", "infer_share", "learn_share"),
)


@pytest.fixture
def train(tmp_path):
    """Train a preset in tmp_path/NAME; the exit code."""

    def run(preset: str, *flags: Any, name: str = "run", steps: int = 500) -> int:
        place = ["--run.directory", str(tmp_path), "--run.name", name, "--run.steps", str(steps)]
        return main(["train", preset, *place, "--run.precision", "float32", *map(str, flags)])

    return run


@pytest.fixture
def resume(tmp_path):
    def run(*flags: Any, name: str = "run") -> int:
        return main(["resume", str(tmp_path / name), *map(str, flags)])

    return run


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
        assert train(*ATARI_A2C, "--topology", "serial", steps=20) == 0
        last = records(tmp_path / "run")[-1]
        assert last["frames"] == 4 * last["steps"] == 80

    def test_overlap_has_a_lag_of_one_rollout(self, train, tmp_path):
        assert train("ppo-catch", "--topology", "synchronous", "--topology.overlap", "True", steps=2000) == 0
        assert records(tmp_path / "run")[-1]["lag_max"] == 16

    def test_evaluations_are_recorded_and_change_nothing(self, train, tmp_path):
        assert train("a2c-catch", "--run.eval-every", 256, "--run.eval-games", 3, steps=1000) == 0
        assert train("a2c-catch", name="plain", steps=1000) == 0
        evaluations = [line for line in records(tmp_path / "run") if "eval/score" in line]
        assert [line["steps"] for line in evaluations] == [256, 512, 768, 1024]
        assert all(line["eval/games"] == 3 for line in evaluations)
        assert alike(newest(tmp_path / "run").weights, newest(tmp_path / "plain").weights)


def nan_reward(step: Any, count: list[int]) -> Any:
    def poisoned(self: Any, action: int, frame: np.ndarray) -> Any:
        count[0] += 1
        outcome = step(self, action, frame)
        return outcome._replace(reward=math.nan) if count[0] > 300 else outcome

    return poisoned


def nan_observation(step: Any, count: list[int]) -> Any:
    def poisoned(self: Any, action: int, frame: np.ndarray) -> Any:
        count[0] += 1
        outcome = step(self, action, frame)
        if count[0] > 300:
            frame[0] = math.nan
        return outcome

    return poisoned


class TestErrors:
    MEMORY = (*("--algorithm.checkpoint-replay", True, "--algorithm.replay-size", 2000), "--run.checkpoint-updates", 50)

    def test_one_that_nobody_foresaw_leaves_a_checkpoint(self, train, tmp_path, monkeypatch):
        """Also the one that was being written in the background is finished."""
        after, count = Session.after_iteration, []

        def failing(session: Session) -> None:
            after(session)
            count.append(session.replica.progress.updates)
            if count[-1] >= 60:
                raise RuntimeError("out of memory")

        monkeypatch.setattr(Session, "after_iteration", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            train("dqn-catch", *self.MEMORY, steps=30_000)
        assert newest(tmp_path / "run").state["replica"]["progress"]["updates"] == count[-1]

    def test_a_failed_save_in_the_background_ends_the_run_with_its_reason(self, train, capsys, monkeypatch):
        """The memory must not wait for a save that has given up."""

        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("phalanx.logs.checkpoint.save_file", full)
        monkeypatch.setattr("phalanx.replay.storage.SAVE_TIMEOUT", 20.0)
        assert train("dqn-catch", *self.MEMORY, steps=30_000) == 1
        assert "No space left on device" in capsys.readouterr().err

    def test_a_run_is_written_by_one_process_only(self, train, resume, tmp_path, capsys):
        assert train("a2c-catch") == 0
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        with locked(tmp_path / "run"):
            assert resume("--run.steps", 2000) == 2
        assert "is being written by another process" in capsys.readouterr().err
        assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        assert resume("--run.steps", 2000) == 0

    def test_an_interrupted_rollout_is_not_learnt_from_twice(self, train, resume, tmp_path, monkeypatch):
        """With overlap: what was learnt from in part is given up, as it is without."""
        update, calls = OverlappedReplica._update, []

        def failing(replica: OverlappedReplica, *arguments: Any) -> bool:
            calls.append(replica.progress.updates)
            if len(calls) == 100:
                raise RunError("stopped here")
            return update(replica, *arguments)

        monkeypatch.setattr(OverlappedReplica, "_update", failing)
        flags = ("--topology", "synchronous", "--sampler.workers", 1, "--topology.overlap", True)
        assert train("ppo-catch", *flags, steps=5000) == 1
        kept = newest(tmp_path / "run").state["replica"]
        assert kept["progress"]["updates"] > 0
        assert kept["held"] is None
        monkeypatch.undo()
        assert resume() == 0


class TestNotFinite:
    """The run stops with the reason, the batch is kept as evidence, and the last good parameters can be resumed."""

    FLAGS = ("--env.name", "identity", "--topology", "serial")

    def check(self, tmp_path: Path, error: str, words: str, culprit: str) -> None:
        assert words in error
        assert error.count("\n") == 1
        evidence = load_file(tmp_path / "run/not-finite.safetensors")
        assert not torch.isfinite(evidence[culprit]).all()
        checkpoint = newest(tmp_path / "run")
        assert all(torch.isfinite(tensor).all() for tensor in checkpoint.weights.values())
        assert checkpoint.state["replica"]["progress"]["updates"] == 2

    @pytest.mark.parametrize(
        ("poison", "words", "culprit"),
        [(nan_reward, "the reward of environment [", "reward"), (nan_observation, "the observation of", "frames")],
    )
    def test_of_an_environment(self, train, resume, tmp_path, capsys, monkeypatch, poison, words, culprit):
        monkeypatch.setattr(Identity, "step", poison(Identity.step, [0]))
        assert train("a2c-catch", *self.FLAGS, steps=10_000) == 1
        self.check(tmp_path, capsys.readouterr().err, words, culprit)
        monkeypatch.undo()
        assert resume("--run.steps", 1000) == 0
        assert newest(tmp_path / "run").steps == 1024  # 384 steps before, 128 of each rollout since

    def test_of_the_loss(self, train, tmp_path, capsys, monkeypatch):
        loss, calls = A2C.loss, []

        def poisoned(self: A2C, model: Any, batch: Any, scalars: Any) -> Any:
            calls.append(batch)
            if len(calls) == 3:
                batch.advantage[0] = math.nan
            return loss(self, model, batch, scalars)

        monkeypatch.setattr(A2C, "loss", poisoned)
        assert train("a2c-catch", *self.FLAGS, steps=10_000) == 1
        self.check(tmp_path, capsys.readouterr().err, "of update 2 is not finite", "advantage")

    def test_of_the_parameters(self, train, tmp_path, capsys):
        assert train("a2c-catch", "--optimizer.learning-rate", 1e38, "--topology", "serial", steps=10_000) == 1
        error = capsys.readouterr().err
        assert "is not finite" in error
        assert error.count("\n") == 1
        assert (tmp_path / "run/not-finite.safetensors").exists()

    def test_in_a_worker_process(self, train, tmp_path, capsys):
        """The reward crosses processes before it is found."""
        flags = ("--topology", "synchronous", "--sampler.workers", 1, "--optimizer.learning-rate", 1e38)
        assert train("a2c-catch", *flags, steps=10_000) == 1
        assert "is not finite" in capsys.readouterr().err
        assert not descendants(os.getpid())


ATARI_A2C = ("a2c", *ATARI)
OVERLAP = ("--topology.overlap", "True")
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

    def compare(self, train: Any, resume: Any, tmp_path: Path, flags: tuple[Any, ...], atari: bool) -> None:
        first, second = (100, 200) if atari else (1100, 2300)
        assert train(*flags, steps=second, name="whole") == 0
        assert train(*flags, steps=first) == 0
        halfway = newest(tmp_path / "run")
        assert resume("--run.steps", second) == 0
        ours, theirs = newest(tmp_path / "run"), newest(tmp_path / "whole")
        assert ours.steps == theirs.steps > halfway.steps
        assert not alike(halfway.weights, ours.weights)  # something was learnt after the interruption
        assert alike(ours.weights, theirs.weights)
        assert ours.state["scores"] == theirs.state["scores"]
        for name in ("progress", "store", "learner", "experience"):
            assert alike(ours.state["replica"][name], theirs.state["replica"][name]), name

    @pytest.mark.parametrize("flags", [("--sampler.horizon", 16), ("--sampler.batch", 64)])
    def test_with_overlap_keeps_the_shape_of_its_rollout(self, train, resume, capsys, flags):
        overlap = ("--topology", "synchronous", "--sampler.workers", 1, "--topology.overlap", True)
        assert train("ppo-catch", *overlap) == 0
        assert resume(*flags) == 2
        assert f"a resumed run keeps its {flags[0][2:]}" in capsys.readouterr().err

    def test_with_a_saved_memory_keeps_its_kind(self, train, resume, capsys):
        assert train("dqn-catch", "--algorithm.checkpoint-replay", True) == 0
        assert resume("--algorithm.prioritized", True) == 2
        assert "a resumed run keeps its algorithm.prioritized" in capsys.readouterr().err

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
        assert alike(newest(tmp_path / "run").weights, newest(tmp_path / "whole").weights)
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
        often = ("--run.log-every", 0.001, "--topology", "serial")
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
        often = ("--run.log-every", 0.001, "--topology", "serial", "--algorithm.checkpoint-replay", "True")
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
        assert newest(tmp_path / "run").state["replica"]["sampling"] is None
        shutil.copytree(tmp_path / "run", tmp_path / "again")
        first = balls[:24]
        played = []
        for name in ("run", "again"):
            balls.clear()
            assert resume("--run.steps", 1000, name=name) == 0
            played.append(list(balls))
        assert played[0][:24] != first
        assert played[0] == played[1]
        assert alike(newest(tmp_path / "run").weights, newest(tmp_path / "again").weights)
        assert json.loads((tmp_path / "run/config.json").read_text())["run"]["seed"] == 0

    def test_of_a_finished_run_changes_nothing(self, train, resume, tmp_path):
        assert train("a2c-catch", steps=1000) == 0
        before = newest(tmp_path / "run")
        assert resume() == 0
        after = newest(tmp_path / "run")
        assert alike(before.weights, after.weights)
        assert before.state["replica"]["progress"] == after.state["replica"]["progress"]

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
        assert alike(newest(tmp_path / "run").weights, newest(tmp_path / "whole").weights)

    def test_of_a_run_without_any_whole_checkpoint_is_one_sentence(self, train, resume, tmp_path, capsys):
        assert train("a2c-catch") == 0
        (tmp_path / "run/checkpoints/step-000000000512/model.safetensors").write_bytes(b"")
        assert resume() == 2
        assert "can be used; start the run anew" in capsys.readouterr().err

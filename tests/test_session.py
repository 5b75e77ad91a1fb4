"""A run from its first step to its end: budgets, records, values that are not finite, resuming, signals."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import phalanx
from phalanx.__main__ import main
from phalanx.algorithms.a2c import A2C
from phalanx.envs.toy import Catch, Identity
from phalanx.logs.checkpoint import Checkpoints, Loaded
from tests.sampling.faulty import descendants

ROOT = Path(phalanx.__file__).parent.parent
REQUIRED = (
    "time_s steps frames updates version episodes score sps lag_mean lag_max env_share infer_share learn_share".split()
)
EXIT_SECONDS = 3.0


@pytest.fixture
def train(tmp_path):
    """Train a preset in tmp_path/NAME; the exit code."""

    def run(preset: str, *flags: Any, name: str = "run", steps: int = 500) -> int:
        place = ["--run.directory", str(tmp_path), "--run.name", name, "--run.steps", str(steps)]
        return main(["train", preset, *place, *map(str, flags)])

    return run


@pytest.fixture
def resume(tmp_path):
    def run(*flags: Any, name: str = "run") -> int:
        return main(["resume", str(tmp_path / name), *map(str, flags)])

    return run


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def newest(run: Path) -> Loaded:
    return Checkpoints(run / "checkpoints", keep=1, report=pytest.fail).load()


def alike(ours: Any, theirs: Any) -> bool:
    """Are two states the same, bit for bit?"""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(alike(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(alike, ours, theirs))
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, np.ndarray):
        return np.array_equal(ours, theirs)
    return type(ours) is type(theirs) and ours == theirs


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


ATARI = (
    *("--env.frame", "104x80", "--model.torso", "nips", "--sampler.environments", 4, "--sampler.horizon", 5),
    *("--sampler.decorrelation", 20, "--sampler.workers", 2),
)
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

    def test_may_change_the_topology(self, train, resume, tmp_path):
        assert train("ppo-catch", "--topology", "serial", steps=2000, name="whole") == 0
        assert train("ppo-catch", "--topology", "serial", steps=1000) == 0
        assert resume("--run.steps", 2000, "--topology", "synchronous") == 0
        assert alike(newest(tmp_path / "run").weights, newest(tmp_path / "whole").weights)
        assert json.loads((tmp_path / "run/config.json").read_text())["topology"]["name"] == "synchronous"

    def test_continues_the_records(self, train, resume, tmp_path):
        assert train("a2c-catch", steps=1000) == 0
        before, state = records(tmp_path / "run"), newest(tmp_path / "run").state
        assert resume("--run.steps", 2000) == 0
        after = records(tmp_path / "run")
        assert after[: len(before)] == before
        first, last = before[-1], after[-1]
        assert last["steps"] == 2048
        assert last["updates"] == last["version"] == 16
        assert last["time_s"] > first["time_s"]
        assert last["episodes"] > first["episodes"] == 112
        assert newest(tmp_path / "run").state["scores"]["count"] == last["episodes"]
        assert newest(tmp_path / "run").state["scores"]["scores"][0] in state["scores"]["scores"]

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


def start(directory: Path, *flags: Any) -> subprocess.Popen[str]:
    """`phalanx train` in a process group of its own, as a shell would start it."""
    place = ["--run.directory", str(directory), "--run.name", "run"]
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", "train", *map(str, flags), *place],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(process: subprocess.Popen[str], children: list[int]) -> tuple[int, str]:
    """Exit code and stderr of a process that was told to stop; it and its workers must be gone in time."""
    try:
        _, error = process.communicate(timeout=EXIT_SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    return process.returncode, error


class TestSignals:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    @pytest.mark.parametrize(
        "flags",
        [("a2c-catch", "--topology", "synchronous", "--sampler.workers", 2), (*ATARI_A2C, "--sampler.horizon", 256)],
        ids=["catch", "pong"],
    )
    def test_stop_a_run_in_time_with_a_checkpoint(self, tmp_path, number, code, flags):
        shared_before = set(os.listdir("/dev/shm"))
        process = start(tmp_path, *flags, "--run.log-every", 0.1)
        run = tmp_path / "run"
        wait_for(lambda: (run / "metrics.jsonl").exists() and records(run), process)
        children = descendants(process.pid)
        assert len(children) == 2
        os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)
        returned, error = ended(process, children)
        assert (returned, error) == (code, "")
        checkpoint = newest(run)
        assert checkpoint.steps == records(run)[-1]["steps"] > 0
        assert set(os.listdir("/dev/shm")) <= shared_before
        assert main(["resume", str(run), "--run.steps", str(checkpoint.steps + 1)]) == 0

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_at_the_very_start_leave_no_traceback_and_no_process(self, tmp_path, number):
        process = start(tmp_path, "a2c-catch", "--topology", "synchronous", "--sampler.workers", 2)
        wait_for((tmp_path / "run/config.json").exists, process)
        os.killpg(process.pid, number)
        returned, error = ended(process, descendants(process.pid))
        assert "Traceback" not in error
        assert returned in (128 + number, -number)  # the handlers may not have been there yet

    def test_when_an_iteration_does_not_end_it_is_cut_off(self, tmp_path, monkeypatch, capsys):
        """A step that hangs for longer than the grace: parameters are kept, environments begin anew."""
        calls = []
        step = Catch.step

        def slow(self: Catch, action: int, frame: np.ndarray) -> Any:
            calls.append(action)
            if len(calls) == 300:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            return step(self, action, frame)

        monkeypatch.setattr(Catch, "step", slow)
        monkeypatch.setattr("phalanx.session.GRACE_SECONDS", 0.1)
        place = ["--run.directory", str(tmp_path), "--run.name", "run"]
        assert main(["train", "a2c-catch", "--topology", "serial", *place]) == 143
        assert "stopped by SIGTERM" in capsys.readouterr().out
        checkpoint = newest(tmp_path / "run")
        assert checkpoint.steps == 256
        assert checkpoint.state["replica"]["sampling"] is None
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        monkeypatch.undo()
        assert main(["resume", str(tmp_path / "run"), "--run.steps", "512"]) == 0
        assert newest(tmp_path / "run").steps == 512

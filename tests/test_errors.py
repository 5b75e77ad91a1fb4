"""Runs that end badly: errors, full disks, values that are not finite. The reason is told and nothing is lost."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from phalanx.algorithms.a2c import A2C
from phalanx.envs.toy import Identity
from phalanx.errors import RunError
from phalanx.learning.learner import Learner
from phalanx.parameters.local import LocalStore
from phalanx.replica.report import Report
from phalanx.runs.checkpoint import Checkpoints
from phalanx.runs.directory import locked
from phalanx.runs.session import Session
from phalanx.runtime.signals import Interrupted
from phalanx.types import Gradient
from whole_runs import descendants, nan_reward, newest


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
        note, count = Session.note, []

        def failing(session: Session, report: Report) -> None:
            note(session, report)
            count.append(report.progress.updates)
            if count[-1] >= 60:
                raise RuntimeError("out of memory")

        monkeypatch.setattr(Session, "note", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            train("dqn-catch", *self.MEMORY, steps=30_000)
        assert newest(tmp_path / "run").state["clocks"]["updates"] == count[-1]

    def test_a_failed_save_in_the_background_ends_the_run_with_its_reason(self, train, capsys, monkeypatch):
        """The memory must not wait for a save that has given up."""

        def full(*arguments: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("phalanx.runs.checkpoint.save_file", full)
        monkeypatch.setattr("phalanx.replay.storage.SAVE_TIMEOUT", 20.0)
        assert train("dqn-catch", *self.MEMORY, steps=30_000) == 1
        assert "No space left on device" in capsys.readouterr().err

    @pytest.mark.parametrize("end", ["signal", "error"])
    def test_a_failed_save_in_the_background_does_not_cost_the_last_one(self, train, tmp_path, monkeypatch, end):
        """The disk may have room again."""
        write, note, failed = Checkpoints.write, Session.note, []

        def full_once(checkpoints: Checkpoints, *arguments: Any) -> Path:
            if not failed:
                failed.append(True)
                raise OSError(28, "No space left on device")
            return write(checkpoints, *arguments)

        def ending(session: Session, report: Report) -> None:
            note(session, report)
            writer = session.keeper.background
            if writer.thread is not None:
                writer.thread.join(20)
                failed.append(report.progress.steps)
                if end == "error":
                    raise ValueError("something else")
                session.stop.number = signal.SIGTERM
                raise Interrupted

        monkeypatch.setattr(Checkpoints, "write", full_once)
        monkeypatch.setattr(Session, "note", ending)
        if end == "error":
            with pytest.raises(ValueError, match="something else"):
                train("dqn-catch", *self.MEMORY, steps=30_000)
        else:
            assert train("dqn-catch", *self.MEMORY, steps=30_000) == 143
        assert failed[0] is True and newest(tmp_path / "run").steps == failed[1]
        assert "an earlier checkpoint could not be written" in (tmp_path / "run/events.log").read_text()

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
        update, calls = Learner.update, []

        def failing(learner: Learner, *arguments: Any) -> None:
            calls.append(learner.clocks.now().updates)
            if len(calls) == 100:  # of 16 for each rollout
                raise RunError("stopped here")
            update(learner, *arguments)

        monkeypatch.setattr(Learner, "update", failing)
        flags = ("--topology", "synchronous", "--sampler.workers", 1, "--sampler.overlap", True)
        assert train("ppo-catch", *flags, steps=5000) == 1
        kept = newest(tmp_path / "run").state
        assert kept["clocks"]["updates"] == 99
        assert kept["replicas"][0]["pending"] is None
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
        assert checkpoint.state["clocks"]["updates"] == 2

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

    @pytest.mark.parametrize("often", [True, False])
    def test_of_parameters_is_not_saved(self, train, resume, tmp_path, capsys, monkeypatch, often):
        """What the rule makes of a finite gradient is looked at before it is written."""
        assert train("a2c-catch", "--topology", "serial", "--run.checkpoint-updates", 1, steps=1280) == 0
        push = LocalStore.push

        def spoils(self: LocalStore, gradient: Gradient, rate: Any) -> int:
            return push(self, gradient, math.inf)

        monkeypatch.setattr(LocalStore, "push", spoils)
        assert resume("--run.steps", 1290, "--run.checkpoint-updates", int(often)) == 1
        assert "the parameters are not finite after update" in capsys.readouterr().err
        monkeypatch.undo()
        assert newest(tmp_path / "run").steps == 1280
        assert resume("--run.steps", 1500) == 0

    def test_in_a_worker_process(self, train, tmp_path, capsys):
        """The reward crosses processes before it is found."""
        flags = ("--topology", "synchronous", "--sampler.workers", 1, "--optimizer.learning-rate", 1e38)
        assert train("a2c-catch", *flags, steps=10_000) == 1
        assert "is not finite" in capsys.readouterr().err
        assert not descendants(os.getpid())

"""A run from its first step to its end: budgets and records."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from phalanx.config import AtariConfig, GymnasiumConfig, RunConfig
from phalanx.config.presets import preset
from phalanx.errors import RunError, UserError
from phalanx.learning.learner import Learner
from phalanx.replica.replica import Replica
from phalanx.runs.checkpoint import Checkpoints
from phalanx.runs.directory import locked
from phalanx.runs.keeper import FIRST_CHECKPOINT_SECONDS
from phalanx.runs.metrics import ScoreWindow
from phalanx.runs.session import Session
from phalanx.runtime.signals import Interrupted
from phalanx.sampling.evaluator import evaluation_env
from phalanx.topologies import serial
from phalanx.types import Progress
from whole_runs import ATARI, newest, records, same

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
        assert train("ppo-catch", "--topology", "synchronous", "--sampler.overlap", "True", steps=2000) == 0
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

    def test_the_last_record_is_of_the_last_checkpoint_where_learning_is_cut_off(
        self, train, tmp_path, monkeypatch, capsys
    ):
        """What was collected in the iteration that did not end is in both, and in the summary."""
        learn, count = Learner.learn, itertools.count(1)

        def cut_off(learner, *arguments):
            if next(count) == 4:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
            learn(learner, *arguments)

        monkeypatch.setattr(Learner, "learn", cut_off)
        assert train("a2c-catch", "--topology", "serial", steps=10_000) == 143
        assert records(tmp_path / "run")[-1]["steps"] == newest(tmp_path / "run").steps == 4 * 128
        assert "steps 512 " in capsys.readouterr().out

    def test_the_last_record_and_the_summary_are_of_the_last_checkpoint_where_replicas_go_on(
        self, train, tmp_path, monkeypatch, capsys
    ):
        snapshot = Replica.snapshot

        def later(replica, *arguments):
            found = snapshot(replica, *arguments)
            return dataclasses.replace(found, clocks=dataclasses.replace(found.clocks, steps=found.clocks.steps + 96))

        monkeypatch.setattr(Replica, "snapshot", later)
        assert train("a2c-catch", "--topology", "serial", steps=512) == 0
        assert records(tmp_path / "run")[-1]["steps"] == newest(tmp_path / "run").steps == 608
        assert "steps 608 " in capsys.readouterr().out

    def test_the_speed_of_a_short_last_window_is_that_of_a_whole_one(self, tmp_path, monkeypatch):
        """Many replicas have stepped since the last report when the run ends, in next to no time since the record."""
        clock, speeds = [0.0], []
        monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
        experiment = dataclasses.replace(preset("a2c-catch"), run=RunConfig(log_every=2.0))
        session = Session(experiment, tmp_path, Checkpoints(tmp_path, keep=1, report=pytest.fail))
        session.frames_per_step = 1
        session.logger = SimpleNamespace(record=lambda values: speeds.append(values["sps"]))
        for seconds, steps in ((2.0, 200), (4.0, 600), (4.01, 700)):
            clock[0], session.progress = seconds, Progress(steps=steps)
            session.record()
        assert speeds == pytest.approx([100.0, 200.0, 500 / 2.01])

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


def last_event(run):
    return (run / "events.log").read_text().splitlines()[-1].partition(" ")[2]


class TestLastWords:
    """events.log ends with the sentence that ended the run."""

    def test_of_a_budget_that_is_used_up(self, train, tmp_path):
        assert train("a2c-catch", "--topology", "serial", steps=600) == 0
        assert last_event(tmp_path / "run").startswith("600 steps done after ")

    def test_of_a_target_that_is_reached(self, train, tmp_path):
        assert train("a2c-catch", "--topology", "serial", "--run.target-score", -0.9, steps=10**9) == 0
        assert last_event(tmp_path / "run").startswith("target score -0.9 reached after ")

    @pytest.mark.parametrize("error", [Interrupted(), None], ids=["cut off", "heeded"])
    def test_of_a_signal(self, train, tmp_path, monkeypatch, error):
        note = Session.note

        def stopping(session, report):
            note(session, report)
            session.stop.number = signal.SIGTERM
            if error is not None:
                raise error

        monkeypatch.setattr(Session, "note", stopping)
        assert train("a2c-catch", "--topology", "serial") == 143
        assert last_event(tmp_path / "run").startswith("stopped by SIGTERM after ")

    @pytest.mark.parametrize("early", [False, True])
    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (RunError("too many\n workers died"), "too many workers died"),
            (UserError("that cannot be"), "that cannot be"),
            (ZeroDivisionError("nobody\nforesaw"), "ZeroDivisionError: nobody foresaw"),
        ],
        ids=["run", "user", "unforeseen"],
    )
    def test_of_an_error(self, train, tmp_path, monkeypatch, error, words, early):
        """Also of one before there is anything to log."""

        def failing(*arguments, **named):
            raise error

        if early:
            monkeypatch.setattr(serial, "make_envs", failing)
        else:
            monkeypatch.setattr(Session, "note", failing)
        if isinstance(error, ZeroDivisionError):
            with pytest.raises(ZeroDivisionError):
                train("a2c-catch", "--topology", "serial")
        else:
            assert train("a2c-catch", "--topology", "serial") == (1 if isinstance(error, RunError) else 2)
        assert last_event(tmp_path / "run") == words

    def test_of_a_number_that_is_not_finite(self, train, tmp_path, capsys):
        flags = ("--optimizer.learning-rate", 1e38, "--topology", "serial")
        assert train("a2c-catch", *flags, steps=10_000) == 1
        assert f"phalanx: {last_event(tmp_path / 'run')}\n" == capsys.readouterr().err

    def test_of_a_signal_before_the_first_step(self, train, tmp_path, monkeypatch):
        def failing(*arguments, **named):
            os.kill(os.getpid(), signal.SIGTERM)
            raise RunError("the workers are gone")

        monkeypatch.setattr(serial, "make_envs", failing)
        assert train("a2c-catch", "--topology", "serial") == 143
        assert last_event(tmp_path / "run") == "stopped by SIGTERM before the first step"


def interrupting(monkeypatch, deed, at=3):
    """Do something to a run after so many iterations."""
    note, count = Session.note, itertools.count(1)

    def interrupted(session, report):
        note(session, report)
        if next(count) == at:
            deed(session)

    monkeypatch.setattr(Session, "note", interrupted)


class TestDirectoryThatGoesAway:
    OFTEN = ("--topology", "serial", "--run.log-every", 1e-9)

    @pytest.mark.parametrize("flags", [OFTEN, (*OFTEN[:2], "--run.checkpoint-updates", 4), OFTEN[:2]])
    def test_moved_is_noticed_and_the_run_can_go_on_from_there(self, train, tmp_path, capsys, monkeypatch, flags):
        """By the next record, or the next checkpoint, or at the end, whichever comes first."""
        place = tmp_path / "over there"
        interrupting(monkeypatch, lambda session: session.directory.rename(place))
        assert train("a2c-catch", *flags, steps=1280) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"was moved to {place} while the run went on; continue it: phalanx resume '{place}'" in error
        assert not (tmp_path / "run").exists()
        assert f"phalanx: {last_event(place)}\n" == error
        assert newest(place).steps == (1280 if flags == self.OFTEN[:2] else 512)

    def test_removed_is_noticed_and_not_made_again(self, train, tmp_path, capsys, monkeypatch):
        interrupting(monkeypatch, lambda session: shutil.rmtree(session.directory))
        assert train("a2c-catch", *self.OFTEN, steps=10**9) == 1
        assert f"{tmp_path}/run was removed while the run went on" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())


class TestFirstCheckpoint:
    def test_comes_early_and_the_others_when_they_are_due(self, train, resume, monkeypatch):
        write, written = Checkpoints.write, []

        def noted(self, weights, state, steps, *rest):
            written.append(steps)
            return write(self, weights, state, steps, *rest)

        assert RunConfig().checkpoint_every > FIRST_CHECKPOINT_SECONDS
        monkeypatch.setattr("phalanx.runs.keeper.FIRST_CHECKPOINT_SECONDS", 0.0)
        monkeypatch.setattr(Checkpoints, "write", noted)
        assert train("a2c-catch", "--topology", "serial", steps=512) == 0
        assert resume("--run.steps", 1024) == 0  # there is one already
        assert written == [128, 512, 1024]

    def test_a_run_that_was_killed_before_it_starts_again_under_its_name(self, train, resume, tmp_path, capsys):
        run = tmp_path / "my run"
        assert train("a2c-catch", "--topology", "serial", name="my run", steps=256) == 0
        whole = newest(run).weights
        shutil.rmtree(run / "checkpoints")
        (run / "checkpoints/.tmp-step-000000000128").mkdir(parents=True)
        (run / "notes.txt").write_text("mine")
        capsys.readouterr()
        assert resume(name="my run") == 2
        again = f"`phalanx train PRESET --run.directory {tmp_path} --run.name 'my run'`"
        assert again in capsys.readouterr().err
        with locked(run):
            assert train("a2c-catch", "--topology", "serial", name="my run", steps=256) == 2
        assert "is being written by another process" in capsys.readouterr().err
        assert train("a2c-catch", "--topology", "serial", name="my run", steps=256) == 0
        assert "ended before its first checkpoint; it starts again" in capsys.readouterr().err
        assert same(newest(run).weights, whole)
        assert len(records(run)) == 1 and (run / "notes.txt").read_text() == "mine"

    @pytest.mark.parametrize("left", ["a checkpoint", "many records", "no configuration", "a link"])
    def test_any_other_directory_is_refused_and_left_alone(self, train, tmp_path, capsys, left):
        assert train("a2c-catch", "--topology", "serial", name="my run") == 0
        run = tmp_path / "my run"
        if left == "many records":
            (run / "metrics.jsonl").write_bytes(b" " * 100_000)
        if left != "a checkpoint":
            shutil.rmtree(run / "checkpoints")
        if left in ("no configuration", "a link"):
            (run / "config.json").unlink()
        if left == "a link":
            (run / "config.json").symlink_to(run / "metrics.jsonl")
        before = sorted(run.rglob("*"))
        capsys.readouterr()
        assert train("a2c-catch", "--topology", "serial", name="my run") == 2
        assert f"exists already; choose another --run.name, or continue it: phalanx resume '{run}'" in (
            capsys.readouterr().err
        )
        assert sorted(run.rglob("*")) == before


class TestFullDisk:
    @pytest.mark.parametrize("where", ["run", "a/b/run"])
    def test_at_the_start_leaves_no_directory(self, train, tmp_path, capsys, monkeypatch, where):
        def full(descriptor):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        assert train("a2c-catch", name=where) == 1
        assert "No space left on device" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_that_has_no_room_for_a_directory_leaves_none_of_its_parents(self, train, tmp_path, capsys, monkeypatch):
        mkdir = Path.mkdir

        def full(path, *arguments, **named):
            if path.name == "run":
                raise OSError(errno.ENOSPC, "No space left on device")
            mkdir(path, *arguments, **named)

        monkeypatch.setattr(Path, "mkdir", full)
        assert train("a2c-catch", name="a/b/run") == 2
        assert "No space left on device" in capsys.readouterr().err
        assert not list(tmp_path.iterdir())

    def test_of_others_is_left_as_it_was(self, train, tmp_path, capsys):
        (tmp_path / "a").mkdir()
        (tmp_path / "a/file").write_text("kept")
        assert train("a2c-catch", name="a/file/run") == 2
        assert "cannot make the run directory" in capsys.readouterr().err
        assert (tmp_path / "a/file").read_text() == "kept"


def test_suggested_commands_quote_their_paths(train, tmp_path, capsys):
    assert train("a2c-catch", "--topology", "serial", name="my run") == 0
    quoted = f"'{tmp_path}/my run'"
    shown = capsys.readouterr().out
    steps = json.loads((tmp_path / "my run/config.json").read_text())["run"]["steps"]
    commands = (f"eval {quoted}", f"play {quoted} --video play.mp4", f"resume {quoted} --run.steps {2 * steps}")
    assert shown.endswith("next: " + "      ".join(f"phalanx {command}\n" for command in commands))

"""Signals end a run in time, with a checkpoint, the right exit code, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import phalanx
from phalanx.cli.main import main
from phalanx.envs.toy import Catch
from phalanx.runs import checkpoint
from phalanx.runtime.signals import Interrupted, unwrapped
from whole_runs import ATARI, descendants, newest, records

ROOT = Path(phalanx.__file__).parent.parent
EXIT_SECONDS = 20.0  # under 3 on a quiet machine; a loaded one may take longer


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
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    )


def wait_for(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def stop(process: subprocess.Popen[str], number: int) -> None:
    """Ctrl-C reaches the whole group; other signals are sent to the process alone."""
    os.killpg(process.pid, number) if number == signal.SIGINT else os.kill(process.pid, number)


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
    @pytest.mark.parametrize(
        ("number", "code"),
        [(signal.SIGINT, 130), (signal.SIGTERM, 143), pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow)],
    )
    @pytest.mark.parametrize(
        "flags",
        [
            ("a2c-catch", "--topology", "synchronous", "--sampler.workers", 2),
            ("a2c", *ATARI, "--sampler.horizon", 256),
            ("a2c-catch", "--topology", "ga3c", "--sampler.environments", 2, "--sampler.horizon", 5),
        ],
        ids=["catch", "pong", "ga3c"],
    )
    def test_stop_a_run_in_time_with_a_checkpoint(self, tmp_path, number, code, flags):
        shared_before = set(os.listdir("/dev/shm"))
        process = start(tmp_path, *flags, "--run.log-every", 0.1)
        run = tmp_path / "run"
        wait_for(lambda: (run / "metrics.jsonl").exists() and any(r["steps"] for r in records(run)), process)
        children = descendants(process.pid)
        assert len(children) == 2
        stop(process, number)
        returned, error = ended(process, children)
        assert (returned, error) == (code, "")
        checkpoint = newest(run)
        assert checkpoint.steps == records(run)[-1]["steps"] > 0
        assert set(os.listdir("/dev/shm")) <= shared_before
        assert main(["resume", str(run), "--run.steps", str(checkpoint.steps + 1)]) == 0

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_that_reach_the_whole_job_are_the_owners(self, tmp_path, number):
        """As when a service or a job of a cluster is stopped: no worker dies, and the environments are saved."""
        process = start(
            tmp_path, "a2c-catch", "--topology", "synchronous", "--sampler.workers", 2, "--run.log-every", 0.1
        )
        run = tmp_path / "run"
        wait_for(lambda: (run / "metrics.jsonl").exists() and records(run), process)
        children = descendants(process.pid)
        for pid in (*children, process.pid):
            os.kill(pid, number)
        assert ended(process, children) == (128 + number, "")
        assert newest(run).state["replicas"][0]["sampling"] is not None
        assert "died" not in (run / "events.log").read_text()

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGHUP, 0), (signal.SIGINT, 130)])
    def test_that_were_ignored_where_the_run_was_started(self, train, monkeypatch, number, code):
        """By `nohup`, which is meant; and by a shell in all it starts in the background, which is not."""
        step, calls = Catch.step, []

        def signalled(self: Catch, action: int, frame: np.ndarray) -> Any:
            calls.append(action)
            if len(calls) == 300:
                os.kill(os.getpid(), number)
            return step(self, action, frame)

        monkeypatch.setattr(Catch, "step", signalled)
        handler = signal.signal(number, signal.SIG_IGN)
        try:
            assert train("a2c-catch", "--topology", "serial", steps=2_000) == code
            assert signal.getsignal(number) is signal.SIG_IGN
        finally:
            signal.signal(number, handler)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    @pytest.mark.parametrize("moment", ["before workers", "with workers"])
    def test_at_the_very_start_leave_no_traceback_and_no_process(self, tmp_path, number, moment):
        process = start(tmp_path, "a2c-catch", "--topology", "synchronous", "--sampler.workers", 2)
        wait_for((tmp_path / "run/config.json").exists, process)
        if moment == "with workers":
            wait_for(lambda: len(descendants(process.pid)) == 2, process)
        children = descendants(process.pid)
        stop(process, number)
        returned, error = ended(process, children)
        assert "Traceback" not in error
        assert returned in (128 + number, -number)  # the handlers may not have been there yet

    @pytest.mark.parametrize("stopped", [False, True])
    def test_leave_the_alarm_to_whoever_had_set_it(self, train, monkeypatch, stopped):
        step, calls = Catch.step, []

        def signalled(self: Catch, action: int, frame: np.ndarray) -> Any:
            calls.append(action)
            if stopped and len(calls) == 300:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, action, frame)

        monkeypatch.setattr(Catch, "step", signalled)
        handler = signal.signal(signal.SIGALRM, print)
        timer = signal.setitimer(signal.ITIMER_REAL, 200)
        try:
            assert train("a2c-catch", "--topology", "serial", steps=2_000) == (143 if stopped else 0)
            assert signal.getsignal(signal.SIGALRM) is print
            assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 200
        finally:
            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, *timer)

    @pytest.mark.parametrize("signals", [1, 2])
    def test_do_not_tear_the_last_checkpoint(self, tmp_path, monkeypatch, signals):
        """It takes longer than the grace; the second signal and the alarm of the first come while it is written."""
        step, manifest, calls = Catch.step, checkpoint._manifest, []

        def signalled(self: Catch, action: int, frame: np.ndarray) -> Any:
            calls.append(action)
            if len(calls) == 300:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, action, frame)

        def slow(*arguments: Any) -> str:
            if signals == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
            return manifest(*arguments)

        monkeypatch.setattr(Catch, "step", signalled)
        monkeypatch.setattr(checkpoint, "_manifest", slow)
        monkeypatch.setattr("phalanx.runtime.signals.GRACE_SECONDS", 0.2)
        place = ["--run.directory", str(tmp_path), "--run.name", "run"]
        assert main(["train", "a2c-catch", "--topology", "serial", *place]) == 143
        kept = newest(tmp_path / "run")
        assert kept.steps > 0
        assert kept.state["replicas"][0]["sampling"] is not None

    def test_after_one_nobody_begins_a_rollout(self, train, tmp_path, monkeypatch, early):
        """It would have to be finished within the grace."""
        step, calls = Catch.step, []

        def signalled(self: Catch, action: int, frame: np.ndarray) -> Any:
            calls.append(action)
            if len(calls) == 640:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, action, frame)

        monkeypatch.setattr(Catch, "step", signalled)
        monkeypatch.setattr("phalanx.runtime.signals.GRACE_SECONDS", 60)
        assert train(*early, "--sampler.decorrelation", 0, steps=100_000) == 143
        kept = newest(tmp_path / "run")
        assert kept.steps == records(tmp_path / "run")[-1]["steps"] == len(calls)
        assert len(calls) < 640 + 64  # the rollout it came in, and what had been begun by then
        assert kept.state["replicas"][0]["sampling"] is not None
        assert kept.state["replicas"][0]["pending"] is not None

    def test_two_in_an_iteration_still_leave_a_checkpoint(self, tmp_path, monkeypatch):
        step, calls = Catch.step, []

        def signalled(self: Catch, action: int, frame: np.ndarray) -> Any:
            calls.append(action)
            if len(calls) == 300:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
            return step(self, action, frame)

        monkeypatch.setattr(Catch, "step", signalled)
        place = ["--run.directory", str(tmp_path), "--run.name", "run"]
        assert main(["train", "a2c-catch", "--topology", "serial", *place]) == 143
        assert newest(tmp_path / "run").steps == 256

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
        monkeypatch.setattr("phalanx.runtime.signals.GRACE_SECONDS", 0.1)
        place = ["--run.directory", str(tmp_path), "--run.name", "run"]
        assert main(["train", "a2c-catch", "--topology", "serial", *place]) == 143
        assert "stopped by SIGTERM" in capsys.readouterr().out
        checkpoint = newest(tmp_path / "run")
        assert checkpoint.steps == 256
        assert checkpoint.state["replicas"][0]["sampling"] is None
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        monkeypatch.undo()
        assert main(["resume", str(tmp_path / "run"), "--run.steps", "512"]) == 0
        assert newest(tmp_path / "run").steps == 512


def test_an_interruption_is_found_in_the_error_that_compiled_code_makes_of_it():
    """`SystemError: ... returned a result with an exception set`, which ended runs on Ray with exit code 1."""
    with pytest.raises(Interrupted), unwrapped():
        raise SystemError("returned a result with an exception set") from Interrupted()
    with pytest.raises(SystemError, match="something else"), unwrapped():
        raise SystemError("something else") from ValueError()

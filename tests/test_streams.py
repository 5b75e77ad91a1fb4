"""The command line where its streams are closed or full, files are few, and Ctrl-C comes twenty times."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import phalanx
from phalanx.cli.main import main
from whole_runs import descendants, newest, records

ROOT = Path(phalanx.__file__).parent.parent
TINY = ("--run.steps", "500", "--topology", "serial")


def shell(redirection: str, *arguments: str, unbuffered: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m phalanx ...` with a redirection of its streams."""
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirection}', "-", sys.executable, "-m", "phalanx", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_without_streams_goes_on_in_silence(tmp_path, redirection):
    workers = ("--topology", "synchronous", "--sampler.workers", "1")
    place = ("--run.directory", str(tmp_path), "--run.name", "a")
    result = shell(redirection, "train", "a2c-catch", *workers, "--run.steps", "500", *place)
    assert (result.returncode, result.stderr) == (0, "")
    assert newest(tmp_path / "a").steps == records(tmp_path / "a")[-1]["steps"] == 512


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["presets"], ["plan", "a2c-catch"], ["help"], ["train", "a2c-catch", "--help"]])
def test_a_full_output_is_one_sentence(arguments, unbuffered):
    result = shell(">/dev/full", *arguments, unbuffered=unbuffered)
    assert result.returncode == 1
    assert (
        result.stderr == "phalanx: cannot write to the standard output (No space left on device); send it elsewhere\n"
    )


def test_scores_for_a_full_output_are_one_sentence(tmp_path):
    assert main(["train", "a2c-catch", *TINY, "--run.directory", str(tmp_path), "--run.name", "a"]) == 0
    result = shell(">/dev/full", "eval", str(tmp_path / "a"), "--games", "2")
    assert result.returncode == 1
    assert result.stderr.startswith("phalanx: cannot write to the standard output") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_mistake_that_cannot_be_told_has_its_exit_code(redirection):
    result = shell(redirection, "plan", "pppo")
    assert (result.returncode, result.stdout) == (2, "")


def test_too_few_files_are_one_sentence(tmp_path):
    flags = ("--topology", "synchronous", "--sampler.workers", "32", "--sampler.environments", "32")
    result = shell(
        *("", "train", "a2c-catch", *flags, "--run.directory", str(tmp_path)),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    )
    assert result.returncode == 1
    assert result.stderr.startswith("phalanx: too many files are open") and result.stderr.count("\n") == 1
    assert "ulimit -n" in result.stderr and "--sampler.workers" in result.stderr


def imports_torch(process: subprocess.Popen[str], run: Path) -> bool:
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def has_a_directory(process: subprocess.Popen[str], run: Path) -> bool:
    return (run / "config.json").exists()


def has_workers(process: subprocess.Popen[str], run: Path) -> bool:
    return len(descendants(process.pid)) == 2


def trains(process: subprocess.Popen[str], run: Path) -> bool:
    return (run / "metrics.jsonl").exists() and bool(records(run))


@pytest.mark.parametrize("moment", [imports_torch, has_a_directory, has_workers, trains])
def test_twenty_interrupts_are_one(tmp_path, moment):
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "phalanx", "train", "a2c-catch", "--topology", "synchronous"),
            *("--sampler.workers", "2", "--run.log-every", "0.1"),
            *("--run.directory", str(tmp_path), "--run.name", "run"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not moment(process, tmp_path / "run"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    children = descendants(process.pid)
    for _ in range(20):
        os.kill(process.pid, signal.SIGINT)
    try:
        _, error = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "")
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    if moment is trains:
        assert newest(tmp_path / "run").steps == records(tmp_path / "run")[-1]["steps"] > 0

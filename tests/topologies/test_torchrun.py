"""synchronous under torchrun: the same numbers as on one host, and an end of all with the name of the dead one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phalanx.config.presets import preset
from phalanx.errors import RunError
from phalanx.replica.build import make_replica
from phalanx.runtime.device import choose_compute
from phalanx.runtime.group import PeerLost
from phalanx.topologies import serial
from phalanx.topologies.torchrun import Leader
from whole_runs import descendants, newest, records, same

FLAGS = ("--run.threads", "1", "--run.precision", "float32", "--sampler.decorrelation", "10")


def torchrun(directory: Path, *flags: str, restarts: int = 0, size: int = 2) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--max-restarts"]
    command += [str(restarts), "--monitor-interval", "0.2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "phalanx", "train", "a2c-catch", "--topology", "synchronous", "--run.name", "run", *FLAGS, *flags]
    command += ["--run.directory", str(directory), "--run.log-every", "0.2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with (directory / "output.txt").open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def wait_until(condition: Any, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def ranks(launcher: int) -> dict[int, int]:
    """The processes that torchrun has started, by rank."""
    found = {}
    for pid in descendants(launcher):
        try:
            variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
            is_rank = b"phalanx\0train" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if is_rank:
            found[int(next(one for one in variables if one.startswith("RANK=")).removeprefix("RANK="))] = pid
    return found


def test_it_learns_what_one_host_does(train, tmp_path):
    launcher = torchrun(tmp_path, "--run.steps", "4096")
    assert launcher.wait(timeout=120) == 0, (tmp_path / "output.txt").read_text()
    flags = ("--topology", "synchronous", "--topology.replicas", 2, "--sampler.decorrelation", 10, "--run.threads", 1)
    assert train("a2c-catch", *flags, name="own", steps=4096) == 0
    theirs, own = newest(tmp_path / "run"), newest(tmp_path / "own")
    assert same(theirs.weights, own.weights)
    for part in ("clocks", "store", "replicas"):
        assert same(theirs.state[part], own.state[part]), part


NAME_THREADS = """
import atexit, pathlib, threading
from phalanx.cli.main import entry
def name_threads():
    print("Python's at the end:", [thread.name for thread in threading.enumerate()])
    names = [path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
    print("gloo's at the end:", [name for name in names if "gloo" in name])
atexit.register(name_threads)
entry()
"""


def test_nobody_speaks_to_the_others_when_the_interpreter_ends(tmp_path):
    """A sign of life on its way, or gloo's thread with the last tensor, then aborted the process, and torchrun called
    the whole job failed."""
    command = [sys.executable, "-c", NAME_THREADS, "train", "a2c-catch", "--topology", "synchronous", *FLAGS]
    command += ["--run.name", "run", "--run.steps", "512", "--run.directory", str(tmp_path)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": "0"}
    path = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run(command, env={**os.environ, **alone, **path}, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Python's at the end: ['MainThread']" in ended.stdout
    assert "gloo's at the end: []" in ended.stdout


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_death_of_one_is_named_and_a_restart_goes_on(tmp_path, victim):
    launcher = torchrun(tmp_path, "--run.steps", "1000000", restarts=1)
    metrics = tmp_path / "run/metrics.jsonl"
    try:
        wait_until(lambda: metrics.exists() and len(records(tmp_path / "run")) > 3)
        os.kill(ranks(launcher.pid)[victim], signal.SIGKILL)
        before = len(ranks(launcher.pid))
        assert before <= 2
        checkpoints = tmp_path / "run/checkpoints"
        wait_until(lambda: checkpoints.exists() and any(checkpoints.glob("step-*")))
        steps = newest(tmp_path / "run").steps
        assert steps > 0
        wait_until(lambda: records(tmp_path / "run")[-1]["steps"] > steps + 2000)
        said = (tmp_path / "output.txt").read_text() + (tmp_path / "run/events.log").read_text()
        assert f"rank {victim} died" in said
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(timeout=60)
        assert newest(tmp_path / "run").steps > steps
    finally:
        launcher.kill()
        for pid in ranks(launcher.pid).values():
            os.kill(pid, signal.SIGKILL)


def test_the_end_of_the_launcher_is_the_end_of_all_with_a_checkpoint(tmp_path):
    """kill -9 of torchrun itself, which can tell nobody."""
    launcher = torchrun(tmp_path, "--run.steps", "1000000000")
    metrics = tmp_path / "run/metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(records(tmp_path / "run")) > 3)
    processes = descendants(launcher.pid)
    try:
        assert len(processes) >= 2
        launcher.kill()
        launcher.wait(60)
        wait_until(lambda: not [pid for pid in processes if Path(f"/proc/{pid}").exists()], seconds=60)
        assert newest(tmp_path / "run").steps >= records(tmp_path / "run")[-1]["steps"] > 0
        assert "stopped by SIGTERM" in (tmp_path / "run/events.log").read_text()
    finally:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class OthersGone:
    """The group of rank 0, and its job, after rank 1 has died."""

    size, group = 2, property(lambda self: self)
    launch = group

    def object_of(self, source: int, own: Any = None) -> Any:
        raise PeerLost("connection closed")

    objects = object_of

    def roll_call(self) -> str:
        return "rank 1 died"


@pytest.mark.parametrize("what", ["iterate", "snapshot", "restore", "dismiss"])
def test_the_dead_one_is_named_whatever_rank_0_is_at(what):
    """And not as if it had died before the run began; what rank 0 has can be saved."""
    experiment = preset("a2c-catch")
    compute = choose_compute(experiment.run)
    with serial.make_envs(experiment, compute, print) as envs:
        replica = make_replica(experiment, envs, compute, print)
        job: Any = OthersGone()
        leader = Leader(job, replica)
        own = replica.snapshot()
        arguments = (own, Path()) if what == "restore" else ()
        with pytest.raises(RunError, match="rank 1 died; the others end, too: resume the run"):
            getattr(leader, what)(*arguments)
        snapshot = leader.snapshot(with_envs=False)
        assert same(snapshot.weights, own.weights) and len(snapshot.replicas) == 2
        leader.dismiss()  # nobody is there to be told


def test_a_run_without_a_name_is_refused(tmp_path):
    launcher = torchrun(tmp_path, "--run.name", "")
    assert launcher.wait(timeout=120) != 0
    assert "under torchrun give the run a name" in (tmp_path / "output.txt").read_text()

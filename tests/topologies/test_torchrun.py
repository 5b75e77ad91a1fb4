"""synchronous under torchrun: the same numbers as on one host, and an end of all with the name of the dead one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.config import SynchronousConfig
from phalanx.config.presets import preset
from phalanx.errors import RunError, UserError
from phalanx.replica.build import make_replica
from phalanx.runs.directory import run_checkpoints
from phalanx.runs.keeper import as_state
from phalanx.runs.metrics import ScoreWindow
from phalanx.runtime.device import choose_compute
from phalanx.runtime.group import PeerLost, meeting_point
from phalanx.runtime.launch import Launch
from phalanx.runtime.signals import Interrupted
from phalanx.topologies import serial
from phalanx.topologies import torchrun as torchrun_module
from phalanx.topologies.torchrun import SILENCE, Job, Leader, save_for_rank_0
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

    def find_dead_ranks(self) -> str:
        return "rank 1 died"


class Left:
    """The group of rank 0, and its job, when a signal interrupts an exchange."""

    size, group = 2, property(lambda self: self)
    launch = group
    ended = 0

    def object_of(self, source: int, own: Any = None) -> Any:
        raise Interrupted

    def end(self) -> None:
        self.ended += 1


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


def test_who_is_interrupted_within_an_iteration_asks_nobody_any_more():
    """The others are within it: they would take a farewell for what they wait for."""
    experiment = preset("a2c-catch")
    compute = choose_compute(experiment.run)
    with serial.make_envs(experiment, compute, print) as envs:
        job: Any = Left()
        leader = Leader(job, make_replica(experiment, envs, compute, print))
        with pytest.raises(Interrupted):
            leader.iterate()
        assert job.ended == 1
        leader.snapshot(with_envs=True)
        leader.dismiss()


@pytest.fixture
def job(monkeypatch, tmp_path):
    """Rank 0 of two that meet within this process."""
    monkeypatch.setattr(torchrun_module, "confine_to", lambda cores: None)
    monkeypatch.setattr(torchrun_module, "ROLL_CALL", 0.05)
    monkeypatch.setattr(Launch, "meeting_point", lambda launch: meeting_point())
    return Job(Launch(rank=0, size=2, local_rank=0, local_size=2, restarts=0), tmp_path)


class TestSilence:
    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch):
        now = [0.0]
        monkeypatch.setattr(torchrun_module.time, "monotonic", lambda: now[0])
        return now

    def test_a_process_that_gives_no_sign_of_life_is_dead(self, job, clock):
        job.looked_at = 0.0
        with pytest.raises(PeerLost):
            for _ in range(100):
                clock[0] += 1.0
                job.counts = [job.counts[0] + 4, 7]
                job.watch()
        assert SILENCE < clock[0] < SILENCE + 4
        assert job.find_dead_ranks() == "rank 1 died"
        assert job.alive == {0}

    def test_a_job_that_was_stopped_and_continues_lives(self, job, clock):
        for _ in range(5):
            clock[0] += 1000.0  # before anybody has read the others' signs of life
            job.watch()
            job.counts = [count + 1 for count in job.counts]
            job.watch()

    def test_who_hears_nobody_has_lost_the_meeting_point(self, job, clock):
        with pytest.raises(PeerLost):
            for _ in range(100):
                clock[0] += 1.0
                job.watch()
        assert "the host where they meet cannot be reached" in job.find_dead_ranks()


class NoGroup:
    def close(self) -> None: ...


def test_an_end_is_no_death(job):
    job.group = NoGroup()
    assert not job.has_ended()
    job.end()
    assert job.has_ended()
    job.find_dead_ranks()  # after somebody was lost all the same
    assert not job.has_ended()


class TestTheCheckpointForRank0:
    @pytest.fixture
    def replica(self):
        experiment = preset("a2c-catch")
        compute = choose_compute(experiment.run)
        with serial.make_envs(experiment, compute, print) as envs:
            yield make_replica(experiment, envs, compute, print)

    def test_does_not_replace_one_of_the_same_step(self, job, replica):
        experiment = preset("a2c-catch")
        job.directory.mkdir(exist_ok=True)
        scores = {**ScoreWindow(100).state(), "scores": [1.0, 2.0], "count": 2}
        own = replica.snapshot()
        state = {**as_state(own), "scores": scores, "time_s": 7.0}
        path = run_checkpoints(experiment, job.directory, print).write(own.weights, state, 0, None)
        assert save_for_rank_0(job, experiment, replica) == f"the checkpoint is {path}"
        assert newest(job.directory).state["time_s"] == 7.0

        replica.iterate(run_ahead=False)  # one of a later step goes on with its scores
        assert save_for_rank_0(job, experiment, replica) != f"the checkpoint is {path}"
        assert newest(job.directory).steps > 0
        assert newest(job.directory).state["time_s"] == 7.0
        assert newest(job.directory).state["scores"] == scores

    def test_is_written_where_there_is_none(self, job, replica):
        replica.iterate(run_ahead=False)
        assert "the checkpoint is" in save_for_rank_0(job, preset("a2c-catch"), replica)
        assert newest(job.directory).steps > 0


@pytest.mark.parametrize("exchange", ["auto", "gloo", "nccl"])
@pytest.mark.parametrize("everybody", [True, False])
def test_rank_0_decides_what_they_exchange_over(monkeypatch, job, exchange, everybody):
    monkeypatch.setattr(torchrun_module, "own_gpus", lambda compute, replicas: True)

    class OfTwo:
        nccl = False

        def gather(self, row: Any) -> Any:
            return np.stack([row, row * everybody])

        def object_of(self, source: int, own: Any) -> Any:
            return own

        def use_nccl(self) -> None:
            self.nccl = True

    job.group = OfTwo()
    topology = SynchronousConfig(replicas=2, exchange=exchange)
    experiment = dataclasses.replace(preset("a2c-catch"), topology=topology)
    if exchange == "nccl" and not everybody:
        with pytest.raises(UserError, match=r"--topology.exchange nccl needs a GPU for each of 2 replicas"):
            job.choose_exchange(experiment)
        return
    job.choose_exchange(experiment)
    assert job.nccl == job.group.nccl == (everybody and exchange != "gloo")


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 1])
def test_a_process_that_is_frozen_is_missed(tmp_path, frozen):
    """As one of a host that vanished: its connections stay open."""
    launcher = torchrun(tmp_path, "--run.steps", "1000000000")
    metrics = tmp_path / "run/metrics.jsonl"
    processes: list[int] = []
    try:
        wait_until(lambda: metrics.exists() and len(records(tmp_path / "run")) > 3)
        processes = descendants(launcher.pid)
        os.kill(ranks(launcher.pid)[frozen], signal.SIGSTOP)
        said = f"rank {frozen} died"
        wait_until(lambda: said in (tmp_path / "output.txt").read_text())
        assert newest(tmp_path / "run").steps > 0
    finally:
        launcher.kill()
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_signal_within_a_long_iteration_ends_all_of_them(tmp_path):
    """Rank 0 hung, and the others replaced its checkpoint by one without scores."""
    launcher = torchrun(tmp_path, "--run.steps", "1000000000", "--sampler.horizon", "40000")
    try:
        wait_until(lambda: "in lock step over" in (tmp_path / "output.txt").read_text())
        time.sleep(1)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(timeout=60)
        said = (tmp_path / "output.txt").read_text()
        assert "stopped by SIGTERM" in said
        assert "hangs" not in said and "died" not in said
        assert newest(tmp_path / "run").state["time_s"] > 0
    finally:
        launcher.kill()


def test_a_run_without_a_name_is_refused(tmp_path):
    launcher = torchrun(tmp_path, "--run.name", "")
    assert launcher.wait(timeout=120) != 0
    assert "under torchrun give the run a name" in (tmp_path / "output.txt").read_text()

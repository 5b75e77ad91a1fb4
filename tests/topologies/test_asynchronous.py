"""asynchronous: with one replica it is serial; with many it learns, loses nothing when they die, and leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import numpy as np
import pytest
import torch

from phalanx.replica import team
from phalanx.runs.session import Session
from phalanx.runtime.child import Child
from phalanx.runtime.device import Compute
from phalanx.runtime.share import divide_cores
from phalanx.topologies import asynchronous
from whole_runs import descendants, newest, records, same

LEARNERS = {
    "a2c": ("a2c-catch",),
    "ppo": ("ppo-catch", "--sampler.environments", 8, "--sampler.horizon", 16),
    "dqn": ("dqn-catch", "--sampler.environments", 8, "--algorithm.learning-starts", 200),
    "c51": ("c51-catch", "--sampler.environments", 8, "--algorithm.learning-starts", 200),
    "rainbow": ("eps-rainbow-catch", "--sampler.environments", 8, "--algorithm.learning-starts", 200),
}
SMALL = ("--run.threads", 1, "--sampler.decorrelation", 10)


def replicas(count, *flags):
    return ("--topology", "asynchronous", "--topology.replicas", count, *flags)


@pytest.mark.parametrize("learner", LEARNERS)
def test_one_replica_is_serial(train, tmp_path, learner):
    """With the same games, actions, batches and updates, to the last bit."""
    flags = (*LEARNERS[learner], *SMALL)
    assert train(*flags, "--topology", "serial", name="serial", steps=2048) == 0
    assert train(*flags, *replicas(1), name="one", steps=2048) == 0
    ours, theirs = newest(tmp_path / "one"), newest(tmp_path / "serial")
    assert same(ours.weights, theirs.weights)
    assert ours.state["clocks"] == theirs.state["clocks"]
    assert ours.state["scores"] == theirs.state["scores"]


@pytest.mark.parametrize(
    ("learner", "flags", "steps"),
    [
        ("a2c", (), 30_000),
        ("ppo", (), 30_000),
        ("dqn", (), 16_000),
        ("c51", (), 16_000),
        ("rainbow", (), 16_000),
        ("ppo", ("--topology.local-steps", 3, "--topology.poll-every", 4), 30_000),
    ],
    ids=["a2c", "ppo", "dqn", "c51", "rainbow", "appo"],
)
def test_four_replicas_learn_catch(train, tmp_path, learner, flags, steps):
    ends = ("--run.log-every", 0.2, "--run.target-score", 0.4)
    assert train(*LEARNERS[learner], *SMALL, *replicas(4, *flags), *ends, steps=steps) == 0
    lines = records(tmp_path / "run")
    assert lines[-1]["score"] > 0.2  # random play has -0.6; who pushes when differs from run to run
    assert max(line.get("staleness_max", 0) for line in lines) > 0  # they did not take turns
    assert lines[-1]["version"] > 0


def test_versions_differ_within_a_rollout_that_is_polled(train, tmp_path):
    """Then the lag of a rollout's steps is not one number."""
    flags = replicas(2, "--topology.poll-every", 4)
    assert train(*LEARNERS["ppo"], *SMALL, *flags, "--run.log-every", 0.1, steps=20_000) == 0
    assert any(0 < line["lag_mean"] < line["lag_max"] for line in records(tmp_path / "run"))


def test_seconds_behind_locks_and_in_updates_are_those_of_all_replicas(train, tmp_path, monkeypatch):
    """Whoever reports last; records together hold the whole run, each its own part."""
    told, note = [], Session.note

    def listening(self, report):
        told.append(report.store_seconds)
        note(self, report)

    monkeypatch.setattr(Session, "note", listening)
    assert train(*LEARNERS["a2c"], *SMALL, *replicas(2), "--run.log-every", 0.1, steps=10_000) == 0
    lines = records(tmp_path / "run")
    for what in ("blocked", "updating"):
        recorded, whole = (
            sum(line.get(f"{what}_seconds", 0.0) for line in lines),
            sum(seconds[what] for seconds in told),
        )
        assert 0.9 * whole <= recorded <= 1.000001 * whole  # a report without a step may come after the last record
    assert sum(seconds["updating"] for seconds in told) > max(line.get("updating_seconds", 0.0) for line in lines)


class TestResume:
    def test_goes_on(self, train, resume, tmp_path):
        assert train(*LEARNERS["a2c"], *SMALL, *replicas(2), steps=4000) == 0
        before = newest(tmp_path / "run")
        assert len(before.state["replicas"]) == 2
        assert resume("--run.steps", 8000) == 0
        after = newest(tmp_path / "run")
        assert after.steps >= 8000 and after.state["clocks"]["updates"] > before.state["clocks"]["updates"]

    @pytest.mark.parametrize("rule", ["adam", pytest.param("rmsprop", marks=pytest.mark.slow)])
    def test_with_another_number_of_replicas_or_another_topology(self, train, resume, tmp_path, rule):
        assert train(*LEARNERS["a2c"], *SMALL, *replicas(2), "--optimizer.rule", rule, steps=4000) == 0
        steps = 4000
        for flags in (replicas(4), ("--topology", "serial"), replicas(2)):
            steps += 3000
            assert resume("--run.steps", steps, *flags) == 0
            assert newest(tmp_path / "run").steps >= steps


@pytest.fixture
def forks(monkeypatch):
    """Replicas that start at once."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    source = forked.Source("dying", "phalanx.topologies.asynchronous")
    yield source
    source.close()


class TestDeaths:
    @pytest.mark.slow
    def test_a_killed_replica_is_named_and_replaced(self, train, tmp_path, monkeypatch):
        """kill -9 of whole processes at random moments of one run: it goes on, and what it has learnt is finite."""
        chance, killed = np.random.default_rng(0), []
        reports = team.Team.reports

        def murderous(self, timeout):
            for report in reports(self, timeout):
                if len(killed) < 4 and chance.random() < 0.2:
                    victim = self.children[int(chance.integers(len(self.children)))]
                    if victim not in killed and victim.process.poll() is None:
                        victim.process.kill()
                        killed.append(victim)
                yield report

        monkeypatch.setattr(team.Team, "reports", murderous)
        flags = ("--sampler.environments", 8, "--sampler.horizon", 4, "--sampler.max-deaths-in-a-row", 100)
        assert train("a2c-catch", *flags, *SMALL, *replicas(4), "--run.seconds", 240, steps=30_000) == 0
        log = (tmp_path / "run/events.log").read_text()
        assert len(killed) == 4
        assert log.count("died: killed by SIGKILL") >= 2  # the last ones may not be noticed any more
        end = newest(tmp_path / "run")
        assert end.steps >= 30_000
        assert all(bool(torch.isfinite(value).all()) for value in end.weights.values())

    @pytest.mark.slow  # what takes long is that processes start; the next test forks them
    def test_replicas_that_die_with_a_lock_in_their_hand_tear_nothing(self, train, tmp_path, monkeypatch):
        """Each in the middle of a chunk, at a moment of its own; the others go on, and so do successors."""
        start = Child.start

        def doomed(self, target, *arguments, **options):
            start(self, "dying:serve" if "replica" in self.name else target, *arguments, **options)

        monkeypatch.setattr(Child, "start", doomed)
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        flags = ("--sampler.environments", 8, "--sampler.horizon", 4, "--sampler.max-deaths-in-a-row", 100)
        assert train("a2c-catch", *flags, *SMALL, *replicas(4), "--run.seconds", 120, steps=4_000) == 0
        assert (tmp_path / "run/events.log").read_text().count("died: killed by SIGKILL") >= 2
        end = newest(tmp_path / "run")
        assert end.steps >= 4_000
        assert all(bool(torch.isfinite(value).all()) for value in end.weights.values())
        assert all(bool(torch.isfinite(value).all()) for value in end.state["store"]["rule"].values())

    def test_thirty_deaths_at_random_moments_are_all_made_good(self, train, tmp_path, monkeypatch, forks):
        """kill -9 until thirty have died in one run, within locked sections, too; each is named and replaced."""
        chance, killed, named = np.random.default_rng(1), [], []
        reports, replace = team.Team.reports, team.Team._replace

        def doomed(self, target, order, output, descriptors):
            every_second = int(self.name.split()[1]) % 2
            forks.start(self, "dying:serve" if every_second else target, order, output, descriptors)

        def murderous(self, timeout):
            for report in reports(self, timeout):
                victim = self.children[int(chance.integers(len(self.children)))]
                if len(named) < 30 and chance.random() < 0.05 and victim not in killed:
                    victim.process.kill()
                    killed.append(victim)
                if len(named) >= 30:
                    os.kill(os.getpid(), signal.SIGTERM)  # thirty are enough
                yield report

        def naming(self, rank):
            named.append(rank)
            replace(self, rank)
            assert self.children[rank].process.poll() is None

        monkeypatch.setattr(Child, "start", doomed)
        monkeypatch.setattr(team.Team, "reports", murderous)
        monkeypatch.setattr(team.Team, "_replace", naming)
        flags = ("--sampler.environments", 8, "--sampler.horizon", 4, "--sampler.max-deaths-in-a-row", 100)
        assert (
            train("a2c-catch", *flags, *SMALL, *replicas(4), "--run.seconds", 280, steps=10**8) == 128 + signal.SIGTERM
        )
        assert len(named) >= 30 and set(named) == {0, 1, 2, 3} and len(killed) >= 5
        assert (tmp_path / "run/events.log").read_text().count("died: killed by SIGKILL") == len(named)
        end = newest(tmp_path / "run")
        assert all(bool(torch.isfinite(value).all()) for value in end.weights.values())
        assert all(bool(torch.isfinite(value).all()) for value in end.state["store"]["rule"].values())

    def test_too_many_end_the_run_with_a_checkpoint(self, train, tmp_path, monkeypatch, capsys):
        start = Child.start

        def stillborn(self, target, *arguments, **options):
            start(self, "phalanx.no_such:thing" if "replica" in self.name else target, *arguments, **options)

        monkeypatch.setattr(Child, "start", stillborn)
        assert train("a2c-catch", *replicas(2), "--sampler.max-deaths-in-a-row", 2) == 1
        assert "died 3 times in a row without a step" in capsys.readouterr().err
        assert newest(tmp_path / "run").steps == 0

    def test_what_is_not_finite_ends_the_run_in_one_sentence(self, train, capsys):
        assert train("a2c-catch", *replicas(2), "--optimizer.learning-rate", 1e38, steps=100_000) == 1
        error = capsys.readouterr().err
        assert "not finite" in error and "Traceback" not in error


PROGRAM = """
import sys
from phalanx.cli.main import main
sys.exit(main(["train", "a2c-catch", "--topology", "asynchronous", "--topology.replicas", "4", "--run.log-every", "0.2",
               "--run.steps", "100000000", "--run.directory", sys.argv[1], "--run.name", "run"]))
"""


@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL])
def test_the_end_of_the_parent_is_the_end_of_all(tmp_path, number):
    shared_before = set(os.listdir("/dev/shm"))
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.DEVNULL)
    metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") > 2):
        if time.monotonic() > deadline:
            parent.kill()
            pytest.fail("no record came")
        time.sleep(0.1)
    children = descendants(parent.pid)
    assert len(children) >= 4
    parent.send_signal(number)
    assert parent.wait(timeout=30) == (128 + number if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert set(os.listdir("/dev/shm")) <= shared_before
    if number == signal.SIGTERM:
        assert newest(tmp_path / "run").steps > 0


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--topology.replicas", 3), "16 environments do not divide among 3 replicas"),
        (
            ("--topology.local-steps", 2, "--optimizer.rule", "rmsprop"),
            "topology.local_steps 2 needs optimizer.rule adam",
        ),
        (("--sampler.overlap", True, "--algorithm.importance", True), "sampler.overlap is for one replica"),
    ],
)
def test_what_does_not_fit_is_refused(train, capsys, flags, sentence):
    assert train("a2c-catch", "--sampler.environments", 16, "--topology", "asynchronous", *flags) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (2, 4), (16, 4), (15, 4), (3, 2)])
def test_cores_are_divided(cores, count):
    parts = divide_cores(list(range(cores)), count)
    assert len(parts) == count and all(parts)
    assert {core for part in parts for core in part} == set(range(cores))
    assert count > cores or sum(map(len, parts)) == cores


@pytest.mark.parametrize(("gpus", "devices"), [(0, [None] * 3), (1, [None] * 3), (2, ["cuda:0", "cuda:1", "cuda:0"])])
def test_gpus_are_divided(monkeypatch, gpus, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    compute = Compute(torch.device("cuda" if gpus else "cpu"))
    assert [share.device for share in asynchronous.shares_of(compute, 3)] == devices

"""synchronous with several replicas: they learn what one learns, alike to the last bit, and survive each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_asynchronous import LEARNERS, SMALL

from phalanx.replica import team
from phalanx.replica.lockstep import LockstepTeam
from phalanx.runtime.child import Child
from whole_runs import descendants, newest, records, same


def replicas(count, *flags):
    return ("--topology", "synchronous", "--topology.replicas", count, *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ("a2c-catch", "--optimizer.clip-norm", 0.01, "--sampler.resets", "wait"),  # rows that do not count
        ("a2c-catch", "--algorithm.normalize-advantage", True, "--sampler.resets", "wait", "--sampler.horizon", 12),
        ("a2c-catch", "--algorithm.reduction", "sum", "--algorithm.loss-scale", 0.02, "--optimizer.rule", "adam"),
        (
            *("ppo-catch", "--algorithm.minibatches", 1, "--algorithm.epochs", 3, "--optimizer.clip-norm", 0.05),
            *("--optimizer.final-learning-rate", 1e-5, "--algorithm.final-clip", 0.01),
        ),
    ],
    ids=["a2c, clip and cuts", "a2c, normalised", "a2c, summed", "ppo, normalised, schedules"],
)
def test_two_replicas_learn_what_one_with_all_environments_learns(train, tmp_path, flags):
    """The clip, schedules, and statistics of the whole batch included; only the order of sums is another."""
    preset, *flags = flags
    size = ("--sampler.environments", 8, "--sampler.decorrelation", 10, "--run.threads", 1, *flags)
    steps = 8 * 50 * 12 if "--sampler.horizon" in flags else 8 * 50 * 4
    size += () if "--sampler.horizon" in flags else ("--sampler.horizon", 4)
    assert train(preset, *size, "--topology", "serial", name="one", steps=steps) == 0
    assert train(preset, *size, *replicas(2), name="two", steps=steps) == 0
    one, two = newest(tmp_path / "one"), newest(tmp_path / "two")
    assert one.state["clocks"] == two.state["clocks"]
    assert one.state["clocks"]["updates"] >= 50
    assert one.state["scores"]["count"] == two.state["scores"]["count"]
    for name, weights in one.weights.items():
        torch.testing.assert_close(two.weights[name], weights, rtol=0, atol=1e-5)


def test_four_replicas_with_normalised_advantages_and_a_clip_that_binds_every_update(train, tmp_path):
    """Each has two environments, so that neither the advantages nor the norm of its own part are those of the whole."""
    size = ("--sampler.environments", 8, "--sampler.decorrelation", 10, "--run.threads", 1, "--sampler.horizon", 4)
    flags = ("--algorithm.normalize-advantage", True, "--optimizer.clip-norm", 0.01, "--run.log-every", 1e-4)
    assert train("a2c-catch", *size, *flags, "--topology", "serial", name="one", steps=8 * 4 * 50) == 0
    assert train("a2c-catch", *size, *flags, *replicas(4), name="four", steps=8 * 4 * 50) == 0
    norms = [line["loss/gradient_norm"] for line in records(tmp_path / "one") if "loss/gradient_norm" in line]
    assert len(norms) >= 45 and min(norms) > 0.01
    one, four = newest(tmp_path / "one"), newest(tmp_path / "four")
    assert one.state["clocks"] == four.state["clocks"]
    assert one.state["clocks"]["updates"] == 50
    for name, weights in one.weights.items():
        torch.testing.assert_close(four.weights[name], weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize("learner", LEARNERS)
def test_two_replicas_learn_catch(train, tmp_path, learner):
    steps = 30_000 if learner in ("a2c", "ppo") else 16_000
    assert train(*LEARNERS[learner], *SMALL, *replicas(2), "--run.target-score", 0.4, steps=steps) == 0
    last = records(tmp_path / "run")[-1]
    assert last["score"] > 0.2  # random play has -0.6
    assert last["lag_max"] == 0 or learner == "ppo"  # epochs of one rollout
    assert last["updates"] == last["version"]


def test_replicas_are_the_same_to_the_last_bit(train, tmp_path, monkeypatch):
    seen = []
    ask = LockstepTeam._ask_all

    def keep(self, with_envs):
        answers = ask(self, with_envs)
        seen.append(answers)
        return answers

    monkeypatch.setattr(LockstepTeam, "_ask_all", keep)
    assert train("ppo-catch", *SMALL, *replicas(4), "--sampler.environments", 8, steps=8_000) == 0
    first, *others = seen[-1].values()
    assert len(others) == 3 and first.store["version"] > 50
    for other in others:
        assert same(other.weights, first.weights)
        assert same(other.store, first.store)
        assert not same(other.replica, first.replica)  # of other games


def test_replicas_that_differ_end_the_run(train, tmp_path, monkeypatch, capsys):
    start = Child.start

    def damaged(self, target, *arguments, **options):
        if self.name == "replica 1":
            target = "damaged:serve"
        start(self, target, *arguments, **options)

    monkeypatch.setattr(Child, "start", damaged)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert train("a2c-catch", *SMALL, *replicas(2), steps=100_000) == 1
    assert "the replicas differ after update" in capsys.readouterr().err


class TestResume:
    @pytest.mark.parametrize("learner", ["a2c", pytest.param("ppo", marks=pytest.mark.slow)])
    def test_with_as_many_replicas_is_bit_identical(self, train, resume, tmp_path, learner):
        flags = (*LEARNERS[learner], *SMALL, *replicas(2))
        assert train(*flags, name="whole", steps=6144) == 0
        assert train(*flags, steps=3072) == 0
        assert newest(tmp_path / "run").steps == 3072
        assert resume("--run.steps", 6144) == 0
        resumed, whole = newest(tmp_path / "run"), newest(tmp_path / "whole")
        assert same(resumed.weights, whole.weights)
        for part in (
            "clocks",
            "store",
            "replicas",
        ):  # which replica reports first differs, and so does the window of games
            assert same(resumed.state[part], whole.state[part]), part

    def test_with_another_number_of_replicas_or_another_topology_goes_on(self, train, resume, tmp_path):
        assert train(*LEARNERS["a2c"], *SMALL, *replicas(2), steps=3000) == 0
        for steps, flags in (
            (6000, replicas(4)),
            (9000, ("--topology", "asynchronous")),
            (12_000, ("--topology", "serial")),
            (15_000, replicas(2)),
        ):
            before = newest(tmp_path / "run").state["clocks"]
            assert resume("--run.steps", steps, *flags) == 0
            after = newest(tmp_path / "run").state["clocks"]
            assert after["steps"] >= steps
            assert after["version"] > before["version"]


class TestDeaths:
    @pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_the_others_go_on_from_where_they_were(self, train, tmp_path, monkeypatch, victim):
        """A dead replica is named, and nothing of what was learnt is lost with it; not even with the first one."""
        killed, reports, versions = [], team.Team.reports, []

        def murderous(self, timeout):
            for report in reports(self, timeout):
                versions.append(self.progress.version)
                if not killed and versions[-1] > 20:
                    killed.append(self.children[victim])
                    killed[0].process.kill()
                yield report

        monkeypatch.setattr(team.Team, "reports", murderous)
        assert train("a2c-catch", *SMALL, *replicas(3), "--sampler.environments", 12, steps=20_000) == 0
        log = (tmp_path / "run/events.log").read_text()
        assert f"replica {victim} (environments {4 * victim} to {4 * victim + 3}) died: killed by SIGKILL" in log
        assert "the replicas go on together" in log
        assert versions == sorted(versions)
        end = newest(tmp_path / "run")
        assert end.steps >= 20_000
        assert end.state["clocks"]["version"] == end.state["clocks"]["updates"] == end.state["store"]["version"]
        assert records(tmp_path / "run")[-1]["score"] > 0

    def test_many_deaths_at_any_moment(self, train, tmp_path, monkeypatch):
        """While groups are formed, too. Those that go on compare their parameters after every update."""
        chance, killed, reports = np.random.default_rng(0), [], team.Team.reports

        def murderous(self, timeout):
            if len(killed) < 8 and self.progress.steps > 0 and chance.random() < 0.2:
                child = self.children[int(chance.integers(len(self.children)))]
                child.process.kill()
                killed.append(child)
            yield from reports(self, timeout)

        start = Child.start

        def checked(self, target, *arguments, **options):
            start(self, "checked:serve" if "replica" in self.name else target, *arguments, **options)

        monkeypatch.setattr(Child, "start", checked)
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        monkeypatch.setattr(team.Team, "reports", murderous)
        flags = ("--sampler.environments", 4, "--sampler.horizon", 4, "--sampler.max-deaths-in-a-row", 100)
        assert train("a2c-catch", *SMALL, *flags, *replicas(2), "--run.seconds", 200, steps=8_000) == 0
        end = newest(tmp_path / "run")
        assert len(killed) >= 3 and end.steps >= 8_000
        named = (tmp_path / "run/events.log").read_text().count("died: killed by SIGKILL")
        assert len(killed) - 2 <= named <= len(killed)  # the last ones may not be noticed any more
        assert all(bool(torch.isfinite(value).all()) for value in end.weights.values())

    def test_too_many_end_the_run_with_a_checkpoint(self, train, tmp_path, monkeypatch, capsys):
        reports = team.Team.reports

        def murderous(self, timeout):
            for report in reports(self, timeout):
                if self.progress.version > 5:
                    self.children[1].process.kill()
                yield report

        monkeypatch.setattr(team.Team, "reports", murderous)
        assert train("a2c-catch", *SMALL, *replicas(2), "--sampler.max-deaths", 0, steps=10**6) == 1
        assert "more than 0 replicas died within an hour" in capsys.readouterr().err
        assert newest(tmp_path / "run").state["store"]["version"] > 5

    def test_what_is_not_finite_ends_the_run_with_the_last_good_parameters(self, train, tmp_path, capsys):
        assert train("a2c-catch", *replicas(2), "--optimizer.learning-rate", 1e38, steps=100_000) == 1
        error = capsys.readouterr().err
        assert "not finite" in error and "Traceback" not in error


PROGRAM = """
import sys
from phalanx.cli.main import main
sys.exit(main(["train", "a2c-catch", "--topology", "synchronous", "--topology.replicas", "2", "--run.log-every", "0.2",
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
    assert len(children) >= 2
    parent.send_signal(number)
    assert parent.wait(timeout=30) == (128 + number if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert set(os.listdir("/dev/shm")) <= shared_before
    if number == signal.SIGTERM:
        end = newest(tmp_path / "run")
        assert end.steps > 0
        assert all(replica["sampling"] is not None for replica in end.state["replicas"])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--topology.replicas", 3), "16 environments do not divide among 3 replicas"),
        (("--topology.replicas", 2, "--topology.exchange", "nccl"), "--topology.exchange nccl needs a GPU for each"),
        (("--topology.replicas", 2, "--sampler.overlap", True, "--algorithm.importance", True), "is for one replica"),
    ],
)
def test_what_does_not_fit_is_refused(train, capsys, flags, sentence):
    assert train("a2c-catch", "--sampler.environments", 16, "--topology", "synchronous", *flags) == 2
    assert sentence in capsys.readouterr().err


def test_a_batch_that_does_not_divide_is_refused(train, capsys):
    assert train("dqn-catch", "--algorithm.batch-size", 33, "--algorithm.intensity", 33, *replicas(2)) == 2
    assert "a batch of 33 does not divide among 2 replicas" in capsys.readouterr().err

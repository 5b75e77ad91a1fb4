"""A whole run of dba3c on a real Ray that learns Catch while everybody is killed in turn. The long form is
`benchmarks/chaos_dba3c.py`."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from rayrun import RayRun, kill, newest_weights, ray_directories

pytest.importorskip("ray")

FLAGS = ("--run.steps", "10000000", "--topology.evaluate-every", "100", "--run.checkpoint-every", "2")


def test_dba3c_learns_whoever_dies_and_leaves_nothing_when_it_is_killed(tmp_path):
    before = ray_directories()
    with RayRun(tmp_path, "dba3c-catch", *FLAGS) as run:
        run.wait_for_event("games have a mean of")
        assert run.processes("ray::RuntimeEnvAgent")  # whose environment names nobody any more
        first, second = run.nodes()
        (evaluator,) = set(run.processes("ray::Host")) - {first, second}
        kill(evaluator)
        run.wait_for_event("evaluator 2 died")
        for times, worker in enumerate((first, second), 1):  # one of them is the chief
            kill(worker)
            run.wait_for_event("1 worker is alive: a step takes the gradients of 1 from now on", times)
            run.wait_for_event("2 workers are alive: a step takes the gradients of 2 from now on", times)
        run.wait_for_event("was the chief; worker")
        run.kill_one("ray::Server")
        run.wait_for_event("came back with update")
        run.wait_for_updates()
        run.wait(lambda: run.score >= 0.8, "Catch was not learnt")
        run.driver.kill()
        run.driver.wait(60)
        run.nothing_is_left()
        updates = [record["updates"] for record in run.records()]
        assert updates == sorted(updates)
        for worse in ("died with its standby", "standby was out of reach"):  # the server came back with its copy
            assert worse not in run.events()
        assert all(torch.isfinite(value).all() for value in newest_weights(run).values())
    assert ray_directories() <= before


@pytest.mark.slow
def test_a_worker_that_hangs_does_not_hang_a_step_for_long(tmp_path):
    """It is stopped, not dead: it holds nobody up, and takes part again when it goes on."""
    with RayRun(tmp_path, "dba3c-catch", "--run.steps", "10000000", "--topology.evaluate-every", "0") as run:
        run.wait_for_updates()
        worker = run.nodes()[0]
        os.kill(worker, signal.SIGSTOP)
        run.wait_for_event("1 worker is alive: a step takes the gradients of 1 from now on")
        run.wait_for_updates(50)
        os.kill(worker, signal.SIGCONT)
        run.wait_for_event("2 workers are alive: a step takes the gradients of 2 from now on")
        run.wait_for_updates(50)
        assert "died" not in run.events()
        assert run.end(signal.SIGINT) == 128 + signal.SIGINT


@pytest.mark.slow
def test_a_run_with_too_few_workers_stops_if_that_was_chosen(tmp_path):
    flags = ("--run.steps", "10000000", "--topology.evaluate-every", "0", "--topology.too-few", "stop")
    with RayRun(tmp_path, "dba3c-catch", *flags) as run:
        run.wait_for_updates()
        kill(run.nodes()[0])
        assert run.driver.wait(60) == 1
        run.nothing_is_left()
        assert "1 worker is alive, but a step needs the gradients of 2" in run.events()
        assert all(torch.isfinite(value).all() for value in newest_weights(run).values())

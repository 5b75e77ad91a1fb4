"""Whole runs on a real Ray in which everybody is killed in turn. `benchmarks/chaos.py` is the long form."""

from __future__ import annotations

import re
import signal

import pytest
import torch

from rayrun import RayRun, kill, newest_weights, ray_directories

pytest.importorskip("ray")


GLOBAL = ("--topology.bundles", "0", "--topology.actors", "2", "--topology.replay-shards", "2")
EVERY = 20  # updates between two copies of a parameter server


def test_gorila_goes_on_whoever_dies(tmp_path):
    """Actors and the learner, a replay shard with a parameter server, the standby, and a server with the standby."""
    before = ray_directories()
    flags = ("--run.steps", "10000000", "--topology.snapshot-every", str(EVERY), *GLOBAL)
    with RayRun(tmp_path, "gorila-catch", *flags) as run:
        run.wait_for_updates()
        for process in run.processes("ray::Host"):  # two actors and a learner
            kill(process)
        run.wait_for_event("died:", 3)
        run.wait_for_updates()
        run.kill_one("ray::ReplayServer")
        run.kill_one("ray::Server")
        run.wait_for_event("died and came back empty")
        run.wait_for_event("came back with update")
        run.kill_one("ray::Standby")
        run.wait_for_event("the standby of the parameter servers died and came back")
        run.wait_for_updates(EVERY + 5)
        assert max(lost_updates(run)) <= EVERY
        for process in [*run.processes("ray::Standby"), run.processes("ray::Server")[0]]:
            kill(process)
        run.wait_for_event("came back with update", 2)
        run.wait_for_updates()
        assert run.end(signal.SIGINT) == 128 + signal.SIGINT
        updates = [record["updates"] for record in run.records()]
        assert updates == sorted(updates)
        assert all(torch.isfinite(value).all() for value in newest_weights(run).values())
        assert "(raylet)" not in (tmp_path / "output").read_text()
    assert ray_directories() <= before


def lost_updates(run):
    """As the run tells of them."""
    return [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) are lost", run.events())]

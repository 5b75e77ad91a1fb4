"""Whole runs on a real Ray in which everybody is killed in turn. `benchmarks/chaos.py` is the long form."""

from __future__ import annotations

import signal

import pytest
import torch

from rayrun import RayRun, newest_weights, ray_directories

pytest.importorskip("ray")


def test_gorila_goes_on_whoever_dies(tmp_path):
    before = ray_directories()
    with RayRun(tmp_path, "gorila-catch", "--run.steps", "10000000", "--topology.snapshot-every", "20") as run:
        run.wait_for_updates()
        run.kill_one("ray::Host")
        run.wait_for_event("died")
        run.kill_one("ray::Server")
        run.wait_for_event("came back with update")
        run.wait_for_updates()
        run.kill_one("ray::Standby")
        run.wait_for_event("the standby of the parameter servers died and came back")
        run.kill_one("ray::Server", 1)
        run.wait_for_event("came back with update", 2)
        run.wait_for_updates()
        assert run.end(signal.SIGINT) == 128 + signal.SIGINT
        updates = [record["updates"] for record in run.records()]
        assert updates == sorted(updates)
        assert "without any copy" not in run.events()
        assert all(torch.isfinite(value).all() for value in newest_weights(run).values())
        assert "(raylet)" not in (tmp_path / "output").read_text()
    assert ray_directories() <= before

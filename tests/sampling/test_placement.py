"""Who runs where: squads that divide, and workers that start before it is known whether torch has a GPU."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.cli.main import main
from phalanx.config import ToyConfig
from phalanx.config.presets import preset
from phalanx.registry import MakeEnv
from phalanx.sampling import placement
from phalanx.sampling.placement import place, prestart


@pytest.fixture
def placed(monkeypatch):
    """The placement of `pong-fast` with another sampler on so many cores."""

    def find(cores, device, **sampler):
        monkeypatch.setattr(placement, "usable_cores", lambda: cores)
        monkeypatch.setattr(placement, "core_list", lambda: list(range(cores)))
        base = preset("pong-fast")
        return place(dataclasses.replace(base, sampler=dataclasses.replace(base.sampler, **sampler)), device)

    return find


@pytest.mark.parametrize(
    ("workers", "environments", "asked", "squads"),
    [
        (16, 128, 4, 4),
        (16, 128, 0, 16),
        (16, 128, 5, 4),
        (15, 120, 4, 3),
        (15, 120, 5, 5),
        (15, 30, 0, 15),
        (1, 8, 4, 1),
    ],
)
def test_as_many_squads_as_divide(workers, environments, asked, squads):
    base = preset("pong-fast")
    sampler = dataclasses.replace(base.sampler, workers=workers, environments=environments, squads=asked, groups=2)
    assert place(dataclasses.replace(base, sampler=sampler), "cuda").squads == squads


def test_environments_must_divide_among_groups_and_squads():
    base = preset("pong-fast")
    sampler = dataclasses.replace(base.sampler, workers=4, environments=12, squads=4, groups=2)
    assert place(dataclasses.replace(base, sampler=sampler), "cuda").squads == 2


@pytest.mark.parametrize(
    ("cores", "environments", "device", "workers"),
    [
        (16, 60, "cuda", 15),  # one core is left to the owner,
        (16, 48, "cuda", 12),  # or some,
        (16, 512, "cuda", 16),  # but not half of them
        (16, 16, "cuda", 16),
        (4, 16, "cuda", 4),
        (16, 8, "cuda", 8),
        (2, 16, "cuda", 2),
        (16, 60, "cpu", 15),
        (16, 512, "cpu", 16),
    ],
)
def test_as_many_workers_as_cores_but_for_the_owners(cores, environments, device, workers, placed):
    found = placed(cores, device, environments=environments, squads=1, groups=1, workers_per_core=1)
    assert (found.workers, len(found.cores or [])) == (workers, workers)
    if device == "cuda" and workers < cores > 2:
        assert 0 not in (found.cores or [])


@pytest.mark.parametrize(
    ("workers", "device", "pin", "cores"),
    [
        (30, "cuda", True, list(range(1, 16))),  # they share what the owner leaves them
        (32, "cuda", True, list(range(1, 16))),
        (30, "cuda", False, None),
        (30, "cpu", True, None),  # nobody is kept off a core
    ],
)
def test_more_workers_than_cores_share_those_that_are_not_the_owners(workers, device, pin, cores, placed):
    found = placed(16, device, environments=480, workers=workers, pin=pin)
    assert found.cores == cores
    assert found.owner_core == (0 if cores else None)
    assert found.balance == 0  # the system does it
    assert ("sharing cores" in found.describe()) == (cores is not None)


@pytest.mark.parametrize(
    ("cores", "environments", "device", "workers", "shared"),
    [
        (16, 60, "cuda", 30, 15),  # the owner's core is left to it,
        (16, 64, "cuda", 32, 15),  # also where the workers are twice as many as all cores
        (16, 60, "cpu", 15, 15),  # on a CPU the owner needs every core itself
        (2, 60, "cuda", 4, 0),
    ],
)
def test_two_workers_for_each_core_beside_a_gpu(cores, environments, device, workers, shared, placed):
    found = placed(cores, device, environments=environments, squads=1, groups=1, workers_per_core=2)
    assert (found.workers, len(found.cores or [])) == (workers, shared)


def test_without_a_gpu_nothing_is_prestarted(monkeypatch):
    monkeypatch.setattr(placement, "GPU_CONTROL", placement.Path("/nowhere"))
    assert prestart(preset("pong-fast"), print) is None


def test_with_a_gpu_the_workers_are_prestarted_unless_the_run_is_for_the_cpu(monkeypatch):
    monkeypatch.setattr(placement, "GPU_CONTROL", placement.Path("/"))
    monkeypatch.setattr(placement, "start_workers", lambda experiment, device, report: device)
    base = preset("pong-fast")
    assert prestart(base, print) == "cuda"
    assert prestart(preset("ppo-catch"), print) is None  # serial
    on_cpu = dataclasses.replace(base, run=dataclasses.replace(base.run, device="cpu"))
    assert prestart(on_cpu, print) is None


class Prestarted:
    """Stands for workers that were started."""

    closed = 0
    spec = MakeEnv(ToyConfig("catch"), 0)(0).spec

    def close(self):
        self.closed += 1


CATCH = ["train", "ppo-catch", "--topology", "synchronous", "--run.device", "cpu"]


@pytest.mark.parametrize(("workers", "code"), [("1", 0), ("3", 2)])  # 8 environments do not divide among 3
def test_prestarted_workers_are_closed_when_torch_has_no_gpu_and_on_errors(workers, code, tmp_path, monkeypatch):
    workers_of_a_gpu = Prestarted()
    monkeypatch.setattr(placement, "prestart", lambda experiment, report: workers_of_a_gpu)
    flags = ["--run.steps", "500", "--run.directory", str(tmp_path), "--sampler.workers", workers]
    assert main([*CATCH, *flags]) == code
    assert workers_of_a_gpu.closed == 1

"""Choices and refusals that depend on the machine: the precision of a run, and memory that is not there."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest
import torch

from phalanx.cli.main import main
from phalanx.config import GymnasiumConfig, SynchronousConfig
from phalanx.config.presets import preset
from phalanx.errors import UserError
from phalanx.probe import check_room, parameter_count, resolve_precision, rollouts_bytes
from phalanx.registry import MakeEnv, make_network
from phalanx.replica.build import make_replica
from phalanx.runtime.device import Compute
from phalanx.topologies import serial
from whole_runs import ATARI

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """A CPU that has, or lacks, instructions for bfloat16, and no GPU."""

    def become(bfloat16: bool) -> None:
        monkeypatch.setattr("phalanx.probe.has_bfloat16", lambda: bfloat16)
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    return become


def chosen(name: str, **changes: Any) -> str:
    return resolve_precision(dataclasses.replace(preset(name), **changes)).run.precision


@pytest.mark.parametrize("growth", [0.5, 2.0])
def test_no_clock_changes_the_precision(machine, monkeypatch, growth):
    """One that runs ever slower made the second of two candidates seem faster, one that runs ever faster the first."""
    machine(bfloat16=True)
    ticks = (sum(growth**n for n in range(call)) for call in itertools.count())
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    assert chosen("a2c") == "bfloat16"


@pytest.mark.parametrize(
    ("bfloat16", "name", "precision"),
    [(True, "a2c", "bfloat16"), (False, "a2c", "float32"), (True, "a2c-pong", "float32"), (True, "a2c-gym", "float32")],
)
def test_auto_follows_from_cpu_topology_and_observations(machine, bfloat16, name, precision):
    """a2c-pong is serial."""
    machine(bfloat16)
    assert chosen(name) == precision


def test_vectors_are_float32_on_any_topology(machine):
    machine(bfloat16=True)
    assert chosen("a2c-gym", env=GymnasiumConfig(), topology=SynchronousConfig()) == "float32"


def test_a_precision_that_was_asked_for_stays(machine):
    machine(bfloat16=True)
    run = dataclasses.replace(preset("a2c").run, precision="float32")
    assert chosen("a2c", run=run) == "float32"


@pytest.mark.parametrize("bfloat16", [True, False])
def test_the_first_event_of_a_run_names_its_precision(machine, train, resume, tmp_path, capsys, bfloat16):
    machine(bfloat16)
    precision = "bfloat16" if bfloat16 else "float32"
    assert train("a2c", *ATARI, "--run.precision", "auto", "--run.seed", 7, steps=20) == 0
    expected = f"A2C on pong, cpu, {precision}, seed 7"
    assert expected in capsys.readouterr().out.splitlines()
    assert (tmp_path / "run/events.log").read_text().splitlines()[0].endswith(f" {expected}")
    assert json.loads((tmp_path / "run/config.json").read_text())["run"]["precision"] == precision
    machine(not bfloat16)  # a resumed run keeps it
    assert resume("--run.steps", 40) == 0
    assert expected in capsys.readouterr().out.splitlines()


def test_the_size_of_a_network_is_told_without_making_it():
    for name in ("ppo", "eps-rainbow", "c51-catch", "breakout-fast"):
        experiment = preset(name)
        spec = MakeEnv(experiment.env, 0)(0).spec
        real = sum(parameter.numel() for parameter in make_network(experiment, spec).parameters())
        assert parameter_count(experiment, spec) == real


@pytest.mark.parametrize("overlap", [False, True])
def test_the_size_of_rollouts_is_that_of_all_there_are(overlap):
    experiment = preset("ppo-catch")
    experiment = dataclasses.replace(experiment, sampler=dataclasses.replace(experiment.sampler, overlap=overlap))
    envs = serial.make_envs(experiment, Compute(CPU), pytest.fail)
    replica = make_replica(experiment, envs, Compute(CPU), pytest.fail)
    replica.iterate()  # what was collected and not learnt from yet takes no memory of its own
    rollouts = [buffer.rollout for buffer in replica.collector.buffers]
    assert len(rollouts) == 1 + overlap
    if overlap:
        assert any(replica.cycle.pending is rollout for rollout in rollouts)
    sizes = [tensor.nbytes for rollout in rollouts for tensor in rollout.tensors().values()]
    assert rollouts_bytes(experiment, envs.spec) == sum(sizes)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--sampler.environments", "1000000", "--sampler.horizon", "1000000"), "the rollouts need "),
        (("--model.hidden", "1000000"), "the network needs "),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_what_is_larger_than_memory_is_refused_before_anything_exists(
    capsys, tmp_path, monkeypatch, command, flags, words
):
    monkeypatch.chdir(tmp_path)
    assert main([command, "a2c-catch", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_rollouts_of_an_overlap_count_twice(monkeypatch):
    experiment = preset("ppo-catch")
    overlapped = dataclasses.replace(experiment, sampler=dataclasses.replace(experiment.sampler, overlap=True))
    spec = MakeEnv(experiment.env, 0)(0).spec
    one = rollouts_bytes(experiment, spec)
    monkeypatch.setattr("phalanx.probe.parameter_count", lambda *arguments: 0)
    monkeypatch.setattr("phalanx.probe.free_bytes", lambda device: 2 * one - 1)
    check_room(experiment, spec, CPU)
    with pytest.raises(UserError, match=r"the rollouts need .* lower sampler.environments or sampler.horizon"):
        check_room(overlapped, spec, CPU)
    monkeypatch.setattr("phalanx.probe.free_bytes", lambda device: 2 * one)
    check_room(overlapped, spec, CPU)


def test_on_a_gpu_only_its_own_memory_counts(monkeypatch):
    experiment = preset("ppo-catch")
    spec = MakeEnv(experiment.env, 0)(0).spec
    free = {"cpu": 0, "cuda": 10**9}
    monkeypatch.setattr("phalanx.probe.free_bytes", lambda device: free[device.type])
    check_room(experiment, spec, torch.device("cuda"))
    with pytest.raises(UserError, match=r"0.00 GB are free"):
        check_room(experiment, spec, CPU)
    free.update(cpu=10**9, cuda=10**5)
    monkeypatch.setattr("phalanx.probe.parameter_count", lambda *arguments: 0)
    large = dataclasses.replace(experiment, sampler=dataclasses.replace(experiment.sampler, horizon=10**5))
    with pytest.raises(UserError, match=r"the rollouts need .* GB of the GPU, but 0.00 GB are free"):
        check_room(large, spec, torch.device("cuda"))

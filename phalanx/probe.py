"""Choices and refusals that depend on the machine, made once before a run starts. What is chosen is written into its
configuration."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec
from pathlib import Path

import torch

from phalanx.config import DBA3CConfig, DQNConfig, Experiment, GorilaConfig, SynchronousConfig
from phalanx.config.checks import round_up
from phalanx.config.own import unread_fields
from phalanx.errors import require, tell
from phalanx.given import is_code
from phalanx.registry import MakeEnv, make_network, memory_of, topology
from phalanx.replay.memory import frames_on_host, gigabytes
from phalanx.replay.storage import free_bytes
from phalanx.runtime.device import choose_compute
from phalanx.sampling.answers import rollout_bytes
from phalanx.sampling.placement import place
from phalanx.types import EnvSpec

COPIES = 4  # of the parameters, at most: themselves, their gradient, and two vectors of the update rule


def resolve_precision(experiment: Experiment) -> Experiment:
    """Replace precision `auto`: bfloat16 on a GPU, and on a CPU that has the instructions if observations are images;
    float32 otherwise, and always in `serial`, the reference. Nothing is measured: the same command must choose the same
    on a machine that is busy."""
    if experiment.run.precision != "auto":
        return experiment
    device = choose_compute(experiment.run).device
    if topology(experiment).reference:
        chosen = "float32"
    elif device.type == "cuda":
        chosen = "bfloat16"
    else:
        chosen = "bfloat16" if has_bfloat16() and sees_images(experiment) else "float32"
    return dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, precision=chosen))  # type: ignore[arg-type]


def resolve_replicas(experiment: Experiment) -> Experiment:
    """Replace 0 replicas: as many as there are GPUs, or 2 on a CPU. Nobody chose that number for the environments, nor
    for a batch from replay: they are rounded up so that each replica has the same part, with as many updates of a
    rollout."""
    topology = experiment.topology
    if not isinstance(topology, SynchronousConfig) or topology.replicas:
        return experiment
    experiment = experiment.with_derived_values()  # the horizon that the preset's own environments would have
    sampler, algorithm = experiment.sampler, experiment.algorithm
    gpus = torch.cuda.device_count() if choose_compute(experiment.run).device.type == "cuda" else 0
    count = gpus or 2
    environments, rounded = round_up(sampler.environments, count * sampler.groups), []
    if environments != sampler.environments:
        rounded.append(f"{environments} environments instead of {sampler.environments}")
    sampler = dataclasses.replace(sampler, environments=environments)
    if isinstance(algorithm, DQNConfig) and not {"batch_size", "intensity"} & unread_fields(algorithm):
        batch = round_up(algorithm.batch_size, count)
        updates = algorithm.updates_per_rollout(experiment.sampler.rollout_steps)  # stay as many
        intensity = updates * batch / sampler.rollout_steps
        if batch != algorithm.batch_size:
            rounded.append(f"batches of {batch} instead of {algorithm.batch_size}")
        if round(intensity, 9) != algorithm.intensity:
            rounded.append(f"intensity {intensity:.4g} instead of {algorithm.intensity:g}")
            algorithm = dataclasses.replace(algorithm, intensity=intensity)
        algorithm = dataclasses.replace(algorithm, batch_size=batch)
    if rounded:
        tell(f"{', '.join(rounded)}, so that they divide among {count} replicas")
    topology = dataclasses.replace(topology, replicas=count)
    return dataclasses.replace(experiment, topology=topology, sampler=sampler, algorithm=algorithm).validate()


def sees_images(experiment: Experiment) -> bool:
    env = MakeEnv(experiment.env, experiment.run.seed)(0)
    try:
        return env.spec.is_image
    finally:
        env.close()


def has_bfloat16() -> bool:
    """Does the CPU multiply bfloat16 numbers itself?"""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def parameter_count(experiment: Experiment, spec: EnvSpec) -> int:
    """Numbers the network learns. It is made without memory for them, which finds any misfit and tells its size; with
    a torso of a user's own, which may not know how to be made so, with memory."""
    quick = dataclasses.replace(experiment.model, init="fan-in")  # to see that it fits, any numbers will do
    where = "cpu" if is_code(experiment.model.torso) else "meta"
    with torch.device(where), torch.random.fork_rng(devices=[]):
        model = make_network(dataclasses.replace(experiment, model=quick), spec)
    return sum(parameter.numel() for parameter in model.parameters())


def rollouts_bytes(experiment: Experiment, spec: EnvSpec) -> int:
    """Memory of all rollouts a run holds at once."""
    sampler = experiment.sampler
    one = sampler.environments * rollout_bytes(spec, 1, experiment.env.stack, sampler.horizon)
    return 2 * one if sampler.overlap else one  # the one that is learnt from, and the one that is collected


def check_room(experiment: Experiment, spec: EnvSpec, device: torch.device) -> None:
    """Refuse networks and rollouts larger than what is free where they are to live, before anything is allocated."""
    free, where = free_bytes(device), "" if device.type == "cpu" else " of the GPU"
    network = COPIES * 4 * parameter_count(experiment, spec)
    require(
        network <= free,
        f"the network needs {gigabytes(network)}{where} with its gradient and update rule, but {gigabytes(free)} are "
        "free; lower model.hidden or model.width",
    )
    rollouts = rollouts_bytes(experiment, spec)
    require(
        rollouts <= free,
        f"the rollouts need {gigabytes(rollouts)}{where}, but {gigabytes(free)} are free; lower "
        f"{'sampler.batch' if experiment.sampler.batch else 'sampler.environments or sampler.horizon'}",
    )


def check_loggers(experiment: Experiment) -> None:
    """Refuse a tracker whose package is not there, before anything is made for the run."""
    for name in experiment.run.loggers:
        found = find_spec(name) is not None
        require(found, f"run.loggers names {name}, which is not installed; run: pip install {name}")


def check_cluster(experiment: Experiment) -> None:
    """Refuse what runs on Ray where there is none, before anything is made for the run."""
    needs_it = isinstance(experiment.topology, GorilaConfig | DBA3CConfig)
    require(
        not needs_it or find_spec("ray") is not None,
        f"topology {experiment.topology.name} needs Ray, on one machine, too; install it with "
        "`pip install 'phalanx[cluster]'`",
    )


def check_pieces(experiment: Experiment, spec: EnvSpec | None = None) -> None:
    """Make one of each piece, so that an unknown game or a misfit fails before a run directory exists; no environment
    where workers have made some. Refuses what fits into no memory."""
    check_loggers(experiment)
    check_cluster(experiment)
    device = choose_compute(experiment.run).device
    place(experiment, device.type)
    if spec is None:
        env = MakeEnv(experiment.env, experiment.run.seed)(0)
        spec = env.spec
        env.close()
    check_room(experiment, spec, device)
    if (memory := memory_of(experiment)) is not None:
        frames_on_host(memory, spec, experiment.sampler.environments, device)

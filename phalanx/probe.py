"""Choices that depend on the machine, made once before a run starts and written into its configuration."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from phalanx.config import Experiment
from phalanx.registry import MakeEnv, make_network
from phalanx.runtime.device import Compute, choose_compute
from phalanx.types import EnvSpec, torch_dtype

BATCH = 64
WORTH_IT = 1.1  # bfloat16 must be so much faster to be chosen


def resolve_precision(experiment: Experiment) -> Experiment:
    """Replace precision `auto`: bfloat16 on a GPU; on a CPU that has the instructions, whatever a short probe finds
    faster; float32 otherwise, and always in `serial`, the reference."""
    if experiment.run.precision != "auto":
        return experiment
    device = choose_compute(experiment.run).device
    if experiment.topology.name == "serial":
        chosen = "float32"
    elif device.type == "cuda":
        chosen = "bfloat16"
    else:
        spec = MakeEnv(experiment.env, experiment.run.seed)(0).spec
        chosen = "bfloat16" if spec.is_image and has_bfloat16() and is_faster(experiment, spec) else "float32"
    return dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, precision=chosen))  # type: ignore[arg-type]


def default_preset() -> str:
    """The preset for this kind of machine."""
    return "pong-fast" if torch.cuda.is_available() else "pong"


def has_bfloat16() -> bool:
    """Does the CPU multiply bfloat16 numbers itself?"""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def is_faster(experiment: Experiment, spec: EnvSpec) -> bool:
    """Is a forward and backward pass clearly faster in bfloat16?"""
    with torch.random.fork_rng(devices=[]):
        model = make_network(experiment, spec)
    shape = (BATCH, experiment.env.stack, *spec.frame_shape)
    stacks = torch.zeros(shape, dtype=torch_dtype(spec.frame_dtype))
    history = torch.full((BATCH,), experiment.env.stack, dtype=torch.uint8)

    def seconds(compute: Compute) -> float:
        times = []
        for _ in range(6):
            started = time.perf_counter()
            with compute.autocast():
                outputs = model(stacks, history)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(output.sum() for output in outputs).backward()
            times.append(time.perf_counter() - started)
        return min(times)

    cpu = torch.device("cpu")
    return seconds(Compute(cpu)) > WORTH_IT * seconds(Compute(cpu, bfloat16=True))

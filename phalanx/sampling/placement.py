"""Which process runs where: workers, their environments and cores, from what the container may really use.

Nothing here needs torch: where a GPU is likely, `phalanx train` starts the workers before it loads torch, which takes
as long as their simulators do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.config import AtariConfig, Experiment, GA3CConfig
from phalanx.errors import UserError
from phalanx.registry import MakeEnv, topology
from phalanx.runtime.affinity import core_list, usable_cores
from phalanx.runtime.share import WHOLE, Share
from phalanx.sampling.processes import ProcessEnvs
from phalanx.sampling.slot import slot_rules

GPU_CONTROL = Path("/dev/nvidiactl")  # is there where a driver is
FEW = 0.75  # if reserving a core would leave more than a quarter of the cores without workers, none is reserved


@dataclass(frozen=True)
class Placement:
    """Worker processes of a run; `workers` 0 means that everything runs in the main process."""

    workers: int
    envs_per_worker: int
    cores: list[int] | None  # one for each worker, or fewer that all share; None: not pinned
    owner_threads: int
    squads: int = 1
    balance: float = 0.0  # seconds between two attempts to balance the workers
    owner_core: int | None = None  # that workers leave to the owner

    def describe(self) -> str:
        if not self.workers:
            return f"1 (everything in the main process), {self.owner_threads} torch threads"
        shared = self.cores is not None and len(self.cores) < self.workers
        pinned = f"{'sharing' if shared else 'pinned to'} cores {self.cores}" if self.cores else "not pinned"
        squads = f" in {self.squads} squads" if self.squads > 1 else ""
        alone = "" if self.owner_core is None else f" on core {self.owner_core}"
        return (
            f"1 owner of the model ({self.owner_threads} torch threads){alone} + {self.workers} env workers x "
            f"{self.envs_per_worker} environments{squads}, {pinned}"
        )


def place(experiment: Experiment, device: str, cores: Sequence[int] | None = None) -> Placement:
    """The placement an experiment asks for, or the best one for these cores (None: all that this process may use), with
    a network on `device` (its type).

    On a CPU, simulation and network take turns, so both may use every core. With a GPU the owner is busy while the
    workers simulate, so it keeps a core of its own where there are at least four, and where that leaves few others idle
    because the environments do not divide.
    """
    cores, count = (core_list(), usable_cores()) if cores is None else (list(cores), len(cores))
    environments = experiment.sampler.environments
    if isinstance(experiment.topology, GA3CConfig):  # threads side by side, with one torch thread each
        agents = experiment.topology.agents
        return Placement(agents, environments // agents, None, experiment.run.threads or 1)
    if not topology(experiment).worker_processes:
        return Placement(0, environments, None, experiment.run.threads or count)
    reserve = 1 if device == "cuda" and count >= 4 else 0
    each = experiment.sampler.workers_per_core if device == "cuda" else 1
    workers = experiment.sampler.workers or _largest_divisor(environments, each * (count - reserve))
    if not experiment.sampler.workers and workers < FEW * each * count:
        workers = _largest_divisor(environments, each * count)
    if environments % workers:
        raise UserError(
            f"{environments} environments do not divide among {workers} workers; use --sampler.workers "
            f"{_largest_divisor(environments, workers)} or --sampler.environments "
            f"{-(-environments // workers) * workers}"
        )
    free = cores[reserve if workers != count else 0 :] if count == len(cores) else []  # a quota is the scheduler's
    confined = len(free) >= workers or len(free) < len(cores)
    pinned = free[:workers] if experiment.sampler.pin and free and confined else None
    threads = experiment.run.threads or (1 if device == "cuda" else count)
    # Moving an environment is cheap where its state is: Gymnasium has none, it would have to be replayed. Where workers
    # share cores, the system balances them, and how long one was busy tells nothing about a core.
    movable = isinstance(experiment.env, AtariConfig) and 1 < workers <= count
    balance = experiment.sampler.balance if movable else 0.0
    squads = max(
        number
        for number in range(1, min(experiment.sampler.squads or workers, workers) + 1)
        if workers % number == 0 and environments % (number * experiment.sampler.groups) == 0
    )
    owner_core = cores[0] if reserve and pinned and cores[0] not in pinned else None
    return Placement(workers, environments // workers, pinned, threads, squads, balance, owner_core)


def start_workers(
    experiment: Experiment, device: str, report: Callable[[str], None], share: Share = WHOLE
) -> ProcessEnvs:
    """The environments of a replica in their worker processes."""
    placement, sampler = place(experiment, device), experiment.sampler
    return ProcessEnvs(
        MakeEnv(experiment.env, experiment.run.seed, sends_raw_screens(experiment, device)),
        placement.workers,
        placement.envs_per_worker,
        sampler.groups,
        slot_rules(experiment, share),
        squads=placement.squads,
        timeout=sampler.step_timeout,
        max_deaths=sampler.max_deaths,
        max_deaths_in_a_row=sampler.max_deaths_in_a_row,
        cores=placement.cores,
        owner_core=placement.owner_core,
        balance=placement.balance,
        report=report,
    )


def sends_raw_screens(experiment: Experiment, device: str) -> bool:
    """Do workers leave it to the device to make frames of the emulator's screens?"""
    env, wanted = experiment.env, experiment.sampler.raw_screens and topology(experiment).worker_processes
    return device == "cuda" and wanted and isinstance(env, AtariConfig) and env.color == "gray"


def prestart(experiment: Experiment, report: Callable[[str], None]) -> ProcessEnvs | None:
    """Workers for a GPU, if there seems to be one; whether torch can use it is seen later."""
    wanted = experiment.run.device == "auto" or experiment.run.device.startswith("cuda")
    if not wanted or not topology(experiment).prestarts or not GPU_CONTROL.exists():
        return None
    return start_workers(experiment, "cuda", report)


def _largest_divisor(value: int, limit: int) -> int:
    return max(d for d in range(1, max(1, min(value, limit)) + 1) if value % d == 0)

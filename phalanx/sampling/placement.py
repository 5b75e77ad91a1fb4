"""Which process runs where: workers, their environments and cores, from what the container may really use."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.config import AtariConfig, Experiment
from phalanx.errors import UserError
from phalanx.runtime.affinity import core_list, usable_cores
from phalanx.runtime.device import Compute


@dataclass(frozen=True)
class Placement:
    """Worker processes of a run; `workers` 0 means that everything runs in the main process."""

    workers: int
    envs_per_worker: int
    cores: list[int] | None  # one per worker; None: not pinned
    owner_threads: int
    squads: int = 1
    balance: float = 0.0  # seconds between two attempts to balance the workers

    def describe(self) -> str:
        if not self.workers:
            return f"1 (everything in the main process), {self.owner_threads} torch threads"
        pinned = f"pinned to cores {self.cores}" if self.cores else "not pinned"
        squads = f" in {self.squads} squads" if self.squads > 1 else ""
        return (
            f"1 owner of the model ({self.owner_threads} torch threads) + {self.workers} env workers x "
            f"{self.envs_per_worker} environments{squads}, {pinned}"
        )


def place(experiment: Experiment, compute: Compute) -> Placement:
    """The placement an experiment asks for, or the best one for this machine.

    On a CPU, simulation and network take turns, so both may use every core. With a GPU the owner is busy while the
    workers simulate, so it keeps a core of its own where there are at least four.
    """
    cores, count = core_list(), usable_cores()
    if experiment.topology.name == "serial":
        return Placement(0, experiment.sampler.environments, None, experiment.run.threads or count)
    environments = experiment.sampler.environments
    reserve = 1 if compute.device.type == "cuda" and count >= 4 else 0
    workers = experiment.sampler.workers or _largest_divisor(environments, count - reserve)
    if environments % workers:
        raise UserError(
            f"{environments} environments do not divide among {workers} workers; use --sampler.workers "
            f"{_largest_divisor(environments, workers)} or --sampler.environments "
            f"{-(-environments // workers) * workers}"
        )
    free = cores[reserve if workers < count else 0 :] if count == len(cores) else []  # a quota is the scheduler's
    pinned = free[:workers] if experiment.sampler.pin and len(free) >= workers else None
    threads = experiment.run.threads or (1 if compute.device.type == "cuda" else count)
    # moving an environment is cheap where its state is: Gymnasium has none, it would have to be replayed
    balance = experiment.sampler.balance if isinstance(experiment.env, AtariConfig) and workers > 1 else 0.0
    squads = max(
        number
        for number in range(1, min(experiment.sampler.squads or workers, workers) + 1)
        if workers % number == 0 and environments % (number * experiment.sampler.groups) == 0
    )
    return Placement(workers, environments // workers, pinned, threads, squads, balance)


def _largest_divisor(value: int, limit: int) -> int:
    return max(d for d in range(1, max(1, min(value, limit)) + 1) if value % d == 0)

"""The part of a run and of the machine that one replica has."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

from phalanx.config import DQNConfig, Experiment, SynchronousConfig
from phalanx.errors import require


@dataclass(frozen=True)
class Share:
    """Replica `rank` of `count`. The counts in a configuration are those of the whole run."""

    rank: int = 0
    count: int = 1
    cores: tuple[int, ...] | None = None  # where its processes may run; None: wherever this process may
    device: str | None = None  # that it computes on; None: what the experiment says

    def part(self, experiment: Experiment) -> Experiment:
        """The experiment as this replica runs it: with its part of the environments and of the replay memory, and of
        each batch where all replicas make an update together."""
        if self.device is not None:
            experiment = dataclasses.replace(experiment, run=dataclasses.replace(experiment.run, device=self.device))
        if self.count == 1:
            return experiment
        total, algorithm = experiment.sampler.environments, experiment.algorithm
        require(
            total % self.count == 0,
            f"{total} environments do not divide among {self.count} replicas; use --sampler.environments "
            f"{-(-total // self.count) * self.count}",
        )
        sampler = dataclasses.replace(experiment.sampler, environments=total // self.count)
        if isinstance(algorithm, DQNConfig):
            algorithm = dataclasses.replace(
                algorithm,
                replay_size=algorithm.replay_size // self.count,
                learning_starts=-(-algorithm.learning_starts // self.count),
            )
            if isinstance(experiment.topology, SynchronousConfig):
                algorithm = dataclasses.replace(algorithm, batch_size=algorithm.batch_size // self.count)
        return dataclasses.replace(experiment, sampler=sampler, algorithm=algorithm)

    def rows(self, environments: int) -> slice:
        """The numbers, in the whole run, of the `environments` that this replica has."""
        return slice(self.rank * environments, (self.rank + 1) * environments)


WHOLE = Share()
"""Of a run with one replica."""


def divide_cores(cores: list[int], count: int) -> list[tuple[int, ...]]:
    """So many parts of the cores, of about equal size; where there are fewer cores than parts, several share one."""
    if count >= len(cores):
        return [(cores[rank % len(cores)],) for rank in range(count)]
    cuts = [len(cores) * rank // count for rank in range(count + 1)]
    return [tuple(cores[start:stop]) for start, stop in itertools.pairwise(cuts)]

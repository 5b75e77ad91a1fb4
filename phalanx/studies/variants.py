"""Experiments that differ in the one thing a study varies, and the replica that a study looks into."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from phalanx.config import DQNConfig, Experiment, SerialConfig, SynchronousConfig
from phalanx.config.flags import parse_flags
from phalanx.config.presets import preset
from phalanx.errors import require
from phalanx.probe import check_pieces
from phalanx.registry import memory_of
from phalanx.replica.replica import Replica
from phalanx.runs.metrics import ScoreWindow

MOST_HORIZONS = 10_000  # multiples of a preset's horizon that are tried
SCALING = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""Exponents with which a learning rate follows the batch size."""


def alone(study: str, name: str, flags: list[str], steps: int) -> Experiment:
    """A preset with flags, for one replica that is looked into for so many steps: nothing overlaps, nothing is a graph,
    and numbers are float32 unless the flags say otherwise."""
    experiment = parse_flags(f"phalanx study {study}", preset(name), flags)
    run = dataclasses.replace(experiment.run, steps=steps, graphs=False)
    if run.precision == "auto":
        run = dataclasses.replace(run, precision="float32")
    topology = experiment.topology
    if not isinstance(topology, SerialConfig):
        topology = SynchronousConfig()
    sampler = dataclasses.replace(experiment.sampler, overlap=False)
    return dataclasses.replace(experiment, run=run, topology=topology, sampler=sampler).with_derived_values()


def positive(flag: str, values: tuple[int, ...]) -> None:
    """Refuse a flag that names no numbers, or some below 1."""
    require(bool(values) and min(values) > 0, f"--{flag} needs one or more numbers greater than 0")


def checked(experiment: Experiment) -> Experiment:
    """The experiment, if it can be run."""
    experiment = experiment.validate()
    check_pieces(experiment)
    return experiment


def replay_of(experiment: Experiment, study: str) -> DQNConfig:
    """The configuration of the memory that a study needs."""
    memory = memory_of(experiment)
    require(memory is not None, f"the study `{study}` is of learning from a replay memory; use a preset such as dqn")
    assert memory is not None
    return memory


def with_batch_size(experiment: Experiment, batch: int, exponent: float, also: int | None = None) -> Experiment:
    """The same with batches of another size at the same intensity, and a learning rate that follows the batch size to
    the power of `exponent`. The horizon grows until an iteration has whole updates, also with batches of size
    `also`."""
    algorithm, optimizer, sampler = memory_of(experiment), experiment.optimizer, experiment.sampler
    assert algorithm is not None
    rate = optimizer.learning_rate * (batch / algorithm.batch_size) ** exponent
    sizes = [dataclasses.replace(algorithm, batch_size=size) for size in {batch, also or batch}]
    for horizon in (sampler.horizon * factor for factor in range(1, MOST_HORIZONS)):
        updates = [one.updates_per_rollout(sampler.environments * horizon) for one in sizes]
        if all(number >= 1 and number == int(number) for number in updates):
            break
    return dataclasses.replace(
        experiment,
        algorithm=dataclasses.replace(algorithm, batch_size=batch),
        optimizer=dataclasses.replace(optimizer, learning_rate=rate),
        sampler=dataclasses.replace(sampler, horizon=horizon),
    )


def intervals(
    replica: Replica, steps: int, points: int, after_each: Callable[[], None] = lambda: None
) -> Iterator[float | None]:
    """Train for so many steps, in `points` parts of about equal length; the score after each of them. `after_each` is
    called after each iteration."""
    scores = ScoreWindow(100)
    for number in count(1):
        while replica.progress.steps < steps * number / points:
            for score in replica.iterate(run_ahead=False).scores:
                scores.add(score)
            after_each()
        yield scores.mean
        if replica.progress.steps >= steps:
            return


def layers(names: dict[str, slice]) -> dict[str, slice]:
    """From the places of a model's tensors in the flat vector to those of its layers, and `all`."""
    found: dict[str, slice] = {}
    for name, part in names.items():
        layer = name.rpartition(".")[0] or name
        last = found.get(layer, part)
        found[layer] = slice(min(last.start, part.start), max(last.stop, part.stop))
    return {**found, "all": slice(0, max(part.stop for part in names.values()))}


def largest(parts: dict[str, slice]) -> str:
    """The layer with most parameters."""
    return max((name for name in parts if name != "all"), key=lambda name: parts[name].stop - parts[name].start)


def question(options: Any, experiment: Experiment) -> dict[str, Any]:
    """What a study writes down of what it was asked."""
    return {"options": dataclasses.asdict(options), "experiment": dataclasses.asdict(experiment)}

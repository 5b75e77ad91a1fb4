"""`phalanx study norms`: how long are parameters, gradients and steps? (Stooke & Abbeel, section 5.5 and appendix D)

A network learns from a replay memory with Adam and with RMSProp, at several batch sizes and one intensity, so that
larger batches mean fewer updates. The norms of each layer tell how an update rule makes up for that.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from phalanx.bench.machine import running_replica
from phalanx.config import Experiment
from phalanx.config.bounds import number
from phalanx.figure import Line, Panel
from phalanx.parameters.flat import FlatParameters
from phalanx.parameters.local import LocalStore
from phalanx.replica.build import local_store
from phalanx.replica.replica import Replica
from phalanx.studies import Options
from phalanx.studies.book import Book, Row, mean
from phalanx.studies.variants import (
    SCALING,
    alone,
    checked,
    intervals,
    largest,
    layers,
    positive,
    question,
    replay_of,
    with_batch_size,
)
from phalanx.types import Gradient

Scaling = Literal["none", "sqrt", "linear"]
QUANTITIES = {
    "parameters": "norm of the parameters",
    "gradient": "mean norm of gradients",
    "step": "mean norm of steps",
}


@dataclass(frozen=True)
class StudyOptions(Options):
    """Norms of parameters, gradients and steps for Adam and RMSProp against batch size; further flags are those of the
    preset."""

    preset: str = "dqn-fast"
    """A preset that learns from a replay memory."""
    batch_sizes: tuple[int, ...] = (32, 128, 512)
    """Batch sizes, each trained from the start with either rule."""
    steps: int = number(20_000, least=1, most=10**12)
    """Agent steps of each training."""
    points: int = number(10, least=1, most=10_000)
    """Parts of a training that are averaged over and become rows of the data."""
    adam_rate: float = number(1e-4, above=0, most=1e38)
    """Learning rate of Adam at the first batch size."""
    adam_scaling: Scaling = "none"
    """How it follows the batch size; the paper keeps it."""
    rmsprop_rate: float = number(1e-4, above=0, most=1e38)
    """Learning rate of RMSProp at the first batch size."""
    rmsprop_scaling: Scaling = "linear"
    """How it follows the batch size; in the paper it grows 20-fold with batches 16 times as large."""


class WeighedStore(LocalStore):
    """A store that notes the norms of each layer's gradients, before the clip, and of its steps."""

    capturable = False

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store.parameters, store.rule, store.clip)
        self.layers = layers(store.parameters.slices)
        self.gradients: dict[str, list[float]] = defaultdict(list)
        self.steps: dict[str, list[float]] = defaultdict(list)

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        before = self.parameters.flat.clone()
        self._note(self.gradients, gradient.flat)
        version = super().push(gradient, learning_rate)
        self._note(self.steps, before.sub_(self.parameters.flat))
        return version

    def take(self) -> list[Row]:
        """A row for each layer: its parameters now, and means since the last call."""
        rows = [
            {
                "layer": layer,
                "parameters": float(self.parameters.flat[part].norm()),
                "gradient": mean(self.gradients[layer]),
                "step": mean(self.steps[layer]),
            }
            for layer, part in self.layers.items()
        ]
        self.gradients.clear()
        self.steps.clear()
        return rows

    def _note(self, norms: dict[str, list[float]], flat: Tensor) -> None:
        for layer, part in self.layers.items():
            norms[layer].append(float(flat[part].norm()))


def weighed_store(experiment: Experiment, parameters: FlatParameters) -> WeighedStore:
    return WeighedStore(local_store(experiment, parameters))


def run(options: StudyOptions, flags: list[str], book: Book) -> None:
    base = alone("norms", options.preset, flags, options.steps)
    replay_of(base, "norms")
    positive("batch-sizes", options.batch_sizes)
    variants = [
        checked(variant(base, rule, batch, options)) for rule in ("adam", "rmsprop") for batch in options.batch_sizes
    ]
    book.asked(question(options, base))
    rows: list[Row] = []
    title = f"Norms by update rule and batch size, {base.preset} on {base.env.name}"
    for experiment in variants:
        new, shown = measure(experiment, options)
        rows += new
        book.data("norms", rows)
        book.figure("norms", title, against_batch_size(rows, shown), columns=3)
        book.figure("course", title, in_the_course(rows, shown), columns=3)
        last = rows[-1]
        words = ", ".join(f"{name} {last[name]:.4g}" for name in QUANTITIES)
        book.say(f"{last['rule']}, batches of {last['batch_size']}: {words} after {last['updates']:,} updates")


def variant(base: Experiment, rule: str, batch: int, options: StudyOptions) -> Experiment:
    """With one of the paper's rules: Adam with an epsilon of 0.01 / L at batch size L, RMSProp with it inside the
    root."""
    adam = rule == "adam"
    if adam:
        changes: dict[str, Any] = {"rule": "adam-tf", "epsilon": 0.01 / batch}
    else:
        changes = {"rule": "rmsprop-inside", "decay": 0.95, "epsilon": 1e-6}
    rate, scaling = (
        (options.adam_rate, options.adam_scaling) if adam else (options.rmsprop_rate, options.rmsprop_scaling)
    )
    rate *= (batch / options.batch_sizes[0]) ** SCALING[scaling]
    optimizer = dataclasses.replace(base.optimizer, **changes)
    experiment = with_batch_size(dataclasses.replace(base, optimizer=optimizer), batch, exponent=0.0)
    optimizer = dataclasses.replace(experiment.optimizer, learning_rate=rate)
    return dataclasses.replace(experiment, optimizer=optimizer)


def measure(experiment: Experiment, options: StudyOptions) -> tuple[list[Row], list[str]]:
    """Train, and weigh every update; also the layers that figures show: the first, the largest, and all."""
    rows: list[Row] = []
    memory = replay_of(experiment, "norms")
    with running_replica(experiment, weighed_store) as replica:
        assert isinstance(replica, Replica) and isinstance(replica.store, WeighedStore)
        known = replica.store.layers
        for score in intervals(replica, options.steps, options.points):
            about = {
                "rule": experiment.optimizer.rule.partition("-")[0],
                "batch_size": memory.batch_size,
                "learning_rate": experiment.optimizer.learning_rate,
                "steps": replica.progress.steps,
                "updates": replica.progress.updates,
                "score": score,
            }
            rows += [{**about, **row} for row in replica.store.take()]
    return rows, list(dict.fromkeys([next(iter(known)), largest(known), "all"]))


def against_batch_size(rows: list[Row], shown: list[str]) -> list[Panel]:
    """The parameters at the end; gradients and steps in the second half of each training."""

    def at(rule: str, batch: int, layer: str, quantity: str) -> float:
        own = [row for row in rows if (row["rule"], row["batch_size"], row["layer"]) == (rule, batch, layer)]
        if quantity == "parameters":
            return own[-1][quantity]
        half = own[-1]["steps"] / 2
        return mean([row[quantity] for row in own if row["steps"] > half and not math.isnan(row[quantity])])

    found = dict.fromkeys((row["rule"], row["batch_size"]) for row in rows)
    rules = dict.fromkeys(rule for rule, _ in found)
    return [
        Panel(
            layer,
            "batch size",
            words,
            [
                Line(rule, [(batch, at(rule, batch, layer, quantity)) for other, batch in found if other == rule])
                for rule in rules
            ],
            x_log=True,
            y_log=quantity != "parameters",
        )
        for layer in shown
        for quantity, words in QUANTITIES.items()
    ]


def in_the_course(rows: list[Row], shown: list[str]) -> list[Panel]:
    """The same over the steps of each training, and the scores."""
    found = dict.fromkeys((row["rule"], row["batch_size"]) for row in rows)

    def lines(layer: str, quantity: str) -> list[Line]:
        return [
            Line(
                f"{rule} {batch}",
                [
                    (row["steps"], math.nan if row[quantity] is None else row[quantity])
                    for row in rows
                    if (row["rule"], row["batch_size"], row["layer"]) == (rule, batch, layer)
                ],
            )
            for rule, batch in found
        ]

    panels = [
        Panel(layer, "steps", words, lines(layer, quantity), y_log=quantity != "parameters")
        for layer in shown
        for quantity, words in QUANTITIES.items()
    ]
    return [*panels, Panel("Score", "steps", "mean of the last 100 games", lines("all", "score"))]

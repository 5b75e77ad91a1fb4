"""`phalanx study gradients`: does a larger batch still say more? (Stooke & Abbeel, section 5.5, gradient saturation)

    rollout -> batch -> gradient of each half -> cosines -> the update, as ever

While batches are small their gradients are mostly noise: those of two halves are orthogonal, and the cosine of a half's
with the whole one's is 1/sqrt 2. It rises once a batch holds more than the noise: then the gradient is saturated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.bench.machine import running_replica
from phalanx.config import A2CConfig, Experiment
from phalanx.config.bounds import number
from phalanx.errors import require
from phalanx.figure import Line, Panel
from phalanx.learning.learner import Learner
from phalanx.replica.replica import Replica
from phalanx.studies import Options
from phalanx.studies.book import Book, Row, mean
from phalanx.studies.variants import alone, checked, intervals, positive, question
from phalanx.types import PolicyBatch

ORTHOGONAL = 1 / math.sqrt(2)
"""Cosine of a vector with the sum of it and another one, as long and orthogonal to it."""

MEASURES = {
    "cosine": "half and whole",
    "cosine_together": "half and whole, all updates as one vector",
    "cosine_between_halves": "half and other half",
}


@dataclass(frozen=True)
class StudyOptions(Options):
    """Cosine of half-batch and full-batch gradients against batch size; further flags are those of the preset."""

    preset: str = "a2c-pong"
    """An A2C preset."""
    environments: tuple[int, ...] = (4, 8, 16, 32, 64)
    """Numbers of environments, each trained from the start; a batch is a rollout of them all. Even ones."""
    steps: int = number(30_000, least=1, most=10**12)
    """Agent steps of each training."""
    points: int = number(10, least=1, most=10_000)
    """Parts of a training that are averaged over and become a row of the data."""


class Cosines:
    """Of the gradients of one part of a training."""

    def __init__(self) -> None:
        self.with_whole: list[float] = []
        self.between_halves: list[float] = []
        self.squares = self.squares_of_halves = 0.0  # sums over all updates

    def add(self, first: Tensor, second: Tensor) -> None:
        """The gradients of two halves, whose sum is that of the whole; either half is compared with it."""
        whole = first + second
        self.with_whole.append((cosine(first, whole) + cosine(second, whole)) / 2)
        self.between_halves.append(cosine(first, second))
        self.squares += float(whole.square().sum())
        self.squares_of_halves += float(first.square().sum() + second.square().sum())

    @property
    def together(self) -> float:
        """The cosine of half and whole if the gradients of all updates are taken for one long vector. It is 1/sqrt 2
        for orthogonal halves even where one half of an update is much longer than the other, as after a rare reward:
        the mean of single cosines is less then."""
        return math.sqrt(self.squares / (2 * self.squares_of_halves)) if self.squares_of_halves else math.nan


class LookedInto:
    """An algorithm whose batches are looked at before they are learnt from."""

    def __init__(self, algorithm: Any, look: Callable[[Any], None]) -> None:
        self.algorithm = algorithm
        self.look = look

    def __getattr__(self, name: str) -> Any:
        return getattr(self.algorithm, name)

    def batches(self, *arguments: Any) -> Iterator[Any]:
        for batch in self.algorithm.batches(*arguments):
            self.look(batch)
            yield batch


def run(options: StudyOptions, flags: list[str], book: Book) -> None:
    base = alone("gradients", options.preset, flags, options.steps)
    require(isinstance(base.algorithm, A2CConfig), "the study `gradients` is of A2C; choose a preset such as a2c")
    positive("environments", options.environments)
    for count in options.environments:
        require(count % 2 == 0, f"--environments {count} cannot be halved; use even numbers")
    variants = [checked(with_environments(base, count)) for count in options.environments]
    book.asked(question(options, base))
    rows: list[Row] = []
    for experiment in variants:
        rows += measure(experiment, options)
        book.data("gradients", rows)
        book.figure(
            "gradients", f"Gradients of half a batch and the whole, {base.preset} on {base.env.name}", draw(rows)
        )
        last = summary(rows)[-1]
        words = ", ".join(f"{MEASURES[name]} {last[name]:.3f}" for name in MEASURES)
        book.say(f"{last['environments']} environments: cosines: {words}")


def with_environments(experiment: Experiment, count: int) -> Experiment:
    return dataclasses.replace(experiment, sampler=dataclasses.replace(experiment.sampler, environments=count))


def measure(experiment: Experiment, options: StudyOptions) -> list[Row]:
    """Train, and look at every batch."""
    rows: list[Row] = []
    environments = experiment.sampler.environments
    with running_replica(experiment) as replica:
        assert isinstance(replica, Replica)
        learner, found = replica.learner, [Cosines()]

        def look(batch: PolicyBatch) -> None:
            found[-1].add(*(gradient_of(learner, half) for half in halves(batch, environments)))

        learner.algorithm = LookedInto(learner.algorithm, look)
        for score in intervals(replica, options.steps, options.points):
            cosines = found[-1]
            found.append(Cosines())
            rows.append(
                {
                    "environments": environments,
                    "batch": experiment.sampler.rollout_steps,
                    "steps": replica.progress.steps,
                    "updates": replica.progress.updates,
                    "cosine": mean(cosines.with_whole),
                    "cosine_together": cosines.together,
                    "cosine_between_halves": mean(cosines.between_halves),
                    "count": len(cosines.with_whole),
                    "score": score,
                }
            )
    return rows


def halves(batch: PolicyBatch, environments: int) -> tuple[PolicyBatch, PolicyBatch]:
    """The rows of half the environments, and of the other half: steps of one environment resemble each other."""
    first = torch.arange(len(batch.weight), device=batch.weight.device) % environments < environments // 2
    return batch[first], batch[~first]


def gradient_of(learner: Learner, rows: PolicyBatch) -> Tensor:
    """What these rows contribute to the gradient of their batch."""
    return learner.gradient(rows, {})[1].flat.clone()


def cosine(one: Tensor, other: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(one, other, dim=0))


def summary(rows: list[Row]) -> list[Row]:
    """For each number of environments the mean cosines of the whole training."""
    return [
        {"environments": count, **{name: average(rows, count, name) for name in MEASURES}}
        for count in dict.fromkeys(row["environments"] for row in rows)
    ]


def average(rows: list[Row], environments: int, name: str) -> float:
    """Over all updates with so many environments."""
    own = [row for row in rows if row["environments"] == environments and row["count"]]
    return sum(row[name] * row["count"] for row in own) / sum(row["count"] for row in own)


def draw(rows: list[Row]) -> list[Panel]:
    totals = summary(rows)
    counts = [row["environments"] for row in totals]
    ends = [min(counts), max(counts)]
    steps = [0, max(row["steps"] for row in rows)]
    expected = "orthogonal halves: 1/sqrt 2"

    def courses(name: str) -> list[Line]:
        return [
            Line(
                f"{count} environments",
                [
                    (row["steps"], math.nan if row[name] is None else row[name])
                    for row in rows
                    if row["environments"] == count
                ],
            )
            for count in counts
        ]

    return [
        Panel(
            "By batch size",
            "environments",
            "mean cosine",
            [
                *(
                    Line(words, [(row["environments"], row[name]) for row in totals])
                    for name, words in MEASURES.items()
                ),
                Line(expected, [(end, ORTHOGONAL) for end in ends], dashed=True),
            ],
            x_log=True,
        ),
        Panel(
            "Half and whole, in the course of training",
            "steps",
            "mean cosine",
            [
                *courses("cosine"),
                Line(expected, [(step, ORTHOGONAL) for step in steps], dashed=True),
            ],
        ),
        Panel("Score", "steps", "mean of the last 100 games", courses("score")),
    ]

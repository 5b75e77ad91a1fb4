"""`phalanx study lag`: how old is what asynchronous learners learn from, and what they add to?

Runs of `asynchronous` with more and more learners, each with as many environments. Policy lag is the number of versions
between the parameters that chose an action and those that learning from it begins with; staleness the number of pushes
of others between a learner's look at a chunk and its own push to it. Where all learners are equally fast, each of the
others pushes about once meanwhile: N learners have a staleness of about N - 1.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from phalanx.config import AsynchronousConfig, Experiment
from phalanx.config.bounds import number
from phalanx.config.flags import parse_flags
from phalanx.config.presets import preset
from phalanx.errors import RunError, require, tell
from phalanx.figure import Line, Panel
from phalanx.probe import resolve_precision
from phalanx.registry import find, topology
from phalanx.replica.report import Report, summed
from phalanx.runs.directory import locked, new_directory, run_checkpoints
from phalanx.runs.session import Session
from phalanx.studies import Options
from phalanx.studies.book import Book, Row
from phalanx.studies.variants import checked, positive, question


@dataclass(frozen=True)
class StudyOptions(Options):
    """Policy lag and staleness against the number of asynchronous learners; further flags are those of the preset."""

    preset: str = "a2c-pong"
    """Any preset; the topology becomes asynchronous."""
    learners: tuple[int, ...] = (1, 2, 4, 8)
    """Numbers of learners, a run each."""
    environments: int = number(8, least=1, most=1_000_000)
    """Environments of each learner."""
    steps: int = number(20_000, least=1, most=10**12)
    """Agent steps of each run."""


class Listener(Session):
    """A session that keeps every lag and staleness, which its records only summarise."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.all_lags: Counter[int] = Counter()
        self.all_staleness: Counter[int] = Counter()
        self.all_seconds: dict[str, float] = {}

    def note(self, report: Report) -> None:
        self.all_lags += report.lags
        self.all_staleness += report.staleness
        self.all_seconds = summed(self.all_seconds, report.store_seconds)
        super().note(report)


def run(options: StudyOptions, flags: list[str], book: Book) -> None:
    base = preset(options.preset)
    if not isinstance(base.topology, AsynchronousConfig):
        base = dataclasses.replace(base, topology=AsynchronousConfig())
    base = parse_flags("phalanx study lag", base, flags).with_derived_values()
    require(isinstance(base.topology, AsynchronousConfig), "the study `lag` is of the topology asynchronous")
    positive("learners", options.learners)
    variants = [checked(variant(base, count, options, book)) for count in options.learners]
    book.asked(question(options, base))
    rows: list[Row] = []
    histogram: list[Row] = []
    for count, experiment in zip(options.learners, variants, strict=True):
        session = train(experiment)
        rows.append(summary(count, session))
        for quantity, counter in (("lag", session.all_lags), ("staleness", session.all_staleness)):
            histogram += [
                {"learners": count, "quantity": quantity, "versions": versions, "times": times}
                for versions, times in sorted(counter.items())
            ]
        book.data("lag", rows)
        book.data("histograms", histogram)
        book.figure("lag", f"Lag and staleness, {base.preset} on {base.env.name}", draw(rows, histogram))
        last = rows[-1]
        book.say(
            f"{count} learners: lag {last['lag_mean']:.2f} (at most {last['lag_max']}), staleness "
            f"{last['staleness_mean']:.2f} (at most {last['staleness_max']})"
        )


def variant(base: Experiment, learners: int, options: StudyOptions, book: Book) -> Experiment:
    """With so many learners, and a run directory within the book."""
    assert isinstance(base.topology, AsynchronousConfig)
    sampler = dataclasses.replace(base.sampler, environments=learners * options.environments, overlap=False)
    place, name = str(book.directory / "runs"), f"learners-{learners}"
    return dataclasses.replace(
        base,
        sampler=sampler,
        topology=dataclasses.replace(base.topology, replicas=learners),
        run=dataclasses.replace(base.run, directory=place, name=name, steps=options.steps, target_score=None),
    )


def train(experiment: Experiment) -> Listener:
    """A whole run, with a directory, records and checkpoints."""
    experiment = resolve_precision(experiment)
    directory = new_directory(experiment)
    with locked(directory):
        session = Listener(experiment, directory, run_checkpoints(experiment, directory, tell))
        if session.run(find(topology(experiment).run)):
            raise RunError(f"the study was stopped in {directory}")
    return session


def summary(learners: int, session: Listener) -> Row:
    seconds = session.all_seconds
    return {
        "learners": learners,
        "steps": session.progress.steps,
        "updates": session.progress.updates,
        "lag_mean": mean_of(session.all_lags),
        "lag_max": max(session.all_lags, default=0),
        "staleness_mean": mean_of(session.all_staleness),
        "staleness_max": max(session.all_staleness, default=0),
        "blocked_seconds": seconds.get("blocked", 0.0),
        "updating_seconds": seconds.get("updating", 0.0),
    }


def mean_of(histogram: Counter[int]) -> float:
    return sum(value * times for value, times in histogram.items()) / max(1, histogram.total())


def draw(rows: list[Row], histogram: list[Row]) -> list[Panel]:
    ends = [min(row["learners"] for row in rows), max(row["learners"] for row in rows)]

    def means(name: str) -> list[tuple[float, float]]:
        return [(row["learners"], row[name]) for row in rows]

    def shares(quantity: str) -> list[Line]:
        lines = []
        for learners in dict.fromkeys(row["learners"] for row in rows):
            own = [row for row in histogram if (row["learners"], row["quantity"]) == (learners, quantity)]
            total = sum(row["times"] for row in own)
            lines.append(Line(f"{learners} learners", [(row["versions"], row["times"] / total) for row in own]))
        return lines

    return [
        Panel(
            "Means",
            "learners",
            "versions",
            [
                Line("policy lag", means("lag_mean")),
                Line("staleness", means("staleness_mean")),
                Line("the others: N - 1", [(end, end - 1) for end in ends], dashed=True),
            ],
        ),
        Panel(
            "Greatest",
            "learners",
            "versions",
            [
                Line("policy lag", means("lag_max")),
                Line("staleness", means("staleness_max")),
            ],
        ),
        Panel("Staleness", "pushes of others", "share of pushes", shares("staleness"), y_log=True),
        Panel("Policy lag", "versions", "share of steps", shares("lag"), y_log=True),
    ]

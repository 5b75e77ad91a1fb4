"""`phalanx study secondary`: do large batches learn less because they explore less, or because they optimise less?
(Stooke & Abbeel, section 5.5 and appendix C)

    primary learner    collects -> its memory -> batches of a size of its own -> its network
    secondary learner               the same  -> batches of another size      -> its own network, which never acts

Both begin with the same parameters and use each step equally often. If the secondary learner keeps up with one that has
other batches, the experience was good enough, and the difference lies in the optimisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from phalanx.bench.machine import running_replica
from phalanx.config import Experiment
from phalanx.config.bounds import number
from phalanx.errors import require, tell
from phalanx.figure import Line, Panel
from phalanx.learning.learner import Learner
from phalanx.parameters.flat import FlatParameters
from phalanx.registry import make_evaluation_policy
from phalanx.replica.build import flatten, local_store, make_learner, make_model
from phalanx.replica.replica import Replica
from phalanx.runtime.clocks import Clocks
from phalanx.runtime.share import Share
from phalanx.runtime.timing import Timing
from phalanx.sampling.evaluator import evaluate
from phalanx.studies import Options
from phalanx.studies.book import Book, Row
from phalanx.studies.variants import SCALING, alone, checked, intervals, positive, question, replay_of, with_batch_size

SECOND = Share(rank=1, count=2)  # draws other batches than the primary learner


@dataclass(frozen=True)
class StudyOptions(Options):
    """A secondary learner fed from the replay memory of a primary one; further flags are those of the preset."""

    preset: str = "dqn-catch"
    """A preset that learns from a replay memory with uniform draws."""
    primary: tuple[int, ...] = (32, 512, 128)
    """Batch sizes of the learner that acts; each belongs to the one in the same place of `secondary`."""
    secondary: tuple[int, ...] = (512, 32, 128)
    """Batch sizes of the learner that does not act."""
    scaling: Literal["none", "sqrt", "linear"] = "sqrt"
    """How the learning rate follows the batch size, from the preset's on."""
    steps: int = number(30_000, least=1, most=10**12)
    """Agent steps of each training."""
    points: int = number(15, least=1, most=10_000)
    """Times at which both networks are judged during a training."""
    games: int = number(20, least=1, most=10_000)
    """Games that each of them plays then."""


class SecondaryLearner:
    """A network of its own, a learner for it, and clocks that follow those of the primary one."""

    def __init__(self, experiment: Experiment, primary: Replica) -> None:
        self.experiment = experiment
        self.primary = primary
        self.compute = primary.learner.compute
        self.model = make_model(experiment, primary.envs.spec.seen).to(self.compute.device)
        self.parameters = flatten(self.model, self.compute)
        self.clocks = Clocks()
        store = local_store(experiment, self.parameters)
        self.learner: Learner = make_learner(
            experiment, self.model, self.parameters, store, self.compute, self.clocks, Timing(), tell, SECOND
        )

    def follow(self) -> None:
        """Learn as much from the memory as the primary learner did in the iteration that has just ended."""
        self.clocks.count(steps=self.primary.progress.steps - self.clocks.now().steps)
        self.learner.learn(self.primary.experience)


def run(options: StudyOptions, flags: list[str], book: Book) -> None:
    require(
        len(options.primary) == len(options.secondary),
        f"--primary names {len(options.primary)} batch sizes and --secondary {len(options.secondary)}; name as many",
    )
    base = alone("secondary", options.preset, flags, options.steps)
    positive("primary", options.primary)
    positive("secondary", options.secondary)
    prioritized = replay_of(base, "secondary").prioritized
    require(not prioritized, "priorities belong to one learner; add --algorithm.prioritized False")
    exponent = SCALING[options.scaling]
    variants = []
    for pair in zip(options.primary, options.secondary, strict=True):
        one, other = (with_batch_size(base, batch, exponent, also) for batch, also in (pair, pair[::-1]))
        variants.append((checked(one), checked(other)))
    book.asked(question(options, base))
    rows: list[Row] = []
    for primary, secondary in variants:
        rows += measure(primary, secondary, options)
        book.data("secondary", rows)
        book.figure("secondary", f"A secondary learner, {base.preset} on {base.env.name}", draw(rows))
        last = rows[-1]
        book.say(
            f"{last['primary_batch']} acts, {last['secondary_batch']} learns from its memory: scores "
            f"{last['primary_score']:.2f} and {last['secondary_score']:.2f} after {last['steps']:,} steps"
        )


def measure(experiment: Experiment, second: Experiment, options: StudyOptions) -> list[Row]:
    """Train both at once, and judge both in turn."""
    rows: list[Row] = []
    with running_replica(experiment) as replica:
        assert isinstance(replica, Replica)
        secondary = SecondaryLearner(second, replica)
        for _ in intervals(replica, options.steps, options.points, secondary.follow):
            rows.append(
                {
                    "primary_batch": replay_of(experiment, "secondary").batch_size,
                    "secondary_batch": replay_of(second, "secondary").batch_size,
                    "steps": replica.progress.steps,
                    "primary_updates": replica.progress.updates,
                    "secondary_updates": secondary.clocks.now().updates,
                    "primary_score": judge(experiment, replica, replica.learner.model, options.games),
                    "secondary_score": judge(second, replica, secondary.model, options.games),
                    "primary_norm": norm(replica.parameters),
                    "secondary_norm": norm(secondary.parameters),
                }
            )
    return rows


def judge(experiment: Experiment, replica: Replica, model: nn.Module, games: int) -> float:
    """The mean score of some games, the same for both learners."""
    compute = replica.learner.compute
    policy = make_evaluation_policy(experiment, model, compute)
    scores = evaluate(experiment.env, policy, compute, games, experiment.run.seed, replica.progress)
    return sum(scores) / len(scores)


def norm(parameters: FlatParameters) -> float:
    return float(parameters.flat.norm())


def draw(rows: list[Row]) -> list[Panel]:
    """For each pair of batch sizes the scores, and the norms of the parameters."""
    panels = []
    for pair in dict.fromkeys((row["primary_batch"], row["secondary_batch"]) for row in rows):
        own = [row for row in rows if (row["primary_batch"], row["secondary_batch"]) == pair]
        title = f"{pair[0]} acts, {pair[1]} learns from its memory"
        for quantity, words in (("score", "mean score"), ("norm", "norm of the parameters")):
            lines = [
                Line(f"{learner} learner", [(row["steps"], row[f"{learner}_{quantity}"]) for row in own])
                for learner in ("primary", "secondary")
            ]
            panels.append(Panel(title, "steps", words, lines))
    return panels

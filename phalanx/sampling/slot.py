"""A slot: one row of the step buffer, the environment behind it, and what happens when episodes begin and end.

Every VectorEnvs is made of slots: `SerialEnvs` steps them in this process, env workers step them in theirs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phalanx.config import Experiment
from phalanx.envs import Env, ReplayingEnv
from phalanx.errors import EnvironmentFailed, RunError, UserError, in_words, place_of
from phalanx.runtime.seeds import Role, stream
from phalanx.runtime.share import WHOLE, Share
from phalanx.runtime.signals import LEAVING, may_be_ctrl_c
from phalanx.types import EnvSpec, EnvStep

EnvFactory = Callable[[int, int], Env]
"""(number of the environment in the run, incarnation: 0, or a number that no other one of a run has) -> Env."""


@dataclass(frozen=True)
class SlotRules:
    """What a slot does at the start and at the end of an episode; the same in every VectorEnvs."""

    seed: int = 0
    decorrelation: int = 0  # random actions before the first step, at most
    resets: Literal["swap", "wait"] = "swap"  # begin the next episode at once, or idle until the batch ends
    horizon: int = 1  # steps per batch, for "wait"
    first: int = 0  # number, in the whole run, of the environment with index 0


def blame(index: int, error: BaseException) -> BaseException:
    """What to raise for something an environment raised: it is the environment's error, even `sys.exit`; but for a
    sentence that says all already, and for a Ctrl-C."""
    if isinstance(error, UserError | RunError) or may_be_ctrl_c(error):
        return error
    words = f"called sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"raised {in_words(error)}"
    place = place_of(error)
    failure = EnvironmentFailed(f"environment {index} {words}{f' ({place})' if place else ''}")
    failure.__cause__ = error
    return failure


@contextlib.contextmanager
def blamed(index: int) -> Iterator[None]:
    """For calls of an environment that are not made at every step."""
    try:
        yield
    except (Exception, *LEAVING) as error:
        raise blame(index, error)  # noqa: B904


class Slot:
    """One row of the step buffer and the environment behind it."""

    def __init__(self, index: int, env: Env, step: EnvStep, rules: SlotRules) -> None:
        self.index = index  # of the row
        self.number = rules.first + index  # of the environment in the whole run
        self.env = env
        self.step = step
        self.rules = rules
        self.incarnation = 0  # not 0: the environment took the place of another
        self.frame = step.observation[index]
        self.fresh = True  # no episode was begun yet
        self.gap_before = False  # the next episode does not continue the last one, which was too long to be restored
        self.idle = False  # waits for the end of the batch
        self.requests = 0  # steps asked for so far
        self.prepared = False
        self.quiet = False  # the row tells of a step without reward in the midst of an episode
        self.heartbeat: Callable[[], None] = lambda: None  # a sign of life in work that may take long

    def advance(self, action: int) -> None:
        """Serve one request: begin if the slot is fresh, else step. An episode that ends is followed by the next."""
        if self.fresh:
            return self.begin()
        self.requests += 1
        if self.idle:
            return self.rest()
        try:
            reward, score, terminated, truncated = self.env.step(action, self.frame)
        except (Exception, *LEAVING) as error:
            raise blame(self.number, error)  # noqa: B904
        done = terminated or truncated
        if done:
            if truncated:
                self.step.last_observation[self.index] = self.frame
            if self.rules.resets == "swap":
                self.reset()
            else:
                self.idle = True
        elif self.quiet and reward == 0.0 and score != score:
            return None  # as most steps: what the row says already
        return self.write_row(reward, score, terminated, truncated, first=done, cut=False)

    def begin(self) -> None:
        """The first row of an environment, after some random actions so that starts differ. A replaced environment
        cuts off what its forerunner had begun, and one with a gap before it what it had begun itself."""
        self.fresh = False
        self.reset()
        self.decorrelate()
        self.write_row(0.0, math.nan, False, False, first=True, cut=self.incarnation > 0 or self.gap_before)
        self.gap_before = False

    def rest(self) -> None:
        """A masked row; with the first request of the next batch the next episode begins."""
        batch_starts = self.requests % self.rules.horizon == 1 or self.rules.horizon == 1
        if batch_starts:
            self.idle = False
            self.reset()
        self.write_row(0.0, math.nan, False, False, first=batch_starts, cut=True)

    def reset(self) -> None:
        with blamed(self.number):
            self.env.reset(self.frame)
        self.prepared = False

    def prepare(self) -> None:
        """Work for the next reset, done in an idle moment."""
        if not self.prepared:
            with blamed(self.number):
                self.env.prepare()
            self.prepared = True

    def decorrelate(self) -> None:
        if not self.rules.decorrelation or self.incarnation or self.gap_before:
            return
        generator = np.random.default_rng(stream(self.rules.seed, Role.START, self.number))
        count = int(generator.integers(self.rules.decorrelation + 1))
        for action in generator.integers(self.env.spec.actions, size=count).tolist():
            with blamed(self.number):
                outcome = self.env.step(action, self.frame)
            if outcome.terminated or outcome.truncated:
                self.reset()
            self.heartbeat()

    def write_row(self, reward: float, score: float, terminated: bool, truncated: bool, first: bool, cut: bool) -> None:
        step, row = self.step, self.index
        step.reward[row] = reward
        step.score[row] = score
        step.terminated[row] = terminated
        step.truncated[row] = truncated
        step.first[row] = first
        step.cut[row] = cut
        self.quiet = reward == 0.0 and score != score and not (terminated or truncated or first or cut)

    def state(self) -> dict[str, Any]:
        with blamed(self.number):
            env = self.env.state()
        return {
            "env": env,
            "idle": self.idle,
            "requests": self.requests,
            "fresh": self.fresh,
            "incarnation": self.incarnation,  # a fresh successor that moves on must still cut what it follows,
            "gap_before": self.gap_before,  # and so must one that has not gone on since it was restored
        }

    def restore(self, state: dict[str, Any]) -> None:
        if isinstance(self.env, ReplayingEnv):
            self.env.heartbeat = self.heartbeat
        with blamed(self.number):
            self.env.restore(state["env"])
        self.idle, self.requests, self.fresh = state["idle"], state["requests"], state["fresh"]
        self.incarnation, self.gap_before = state.get("incarnation", 0), state.get("gap_before", False)
        self.prepared = False
        if unsaved_steps(state):
            self.fresh = self.gap_before = True
            self.requests += 1  # a step is what the next request would have been, and `begin` does not count


def slot_rules(experiment: Experiment, share: Share = WHOLE) -> SlotRules:
    """How an experiment's environments begin and end episodes."""
    sampler = experiment.sampler
    first = share.rows(sampler.environments).start
    return SlotRules(experiment.run.seed, sampler.decorrelation, sampler.resets, sampler.horizon, first)


def unsaved_steps(slot: dict[str, Any]) -> int:
    """Steps of the running episode that a slot's state does not hold; 0 if it can be gone on with, or is over."""
    return 0 if slot["idle"] or slot["fresh"] else int(slot["env"].get("unsaved", 0))


def too_long_to_restore(slots: Sequence[dict[str, Any]]) -> str | None:
    """A sentence about slots whose states lack the episode they were in, if there are any."""
    steps = {index: count for index, slot in enumerate(slots) if (count := unsaved_steps(slot))}
    if not steps:
        return None
    return (
        f"the episodes of environments {list(steps)} were too long to be played again (up to {max(steps.values()):,} "
        "steps); they begin new ones, and nothing is learnt across the gap"
    )


def group_slices(environments: int, groups: int) -> list[slice]:
    """Rows of each group, contiguous and of equal size."""
    size = environments // groups
    return [slice(start, start + size) for start in range(0, environments, size)]


def allocate_step(spec: EnvSpec, environments: int, allocate: Callable[..., np.ndarray] = np.zeros) -> EnvStep:
    """A step buffer for so many environments, in memory that `allocate(shape, dtype)` gives."""
    frames = (environments, *spec.frame_shape)
    return EnvStep(
        observation=allocate(frames, spec.frame_dtype),
        last_observation=allocate(frames, spec.frame_dtype),
        reward=allocate((environments,), np.float32),
        score=allocate((environments,), np.float32),
        terminated=allocate((environments,), np.bool_),
        truncated=allocate((environments,), np.bool_),
        first=allocate((environments,), np.bool_),
        cut=allocate((environments,), np.bool_),
    )

"""A slot's row of the step buffer: always what the last step gave, though rows that stay the same are not rewritten."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from phalanx.envs import Env
from phalanx.sampling.slot import Slot, SlotRules, allocate_step
from phalanx.types import EnvSpec, Outcome

ORDINARY = Outcome(0.0, math.nan, False, False)
OUTCOMES = [
    ORDINARY,
    Outcome(1.0, math.nan, False, False),
    Outcome(-1.0, math.nan, False, False),
    Outcome(math.nan, math.nan, False, False),
    Outcome(0.0, math.nan, True, False),
    Outcome(0.0, 7.0, True, False),
    Outcome(2.0, math.nan, False, True),
]


class Scripted:
    """An environment that gives the outcomes it was told."""

    spec = EnvSpec((1,), np.dtype(np.uint8), 2)

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes = iter(outcomes)

    def reset(self, frame: np.ndarray) -> None:
        frame[:] = 0

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        frame[:] = 1
        return next(self.outcomes)

    def prepare(self) -> None: ...

    def render(self) -> np.ndarray:
        return np.zeros((1, 1, 3), np.uint8)

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


def test_a_row_tells_of_the_last_step_whatever_came_before() -> None:
    outcomes = [outcome for pair in itertools.product(OUTCOMES, OUTCOMES) for outcome in (*pair, ORDINARY, ORDINARY)]
    env: Env = Scripted(outcomes)
    step = allocate_step(env.spec, 1)
    slot = Slot(0, env, step, SlotRules())
    slot.advance(0)
    assert step.first[0] and math.isnan(step.score[0]) and not step.cut[0]
    for reward, score, terminated, truncated in outcomes:
        slot.advance(0)
        row = (step.reward[0], step.score[0], step.terminated[0], step.truncated[0], step.first[0], step.cut[0])
        done = terminated or truncated
        np.testing.assert_array_equal(row, (reward, score, terminated, truncated, done, False))
        assert not truncated or step.last_observation[0] == 1

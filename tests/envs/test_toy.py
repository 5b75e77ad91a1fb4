"""The toy environments: their rules, step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest

from phalanx.config import ToyConfig
from phalanx.envs.toy import Catch, Counter, Identity


def seed(value: int = 0) -> np.random.SeedSequence:
    return np.random.SeedSequence(value)


@pytest.mark.parametrize("follow", [True, False])
def test_catch_rewards_a_caught_ball(follow: bool) -> None:
    env = Catch(ToyConfig(), seed())
    frame, columns = np.zeros((1, 10, 5), np.uint8), set()
    for _ in range(40):
        env.reset(frame)
        column = int(frame[0, 0].argmax())
        columns.add(column)
        target = column if follow else (column + 2) % 5
        for step in range(1, 10):
            paddle = int(frame[0, 9].argmax())
            outcome = env.step(1 + int(np.sign(target - paddle)), frame)
            assert frame[0, step, column] == 255 and (frame > 0).sum() == (1 if follow and step == 9 else 2)
            assert outcome.terminated == (step == 9) and not outcome.truncated
            assert step == 9 or (outcome.reward == 0 and math.isnan(outcome.score))
        assert outcome.reward == outcome.score == (1 if follow else -1)
    assert columns == set(range(5))


def test_catch_paddle_stays_on_the_board() -> None:
    env = Catch(ToyConfig(), seed())
    frame = np.zeros((1, 10, 5), np.uint8)
    env.reset(frame)
    for _ in range(6):
        env.step(0, frame)
    assert frame[0, 9, 0] == 255


def test_identity_rewards_the_number_shown() -> None:
    env = Identity(ToyConfig(name="identity", length=8), seed())
    frame, shown = np.zeros(4, np.float32), set()
    for _ in range(10):
        env.reset(frame)
        for step in range(1, 9):
            assert frame.sum() == 1 and frame.max() == 1
            number = int(frame.argmax())
            shown.add(number)
            right = step % 2 == 0
            outcome = env.step(number if right else (number + 1) % 4, frame)
            assert outcome.reward == right and outcome.terminated == (step == 8) and not outcome.truncated
        assert outcome.score == 4
    assert shown == {0, 1, 2, 3}


def test_counter_counts_and_truncates_every_second_episode() -> None:
    env = Counter(ToyConfig(name="counter", length=5), seed())
    frame = np.zeros(3, np.float32)
    for episode in range(4):
        env.reset(frame)
        tag = frame[0]
        assert tag >= 1 and frame.tolist() == [tag, episode, 0]
        for step in range(1, 6):
            outcome = env.step(step % 2, frame)
            assert frame.tolist() == [tag, episode, step] and outcome.reward == step
            assert (outcome.terminated, outcome.truncated) == (
                step == 5 and episode % 2 == 0,
                step == 5 and episode % 2 == 1,
            )
        assert outcome.score == 15


def test_counter_tags_tell_environments_apart() -> None:
    tags = set()
    for child in seed().spawn(50):
        frame = np.zeros(3, np.float32)
        Counter(ToyConfig(name="counter"), child).reset(frame)
        tags.add(float(frame[0]))
    assert len(tags) == 50

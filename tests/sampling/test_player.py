"""Games for people to watch: every picture once, and nothing that belongs to another game."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import torch

from phalanx.config import AtariConfig, GymnasiumConfig, ToyConfig
from phalanx.errors import EnvironmentFailed
from phalanx.runtime.device import Compute
from phalanx.sampling.evaluator import evaluate
from phalanx.sampling.player import Player, Shown
from phalanx.types import PolicyOutput, Progress

CPU = Compute(torch.device("cpu"))
LENGTH = 7


class Numbered(gymnasium.Env):
    """Pictures and observations tell game and step. Even games terminate, odd ones are truncated."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 24}
    observation_space = gymnasium.spaces.Box(0, 255, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)
    made = 0

    def __init__(self, render_mode: str | None = None, fails_at: int = -1) -> None:
        self.game, self.steps, self.fails_at = -1, 0, fails_at

    def reset(self, *, seed=None, options=None):
        self.game, self.steps = self.game + 1, 0
        return np.array([self.game, 0], np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.fails_at:
            raise ZeroDivisionError
        Numbered.made += 1
        over = self.steps == LENGTH
        ends = (over, False) if self.game % 2 == 0 else (False, over)
        return np.array([self.game, self.steps], np.float32), 1.5, *ends, {}

    def render(self):
        return np.full((4, 6, 3), (self.game, self.steps, 9), np.uint8)


@pytest.fixture(autouse=True)
def registered():
    gymnasium.register("Numbered-v0", entry_point=Numbered)
    gymnasium.register("NumberedFails-v0", entry_point=Numbered, kwargs={"fails_at": 3})
    yield
    for name in ("Numbered-v0", "NumberedFails-v0"):
        gymnasium.registry.pop(name)


class Attentive:
    """A policy that keeps what it was shown."""

    def __init__(self, stack: int) -> None:
        self.seen: list[list[float]] = []
        self.stack = stack

    def begin(self, progress: Progress) -> None: ...

    def act(self, stacks, history, uniform, rows):
        assert stacks.shape[:2] == (1, self.stack)
        self.seen.append([*stacks[0, -int(history) :].flatten().tolist()])
        return PolicyOutput(torch.tensor([1]), torch.zeros(1), torch.zeros(1))


def play(name: str = "Numbered-v0", games: int = 2, stack: int = 1) -> tuple[list[Shown], Attentive, Player]:
    policy = Attentive(stack)
    player = Player(GymnasiumConfig(name, stack=stack, reward="sign"), policy, CPU, 0, Progress())
    return list(player.games(games)), policy, player


def test_every_picture_once_the_last_one_included_and_none_of_the_next_game():
    shown, _, player = play(games=3)
    numbers = [tuple(now.picture[0, 0, :2].tolist()) for now in shown]
    assert numbers == [(game, step) for game in range(3) for step in range(LENGTH + 1)]
    assert [(now.game, now.step) for now in shown] == numbers
    assert [now.over for now in shown] == [step == LENGTH for _, step in numbers]
    assert [now.score for now in shown] == [1.5 * step for _, step in numbers]  # raw, whatever is learnt from
    assert player.fps == 24


def test_the_policy_sees_stacks_that_begin_with_each_game():
    _, policy, _ = play(stack=3)
    games = [(game, step) for game in range(2) for step in range(LENGTH)]
    expected = [[n for s in range(max(0, step - 2), step + 1) for n in (game, s)] for game, step in games]
    assert policy.seen == expected


def test_who_stops_asking_ends_the_game():
    Numbered.made = 0
    player = Player(GymnasiumConfig("Numbered-v0"), Attentive(1), CPU, 0, Progress())
    pictures = player.games(5)
    assert [next(pictures).step for _ in range(4)] == [0, 1, 2, 3]
    pictures.close()
    assert Numbered.made == 3


def test_an_environment_that_fails_is_named():
    with pytest.raises(EnvironmentFailed, match="environment 0 raised ZeroDivisionError"):
        play("NumberedFails-v0")


@pytest.mark.parametrize(
    "config", [ToyConfig(), AtariConfig("breakout", max_steps=60, fire_on_reset=True)], ids=["catch", "breakout"]
)
def test_it_plays_the_games_that_are_judged(config):
    """One environment, the same seed: the same draws, hence the same games."""

    class Drawn:
        def begin(self, progress: Progress) -> None: ...

        def act(self, stacks, history, uniform, rows):
            action = ((uniform * 3).long() + stacks.sum((1, 2, 3, 4)).long()) % 3
            return PolicyOutput(action, torch.zeros(1), torch.zeros(1))

    player = Player(config, Drawn(), CPU, 5, Progress())
    scores = [now.score for now in player.games(3) if now.over]
    assert scores == evaluate(config, Drawn(), CPU, 3, 5, Progress(), environments=1)


@pytest.mark.parametrize(("config", "fps"), [(AtariConfig("pong"), 15), (AtariConfig("pong", skip_min=2), 20)])
def test_an_atari_game_runs_at_its_own_speed(config, fps):
    assert Player(config, Attentive(4), CPU, 0, Progress()).fps == fps

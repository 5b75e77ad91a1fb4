"""Games played for people to watch: every picture of a game once, from its first to its last.

`phalanx play` draws from it. Nothing is kept: a picture is made when it is asked for, and who stops asking ends the
game. What is judged are the games of `evaluator.py`, which shows nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import torch

from phalanx.config import AtariConfig, EnvConfig, ToyConfig
from phalanx.registry import MakeEnv
from phalanx.runtime.device import Compute
from phalanx.runtime.seeds import Role, number
from phalanx.sampling.evaluator import evaluation_env
from phalanx.sampling.slot import blamed
from phalanx.seams import Policy
from phalanx.types import Progress, torch_dtype

EMULATOR_FPS = 60
OTHERS_FPS = 15.0  # for environments that do not tell


def draw_without_a_screen() -> None:
    """Pictures are made in memory. SDL, with which many environments draw, looks for a screen all the same, and
    complains where there is none."""
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")


class Shown(NamedTuple):
    """A picture and what led to it."""

    picture: np.ndarray  # [height, width, 3] uint8
    game: int  # counted from 0
    step: int  # actions taken in the game
    score: float  # raw, so far
    over: bool  # is this the last picture of its game?


class Player:
    """Plays whole games with a policy, in one environment."""

    def __init__(self, config: EnvConfig, policy: Policy, compute: Compute, seed: int, progress: Progress) -> None:
        draw_without_a_screen()
        config = evaluation_env(config)
        if not isinstance(config, ToyConfig):
            config = dataclasses.replace(config, reward="raw")  # so that they sum to the score
        self.policy = policy
        self.compute = compute
        self.stack = config.stack
        self.generator = torch.Generator().manual_seed(number(seed, Role.EVALUATION_ACTIONS))
        policy.begin(progress)
        with blamed(0):
            self.env = MakeEnv(config, seed, role=Role.EVALUATION)(0)
        atari = isinstance(config, AtariConfig)
        told = getattr(self.env, "render_fps", OTHERS_FPS)
        self.fps: float = EMULATOR_FPS / self.env.spec.frames_per_step if atari else told
        """Pictures per second at the speed at which people would play."""

    def games(self, count: int) -> Generator[Shown, None, None]:
        """Every picture of so many games; of each the first one shows the start and the last one the end."""
        try:
            for game in range(count):
                yield from self._game(game)
        finally:
            with blamed(0):
                self.env.close()

    def _game(self, game: int) -> Generator[Shown, None, None]:
        spec = self.env.spec
        stack = torch.zeros((1, self.stack, *spec.frame_shape), dtype=torch_dtype(spec.frame_dtype))
        frame = np.empty(spec.frame_shape, spec.frame_dtype)
        step, score, over = 0, 0.0, False
        with blamed(0):
            self.env.reset(frame)
            picture = self.env.render()
        yield Shown(picture, game, step, score, over)
        while not over:
            stack = torch.cat([stack[:, 1:], torch.from_numpy(frame)[None, None]], dim=1)
            action = self._action(stack, min(step + 1, self.stack))
            with blamed(0):
                outcome = self.env.step(action, frame)
                picture = self.env.render()
            step += 1
            over = outcome.terminated or outcome.truncated
            score = outcome.score if over else score + outcome.reward
            yield Shown(picture, game, step, score, over)

    def _action(self, stack: torch.Tensor, history: int) -> int:
        device = self.compute.device
        draw = torch.rand(1, generator=self.generator).to(device)
        frames = torch.tensor([history], dtype=torch.uint8, device=device)
        return int(self.policy.act(stack.to(device), frames, draw, slice(0, 1)).action)

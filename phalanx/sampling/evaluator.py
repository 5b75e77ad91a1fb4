"""Evaluation: whole games in separate environments, raw scores, nothing learnt."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from phalanx.config import AtariConfig, EnvConfig, ToyConfig
from phalanx.registry import MakeEnv
from phalanx.runtime.device import Compute
from phalanx.runtime.seeds import Role, number
from phalanx.sampling.serial import SerialEnvs
from phalanx.seams import Policy
from phalanx.types import Progress, torch_dtype

LONGEST_GAME = 27_000  # steps: half an hour of play


def evaluation_env(config: EnvConfig) -> EnvConfig:
    """The same environment with whole games: a lost life does not end an episode. They have an end, since a greedy
    policy may do the same for ever."""
    if isinstance(config, ToyConfig):
        return config
    config = dataclasses.replace(config, max_steps=config.max_steps or LONGEST_GAME)
    return dataclasses.replace(config, episodic_life=False) if isinstance(config, AtariConfig) else config


def evaluate(
    config: EnvConfig,
    policy: Policy,
    compute: Compute,
    games: int,
    seed: int,
    progress: Progress,
    environments: int = 8,
) -> list[float]:
    """Raw scores of `games` whole games. Each environment plays a fixed share of them, so that short games are not
    counted more often than long ones."""
    environments = min(environments, games)
    envs = SerialEnvs(MakeEnv(evaluation_env(config), seed, role=Role.EVALUATION), environments)
    shares = np.full(environments, games // environments) + (np.arange(environments) < games % environments)
    generator = torch.Generator().manual_seed(number(seed, Role.EVALUATION_ACTIONS))
    scores: list[float] = []
    stacks = torch.zeros((environments, config.stack, *envs.spec.frame_shape), dtype=torch_dtype(envs.spec.frame_dtype))
    history = torch.zeros(environments, dtype=torch.uint8)
    policy.begin(progress)
    try:
        while shares.any():
            step = envs.recv(0)
            scored = ~np.isnan(step.score) & (shares > 0)
            scores += step.score[scored].tolist()
            shares -= scored
            stacks[:, :-1] = stacks[:, 1:].clone()
            stacks[:, -1] = torch.from_numpy(step.observation)
            history = (history + 1).clamp(max=config.stack).masked_fill(torch.from_numpy(step.first), 1)
            draws = torch.rand(environments, generator=generator).to(compute.device)
            output = policy.act(stacks.to(compute.device), history.to(compute.device), draws, slice(0, environments))
            envs.send(0, output.action.cpu().numpy())
    finally:
        envs.close()
    return scores

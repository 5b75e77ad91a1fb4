"""Presets: a paper's or a task's name -> a whole Experiment. `phalanx presets` lists them."""

from __future__ import annotations

import dataclasses

from phalanx.config import (
    A2CConfig,
    AtariConfig,
    Experiment,
    GymnasiumConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RunConfig,
    SamplerConfig,
    SynchronousConfig,
    ToyConfig,
)
from phalanx.errors import unknown

STOOKE_ATARI = AtariConfig(frame="104x80", episodic_life=True, fire_on_reset=True, reward="sign")

A2C_ATARI = Experiment(
    env=STOOKE_ATARI,
    model=ModelConfig(torso="nips", padding=True, init="normc"),
    algorithm=A2CConfig(),
    optimizer=OptimizerConfig(rule="rmsprop-inside", learning_rate=7e-4, decay=0.9, epsilon=1e-6, clip_norm=0.5),
    sampler=SamplerConfig(environments=16, horizon=5, decorrelation=1000),
    topology=SynchronousConfig(),
)

PPO_ATARI = Experiment(
    env=STOOKE_ATARI,
    model=ModelConfig(torso="nips", padding=True, init="normc"),
    algorithm=PPOConfig(clip=0.2, value_coef=2.0),
    optimizer=OptimizerConfig(rule="adam", learning_rate=1e-3, epsilon=1e-5, clip="none"),
    sampler=SamplerConfig(environments=8, horizon=256, decorrelation=1000),
    topology=SynchronousConfig(),
)

GYM = Experiment(env=GymnasiumConfig(), model=ModelConfig(torso="mlp"), run=RunConfig(steps=500_000))

A2C_GYM = dataclasses.replace(
    GYM,
    algorithm=A2CConfig(gae_lambda=0.95, value_coef=0.5, entropy_coef=0.0),
    optimizer=OptimizerConfig(rule="adam", learning_rate=2e-3),
    sampler=SamplerConfig(environments=8, horizon=16),
)

PPO_GYM = dataclasses.replace(
    GYM,
    algorithm=PPOConfig(clip=0.2, epochs=10, minibatches=4, entropy_coef=0.0),
    optimizer=OptimizerConfig(rule="adam", learning_rate=1e-3, final_learning_rate=0.0),
    sampler=SamplerConfig(environments=8, horizon=64),
)


def _catch(base: Experiment) -> Experiment:
    return dataclasses.replace(base, env=ToyConfig(), run=RunConfig(steps=60_000))


PRESETS: dict[str, tuple[str, Experiment]] = {
    "a2c": ("A2C on Atari as in Stooke & Abbeel: 16 environments x 5 steps, RMSProp", A2C_ATARI),
    "ppo": ("PPO on Atari as in Stooke & Abbeel: 8 environments x 256 steps, 4 epochs of 4 minibatches", PPO_ATARI),
    "a2c-gym": ("A2C with an MLP on a Gymnasium environment (CartPole-v1; change --env.id)", A2C_GYM),
    "ppo-gym": ("PPO with an MLP on a Gymnasium environment (CartPole-v1; change --env.id)", PPO_GYM),
    "a2c-catch": ("A2C on Catch, a toy that is learnt in seconds", _catch(A2C_GYM)),
    "ppo-catch": ("PPO on Catch, a toy that is learnt in seconds", _catch(PPO_GYM)),
}


def preset(name: str) -> Experiment:
    """The experiment of that name; an unknown one is refused with the nearest names."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return dataclasses.replace(PRESETS[name][1], preset=name)

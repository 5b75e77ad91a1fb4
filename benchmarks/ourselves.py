"""One measurement of phalanx or of the bare emulator, as `contenders.py` makes those of its peers.

python benchmarks/ourselves.py NAME '{"setting": value, ...}'   ->   one JSON object on the last line
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from contenders import EPSILON, FOREVER, LEARNING_STARTS, NOOPS, REPLAY_SIZE, STACK, Result, answer, parameter_count
from phalanx.bench import machine as bench
from phalanx.bench.emulators import BareEmulators
from phalanx.config import (
    A2CConfig,
    AtariConfig,
    DQNConfig,
    Experiment,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RunConfig,
    SamplerConfig,
    SerialConfig,
    SynchronousConfig,
)
from phalanx.config.presets import preset
from phalanx.runtime.affinity import usable_cores

EMULATORS = 8  # per process, for the emulator's own limit


def emulator(game: str, warmup: float, seconds: float) -> Result:
    """Bare emulators on every core, without pixels: the limit of all others."""
    with BareEmulators(game, usable_cores(), EMULATORS) as emulators:
        return {"sps": emulators.speed(warmup + seconds)}


def sample_phalanx(game: str, frame: str, envs: int, groups: int, warmup: float, seconds: float) -> Result:
    """Env workers of phalanx; `sampling_speed` has its own second of warm-up after the first frames."""
    experiment = sampling_experiment(game, frame, envs, groups)
    return {"sps": bench.sampling_speed(experiment, seconds + max(0.0, warmup - 1))}


def sampling_experiment(game: str, frame: str, envs: int, groups: int) -> Experiment:
    """Workers that step under random actions."""
    return Experiment(
        env=phalanx_env(game, frame),
        sampler=SamplerConfig(environments=envs, groups=groups, squads=0),
        topology=SynchronousConfig(),
        run=RunConfig(device="cpu"),  # with a GPU the workers would leave the frames to it
    ).validate()


def train_phalanx(
    game: str, algorithm: str, envs: int, topology: str, precision: str, warmup: float, seconds: float
) -> Result:
    """Rollouts and updates of a phalanx replica, after a warm-up in which it has begun to learn."""
    experiment = phalanx_experiment(game, algorithm, envs, topology, precision).validate()
    with bench.running_replica(experiment) as replica:
        bench.warm_up_until(replica.iterate, warmup)
        while not replica.progress.updates:
            replica.iterate()
        steps, updates, start = replica.progress.steps, replica.progress.updates, time.perf_counter()
        bench.warm_up_until(replica.iterate, seconds)
        steps, updates = replica.progress.steps - steps, replica.progress.updates - updates
        return {
            "sps": steps / (time.perf_counter() - start),
            "steps_per_update": steps / updates,
            "parameters": parameter_count(replica.learner.model),
        }


def phalanx_experiment(game: str, algorithm: str, envs: int, topology: str, precision: str) -> Experiment:
    """What `train_sb3` does, in phalanx's words."""
    common = dataclasses.replace(
        preset(algorithm),
        env=phalanx_env(game, "84x84"),
        model=ModelConfig(torso="nature"),
        topology=SerialConfig() if topology == "serial" else SynchronousConfig(),
        run=RunConfig(steps=FOREVER, precision="bfloat16" if precision == "bfloat16" else "float32"),
    )
    if algorithm == "a2c":
        return dataclasses.replace(
            common,
            algorithm=A2CConfig(value_coef=0.5, entropy_coef=0.0),
            optimizer=OptimizerConfig(rule="rmsprop-inside", learning_rate=7e-4),
            sampler=SamplerConfig(environments=envs, horizon=5),
        )
    if algorithm == "ppo":
        return dataclasses.replace(
            common,
            algorithm=PPOConfig(epochs=4, minibatches=4, clip=0.2, entropy_coef=0.0),
            optimizer=OptimizerConfig(rule="adam", learning_rate=3e-4),
            sampler=SamplerConfig(environments=envs, horizon=128),
        )
    return dataclasses.replace(
        common,
        algorithm=DQNConfig(
            batch_size=32,
            intensity=8.0,  # a batch of 32 for every 4 steps
            replay_size=REPLAY_SIZE,
            learning_starts=LEARNING_STARTS,
            epsilon_start=EPSILON,
            epsilon_final=EPSILON,
        ),
        optimizer=OptimizerConfig(rule="adam", learning_rate=1e-4, clip_norm=10.0),
        sampler=SamplerConfig(environments=envs, horizon=4),
    )


def phalanx_env(game: str, frame: str) -> AtariConfig:
    size: Any = frame
    return AtariConfig(game=game, frame=size, episodic_life=False, fire_on_reset=False, noop_max=NOOPS, stack=STACK)


if __name__ == "__main__":
    answer((emulator, sample_phalanx, train_phalanx))

"""One measurement of one library: the part of `peers.py` that runs in a process of its own.

    python benchmarks/contenders.py NAME '{"setting": value, ...}'   ->   one JSON object on the last line

Every function takes the settings of one measurement and returns at least `sps`, agent steps per second. All play whole
games (a lost life ends nothing): 4 frames per action, the maximum of the last two, up to 30 no-ops at a game's start.
Training is timed from the start of a rollout to the start of another, so that rollouts and updates are counted whole.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from phalanx import bench
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
from phalanx.presets import preset
from phalanx.runtime.affinity import usable_cores

Result = dict[str, Any]
STACK, SKIP, NOOPS = 4, 4, 30
EMULATORS = 8  # per process, for the emulator's own limit
LEARNING_STARTS, REPLAY_SIZE, EPSILON = 1_000, 20_000, 0.1
FOREVER = 10**9  # steps; measurements end by time

# Sampling: environments under random actions, no network.


def emulator(game: str, warmup: float, seconds: float) -> Result:
    """Bare emulators on every core, without pixels: the limit of all others."""
    return {"sps": bench.emulator_speed(game, usable_cores(), EMULATORS, warmup + seconds)}


def sample_phalanx(game: str, frame: str, envs: int, groups: int, warmup: float, seconds: float) -> Result:
    """Env workers of phalanx; `sampling_speed` has its own second of warm-up after the first frames."""
    experiment = Experiment(
        env=phalanx_env(game, frame),
        sampler=SamplerConfig(environments=envs, groups=groups),
        topology=SynchronousConfig(),
        run=RunConfig(device="cpu"),  # with a GPU the workers would leave the frames to it
    )
    return {"sps": bench.sampling_speed(experiment.validate(), seconds + max(0.0, warmup - 1))}


def sample_envpool(
    game: str, frame: str, envs: int, batch: int, warmup: float, seconds: float, **options: Any
) -> Result:
    """EnvPool; with a batch smaller than its environments it answers as soon as so many are ready."""
    import envpool

    height, width = map(int, frame.split("x"))
    pool = envpool.make_gymnasium(
        f"{camel_case(game)}-v5",
        num_envs=envs,
        batch_size=batch,
        episodic_life=False,
        use_fire_reset=False,
        reward_clip=True,
        noop_max=NOOPS,
        frame_skip=SKIP,
        stack_num=STACK,
        img_height=height,
        img_width=width,
        **options,
    )
    actions = random_actions(pool.action_space.n, batch, np.int32)
    pool.async_reset()

    def step(count: int) -> None:
        pool.send(actions[count % len(actions)], pool.recv()[-1]["env_id"])

    return {"sps": batch * calls_per_second(step, warmup, seconds)}


def sample_ale_vector(
    game: str, frame: str, envs: int, batch: int, warmup: float, seconds: float, **options: Any
) -> Result:
    """The vector environment of ale-py; `batch` as in EnvPool."""
    from ale_py.vector_env import AtariVectorEnv

    height, width = map(int, frame.split("x"))
    vector: Any = AtariVectorEnv(
        game,
        envs,
        batch_size=batch,
        episodic_life=False,
        use_fire_reset=False,
        noop_max=NOOPS,
        frameskip=SKIP,
        stack_num=STACK,
        img_height=height,
        img_width=width,
        **options,
    )
    actions = random_actions(vector.single_action_space.n, batch, np.int64)
    vector.reset(seed=0)
    return {"sps": batch * calls_per_second(lambda n: vector.step(actions[n % len(actions)]), warmup, seconds)}


def sample_sb3(game: str, envs: int, warmup: float, seconds: float) -> Result:
    """SubprocVecEnv with AtariWrapper and VecFrameStack."""
    vector = sb3_envs(game, envs)
    actions = random_actions(vector.action_space.n, envs, np.int64)
    vector.reset()
    sps = envs * calls_per_second(lambda n: vector.step(actions[n % len(actions)]), warmup, seconds)
    vector.close()
    return {"sps": sps}


def sample_gymnasium(game: str, envs: int, warmup: float, seconds: float) -> Result:
    """AsyncVectorEnv with AtariPreprocessing and FrameStackObservation."""
    from gymnasium.vector import AsyncVectorEnv

    vector: Any = AsyncVectorEnv([GymnasiumGame(game)] * envs)
    actions = random_actions(vector.single_action_space.n, envs, np.int64)
    vector.reset(seed=0)
    sps = envs * calls_per_second(lambda n: vector.step(actions[n % len(actions)]), warmup, seconds)
    vector.close()
    return {"sps": sps}


# Training: equal network (Nature), environments and batches.


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
            "parameters": parameter_count(replica.model),
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


def train_sb3(game: str, algorithm: str, envs: int, warmup: float, seconds: float) -> Result:
    """Stable-Baselines3 with its own defaults where they do not change the amount of work."""
    from stable_baselines3 import A2C, DQN, PPO

    vector = sb3_envs(game, envs)
    if algorithm == "a2c":
        model: Any = A2C("CnnPolicy", vector, n_steps=5)
    elif algorithm == "ppo":
        model = PPO("CnnPolicy", vector, n_steps=128, batch_size=envs * 128 // 4, n_epochs=4)
    else:
        model = DQN(
            "CnnPolicy",
            vector,
            batch_size=32,
            train_freq=4,
            gradient_steps=envs,
            buffer_size=REPLAY_SIZE,
            learning_starts=LEARNING_STARTS,
            exploration_initial_eps=EPSILON,  # a random action skips the network, so its share must be the same
            exploration_final_eps=EPSILON,
        )
    watch = sb3_watch(warmup, seconds)
    model.policy.optimizer.register_step_post_hook(watch.count_update)
    model.learn(FOREVER, callback=watch)
    vector.close()
    (first_clock, first_steps, first_updates), (clock, steps, updates) = watch.marks
    return {
        "sps": (steps - first_steps) / (clock - first_clock),
        "steps_per_update": (steps - first_steps) / (updates - first_updates),
        "parameters": parameter_count(model.q_net if algorithm == "dqn" else model.policy),
    }


def sb3_watch(warmup: float, seconds: float) -> Any:
    """A callback that notes clock, steps and updates at the start of the window and of the first rollout past it."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Watch(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self.marks: list[tuple[float, int, int]] = []
            self.updates, self.begin = 0, time.perf_counter()

        def count_update(self, *_: Any) -> None:
            self.updates += 1

        def _on_rollout_start(self) -> None:
            now = time.perf_counter()
            warm = now - self.begin >= warmup and self.updates > 0
            if (not self.marks and warm) or (self.marks and now - self.marks[0][0] >= seconds):
                self.marks.append((now, self.num_timesteps, self.updates))

        def _on_step(self) -> bool:
            return len(self.marks) < 2

    return Watch()


# What the measurements share.


def phalanx_env(game: str, frame: str) -> AtariConfig:
    size: Any = frame
    return AtariConfig(game=game, frame=size, episodic_life=False, fire_on_reset=False, noop_max=NOOPS, stack=STACK)


class GymnasiumGame:
    """Makes the preprocessed game; a class, because a closure would not cross to another process."""

    def __init__(self, game: str) -> None:
        self.game = game

    def __call__(self) -> Any:
        import ale_py
        import gymnasium

        gymnasium.register_envs(ale_py)
        game = gymnasium.make(f"ALE/{camel_case(self.game)}-v5", frameskip=1, repeat_action_probability=0.0)
        frames = gymnasium.wrappers.AtariPreprocessing(game, noop_max=NOOPS, frame_skip=SKIP, screen_size=84)
        return gymnasium.wrappers.FrameStackObservation(frames, STACK)


class Sb3Game:
    """Makes the game in AtariWrapper; it presses FIRE at the start of a game, which cannot be turned off."""

    def __init__(self, game: str) -> None:
        self.game = game

    def __call__(self) -> Any:
        import ale_py
        import gymnasium
        from stable_baselines3.common.atari_wrappers import AtariWrapper
        from stable_baselines3.common.monitor import Monitor

        gymnasium.register_envs(ale_py)
        game = Monitor(gymnasium.make(f"{camel_case(self.game)}NoFrameskip-v4"))
        return AtariWrapper(game, noop_max=NOOPS, frame_skip=SKIP, terminal_on_life_loss=False)


def sb3_envs(game: str, envs: int) -> Any:
    """A process for each environment; a single one stays in the main process, which is faster."""
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack

    kind = DummyVecEnv if envs == 1 else SubprocVecEnv
    return VecFrameStack(kind([Sb3Game(game)] * envs), STACK)


def random_actions(actions: int, rows: int, dtype: Any) -> np.ndarray:
    """Drawn ahead of time, so that drawing costs nobody anything."""
    return np.random.default_rng(0).integers(actions, size=(4096, rows)).astype(dtype)


def calls_per_second(step: Callable[[int], Any], warmup: float, seconds: float) -> float:
    """Speed of a repeated call after a warm-up."""
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < warmup:
        step(count)
        count += 1
    counted_from, begin = count, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        step(count)
        count += 1
    return (count - counted_from) / (time.perf_counter() - begin)


def parameter_count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def camel_case(game: str) -> str:
    return "".join(word.capitalize() for word in game.split("_"))


CONTENDERS: dict[str, Callable[..., Result]] = {
    function.__name__: function
    for function in (
        emulator,
        sample_phalanx,
        sample_envpool,
        sample_ale_vector,
        sample_sb3,
        sample_gymnasium,
        train_phalanx,
        train_sb3,
    )
}

if __name__ == "__main__":
    print(json.dumps(CONTENDERS[sys.argv[1]](**json.loads(sys.argv[2]))))

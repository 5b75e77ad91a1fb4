"""One measurement of another library: the part of `peers.py` that runs in a process of its own.

    python benchmarks/contenders.py NAME '{"setting": value, ...}'   ->   one JSON object on the last line

Every function takes the settings of one measurement and returns at least `sps`, agent steps per second. All play whole
games (a lost life ends nothing): 4 frames per action, the maximum of the last two, up to 30 no-ops at a game's start.
Training is timed from the start of a rollout to the start of another, so that rollouts and updates are counted whole.

Nothing of phalanx is imported here, because that sets how long torch's threads spin: peers run as they come. phalanx's
own measurements are in `ourselves.py`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Result = dict[str, Any]
STACK, SKIP, NOOPS = 4, 4, 30
LEARNING_STARTS, REPLAY_SIZE, EPSILON = 1_000, 20_000, 0.1
FOREVER = 10**9  # steps; measurements end by time

# Sampling: environments under random actions, no network.


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


def answer(functions: tuple[Callable[..., Result], ...]) -> None:
    """Call the function the command line names with the settings it gives, and print its result."""
    by_name = {function.__name__: function for function in functions}
    print(json.dumps(by_name[sys.argv[1]](**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    answer((sample_envpool, sample_ale_vector, sample_sb3, sample_gymnasium, train_sb3))

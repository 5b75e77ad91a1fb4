"""Gymnasium environments: spaces, ends, prepared resets, resumption by replay."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from phalanx.config import GymnasiumConfig
from phalanx.envs.gymnasium import GymnasiumEnv
from phalanx.errors import UserError

gymnasium = pytest.importorskip("gymnasium")
spaces = gymnasium.spaces


class Scripted(gymnasium.Env):
    """Its spaces are given; observations count steps, and it ends as told after `length` steps."""

    metadata = {"render_modes": ["rgb_array"]}

    def __init__(
        self,
        observation_space: Any,
        action_space: Any = None,
        length: int = 10,
        ends: tuple[bool, bool] = (True, False),
        reward: float = 3.0,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(3, start=5)
        self.length, self.ends, self.reward, self.actions, self.steps = length, ends, reward, [], 0

    def observation(self) -> np.ndarray:
        shape, dtype = self.observation_space.shape, self.observation_space.dtype
        return (np.arange(math.prod(shape)).reshape(shape) + self.offset + self.steps).astype(dtype)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.offset, self.steps = int(self.np_random.integers(50)), 0
        return self.observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        self.steps += 1
        terminated, truncated = self.ends if self.steps == self.length else (False, False)
        return self.observation(), self.reward, terminated, truncated, {}

    def render(self) -> np.ndarray:
        return np.full((4, 4, 3), self.steps, np.uint8)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a GymnasiumEnv of a Scripted one."""

    def build(observation_space: Any = None, config: dict[str, Any] | None = None, **fields: Any) -> GymnasiumEnv:
        space = spaces.Box(-1e9, 1e9, (2,), np.float64) if observation_space is None else observation_space
        entry = gymnasium.envs.registration.EnvSpec(
            "Scripted-v0", entry_point=Scripted, kwargs={"observation_space": space, **fields}
        )
        monkeypatch.setitem(gymnasium.registry, "Scripted-v0", entry)
        return GymnasiumEnv(GymnasiumConfig("Scripted-v0", **(config or {})), np.random.SeedSequence(3))

    return build


def frame_of(env: GymnasiumEnv) -> np.ndarray:
    return np.zeros(env.spec.frame_shape, env.spec.frame_dtype)


@pytest.mark.parametrize(
    ("shape", "dtype", "frame_shape", "frame_dtype"),
    [
        ((4, 6), np.uint8, (1, 4, 6), np.uint8),
        ((6, 5, 3), np.uint8, (3, 6, 5), np.uint8),
        ((3, 6, 5), np.uint8, (3, 6, 5), np.uint8),
        ((7,), np.uint8, (7,), np.float32),
        ((7,), np.float64, (7,), np.float32),
        ((2, 3, 4), np.float32, (2, 3, 4), np.float32),
        ((7, 7, 20), np.float64, (20, 7, 7), np.float32),
        ((2, 2, 3, 4), np.float32, (48,), np.float32),
        ((2, 3), np.int64, (6,), np.float32),
    ],
)
def test_observations_become_frames(scripted: Any, shape: Any, dtype: Any, frame_shape: Any, frame_dtype: Any) -> None:
    env = scripted(spaces.Box(0, 255, shape, dtype))
    assert (env.spec.frame_shape, env.spec.frame_dtype) == (frame_shape, frame_dtype)
    frame = frame_of(env)
    env.reset(frame)
    env.step(0, frame)
    observation = env._env.unwrapped.observation()
    expected = np.moveaxis(observation, -1, 0) if shape in ((6, 5, 3), (7, 7, 20)) else observation.reshape(frame_shape)
    assert np.array_equal(frame, expected)


def test_actions_honour_the_start_of_the_space(scripted: Any) -> None:
    env = scripted()
    env.reset(frame_of(env))
    for action in range(env.spec.actions):
        env.step(action, frame_of(env))
    assert env.spec.actions == 3 and env._env.unwrapped.actions == [5, 6, 7]


@pytest.mark.parametrize(
    ("ends", "max_steps", "expected"),
    [
        ((True, False), 0, (10, True, False)),
        ((False, True), 0, (10, False, True)),
        ((True, True), 0, (10, True, False)),
        ((True, False), 4, (4, False, True)),
        ((True, False), 10, (10, True, False)),
    ],
)
def test_ends_are_kept_apart(scripted: Any, ends: Any, max_steps: int, expected: tuple[int, bool, bool]) -> None:
    env = scripted(ends=ends, config={"max_steps": max_steps, "reward": "sign"})
    frame = frame_of(env)
    for _ in range(2):
        env.reset(frame)
        for step in range(1, expected[0] + 1):
            outcome = env.step(0, frame)
            assert outcome.reward == 1 and math.isnan(outcome.score) == (step < expected[0])
        assert (outcome.terminated, outcome.truncated) == expected[1:]
        assert outcome.score == 3 * expected[0]


@pytest.mark.parametrize(("reward", "shaped"), [("raw", -3.0), ("sign", -1.0), ("clip", -1.0)])
def test_reward_is_shaped_and_score_is_raw(scripted: Any, reward: str, shaped: float) -> None:
    env = scripted(reward=-3.0, length=1, config={"reward": reward})
    env.reset(frame_of(env))
    outcome = env.step(0, frame_of(env))
    assert (outcome.reward, outcome.score) == (shaped, -3.0)


@pytest.mark.parametrize("reward", [None, "much", np.ones(2), [1.0]])
def test_a_reward_that_is_no_number_is_told(scripted: Any, reward: Any) -> None:
    env = scripted(reward=reward)
    env.reset(frame_of(env))
    words = re.escape(f"Scripted.step returned the reward {reward!r}; it must be a number")
    with pytest.raises(UserError, match=f"^{words}$"):
        env.step(0, frame_of(env))


@pytest.mark.parametrize("value", [None, "no", {}, np.zeros(2, bool), 2])
@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_an_end_that_is_neither_true_nor_false_is_told(scripted: Any, name: str, value: Any) -> None:
    env = scripted(length=1, ends=(value, False) if name == "terminated" else (False, value))
    env.reset(frame_of(env))
    words = re.escape(f"Scripted.step returned {value!r} as {name}; it must be True or False")
    with pytest.raises(UserError, match=f"^{words}$"):
        env.step(0, frame_of(env))


@pytest.mark.parametrize("kind", [bool, np.bool_, int, np.float32])
def test_numbers_of_any_kind_are_rewards_and_ends(scripted: Any, kind: Any) -> None:
    env = scripted(length=1, ends=(kind(1), kind(0)), reward=kind(1))
    env.reset(frame_of(env))
    assert tuple(env.step(0, frame_of(env))) == (1.0, 1.0, True, False)


@pytest.mark.parametrize("reward", ["raw", "sign", "clip"])
def test_what_is_not_finite_passes_through(scripted: Any, reward: str) -> None:
    env = scripted(reward=math.nan, config={"reward": reward})
    env.reset(frame_of(env))
    assert math.isnan(env.step(0, frame_of(env)).reward)


def test_prepared_episodes_are_the_same() -> None:
    plain, prepared = (GymnasiumEnv(GymnasiumConfig(), np.random.SeedSequence(1)) for _ in range(2))
    frames, rng, starts = (frame_of(plain), frame_of(plain)), np.random.default_rng(0), set()
    for episode in range(6):
        if episode % 3 != 2:
            prepared.prepare()
            prepared.prepare()
        plain.reset(frames[0])
        prepared.reset(frames[1])
        starts.add(frames[0].tobytes())
        outcome = None
        while outcome is None or not outcome.terminated:
            assert np.array_equal(*frames)
            action = int(rng.integers(2))
            outcome = plain.step(action, frames[0])
            assert repr(outcome) == repr(prepared.step(action, frames[1]))
            if episode == 1:
                prepared.prepare()
    assert len(starts) == 6


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_restore_replays_the_running_episode(steps: int) -> None:
    env = GymnasiumEnv(GymnasiumConfig(max_steps=40), np.random.SeedSequence(5, spawn_key=(2, 1)))
    frame, rng = frame_of(env), np.random.default_rng(0)
    env.reset(frame)
    env.reset(frame)
    for _ in range(steps):
        outcome = env.step(int(rng.integers(2)), frame)
        if outcome.terminated or outcome.truncated:
            env.prepare()
            env.reset(frame)
    other = GymnasiumEnv(GymnasiumConfig(max_steps=40), np.random.SeedSequence(77))
    other.prepare()
    other.restore(env.state())
    other_frame = frame_of(other)
    for _ in range(100):
        action = int(rng.integers(2))
        outcome = env.step(action, frame)
        assert repr(outcome) == repr(other.step(action, other_frame)) and np.array_equal(frame, other_frame)
        if outcome.terminated or outcome.truncated:
            env.reset(frame)
            other.reset(other_frame)
            assert np.array_equal(frame, other_frame)


def test_pictures(scripted: Any) -> None:
    env = scripted()
    env.reset(frame_of(env))
    env.step(0, frame_of(env))
    assert env.render().shape == (4, 4, 3) and (env.render() == 1).all()


@pytest.mark.parametrize(
    ("name", "words"),
    [("CartPoll-v1", "CartPole-v1"), ("Pendulum-v1", "discrete"), ("a b", "a b")],
)
def test_what_does_not_fit_is_refused(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        GymnasiumEnv(GymnasiumConfig(name), np.random.SeedSequence(0))


def test_atari_games_have_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether something has registered them with Gymnasium, or not; what others call so is theirs."""
    gymnasium = pytest.importorskip("gymnasium")
    gymnasium.register_envs(pytest.importorskip("ale_py"))
    names = ["ALE/Pong-v5", "PongNoFrameskip-v4", "PongNoFrameskip"]
    others = {name: spec for name, spec in gymnasium.registry.items() if "CartPole" in name}
    for registered, module in ((gymnasium.registry, ["ale_py:ALE/Pong-v5"]), (others, [])):
        monkeypatch.setattr(gymnasium, "registry", registered)
        monkeypatch.setattr(gymnasium.envs.registration, "registry", registered)
        for name in names + module:
            with pytest.raises(
                UserError, match=r"Pong\S+ is an Atari game; use a preset such as ppo and --env.game pong"
            ):
                GymnasiumEnv(GymnasiumConfig(id=name), np.random.SeedSequence(0))
    gymnasium.register("Pong-v9", entry_point="gymnasium.envs.classic_control:CartPoleEnv")
    GymnasiumEnv(GymnasiumConfig(id="Pong-v9"), np.random.SeedSequence(0)).close()


def test_a_replayed_episode_gives_a_sign_of_life_at_every_step(scripted: Any) -> None:
    env, beats = scripted(length=50), []
    env.reset(frame_of(env))
    for _ in range(30):
        env.step(0, frame_of(env))
    env.heartbeat = lambda: beats.append(1)
    env.restore(env.state())
    assert len(beats) == 30


def test_an_episode_too_long_to_be_played_again_is_not_saved(scripted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.envs.gymnasium.LONGEST_REPLAY", 20)
    env = scripted(length=50)
    frame = frame_of(env)
    env.reset(frame)
    for _ in range(20):
        env.step(0, frame)
    assert (len(env.state()["actions"]), env.state()["unsaved"]) == (20, 0)
    env.step(0, frame)
    state = env.state()
    assert (len(state["actions"]), state["unsaved"]) == (0, 21)
    env._env.unwrapped.actions.clear()
    env.restore(state)
    assert env._env.unwrapped.actions == []  # nothing was played again
    env.reset(frame)
    assert env.state()["episode"] == state["episode"] + 1


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 3)])
def test_a_box_without_numbers_is_refused(scripted: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="which shows nothing"):
        scripted(spaces.Box(0, 255, shape, np.uint8 if len(shape) == 3 else np.float32))


@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError, SystemExit])
def test_a_constructor_that_raises_is_one_sentence(monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    def fail(*arguments: Any, **keywords: Any) -> Any:
        raise error("no\nlicence")

    monkeypatch.setattr(gymnasium, "make", fail)
    with pytest.raises(UserError, match=f"'Mine-v0' cannot be made: {error.__name__}: no licence$") as raised:
        GymnasiumEnv(GymnasiumConfig(id="Mine-v0"), np.random.SeedSequence(0))
    assert isinstance(raised.value.__cause__, error)

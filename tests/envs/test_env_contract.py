"""What every environment promises, checked for all of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from phalanx.config import AtariConfig, GymnasiumConfig, ToyConfig
from phalanx.envs import Env
from phalanx.envs.atari import AtariEnv
from phalanx.envs.gymnasium import GymnasiumEnv
from phalanx.envs.toy import Catch, Counter, Identity

Make = Callable[[int], Env]


def maker(kind: Any, config: Any) -> Make:
    return lambda seed: kind(config, np.random.SeedSequence(seed))


LIVES = AtariConfig("breakout", "104x80", episodic_life=True, fire_on_reset=True, sticky=0.25)
ENVS: dict[str, Make] = {
    "atari": maker(AtariEnv, AtariConfig("pong", color="rgb", max_pool=False, skip_min=2, max_steps=60)),
    "atari-lives": maker(AtariEnv, LIVES),
    "gymnasium": maker(GymnasiumEnv, GymnasiumConfig()),
    "catch": maker(Catch, ToyConfig()),
    "identity": maker(Identity, ToyConfig("identity")),
    "counter": maker(Counter, ToyConfig("counter")),
}


@pytest.fixture(params=sorted(ENVS))
def make(request: pytest.FixtureRequest) -> Make:
    return ENVS[request.param]


def trace(env: Env, steps: int, prepare: bool = False, ended: bool = True) -> list[tuple[bytes, str]]:
    """Frames and outcomes under fixed actions, resets included."""
    frame = np.zeros(env.spec.frame_shape, env.spec.frame_dtype)
    actions, seen = np.random.default_rng(0), []
    for _ in range(steps):
        if ended:
            if prepare:
                env.prepare()
            env.reset(frame)
            seen.append((frame.tobytes(), "first"))
        outcome = env.step(int(actions.integers(env.spec.actions)), frame)
        ended = outcome.terminated or outcome.truncated
        seen.append((frame.tobytes(), repr(outcome)))
    return seen


def test_same_seed_same_course_with_and_without_prepare(make: Make) -> None:
    plain = trace(make(1), 200)
    assert plain == trace(make(1), 200) == trace(make(1), 200, prepare=True)
    assert sum(text == "first" for _, text in plain) >= 3


def test_other_seed_other_course(make: Make) -> None:
    assert trace(make(1), 100) != trace(make(2), 100)


def test_frames_are_written_in_place(make: Make) -> None:
    env = make(3)
    spec = env.spec
    memory = np.full((3, *spec.frame_shape), 7, spec.frame_dtype)
    plain = np.zeros(spec.frame_shape, spec.frame_dtype)
    other = make(3)
    env.reset(memory[1])
    other.reset(plain)
    for action in range(min(3, spec.actions)):
        assert np.array_equal(memory[1], plain)
        assert (memory[[0, 2]] == 7).all()
        env.step(action, memory[1])
        other.step(action, plain)


def test_outcomes_are_plain_and_scores_come_at_the_end(make: Make) -> None:
    env = make(0)
    frame = np.zeros(env.spec.frame_shape, env.spec.frame_dtype)
    env.reset(frame)
    for step in range(150):
        outcome = env.step(np.int64(step % env.spec.actions), frame)
        assert [type(value) for value in outcome] == [float, float, bool, bool]
        assert not (outcome.terminated and outcome.truncated)
        ended = outcome.terminated or outcome.truncated
        assert math.isnan(outcome.score) or ended
        assert not outcome.truncated or not math.isnan(outcome.score)
        if ended:
            env.reset(frame)


def plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(plain(item) for item in value)
    return value is None or type(value) in (int, float, bool, str, bytes, np.ndarray)


@pytest.mark.parametrize("steps", [1, 37])
def test_restored_environment_goes_on_alike(make: Make, steps: int) -> None:
    env, other = make(4), make(5)
    seen = trace(env, steps)
    state = env.state()
    assert plain(state), state
    json.dumps(state, default=lambda value: "binary")
    other.restore(state)
    ended = "terminated=True" in seen[-1][1] or "truncated=True" in seen[-1][1]
    assert trace(env, 150, ended=ended) == trace(other, 150, ended=ended)


def test_state_is_a_copy(make: Make) -> None:
    env, other = make(6), make(7)
    trace(env, 20)
    state = env.state()
    other.restore(state)
    expected = trace(env, 60)
    assert trace(other, 60) == expected
    again = make(8)
    again.restore(state)
    assert trace(again, 60) == expected


def test_two_environments_do_not_disturb_each_other(make: Make) -> None:
    alone = trace(make(9), 60)
    one, two = make(9), make(10)
    frames = [np.zeros(one.spec.frame_shape, one.spec.frame_dtype) for _ in range(2)]
    actions, ended, seen = np.random.default_rng(0), True, []
    two.reset(frames[1])
    for _ in range(60):
        if ended:
            one.reset(frames[0])
            seen.append((frames[0].tobytes(), "first"))
        outcome = one.step(int(actions.integers(one.spec.actions)), frames[0])
        ended = outcome.terminated or outcome.truncated
        seen.append((frames[0].tobytes(), repr(outcome)))
        other = two.step(0, frames[1])
        if other.terminated or other.truncated:
            two.prepare()
            two.reset(frames[1])
    assert seen == alone


@pytest.mark.parametrize("name", [name for name in sorted(ENVS) if name != "gymnasium"])
def test_pictures_are_for_people(name: str) -> None:
    env = ENVS[name](0)
    trace(env, 3)
    picture = env.render()
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3 and picture.max() > 0
    env.close()

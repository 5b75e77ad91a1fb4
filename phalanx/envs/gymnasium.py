"""Gymnasium environments with discrete actions; `layout` says how what they show becomes a frame.

Episode k of an environment is reset with a seed made of the environment's own seed and k, so that it does not matter
which object plays it: `prepare` resets a twin ahead of time and `reset` takes it over. Gymnasium cannot save a running
episode, so `state` holds the actions taken in it and `restore` plays them again: exact wherever an episode depends on
its seed and actions alone, as it should. An episode longer than `LONGEST_REPLAY` is not saved: resumed, the environment
begins the next one.
"""

from __future__ import annotations

import contextlib
import math
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from phalanx.config import GymnasiumConfig
from phalanx.envs.given import make_env
from phalanx.envs.layout import frame_layout
from phalanx.envs.packages import atari_game, is_atari, register, unregistered
from phalanx.envs.rewards import REWARDS
from phalanx.errors import UserError, in_words
from phalanx.runtime.signals import LEAVING, may_be_ctrl_c
from phalanx.types import EnvSpec, Outcome

LONGEST_REPLAY = 100_000  # steps of an episode that a resumed run plays again: minutes, with a slow simulator
STEP_RETURNS = "5 values (observation, reward, terminated, truncated, info)"
FASTEST_FPS = 1_000  # no environment is meant to be watched at more


def make(name: Any, **arguments: Any) -> Any:
    """A new environment that is registered with Gymnasium, or that a specification of one describes; able to render
    where it knows how to."""
    try:
        import gymnasium
    except ImportError:
        raise UserError(
            "Gymnasium environments need the package gymnasium; install it with: pip install gymnasium"
        ) from None
    if isinstance(name, str) and is_atari(name, gymnasium.registry):
        raise atari_game(name)
    errors = gymnasium.error
    try:
        try:
            return _made(name, arguments)
        except errors.UnregisteredEnv:
            if not register(name):
                raise
            return _made(name, arguments)
    except errors.UnregisteredEnv:
        raise unregistered(name, gymnasium.registry) from None
    except errors.DeprecatedEnv as error:
        raise UserError(f"the Gymnasium environment '{name}' is out of date: {error}") from None
    except (Exception, *LEAVING) as error:  # a constructor is somebody else's code
        if may_be_ctrl_c(error):
            raise
        raise UserError(
            f"the Gymnasium environment '{getattr(name, 'id', name)}' cannot be made: {in_words(error)}"
        ) from error


def _made(name: Any, arguments: dict[str, Any]) -> Any:
    import gymnasium

    env = gymnasium.make(name, disable_env_checker=True, **arguments)
    if "rgb_array" in env.metadata.get("render_modes", ()) and "render_mode" not in arguments:
        env.close()
        env = gymnasium.make(name, disable_env_checker=True, render_mode="rgb_array", **arguments)
    return env


class GymnasiumEnv:
    """One Gymnasium environment, and a twin of it when `prepare` is used."""

    def __init__(self, config: GymnasiumConfig, seed: np.random.SeedSequence) -> None:
        self._config = config
        self._seed = seed
        self._env = make_env(config, make)
        self._twin: Any = None
        self._prepared: np.ndarray | None = None  # first frame of the next episode, which the twin holds
        self._episode = -1
        self._steps = 0  # of the running episode,
        self._actions: list[int] = []  # its actions, as long as it may be played again,
        self._score = 0.0  # and its score
        self.heartbeat: Callable[[], None] = lambda: None
        self._shape_reward = REWARDS[config.reward]
        actions = _action_space(self._env, config.name)
        self.first_action = int(actions.start)
        self.layout = layout = frame_layout(getattr(self._env, "observation_space", None), config.name)
        self.spec = EnvSpec(
            layout.frame_shape,
            layout.frame_dtype,
            int(actions.n),
            bounds=layout.bounds,
            meaning=layout.meaning,
            can_be_drawn=_draws(self._env),
        )

    def reset(self, frame: np.ndarray) -> None:
        """Begin the next episode; take over the twin if it was prepared."""
        self._episode += 1
        self._forget()
        if self._prepared is None:
            self._show(self._begun(self._env, self._episode), frame, "reset")
        else:
            frame[...], self._prepared = self._prepared, None
            self._env, self._twin = self._twin, self._env

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        observation, reward, terminated, truncated = self._advance(int(action))
        self._show(observation, frame, "step")
        score = self._score if terminated or truncated else math.nan
        return Outcome(self._shape_reward(reward), score, terminated, truncated and not terminated)

    def prepare(self) -> None:
        """Reset the twin to the beginning of the next episode."""
        if self._prepared is None:
            if self._twin is None:
                self._twin = make_env(self._config, make)
            frame = np.empty(self.spec.frame_shape, self.spec.frame_dtype)
            self._show(self._begun(self._twin, self._episode + 1), frame, "reset")
            self._prepared = frame

    def render(self) -> np.ndarray:
        """The picture the environment draws of itself."""
        from gymnasium.error import DependencyNotInstalled

        if not self.spec.can_be_drawn:
            raise UserError(
                f"{self._config.name} cannot be drawn: it has no render() for rgb_array; `phalanx eval` plays it "
                "without pictures"
            )
        try:
            picture = self._env.render()
        except (ImportError, DependencyNotInstalled) as error:
            raise UserError(f"the Gymnasium environment '{self._config.id}' cannot be drawn: {error}") from None
        if picture is None:
            raise UserError(f"the Gymnasium environment '{self._config.id}' has no pictures (render mode rgb_array)")
        return np.asarray(picture, np.uint8)

    @property
    def render_fps(self) -> float:
        """Pictures per second at the speed at which people would watch it, as the environment tells."""
        told = self._env.metadata.get("render_fps")
        return float(told) if isinstance(told, int | float | np.number) and 0 < told <= FASTEST_FPS else 15.0

    def state(self) -> dict[str, Any]:
        entropy = self._seed.entropy
        too_long = self._steps > LONGEST_REPLAY
        return {
            "entropy": entropy if isinstance(entropy, int) else [int(word) for word in entropy or ()],
            "spawn_key": [int(key) for key in self._seed.spawn_key],
            "episode": self._episode,
            "actions": np.array([] if too_long else self._actions, np.int32),
            "unsaved": self._steps if too_long else 0,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Play the running episode again up to where it was, unless it is to be followed by the next one."""
        self._seed = np.random.SeedSequence(state["entropy"], spawn_key=tuple(state["spawn_key"]))
        self._episode, self._prepared = state["episode"], None
        self._forget()
        if self._episode >= 0 and not state.get("unsaved"):
            self._begun(self._env, self._episode)
        for action in state["actions"]:
            self._advance(int(action))
            self.heartbeat()

    def close(self) -> None:
        self._env.close()
        if self._twin is not None:
            self._twin.close()

    def _forget(self) -> None:
        """Nothing was done yet in the episode that begins."""
        self._steps, self._actions, self._score = 0, [], 0.0

    def _begun(self, env: Any, episode: int) -> Any:
        """The first observation of an episode."""
        try:
            observation, _ = env.reset(seed=self._episode_seed(episode))
        except (TypeError, ValueError) as error:
            if given := _unpacked_in_vain(error):
                raise UserError(f"{_name(env)}.reset must return 2 values (observation, info), {given}") from None
            raise
        return observation

    def _advance(self, action: int) -> tuple[Any, float, bool, bool]:
        try:
            observation, reward, terminated, truncated, _ = self._env.step(action + self.first_action)
        except (TypeError, ValueError) as error:
            if given := _unpacked_in_vain(error):
                raise UserError(f"{_name(self._env)}.step must return {STEP_RETURNS}, {given}") from None
            raise
        self._steps += 1
        if self._steps <= LONGEST_REPLAY:
            self._actions.append(action)
        reward = self._number(reward)
        self._score += reward
        terminated, truncated = self._flag("terminated", terminated), self._flag("truncated", truncated)
        return observation, reward, terminated, truncated or self._steps == self._config.max_steps

    def _number(self, reward: Any) -> float:
        """The reward, which may be a number of numpy or torch as well."""
        if not isinstance(reward, str | bytes):
            with contextlib.suppress(TypeError, ValueError, RuntimeError):  # whatever cannot be one raises
                return float(reward)
        raise UserError(f"{_name(self._env)}.step returned the reward {_short(reward)}; it must be a number")

    def _flag(self, name: str, value: Any) -> bool:
        """What says whether the episode is over, which may be a number or a single value of an array as well."""
        if value is True or value is False:
            return value
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            if not isinstance(value, str | bytes) and float(value) in (0.0, 1.0):
                return bool(value)
        raise UserError(f"{_name(self._env)}.step returned {_short(value)} as {name}; it must be True or False")

    def _episode_seed(self, episode: int) -> int:
        child = np.random.SeedSequence(self._seed.entropy, spawn_key=(*self._seed.spawn_key, episode))
        return int(child.generate_state(1)[0])

    @property
    def observation_space(self) -> Any:
        return self._env.observation_space

    def _show(self, observation: Any, frame: np.ndarray, call: str) -> None:
        """Write the frame of what that call of the environment returned; what is not of its space is told as such."""
        try:
            self.layout.write(observation, frame)
        except Exception:
            if wrong := self.layout.misfit(observation):
                raise UserError(f"{_name(self._env)}.{call} returned {wrong}") from None
            raise


def _own_layers(env: Any) -> Iterator[Any]:
    """The environment and the wrappers around it, outermost first, without those that Gymnasium brings."""
    from gymnasium import Wrapper

    while True:
        if not type(env).__module__.startswith("gymnasium.wrappers."):
            yield env
        if not isinstance(env, Wrapper):
            return
        env = env.env


def _name(env: Any) -> str:
    """Of the class that is to be looked into, should the environment do something wrong."""
    return type(next(_own_layers(env))).__name__


def _short(value: Any) -> str:
    """What an environment returned, on one line."""
    return textwrap.shorten(repr(value), 80, placeholder=" ...") or type(value).__name__


def _unpacked_in_vain(error: Exception) -> str:
    """What an environment returned where Gymnasium wants another number of values; empty for errors of its own code."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = "" if place is None else place.tb_frame.f_globals.get("__name__", "")
    if "unpack" not in str(error) or not (module == __name__ or module.startswith("gymnasium.")):
        return ""
    if other := re.search(r"cannot unpack non-iterable (\S+)", str(error)):
        return f"not one {other[1]}"
    count = re.search(r"got (\d+)", str(error))
    return f"not {count[1]}" if count else "not more"


def _draws(env: Any) -> bool:
    """Does anybody draw it? Gymnasium's base classes do not, nor does who knows modes and was made with none."""
    from gymnasium import Env, Wrapper

    modes = (getattr(env, "metadata", None) or {}).get("render_modes")
    asked = getattr(getattr(env, "spec", None), "kwargs", {}).get("render_mode")  # which not every class keeps
    if modes and getattr(env, "render_mode", None) is None and asked is None:
        return False
    nobody = (None, Env.render, Wrapper.render)
    return any(getattr(type(layer), "render", None) not in nobody for layer in _own_layers(env))


def _action_space(env: Any, name: str) -> Any:
    """The environment's discrete actions, or a UserError that says what to do with others."""
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    space = getattr(env, "action_space", None)
    if isinstance(space, Discrete):
        return space
    if isinstance(space, Box):
        raise UserError(
            f"{name} has continuous actions, {space}, but only discrete actions are supported; wrap it so that it "
            "offers a number of them to choose from (gymnasium.spaces.Discrete)"
        )
    if isinstance(space, MultiDiscrete | MultiBinary):
        raise UserError(
            f"{name} takes several choices at each step, {space}, but only one discrete action is supported; wrap it "
            "so that each combination is one (gymnasium.spaces.Discrete)"
        )
    raise UserError(f"{name} has the action space {space}, but only discrete actions are supported")

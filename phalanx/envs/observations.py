"""Observations that somebody else's loop took from an environment, as the frames that phalanx would have made of them.

An agent that is served (`phalanx/agent.py`) gets what a user's environment shows: one observation, or those of several
environments at once. A reader knows by their shape which it is, and writes one frame for each environment.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from phalanx.config import AtariConfig
from phalanx.envs import Env
from phalanx.envs.screen import AreaScreen, HalfScreen, palette
from phalanx.errors import UserError, require


class Reader(Protocol):
    """Reads the observations of one kind of environment."""

    def count(self, observation: Any) -> int | None:
        """How many environments they are of; None: a single one, not in a batch."""

    def write(self, observation: Any, row: int | None, frame: np.ndarray) -> None:
        """The frame of one of them."""


class SpaceReader:
    """Of Gymnasium environments, by their observation space."""

    def __init__(self, env: Any) -> None:
        self.space = env.observation_space
        self.layout = env.layout

    def count(self, observation: Any) -> int | None:
        return rows_in(self.space, observation)

    def write(self, observation: Any, row: int | None, frame: np.ndarray) -> None:
        one = observation if row is None else row_of(self.space, observation, row)
        require_bytes(self.layout.shown(one), frame)
        self.layout.write(one, frame)


class FrameReader:
    """Of environments of phalanx itself, whose observations are frames."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def count(self, observation: Any) -> int | None:
        return rows_of_shape(np.shape(observation), self.shape)

    def write(self, observation: Any, row: int | None, frame: np.ndarray) -> None:
        one = observation if row is None else observation[row]
        require_bytes(one, frame)
        frame[...] = one


class AtariReader:
    """Of Atari games: whole screens, in colour or grey, of which the frames are made as in training; or these frames.

    A screen is a single one where training may have taken the maximum of two. The agent then misses what flickers.
    """

    def __init__(self, config: AtariConfig, frame_shape: tuple[int, ...], screen: AreaScreen | HalfScreen) -> None:
        rows = screen.screens.shape[1]
        self.screen = screen
        self.takes = {
            "screens in colour": (rows, 160, 3),
            **({"grey screens": (rows, 160)} if config.color == "gray" else {}),
            "frames": frame_shape,
        }
        self.indices = _Indices(rows)

    def count(self, observation: Any) -> int | None:
        shape = np.shape(observation)
        if shape in self.takes.values():
            return None
        require(shape[1:] in self.takes.values(), f"{_refusal(shape)}; known are {self._known()}, or a batch of these")
        return shape[0]

    def write(self, observation: Any, row: int | None, frame: np.ndarray) -> None:
        pixels = np.asarray(observation if row is None else observation[row])
        require_bytes(pixels, frame)
        if pixels.shape == frame.shape:
            frame[...] = pixels
            return
        self.screen.screens[...] = self.indices.of_colors(pixels) if pixels.ndim == 3 else self.indices.of_grey(pixels)
        self.screen.write(frame)

    def _known(self) -> str:
        return ", ".join(f"{what} {shape}" for what, shape in self.takes.items())


class _Indices:
    """From what the emulator shows back to its palette indices."""

    def __init__(self, rows: int) -> None:
        colors = palette(rows)
        order = np.concatenate([np.arange(0, 256, 2), np.arange(1, 256, 2)])  # odd ones are hardly ever shown
        self.known, first = np.unique(_packed(colors.rgb[order]), return_index=True)
        self.by_color = order[first].astype(np.uint8)
        self.greys, first = np.unique(colors.grey[order], return_index=True)
        self.by_grey = order[first].astype(np.uint8)

    def of_colors(self, pixels: np.ndarray) -> np.ndarray:
        return _looked_up(_packed(pixels), self.known, self.by_color)

    def of_grey(self, pixels: np.ndarray) -> np.ndarray:
        return _looked_up(pixels, self.greys, self.by_grey)


def reader_of(config: Any, env: Env) -> Reader:
    """What reads the observations of an environment, of which `env` is one."""
    if isinstance(config, AtariConfig):
        from phalanx.envs.atari import AtariEnv

        assert isinstance(env, AtariEnv)
        return AtariReader(config, env.spec.frame_shape, env.new_screen())
    return SpaceReader(env) if hasattr(env, "observation_space") else FrameReader(env.spec.frame_shape)


def require_bytes(numbers: Any, frame: np.ndarray) -> None:
    """Refuse what would be torn by writing it into a frame of bytes."""
    if frame.dtype != np.uint8 or (values := np.asarray(numbers)).dtype in (np.uint8, bool):
        return
    require(
        bool(((values >= 0) & (values <= 255) & (values == np.floor(values))).all()),
        f"the observation has numbers from {values.min():g} to {values.max():g}, but the agent was trained on bytes; "
        "give whole numbers from 0 to 255, as the environment does, not scaled",
    )


def rows_in(space: Any, observation: Any) -> int | None:
    """How many environments the observations of a Gymnasium space are of; None: a single one."""
    parts = _parts(space)
    if parts is None:
        return rows_of_shape(np.shape(observation), tuple(space.shape))
    try:
        counts = {rows_in(part, observation[key]) for key, part in parts}
    except (KeyError, IndexError, TypeError):
        raise UserError(f"the observation lacks parts of {space}; give it as the environment does") from None
    require(len(counts) == 1, "the parts of the observation are of different numbers of environments")
    return counts.pop()


def row_of(space: Any, observation: Any, row: int) -> Any:
    """One environment's part of the observations of a space."""
    parts = _parts(space)
    if parts is None:
        return observation[row]
    rows = {key: row_of(part, observation[key], row) for key, part in parts}
    return rows if hasattr(space.spaces, "items") else tuple(rows.values())


def rows_of_shape(shape: tuple[int, ...], single: tuple[int, ...]) -> int | None:
    if shape == single:
        return None
    if shape[1:] == single and shape:
        return shape[0]
    batch = ", ".join(map(str, ("N", *single)))
    raise UserError(f"{_refusal(shape)}; one has the shape {single}, and a batch of N the shape ({batch})")


def _parts(space: Any) -> list[tuple[Any, Any]] | None:
    """The spaces that a Dict or a Tuple is made of, by their keys."""
    inner = getattr(space, "spaces", None)
    if inner is None:
        return None
    return list(inner.items()) if hasattr(inner, "items") else list(enumerate(inner))


def _refusal(shape: tuple[int, ...]) -> str:
    return f"this agent cannot take observations of shape {shape}"


def _packed(colors: np.ndarray) -> np.ndarray:
    """[..., 3] bytes as one number each."""
    red, green, blue = np.moveaxis(colors.astype(np.uint32), -1, 0)
    return (red << 16) | (green << 8) | blue


def _looked_up(values: np.ndarray, known: np.ndarray, indices: np.ndarray) -> np.ndarray:
    places = np.searchsorted(known, values).clip(max=len(known) - 1)
    require(
        bool((known[places] == values).all()),
        "the screen has colours that the emulator does not show; give it as the emulator does, not resized or scaled",
    )
    return indices[places]

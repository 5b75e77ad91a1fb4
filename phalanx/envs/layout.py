"""From what a Gymnasium environment shows to the frame a network sees: an image, or a vector of numbers.

`GymnasiumEnv` writes frames by a `FrameLayout`, and so does whoever acts on raw observations. What becomes an image and
what a vector is told in docs/environments.md.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.errors import UserError

FAR = 1e9  # bounds further apart than this say nothing about the numbers between them


@dataclass(frozen=True)
class FrameLayout:
    """How one observation of an environment becomes one frame."""

    space: Any  # of the part that is shown,
    keys: tuple[Any, ...]  # which lies under these in the whole observation
    frame_shape: tuple[int, ...]  # (channels, height, width), or (size,) for a vector
    frame_dtype: np.dtype
    meaning: str  # in words, for people
    axes: tuple[int, ...] | None = None  # the order that puts an image's channels first
    bounds: tuple[float, float] | None = None  # see EnvSpec
    is_flattened: bool = False  # by Gymnasium

    def write(self, observation: Any, frame: np.ndarray) -> None:
        """Write the frame of an observation into `frame`."""
        observation = self.shown(observation)
        if self.is_flattened:
            from gymnasium.spaces import flatten

            frame[...] = flatten(self.space, observation)
        elif self.axes is None:
            frame[...] = np.asarray(observation).reshape(frame.shape)
        else:
            frame[...] = np.asarray(observation).transpose(self.axes)

    def shown(self, observation: Any) -> Any:
        """The part of an observation that the frame is made of."""
        for key in self.keys:
            observation = observation[key]
        return observation

    def frame(self, observation: Any) -> np.ndarray:
        """The frame of an observation, in memory of its own."""
        frame = np.empty(self.frame_shape, self.frame_dtype)
        self.write(observation, frame)
        return frame

    def misfit(self, observation: Any) -> str:
        """What is wrong with an observation that could not be written; empty where it is of the space."""
        for key in self.keys:
            try:
                observation = observation[key]
            except (IndexError, KeyError, TypeError):
                return f"an observation without {key!r}, which its observation_space has"
        with contextlib.suppress(Exception):  # what is no observation at all may fail in any way
            if self.is_flattened:
                shown = _shortened(" ".join(repr(observation).split()))
                fits = self.space.contains(observation)
                return "" if fits else f"{shown}, but its observation_space is {_shortened(str(self.space))}"
            shape, right = np.shape(observation), tuple(self.space.shape)
            if shape != right:
                return f"an observation of shape {shape}, but its observation_space has {right}"
        return ""


def frame_layout(space: Any, name: str) -> FrameLayout:
    """How the observations of an environment of this space become frames; a UserError says why they cannot. `name` is
    the environment's, for the sentence."""
    from gymnasium.spaces import Space

    if not isinstance(space, Space):
        raise UserError(f"{name} has the observation space {space}, but phalanx needs one of gymnasium.spaces")
    keys: tuple[Any, ...] = ()
    while len(inner := parts(space)) == 1:  # a Dict or Tuple of one thing is that thing
        key, space = inner[0]
        keys = (*keys, key)
    if is_image(space):
        return _image(space, keys, name)
    images = [(key, part) for key, part in leaves(space) if is_image(part)]
    if images:
        shown = " and ".join(f"{key} ({_size(part)})" for key, part in images)
        others = [key for key, part in leaves(space) if not is_image(part)]
        beside = f"{shown} beside {', '.join(others)}" if others else shown
        raise UserError(
            f"{name} shows {beside}, but phalanx learns from one image or from one vector; keep one image with a "
            "wrapper, such as --env.wrap phalanx.envs.wrappers:image_only"
        )
    return _vector(space, keys, name)


def _image(space: Any, keys: tuple[Any, ...], name: str) -> FrameLayout:
    """An image [height, width], [height, width, channels] or [channels, height, width]."""
    _require_numbers(space, name)
    shape, where = tuple(space.shape), ""
    low, high = float(np.min(space.low)), float(np.max(space.high))
    axes: tuple[int, ...] | None = None
    if len(shape) == 2:
        frame_shape: tuple[int, ...] = (1, *shape)
    elif _channels_first(shape):
        frame_shape, where = shape, ", which come first"
    else:
        frame_shape, axes, where = (shape[2], *shape[:2]), (2, 0, 1), ", which come last"
    is_whole = space.dtype == bool or np.issubdtype(space.dtype, np.integer)
    as_bytes = is_whole and 0 <= low <= high <= 255
    if as_bytes and low == high:
        low, high = 0.0, 255.0
    known = math.isfinite(low) and math.isfinite(high) and 0 < high - low <= FAR
    bounds = (low, high) if known and not (as_bytes and (low, high) == (0, 255)) else None
    numbers = "bytes" if as_bytes else "floats"
    scaled = f"from {low:g} to {high:g}" if known else "taken as they are, for their bounds are not known"
    channels, height, width = frame_shape
    meaning = f"an image of {height}x{width} with {channels} channel(s){where}; {numbers} {scaled}"
    dtype = np.dtype(np.uint8 if as_bytes else np.float32)
    return FrameLayout(space, keys, frame_shape, dtype, meaning, axes, bounds)


def _vector(space: Any, keys: tuple[Any, ...], name: str) -> FrameLayout:
    """Whatever Gymnasium flattens: numbers one after the other, choices one-hot."""
    from gymnasium.spaces import flatdim

    if _is_box(space):
        _require_numbers(space, name)
        if space.dtype == np.uint8 and len(space.shape) > 3:
            raise UserError(
                f"{name} shows several images at once, of shape {space.shape}; leave out the wrapper that stacks them "
                "and use --env.stack"
            )
        meaning = f"a vector of {math.prod(space.shape)} number(s), taken as they are"
        return FrameLayout(space, keys, (math.prod(space.shape),), np.dtype(np.float32), meaning)
    odd = [f"{key} ({type(part).__name__})" if key else type(part).__name__ for key, part in _odd(space)]
    if odd:
        raise UserError(
            f"{name} shows {', '.join(odd)}, which Gymnasium does not flatten into numbers; wrap it so that it shows "
            "numbers"
        )
    size = flatdim(space)
    if not size:
        raise UserError(f"{name} has the observation space {space}, which shows nothing")
    meaning = f"a vector of {size} number(s): {_shortened(str(space))}, flattened"
    return FrameLayout(space, keys, (size,), np.dtype(np.float32), meaning, is_flattened=True)


def _require_numbers(space: Any, name: str) -> None:
    if math.prod(space.shape) == 0:
        raise UserError(f"{name} has the observation space {space} of shape {space.shape}, which shows nothing")


def _channels_first(shape: tuple[int, ...]) -> bool:
    """Of the three axes of an image: the two that are equal are its sides; else channels are the fewer of both ends."""
    first, middle, last = shape
    if (first == middle) != (middle == last):
        return middle == last
    return first < last


def is_image(space: Any) -> bool:
    """Three axes, or two of bytes or booleans."""
    return _is_box(space) and (len(space.shape) == 3 or (len(space.shape) == 2 and space.dtype in (np.uint8, bool)))


def _is_box(space: Any) -> bool:
    from gymnasium.spaces import Box

    return isinstance(space, Box)


def _is_dict(space: Any) -> bool:
    from gymnasium.spaces import Dict

    return isinstance(space, Dict)


def parts(space: Any) -> list[tuple[Any, Any]]:
    """Key and space of each part of a Dict or Tuple, in Gymnasium's order; none of other spaces."""
    from gymnasium.spaces import Tuple

    if _is_dict(space):
        return list(space.spaces.items())
    return list(enumerate(space.spaces)) if isinstance(space, Tuple) else []


def leaves(space: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Every innermost part, with the keys that lead to it in words."""
    inner = parts(space)
    if not inner:
        yield path, space
    for key, part in inner:
        yield from leaves(part, f"{path}.{key}" if path else str(key))


def _odd(space: Any) -> list[tuple[str, Any]]:
    """The innermost parts that are no numbers of a fixed count."""
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    return [
        (key, part) for key, part in leaves(space) if not isinstance(part, Box | Discrete | MultiBinary | MultiDiscrete)
    ]


def _size(space: Any) -> str:
    return "x".join(map(str, space.shape))


def _shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[:most]}..."

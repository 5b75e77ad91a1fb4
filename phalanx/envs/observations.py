"""From what a Gymnasium environment shows to the frame a network sees: an image, or a vector of numbers.

`GymnasiumEnv` writes frames by a `FrameLayout` in workers; whoever acts on raw observations (a loaded agent) makes the
same frames with it. What becomes an image and what a vector is told in docs/environments.md, which users read.
"""

from __future__ import annotations

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

    def write(self, observation: Any, frame: np.ndarray) -> None:
        """Write the frame of an observation into `frame`."""
        for key in self.keys:
            observation = observation[key]
        if not _is_box(self.space):
            from gymnasium.spaces import flatten

            frame[...] = flatten(self.space, observation)
        elif self.axes is None:
            frame[...] = np.asarray(observation).reshape(frame.shape)
        else:
            frame[...] = np.asarray(observation).transpose(self.axes)

    def frame(self, observation: Any) -> np.ndarray:
        """The frame of an observation, in memory of its own."""
        frame = np.empty(self.frame_shape, self.frame_dtype)
        self.write(observation, frame)
        return frame

    def frames(self, observations: Any) -> np.ndarray:
        """[N, *frame] of the observations that a vector environment of N shows, or of a list of N."""
        rows = observations if isinstance(observations, list) else _rows(observations)
        return np.stack([self.frame(row) for row in rows])

    def is_batch(self, observation: Any) -> bool:
        """Does this hold the observations of several environments?"""
        if isinstance(observation, list) and observation and not np.isscalar(observation[0]):
            return True
        for key in self.keys:
            observation = observation[key]
        space, part = self.space, observation
        while not hasattr(space, "n") and not _has_shape(space):  # Dict and Tuple are batched in each of their parts
            key = next(iter(space.spaces)) if _is_dict(space) else 0
            space, part = space[key], part[key]
        extra = np.ndim(part) - len(space.shape)
        if extra not in (0, 1) or (np.shape(part)[extra:] != tuple(space.shape)):
            raise UserError(
                f"an observation of shape {np.shape(part)} is none of this environment, whose observations are of "
                f"shape {tuple(space.shape)}, and (N, ...) those of N environments"
            )
        return extra == 1


def frame_layout(space: Any, name: str) -> FrameLayout:
    """How the observations of an environment of this space become frames; a UserError says why they cannot. `name` is
    the environment's, for the sentence."""
    from gymnasium.spaces import Space

    if not isinstance(space, Space):
        raise UserError(f"{name} has the observation space {space}, but phalanx needs one of gymnasium.spaces")
    keys: tuple[Any, ...] = ()
    while len(parts := _parts(space)) == 1:  # a Dict or Tuple of one thing is that thing
        key, space = parts[0]
        keys = (*keys, key)
    if _is_image(space):
        return _image(space, keys, name)
    images = [(key, part) for key, part in _leaves(space) if _is_image(part)]
    if images:
        shown = " and ".join(f"{key} ({_size(part)})" for key, part in images)
        others = [key for key, part in _leaves(space) if not _is_image(part)]
        beside = f"{shown} beside {', '.join(others)}" if others else shown
        raise UserError(
            f"{name} shows {beside}, but phalanx learns from one image or from one vector; keep one image with a "
            "wrapper such as phalanx.envs.observations:image_only"
        )
    return _vector(space, keys, name)


def image_only(env: Any) -> Any:
    """A wrapper for environments that show one image beside other things: the image alone."""
    from gymnasium import ObservationWrapper

    space, keys = env.observation_space, []
    while not _is_image(space):
        inner = [(key, part) for key, part in _parts(space) if any(_is_image(leaf) for _, leaf in _leaves(part))]
        if len(inner) != 1:
            count = "no image" if not inner else "several images"
            raise UserError(f"image_only needs an environment that shows one image, but this one shows {count}")
        key, space = inner[0]
        keys.append(key)

    class ImageOnly(ObservationWrapper):
        observation_space = space

        def observation(self, observation: Any) -> Any:
            for key in keys:
                observation = observation[key]
            return observation

    return ImageOnly(env)


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
    return FrameLayout(space, keys, (size,), np.dtype(np.float32), meaning)


def _require_numbers(space: Any, name: str) -> None:
    if math.prod(space.shape) == 0:
        raise UserError(f"{name} has the observation space {space} of shape {space.shape}, which shows nothing")


def _channels_first(shape: tuple[int, ...]) -> bool:
    """Of the three axes of an image: the two that are equal are its sides; else channels are the fewer of both ends."""
    first, middle, last = shape
    if (first == middle) != (middle == last):
        return middle == last
    return first < last


def _is_image(space: Any) -> bool:
    """Three axes, or two of bytes or booleans."""
    return _is_box(space) and (len(space.shape) == 3 or (len(space.shape) == 2 and space.dtype in (np.uint8, bool)))


def _is_box(space: Any) -> bool:
    from gymnasium.spaces import Box

    return isinstance(space, Box)


def _is_dict(space: Any) -> bool:
    from gymnasium.spaces import Dict

    return isinstance(space, Dict)


def _has_shape(space: Any) -> bool:
    return getattr(space, "shape", None) is not None


def _parts(space: Any) -> list[tuple[Any, Any]]:
    """Key and space of each part of a Dict or Tuple, in Gymnasium's order; none of other spaces."""
    from gymnasium.spaces import Tuple

    if _is_dict(space):
        return list(space.spaces.items())
    return list(enumerate(space.spaces)) if isinstance(space, Tuple) else []


def _leaves(space: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    """Every innermost part, with the keys that lead to it in words."""
    parts = _parts(space)
    if not parts:
        yield path, space
    for key, part in parts:
        yield from _leaves(part, f"{path}.{key}" if path else str(key))


def _odd(space: Any) -> list[tuple[str, Any]]:
    """The innermost parts that are no numbers of a fixed count."""
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    return [
        (key, part)
        for key, part in _leaves(space)
        if not isinstance(part, Box | Discrete | MultiBinary | MultiDiscrete)
    ]


def _size(space: Any) -> str:
    return "x".join(map(str, space.shape))


def _shortened(text: str, most: int = 100) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _rows(observations: Any) -> list[Any]:
    """The observations that stand one behind the other in each part."""
    if isinstance(observations, dict):
        columns = {key: _rows(part) for key, part in observations.items()}
        count = len(next(iter(columns.values())))
        return [{key: column[row] for key, column in columns.items()} for row in range(count)]
    if isinstance(observations, tuple):
        return list(zip(*(_rows(part) for part in observations), strict=True))
    return list(observations)

"""Frames of raw observations: as Gymnasium flattens them, images channels first."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, flatten
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.envs.layout import frame_layout
from phalanx.envs.wrappers import image_only
from phalanx.errors import UserError

LEAVES = st.one_of(
    st.builds(Discrete, st.integers(1, 5), start=st.integers(-2, 3)),
    st.builds(MultiDiscrete, st.lists(st.integers(1, 4), min_size=1, max_size=3)),
    st.builds(MultiBinary, st.integers(1, 4)),
    st.builds(Box, st.just(-1.0), st.just(1.0), st.sampled_from([(3,), (2, 2), ()])),
)
SPACES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(Dict, st.dictionaries(st.sampled_from("abc"), inner, min_size=1)),
        st.builds(Tuple, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=5,
)


@settings(max_examples=60, deadline=None)
@given(space=SPACES, seed=st.integers(0, 1000))
def test_frames_are_as_gymnasium_flattens_them(space: Any, seed: int) -> None:
    space.seed(seed)
    layout, observation = frame_layout(space, "Some-v0"), space.sample()
    expected = np.asarray(flatten(space, observation), np.float32).reshape(-1)
    assert layout.frame_shape == expected.shape and layout.bounds is None
    assert np.array_equal(layout.frame(observation), expected)


@pytest.mark.parametrize(
    ("space", "frame_shape", "dtype", "bounds"),
    [
        (Box(0, 255, (84, 84, 3), np.uint8), (3, 84, 84), np.uint8, None),
        (Box(0, 255, (4, 84, 84), np.uint8), (4, 84, 84), np.uint8, None),
        (Box(0, 255, (20, 7, 7), np.uint8), (20, 7, 7), np.uint8, None),
        (Box(0, 255, (7, 7, 20), np.uint8), (20, 7, 7), np.uint8, None),
        (Box(0, 255, (60, 80, 3), np.int64), (3, 60, 80), np.uint8, None),
        (Box(0, 10, (7, 7, 3), np.uint8), (3, 7, 7), np.uint8, (0.0, 10.0)),
        (Box(0, 1, (10, 10, 4), bool), (4, 10, 10), np.uint8, (0.0, 1.0)),
        (Box(-2.0, 6.0, (9, 8, 1), np.float64), (1, 9, 8), np.float32, (-2.0, 6.0)),
        (Box(-5, 900, (9, 8, 1), np.int32), (1, 9, 8), np.float32, (-5.0, 900.0)),
        (Box(-np.inf, np.inf, (9, 8, 1), np.float32), (1, 9, 8), np.float32, None),
        (Box(-3e38, 3e38, (9, 8, 1), np.float32), (1, 9, 8), np.float32, None),
        (Dict({"only": Tuple((Box(0, 255, (8, 6), np.uint8),))}), (1, 8, 6), np.uint8, None),
    ],
)
def test_images_come_channels_first_within_their_bounds(
    space: Any, frame_shape: tuple[int, ...], dtype: Any, bounds: Any
) -> None:
    layout = frame_layout(space, "Some-v0")
    assert (layout.frame_shape, layout.frame_dtype, layout.bounds) == (frame_shape, dtype, bounds)
    observation = pixels = space.sample()
    while isinstance(pixels, dict | tuple):
        pixels = pixels["only"] if isinstance(pixels, dict) else pixels[0]
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.shape != frame_shape:
        pixels = np.moveaxis(pixels, -1, 0)
    assert np.array_equal(layout.frame(observation), pixels.astype(dtype))


class Showing(gymnasium.Env):
    """Shows the samples of a space."""

    def __init__(self, space: Any) -> None:
        self.observation_space, self.action_space = space, Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.shown = self.observation_space.sample()
        return self.shown, {}


def test_image_only_keeps_the_one_image() -> None:
    image = Box(0, 255, (7, 7, 3), np.uint8)
    wrapped = image_only(
        env := Showing(Dict({"seen": Dict({"image": image, "kind": Discrete(3)}), "way": Discrete(4)}))
    )
    assert wrapped.observation_space == image
    assert np.array_equal(wrapped.reset()[0], env.shown["seen"]["image"])


@pytest.mark.parametrize(
    ("space", "count"),
    [
        (Dict({"a": Discrete(2), "b": Discrete(3)}), "no image"),
        (Tuple((Box(0, 255, (8, 8), np.uint8), Box(0, 255, (8, 8), np.uint8))), "several images"),
    ],
)
def test_image_only_needs_one_image(space: Any, count: str) -> None:
    with pytest.raises(UserError, match=f"this one shows {count}"):
        image_only(Showing(space))

"""Convolutions fitted to images of any size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx.config import ModelConfig
from phalanx.models.architectures import CONVOLUTIONS, Convolution, chosen_torso, describe, fitted_convolutions
from phalanx.models.torsos import ConvTorso, make_torso, output_size
from phalanx.types import EnvSpec

FITTED = ModelConfig(torso="fitted")


def images(*shape: int, dtype: Any = np.uint8, bounds: Any = None) -> EnvSpec:
    return EnvSpec(shape, np.dtype(dtype), 3, bounds=bounds)


@pytest.mark.parametrize("size", [(84, 84), (64, 64), (104, 80)])
def test_large_images_get_the_nature_network(size: tuple[int, int]) -> None:
    assert fitted_convolutions(*size) == CONVOLUTIONS["nature"]


@pytest.mark.parametrize("size", [(7, 7), (10, 10), (1, 1), (12, 5)])
def test_small_images_are_seen_pixel_by_pixel(size: tuple[int, int]) -> None:
    assert fitted_convolutions(*size) == (Convolution(16, 3), Convolution(32, 3))


@pytest.mark.parametrize(
    ("least", "most", "kernels"),
    [(1, 12, (3, 3)), (13, 27, (4, 3)), (28, 35, (4, 4, 3)), (36, 55, (8, 3)), (56, 115, (8, 4, 3))],
)
def test_sizes_are_those_of_the_table_in_the_documents(least: int, most: int, kernels: tuple[int, ...]) -> None:
    for size in (least, most):
        for layers in (fitted_convolutions(size, 1), fitted_convolutions(1, size)):
            assert tuple(layer.kernel for layer in layers) == kernels
    assert len(fitted_convolutions(116, 116)) == 4


@settings(max_examples=150, deadline=None)
@given(height=st.integers(1, 700), width=st.integers(1, 700))
def test_every_size_fits_and_is_made_small(height: int, width: int) -> None:
    spec = images(3, height, width)
    with torch.device("meta"):
        torso = make_torso(replace(FITTED, hidden=8, init="fan-in"), spec, 1)
    assert isinstance(torso, ConvTorso)
    assert max(output_size(torso.layers, torso.pads, spec)) <= 10
    for layer, (left, right, top, bottom) in zip(torso.layers, torso.pads, strict=True):
        assert max(left, right, top, bottom) < layer.kernel
        assert layer.stride <= layer.kernel  # no pixel is left out


@pytest.mark.parametrize("shape", [(3, 7, 7), (4, 10, 10), (1, 5, 100), (3, 64, 64), (2, 1, 2), (1, 36, 20)])
def test_the_network_is_the_plain_one_with_the_zeros_that_lack(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    torso = make_torso(replace(FITTED, init="fan-in"), images(*shape), 2)
    assert isinstance(torso, ConvTorso)
    stacks = torch.randint(0, 256, (3, 2, *shape), dtype=torch.uint8)
    x = stacks.flatten(1, 2) / 255
    for layer, convolution in zip(torso.layers, torso.convolutions, strict=True):
        lack = [max(layer.kernel - size, 0) for size in (x.shape[3], x.shape[2])]
        pads = [half for total in lack for half in (total // 2, total - total // 2)]
        x = F.relu(F.conv2d(F.pad(x, pads), convolution.weight, convolution.bias, layer.stride))  # type: ignore[arg-type]
    expected = F.relu(torso.dense(x.permute(0, 2, 3, 1).flatten(1)))
    features = torso(stacks, torch.full((3,), 2, dtype=torch.uint8))
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "bounds", "scale", "expected"),
    [
        (np.uint8, None, "unit", (0.0, 1.0)),
        (np.uint8, (0.0, 10.0), "unit", (0.0, 25.5)),
        (np.float32, (-5.0, 15.0), "unit", (0.25, 13.0)),
        (np.float32, (-5.0, 15.0), "centred", (-0.5, 25.0)),
        (np.float32, None, "unit", (0.0, 255.0)),
    ],
)
@pytest.mark.parametrize("torso", ["fitted", "mlp"])
def test_images_are_scaled_by_their_bounds(dtype: Any, bounds: Any, scale: Any, expected: Any, torso: Any) -> None:
    """The features of 0 and 255 are those of what these numbers are scaled to."""
    config = ModelConfig(torso=torso, hidden=8, scale=scale, init="fan-in")
    history = torch.ones(1, dtype=torch.uint8)
    torch.manual_seed(0)
    scaled = make_torso(config, images(1, 6, 6, dtype=dtype, bounds=bounds), 1)
    plain = make_torso(config, images(1, 6, 6, dtype=np.float32), 1)
    plain.load_state_dict(scaled.state_dict())
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    for number, seen in zip((0, 255), expected, strict=True):
        shown = scaled(torch.full((1, 1, 1, 6, 6), number, dtype=kind), history)
        torch.testing.assert_close(shown, plain(torch.full((1, 1, 1, 6, 6), seen), history), atol=1e-4, rtol=1e-4)


def test_auto_chooses_by_what_is_seen_and_says_why() -> None:
    auto, vectors = ModelConfig(torso="auto"), EnvSpec((5,), np.float32, 2)
    assert (chosen_torso(auto, vectors), chosen_torso(auto, images(3, 7, 7))) == ("mlp", "fitted")
    assert describe(auto, vectors) == "mlp (auto: frames are vectors), two layers of 64"
    assert describe(auto, images(3, 7, 7)) == (
        "fitted (auto: frames are images of 7x7 with 3 channel(s)), convolutions 16 of 3x3 then 32 of 3x3, "
        "one layer of 128"
    )
    assert describe(ModelConfig(width=2, hidden=9), images(1, 84, 84)) == (
        "nature, convolutions 64 of 8x8, stride 4 then 128 of 4x4, stride 2 then 128 of 3x3, one layer of 9"
    )

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from phalanx.config import ModelConfig
from phalanx.errors import UserError
from phalanx.models.torsos import (
    ConvTorso,
    MlpTorso,
    convert_on_device,
    convert_on_host,
    initialise,
    make_torso,
    network_input,
)
from phalanx.types import EnvSpec

SPEC = EnvSpec(frame_shape=(1, 84, 84), frame_dtype=np.uint8, actions=6)


def spec(*frame: int, dtype: Any = np.uint8) -> EnvSpec:
    return EnvSpec(frame_shape=frame, frame_dtype=dtype, actions=6)


def batch(rows: int, stack: int, frame: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Stacks as an overlapping view of a rollout's frames, and histories of every length."""
    generator = torch.Generator().manual_seed(seed)
    frames = torch.randint(0, 256, (stack + 2, rows, *frame), dtype=torch.uint8, generator=generator)
    time, row, *rest = frames.stride()
    stacks = frames.as_strided((rows, stack, *frame), (row, time, *rest), storage_offset=time)
    history = torch.randint(1, stack + 1, (rows,), dtype=torch.uint8, generator=generator)
    return stacks, history


def zeroed(stacks: Tensor, history: Tensor) -> Tensor:
    """The slow reference: float frames with the invalid older ones set to zero, one by one."""
    plain = stacks.float().clone(memory_format=torch.contiguous_format)
    for row, valid in enumerate(history.tolist()):
        plain[row, : stacks.shape[1] - valid] = 0
    return plain


@pytest.mark.parametrize("convert", [convert_on_host, convert_on_device])
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 5),
    stack=st.integers(1, 4),
    planes=st.sampled_from([1, 3]),
    size=st.sampled_from([(8, 12), (5, 4), (7, 6)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_network_input_equals_explicitly_zeroed_frames(
    convert: Callable[..., Tensor],
    rows: int,
    stack: int,
    planes: int,
    size: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> None:
    stacks, history = batch(rows, stack, (planes, *size), seed)
    expected = zeroed(stacks, history).flatten(1, 2)
    untouched = stacks.clone()
    x = convert(stacks, history, dtype, 1)
    assert x.dtype == dtype and x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x.float(), expected)
    for fold in (2, 4):
        if size[1] % fold == 0:
            folded = convert(stacks, history, dtype, fold)
            assert folded.is_contiguous(memory_format=torch.channels_last)
            unfolded = expected.view(rows, stack * planes, size[0], -1, fold).permute(0, 1, 4, 2, 3)
            assert torch.equal(folded.float(), unfolded.flatten(1, 2))
    assert torch.equal(stacks, untouched)


def test_network_input_takes_bytes_that_do_not_lie_in_fours() -> None:
    wide = torch.randint(0, 256, (3, 2, 1, 8, 13), dtype=torch.uint8)
    stacks, history = wide[..., 1:], torch.tensor([2, 1, 2], dtype=torch.uint8)
    assert torch.equal(
        network_input(stacks, history, torch.float32, fold=4),
        network_input(stacks.contiguous(), history, torch.float32, fold=4),
    )


def test_float_frames_are_not_written_to() -> None:
    stacks, history = torch.rand(2, 2, 1, 5, 5), torch.tensor([1, 2], dtype=torch.uint8)
    before = stacks.clone()
    x = network_input(stacks, history, torch.float32)
    assert torch.equal(stacks, before)
    assert torch.equal(x, zeroed(stacks, history).flatten(1, 2))


def plain_forward(torso: ConvTorso, pixels: Tensor, paddings: list[Any], strides: list[int], pools: int = 0) -> Tensor:
    """The network as textbooks write it, on float pixels [N, C, H, W]."""
    x = pixels
    parts = zip(torso.convolutions, torso.blocks, paddings, strides, strict=True)
    for index, (convolution, blocks, padding, stride) in enumerate(parts):
        if isinstance(padding, tuple):
            x, padding = F.pad(x, padding), 0
        x = F.conv2d(x, convolution.weight, convolution.bias, stride, padding)  # type: ignore[arg-type]
        x = F.max_pool2d(x, 2) if index < pools else x
        for block in cast(nn.Sequential, blocks):
            x = x + cast(Any, block).outer(F.relu(cast(Any, block).inner(F.relu(x))))
        x = F.relu(x)
    return F.relu(torso.dense(x.permute(0, 2, 3, 1).flatten(1)))


NETWORKS: list[tuple[ModelConfig, EnvSpec, list[Any], list[int], int]] = [
    (ModelConfig(torso="nips"), SPEC, [0, 0], [4, 2], 0),
    (ModelConfig(torso="nature"), SPEC, [0, 0, 0], [4, 2, 1], 0),
    (ModelConfig(torso="nature"), spec(3, 84, 84), [0, 0, 0], [4, 2, 1], 0),
    (ModelConfig(torso="nature"), spec(1, 85, 86), [0, 0, 0], [4, 2, 1], 0),
    (ModelConfig(torso="nips", padding=True), spec(1, 104, 80), [0, 1], [4, 2], 0),
    (ModelConfig(torso="nature", padding=True), spec(1, 104, 80), [0, 1, 1], [4, 2, 1], 0),
    (ModelConfig(torso="ga3c"), SPEC, [2, (1, 2, 1, 2)], [4, 2], 0),
    (ModelConfig(torso="ga3c", scale="centred"), SPEC, [2, (1, 2, 1, 2)], [4, 2], 0),
    (ModelConfig(torso="ga3c-large", first_stride=2, scale="centred"), SPEC, [3, 1, (1, 2, 1, 2)], [2, 2, 2], 0),
    (ModelConfig(torso="ba3c"), spec(3, 84, 84), [0, 0, 0, 0], [1, 1, 1, 1], 3),
    (ModelConfig(torso="pooled"), SPEC, [0, 0], [2, 1], 2),
    (ModelConfig(torso="residual"), spec(1, 104, 80), [0, 1], [2, 1], 2),
    (ModelConfig(torso="residual", scale="centred"), spec(3, 40, 33), [0, 1], [2, 1], 2),
]


@pytest.mark.parametrize(("config", "env", "paddings", "strides", "pools"), NETWORKS)
def test_torso_equals_the_plain_network_on_scaled_floats(
    config: ModelConfig, env: EnvSpec, paddings: list[Any], strides: list[int], pools: int
) -> None:
    torch.manual_seed(0)
    stack = 4
    torso = make_torso(replace(config, hidden=16, init="fan-in"), env, stack)
    assert isinstance(torso, ConvTorso)
    stacks, history = batch(4, stack, env.frame_shape)
    pixels = zeroed(stacks, history).flatten(1, 2)
    pixels = pixels / 128 - 1 if config.scale == "centred" else pixels / 255
    if config.torso == "ba3c":
        pixels = F.pad(pixels, (0, 0, 0, 0, 0, 4))
    expected = plain_forward(torso, pixels, paddings, strides, pools)
    direction = torch.randn_like(expected)
    expected_gradients = torch.autograd.grad((expected * direction).sum(), list(torso.parameters()))
    features = torso(stacks, history)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad((features * direction).sum(), list(torso.parameters()))
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("config", "env", "stack", "size"),
    [
        (ModelConfig(torso="nips", padding=True), spec(1, 104, 80), 4, 897_328),
        (ModelConfig(torso="nature", padding=True), spec(1, 104, 80), 4, 3_617_440),
        (ModelConfig(torso="nips", width=2), SPEC, 4, 8_224 + 32_832 + 9 * 9 * 64 * 256 + 256),
        (ModelConfig(torso="ga3c-large"), SPEC, 4, 8_224 + 16_416 + 32_832 + 6 * 6 * 64 * 256 + 256),
        (ModelConfig(torso="ga3c-large", first_stride=1), SPEC, 4, 8_224 + 16_416 + 32_832 + 21 * 21 * 64 * 256 + 256),
        (ModelConfig(torso="pooled"), SPEC, 4, 1_040 + 4_640 + 9 * 9 * 32 * 256 + 256),
        (ModelConfig(torso="residual"), spec(1, 104, 80), 4, 3_726_240),
        (ModelConfig(torso="mlp"), spec(4, dtype=np.float32), 1, 4 * 64 + 64 + 64 * 64 + 64),
    ],
)
def test_trunk_parameter_counts(config: ModelConfig, env: EnvSpec, stack: int, size: int) -> None:
    assert sum(p.numel() for p in make_torso(config, env, stack).parameters()) == size


def test_bfloat16_torso_stays_near_float32() -> None:
    torch.manual_seed(0)
    torso = make_torso(ModelConfig(torso="nature"), SPEC, 4)
    stacks, history = batch(4, 4, SPEC.frame_shape)
    with torch.no_grad():
        exact = torso(stacks, history)
        with torch.autocast("cpu", torch.bfloat16):
            rough = torso(stacks, history)
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).norm() < 0.03 * exact.norm()


def test_mlp_sees_zeros_for_older_vectors_and_scales_bytes() -> None:
    torch.manual_seed(0)
    vectors = make_torso(ModelConfig(torso="mlp"), spec(3, dtype=np.float32), 2)
    stacks, history = torch.randn(4, 2, 3), torch.tensor([1, 2, 1, 2], dtype=torch.uint8)
    full = torch.full((4,), 2, dtype=torch.uint8)
    torch.testing.assert_close(vectors(stacks, history), vectors(zeroed(stacks, history), full))
    assert vectors(stacks, history).shape == (4, 64)
    board = make_torso(ModelConfig(torso="mlp", hidden=8), spec(1, 10, 5), 1)
    bytes_ = torch.randint(0, 256, (4, 1, 1, 10, 5), dtype=torch.uint8)
    assert isinstance(board, MlpTorso)
    expected = F.relu(board.second(F.relu(board.first(bytes_.flatten(1) / 255))))
    torch.testing.assert_close(board(bytes_, torch.ones(4, dtype=torch.uint8)), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("config", "env", "sentence"),
    [
        (ModelConfig(torso="nature"), spec(1, 20, 84), "frames of 20x84 are too small"),
        (ModelConfig(torso="ba3c"), spec(3, 40, 40), "frames of 40x40 are too small"),
        (ModelConfig(torso="nips"), spec(4, dtype=np.float32), "use model.torso mlp"),
        (ModelConfig(torso="ga3c", padding=True), SPEC, "model.padding is for"),
        (ModelConfig(torso="nature", first_stride=2), SPEC, "model.first_stride is for"),
        (ModelConfig(torso="mlp", width=2), spec(4, dtype=np.float32), "model.width is for"),
        (ModelConfig(torso=cast(Any, "natur")), SPEC, "did you mean nature"),
    ],
)
def test_what_does_not_fit_is_refused(config: ModelConfig, env: EnvSpec, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make_torso(config, env, 4)


def made(scheme: str, layer: nn.Conv2d | nn.Linear, role: Any = "hidden") -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    initialise(layer, scheme, role)
    assert layer.bias is not None
    return layer.weight.detach(), layer.bias.detach()


def test_orthogonal_initialisation() -> None:
    for role, gain in (("hidden", math.sqrt(2)), ("policy", 0.01), ("value", 1.0)):
        weight, bias = made("orthogonal", nn.Linear(32, 8), role)
        torch.testing.assert_close(weight @ weight.T, gain**2 * torch.eye(8), atol=1e-5, rtol=1e-4)
        assert not bias.any()


def test_normc_initialisation() -> None:
    for role, norm in (("hidden", 1.0), ("policy", 0.01), ("value", 1.0)):
        weight, bias = made("normc", nn.Linear(32, 8), role)
        torch.testing.assert_close(weight.norm(dim=1), torch.full((8,), norm))
        assert not bias.any()
    weight, bias = made("normc", nn.Conv2d(4, 16, 8))
    bound = math.sqrt(6 / (64 * (4 + 16)))
    assert 0.97 * bound < weight.abs().max() <= bound and not bias.any()


def test_fan_in_initialisation() -> None:
    for layer in (nn.Conv2d(4, 64, 8), nn.Linear(256, 64)):
        weight, bias = made("fan-in", layer)
        for tensor in (weight, bias):
            assert 0.9 / 16 < tensor.abs().max() <= 1 / 16
            assert tensor.min() < 0 < tensor.max()


def test_ba3c_initialisation() -> None:
    weight, bias = made("ba3c", nn.Conv2d(16, 32, 5))
    assert weight.abs().max() <= 0.06 and abs(weight.std().item() - 0.03 * 0.88) < 0.001 and not bias.any()
    weight, bias = made("ba3c", nn.Linear(300, 64))
    assert 0.97 * 0.143 < weight.abs().max() <= 0.143 and not bias.any()


def test_unknown_initialisation_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean orthogonal"):
        initialise(nn.Linear(2, 2), "orthogonl")

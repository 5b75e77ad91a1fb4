"""Torsos: from a batch of frame stacks to features, the part of a network that actor-critic and Q-heads share.

    stacks [N, S, *frame], history [N]  ->  network_input  ->  convolutions or hidden layers  ->  [N, features]

Frames stay bytes until here: one pass turns them into floats, and the division by 255 is done on the first layer's
weights, which are far fewer than the pixels.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.config import ModelConfig
from phalanx.errors import UserError, unknown
from phalanx.given import is_code
from phalanx.models.architectures import Convolution, chosen_torso, convolutions, hidden_width
from phalanx.models.given import GivenTorso, given_torso
from phalanx.models.pooling import max_pool
from phalanx.types import EnvSpec

Pads = tuple[int, int, int, int]  # left, right, top, bottom


WORDS = {2: torch.int16, 4: torch.int32}  # by their bytes
BA3C_CHANNELS = 16  # BA3C pads its 12 input channels to a multiple of this


def make_torso(config: ModelConfig, spec: EnvSpec, stack: int) -> ConvTorso | MlpTorso | GivenTorso:
    """The torso a configuration names, for stacks of `stack` frames of `spec`."""
    if is_code(config.torso):
        return given_torso(config, spec, stack, *pixel_scale(config, spec))
    torso = chosen_torso(config, spec)
    if config.padding and torso not in ("nips", "nature"):
        raise UserError(f"model.padding is for the torsos nips and nature; leave it off with {torso}")
    if config.first_stride != 4 and torso != "ga3c-large":
        raise UserError(f"model.first_stride is for the torso ga3c-large; leave it at 4 with {torso}")
    if torso == "mlp":
        if config.width != 1:
            raise UserError("model.width is for convolutions; leave it at 1 with mlp and use model.hidden")
        return MlpTorso(config, spec, stack)
    if not spec.is_image:
        raise UserError(f"model.torso {torso} needs images, but the environment gives vectors; use model.torso mlp")
    return ConvTorso(config, spec, stack)


class Dense(nn.Linear):
    """A fully connected layer on the features of convolutions: nearly all of a network's weights."""


class ConvTorso(nn.Module):
    """Convolutions and one fully connected layer, all with ReLU."""

    def __init__(self, config: ModelConfig, spec: EnvSpec, stack: int) -> None:
        super().__init__()
        layers = convolutions(config, spec)
        self.layers, self.pads = layers, layer_pads(config, layers, spec)
        self.channels = stack * spec.frame_shape[0]
        self.offset, self.scale = pixel_scale(config, spec)
        self.fold = _foldable(layers[0], self.pads[0], spec)
        self.features = hidden_width(config, spec)

        inputs = -(-self.channels // BA3C_CHANNELS) * BA3C_CHANNELS if config.torso == "ba3c" else self.channels
        self.convolutions, self.blocks = nn.ModuleList(), nn.ModuleList()
        share = 1 / math.sqrt(max(sum(layer.blocks for layer in layers), 1))
        for layer in layers:
            convolution = nn.Conv2d(inputs, layer.filters, layer.kernel, bias=config.torso != "ba3c")
            self.convolutions.append(initialise(convolution, config.init))
            inputs = layer.filters
            blocks = (ResidualBlock(inputs, config.init, share) for _ in range(layer.blocks))
            self.blocks.append(nn.Sequential(*blocks))
        height, width = output_size(layers, self.pads, spec)
        self.dense = initialise(Dense(inputs * height * width, self.features), config.init)

    def forward(self, stacks: Tensor, history: Tensor) -> Tensor:
        x = network_input(stacks, history, compute_dtype(stacks.device), self.fold)
        if self.offset:
            x.sub_(self.offset)
        parts = zip(self.layers, self.pads, self.convolutions, self.blocks, strict=True)
        for index, (layer, pads, convolution, blocks) in enumerate(parts):
            weight: Tensor = convolution.weight  # type: ignore[assignment]
            stride = (layer.stride, layer.stride)
            if index == 0:
                # channels past the frames' own would meet zeros only, so they are left out
                weight = fold_weight(weight[:, : self.channels] * self.scale, self.fold)
                stride = (layer.stride, layer.stride // self.fold)
            bias: Tensor | None = convolution.bias  # type: ignore[assignment]
            # the same number for a quarter of the pixels; a CPU adds it while it convolves
            is_late = layer.pool and x.is_cuda and bias is not None
            x = _convolve(x, weight, None if is_late else bias, stride, pads)
            if layer.pool:
                x = max_pool(x)
            if is_late:
                x = x + bias.to(x.dtype)[:, None, None]  # type: ignore[union-attr]
            x = F.relu(blocks(x), inplace=True)
        # channels stay innermost: no copy of the channels_last activations
        return F.relu(self.dense(x.permute(0, 2, 3, 1).flatten(1)), inplace=True)


class ResidualBlock(nn.Module):
    """Adds two convolutions of its input to it; at first only a `share` of them, so that many blocks add as much as
    one would."""

    def __init__(self, filters: int, init: str, share: float) -> None:
        super().__init__()
        self.inner = initialise(nn.Conv2d(filters, filters, 3, padding=1), init)
        self.outer = initialise(nn.Conv2d(filters, filters, 3, padding=1), init)
        self.outer.weight.data *= share

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(F.relu(self.inner(F.relu(x)), inplace=True))


class MlpTorso(nn.Module):
    """Two hidden layers with ReLU, for vectors and small boards."""

    def __init__(self, config: ModelConfig, spec: EnvSpec, stack: int) -> None:
        super().__init__()
        self.offset, self.scale = pixel_scale(config, spec)
        self.features = hidden_width(config, spec)
        self.first = initialise(nn.Linear(stack * math.prod(spec.frame_shape), self.features), config.init)
        self.second = initialise(nn.Linear(self.features, self.features), config.init)

    def forward(self, stacks: Tensor, history: Tensor) -> Tensor:
        x = stacks.flatten(2).float() * _valid(history, stacks.shape[1], torch.float32)[:, :, None]
        x = F.relu(F.linear(x.flatten(1) - self.offset, self.first.weight * self.scale, self.first.bias))
        return F.relu(self.second(x))


def large_layers(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are worth a bfloat16 copy where the network computes in bfloat16."""
    return [parameter for layer in model.modules() if isinstance(layer, Dense) for parameter in layer.parameters()]


def layers_in_bfloat16(model: nn.Module) -> list[nn.Parameter]:
    """All parameters that are only used rounded, where the network computes in bfloat16: not the last layer's, nor the
    first weights, which are scaled before."""
    parameters = large_layers(model)
    for torso in model.modules():
        if isinstance(torso, ConvTorso):
            first = torso.convolutions[0].weight
            layers = (*torso.convolutions.parameters(), *torso.blocks.parameters())
            parameters += [parameter for parameter in layers if parameter is not first]
    return parameters


def network_input(stacks: Tensor, history: Tensor, dtype: torch.dtype, fold: int = 1) -> Tensor:
    """[N, S, C, H, W] of any strides as [N, S*C*fold, H, W/fold] in `dtype`, channels innermost in memory.

    Frames older than the newest `history[n]` become zeros. A fold takes 2 or 4 neighbouring pixels of a row as channels
    (see `fold_weight`), so that the copy moves whole words and the convolution sees 8 or 16 channels instead of 4.
    """
    convert = convert_on_host if stacks.device.type == "cpu" else convert_on_device
    return convert(stacks, history, dtype, fold)


def convert_on_host(stacks: Tensor, history: Tensor, dtype: torch.dtype, fold: int) -> Tensor:
    """Conversion first, then the few rows with a short history: a mask on every pixel would cost as much again."""
    rows, frames, planes, height, width = stacks.shape
    words = _as_words(stacks, fold) if fold > 1 else stacks
    pixels = words.permute(0, 3, 4, 1, 2).flatten().view(stacks.dtype)
    x = pixels.to(dtype, copy=True)  # a copy even of float frames: it is written to
    x = x.view(rows, height, width // fold, frames * planes * fold)
    if int(history.min()) < frames:
        short = (history < frames).nonzero().squeeze(1)
        valid = _valid(history[short], frames, dtype).repeat_interleave(planes * fold, dim=1)
        x[short] *= valid[:, None, None, :]
    return x.permute(0, 3, 1, 2)


def convert_on_device(stacks: Tensor, history: Tensor, dtype: torch.dtype, fold: int) -> Tensor:
    """Layout and mask in one kernel, of whole words where pixels are folded, then conversion; nothing waits."""
    rows, frames, planes, height, width = stacks.shape
    words = _as_words(stacks, fold) if fold > 1 else stacks
    kind = words.dtype if fold > 1 else dtype
    x = torch.empty((rows, height, width // fold, frames, planes), dtype=kind, device=stacks.device)
    valid = _valid(history, frames, kind)[:, :, None, None, None]
    torch.mul(words, valid, out=x.permute(0, 3, 4, 1, 2))
    pixels = x.flatten(3).view(stacks.dtype) if fold > 1 else x.flatten(3)
    return pixels.to(dtype).permute(0, 3, 1, 2)


def fold_weight(weight: Tensor, fold: int) -> Tensor:
    """[O, C, K, L] for plain pixels as [O, C*fold, K, L/fold] for folded ones, channels innermost."""
    return weight.view(*weight.shape[:3], -1, fold).permute(0, 2, 3, 1, 4).flatten(3).permute(0, 3, 1, 2)


def compute_dtype(device: torch.device) -> torch.dtype:
    """What convolutions run in here; bytes are exact in all of these."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if enabled else torch.float32


def pixel_scale(config: ModelConfig, spec: EnvSpec) -> tuple[float, float]:
    """(offset, scale) of frames: the network sees (pixel - offset) * scale. Frames within known bounds come to [0, 1],
    or centred to [-1, 1]; others that are not bytes are taken as they are."""
    if spec.bounds is not None:
        low, high = spec.bounds
        return ((low + high) / 2, 2 / (high - low)) if config.scale == "centred" else (low, 1 / (high - low))
    if np.dtype(spec.frame_dtype) != np.uint8:
        return 0.0, 1.0
    return (128.0, 1 / 128) if config.scale == "centred" else (0.0, 1 / 255)


def layer_pads(config: ModelConfig, layers: tuple[Convolution, ...], spec: EnvSpec) -> list[Pads]:
    """The zeros around each convolution's input: none, 1 after the first layer, TensorFlow's SAME (GA3C), or as many as
    a side lacks of a kernel (fitted)."""
    pads: list[Pads] = []
    is_fitted = chosen_torso(config, spec) == "fitted"
    padded = config.padding or config.torso == "residual"
    for index, layer in enumerate(layers):
        if is_fitted or config.torso in ("ga3c", "ga3c-large"):
            height, width = output_size(layers[:index], pads, spec)
            sides = _lacking if is_fitted else _same
            (top, bottom), (left, right) = sides(height, layer), sides(width, layer)
            pads.append((left, right, top, bottom))
        else:
            pads.append((1, 1, 1, 1) if padded and index else (0, 0, 0, 0))
    return pads


def output_size(layers: tuple[Convolution, ...], pads: list[Pads], spec: EnvSpec) -> tuple[int, int]:
    """Height and width after the convolutions; a UserError if the frames are too small for them."""
    _, height, width = spec.frame_shape
    for layer, (left, right, top, bottom) in zip(layers, pads, strict=True):
        pool = 2 if layer.pool else 1
        height = ((height + top + bottom - layer.kernel) // layer.stride + 1) // pool
        width = ((width + left + right - layer.kernel) // layer.stride + 1) // pool
        if height < 1 or width < 1:
            raise UserError(
                f"frames of {spec.frame_shape[1]}x{spec.frame_shape[2]} are too small for the convolutions of this "
                "torso; use larger frames, convolutions that fit (model.torso auto) or none (model.torso mlp)"
            )
    return height, width


def initialise(
    layer: nn.Conv2d | nn.Linear, scheme: str, role: Literal["hidden", "policy", "value"] = "hidden"
) -> nn.Conv2d | nn.Linear:
    """Fill a layer's weights and biases from torch's global generator; the same layer."""
    weight, is_convolution = layer.weight, isinstance(layer, nn.Conv2d)
    fan_in = weight[0].numel()
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    if scheme == "orthogonal":
        nn.init.orthogonal_(weight, {"hidden": math.sqrt(2), "policy": 0.01, "value": 1.0}[role])
    elif scheme == "normc" and is_convolution:
        nn.init.xavier_uniform_(weight)
    elif scheme == "normc":
        nn.init.normal_(weight)
        weight.data *= (0.01 if role == "policy" else 1.0) / weight.data.norm(dim=1, keepdim=True)
    elif scheme == "fan-in":
        for tensor in layer.parameters():
            nn.init.uniform_(tensor, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))
    elif scheme == "ba3c" and is_convolution:
        nn.init.trunc_normal_(weight, std=0.03, a=-0.06, b=0.06)
    elif scheme == "ba3c":
        bound = 1.43 * math.sqrt(3 / fan_in)
        nn.init.uniform_(weight, -bound, bound)
    else:
        raise unknown("initialisation", scheme, ("orthogonal", "normc", "fan-in", "ba3c"))
    return layer


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, int], pads: Pads) -> Tensor:
    left, right, top, bottom = pads
    if (left, top) == (right, bottom):
        return F.conv2d(x, weight, bias, stride, (top, left))
    return F.conv2d(F.pad(x, pads), weight, bias, stride)


def _valid(history: Tensor, frames: int, dtype: torch.dtype) -> Tensor:
    """[N, S]: 1 for the newest `history[n]` frames of a row, 0 for the older ones."""
    return (torch.arange(frames, device=history.device) >= frames - history[:, None]).to(dtype)


def _as_words(stacks: Tensor, size: int) -> Tensor:
    """Bytes [..., W] as words of 2 or 4 [..., W/size]; copied only where they do not lie so."""
    steps = (stacks.storage_offset(), *stacks.stride()[:-1])
    aligned = stacks.stride(-1) == 1 and all(step % size == 0 for step in steps)
    return (stacks if aligned else stacks.clone(memory_format=torch.contiguous_format)).view(WORDS[size])


def _same(size: int, layer: Convolution) -> tuple[int, int]:
    """TensorFlow's SAME padding of one dimension: (before, after), the odd one after."""
    total = max((-(-size // layer.stride) - 1) * layer.stride + layer.kernel - size, 0)
    return total // 2, total - total // 2


def _lacking(size: int, layer: Convolution) -> tuple[int, int]:
    """What one dimension needs to hold a kernel: (before, after), the odd one after."""
    total = max(layer.kernel - size, 0)
    return total // 2, total - total // 2


def _foldable(first: Convolution, pads: Pads, spec: EnvSpec) -> int:
    """How many pixels of a row the first convolution can take as channels: as many as it moves on by, or 1."""
    fold = first.stride
    whole_words = spec.frame_shape[2] % fold == 0 and np.dtype(spec.frame_dtype) == np.uint8
    return fold if fold in WORDS and first.kernel % fold == 0 and not any(pads) and whole_words else 1

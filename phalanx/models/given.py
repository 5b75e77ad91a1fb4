"""A torso of a user's own: a module of plain torch, made by a function that is told what the network sees.

`model.torso module:function` names the function. It gets the `EnvSpec` of whole stacks (`frame_shape` is
(stack x channels, height, width) for images, (stack x size,) for vectors) and returns a module from float32 inputs
[N, *frame_shape] to features [N, F]. Heads, stacks, the history of an episode and the scale of pixels are phalanx's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from phalanx.config import ModelConfig
from phalanx.errors import UserError, in_words, require
from phalanx.given import resolve, spoken
from phalanx.types import EnvSpec


class GivenTorso(nn.Module):
    """The user's module, behind what every torso of phalanx is given."""

    def __init__(self, inner: nn.Module, spec: EnvSpec, offset: float, scale: float) -> None:
        super().__init__()
        self.inner = inner
        self.shape = spec.frame_shape
        self.offset, self.scale = offset, scale
        self.features = self._count()

    def forward(self, stacks: Tensor, history: Tensor) -> Tensor:
        """Frames older than the newest `history` [N] count as zeros."""
        frames = stacks.shape[1]
        valid = torch.arange(frames, device=stacks.device) >= frames - history[:, None]
        x = stacks.float() * valid.view(*valid.shape, *(1 for _ in stacks.shape[2:]))
        return self.inner((x - self.offset).mul_(self.scale).flatten(1, 2))

    def _count(self) -> int:
        """The features that the module gives, seen by trying it; the numbers it has drawn so far stay as they are."""
        device = next((parameter.device for parameter in self.inner.parameters()), torch.device("cpu"))
        was_training = self.inner.training
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            given = self.inner.eval()(torch.zeros((2, *self.shape), device=device))
        self.inner.train(was_training)
        good = isinstance(given, Tensor) and given.dim() == 2 and len(given) == 2
        shape = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
        require(good, f"it must give features [N, F] of inputs [N, ...], but gave {shape} of inputs {(2, *self.shape)}")
        return int(given.shape[1])


def _drops(part: nn.Module) -> bool:
    """Does it set features to zero by chance?"""
    if isinstance(part, nn.modules.dropout._DropoutNd):
        return part.p > 0
    return isinstance(part, nn.MultiheadAttention | nn.RNNBase) and part.dropout > 0


def given_torso(config: ModelConfig, spec: EnvSpec, stack: int, offset: float, scale: float) -> GivenTorso:
    """The torso that a user's function makes, or one sentence that says why it does not fit."""
    make, name = resolve(config.torso, "model.torso"), f"model.torso {spoken(config.torso)}"
    require(
        not isinstance(make, nn.Module),
        f"{name} is a torch module; give the function that makes it, such as lambda spec: nn.Sequential(...)",
    )
    require(callable(make), f"{name} is not a function that makes a torso")
    channels, *rest = spec.frame_shape
    seen = replace(spec, frame_shape=(stack * channels, *rest), frame_dtype=np.dtype(np.float32), decoded=None)
    try:
        inner = make(seen)
        require(isinstance(inner, nn.Module), f"it gave {type(inner).__name__}, which is not a torch.nn.Module")
        require(
            not any(
                isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats
                for part in inner.modules()
            ),
            "it keeps running means, which no store holds; use LayerNorm or GroupNorm instead of BatchNorm",
        )
        require(
            not any(_drops(part) for part in inner.modules()),
            "it has Dropout, and those who act and those who learn would see different networks; leave it out",
        )
        require(any(True for _ in inner.parameters()), "it has nothing to learn: it has no parameters")
        return GivenTorso(inner, seen, offset, scale)
    except UserError as error:
        raise UserError(f"{name} does not fit: {error}") from error
    except Exception as error:  # it is somebody else's code
        raise UserError(f"{name} does not fit inputs of shape {seen.frame_shape}: {in_words(error)}") from error

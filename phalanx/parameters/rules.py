"""Update rules on flat vectors, and the norm clips that go before them.

A rule works in place and element by element, so a store may apply it to the whole vector, chunk by chunk or shard by
shard, with the same result to the last bit if every chunk begins at a multiple of 16 (kernels round a rest that fills
no vector register differently). Nothing here waits for a device: all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from phalanx.config import OptimizerConfig
from phalanx.errors import unknown

State = dict[str, Tensor]
TINY = 1e-30  # nothing beside a square that matters, but not zero


class Rule(Protocol):
    """How a gradient changes parameters; the state belongs to the caller."""

    def init(self, size: int, device: torch.device | str = "cpu") -> State:
        """The state before the first update of `size` parameters."""

    def apply(self, params: Tensor, gradient: Tensor, state: State, learning_rate: float | Tensor) -> None:
        """One update of `params` and `state` in place; the learning rate may live on the device."""


@dataclass(frozen=True)
class RMSProp:
    """Steps of g / (sqrt(mean of g^2) + epsilon), or with epsilon inside the root (TensorFlow, Lasagne)."""

    decay: float
    epsilon: float
    initial_accumulator: float
    inside: bool

    def init(self, size: int, device: torch.device | str = "cpu") -> State:
        return {"square": torch.full((size,), self.initial_accumulator, device=device)}

    def apply(self, params: Tensor, gradient: Tensor, state: State, learning_rate: float | Tensor) -> None:
        square = state["square"]
        square.mul_(self.decay).addcmul_(gradient, gradient, value=1 - self.decay)
        root = square.add(self.epsilon).sqrt_() if self.inside else square_root(square).add_(self.epsilon)
        _step(params, gradient, root, learning_rate)


@dataclass(frozen=True)
class Adam:
    """torch's form corrects the bias before epsilon is added; TensorFlow's leaves epsilon outside the correction."""

    beta1: float
    beta2: float
    epsilon: float
    tensorflow: bool

    def init(self, size: int, device: torch.device | str = "cpu") -> State:
        zeros = torch.zeros(size, device=device)
        # float64, because 1 - beta2^t loses half its digits in float32 while t is small
        return {"mean": zeros, "square": zeros.clone(), "t": torch.zeros((), dtype=torch.float64, device=device)}

    def apply(self, params: Tensor, gradient: Tensor, state: State, learning_rate: float | Tensor) -> None:
        mean, square, t = state["mean"], state["square"], state["t"].add_(1)
        if params.device.type == "cpu":
            self._apply_in_one_pass(params, gradient, mean, square, t, float(learning_rate))
        else:
            self._apply_without_waiting(params, gradient, mean, square, t, learning_rate)

    def _apply_in_one_pass(
        self, params: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, t: Tensor, learning_rate: float
    ) -> None:
        """torch's own kernel reads and writes each vector once; a larger epsilon makes TensorFlow's form of its own."""
        epsilon = self.epsilon / (math.sqrt(1 - self.beta2 ** t.item()) if self.tensorflow else 1.0)
        torch._fused_adam_(
            [params], [gradient], [mean], [square], [], [t.float()],
            lr=learning_rate, beta1=self.beta1, beta2=self.beta2, weight_decay=0.0, eps=epsilon,
            amsgrad=False, maximize=False,
        )  # fmt: skip

    def _apply_without_waiting(
        self, params: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, t: Tensor, learning_rate: float | Tensor
    ) -> None:
        """Without a look at `t`, which lives on the device. torch's own kernel has a block for each 65,536 numbers of a
        vector, too few to fill a GPU."""
        mean.lerp_(gradient, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
        correction = (1 - self.beta2**t).sqrt()
        rate = learning_rate * correction / (1 - self.beta1**t)
        epsilon = self.epsilon if self.tensorflow else self.epsilon * correction
        _step(params, mean, square.sqrt().add_(epsilon), rate)


@dataclass(frozen=True)
class AdaGrad:
    """Steps of g / (sqrt(sum of g^2) + epsilon)."""

    epsilon: float
    initial_accumulator: float

    def init(self, size: int, device: torch.device | str = "cpu") -> State:
        return {"square": torch.full((size,), self.initial_accumulator, device=device)}

    def apply(self, params: Tensor, gradient: Tensor, state: State, learning_rate: float | Tensor) -> None:
        square = state["square"].addcmul_(gradient, gradient)
        _step(params, gradient, square_root(square).add_(self.epsilon), learning_rate)


@dataclass(frozen=True)
class SGD:
    """Steps along the gradient, or along its running sum when there is momentum."""

    momentum: float

    def init(self, size: int, device: torch.device | str = "cpu") -> State:
        return {"velocity": torch.zeros(size, device=device)} if self.momentum else {}

    def apply(self, params: Tensor, gradient: Tensor, state: State, learning_rate: float | Tensor) -> None:
        if self.momentum:
            gradient = state["velocity"].mul_(self.momentum).add_(gradient)
        params.sub_(gradient * learning_rate)


def make_rule(config: OptimizerConfig) -> Rule:
    """The rule a configuration names."""
    if config.rule in ("rmsprop", "rmsprop-inside"):
        inside = config.rule == "rmsprop-inside"
        return RMSProp(config.decay, config.epsilon, config.initial_accumulator, inside)
    if config.rule in ("adam", "adam-tf"):
        return Adam(config.beta1, config.beta2, config.epsilon, config.rule == "adam-tf")
    if config.rule == "adagrad":
        return AdaGrad(config.epsilon, config.initial_accumulator)
    if config.rule == "sgd":
        return SGD(config.momentum)
    raise unknown("update rule", config.rule, ("rmsprop", "rmsprop-inside", "adam", "adam-tf", "adagrad", "sgd"))


Clip = Callable[[Tensor], Tensor]
"""Clips a flat gradient in place; its L2 norm before."""


def make_clip(config: OptimizerConfig, slices: Iterable[slice]) -> Clip:
    """The norm clip a configuration names; `slices` are the places of the model's tensors in the flat vector."""
    parts = list(slices)

    def average(gradient: Tensor) -> Tensor:
        norm = gradient.norm()
        average_norm_clip(gradient, parts, config.clip_norm)
        return norm

    if config.clip == "global":
        return lambda gradient: global_norm_clip(gradient, config.clip_norm)
    return average if config.clip == "average" else lambda gradient: gradient.norm()


def global_norm_clip(gradient: Tensor, max_norm: float) -> Tensor:
    """Scale the whole gradient in place to an L2 norm of at most `max_norm`; the norm before."""
    norm: Tensor = torch.linalg.vector_norm(gradient)
    if gradient.device.type == "cpu" and norm + 1e-6 <= max_norm:
        return norm  # on a device the look would wait for it
    gradient.mul_((max_norm / (norm + 1e-6)).clamp_(max=1.0))
    return norm


def average_norm_clip(gradient: Tensor, slices: Iterable[slice], limit: float) -> None:
    """Scale each tensor's slice in place so that its L2 norm divided by its size is at most `limit` (BA3C)."""
    for part in slices:
        tensor = gradient[part]
        tensor.mul_((limit * tensor.numel() / torch.linalg.vector_norm(tensor)).clamp_(max=1.0))


def square_root(square: Tensor) -> Tensor:
    """Roots of squares, many of which may be zero: on a CPU torch's root of a zero takes many times as long."""
    return square.add(TINY).sqrt_()


def _step(params: Tensor, direction: Tensor, root: Tensor, learning_rate: float | Tensor) -> None:
    """params -= learning_rate * direction / root; overwrites `root`, so that a rate on the device needs no sync."""
    params.addcdiv_(direction, root.div_(-learning_rate))

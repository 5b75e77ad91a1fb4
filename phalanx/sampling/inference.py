"""Inference for whichever rows a predictor has taken: from their newest frames to their next actions.

    step buffer -> newest frames -> OpenSegments -> stacks -> network -> actions, log-probabilities, values on the host

`EagerInference` is the reference; `sampling/graph_inference.py` is the way of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.sampling.answers import Decoder, to_device
from phalanx.sampling.segments import OpenSegments
from phalanx.seams import Policy


@dataclass
class Inferred:
    """What the policy says of some rows, on the host."""

    action: np.ndarray
    log_prob: np.ndarray
    value: np.ndarray
    cut: Tensor  # frames of the segments that end in some of the rows; nothing is still to be done for them


class Inference(Protocol):
    """One thread's way to the device."""

    def infer(self, news: np.ndarray, rows: np.ndarray, ended: np.ndarray, uniform: Tensor) -> Inferred:
        """Take in the newest frames of the `news`, choose actions for `rows` by the random numbers [N], and cut the
        frames of the segments that have `ended`, which are some of them."""


class EagerInference:
    """Operation by operation."""

    def __init__(self, *, policy: Policy, segments: OpenSegments, observation: np.ndarray, decode: Decoder) -> None:
        self.policy = policy
        self.segments = segments
        self.observation = observation  # the newest of all rows, in the step buffer
        self.decode = decode

    def infer(self, news: np.ndarray, rows: np.ndarray, ended: np.ndarray, uniform: Tensor) -> Inferred:
        segments, newest = self.segments, self.observation[news]
        segments.take_in(news, self.decode(to_device(newest, segments.device)))
        segments.refuse_not_finite("observation", newest, news)
        stacks, history = segments.stacks(rows)
        output = self.policy.act(stacks, history, uniform.to(segments.device), torch.from_numpy(rows))
        cut = segments.cut_frames(ended)
        return Inferred(output.action.cpu().numpy(), output.log_prob.cpu().numpy(), output.value.cpu().numpy(), cut)

"""The few named things that flow through phalanx, in the order in which they flow.

    EnvStep -> PolicyOutput -> Rollout -> PolicyBatch / ReplayBatch -> Loss -> Gradient

Shapes: T = steps of a rollout, B = environments, N = rows of a batch, P = parameters, S = frames in a stack.
The unit of time is the agent step; emulator frames, usually 4 to a step, are counted in logs only. Elsewhere a frame is
one observation. An episode is what the algorithm sees (a life, where lives are episodes); a game is what is scored.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from phalanx.struct import Struct

if TYPE_CHECKING:  # environment workers import this module and must not pay for importing torch
    import numpy as np
    import torch
    from torch import Tensor


class Outcome(NamedTuple):
    """What one step of one environment gave, besides its frame."""

    reward: float  # clipped as configured: what the algorithm learns from
    score: float  # raw score of the game that ended with this step, NaN while the game goes on
    terminated: bool
    truncated: bool


@dataclass(frozen=True)
class EnvSpec:
    """What a model and a buffer must know about an environment."""

    frame_shape: tuple[int, ...]  # (channels, height, width), or (size,) for a vector
    frame_dtype: Any  # numpy dtype of a frame
    actions: int
    frames_per_step: int = 1  # emulator frames an agent step takes, for logs
    decoded: EnvSpec | None = None  # what the device makes of raw screens; None where frames are ready as they come
    bounds: tuple[float, float] | None = None  # between which an image's numbers lie; None: 0 to 255, or unknown
    meaning: str = ""  # what the environment shows and how it became a frame, for people
    can_be_drawn: bool = True  # has it pictures for people?

    @property
    def seen(self) -> EnvSpec:
        """What the policy sees."""
        return self.decoded or self

    @property
    def is_image(self) -> bool:
        return len(self.frame_shape) == 3


@dataclass
class EnvStep(Struct):
    """One step of a group of environments, [B] each. Written by VectorEnvs; views that live until the next `send`.

    An environment that ends an episode begins the next one in the same step: `observation` is then the first frame
    of the new episode (`first`), and where the end was a truncation `last_observation` holds the true last frame.
    """

    observation: np.ndarray  # [B, *frame] newest frame only
    last_observation: np.ndarray  # [B, *frame] meaningful where truncated
    reward: np.ndarray  # [B] float32
    score: np.ndarray  # [B] float32, NaN unless a game ended here
    terminated: np.ndarray  # [B] bool
    truncated: np.ndarray  # [B] bool
    first: np.ndarray  # [B] bool: observation begins an episode
    cut: (
        np.ndarray
    )  # [B] bool: nothing may be learnt from the transition that led here (its worker was replaced, or the
    # environment waits for the rollout's end)


@dataclass
class PolicyOutput(Struct):
    """What the policy chose for a group of environments, [B] each."""

    action: Tensor  # int64
    log_prob: Tensor  # float32, of the action under the policy that chose it; 0 for value-based policies
    value: Tensor  # float32, state value, or the greedy action's value


@dataclass
class Rollout(Struct):
    """T steps of B environments. Written by the Collector, read by an Experience.

    `frames` holds each frame once. The stack the policy saw at step t is frames[t : t+S]; of it the newest
    `history[t]` frames belong to the running episode and the older ones count as zeros.
    """

    frames: Tensor  # [S-1 + T+1, B, *frame]
    history: Tensor  # [T+1, B] uint8, 1..S
    action: Tensor  # [T, B] int64
    log_prob: Tensor  # [T, B]
    value: Tensor  # [T+1, B]
    reward: Tensor  # [T, B]
    terminated: Tensor  # [T, B] bool
    truncated: Tensor  # [T, B] bool
    last_value: Tensor  # [T, B] value of the true last observation where truncated, else 0
    cut: Tensor  # [T, B] bool
    version: Tensor  # [T, B] int64, on the host: version of the parameters each action was chosen with
    last_frames: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (t, b) -> true last frame

    @property
    def steps(self) -> int:
        return int(self.action.shape[0])

    @property
    def environments(self) -> int:
        return int(self.action.shape[1])

    def tensors(self) -> dict[str, Tensor]:
        """Everything but the few true last frames."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "last_frames"}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what another one of the same size holds."""
        for name, value in tensors.items():
            getattr(self, name).copy_(value)

    @property
    def stacks(self) -> Tensor:
        """[T+1, B, S, *frame], a view: stacks[t, b] are the S frames the policy saw."""
        horizon, frames = self.history.shape[0], self.frames
        size = (horizon, frames.shape[1], frames.shape[0] - horizon + 1, *frames.shape[2:])
        time, row, *rest = frames.stride()
        return frames.as_strided(size, (time, row, time, *rest))


@dataclass
class PolicyBatch(Struct):
    """Rows for an actor-critic loss, [N] each."""

    stacks: Tensor  # [N, S, *frame]
    history: Tensor
    action: Tensor
    log_prob: Tensor
    value: Tensor
    returns: Tensor
    advantage: Tensor
    weight: Tensor  # what the row counts for in sums over the batch; 0 where it may not be learnt from


@dataclass
class ReplayBatch(Struct):
    """Rows for a Q-learning loss, [N] each."""

    stacks: Tensor  # [N, S, *frame]
    history: Tensor
    action: Tensor
    returns: Tensor  # discounted sum of up to n rewards
    next_stacks: Tensor  # [N, S, *frame] where the sum stops
    next_history: Tensor
    next_discount: Tensor  # factor of the bootstrap: discount ** steps summed, 0 if the episode terminated
    weight: Tensor  # importance weight
    ids: Tensor  # int64, for feedback


@dataclass
class AheadBatch(ReplayBatch):
    """The same with what the target network says of the next stacks."""

    next_values: Tensor  # [N, A], or [N, A, K] of distributions


@dataclass
class Loss:
    """What an algorithm hands to the learner: the scalar to minimise, what to log, new priorities if any."""

    total: Tensor
    metrics: dict[str, Tensor]
    priorities: Tensor | None = None


@dataclass
class Gradient:
    """One flat gradient on its way from a learner to a parameter store, which may overwrite it."""

    flat: Tensor  # [P]
    loss: Tensor  # scalar; a store refuses both if one of them is not finite
    version: int  # of the parameters it was computed at
    norm: Tensor | None = None  # L2 norm before the clip, filled in by the store


@dataclass(frozen=True)
class Progress:
    """A reading of the clocks of a run (`runtime/clocks.py`). Schedules, targets, budgets and logs go by it."""

    steps: int = 0  # agent steps collected
    updates: int = 0  # gradients that all learners have made
    version: int = 0  # of the newest parameters: counts gradients applied; equal to updates with one replica
    episodes: int = 0  # games finished


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a numpy one."""
    import numpy as np
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype

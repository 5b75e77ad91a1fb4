"""The four seams: the interfaces behind which parallelism hides. Another implementation changes where something runs,
not the loop.

    VectorEnvs      actions -> EnvStep          sampling/serial.py, sampling/processes.py
    Policy          observations -> actions     models/policies.py
    Experience      rollouts -> batches         replay/latest.py, replay/memory.py
    ParameterStore  gradient -> version         parameters/local.py

The loop they form, whatever the topology:

    while not finished:
        rollout = collector.collect()   # VectorEnvs and Policy, step by step
        experience.put(rollout)
        learner.learn(experience)       # Experience and ParameterStore, update by update
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from phalanx.types import EnvSpec, EnvStep, Gradient, PolicyOutput, Progress, Rollout

if TYPE_CHECKING:
    from phalanx.parameters.flat import FlatParameters


class VectorEnvs(Protocol):
    """Many environments in groups; while one group steps, the caller serves another."""

    spec: EnvSpec
    groups: list[slice]  # rows of each group, in order, covering all environments
    shared_memory: bool  # do all steps stand in one block of memory, which a device can be given to read?

    def ready(self, groups: Sequence[int], wait: bool = True) -> int | None:
        """The first of these groups that has finished its step; waits for one, or else gives None if there is none."""

    def recv(self, group: int) -> EnvStep:
        """Wait for the group's newest step. The first call gives the first frames. Views, valid until `send`."""

    def send(self, group: int, actions: np.ndarray) -> None:
        """Start the group's next step."""

    def unbalanced(self) -> bool:
        """Must `balance` be called after this rollout? Until then no group begins the next one early."""

    def balance(self) -> None:
        """Called between rollouts, when no group is stepping: may move environments from slow workers to fast ones."""

    def state(self) -> dict[str, Any]:
        """What another instance goes on from bit for bit, but for the frames of rows that wait for the rollout's end
        (`resets wait`). Valid only after every group's step was received."""

    def restore(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """Twice does no harm."""

    def __enter__(self) -> VectorEnvs: ...

    def __exit__(self, *exception: object) -> None: ...


class Policy(Protocol):
    """Chooses actions for a batch of frame stacks. Without overlap it works on the very model that the learner changes,
    so that the next action sees every push."""

    def begin(self, progress: Progress) -> None:
        """Called before each rollout: the time to move schedules."""

    def act(self, stacks: Tensor, history: Tensor, uniform: Tensor, rows: slice | Tensor) -> PolicyOutput:
        """`uniform` [B], numbers in [0, 1), is all the chance there is: one per environment and step, so that an
        environment's actions do not depend on which group it is in. `rows` says which environments these are."""

    def value(self, stacks: Tensor, history: Tensor) -> Tensor:
        """State values [B]: the bootstrap of a rollout's end and of truncated episodes."""


class Experience(Protocol):
    """Takes rollouts in. What it gives out differs: the newest rollout (`Latest.take`), or batches from a `Memory`.

    `Latest`, `Memory`, `Saver` and `CapturableStore` refine the four; skip them on a first reading."""

    def put(self, rollout: Rollout) -> None: ...

    def mark_gap(self) -> None:
        """The next rollout does not continue the last one: environments began anew."""

    def state(self) -> dict[str, Any]:
        """What is small enough to be part of a checkpoint's state."""

    def saver(self) -> Saver | None:
        """Writes what is too large for `state`, as of this call. None if `state` is everything."""

    def restore(self, state: dict[str, Any], directory: Path) -> None: ...


class Latest(Experience, Protocol):
    """An experience that on-policy algorithms take the newest rollout from."""

    def take(self) -> Rollout: ...


class Memory(Experience, Protocol):
    """An experience that value-based algorithms draw batches from."""

    def ready(self, rows: int) -> bool:
        """Are so many rows stored (or as many as fit), and can one be drawn?"""

    def draw(self, batch_size: int, importance_exponent: float, generator: torch.Generator) -> Any:
        """A ReplayBatch; for a GPU one whose rows are drawn later, as part of the update."""

    def feedback(self, ids: Tensor, priorities: Tensor) -> None:
        """New priorities for rows handed out earlier; ids travel with the batch."""


class Saver(Protocol):
    """Writes what is large of an experience into a checkpoint's directory while training goes on."""

    def __call__(self, directory: Path) -> None: ...

    def release(self) -> None:
        """It is written, or given up: nothing has to wait for it any longer."""


class ParameterStore(Protocol):
    """Owns the way from a local gradient to new parameters: exchange with other learners, finite check, norm clip,
    update rule, version + 1. The learner makes gradients; the store applies them."""

    capturable: bool  # can a CUDA graph hold a push? Then it is a CapturableStore.

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        """Apply a gradient and fill in its norm. Returns the new version, which the pushing learner's own parameters
        then are of. A gradient that is not finite raises NotFinite, in every learner alike, and changes nothing."""

    def pull(self, parameters: FlatParameters) -> int:
        """Bring a flat vector to the newest parameters, which others may have pushed. Returns their version."""

    def state(self) -> dict[str, Any]:
        """What an update reads besides the parameters."""

    def restore(self, state: dict[str, Any]) -> None: ...


class CapturableStore(ParameterStore, Protocol):
    """A store whose push is a part for the device, which a CUDA graph can hold, and one for the host."""

    def launch(self, gradient: Gradient, learning_rate: Tensor, good: Tensor) -> None:
        """The device's part. Once `good` is false, because something was not finite, parameters stay as they are."""

    def count_push(self) -> int:
        """The host's part; the new version."""

    def mutated_tensors(self) -> list[Tensor]:
        """Everything that `launch` changes."""

    def back_up_rule_state(self) -> None: ...

    def put_rule_state_back(self) -> None: ...

"""The four seams of phalanx. Everything that runs in parallel is an implementation of one of them.

    VectorEnvs      actions -> EnvStep          sampling/serial.py, sampling/processes.py
    Policy          observations -> actions     models/policies.py
    Experience      rollouts -> batches         replay/experience.py
    ParameterStore  gradient -> version         parameters/local.py

The loop they form, whatever the topology:

    while not finished:
        rollout = collector.collect(progress)   # VectorEnvs and Policy, step by step
        experience.put(rollout)
        learner.learn(experience, progress)     # Experience and ParameterStore, update by update
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from phalanx.types import EnvSpec, EnvStep, Gradient, PolicyOutput, Progress, Rollout


class VectorEnvs(Protocol):
    """Many environments in groups; while one group steps, the caller serves another."""

    spec: EnvSpec
    groups: list[slice]  # rows of each group, in order, covering all environments

    def ready(self, groups: Sequence[int], wait: bool = True) -> int | None:
        """The first of these groups that has finished its step; waits for one, or else gives None if there is none."""

    def recv(self, group: int) -> EnvStep:
        """Wait for the group's newest step. The first call gives the first frames. Views, valid until `send`."""

    def send(self, group: int, actions: np.ndarray) -> None:
        """Start the group's next step."""

    def unbalanced(self) -> bool:
        """Should `balance` be called at the next opportunity? Then no group begins its next rollout before others."""

    def balance(self) -> None:
        """Called between rollouts, when no group is stepping: the moment to put the house in order."""

    def state(self) -> dict[str, Any]:
        """Everything needed to go on elsewhere bit for bit; call only when every group was received."""

    def restore(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Policy(Protocol):
    """Chooses actions for a batch of frame stacks."""

    def begin(self, progress: Progress) -> None:
        """Called before each rollout: the time to move schedules."""

    def act(self, stacks: Tensor, history: Tensor, noise: Tensor, rows: slice | Tensor) -> PolicyOutput:
        """`noise` [B] uniform in [0, 1) is all the chance there is: one number per environment and step, so an
        environment's actions do not depend on which group it is in. `rows` says which environments these are."""

    def value(self, stacks: Tensor, history: Tensor) -> Tensor:
        """State values [B]: the bootstrap of a rollout's end and of truncated episodes."""


class Experience(Protocol):
    """Takes rollouts in, gives out what the algorithm learns from."""

    def put(self, rollout: Rollout) -> None: ...

    def take(self, *args: Any, **kwargs: Any) -> Any:
        """The newest rollout, or a batch drawn from memory: each algorithm knows which it asks for."""

    def feedback(self, ids: Tensor, priorities: Tensor) -> None:
        """New priorities for rows handed out earlier; ids travel with the batch."""

    def sever(self) -> None:
        """The next rollout does not continue the last one: environments began anew."""

    def state(self) -> dict[str, Any]:
        """What is small enough to be part of a checkpoint's state."""

    def saver(self) -> Saver | None:
        """What writes the rest, as it is now; None: there is no rest."""

    def restore(self, state: dict[str, Any], directory: Path) -> None: ...


class Saver(Protocol):
    """Writes what is large of an experience into a checkpoint's directory while training goes on."""

    def __call__(self, directory: Path) -> None: ...

    def release(self) -> None:
        """It is written, or given up: nothing has to wait for it any longer."""


class ParameterStore(Protocol):
    """Owns the parameters and the optimiser's state. The learner makes gradients; the store applies them."""

    def push(self, gradient: Gradient, learning_rate: float) -> int:
        """Apply a gradient; the new version."""

    def pull(self, model: nn.Module) -> int:
        """Bring the model to the newest parameters; their version."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...

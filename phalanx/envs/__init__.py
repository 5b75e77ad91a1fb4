"""Environments. Each is one simulator that writes frames into memory it is given; see `Env`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from phalanx.types import EnvSpec, Outcome


class Env(Protocol):
    """One simulator. The caller calls `reset` after each end of an episode, be it terminated or truncated."""

    spec: EnvSpec

    def reset(self, frame: np.ndarray) -> None:
        """Begin the next episode and write its first frame. After a lost life under episodic life the game goes on."""

    def step(self, action: int, frame: np.ndarray) -> Outcome:
        """Take one agent step and write the newest frame: at the end of an episode its true last one."""

    def prepare(self) -> None:
        """Do the work of the next `reset` ahead of time; a later `reset` gives the same frame with or without it."""

    def render(self) -> np.ndarray:
        """[height, width, 3] uint8, for people."""

    def state(self) -> dict[str, Any]:
        """The whole state, random generators included, as arrays, bytes and plain values. Where it holds `unsaved`, a
        number of steps, the running episode cannot be gone on with: once restored, the caller begins the next one."""

    def restore(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class ReplayingEnv(Env, Protocol):
    """An Env whose `restore` plays an episode again, for as long as that takes; the caller sets who is told of it."""

    heartbeat: Callable[[], None]
    """Called for each step that is played again: a sign of life."""

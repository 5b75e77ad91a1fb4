"""The random streams of a run: one tree, so that no stream is used twice and none depends on how a run is divided.

    run seed -> role -> environment (its number in the whole run) -> incarnation

An environment draws the same numbers in whichever replica, worker or topology it is. Nothing here needs torch.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Role(IntEnum):
    """What a stream is for. Numbers are part of the streams: new roles are added at the end."""

    NETWORK = 0  # initial weights
    ENVIRONMENT = 1  # (environment, incarnation): everything a simulator draws
    START = 2  # (environment): random actions before the first step
    ACTIONS = 3  # one uniform number for each environment and step
    LEARNING = 4  # (replica): shuffles, and draws from a memory
    EVALUATION = 5  # (environment, incarnation): simulators of evaluations
    EVALUATION_ACTIONS = 6
    RESUME = 7  # (steps): the seed of a run that goes on without its environments
    SUCCESSOR = 8  # (birth, steps): the seed of a replica that takes the place of a dead one
    TUNER = 9  # candidates


def stream(seed: int, role: Role, *path: int) -> np.random.SeedSequence:
    """The stream of a role; `path` says whose it is."""
    return np.random.SeedSequence(seed, spawn_key=(int(role), *path))


def number(seed: int, role: Role, *path: int) -> int:
    """The same as a seed of 63 bits, for generators that take a number."""
    return int(stream(seed, role, *path).generate_state(1, np.uint64)[0] >> 1)

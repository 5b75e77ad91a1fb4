"""Processes that die: how Ray says so, and how to learn of one that Ray starts again."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, NodeDiedError, ObjectLostError, RayActorError

from phalanx.errors import RunError

GONE = (RayActorError, GetTimeoutError, ObjectLostError, NodeDiedError)
"""What a call raises whose process, or the host that held its answer, is gone for the moment."""

LOOK = 1.0  # seconds between two looks
ANSWER_TIMEOUT = 10.0  # seconds that an answer which is there may take to arrive


def raise_if_hopeless(error: Exception, who: str) -> None:
    """A process that fails when it starts will not come back: say why, instead of waiting for it."""
    if getattr(error, "actor_init_failed", False):
        raise RunError(f"{who} could not be started: {error}") from None


class Watched:
    """Looks at a process without waiting for it. The process has a method `process` that gives its number."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.process = 0
        self.call: Any = None
        self.looked = 0.0

    def came_back(self) -> bool:
        """Has it died and come back since this was asked last?"""
        if self.call is None:
            if time.monotonic() - self.looked > LOOK:
                self.call = self.handle.process.remote()
            return False
        if not ray.wait([self.call], timeout=0)[0]:
            return False
        call, self.call, self.looked = self.call, None, time.monotonic()
        try:
            process = ray.get(call, timeout=ANSWER_TIMEOUT)
        except GONE:
            return False
        before, self.process = self.process, process
        return before not in (0, process)

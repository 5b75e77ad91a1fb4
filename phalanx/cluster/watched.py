"""Processes that die: how Ray says so, and how to learn of one that Ray starts again."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, NodeDiedError, ObjectLostError, RayActorError

from phalanx.errors import RunError

GONE = (RayActorError, GetTimeoutError, ObjectLostError, NodeDiedError)
"""What a call raises whose process, or the host that held its answer, is gone for the moment."""

DEAD = (RayActorError, NodeDiedError)
"""Those of them that tell of a death, and not of an answer that is late or lost."""

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
        self.gone = False

    def look(self) -> str:
        """What has become of it since this was asked last: "died", "came back", or nothing. A death may be noticed only
        when there is a successor."""
        if self.call is None:
            if time.monotonic() - self.looked > LOOK:
                self.call = self.handle.process.remote()
            return ""
        if not ray.wait([self.call], timeout=0)[0]:
            return ""
        call, self.call, self.looked = self.call, None, time.monotonic()
        try:
            process = ray.get(call, timeout=ANSWER_TIMEOUT)
        except GONE as error:
            was_gone, self.gone = self.gone, self.gone or isinstance(error, DEAD)
            return "died" if self.gone and not was_gone else ""
        before, self.process, self.gone = self.process, process, False
        return "came back" if before not in (0, process) else ""

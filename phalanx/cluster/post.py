"""Places in a fleet: who holds one comes and goes, the place stays. No Ray here."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from phalanx.cluster.quorum import SILENCE
from phalanx.runtime.share import Share
from phalanx.types import Progress

EVALUATOR = "evaluator"  # a kind of member that neither acts for the run nor learns
WORKER = "worker"  # a kind of member that makes steps together with the others of its kind; the first is their chief


@dataclass
class Post:
    """A place in the fleet, and the member that holds it now."""

    kind: str
    rank: int
    target: str
    share: Share
    extra: Any = None
    handle: Any = None
    calls: list[Any] = field(default_factory=list)
    own: Progress = field(default_factory=Progress)  # of the present member
    born: float = 0.0
    heard: float = 0.0
    begun: bool = False  # has it ever answered?
    silent: bool = False  # did it leave a question without an answer?
    arrival: Any = None  # its first answer, as soon as there is a process for it; None once that has come
    waits_for_room: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rank}"

    @property
    def answers(self) -> bool:
        """Has it answered lately? If not, nobody waits for it; it need not be dead."""
        return self.begun and not self.silent and time.monotonic() - self.heard < SILENCE

"""A replica in lock step that compares its parameters with the others' after every update."""

from __future__ import annotations

from typing import Any

from phalanx.replica import lockstep
from phalanx.topologies.lockstep import serve as serve_rightly


def serve(order: Any, parent: Any) -> None:
    lockstep.CHECK_EVERY = 1
    serve_rightly(order, parent)

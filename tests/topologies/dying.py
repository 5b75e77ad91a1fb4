"""A replica that is killed at a moment of its own: in the middle of a chunk, with the chunk's lock."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from phalanx.parameters.chunked import CentralParameters
from phalanx.topologies.asynchronous import serve as serve_rightly


def serve(order: Any, parent: Any) -> None:
    """What it was writing is torn. Only once it has iterated: death without a step would count as a fault of all."""
    publish, chance = CentralParameters.publish, np.random.default_rng(order.experiment.run.seed + order.share.rank)
    own = order.clock_rows()[order.share.rank]
    begun = int(own[0])

    def dying(self: CentralParameters, chunk: int) -> None:
        if own[0] > begun and chance.random() < 0.02:
            self.other(chunk)[:] = float("nan")
            os.kill(os.getpid(), signal.SIGKILL)
        publish(self, chunk)

    CentralParameters.publish = dying  # type: ignore[method-assign]
    serve_rightly(order, parent)

"""Checkpoints with a large part, written in a thread of their own so that training goes on.

What is small is copied at once; the large part (the replay memory) is written piece by piece by whoever owns it.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor

from phalanx.errors import RunError
from phalanx.runs.checkpoint import Checkpoints
from phalanx.runtime.affinity import on_any_core
from phalanx.seams import Saver

WRITE_TIMEOUT = 1800.0  # seconds the largest checkpoint may take


class BackgroundWriter:
    """At most one checkpoint is being written; its failure is raised by the next call."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None

    @property
    def busy(self) -> bool:
        thread = self.thread  # another thread may ask
        return thread is not None and thread.is_alive()

    def write(
        self,
        weights: dict[str, Tensor],
        state: Any,
        steps: int,
        score: float | None,
        saver: Saver,
    ) -> None:
        """Begin to write; only after the one before was finished."""
        self.finish()
        copied = copy_tree(state)

        def work() -> None:
            try:
                self.checkpoints.write(weights, copied, steps, score, saver)
            except Exception as error:
                self.failure = error
            finally:
                saver.release()

        self.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        with on_any_core():  # the owner needs its own
            self.thread.start()

    def finish(self) -> None:
        """Wait for what is being written, and raise what went wrong."""
        if self.thread is not None and self.thread.ident is not None:  # a signal may have come before it was started
            self.thread.join(WRITE_TIMEOUT)
            if self.thread.is_alive():
                raise RunError(f"a checkpoint was not written within {WRITE_TIMEOUT:g} s; is the disk stuck?")
        self.thread = None
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


def copy_tree(value: Any) -> Any:
    """The same nested value with tensors of its own: the training goes on changing the others."""
    if isinstance(value, dict):
        return {key: copy_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_tree(item) for item in value]
    return value.detach().clone() if isinstance(value, Tensor) else value

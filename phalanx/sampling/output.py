"""What environments print in their workers: it reaches the owner through a pipe, and the owner shows it or drops it.

A worker that wrote to the owner's own output would die of a `print` when that is a pipe nobody reads any more
(`phalanx train ... | head -1`). `ProcessEnvs` holds one `WorkerOutput` for all its workers.
"""

from __future__ import annotations

import os
import select
import sys
import threading

CHUNK = 4096  # bytes that a pipe which is ready for writing takes without blocking
PATIENCE_MS = 100  # for which a reader of our standard error may be busy before what it should read is dropped
STOP_SECONDS = 1.0  # that the thread may take to pass on the rest
LAST_READS = 64  # after which the rest is dropped: a process that an environment left behind may print for ever


class WorkerOutput:
    """A pipe whose `writer` is the standard output and error of every worker, and a thread that empties it."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        self._stop = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._pass_on, name="worker-output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Pass on what is left, once the workers are gone."""
        os.eventfd_write(self._stop, 1)
        self._thread.join(STOP_SECONDS)
        if not self._thread.is_alive():  # a thread that is stuck must not read from somebody else's descriptor
            for descriptor in (self._reader, self.writer, self._stop):
                os.close(descriptor)

    def _pass_on(self) -> None:
        sources = select.poll()
        sources.register(self._reader, select.POLLIN)
        sources.register(self._stop, select.POLLIN)
        left = LAST_READS
        while left:
            ready = [descriptor for descriptor, _ in sources.poll()]
            if self._reader in ready:
                show(os.read(self._reader, 1 << 16))
            elif self._stop in ready:
                return
            if self._stop in ready:
                left -= 1


def show(data: bytes) -> None:
    """Write to standard error whatever it takes without making anybody wait; the rest is dropped."""
    if sys.__stderr__ is None:
        return
    try:
        descriptor = sys.__stderr__.fileno()
        writable = select.poll()
        writable.register(descriptor, select.POLLOUT)
        for start in range(0, len(data), CHUNK):
            if not writable.poll(PATIENCE_MS):
                return
            os.write(descriptor, data[start : start + CHUNK])
    except (OSError, ValueError):  # it was closed, or is a pipe without a reader
        return

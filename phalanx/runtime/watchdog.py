"""The watchdog: ends a process whose main thread hangs where no signal reaches it.

Python runs the handlers of signals in the main thread, between two instructions. While that thread waits for a GPU that
will never answer, or for a simulator that never returns, Ctrl-C does nothing. A thread of its own learns of the signal
all the same, and of iterations that do not end; the workers and the shared memory go with the process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

STOPS = {int(signal.SIGINT), int(signal.SIGTERM)}
OBEYED = 20.0  # seconds within which a signal to stop must have had its effect
LOOK = 0.5  # seconds between two looks
FAREWELL = 5.0  # seconds for the last words, which may hang as well


class Watchdog:
    """Watches the main thread, which uses it as a context. `last_words` are told what is wrong before the end."""

    def __init__(self, excused: Callable[[], bool], last_words: Callable[[str], None]) -> None:
        self.excused = excused  # from ending at once: a checkpoint is being written
        self.last_words = last_words
        self.silence = math.inf  # seconds without a beat after which nobody lives there
        self.last_beat = time.monotonic()
        self.asked: float | None = None  # when a signal to stop came

    def __enter__(self) -> Watchdog:
        self.reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)
        self.wakeup_before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        signal.set_wakeup_fd(self.wakeup_before)
        self.writer.close()
        self.thread.join()
        self.reader.close()

    def beat(self) -> None:
        """A sign of life."""
        self.last_beat = time.monotonic()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """For work that may take as long as it will without a beat."""
        before, self.silence = self.silence, math.inf
        try:
            yield
        finally:
            self.beat()
            self.silence = before

    def _watch(self) -> None:
        while True:
            if select.select([self.reader], [], [], LOOK)[0]:
                signals = self.reader.recv(64)
                if not signals:
                    return
                if self.asked is None and not STOPS.isdisjoint(signals):
                    self.asked = time.monotonic()
            now = time.monotonic()
            if self.excused():
                self.asked = None if self.asked is None else now
            if self.asked is not None and now - self.asked > OBEYED:
                self._end(f"asked to stop {OBEYED:g} s ago, the process hangs")
            if now - self.last_beat > self.silence:
                self._end(f"no iteration has ended for {self.silence:g} s: the device or a simulator hangs")

    def _end(self, sentence: str) -> None:
        """Without any clean-up: what hangs could not be cleaned up."""
        threading.Timer(FAREWELL, os._exit, (1,)).start()
        with contextlib.suppress(Exception):  # a standard error that is no file
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        with contextlib.suppress(Exception):
            self.last_words(f"{sentence}; what the newest checkpoint holds is kept")
        os._exit(1)

"""The watchdog: ends a process whose main thread, or whichever a run is in, hangs where no signal reaches it.

Python runs the handlers of signals in the main thread, between two instructions. While that thread waits for a GPU that
will never answer, Ctrl-C does nothing. A thread of its own learns of the signal all the same, and of a run in which
nothing happens any more; the workers and the shared memory go with the process. (What hangs must let other threads run,
as every wait of torch does, and most libraries do.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

from phalanx.runtime.signals import STOPS

OBEYED = 20.0  # seconds within which a signal to stop must have had its effect
EXCUSED = 3600.0  # seconds for which a checkpoint that is being written is an excuse
LOOK = 0.5  # seconds between two looks
FAREWELL = 5.0  # seconds for the last words, which may hang as well


class Watchdog:
    """Watches the thread that uses it as a context. Of signals it hears from the main thread only.

    `pulse` gives something that changes as long as the run goes on. `writing` says whether a checkpoint is being
    written, in whatever thread. `last_words` is told what is wrong before the end.
    """

    def __init__(
        self, pulse: Callable[[], object], writing: Callable[[], bool], last_words: Callable[[str], None]
    ) -> None:
        self.pulse = pulse
        self.writing = writing
        self.last_words = last_words
        self.silence = math.inf  # seconds without a pulse after which the run is taken to hang

    def __enter__(self) -> Watchdog:
        self.reader, self.writer = socket.socketpair()
        self.reader.settimeout(LOOK)
        self.writer.setblocking(False)
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.thread.start()
        self.hears_signals = threading.current_thread() is threading.main_thread()
        if self.hears_signals:
            self.wakeup_before = signal.set_wakeup_fd(self.writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.hears_signals:
            signal.set_wakeup_fd(self.wakeup_before)
        self.writer.shutdown(socket.SHUT_RDWR)  # a child may hold it too
        self.thread.join(FAREWELL)
        self.writer.close()
        self.reader.close()

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """For work that may take as long as it will without a pulse."""
        before, self.silence = self.silence, math.inf
        try:
            yield
        finally:
            self.silence = before

    def _watch(self) -> None:
        asked = silent = excused = 0.0  # seconds since a signal to stop, of silence, of writing
        stop, pulse, last = False, None, time.monotonic()
        while (signals := self._signals()) is not None:
            stop = stop or not STOPS.isdisjoint(signals)
            now = time.monotonic()
            passed, last = min(now - last, 2 * LOOK), now  # a process that was stopped, and continues, was not silent
            excused = excused + passed if self.writing() else 0.0
            if 0 < excused < EXCUSED:
                asked = silent = 0.0
                continue
            before, pulse = pulse, self.pulse()
            silent = silent + passed if pulse == before and self.silence < math.inf else 0.0
            asked = asked + passed if stop else 0.0
            if asked > OBEYED:
                self._end(f"asked to stop {OBEYED:g} s ago, the process hangs")
            if silent > self.silence:
                self._end(f"nothing has happened for {self.silence:g} s: the device or a simulator hangs")

    def _signals(self) -> bytes | None:
        """Signals that came since the last look, after a while; None at the end."""
        try:
            return self.reader.recv(64) or None
        except TimeoutError:
            return b""

    def _end(self, sentence: str) -> None:
        """Without any clean-up: what hangs could not be cleaned up."""
        # the dump of a stack may block, and all of Python with it: this timer is not Python's
        faulthandler.dump_traceback_later(FAREWELL, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115
        with contextlib.suppress(Exception):
            self.last_words(f"{sentence}; what the newest checkpoint holds is kept")
        with contextlib.suppress(Exception):  # a standard error that is no file
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        os._exit(1)


def _forget_wakeup() -> None:
    """A child's signals are not its parent's."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeup)

"""Signals that end a run: the first asks it to leave; what does not leave in time, or is asked again, is interrupted.

Only a checkpoint that is being written is never torn: the interruption is tried again after it. The session heeds them
while its topology runs. Before and after, and in commands without a session, Ctrl-C interrupts at once. Signals that
come in a burst, as from a key that is held down, are one wish: what the first of them began is not torn by the rest.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

STOPS = {int(signal.SIGINT), int(signal.SIGTERM), int(signal.SIGHUP)}
GRACE_SECONDS = 2.0  # how long an iteration may go on after the first one
LOOK_AGAIN_SECONDS = 0.1  # after which an interruption is tried again that met a checkpoint being written
BURST_SECONDS = 1.0  # after an interruption, within which further ones are part of it
LEAVING = (SystemExit, KeyboardInterrupt, GeneratorExit)
"""What ends a program and is no `Exception`; an environment that raises it has failed like any other."""


class Interrupted(BaseException):
    """A signal asked the run to stop and the iteration did not end in time, or came when there was none."""


@contextlib.contextmanager
def unwrapped() -> Iterator[None]:
    """Compiled code that is interrupted, Ray's for one, may raise a SystemError because of it; within this it does not
    hide the interruption."""
    try:
        yield
    except SystemError as error:
        if isinstance(error.__cause__, Interrupted):
            raise error.__cause__ from None
        raise


def interrupt_once() -> None:
    """Have Ctrl-C raise `Interrupted`, once. A further one, when cleaning up has had its time, ends the process."""
    came = math.inf

    def arrived(number: int, frame: FrameType | None) -> None:
        nonlocal came
        now = time.monotonic()
        if came == math.inf:
            came = now
            raise Interrupted
        if now - came > GRACE_SECONDS:
            os._exit(128 + number)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else somebody wants it ignored
        signal.signal(signal.SIGINT, arrived)


def may_be_ctrl_c(error: BaseException) -> bool:
    """Could Python have raised this for a signal? Where somebody else heeds it, it could not."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


class StopSignals:
    """Within it the signals are the run's; afterwards everybody has back what was set up before."""

    def __init__(self, leave: Callable[[], object], writing: Callable[[], bool]) -> None:
        self.leave = leave
        self.writing = writing
        self.number: int | None = None  # of the first that came
        self.armed = False  # between entering and leaving
        self.interrupted = -math.inf  # when the last interruption was
        self.alarm: Any = None  # what others had set up: the handler, and when it was to ring
        self.handlers: dict[int, Any] = {}

    @property
    def name(self) -> str:
        return signal.Signals(self.number or signal.SIGTERM).name

    @property
    def exit_code(self) -> int:
        return 0 if self.number is None else 128 + self.number

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are the main thread's, and it has other things to do
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        heeded = STOPS - {signal.SIGHUP} if nohup else STOPS
        self.handlers = {number: signal.signal(number, self._arrived) for number in heeded}
        self.armed = True
        return self

    def __exit__(self, *exception: object) -> None:
        self.armed = False
        if self.alarm is not None:
            handler, timer = self.alarm
            self.calm()
            signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, *timer)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def calm(self) -> None:
        """No interruption any more by the first signal's clock."""
        if self.handlers:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            if not self.armed:
                return
            self.leave()
            handler = signal.signal(signal.SIGALRM, lambda *_: self._interrupt())
            self.alarm = handler, signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        """Leave whatever goes on, but for a checkpoint that is being written: it would be lost."""
        now = time.monotonic()
        if not self.armed or now - self.interrupted < BURST_SECONDS:
            return
        if not self.writing():
            self.interrupted = now
            raise Interrupted
        signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN_SECONDS)

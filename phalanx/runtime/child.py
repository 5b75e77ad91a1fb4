"""The one way to be a child process: how it is started, talks, dies and is heard of. Env workers are, and replicas.

    parent   child = Child("env worker 3"); child.start("package.module:serve", order, output=descriptor)
    child    serve(order, parent) runs until it returns, or until the parent is gone

A child runs the code that its parent runs, has a socket for what is rare, ignores the signals that reach a whole job
(its parent decides), and is killed by the system when its parent dies. What it dies of reaches the parent once, as a
traceback. The parent hears of its death by a descriptor that becomes readable.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from phalanx.errors import RunError, UserError
from phalanx.runtime.channel import receive, send

START_TIMEOUT = 120.0  # seconds a child may take to get ready, or to answer
STOP_TIMEOUT = 2.0  # seconds a child may take to leave
KILL_TIMEOUT = 60.0  # seconds the system may take to end a killed one, whose memory it frees, on a loaded machine
FAREWELL = 5.0  # seconds that telling the parent of an error may take
LONGEST_TRACEBACK = 16_000  # characters: less than a socket takes whether or not somebody reads
# The path is replaced before anything else is imported, so that a child runs the code its parent runs: `python -m` and
# `python -c` would look for it in the current directory first.
PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from phalanx.runtime.child import main; main()"


class Child:
    """A child process as its parent sees it, from its start to its last words."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.control: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.death_watch = -1  # readable when the process is dead
        self.traceback = ""  # of what it died of, once heard
        self.has_confessed = False  # did it tell itself what it died of?
        self.failed_at_once = False  # before it had done anything, so that another try is of no use

    def start(
        self,
        target: str,
        order: Any,
        output: int | None = None,
        descriptors: Sequence[int] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        """Start a process that calls `target` (`module:function`) with the order and its parent. It prints into the
        descriptor `output`, and inherits `descriptors`; `wait_ready` tells when it says that it is ready."""
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_TIMEOUT)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *module_path()],
                pass_fds=[theirs.fileno(), *descriptors],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the parent, even while a child is still starting
            )
        self.death_watch = os.pidfd_open(self.process.pid)
        with contextlib.suppress(OSError):  # one that died at once is named by `wait_ready`
            send(self.control, (target, order))

    def wait_ready(self, heartbeat: Callable[[], float] = float) -> None:
        message = self.hear(heartbeat)
        if message != "ready":
            raise ChildFailed(message[1] if message else "it died without a word")

    def tell(self, message: Any) -> None:
        """Send a message; a child that is dead may have said why, which is for `hear`."""
        assert self.control is not None
        with contextlib.suppress(OSError):
            send(self.control, message)

    def hear(self, heartbeat: Callable[[], float] = float) -> Any:
        """The next message; an error tuple if none comes. A child that says nothing for so long, and whose heartbeat
        has stood still, is killed, or its answer would be taken for that to a later question."""
        try:
            message = self._receive(heartbeat)
        except TimeoutError:
            self.kill()
            message = ("error", f"no answer for {START_TIMEOUT:g} s")
        except OSError as error:
            return ("error", f"no answer: {error}")
        self._note(message)
        return message

    def ask(self, message: Any) -> Any:
        """Send a rare message and wait for the answer."""
        self.tell(message)
        return self.hear()

    def last_words(self) -> str:
        """Why it died: the traceback it sent, or the signal that killed it."""
        if not self.traceback and self.control is not None:
            self.control.settimeout(0.2)
            with contextlib.suppress(OSError):
                self._note(receive(self.control))
        if self.traceback:
            return self.traceback
        code = None if self.process is None else self.process.poll()
        return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    def wait_for_death(self) -> None:
        """Of a child that is known to be dying."""
        assert self.process is not None
        self.process.wait(timeout=KILL_TIMEOUT)

    @property
    def is_reachable(self) -> bool:
        """Was it started, and not given up?"""
        return self.control is not None and self.control.fileno() >= 0

    def kill(self) -> None:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        try:
            self.process.wait(timeout=KILL_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RunError(f"{self.name} cannot be killed; it hangs in the system") from None

    def say_goodbye(self) -> None:
        """Close the socket: a child that waits for a message leaves."""
        if self.control is not None:
            self.control.close()

    def join(self, seconds: float) -> None:
        """Wait for the end of a child that was said goodbye; one that does not leave in time is killed."""
        if self.process is not None:
            try:
                self.process.wait(timeout=max(0.0, seconds))
            except subprocess.TimeoutExpired:
                self.kill()
        self.release()

    def release(self) -> None:
        """Close what belongs to this process alone; twice does no harm."""
        self.say_goodbye()
        if self.death_watch >= 0:
            os.close(self.death_watch)
            self.death_watch = -1

    def _note(self, message: Any) -> None:
        """Keep what a dying child says of its end."""
        if isinstance(message, tuple) and message[0] == "error":
            self.traceback = str(message[1])
            self.has_confessed = len(message) > 2
            self.failed_at_once = self.has_confessed and bool(message[2])

    def _receive(self, heartbeat: Callable[[], float]) -> Any:
        assert self.control is not None
        while True:
            before = heartbeat()
            try:
                return receive(self.control)
            except TimeoutError:
                if heartbeat() == before:
                    raise


class ChildFailed(Exception):  # noqa: N818
    """A child did not get ready."""


class ParentGone(BaseException):
    """The parent closed the socket, or died: there is nobody left to work for."""


class Parent:
    """The parent as its child sees it."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.failed_at_once: Callable[[], bool] = lambda: True  # asked when the child dies of an error

    def tell(self, message: Any) -> None:
        send(self.control, message)

    def hear(self) -> Any:
        """The next message; raises ParentGone if none can come."""
        message = receive(self.control)
        if message is None:
            raise ParentGone
        return message

    def confess(self) -> None:
        """Tell of the error that is being handled, as the last thing; a sentence for the user needs no traceback."""
        with contextlib.suppress(OSError):
            self.control.settimeout(FAREWELL)
            error = sys.exc_info()[1]
            words = str(error) if isinstance(error, UserError) else shortened(traceback.format_exc())
            self.tell(("error", words, self.failed_at_once()))


def main() -> None:
    """The program of a child; its control socket is the first argument."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they may reach the whole job; the parent decides
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    parent = Parent(socket.socket(fileno=int(sys.argv[1])))
    try:
        target, order = parent.hear()
        module, name = target.split(":")
        getattr(import_module(module), name)(order, parent)
    except ParentGone:
        return
    except BaseException:  # what calls sys.exit, or raises KeyboardInterrupt, has failed like anything else
        parent.confess()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(1)  # threads that were started must not keep the process


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to send this process a signal when its parent dies, should it hang at that moment."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, number)


def module_path() -> list[str]:
    """Where this process finds its modules, and last the current directory, where a user's environments may be."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return [entry for entry in sys.path if entry]
    path = [entry or here for entry in sys.path]
    return path if here in path else [*path, here]


def shortened(text: str, most: int = LONGEST_TRACEBACK) -> str:
    """The text without its middle, where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"

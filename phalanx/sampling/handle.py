"""An env worker as its owner sees it: a process, the socket for what is rare, and a descriptor that tells of its death.

`sampling/processes.py` holds one for each worker; `sampling/worker.py` is the other side.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from phalanx.errors import RunError
from phalanx.sampling.worker import Orders, receive, send

START_TIMEOUT = 120.0  # seconds a worker may take to make an environment, or to answer
STOP_TIMEOUT = 2.0  # seconds a worker may take to leave
# The path is replaced before anything else is imported, so that a worker runs the code its owner runs: `python -m` and
# `python -c` would look for it in the current directory first.
PROGRAM = "import sys; sys.path[:] = sys.argv[2:]; from phalanx.sampling.worker import main; main()"


class WorkerHandle:
    """One worker process, from its start to its last words."""

    def __init__(self, number: int, incarnation: int, wake: int) -> None:
        self.number = number
        self.incarnation = incarnation
        self.wake = wake
        self.control: socket.socket
        self.process: subprocess.Popen[bytes]
        self.death_watch = -1  # readable when the process is dead
        self.traceback = ""  # of what it died of, once heard
        self.raised_at_once = False  # by an environment that has never completed a step

    def start(self, orders: Orders, output: int) -> None:
        """Start the process, which prints into the descriptor `output`; `wait_ready` tells when its environments are
        made."""
        self.control, theirs = socket.socketpair()
        self.control.settimeout(START_TIMEOUT)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *module_path()],
                pass_fds=[theirs.fileno(), orders.memory, orders.wake, orders.owner_wake],
                # One thread each: a worker must not compete with the others for cores.
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C is for the owner, even while a worker is still starting
            )
        self.death_watch = os.pidfd_open(self.process.pid)
        with contextlib.suppress(OSError):  # one that died at once is named by `wait_ready`
            send(self.control, orders)

    def wait_ready(self, beat: Callable[[], float] = float) -> None:
        message = self.hear(beat)
        if message != "ready":
            raise WorkerFailed(message[1] if message else "it died without a word")

    def hear(self, beat: Callable[[], float] = float) -> Any:
        """The next message; an error tuple if none comes. One that says nothing for so long, and whose beat has stood
        still, is killed, or its answer would be taken for that to a later question."""
        try:
            message = self._receive(beat)
        except TimeoutError:
            self.kill()
            message = ("error", f"no answer for {START_TIMEOUT:g} s")
        except OSError as error:
            return ("error", f"no answer: {error}")
        self._note(message)
        return message

    def _note(self, message: Any) -> None:
        """Keep what a dying worker says of its end."""
        if isinstance(message, tuple) and message[0] == "error":
            self.traceback = str(message[1])
            self.raised_at_once = len(message) > 2 and bool(message[2])

    def _receive(self, beat: Callable[[], float]) -> Any:
        while True:
            before = beat()
            try:
                return receive(self.control)
            except TimeoutError:
                if beat() == before:
                    raise

    def ask(self, kind: str, content: Any = None) -> Any:
        """Send a rare message and wait for the answer."""
        with contextlib.suppress(OSError):  # a dead one may have said why
            send(self.control, (kind, content))
        return self.hear()

    def last_words(self) -> str:
        """Why it died: the traceback it sent, or the signal that killed it."""
        if not self.traceback:
            self.control.settimeout(0.2)
            with contextlib.suppress(OSError):
                self._note(receive(self.control))
        if self.traceback:
            return self.traceback
        code = self.process.poll()
        return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        try:
            self.process.wait(timeout=STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            raise RunError(f"env worker {self.number} cannot be killed; it hangs in the system") from None

    def release(self) -> None:
        """Close what belongs to this process alone; twice does no harm."""
        self.control.close()
        if self.death_watch >= 0:
            os.close(self.death_watch)
            self.death_watch = -1


class WorkerFailed(Exception):  # noqa: N818
    """A worker could not make its environments."""


def module_path() -> list[str]:
    """Where this process finds its modules, and last the current directory, where a user's environments may be."""
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return [entry for entry in sys.path if entry]
    path = [entry or here for entry in sys.path]
    return path if here in path else [*path, here]

"""Children that start at once: forks of a process that has loaded torch and phalanx, for tests of many deaths."""

from __future__ import annotations

import array
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from phalanx.runtime.channel import send
from phalanx.runtime.child import Child, module_path

HIGH = 500  # descriptors from here on are in nobody's way


class Source:
    """The process that is forked."""

    def __init__(self, *modules: str) -> None:
        self.control, theirs = socket.socketpair()
        command = [sys.executable, __file__, str(theirs.fileno()), json.dumps(modules)]
        path = {"PYTHONPATH": os.pathsep.join(module_path())}
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **path})

    def close(self) -> None:
        self.control.close()
        self.process.wait(60)

    def start(self, child: Child, target: str, order: Any, output: int | None, descriptors: Sequence[int]) -> None:
        """What `Child.start` does."""
        child.control, theirs = socket.socketpair()
        child.control.settimeout(120)
        with theirs:
            numbers = [theirs.fileno(), *descriptors]
            name = json.dumps({"numbers": numbers, "output": output is not None}).encode()
            passed = [*numbers, *([] if output is None else [output])]
            self.control.sendmsg([name], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))])
            child.process = Forked(int(self.control.recv(64)))  # type: ignore[assignment]
        child.death_watch = os.pidfd_open(child.process.pid)
        send(child.control, (target, order))


class Forked:
    """A fork, with what `Child` wants of a process. Those of a test end by SIGKILL, or at its end."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = os.pidfd_open(pid)

    def kill(self) -> None:
        signal.pidfd_send_signal(self.ended, signal.SIGKILL)

    def poll(self) -> int | None:
        return -signal.SIGKILL if select.select([self.ended], [], [], 0)[0] else None

    def wait(self, timeout: float) -> None:
        if not select.select([self.ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("fork", timeout)


def serve(control: socket.socket, modules: list[str]) -> None:
    from importlib import import_module

    from phalanx.runtime.child import main

    for module in modules:
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for forks
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, 4096, 64)
        if not text:
            return
        wanted = json.loads(text)
        if pid := os.fork():
            control.send(str(pid).encode())
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        control.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        for number, descriptor in zip(wanted["numbers"], high, strict=False):
            os.dup2(descriptor, number)
        if wanted["output"]:
            os.dup2(high[-1], 1)
            os.dup2(high[-1], 2)
        sys.argv[1] = str(wanted["numbers"][0])
        main()
        os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))

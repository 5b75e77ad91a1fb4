"""Cleans up after a local Ray, however the run ended: also after it was killed.

    python janitor.py DIRECTORY     waits until its standard input is closed, then kills every process whose environment
                                    names the directory, and removes it

Nothing but the standard library is imported: it must start at once, and take next to no memory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time

MARK = "PHALANX_CLUSTER"
"""The environment variable that names the directory in every process of a local Ray."""
LONGEST = 10.0  # seconds for which it tries


def marked(directory: str) -> list[int]:
    """Processes of that Ray; those that are dead, and wait to be reaped, have no environment."""
    mark = f"{MARK}={directory}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as environment:
                if mark in environment.read().split(b"\0"):
                    found.append(int(entry))
    return found


def clean(directory: str) -> None:
    deadline = time.monotonic() + LONGEST
    while (processes := marked(directory)) and time.monotonic() < deadline:
        for process in processes:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the run
    sys.stdin.buffer.read()
    clean(sys.argv[1])

"""Cleans up after a local Ray, however the run ended: also after it was killed.

    python janitor.py DIRECTORY     waits until its standard input is closed, then kills every process whose environment
                                    names the directory, or that Ray has named and has a file of it open, and removes it

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
TITLE = b"ray::"
LONGEST = 10.0  # seconds for which it tries


def marked(directory: str) -> list[int]:
    """Processes of that Ray; those that are dead, and wait to be reaped, have no environment."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and belongs(entry, directory)]


def belongs(process: str, directory: str) -> bool:
    """Some of Ray's processes write a title over their environment: those are known by it, and by their logs there."""
    if int(process) in (os.getpid(), os.getppid()):  # the run itself has logs of Ray open until it ends
        return False
    with contextlib.suppress(OSError), open(f"/proc/{process}/environ", "rb") as environment:
        if f"{MARK}={directory}".encode() in environment.read().split(b"\0"):
            return True
    with contextlib.suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as title:
        if title.read().startswith(TITLE):
            return any(link.startswith(f"{directory}/") for link in open_files(process))
    return False


def open_files(process: str) -> list[str]:
    found = []
    for descriptor in os.listdir(f"/proc/{process}/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/{process}/fd/{descriptor}"))
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

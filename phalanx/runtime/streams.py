"""The standard streams of the command line: always there, and a failure to write to them is told from any other."""

from __future__ import annotations

import os
import sys


def open_missing() -> None:
    """A stream that the caller has closed (`>&-`) leads nowhere: else the next file that is opened would take its
    place, and have in it what somebody prints."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", closefd=False))  # noqa: SIM115


def output_fails_with(error: OSError) -> bool:
    """Is it the standard output that cannot be written to? A line end more does no harm."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as again:
        return again.errno is not None and again.errno == error.errno
    return False


def drop_what_is_left() -> None:
    """What a stream cannot take goes nowhere, lest Python complain of it once more when it ends."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

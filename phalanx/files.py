"""Files in a directory that others may have made or changed: no link is followed, nothing but a plain file is read.

Configurations, records and checkpoints are read and written through these. A run directory may have been received from
anybody, so a name in it may be a link to somewhere else, a pipe that never ends, or a file of any size.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path
from typing import IO, Any

CLOSED_DOORS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a link is an error, and a pipe is not waited for


class NotPlainError(OSError):
    """A link, a pipe, a device or a directory stands where a plain file is wanted."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "it is not a plain file", str(path))


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a plain file, or NotPlainError; never waits."""
    try:
        descriptor = os.open(path, flags | CLOSED_DOORS, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # a link, a pipe or socket, a directory
            raise NotPlainError(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotPlainError(path)
    return descriptor


def read_plain(path: Path, limit: int) -> str:
    """The text of a plain file of at most `limit` bytes."""
    with os.fdopen(open_plain(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"it is larger than {limit} bytes", str(path))
        return file.read(limit).decode()


def open_to_append(path: Path, **options: Any) -> IO[str]:
    """A plain file whose lines are written one by one, made if it is not there."""
    return os.fdopen(open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a", buffering=1, **options)


def open_new(path: Path) -> IO[str]:
    """A file that did not exist; what has its name is removed first, never written through."""
    remove(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CLOSED_DOORS, 0o666), "w")


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: under a temporary name, synced to the disk, then renamed."""
    temporary = path.with_name(f".tmp-{path.name}")
    try:
        with open_new(temporary) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        remove(temporary, careless=True)
        raise


def remove(path: Path, careless: bool = False) -> None:
    """Remove a file, a directory with all it holds, or a link but not what it leads to; missing is fine. If
    `careless`, what cannot be removed stays."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=careless)
        else:
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError:
        if not careless:
            raise

"""Blocks of anonymous shared memory between processes of one host that did not start each other.

A block is a memory file without a name. Whoever knows the process that made it and its descriptor there can map it, as
long as both run on one host as one user. Nothing is left of it when the last of them is gone, however they ended, and
the size of /dev/shm does not matter.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

HEADER = 8  # numbers of 64 bits before the others


@dataclass(frozen=True)
class BlockAddress:
    """Where a block is; a value that can be sent to another process."""

    host: str
    process: int
    descriptor: int
    inode: int
    size: int  # float32 numbers

    @property
    def path(self) -> str:
        return f"/proc/{self.process}/fd/{self.descriptor}"

    def there(self) -> bool:
        """Does the process that made it still have it?"""
        try:
            return os.stat(self.path).st_ino == self.inode
        except OSError:
            return False


class SharedBlock:
    """A few int64 numbers, `header`, and many float32 numbers, `numbers`."""

    def __init__(self, descriptor: int, size: int) -> None:
        length = 8 * HEADER + 4 * size
        self.size = size
        memory = mmap.mmap(descriptor, length)
        self.header = np.frombuffer(memory, np.int64, HEADER)
        self.numbers = torch.from_numpy(np.frombuffer(memory, np.float32, size, 8 * HEADER))
        self.descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def create(cls, size: int) -> SharedBlock:
        descriptor = os.memfd_create("phalanx-block")
        os.ftruncate(descriptor, 8 * HEADER + 4 * size)
        return cls(descriptor, size)

    @property
    def address(self) -> BlockAddress:
        inode = os.fstat(self.descriptor).st_ino
        return BlockAddress(this_host(), os.getpid(), self.descriptor, inode, self.size)

    @classmethod
    def open(cls, address: BlockAddress) -> SharedBlock | None:
        """The block at an address, None if it is out of reach: on another host, or gone."""
        if address.host != this_host():
            return None
        with contextlib.suppress(OSError):
            descriptor = os.open(address.path, os.O_RDWR)
            if os.fstat(descriptor).st_ino == address.inode:
                return cls(descriptor, address.size)
            os.close(descriptor)
        return None


@cache
def this_host() -> str:
    """The same for processes that can map each other's blocks: one boot of one host, seen from one container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"

"""How the process treats memory it has freed."""

from __future__ import annotations

import ctypes

# of glibc's malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_KEPT = 32 << 20  # the greatest threshold that glibc takes
KEPT_IN_ALL = 512 << 20


def keep_freed_memory() -> None:
    """Have malloc keep what is freed: activations and gradients come and go in every update, and memory given back to
    the system is cleared again, page by page, when it is next touched. Larger blocks, such as a replay memory, still
    go back. Without glibc nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(M_TRIM_THRESHOLD, KEPT_IN_ALL)
        mallopt(M_TOP_PAD, LARGEST_KEPT // 2)

"""The arithmetic between screens of palette indices and frames, in numpy; `frames.c` has the same two functions.

Everything is exact in whole numbers, so that every implementation (this one, the compiled one, the GPU's in
`sampling/decode.py`) gives the same bits: a pixel of a half frame is (sum + 2) >> 2, one of an area frame
rint(sum / scale) with whole-number weights.
"""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType

import numpy as np

WIDTH = 160


def compiled() -> ModuleType | None:
    """`frames.c`, if there was a compiler when phalanx was installed: much faster than what is here."""
    try:
        return importlib.import_module("phalanx.envs._frames")
    except ImportError:
        return None


def half_frame(first: np.ndarray, last: np.ndarray, table: bytes, frame: np.ndarray) -> None:
    """The maximum of both screens [210, 160] without its first and last row, through a table of colours: the mean of
    each 2x2 pixels, halves rounded up -> [1, 104, 80]."""
    pixels = np.maximum(_colored(first[1:209], table), _colored(last[1:209], table))
    # Both bytes of a pair of columns are added as one number: much faster than strided additions.
    pairs = pixels.view(np.uint16)  # [208, 80]
    sums = (pairs & 255) + (pairs >> 8)
    frame[0] = (sums[::2] + sums[1::2] + 2) >> 2


def area_frame(first: np.ndarray, last: np.ndarray, tables: bytes, frame: np.ndarray) -> None:
    """The maximum of both screens [rows, 160], averaged over areas, by table of 256 colours -> [channels, 84, 84]."""
    resize = area_resize(len(first))
    for channel in range(len(frame)):
        table = tables[256 * channel : 256 * (channel + 1)]
        frame[channel] = resize(np.maximum(_colored(first, table), _colored(last, table)))


def _colored(screen: np.ndarray, table: bytes) -> np.ndarray:
    return np.frombuffer(screen.tobytes().translate(table), np.uint8).reshape(screen.shape)


def overlaps(size: int, target: int) -> tuple[int, np.ndarray]:
    """Area resize of `size` pixels to `target`: equal blocks, and in each the overlaps [out, in] in whole units."""
    blocks = math.gcd(size, target)
    ins, outs = np.arange(size // blocks), np.arange(target // blocks)[:, None]
    first = np.maximum(ins * len(outs), outs * len(ins))
    last = np.minimum((ins + 1) * len(outs), (outs + 1) * len(ins))
    return blocks, np.maximum(last - first, 0).astype(np.float32)


class AreaResize:
    """Area average of a [rows, 160] screen to 84x84; each pixel is rint(sum / scale), ties to even.

    A sum has whole-number weights and stays below 2^24, hence is exact in float32 in any order of summation.
    """

    def __init__(self, rows: int) -> None:
        self.blocks, self.row_weights = overlaps(rows, 84)  # [out, in] of one block of rows
        column_weights = overlaps(WIDTH, 84)[1]
        self.column_weights = np.ascontiguousarray(column_weights.T)  # [40, 21]
        self.scale = np.float32(rows // self.blocks * len(self.column_weights))

    def sums(self, image: np.ndarray) -> np.ndarray:
        """[rows, 160] -> [84, 84] weighted sums."""
        rows: np.ndarray = np.matmul(self.row_weights, image.astype(np.float32).reshape(self.blocks, -1, WIDTH))
        sums: np.ndarray = np.matmul(rows.reshape(-1, len(self.column_weights)), self.column_weights)
        return sums.reshape(84, 84)

    def __call__(self, image: np.ndarray) -> np.ndarray:
        return np.rint(self.sums(image) / self.scale).astype(np.uint8)


@functools.cache
def area_resize(rows: int) -> AreaResize:
    return AreaResize(rows)

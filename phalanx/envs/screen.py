"""From the emulator's palette indices to the frame an agent sees: colour table, two-frame maximum, resize.

The emulator gives raw screens of palette indices, which cost little to copy; `AtariEnv` captures them into `screens`
of one of the two classes here, and `write` makes the frame. Everything is exact integer arithmetic, so that another
implementation (on a GPU, say) can reproduce it bit for bit: a frame is rint(sum / scale) with whole-number weights.
A worker has the resizing of all its environments of a group done at once (`frames_together`).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

WIDTH = 160
PAL_ROWS = 250  # screens of European games; all others use the American palette

# Colours of the even palette indices 0, 2 .. 254, as the emulator shows them, red green blue.
_NTSC = bytes.fromhex(
    "0000004a4a4a6f6f6f8e8e8eaaaaaac0c0c0d6d6d6ececec48480069690f86861da2a22abbbb35d2d240e8e84afcfc54"
    "7c2c00904811a26221b47a30c3903dd2a44adfb755ecc860901c00a33915b55328c66c3ad5824ae39759f0aa67fcbc74"
    "940000a71a1ab83232c84848d65c5ce46f6ff08080fc909084006497197aa8308fb846a2c659b3d46cc3e07cd2ec8ce0"
    "50008468199a7d30ad9246c0a459d0b56ce0c57ceed48cfc140090331aa34e32b56848c67f5cd5956fe3a980f0bc90fc"
    "000094181aa72d32b84248c8545cd6656fe47580f08490fc001c88183b9d2d57b04272c2548ad265a0e175b5ef84c8fc"
    "0030641850802d6d984288b054a0c565b7d975cceb84e0fc00403018624e2d8169429e8254b89965d1ae75e7c284fcd4"
    "0044001a661a32843248a0485cba5c6fd26f80e88090fc90143c00355f18527e2d6e9c4287b7549ed065b4e775c8fc84"
    "3038005059166d762b88923ea0ab4fb7c25fccd86ee0ec7c482c00694d14866a26a28638bb9f47d2b656e8cc63fce070"
)
_PAL = bytes.fromhex(
    "0000002b2b2b525252767676979797b6b6b6d2d2d2ececec0000002b2b2b525252767676979797b6b6b6d2d2d2ececec"
    "80580096711aab8732be9c48cfaf5cdfc06feed180fce090445c005e791a7693328cac48a0c25cb3d76fc4ea80d4fc90"
    "70340089511aa06b32b68448c99a5cdcaf6fecc280fcd4900064141a803532985248b06e5cc5876fd99e80ebb490fcc8"
    "700014891a35a03252b6486ec95c87dc6f9eec80b4fc90c8005c5c1a7676328e8e48a4a45cb8b86fcbcb80dcdc90ecec"
    "70005c841a74963289a8489eb75cb0c66fc1d380d1e090e0003c70195a892f75a0448eb657a5c968badc79ceec88e0fc"
    "5800706e1a898332a09648b6a75cc9b76fdcc680ecd490fc002070193f892f5aa04474b6578bc968a1dc79b5ec88c8fc"
    "3400804a1a965f32ab7248be835ccf936fdfa280eeb090fc0000881a1a9d3232b04848c25c5cd26f6fe18080ef9090fc"
    "0000002b2b2b525252767676979797b6b6b6d2d2d2ececec0000002b2b2b525252767676979797b6b6b6d2d2d2ececec"
)


class Palette(NamedTuple):
    """What the emulator shows for each of the 256 palette indices."""

    rgb: np.ndarray  # [256, 3] uint8
    grey: np.ndarray  # [256] uint8


def palette(rows: int) -> Palette:
    """The palette of a game whose screen has so many rows."""
    colors = np.frombuffer(_PAL if rows == PAL_ROWS else _NTSC, np.uint8).reshape(128, 3)
    luminance = np.rint(colors @ np.array([0.2989, 0.5870, 0.1140])).astype(np.uint8)
    rgb = np.repeat(colors, 2, axis=0)
    rgb[1::2] = luminance[:, None]  # odd indices are pixels that lost their colour
    grey = np.repeat(luminance, 2)
    grey[1:-1:2] = colors[1:, 2]  # the emulator looks one entry too far for these and finds the next colour's blue
    grey[-1] = 0
    return Palette(rgb, grey)


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
        self.block_rows = rows // self.blocks
        self.scale = np.float32(self.block_rows * len(self.column_weights))

    def sums(self, blocks: np.ndarray) -> np.ndarray:
        """[k, block_rows, 160] float32 blocks of a screen -> [k, rows out, 84] weighted sums."""
        rows: np.ndarray = np.matmul(self.row_weights, blocks)
        sums: np.ndarray = np.matmul(rows.reshape(-1, len(self.column_weights)), self.column_weights)
        return sums.reshape(*rows.shape[:2], 84)

    def __call__(self, blocks: np.ndarray) -> np.ndarray:
        """[k, block_rows, 160] grey blocks -> [k, rows out, 84] frame rows."""
        mean = self.sums(blocks.astype(np.float32))
        np.divide(mean, self.scale, out=mean)
        np.rint(mean, out=mean)
        return mean.astype(np.uint8)


@functools.cache
def scratch(depth: int, rows: int) -> np.ndarray:
    """[depth, rows, 160]: where the emulators of this process leave their last screens. One for all of them, so that
    it stays in the cache: an environment takes what its frame needs before another one acts."""
    return np.zeros((depth, rows, WIDTH), np.uint8)


@functools.cache
def small_scratch(depth: int) -> bytearray:
    """The same for half screens."""
    return bytearray(depth * 104 * 80)


@functools.cache
def flag_scratch(depth: int, shape: tuple[int, ...]) -> np.ndarray:
    """The same for what differs between two screens."""
    return np.zeros((depth, *shape), bool)


class HalfScreens:
    """Rows 1, 3 .. 207 and even columns of each captured screen, as palette indices."""

    def __init__(self, depth: int) -> None:
        self.screens = scratch(depth, 210)
        # The low byte of a pair of pixels is its even column: much faster than a strided copy.
        self.pairs = self.screens.view("<u2")[:, 1:209:2]

    def write(self, half: np.ndarray) -> None:
        half[...] = self.pairs  # faster than np.copyto


class RawScreen:
    """Palette indices, for a decoder elsewhere (see `sampling/decode.py`): half screens, or whole ones."""

    def __init__(self, rows: int, depth: int, half: bool) -> None:
        self.screens = scratch(depth, rows)
        self.shape = (depth, 104, 80) if half else (depth, rows, WIDTH)
        self._half = HalfScreens(depth) if half else None

    def write(self, frame: np.ndarray) -> None:
        if self._half is not None:
            self._half.write(frame)
        else:
            np.copyto(frame, self.screens)


class HalfScreen:
    """104x80 grey frames: rows 1, 3 .. 207 and even columns of a screen with 210 rows."""

    shape = (1, 104, 80)

    def __init__(self, colors: Palette, depth: int) -> None:
        half = HalfScreens(depth)
        self.screens, self._pairs = half.screens, half.pairs
        self._bytes = small_scratch(depth)
        self._small = np.frombuffer(self._bytes, np.uint8).reshape(depth, 104, 80)
        self._table = colors.grey.tobytes()

    def write(self, frame: np.ndarray) -> None:
        """Write the maximum of the captured screens."""
        self._small[...] = self._pairs
        grey = np.ndarray(self._small.shape, np.uint8, self._bytes.translate(self._table))
        np.maximum(grey[0], grey[-1], out=frame[0])


class Waiting(NamedTuple):
    """A frame whose changed blocks are still to be resized."""

    screen: AreaScreen
    changed: np.ndarray  # indices of blocks
    raw: np.ndarray  # [depth, changed, pixels] palette indices
    frame: np.ndarray


class Later:
    """Frames put off by `frames_together`, so that the blocks of many share each call: on so little data the calls
    cost more than the work."""

    active = False
    waiting: ClassVar[list[Waiting]] = []
    blocks = 0
    LIMIT = 64  # blocks; the cost of each hardly falls beyond that

    @classmethod
    def add(cls, frame: Waiting) -> None:
        cls.waiting.append(frame)
        cls.blocks += len(frame.changed)
        if cls.blocks >= cls.LIMIT:
            finish_frames()


def finish_frames() -> None:
    """Write the frames that were put off."""
    waiting, Later.waiting, Later.blocks = Later.waiting, [], 0
    for kind, alike in itertools.groupby(waiting, key=lambda frame: frame.screen.kind):
        _write_frames(kind, list(alike))


@contextlib.contextmanager
def frames_together() -> Iterator[None]:
    """Frames written within are complete at its end, or after `finish_frames`."""
    before, Later.active = Later.active, True
    try:
        yield
        finish_frames()
    finally:
        Later.active = before


def _write_frames(kind: AreaKind, frames: Sequence[Waiting]) -> None:
    """Resize the changed blocks of frames of one kind, in the order in which they came."""
    raw = np.concatenate([frame.raw for frame in frames], axis=1) if len(frames) > 1 else frames[0].raw
    for channel, table in enumerate(kind.tables if raw.size else ()):
        color = np.frombuffer(bytearray(raw).translate(table), np.uint8).reshape(*raw.shape[:2], -1, WIDTH)
        rows, start = kind.resize(np.maximum(color[0], color[-1])), 0
        for frame in frames:
            end = start + len(frame.changed)
            frame.screen.shown[channel, frame.changed] = rows[start:end]
            start = end
    for frame in frames:
        np.copyto(frame.frame, frame.screen.shown.reshape(frame.frame.shape))


class AreaKind(NamedTuple):
    """What screens of equal size and colours share."""

    tables: list[bytes]  # grey or colour of each palette index, by channel
    resize: AreaResize


@functools.cache
def area_kind(rows: int, rgb: bool) -> AreaKind:
    colors = palette(rows)
    channels = colors.rgb.T if rgb else colors.grey[None]
    return AreaKind([channel.tobytes() for channel in channels], AreaResize(rows))


class AreaScreen:
    """84x84 frames, grey or three colours. Only blocks of rows that may have changed since the last frame are computed:
    those where a captured screen differs from the one before it, in this step or in the last."""

    def __init__(self, rows: int, depth: int, rgb: bool) -> None:
        self.kind = area_kind(rows, rgb)
        self.screens = scratch(depth, rows)
        blocks, channels = self.kind.resize.blocks, len(self.kind.tables)
        self.shape = (channels, 84, 84)
        self.shown = np.zeros((channels, blocks, 84 // blocks, 84), np.uint8)
        self._blocks = self.screens.reshape(depth, blocks, -1)
        self._last = np.zeros_like(self._blocks[-1])  # the screen captured last: index 0, which is black
        words = [screen.view(np.uint64) for screen in (self._last, *self._blocks)]
        self._pairs = list(itertools.pairwise(words))  # each screen after the one before it
        self._differs = flag_scratch(depth, words[0].shape)
        self._flags = self._differs.view(np.uint32)  # four at a time
        self._moved = np.zeros(blocks, np.uint32)  # blocks that changed in the last step

    def write(self, frame: np.ndarray) -> None:
        """Write the maximum of the captured screens."""
        changed = self._changed()
        raw = self._blocks.take(changed, axis=1)
        self._last[changed] = raw[-1]
        waiting = Waiting(self, changed, raw, frame)
        if Later.active:
            Later.add(waiting)
        else:
            _write_frames(self.kind, [waiting])

    def _changed(self) -> np.ndarray:
        """Indices of the blocks that may differ from those shown."""
        for (before, after), differs in zip(self._pairs, self._differs, strict=True):
            np.not_equal(before, after, out=differs)
        moved = np.bitwise_or.reduce(self._flags[0] | self._flags[-1], axis=1)
        changed: np.ndarray = (moved | self._moved).nonzero()[0]
        self._moved = moved
        return changed

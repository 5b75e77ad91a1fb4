"""From the emulator's palette indices to the frame an agent sees: colour tables, and what is done with a screen.

The emulator gives raw screens of palette indices, which cost little to copy; `AtariEnv` captures them into `screens`
of one of the classes here, and `write` makes the frame, in compiled code where there is some (see `frames`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from phalanx.envs import frames as plain
from phalanx.envs.frames import WIDTH, compiled

FRAMES = compiled() or plain
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


@functools.cache
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


@functools.cache
def scratch(depth: int, rows: int) -> np.ndarray:
    """[depth, rows, 160]: where the emulators of this process leave their last screens. One for all of them, so that
    it stays in the cache: an environment takes what its frame needs before another one acts."""
    return np.zeros((depth, rows, WIDTH), np.uint8)


class RawScreen:
    """Palette indices of whole screens, for a decoder elsewhere (see `sampling/decode.py`)."""

    def __init__(self, rows: int, depth: int) -> None:
        self.screens = scratch(depth, rows)
        self.shape = self.screens.shape

    def write(self, frame: np.ndarray) -> None:
        np.copyto(frame, self.screens)


class HalfScreen:
    """104x80 grey frames: the means of 2x2 pixels of rows 1 to 208 of a screen with 210 rows."""

    shape = (1, 104, 80)

    def __init__(self, depth: int) -> None:
        self.screens = scratch(depth, 210)
        self._first, self._last = self.screens[0], self.screens[-1]
        self._table = palette(210).grey.tobytes()

    def write(self, frame: np.ndarray) -> None:
        """Write the maximum of the captured screens."""
        FRAMES.half_frame(self._first, self._last, self._table, frame)


class AreaScreen:
    """84x84 frames, grey or three colours, averaged over areas."""

    def __init__(self, rows: int, depth: int, rgb: bool) -> None:
        self.screens = scratch(depth, rows)
        self._first, self._last = self.screens[0], self.screens[-1]
        colors = palette(rows)
        self._tables = colors.rgb.T.tobytes() if rgb else colors.grey.tobytes()
        self.shape = (len(self._tables) // 256, 84, 84)

    def write(self, frame: np.ndarray) -> None:
        """Write the maximum of the captured screens."""
        FRAMES.area_frame(self._first, self._last, self._tables, frame)

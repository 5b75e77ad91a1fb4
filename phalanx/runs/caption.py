"""A line of text above a picture: the score and the step of a game, in a video."""

from __future__ import annotations

import numpy as np

DIGITS = (0o75557, 0o26227, 0o71747, 0o71717, 0o55711, 0o74717, 0o74757, 0o71222, 0o75757, 0o75717)
LETTERS = {"S": 0o74717, "C": 0o74447, "O": 0o75557, "R": 0o75765, "E": 0o74747, "T": 0o72222, "P": 0o75744}
GLYPHS = {**{str(digit): glyph for digit, glyph in enumerate(DIGITS)}, **LETTERS, "-": 0o00700, " ": 0o00000}
"""What a text may consist of: 5 rows of 3 pixels each, an octal digit a row."""
MARGIN = 2  # pixels around the line
INK = np.uint8(220)


def captioned(picture: np.ndarray, text: str) -> np.ndarray:
    """The picture [height, width, 3] below a band with the text; what is wider than the picture is cut off."""
    line = np.concatenate([_letter(glyph) for glyph in text], axis=1)
    height, width = line.shape[0] + 2 * MARGIN, picture.shape[1]
    band = np.zeros((height, width, 3), np.uint8)
    line = line[:, : width - 2 * MARGIN]
    band[MARGIN:-MARGIN, MARGIN : MARGIN + line.shape[1]] = INK * line[:, :, None]
    return np.concatenate([band, picture])


def _letter(glyph: str) -> np.ndarray:
    """[5, 4] of 0 and 1, with the gap to the next letter."""
    rows = [GLYPHS[glyph] >> 3 * (4 - row) for row in range(5)]
    return np.array([[row >> 2 & 1, row >> 1 & 1, row & 1, 0] for row in rows], np.uint8)

"""Frames from palette indices: numpy and compiled, against a slow reference, cv2 and each other."""

from __future__ import annotations

import importlib.metadata
import math
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from phalanx.envs import frames as plain
from phalanx.envs.frames import AreaResize, compiled

IMPLEMENTATIONS = [
    pytest.param(plain, id="numpy"),
    pytest.param(
        compiled() or plain, id="compiled", marks=pytest.mark.skipif(not compiled(), reason="there was no C compiler")
    ),
]
TABLE = np.random.default_rng(7).permutation(256).astype(np.uint8)


def test_there_is_compiled_code_where_there_is_a_compiler() -> None:
    """Otherwise nobody would notice that it does not compile."""
    try:
        importlib.metadata.distribution("phalanx")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("phalanx is not installed")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not shutil.which(compiler) or not headers.exists():
        pytest.skip("there is no C compiler, or Python's headers are missing")
    assert compiled()


def screens_of(rows: int, seed: int, colors: int = 256) -> np.ndarray:
    """Two screens like those of games: rows repeat the row above, pixels the pixel before; the second differs here and
    there."""
    rng = np.random.default_rng(seed)
    screen = rng.integers(0, colors, (rows, 160), dtype=np.uint8)
    for column in range(1, 160):
        screen[:, column] = np.where(rng.random(rows) < 0.8, screen[:, column - 1], screen[:, column])
    for row in range(1, rows):
        if rng.random() < 0.6:
            screen[row] = screen[row - 1]
    other = screen.copy()
    for row, column in zip(rng.integers(0, rows, 6), rng.integers(0, 160, 6), strict=True):
        other[row : row + 3, column : column + 4] = rng.integers(0, colors)
    return np.stack([screen, other])


def slow_area_frame(image: np.ndarray) -> np.ndarray:
    """Every pixel cut into so many that the cuts fit both sizes; the mean of whole numbers, ties to even."""
    down, across = 84 // math.gcd(len(image), 84), 21
    fine = image.astype(np.uint32).repeat(down, 0).repeat(across, 1)
    height, width = len(fine) // 84, fine.shape[1] // 84
    sums = fine.reshape(84, height, 84, width).sum((1, 3))
    whole, rest = np.divmod(sums, height * width)
    up = (2 * rest > height * width) | ((2 * rest == height * width) & (whole % 2 == 1))
    return (whole + up).astype(np.uint8)


@pytest.mark.parametrize("frames", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(5))
def test_half_frames_are_means_of_two_by_two_pixels(frames: ModuleType, seed: int) -> None:
    screens, frame = screens_of(210, seed), np.zeros((1, 104, 80), np.uint8)
    frames.half_frame(screens[0], screens[1], TABLE.tobytes(), frame)
    greatest = TABLE[screens].max(0)[1:209].astype(int)
    for row, column in np.ndindex(104, 80):
        four = greatest[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        assert frame[0, row, column] == (four.sum() + 2) >> 2


@pytest.mark.parametrize("frames", IMPLEMENTATIONS)
@pytest.mark.parametrize("levels", [256, 2, 7])
def test_half_frames_equal_bilinear_ones_of_cv2(frames: ModuleType, levels: int) -> None:
    cv2 = pytest.importorskip("cv2")
    screens = np.random.default_rng(levels).integers(0, levels, (2, 210, 160), dtype=np.uint8)
    frame = np.zeros((1, 104, 80), np.uint8)
    frames.half_frame(screens[0], screens[1], TABLE.tobytes(), frame)
    greatest = TABLE[screens].max(0)[1:209]
    assert np.array_equal(frame[0], cv2.resize(greatest, (80, 104), interpolation=cv2.INTER_LINEAR))


@pytest.mark.parametrize("frames", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [210, 214, 220, 230])
def test_area_frames_equal_a_slow_reference(frames: ModuleType, rows: int) -> None:
    for seed, colors in enumerate((256, 2, 5)):
        screens, frame = screens_of(rows, seed, colors), np.zeros((1, 84, 84), np.uint8)
        frames.area_frame(screens[0], screens[1], TABLE.tobytes(), frame)
        assert np.array_equal(frame[0], slow_area_frame(TABLE[screens].max(0)))


@pytest.mark.parametrize("frames", IMPLEMENTATIONS)
def test_every_channel_has_its_table(frames: ModuleType) -> None:
    screens, tables = screens_of(250, 3), np.stack([TABLE, 255 - TABLE, np.roll(TABLE, 9)])
    frame = np.zeros((3, 84, 84), np.uint8)
    frames.area_frame(screens[0], screens[1], tables.tobytes(), frame)
    for shown, table in zip(frame, tables, strict=True):
        assert np.array_equal(shown, AreaResize(250)(table[screens].max(0)))


@pytest.mark.skipif(not compiled(), reason="there was no C compiler")
@settings(max_examples=100, deadline=None)
@given(
    arrays(np.uint8, (2, 210, 20), elements=st.integers(0, 3), fill=st.integers(0, 3)),
    st.integers(1, 8),
    st.permutations(range(256)),
)
def test_compiled_frames_equal_those_of_numpy(tiles: np.ndarray, width: int, colors: list[int]) -> None:
    """Screens of stripes, some of which repeat over rows and columns."""
    screens = np.ascontiguousarray(np.resize(tiles.repeat(width, 2), (2, 210, 160)))
    fast = compiled()
    assert fast is not None
    for name, shape in (("half_frame", (1, 104, 80)), ("area_frame", (1, 84, 84))):
        ours, theirs = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
        getattr(fast, name)(screens[0], screens[1], bytes(colors), ours)
        getattr(plain, name)(screens[0], screens[1], bytes(colors), theirs)
        assert np.array_equal(ours, theirs)


@pytest.mark.skipif(not compiled(), reason="there was no C compiler")
def test_compiled_frames_refuse_what_does_not_fit() -> None:
    fast, screens, frame = compiled(), screens_of(210, 0), np.zeros((1, 84, 84), np.uint8)
    assert fast is not None
    table = TABLE.tobytes()
    wrong = [
        (fast.area_frame, (screens[0], screens[1], table, frame[:, 1:])),
        (fast.area_frame, (screens[0], screens[1, 1:], table, frame)),
        (fast.area_frame, (screens[0], screens[1], table[1:], frame)),
        (fast.area_frame, (screens[0, :80], screens[1, :80], table, frame)),
        (fast.half_frame, (screens[0], screens[1], table, frame)),
        (fast.half_frame, (screens[0, 1:], screens[1, 1:], table, np.zeros((1, 104, 80), np.uint8))),
    ]
    for function, arguments in wrong:
        with pytest.raises(ValueError, match="do not fit"):
            function(*arguments)
    with pytest.raises(TypeError, match="4 arguments are needed"):
        fast.area_frame(screens)
    with pytest.raises((BufferError, ValueError)):
        fast.area_frame(screens[0], screens[1], table, table)  # cannot be written to
    with pytest.raises((BufferError, ValueError)):
        fast.half_frame(screens[0].T, screens[1], table, frame)
    with pytest.raises(TypeError):
        fast.half_frame(screens[0], screens[1], None, frame)


@pytest.mark.parametrize("rows", [210, 214, 220, 230, 250])
def test_area_resize_equals_cv2_but_for_exact_ties(rows: int) -> None:
    cv2 = pytest.importorskip("cv2")
    resize, rng = AreaResize(rows), np.random.default_rng(rows)
    for levels in (256, 2, 7):
        image = rng.integers(0, levels, (rows, 160), dtype=np.uint8)
        ours, theirs = resize(image), cv2.resize(image, (84, 84), interpolation=cv2.INTER_AREA)
        tie = resize.sums(image) % resize.scale == resize.scale / 2
        assert np.array_equal(ours[~tie], theirs[~tie])
        assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1


def test_area_resize_sums_are_whole_numbers() -> None:
    resize, white = AreaResize(250), np.full((250, 160), 255, np.uint8)
    assert (resize.sums(white) == 255 * resize.scale).all() and 255 * resize.scale < 2**24
    assert (resize(white) == 255).all()

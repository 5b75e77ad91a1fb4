from __future__ import annotations

import errno
import os
import sys
import weakref
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import RunError, UserError
from phalanx.runs.caption import captioned
from phalanx.runs.video import LARGE, enlargement, write_video

av = pytest.importorskip("av")


def frames(count: int = 6, height: int = 21, width: int = 33) -> Iterator[np.ndarray]:
    for index in range(count):
        frame = np.zeros((height, width, 3), np.uint8)
        frame[:, : 4 * (index + 1)] = (255, 40 * index % 256, 0)
        yield frame


def read(path: Path) -> list[tuple[Fraction, np.ndarray]]:
    """When each picture of a file is shown, and the picture."""
    with av.open(str(path)) as file:
        return [(picture.pts * picture.time_base, picture.to_ndarray(format="rgb24")) for picture in file.decode()]


def test_mp4(tmp_path: Path) -> None:
    path = tmp_path / "new" / "game.mp4"
    assert write_video(path, frames(), fps=15) == 6
    assert path.read_bytes()[4:8] == b"ftyp"
    assert [file.name for file in path.parent.iterdir()] == ["game.mp4"]
    shown = read(path)
    assert [when for when, _ in shown] == [Fraction(index, 15) for index in range(6)]
    with av.open(str(path)) as file:
        assert file.streams.video[0].codec_context.pix_fmt == "yuv420p"
    first = shown[0][1]
    assert first.shape == (21 * 14, 33 * 14, 3)
    assert first[10, 20, 0] > 200 and first[10, 400, 0] < 50


def test_gif_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "game.GIF"
    assert write_video(path, frames(), fps=15) == 6
    assert path.read_bytes()[:6] == b"GIF89a"
    shown = read(path)
    assert [float(when) for when, _ in shown] == [round(100 * index / 15) / 100 for index in range(6)]
    for (_, picture), frame in zip(shown, frames(), strict=True):
        assert np.array_equal(picture, frame.repeat(14, 0).repeat(14, 1))
    assert [file.name for file in tmp_path.iterdir()] == ["game.GIF"]


def test_a_first_frame_of_a_wrong_shape_is_after_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"but got uint8 \[4, 4\]$"):
        write_video(tmp_path / "a.gif", iter([np.zeros((4, 4), np.uint8)]), 15)


def test_a_gif_is_no_faster_than_browsers_show_it(tmp_path: Path) -> None:
    write_video(tmp_path / "a.gif", frames(), fps=120)
    assert [float(when) for when, _ in read(tmp_path / "a.gif")] == [0, 0.02, 0.04, 0.06, 0.08, 0.1]


@pytest.mark.parametrize(
    ("height", "width", "factor"), [(10, 5, 48), (219, 160, 2), (1, 4, 120), (480, 3, 1), (400, 600, 1), (241, 2, 1)]
)
def test_small_pictures_are_enlarged_by_whole_factors(height: int, width: int, factor: int) -> None:
    assert enlargement(height, width) == factor
    assert max(height, width) * factor <= max(LARGE, height, width)


def test_an_odd_size_is_made_even(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", frames(2, 301, 251), 15)
    assert read(tmp_path / "a.mp4")[0][1].shape == (302, 252, 3)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_no_frame_is_kept(tmp_path: Path, name: str) -> None:
    """However many there are, only a few are there at a time."""
    made = most = 0
    gone: list[int] = []

    def counted() -> Iterator[np.ndarray]:
        nonlocal made, most
        for frame in frames(300):
            weakref.finalize(frame, gone.append, made)
            made += 1
            most = max(most, made - len(gone))
            yield frame

    assert write_video(tmp_path / name, counted(), 15) == 300
    assert most < 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_memory_stays_flat_over_twenty_thousand_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("phalanx.runs.video.LARGE", 100)  # enlarged pictures would take minutes
    resident: list[int] = []

    def watched() -> Iterator[np.ndarray]:
        background = np.full((100, 80, 3), 40, np.uint8)
        for index in range(20_000):
            frame = background.copy()
            frame[index % 90 : index % 90 + 8, index % 70 : index % 70 + 8] = 255
            if index in (2_000, 19_999):
                resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
            yield frame

    assert write_video(tmp_path / name, watched(), 15) == 20_000
    assert resident[1] - resident[0] < 30 * 2**20  # the frames themselves are 480 MB


@pytest.mark.parametrize("name", ["game.avi", "game"])
def test_other_suffix(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"\.mp4 or \.gif"):
        write_video(tmp_path / name, frames(), 10)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(UserError, match="pip install av"):
        write_video(tmp_path / name, frames(), 10)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
def test_no_frames(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="no frame"):
        write_video(tmp_path / name, [], 10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
@pytest.mark.parametrize(
    "wrong", [np.zeros((21, 33), np.uint8), np.zeros((21, 33, 3), np.float32), np.zeros((20, 33, 3), np.uint8)]
)
def test_an_error_midway_leaves_the_old_file(tmp_path: Path, name: str, wrong: np.ndarray) -> None:
    (tmp_path / name).write_bytes(b"old")
    with pytest.raises(UserError, match="shape"):
        write_video(tmp_path / name, [*frames(2), wrong], 10)
    assert (tmp_path / name).read_bytes() == b"old"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["a.mp4", "a.gif"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), "/dev/full"])
def test_an_encoder_that_fails_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: OSError | str
) -> None:
    if isinstance(error, str):  # the encoder itself meets a full disk
        monkeypatch.setattr("phalanx.runs.video._temporary", lambda path: tmp_path / "link")
        (tmp_path / "link").symlink_to(error)

    def failing() -> Iterator[np.ndarray]:
        yield from frames(200, 200, 200)
        if isinstance(error, OSError):
            raise error

    with pytest.raises(RunError, match="No space left on device") as raised:
        write_video(tmp_path / name, failing(), 10)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_a_caption_stands_above_the_picture() -> None:
    picture = np.full((4, 30, 3), 7, np.uint8)
    shown = captioned(picture, "17")
    assert shown.shape == (13, 30, 3)
    assert np.array_equal(shown[9:], picture)
    drawn = (shown[2:7, 2:10, 0] > 0).astype(int)
    one, seven = ["010", "110", "010", "010", "111"], ["111", "001", "010", "010", "010"]
    assert ["".join(map(str, row)) for row in drawn] == [f"{a}0{b}0" for a, b in zip(one, seven, strict=True)]
    assert not shown[:2].any() and not shown[7:9].any()


def test_a_caption_wider_than_the_picture_is_cut_off() -> None:
    assert captioned(np.zeros((4, 20, 3), np.uint8), "SCORE -21  STEP 1000").shape == (13, 20, 3)

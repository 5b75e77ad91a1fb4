from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from phalanx.errors import RunError, UserError
from phalanx.runs.video import write_video


def frames(count: int = 6, height: int = 21, width: int = 33) -> Iterator[np.ndarray]:
    for index in range(count):
        frame = np.zeros((height, width, 3), np.uint8)
        frame[:, : 4 * (index + 1)] = (255, 40 * index, 0)
        yield frame


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the package that reads the file back
def test_mp4(tmp_path: Path) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "new" / "game.mp4"
    write_video(path, frames(), fps=15)
    assert path.read_bytes()[4:8] == b"ftyp"
    assert [file.name for file in path.parent.iterdir()] == ["game.mp4"]
    reader = ffmpeg.read_frames(str(path))
    meta = next(reader)
    shown = [np.frombuffer(frame, np.uint8).reshape(22, 34, 3) for frame in reader]
    assert meta["size"] == (34, 22) and meta["pix_fmt"].startswith("yuv420p") and meta["fps"] == 15
    assert len(shown) == 6
    assert shown[0][10, 1, 0] > 200 and shown[0][10, 30, 0] < 50


def test_gif(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "game.GIF"
    write_video(path, frames(), fps=10)
    assert path.read_bytes()[:6] == b"GIF89a"
    with image.open(path) as gif:
        assert (gif.n_frames, gif.size, gif.info["duration"]) == (6, (33, 21), 100)
    assert [file.name for file in tmp_path.iterdir()] == ["game.GIF"]


@pytest.mark.parametrize("name", ["game.avi", "game"])
def test_other_suffix(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"\.mp4 or \.gif"):
        write_video(tmp_path / name, frames(), 10)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("a.mp4", "imageio_ffmpeg", "imageio-ffmpeg"), ("a.gif", "PIL.Image", "pillow")],
)
def test_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"pip install {package}"):
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


def test_ffmpeg_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imageio_ffmpeg")
    real = subprocess.Popen

    def popen(command: list[str], **options: object) -> object:
        return real([*command[:-1], "-vcodec", "nonsense", command[-1]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(RunError, match="nonsense") as raised:
        write_video(tmp_path / "a.mp4", frames(200, 200, 200), 10)
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("reads", "complaint"), [("sys.stdin.buffer.read()", "did not end within"), ("None", "took no picture for")]
)
def test_ffmpeg_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reads: str, complaint: str) -> None:
    pytest.importorskip("imageio_ffmpeg")
    real, started = subprocess.Popen, []

    def popen(command: list[str], **options: object) -> object:
        hangs = f"import sys, time; {reads}; time.sleep(600)"
        started.append(real([sys.executable, "-c", hangs], **options))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("phalanx.runs.video.ENCODER_TIMEOUT", 0.5)
    with pytest.raises(RunError, match=rf"ffmpeg {complaint} 0\.5 s"):
        write_video(tmp_path / "a.mp4", frames(6, 200, 200), 10)
    assert started[0].returncode is not None  # it was killed, nothing is left behind
    assert list(tmp_path.iterdir()) == []

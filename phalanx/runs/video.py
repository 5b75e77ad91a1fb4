"""Frames to a video file a browser plays: .mp4 or .gif. The last step of `phalanx play`."""

from __future__ import annotations

import contextlib
import errno
import importlib
import itertools
import os
import select
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import RunError, UserError

FASTEST_GIF_MS = 20  # browsers slow down anything faster
ENCODER_TIMEOUT = 120.0  # seconds ffmpeg may take for a frame, and to end the file after the last one
PACKAGES = {".mp4": ("imageio_ffmpeg", "imageio-ffmpeg"), ".gif": ("PIL.Image", "pillow")}
"""Modules that write a format, and the packages they come with."""


def write_video(path: Path, frames: Iterable[np.ndarray], fps: float) -> None:
    """Write frames [height, width, 3] uint8 to `path`; it appears whole or not at all."""
    check_format(path)
    writers: dict[str, Callable[[Path, Iterator[np.ndarray], float], None]] = {".mp4": _write_mp4, ".gif": _write_gif}
    writer = writers[path.suffix.lower()]
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        writer(temporary, _checked(frames), fps)
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"cannot write the video {path} ({error}); check the directory and its free space") from error
    finally:
        temporary.unlink(missing_ok=True)


def check_format(path: Path) -> None:
    """Refuse a name that tells no format we can write, and a format whose package is missing."""
    if path.suffix.lower() not in PACKAGES:
        raise UserError(f"cannot write a video to {path}; give a name that ends in .mp4 or .gif")
    _package(*PACKAGES[path.suffix.lower()])


def check_place(path: Path) -> None:
    """Refuse a name under which no file can be written: to be asked before a game is played for it."""
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(path.stat().st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise UserError(f"cannot write a video to {path} ({error.strerror}); choose another --video") from None


def _temporary(path: Path) -> Path:
    """Where a video is written before it is whole; a short name, since the video's own may be as long as can be."""
    return path.with_name(f".tmp-{os.getpid()}{path.suffix}")


def _checked(frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same frames, once it is sure that there is one and that all fit together."""
    iterator = iter(frames)
    first = next(iterator, None)
    if first is None:
        raise UserError("there is no frame to make a video of; play at least one step")
    for frame in itertools.chain([first], iterator):
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.shape != first.shape:
            raise UserError(
                f"a video needs uint8 frames of one shape [height, width, 3], but got {frame.dtype} "
                f"{list(frame.shape)} after {list(first.shape)}"
            )
        yield frame


def _package(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"this video format needs the package {name}; run: pip install {name}") from None


def _write_mp4(path: Path, frames: Iterator[np.ndarray], fps: float) -> None:
    ffmpeg = _package(*PACKAGES[".mp4"]).get_ffmpeg_exe()
    first = _even(next(frames))
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{first.shape[1]}x{first.shape[0]}", "-r", str(fps)]
    # yuv420p is what every player shows; it halves the colour's resolution, hence the even size.
    target = ["-an", "-vcodec", "libx264", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart", str(path)]
    with tempfile.TemporaryFile() as complaints:
        encoder = subprocess.Popen(
            [ffmpeg, "-y", "-loglevel", "error", *source, "-i", "-", *target],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
        )
        assert encoder.stdin is not None
        os.set_blocking(encoder.stdin.fileno(), False)
        try:
            with contextlib.suppress(BrokenPipeError):  # ffmpeg gave up; its exit code and complaint say why
                for frame in itertools.chain([first], map(_even, frames)):
                    _feed(encoder.stdin.fileno(), frame)
                encoder.stdin.close()
        except BaseException:
            encoder.kill()
            raise
        finally:
            failed = _ended(encoder) != 0
            with contextlib.suppress(OSError):
                encoder.stdin.close()
        if failed:
            complaints.seek(0)
            raise OSError(complaints.read().decode(errors="replace").strip().partition("\n")[0])


def _feed(pipe: int, frame: np.ndarray) -> None:
    """Write a frame; ffmpeg that takes nothing for too long is an error."""
    left = frame.data.cast("B")
    while left:
        if not select.select([], [pipe], [], ENCODER_TIMEOUT)[1]:
            raise OSError(f"ffmpeg took no picture for {ENCODER_TIMEOUT:g} s")
        left = left[os.write(pipe, left) :]


def _ended(encoder: subprocess.Popen[bytes]) -> int:
    """The exit code of ffmpeg, which is killed if it does not come to an end."""
    try:
        return encoder.wait(ENCODER_TIMEOUT)
    except subprocess.TimeoutExpired:
        encoder.kill()
        encoder.wait(ENCODER_TIMEOUT)
        raise OSError(f"ffmpeg did not end within {ENCODER_TIMEOUT:g} s") from None


def _even(frame: np.ndarray) -> np.ndarray:
    """The frame with its last row or column doubled where their number is odd."""
    height, width = frame.shape[:2]
    return np.ascontiguousarray(np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge"))


def _write_gif(path: Path, frames: Iterator[np.ndarray], fps: float) -> None:
    pillow = _package(*PACKAGES[".gif"])
    images = map(pillow.fromarray, frames)
    duration = max(FASTEST_GIF_MS, round(1000 / fps))
    next(images).save(path, save_all=True, append_images=images, duration=duration, loop=0)

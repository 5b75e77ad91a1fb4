"""Frames to a video file a browser plays: .mp4 or .gif. The last step of `phalanx play`.

Frames are encoded as they come, and none is kept: a video of any length takes the memory of a few of them.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import stat
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from phalanx.errors import RunError, UserError

FORMATS = (".mp4", ".gif")
FASTEST_GIF = 50  # pictures per second; browsers slow down anything faster
GIF_CLOCK = Fraction(1, 100)  # seconds, in which a GIF tells how long a picture stays
LARGE = 480  # pixels: smaller pictures are enlarged, by the greatest whole factor that keeps both sides within


def write_video(path: Path, frames: Iterable[np.ndarray], fps: float) -> int:
    """Write frames [height, width, 3] uint8 to `path`, each once; how many. The file appears whole or not at all."""
    check_format(path)
    av = encoder_package()
    temporary = _temporary(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        count = _encode(av, temporary, path.suffix.lower()[1:], _checked(frames), speed(path, fps))
        if not count:
            raise UserError("there is no frame to make a video of; play at least one step")
        os.replace(temporary, path)
    except (OSError, av.FFmpegError) as error:
        raise RunError(f"cannot write the video {path} ({error}); check the directory and its free space") from error
    finally:
        temporary.unlink(missing_ok=True)
    return count


def check_format(path: Path) -> None:
    """Refuse a name that tells no format we can write, and an encoder that is missing."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"cannot write a video to {path}; give a name that ends in .mp4 or .gif")
    encoder_package()


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


def encoder_package() -> Any:
    """PyAV, the one package that encodes."""
    try:
        return importlib.import_module("av")
    except ImportError:
        raise UserError("videos need the package av; run: pip install av") from None


def speed(path: Path, fps: float) -> float:
    """Pictures per second that are written."""
    return min(fps, FASTEST_GIF) if path.suffix.lower() == ".gif" else fps


def enlargement(height: int, width: int) -> int:
    """The whole factor that a picture of this size is enlarged by."""
    return max(1, LARGE // max(height, width))


def _temporary(path: Path) -> Path:
    """Where a video is written before it is whole; a short name, since the video's own may be as long as can be."""
    return path.with_name(f".tmp-{os.getpid()}{path.suffix}")


def _checked(frames: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The same frames, each once it is sure that it fits those before."""
    shape: tuple[int, ...] | None = None
    first = True
    for frame in frames:
        shape = shape or frame.shape
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3 or frame.shape != shape:
            before = "" if first else f" after {list(shape)}"
            raise UserError(
                f"a video needs uint8 frames of one shape [height, width, 3], but got {frame.dtype} "
                f"{list(frame.shape)}{before}"
            )
        first = False
        yield frame


def _encode(av: Any, path: Path, kind: str, frames: Iterator[np.ndarray], fps: float) -> int:
    """One frame after the other; how many."""
    rate = Fraction(fps).limit_denominator(1000)
    clock = GIF_CLOCK if kind == "gif" else 1 / rate
    count, graph, stream = 0, None, None
    options = {"movflags": "+faststart"} if kind == "mp4" else {}  # a browser plays it before it has all of it
    with av.open(str(path), "w", format=kind, options=options) as file:
        for frame in frames:
            graph = graph or _filters(av, frame, kind)
            graph.push(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24"))
            picture = graph.pull()
            stream = stream or _stream(file, picture, kind, rate, clock)
            picture.pts, picture.time_base = round(count / rate / clock), clock
            picture.pict_type = 0  # the encoder chooses
            file.mux(stream.encode(picture))
            count += 1
        if stream is not None:
            file.mux(stream.encode(None))
    return count


def _stream(file: Any, picture: Any, kind: str, rate: Fraction, clock: Fraction) -> Any:
    """What encodes pictures like this one."""
    codec, options = ("gif", {}) if kind == "gif" else ("libx264", {"crf": "18"})
    stream = file.add_stream(codec, rate=rate, options=options)
    stream.width, stream.height, stream.pix_fmt = picture.width, picture.height, picture.format.name
    stream.codec_context.time_base = clock
    return stream


def _filters(av: Any, frame: np.ndarray, kind: str) -> Any:
    """What is done to each picture on its way to the encoder: small ones are enlarged, pixels staying squares. A GIF's
    pictures have a palette each, since a common one could be made of all of them only."""
    height, width = frame.shape[:2]
    factor = enlargement(height, width)
    graph = av.filter.Graph()
    nodes = [
        graph.add_buffer(width=width, height=height, format="rgb24", time_base=Fraction(1, 1)),
        graph.add("scale", f"{width * factor}:{height * factor}:flags=neighbor"),
    ]
    if kind == "gif":
        split, palette = graph.add("split"), graph.add("palettegen", "stats_mode=single:reserve_transparent=0")
        use = graph.add("paletteuse", "new=1:dither=none")
        nodes[-1].link_to(split)
        split.link_to(use, 0, 0)
        split.link_to(palette, 1, 0)
        palette.link_to(use, 0, 1)
        nodes[0].link_to(nodes[1])
        use.link_to(sink := graph.add("buffersink"))
    else:
        # yuv420p is what every player shows; it halves the colour's resolution, hence the even size.
        nodes += [graph.add("pad", "ceil(iw/2)*2:ceil(ih/2)*2"), graph.add("format", "yuv420p")]
        nodes.append(sink := graph.add("buffersink"))
        graph.link_nodes(*nodes)
    assert sink is not None
    graph.configure()
    return graph

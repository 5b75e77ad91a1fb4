from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest

from phalanx.runs.events import EventWriter, _masked_crc, _varint


def unmask(masked: bytes) -> int:
    rotated = (struct.unpack("<I", masked)[0] - 0xA282EAD8) & 0xFFFFFFFF
    return int((rotated >> 17 | rotated << 15) & 0xFFFFFFFF)


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # published check values of CRC-32C
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_checksum(data: bytes, crc: int) -> None:
    assert unmask(_masked_crc(data)) == crc


def test_varint() -> None:
    assert [_varint(n) for n in (0, 1, 127, 128, 300)] == [b"\x00", b"\x01", b"\x7f", b"\x80\x01", b"\xac\x02"]


def read(directory: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "new")
    writer.scalars(0, 1000.5, {"charts/score": -20.5, "losses/ä": 1e300})
    writer.scalars(2**40, 1001.25, {"charts/score": math.nan})
    writer.flush()
    found = read(tmp_path / "new")
    assert found["losses/ä"] == [(0, math.inf)]
    (first, last) = found["charts/score"]
    assert first == (0, -20.5)
    assert last[0] == 2**40 and math.isnan(last[1])
    writer.close()


def test_wall_time(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    writer = EventWriter(tmp_path)
    writer.scalars(3, 1234.5, {"a": 1.0})
    writer.close()
    reader = accumulator.EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [event.wall_time for event in reader.Scalars("a")] == [1234.5]


def test_a_restart_hides_what_came_after(tmp_path: Path) -> None:
    first = EventWriter(tmp_path)
    for step in (10, 20, 30):
        first.scalars(step, step, {"a": step})
    first.close()
    second = EventWriter(tmp_path)
    second.restart(21, 40)
    second.scalars(25, 41, {"a": 5})
    second.close()
    assert first.path != second.path
    assert read(tmp_path)["a"] == [(10, 10), (20, 20), (25, 5)]

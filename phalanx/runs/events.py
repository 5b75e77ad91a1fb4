"""Scalars in TensorBoard's event files, without TensorBoard: the Logger writes them, `tensorboard --logdir` shows them.

A file is a row of TFRecords (length, checksum of it, data, checksum of it), each an Event in protocol-buffer encoding:

    Event    1: wall_time (double)  2: step (int64)  3: file_version (string)  5: Summary  7: SessionLog
    Summary  1: Value, repeated     Value  1: tag (string)  2: simple_value (float)
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import struct
import time
from pathlib import Path

FIXED64, BYTES, FIXED32 = 1, 2, 5  # wire types besides the varint, 0
LARGEST_FLOAT = 3.4e38
_number = itertools.count()  # keeps the names of files made within one second apart


class EventWriter:
    """One event file in `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_number)}"
        self.path = directory / name
        self._file = self.path.open("xb")  # never one that is there, nor through a link
        self._write(now, 0, _field(3, b"brain.Event:2"))

    def scalars(self, step: int, wall_time: float, values: dict[str, float]) -> None:
        """Write one event that holds all values of a step."""
        summary = b"".join(_field(1, _field(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
        self._write(wall_time, step, _field(5, summary))

    def restart(self, step: int, wall_time: float) -> None:
        """Tell readers to forget what earlier files say of this step and later ones."""
        self._write(wall_time, step, _field(7, _key(1, 0) + _varint(1)))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, wall_time: float, step: int, payload: bytes) -> None:
        event = _key(1, FIXED64) + struct.pack("<d", wall_time) + _key(2, 0) + _varint(step) + payload
        length = struct.pack("<Q", len(event))
        self._file.write(length + _masked_crc(length) + event + _masked_crc(event))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _key(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _field(number: int, data: bytes) -> bytes:
    return _key(number, BYTES) + _varint(len(data)) + data


def _float(number: int, value: float) -> bytes:
    # `struct` refuses doubles beyond the range of a float.
    fits = math.isnan(value) or abs(value) <= LARGEST_FLOAT
    return _key(number, FIXED32) + struct.pack("<f", value if fits else math.copysign(math.inf, value))


def _crc_table() -> list[int]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)  # Castagnoli's polynomial, bits reversed
        table.append(entry)
    return table


_TABLE = _crc_table()


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    # Rotated and shifted, since a checksum of data that contains checksums is weak.
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

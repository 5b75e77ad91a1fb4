"""Messages over a socket between a parent and its child: rare ones, pickled. Frequent ones go through shared memory.

Both ends are processes of one run on one machine, so that unpickling trusts nobody else.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any


def send(connection: socket.socket, message: Any) -> None:
    data = pickle.dumps(message)
    connection.sendall(struct.pack("<Q", len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """The next message, or None when the other side is gone."""
    header = read_exactly(connection, 8)
    if header is None:
        return None
    data = read_exactly(connection, struct.unpack("<Q", header)[0])
    return None if data is None else pickle.loads(data)


def read_exactly(connection: socket.socket, size: int) -> bytes | None:
    chunks = bytearray()
    while len(chunks) < size:
        chunk = connection.recv(min(size - len(chunks), 1 << 20))
        if not chunk:
            return None
        chunks += chunk
    return bytes(chunks)

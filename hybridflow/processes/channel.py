"""Channel: messages with their length in front, over sockets and pipes; blocking, or as their pieces arrive."""

from __future__ import annotations

import os
import struct

LARGEST_MESSAGE = 2**28
"""Bytes of one message of a worker. Larger results count as failures, to bound memory."""

_LENGTH = struct.Struct("!Q")


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class Incoming:
    """Messages of up to `largest` bytes, put together from pieces."""

    def __init__(self, largest: int = LARGEST_MESSAGE) -> None:
        self._pieces, self._largest = bytearray(), largest

    def add(self, piece: bytes) -> list[bytes]:
        """The messages that are complete now. Errors: ValueError for one that is too large."""
        self._pieces += piece
        found = []
        while len(self._pieces) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pieces)
            if size > self._largest:
                raise ValueError(f"a message of {size} bytes")
            if len(self._pieces) < (end := _LENGTH.size + size):
                break
            found.append(bytes(self._pieces[_LENGTH.size : end]))
            del self._pieces[:end]
        return found


class Channel:
    """Messages that are read from the descriptor `source` and written to `sink`, of up to `largest` bytes."""

    def __init__(self, source: int, sink: int, largest: int = LARGEST_MESSAGE) -> None:
        self._source, self._sink, self._largest = source, sink, largest
        self._incoming, self._read = Incoming(largest), list[bytes]()

    def write(self, message: bytes) -> None:
        """Errors: ValueError for one that is too large, BrokenPipeError when the other end is closed."""
        if len(message) > self._largest:
            raise ValueError(f"{len(message) / 2**20:.0f} MiB is more than a message may have")
        rest = memoryview(framed(message))
        while rest:
            rest = rest[os.write(self._sink, rest) :]

    def read(self) -> bytes | None:
        """The next message; None when the other end is closed. Errors: ValueError for one that is too large."""
        while not self._read:
            if not (piece := os.read(self._source, 1 << 20)):
                return None
            self._read = self._incoming.add(piece)
        return self._read.pop(0)

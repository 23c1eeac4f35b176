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
    """Messages put together from pieces."""

    def __init__(self) -> None:
        self._pieces = bytearray()

    def add(self, piece: bytes) -> list[bytes]:
        """The messages that are complete now. Errors: ValueError for one that is too large."""
        self._pieces += piece
        found = []
        while len(self._pieces) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pieces)
            if size > LARGEST_MESSAGE:
                raise ValueError(f"a message of {size} bytes")
            if len(self._pieces) < (end := _LENGTH.size + size):
                break
            found.append(bytes(self._pieces[_LENGTH.size : end]))
            del self._pieces[:end]
        return found


class Channel:
    """Messages that are read from the descriptor `source` and written to `sink`, of up to `largest` bytes."""

    def __init__(self, source: int, sink: int, largest: int = LARGEST_MESSAGE) -> None:
        self._reader = open(source, "rb", closefd=False)  # noqa: SIM115
        self._sink, self._largest = sink, largest

    def write(self, message: bytes) -> None:
        """Errors: ValueError for one that is too large, BrokenPipeError when the other end is closed."""
        if len(message) > self._largest:
            raise ValueError(f"{len(message) / 2**20:.0f} MiB is more than a message may have")
        rest = memoryview(framed(message))
        while rest:
            rest = rest[os.write(self._sink, rest) :]

    def read(self) -> bytes | None:
        """The next message; None when the other end is closed. Errors: ValueError for one that is too large."""
        header = self._reader.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(header)
        if length > self._largest:
            raise ValueError(f"a message of {length} bytes")
        message = self._reader.read(length)
        return message if len(message) == length else None

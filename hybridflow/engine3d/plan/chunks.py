"""Rounds: the round and message in which each piece of a plan travels.

Pure. All ranks execute the same rounds, two consecutive ones at a time. Pieces with the same holders and receivers form
a sequence, which is spread evenly over all rounds: round j takes the j-th of R equal windows, and relayed pieces follow
two rounds later. So a rank computes a piece's round from the piece alone; sender and receiver agree; and a piece has
arrived before the round that relays it is posted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridflow.engine3d.layout import Box

IN_FLIGHT = 2  # rounds: one is packed and posted while the previous one is in flight
DIRECT_BYTES = 256 << 10  # above, a separate message (50 us with gloo) costs less than two copies
ALIGNMENT = 16  # bytes; messages start at multiples of it in a buffer, so any dtype can view them


@dataclass(frozen=True, slots=True)
class Pace:
    """Bounds of a plan's rounds, equal on every rank.

    Window j of each sequence travels in round j.

    `elements`: maximum that a rank sends and receives. `copies`: maximum number of copies of the elements at one
    position of all sequences that a rank sends and receives.
    """

    elements: int = 0
    copies: int = 0

    def windows(self, max_bytes: int, itemsize: int) -> tuple[int, int]:
        """Number of windows, and the number of elements up to which a piece is never cut, so that the rounds in flight
        take at most `max_bytes` together.

        A window holds at most 1/R of a sequence plus one uncut piece from the previous window, for which a quarter of a
        round's elements is reserved. A bound below one element per copy cannot be met.
        """
        if not self.copies:
            return 1, 1
        bound = max(max_bytes // IN_FLIGHT // itemsize, self.copies + 1)
        grain = max(1, bound // (4 * self.copies))
        return -(-self.elements // (bound - self.copies * grain)), grain


def travels_alone(nbytes: int) -> bool:
    """Whether a piece is a message of its own; a round's other pieces between two ranks share one.

    The size alone decides, so both sides agree without communication.
    """
    return nbytes >= DIRECT_BYTES


def staged(nbytes: int) -> int:
    """Bytes of a buffer that a message of `nbytes` occupies."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def cut(box: Box, at: int, of: int, windows: int, grain: int) -> Iterator[tuple[int, Box]]:
    """Parts of `box`, which starts at element `at` of a sequence of `of`, in index order, each with its window.

    A part belongs to the window of its last element, and reaches at most `grain - 1` elements into earlier ones.
    """
    numel = box.numel
    first, last = at * windows // of, (at + numel - 1) * windows // of
    if first == last or numel <= grain:
        yield last, box
        return
    axis = next(i for i, size in enumerate(box.shape) if size > 1)
    length, inner = box.shape[axis], numel // box.shape[axis]
    row = 0
    while row < length:
        start, window = at + row * inner, (at + (row + 1) * inner - 1) * windows // of
        limit = -(-(window + 1) * of // windows)  # first element of the next window
        until = row + 1 if inner > grain else max(row + 1, min(length, (limit - at) // inner))
        part = _rows(box, axis, row, until)
        if inner > grain:
            yield from cut(part, start, of, windows, grain)
        else:
            yield window, part
        row = until


def _rows(box: Box, axis: int, first: int, until: int) -> Box:
    a = box.start[axis]
    start = (*box.start[:axis], a + first, *box.start[axis + 1 :])
    stop = (*box.stop[:axis], a + until, *box.stop[axis + 1 :])
    return Box(box.tensor, start, stop)

"""Rounds: when each piece of a plan travels, and in which message. Pure.

All ranks walk the same rounds, of which two neighbours are under way at a time. Pieces that the same ranks hold and
the same ranks need form a sequence, and each is spread evenly over all rounds: round j takes the j-th of R equal
windows of it, and what is passed on follows two rounds later. So a rank knows the round of a piece from the piece
alone, without the moves of other ranks; sender and receiver agree; and a piece has arrived before the
round that passes it on is posted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybridflow.engine3d.layout import Box

IN_FLIGHT = 2  # rounds: one is packed and posted while the one before it is still under way
DIRECT_BYTES = 256 << 10  # from here on a message of its own costs less (50 us with gloo) than copying in and out
ALIGNMENT = 16  # bytes; messages start at multiples of it in a buffer, so that they can be viewed as any dtype


@dataclass(frozen=True, slots=True)
class Pace:
    """What bounds the rounds of a plan; every rank computes the same numbers.

    Its windows are the shares of each sequence that go together: window j is round j of every rank that holds a piece.

    `elements`: what the busiest rank sends and receives at most. `copies`: how many copies of elements at the same
    position of all sequences a rank sends and receives at most.
    """

    elements: int = 0
    copies: int = 0

    def windows(self, max_bytes: int, itemsize: int) -> tuple[int, int]:
        """Number of windows, and the number of elements up to which a piece is never cut, so that the rounds in flight
        take at most `max_bytes` together.

        A window holds at most 1/R of a sequence, and one uncut piece more from the window before: a quarter of the
        elements that a round may have is kept for that piece. A bound below one element per copy cannot be kept.
        """
        if not self.copies:
            return 1, 1
        bound = max(max_bytes // IN_FLIGHT // itemsize, self.copies + 1)
        grain = max(1, bound // (4 * self.copies))
        return -(-self.elements // (bound - self.copies * grain)), grain


def travels_alone(nbytes: int) -> bool:
    """Whether a piece is a message of its own; the other pieces that a rank sends another in a round share one.

    It follows from the size alone, so that both sides cut the same way without asking each other.
    """
    return nbytes >= DIRECT_BYTES


def staged(nbytes: int) -> int:
    """Bytes that a message of `nbytes` takes of a buffer."""
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

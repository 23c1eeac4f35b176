"""The routing table of a weight plan: who broadcasts which tensors to whom. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hybridflow.engine3d.layout import Box
from hybridflow.engine3d.move import Move


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Rank `root` gives its pieces of `tensors`, `elements` in all, to `receivers`, whom it sends them or has them
    passed on to. A rank that keeps its own pieces is no receiver of them.
    """

    root: int
    receivers: tuple[int, ...]
    tensors: tuple[str, ...]
    elements: int


def tabulate(moves: Iterable[Move]) -> tuple[Broadcast, ...]:
    """One line for each root and set of receivers, by root, from all moves of a plan."""
    roots: dict[tuple[Box, int], int] = {}  # who gave a piece to a rank, at the beginning of the chain
    receivers: dict[tuple[Box, int], list[int]] = {}
    for move in moves:  # relays come after the moves that feed them
        if move.local:
            continue
        root = roots[move.box, move.source] if move.hop else move.source
        roots[move.box, move.destination] = root
        receivers.setdefault((move.box, root), []).append(move.destination)
    lines: dict[tuple[int, tuple[int, ...]], tuple[dict[str, None], int]] = {}
    for (box, root), ranks in receivers.items():
        key = (root, tuple(sorted(ranks)))
        tensors, elements = lines.get(key, ({}, 0))
        lines[key] = (tensors | {box.tensor: None}, elements + box.numel)
    return tuple(Broadcast(*key, tuple(tensors), elements) for key, (tensors, elements) in sorted(lines.items()))

"""Move: one piece of a canonical tensor on its way from one rank to another, or within one."""

from __future__ import annotations

from dataclasses import dataclass

from hybridflow.engine3d.layout import Box, Region


@dataclass(frozen=True, slots=True)
class Move:
    """`box` goes from rank `source`, where it lies within `origin`, into every region of `into` on `destination`.

    `into` has more than one region where a rank stores the same elements twice (tied embeddings): they travel once.

    Pieces that the same ranks hold and the same ranks need form a sequence in canonical order. This one starts at
    element `at` of the `of` elements in it, which fixes the round in which it travels.

    With `hop` 0 it comes from the source layout. With `hop` h > 0 it is relayed: `origin` is then a region of the
    *destination* layout on rank `source`, which a move of hop h - 1 has filled in an earlier round, and `root` is the
    rank that gave it at hop 0, with the name of the source storage that it has it in.
    """

    box: Box
    source: int
    destination: int
    origin: Region
    into: tuple[Region, ...]
    at: int = 0
    of: int = 0
    hop: int = 0
    root: tuple[int, str] | None = None

    @property
    def local(self) -> bool:
        return self.source == self.destination

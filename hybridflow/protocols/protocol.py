"""Protocol: a pure value that splits the inputs of a group call over ranks and joins their outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self
from typing import Protocol as Structural

from hybridflow.errors import ProtocolError
from hybridflow.topology import RankGrid


class _Skip(Enum):
    """Stands for a rank that takes no part in a call."""

    SKIP = "SKIP"


SKIP = _Skip.SKIP


class Rows(Structural):
    """A `Batch` or references to one, which protocols split without reading data."""

    def split(self, parts: int) -> Sequence[Self]: ...


@dataclass(frozen=True)
class Protocol:
    """Two pure functions of a rank grid and references, without processes or tensors.

    `distribute(grid, rows)` returns one input per rank of the grid (`SKIP` for a rank that is not called);
    `collect(grid, outputs)` joins the outputs, one per rank in rank order. `prepared=True` says that every argument is
    already a list with one item per rank.
    """

    name: str
    distribute: Callable[[RankGrid, Any], Sequence[Any]] = field(repr=False)
    collect: Callable[[RankGrid, Sequence[Any]], Any] = field(repr=False)
    prepared: bool = False

    def split(self, grid: RankGrid, rows: Any) -> list[Any]:
        """`distribute`, checked: one input for each rank. Errors: ProtocolError."""
        inputs = list(self.distribute(grid, rows))
        if len(inputs) != grid.size:
            raise ProtocolError(f"{self.name}.distribute returned {len(inputs)} inputs for {grid.size} ranks.")
        return inputs


def join(outputs: Sequence[Any]) -> Any:
    """Rows of all outputs concatenated; outputs other than batches become a list."""
    if not outputs:
        raise ProtocolError("a protocol collected no outputs.")
    concat = getattr(type(outputs[0]), "concat", None)
    return concat(list(outputs)) if concat else list(outputs)

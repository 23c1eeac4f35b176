"""Invocation: one call of an operation on a group, from settings to what each rank gets and gives back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.columns import ColumnRef, Issued, Origin, Part
from hybridflow.cluster.future import Future
from hybridflow.cluster.splitting import Piece
from hybridflow.cluster.store import Reader
from hybridflow.protocols import SKIP, Operation
from hybridflow.topology import RankGrid

if TYPE_CHECKING:
    from hybridflow.cluster.session import Session

RankSettings = dict[str, Any]


@dataclass(frozen=True)
class Invocation:
    """The settings of a call by name; those in `rows` are batches, of which `reads` names the columns that travel.

    `factor` output rows come from each input row.
    """

    operation: Operation
    settings: dict[str, Any]
    rows: dict[str, BatchRef]
    reads: dict[str, tuple[str, ...]]
    writes: tuple[str, ...]
    factor: int

    def inputs(self, grid: RankGrid) -> list[RankSettings | None]:
        """The settings of each rank; None for a rank that is not called."""
        protocol = self.operation.protocol
        per_rank: list[RankSettings | None] = [{} for _ in range(grid.size)]
        for name, value in self.settings.items():
            if name in self.rows:
                parts = protocol.split(grid, self.rows[name])
                parts = [part if part is SKIP else part.select(*self.reads[name]) for part in parts]
            elif protocol.prepared:
                parts = protocol.split(grid, value)
            else:
                parts = [value] * grid.size
            for rank, part in enumerate(parts):
                mine = per_rank[rank]
                if part is SKIP:
                    per_rank[rank] = None
                elif mine is not None:
                    mine[name] = part
        if not self.rows and not protocol.prepared:  # who is called does not depend on rows
            asked = protocol.split(grid, _Nothing())
            per_rank = [None if part is SKIP else mine for part, mine in zip(asked, per_rank, strict=True)]
        return per_rank

    def may_fail(self, inputs: Sequence[RankSettings | None]) -> bool:
        """Whether an input comes from a call, which may have failed."""
        return any(v.may_fail for mine in inputs if mine for v in mine.values() if isinstance(v, BatchRef))


class _Nothing:
    """Rows of a call that has none."""

    def split(self, parts: int) -> list[_Nothing]:
        return [self] * parts


@dataclass
class Outputs:
    """What the ranks of one call will give back, in rank order, as a protocol collects it."""

    session: Session
    invocation: Invocation
    call: Issued
    outputs: list[Any] = field(default_factory=list)

    def skip(self) -> None:
        self.outputs.append(SKIP)

    def add(self, ref: Any, status: Any, origin: Origin, rows: int | None, source: BatchRef | None) -> None:
        """The output and the status of a rank that was given `source` and owes `rows` rows (None: unknown)."""
        self.call.statuses.append(Part(status, None, origin, self.call))
        part = Part(ref, rows, origin, self.call)
        if not self.invocation.writes:
            self.outputs.append(Future((part,), None, self.session.deadlines.peers))
            return
        piece = source.piece if source is not None and rows is not None else None
        if piece is not None:
            piece = Piece(piece.order, piece.part, self.invocation.factor)
        refs = {name: ColumnRef(name, part) for name in self.invocation.writes}
        self.outputs.append(BatchRef(-1 if rows is None else rows, refs, self.session, piece=piece))

    def count_rows(self) -> None:
        """Row counts that only the workers know: the documented exception that waits."""
        unknown = {i: out for i, out in enumerate(self.outputs) if isinstance(out, BatchRef) and out.rows < 0}
        parts = [out.stored_part for out in unknown.values()]
        for (i, out), part, rows in zip(unknown.items(), parts, self._rows(parts), strict=True):
            counted = Part(part.ref, rows, part.origin, part.call)
            refs = {name: ColumnRef(name, counted) for name in out.columns}
            self.outputs[i] = replace(out, rows=rows, column_refs=refs)

    def _rows(self, parts: Sequence[Part]) -> list[int]:
        return Reader(self.session.deadlines.peers).rows(parts) if parts else []

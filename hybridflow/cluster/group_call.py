"""GroupCall: one call on a group, prepared by the driver: inputs, requests and results of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.cluster.backend import RankCall
from hybridflow.cluster.batch_ref import BatchRef, LaterBatch
from hybridflow.cluster.future import Future
from hybridflow.cluster.row_refs import RankOutput
from hybridflow.cluster.store import Reader
from hybridflow.protocols import SKIP, Operation, kind_of
from hybridflow.topology import RankGrid

RankInput = dict[str, Any] | None
"""The settings of one rank in a call; None for a rank that is not called."""


@dataclass(frozen=True)
class GroupCall:
    """One call on a group. `settings` by name; those named in `rows` are batches, whose columns `reads` travel. Each
    input row gives `factor` output rows."""

    operation: Operation
    settings: dict[str, Any]
    rows: dict[str, BatchRef]
    reads: dict[str, tuple[str, ...]]
    writes: tuple[str, ...]
    factor: int
    compares: bool = False

    def inputs(self, grid: RankGrid) -> list[RankInput]:
        """The settings of each rank; None for a rank that is not called."""
        protocol, parts = self.operation.protocol, dict[str, list[Any]]()
        for name, value in self.settings.items():
            if name in self.rows:
                split = protocol.split(grid, self.rows[name])
                parts[name] = [part if part is SKIP else part.select(*self.reads[name]) for part in split]
            else:
                parts[name] = protocol.split(grid, value) if protocol.prepared else [value] * grid.size
        called = list(parts.values())
        if not self.rows and not protocol.prepared:  # the called ranks do not depend on rows
            called.append(protocol.split(grid, _Nothing()))
        return [
            None if any(each[rank] is SKIP for each in called) else {name: each[rank] for name, each in parts.items()}
            for rank in range(grid.size)
        ]

    def asked(self, inputs: Sequence[RankInput], seq: int, key: str) -> list[RankCall | None]:
        """The RankCall of each rank, in rank order: call number `seq` of the ranks with this `key`."""
        called = tuple(rank for rank, mine in enumerate(inputs) if mine is not None)
        refs = [value for mine in inputs if mine for value in mine.values() if isinstance(value, BatchRef)]
        agree = called if len(called) > 1 and any(ref.may_fail for ref in refs) else ()

        def of_rank(mine: dict[str, Any]) -> RankCall:
            source = _source(mine)
            due = None if source is None or self.operation.resizes else source.rows * self.factor
            sent = {name: value.to_rank() if isinstance(value, BatchRef) else value for name, value in mine.items()}
            span = source.span if source else None
            own: Any = {"phase": kind_of(self.operation), "compares": self.compares}
            return RankCall(seq, key, self.operation.name, sent, self.writes, agree, due, span, **own)

        return [None if mine is None else of_rank(mine) for mine in inputs]

    def results(self, inputs: Sequence[RankInput], outputs: Sequence[RankOutput | None]) -> list[Any]:
        """The result of each rank, in the form that a protocol collects.

        Waits only for row counts that just the workers know."""
        if not self.writes:
            return [SKIP if output is None else Future((output,), joins=self.operation.metrics) for output in outputs]
        if self.operation.later:
            return [SKIP if output is None else LaterBatch((output,), self.writes) for output in outputs]
        unknown = [output for output in outputs if output is not None and output.rows is None]
        rows = dict(zip(map(id, unknown), Reader().rows(unknown) if unknown else (), strict=True))
        out = []
        for mine, output in zip(inputs, outputs, strict=True):
            if mine is None or output is None:
                out.append(SKIP)
            elif output.rows is None:
                out.append(BatchRef.of_output(replace(output, rows=rows[id(output)]), self.writes))
            else:
                source = _source(mine)
                out.append(BatchRef.of_output(output, self.writes, source.part if source else None))
        return out

    def prompts(self) -> BatchRef:
        """What the call reads of its first batch."""
        name, rows = next(iter(self.rows.items()))
        return rows.select(*self.reads[name])

    def carried(self, result: Any) -> Any:
        """The result, with the columns of the input where the operation carries them."""
        if not self.operation.carries:
            return result
        rows = next(iter(self.rows.values()))
        return (rows.repeat(self.factor) if self.factor > 1 else rows) | result


def _source(mine: dict[str, Any]) -> BatchRef | None:
    """The rank's input rows, if any."""
    return next((value for value in mine.values() if isinstance(value, BatchRef)), None)


class _Nothing:
    """Takes the place of rows in a call without batches."""

    def split(self, parts: int) -> list[_Nothing]:
        return [self] * parts

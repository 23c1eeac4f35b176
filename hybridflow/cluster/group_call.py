"""GroupCall: one call on a group, prepared by the driver: inputs, requests and results of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.cluster.backend import RankCall
from hybridflow.cluster.batch_ref import BatchRef, LaterBatch
from hybridflow.cluster.future import Future
from hybridflow.cluster.row_refs import RankOutput
from hybridflow.cluster.store import Reader
from hybridflow.protocols.operation import Operation, kind_of
from hybridflow.protocols.transfer_protocols import SKIP
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
        """The settings of each rank, one object for ranks with the same; None for a rank that is not called."""
        protocol, parts = self.operation.protocol, dict[str, Sequence[Any]]()
        for name, value in self.settings.items():
            if name in self.rows:
                split = protocol.split(grid, self.rows[name])
                distinct = {id(part): part for part in split}
                reads = {key: one if one is SKIP else one.select(*self.reads[name]) for key, one in distinct.items()}
                parts[name] = [reads[id(part)] for part in split]
            else:
                parts[name] = protocol.split(grid, value) if protocol.prepared else [value] * grid.size
        called = list(parts.values())
        if not self.rows and not protocol.prepared:  # the called ranks do not depend on rows
            called.append(protocol.split(grid, _Nothing()))
        found, out = dict[tuple[int, ...], RankInput](), list[RankInput]()
        for values in zip(*called, strict=True) if called else [()] * grid.size:
            if (key := tuple(map(id, values))) not in found:
                skipped = any(value is SKIP for value in values)
                found[key] = None if skipped else dict(zip(parts, values, strict=False))
            out.append(found[key])
        return out

    def asked(self, inputs: Sequence[RankInput], seq: int, key: str) -> list[RankCall | None]:
        """The RankCall of each rank, in rank order: call number `seq` of the ranks with this `key`."""
        called = tuple(rank for rank, mine in enumerate(inputs) if mine is not None)
        distinct = {id(mine): mine for mine in inputs if mine is not None}
        refs = [value for mine in distinct.values() for value in mine.values() if isinstance(value, BatchRef)]
        agree = called if len(called) > 1 and any(ref.may_fail for ref in refs) else ()
        phase = kind_of(self.operation)

        def of_rank(mine: dict[str, Any]) -> RankCall:
            source = _source(mine)
            due = None if source is None or self.operation.resizes else source.rows * self.factor
            sent = {name: value.to_rank() if isinstance(value, BatchRef) else value for name, value in mine.items()}
            span = source.span if source else None
            own: Any = {"phase": phase, "compares": self.compares}
            return RankCall(seq, key, self.operation.name, sent, self.writes, agree, due, span, **own)

        calls = {key: of_rank(mine) for key, mine in distinct.items()}
        return [calls.get(id(mine)) for mine in inputs]

    def results(self, inputs: Sequence[RankInput], outputs: Sequence[RankOutput | None]) -> Sequence[Any]:
        """The result of each rank, in the form that a protocol collects; made where it does.

        Waits only for row counts that just the workers know."""
        if not self.writes:
            return RankResults(outputs, lambda _, output: Future((output,), joins=self.operation.metrics))
        if self.operation.later:
            return RankResults(outputs, lambda _, output: LaterBatch((output,), self.writes))
        unknown = [output for output in outputs if output is not None and output.rows is None]
        rows = dict(zip(map(id, unknown), Reader().rows(unknown) if unknown else (), strict=True))

        def batch(rank: int, output: RankOutput) -> BatchRef:
            if output.rows is None:
                return BatchRef.of_output(replace(output, rows=rows[id(output)]), self.writes)
            source = _source(inputs[rank] or {})
            return BatchRef.of_output(output, self.writes, source.part if source else None)

        return RankResults(outputs, batch)

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


class RankResults(Sequence[Any]):
    """`of(rank, output)` for each rank, `SKIP` for one that was not called: most protocols collect few of them."""

    def __init__(self, outputs: Sequence[RankOutput | None], of: Callable[[int, RankOutput], Any]) -> None:
        self._outputs, self._of = outputs, of

    def __len__(self) -> int:
        return len(self._outputs)

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return [self[one] for one in range(*rank.indices(len(self)))]
        output = self._outputs[rank]
        return SKIP if output is None else self._of(range(len(self))[rank], output)


class _Nothing:
    """Takes the place of rows in a call without batches."""

    def split(self, parts: int) -> list[_Nothing]:
        return [self] * parts

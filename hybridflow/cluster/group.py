"""WorkerGroup: the driver's proxy of one model group. Calling a registered method dispatches it to every rank.

group.method(batch, key=value)
  -> operation.columns_read  -> batch.select          only what the method reads travels
  -> protocol.distribute     -> one input per rank    references are rearranged
  -> backend.issue           -> one call per rank     returns at once
  -> protocol.collect        -> BatchRef | Future
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from hybridflow.batch.batch import Batch
from hybridflow.cluster.backend import RankCall, RankGroup
from hybridflow.cluster.batch_ref import BatchRef, OneColumn
from hybridflow.cluster.failure import Failure
from hybridflow.cluster.future import Future
from hybridflow.cluster.row_refs import ColumnRef, RankOutput, SplitSpec
from hybridflow.cluster.session import Session
from hybridflow.cluster.store import Reader
from hybridflow.errors import (
    ConfigError,
    EmptyBatchError,
    HybridFlowError,
    MissingColumnError,
    PlacementError,
    nearest,
)
from hybridflow.models.spec import Cost
from hybridflow.protocols import SKIP, Operation
from hybridflow.topology import RankGrid

_CLOSE_SECONDS = 60.0
_DRIVER_WRITES = {"advantages": "hf.compute_advantage(batch, ...)", "returns": "hf.compute_advantage(batch, ...)"}
_DRIVER_WRITES |= dict.fromkeys(("cost_advantages", "cost_returns"), 'hf.compute_advantage(batch, "safe_rlhf", ...)')
_DRIVER_WRITES |= {"group_id": "generate_sequences(batch, n=...) or batch.repeat(n)"}


class WorkerGroup:
    """Ranks of one model on the devices of a pool (or slice); registered methods of the worker class are methods here.

    They return at once with a `BatchRef` (when the operation writes columns) or a `Future`. Built by
    `SomeWorker.on(pool, ...)` or `hf.place(SomeClass, pool, ...)`.
    Errors: WorkerError when a rank cannot be built.
    """

    def __init__(self, session: Session, ranks: RankGroup, listed: bool = True) -> None:
        """The session knows a `listed` group by its name."""
        self.session, self.ranks, self.name = session, ranks, ranks.name
        self.operations = session.backend.operations(ranks.worker_class, ranks.settings)
        self._signatures = {op: inspect.signature(getattr(self.worker_class, op)) for op in self.operations}
        self._closed, self._listed = "", listed
        if taken := [op for op in self.operations if op in self.__dict__ or hasattr(type(self), op)]:
            raise ConfigError(
                f"{self.worker_class.__name__} calls an operation {taken[0]!r}, which every group already has as an "
                f"attribute of its own. Give the method another name."
            )
        if listed:
            session.groups[self.name] = self
        try:
            session.backend.build(ranks)
        except BaseException:
            self._drop(wait=1.0)  # peers of the rank that failed may still be waiting for it
            raise

    @property
    def all_ranks(self) -> tuple[RankGroup, ...]:
        """Everything that has been placed for it."""
        return (self.ranks,)

    def weights_changed(self) -> None:
        """Called when its weights are written from outside, or stepped."""

    def has_replica_for(self, name: str) -> bool:
        """Whether calls of this operation run on other ranks than `ranks`."""
        return False

    @property
    def worker_class(self) -> type:
        return self.ranks.worker_class

    @property
    def hosts(self) -> list[Any]:
        """Handles of the host processes, in rank order."""
        return list(self.ranks.hosts)

    @property
    def members(self) -> tuple[int, ...]:
        """The rank in the pool of each rank of the group."""
        return self.ranks.members

    @property
    def pool_name(self) -> str:
        return self.ranks.pool_name

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the worker class, all of them."""
        return self.ranks.settings

    @property
    def grid(self) -> RankGrid:
        return self.ranks.grid

    @cached_property
    def token_cost(self) -> Cost | None:
        """The cost of a row as a function of its tokens; None: cost equals the token count."""
        of_class = getattr(self.worker_class, "token_cost", None)
        return of_class(self.settings) if of_class else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = self.__dict__.get("operations", {})
        if name not in known:
            raise AttributeError(
                f"{self.__dict__.get('name', 'group')} has no operation {name!r}.{nearest(name, known)}"
            )
        return partial(self._invoke, known[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.operations]

    def __repr__(self) -> str:
        return f"<{self.name}: {self.worker_class.__name__} at {self.ranks}>"

    def _invoke(self, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        self.check_open()
        call = self._bind(operation, args, kwargs)
        inputs = call.inputs(self.grid)
        issued = self.session.backend.issue(self.ranks, self._calls(call, inputs))
        result = operation.protocol.collect(self.grid, call.results(inputs, issued))
        if operation.carries:
            result = operation.carried(next(iter(call.rows.values())), call.factor) | result
        if isinstance(result, list) and result and all(isinstance(item, Future) for item in result):
            result = Future.concat(result, "list")
        if operation.blocking:
            calls = {id(output.call): output.call for output in issued if output is not None and output.call}
            self.session.iterations.wait([status for call in calls.values() for status in call.statuses])
            return result.get() if isinstance(result, Future) else result
        return result

    def _bind(self, operation: Operation, args: tuple, kwargs: dict[str, Any]) -> _GroupCall:
        """Name the arguments, and check everything that can be checked before a process is asked."""
        signature = self._signatures[operation.name]
        try:
            bound = signature.bind(None, *args, **kwargs)
        except TypeError as error:
            known = [name for name in signature.parameters if name != "self"]
            unknown = next((name for name in kwargs if name not in known), None)
            hint = f" It has no setting {unknown!r}.{nearest(unknown, known)}" if unknown else ""
            raise ConfigError(f"{self.name}.{operation.name}: {error}.{hint}") from None
        if not operation.protocol.prepared:  # a default is one value, not a list with one per rank
            bound.apply_defaults()
        settings = dict(list(bound.arguments.items())[1:])
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                settings |= settings.pop(name, {})
        for name, value in settings.items():
            if isinstance(value, Batch):
                settings[name] = BatchRef.from_batch(value)
            elif isinstance(value, OneColumn):
                settings[name] = value.batch
        if operation.check is not None:
            operation.check(self.settings, settings)
        rows = {name: value for name, value in settings.items() if isinstance(value, BatchRef)}
        reads = {name: self._reads(operation, settings, ref) for name, ref in rows.items()}
        spec = self._split_spec(operation, settings, rows)
        rows = {name: replace(ref, split_spec=spec, part=None) for name, ref in rows.items()}
        factor = operation.repeat(self.settings, settings) if operation.repeat else 1
        writes = operation.columns_written(self.settings, settings)
        return _GroupCall(operation, settings, rows, reads, writes, factor)

    def _reads(self, operation: Operation, settings: dict[str, Any], ref: BatchRef) -> tuple[str, ...]:
        """The columns that travel."""
        if ref.rows == 0:
            raise EmptyBatchError(f"{self.name}.{operation.name} was given a batch without rows.")
        try:
            return operation.columns_read(self.settings, settings, ref.columns)
        except MissingColumnError as error:
            column = getattr(error, "column", "")
            raise MissingColumnError(
                f"{self.name}.{operation.name} reads {column!r}; no call has written it{self._who_writes(column)}"
            ) from None

    def _split_spec(self, operation: Operation, settings: dict[str, Any], rows: dict[str, BatchRef]) -> SplitSpec:
        """One way to split all batches of a call, so that their rows stay together."""

        def column(name: str | None) -> ColumnRef | None:
            return next((ref.column_refs[name] for ref in rows.values() if name and name in ref.column_refs), None)

        chunks = settings.get(operation.chunks, 1) if operation.chunks else 1
        if type(chunks) is not int or chunks < 1:
            raise ConfigError(f"{self.name}.{operation.name}({operation.chunks}={chunks!r}): at least 1 is needed.")
        most = min((ref.rows for ref in rows.values()), default=chunks)
        if chunks > most:
            raise ConfigError(
                f"{self.name}.{operation.name}: {operation.chunks}={chunks} for a batch of {most} rows, and every "
                f"mini-batch needs a row. Use {operation.chunks} of at most {most}, or a larger batch."
            )
        if operation.groups and rows and column("group_id") is None:
            raise MissingColumnError(
                f"{self.name}.{operation.name} keeps groups of rows together and needs 'group_id': repeat() or "
                f"generate_sequences(n=...) write it."
            )
        weights, groups = column(operation.balance), column("group_id") if operation.groups else None
        cost = self.token_cost if weights is not None and self.grid.size > 1 else None
        return SplitSpec(weights, groups, chunks, cost)

    def _who_writes(self, column: str) -> str:
        if column in _DRIVER_WRITES:
            return f": call {_DRIVER_WRITES[column]} first."
        for group in self.session.groups.values():
            for name in group.operations:
                if column in group.usually_writes(name):
                    return f": call {group.name}.{name}(batch) first."
        return " and no group writes it: the prompts must bring it."

    def usually_writes(self, name: str) -> tuple[str, ...]:
        """Columns that an operation writes when it is called with its default settings."""
        parameters = self._signatures[name].parameters.values()
        defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        try:
            return self.operations[name].columns_written(self.settings, defaults)
        except (KeyError, HybridFlowError):  # it depends on a setting without a default
            return ()

    def _calls(self, call: _GroupCall, inputs: Sequence[_RankInput]) -> list[RankCall | None]:
        """What each rank is asked, in rank order; None for a rank that is not called."""
        seq = self.session.iterations.sequence()
        called = tuple(rank for rank, mine in enumerate(inputs) if mine is not None)
        agree = called if len(called) > 1 and call.may_fail(inputs) else ()
        out: list[RankCall | None] = []
        for mine in inputs:
            if mine is None:
                out.append(None)
                continue
            source = _source(mine)
            due = None if source is None or call.operation.resizes else source.rows * call.factor
            sent = {name: value.to_rank() if isinstance(value, BatchRef) else value for name, value in mine.items()}
            span = source.span if source else None
            out.append(RankCall(seq, self.ranks.key, call.operation.name, sent, call.writes, agree, due, span))
        return out

    def check_open(self) -> None:
        """Errors: PlacementError when the group is closed."""
        if self._closed:
            raise PlacementError(f"{self.name} is closed{self._closed}: place it again with .on(pool, ...).")

    def close(self) -> None:
        """Free the models of this group; the pool stays. Can be called again.

        Errors: WorkerError of a rank that could not free all that it had; the group is closed nevertheless.
        """
        wait = min(_CLOSE_SECONDS, self.session.deadlines.peers)
        if not self._closed and (failure := self._drop(wait)) is not None:
            raise failure.error.as_cause()

    def _drop(self, wait: float) -> Failure | None:
        self._leave(" by close()")
        return self.session.backend.drop(self.ranks, wait)

    def _leave(self, how: str) -> None:
        self._closed = self._closed or how
        if self._listed:
            self.session.groups.pop(self.name, None)

    def forget_hosts(self) -> None:
        """Called when the pool closes: there is nothing left to free."""
        self._leave(" with its pool")
        self.session.backend.channels.close(self.ranks.key)


_RankInput = dict[str, Any] | None
"""The settings of one rank in a call; None for a rank that is not called."""


@dataclass(frozen=True)
class _GroupCall:
    """One call on a group. `settings` by name; those in `rows` are batches, of which `reads` names the columns that
    travel. `factor` output rows come from each input row."""

    operation: Operation
    settings: dict[str, Any]
    rows: dict[str, BatchRef]
    reads: dict[str, tuple[str, ...]]
    writes: tuple[str, ...]
    factor: int

    def inputs(self, grid: RankGrid) -> list[_RankInput]:
        """The settings of each rank; None for a rank that is not called."""
        protocol = self.operation.protocol
        per_rank: list[_RankInput] = [{} for _ in range(grid.size)]
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

    def may_fail(self, inputs: Sequence[_RankInput]) -> bool:
        """Whether an input comes from a call, which may have failed."""
        return any(v.may_fail for mine in inputs if mine for v in mine.values() if isinstance(v, BatchRef))

    def results(self, inputs: Sequence[_RankInput], outputs: Sequence[RankOutput | None]) -> list[Any]:
        """What each rank will return, as a protocol collects it.

        Row counts that only the workers know are the documented exception that waits."""
        if not self.writes:
            return [SKIP if output is None else Future((output,)) for output in outputs]
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


def _source(mine: dict[str, Any]) -> BatchRef | None:
    """The rows that a rank is given, if it is given any."""
    return next((value for value in mine.values() if isinstance(value, BatchRef)), None)


class _Nothing:
    """Rows of a call that has none."""

    def split(self, parts: int) -> list[_Nothing]:
        return [self] * parts

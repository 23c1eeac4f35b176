"""WorkerGroup: the driver's proxy of one model group. Calling a registered method dispatches it to every rank.

group.method(batch, key=value)
  -> operation.columns_read  -> batch.select          only what the method reads travels
  -> protocol.distribute     -> one input per rank    references are rearranged
  -> host.call on each rank                           returns at once
  -> protocol.collect        -> BatchRef | Future
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, ClassVar

from hybridflow.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef, OneColumn
from hybridflow.cluster.columns import ColumnRef, Issued, Origin
from hybridflow.cluster.future import Future
from hybridflow.cluster.host import Call
from hybridflow.cluster.invocation import Invocation, Outputs
from hybridflow.cluster.placed import Placed, arguments_sent
from hybridflow.cluster.splitting import Splitting
from hybridflow.cluster.store import Failure
from hybridflow.errors import (
    ConfigError,
    EmptyBatchError,
    HybridFlowError,
    MissingColumnError,
    PlacementError,
    nearest,
)
from hybridflow.model_spec import Cost
from hybridflow.protocols import Operation, operations
from hybridflow.topology import RankGrid

_DRIVER_WRITES = {"advantages": "hf.compute_advantage(batch, ...)", "returns": "hf.compute_advantage(batch, ...)"}
_DRIVER_WRITES |= dict.fromkeys(("cost_advantages", "cost_returns"), 'hf.compute_advantage(batch, "safe_rlhf", ...)')
_DRIVER_WRITES |= {"group_id": "generate_sequences(batch, n=...) or batch.repeat(n)"}


class WorkerGroup:
    """Ranks of one model on the devices of a pool (or slice); registered methods of the worker class are methods here.

    They return at once with a `BatchRef` (when the operation writes columns) or a `Future`. Built by
    `SomeWorker.on(pool, ...)` or `hf.place(SomeClass, pool, ...)`.
    Errors: WorkerError when a rank cannot be built.
    """

    listed: ClassVar[bool] = True
    """The session knows it by its name."""

    def __init__(self, placed: Placed) -> None:
        self.placed, self.session, self.name = placed, placed.session, placed.name
        self.operations = operations(self.worker_class)
        self._signatures = {op: inspect.signature(getattr(self.worker_class, op)) for op in self.operations}
        self._closed = ""
        if taken := [op for op in self.operations if op in self.__dict__ or hasattr(type(self), op)]:
            raise ConfigError(
                f"{self.worker_class.__name__} calls an operation {taken[0]!r}, which every group already has as an "
                f"attribute of its own. Give the method another name."
            )
        if self.listed:
            self.session.groups[self.name] = self
        try:
            self.placed.build()
        except BaseException:
            self._drop(wait=1.0)  # peers of the rank that failed may still be waiting for it
            raise

    @property
    def parts(self) -> tuple[Placed, ...]:
        """All ranks that have been placed for it."""
        return (self.placed,)

    def weights_changed(self) -> None:
        """Called when its weights are written from outside, or stepped."""

    def elsewhere(self, name: str) -> bool:
        """Whether calls of this operation run on other ranks than those of `placed`."""
        return False

    @property
    def worker_class(self) -> type:
        return self.placed.worker_class

    @property
    def hosts(self) -> list[Any]:
        """Handles of the host processes, in rank order."""
        return list(self.placed.hosts)

    @property
    def members(self) -> tuple[int, ...]:
        """The rank in the pool of each rank of the group."""
        return self.placed.members

    @property
    def pool_name(self) -> str:
        return self.placed.pool_name

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the worker class, all of them."""
        return self.placed.settings

    @property
    def grid(self) -> RankGrid:
        return self.placed.grid

    @cached_property
    def token_cost(self) -> Cost | None:
        """What a row of so many tokens costs here; None: as much as it has tokens."""
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
        return f"<{self.name}: {self.worker_class.__name__} at (p,t,d)=({self.grid.p},{self.grid.t},{self.grid.d})>"

    def _invoke(self, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        self.check_open()
        invocation = self._bind(operation, args, kwargs)
        issued = self._dispatch(invocation)
        result = operation.protocol.collect(self.grid, issued.outputs)
        if operation.carries:
            carried = next(iter(invocation.rows.values()))
            result = (carried.repeat(invocation.factor) if invocation.factor > 1 else carried) | result
        result = _several(result)
        if operation.blocking:
            self.session.iterations.wait(issued.call.statuses)
            return result.get() if isinstance(result, Future) else result
        return result

    def _bind(self, operation: Operation, args: tuple, kwargs: dict[str, Any]) -> Invocation:
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
                settings[name] = BatchRef.from_batch(value, self.session)
            elif isinstance(value, OneColumn):
                settings[name] = value.batch
            elif isinstance(value, BatchRef) and value.session is None:
                settings[name] = replace(value, session=self.session)
        if operation.check is not None:
            operation.check(self.settings, settings)
        rows = {name: value for name, value in settings.items() if isinstance(value, BatchRef)}
        reads = {name: self._reads(operation, settings, ref) for name, ref in rows.items()}
        splitting = self._splitting(operation, settings, rows)
        rows = {name: replace(ref, splitting=splitting, piece=None) for name, ref in rows.items()}
        factor = operation.repeat(self.settings, settings) if operation.repeat else 1
        writes = operation.columns_written(self.settings, settings)
        return Invocation(operation, settings, rows, reads, writes, factor)

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

    def _splitting(self, operation: Operation, settings: dict[str, Any], rows: dict[str, BatchRef]) -> Splitting:
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
        return Splitting(weights, groups, chunks, self.token_cost)

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

    def _dispatch(self, invocation: Invocation) -> Outputs:
        """Issue the call on every rank, in rank order."""
        operation, where = invocation.operation, f"{self.name}.{invocation.operation.name}"
        inputs = invocation.inputs(self.grid)
        ranks = tuple(rank for rank, mine in enumerate(inputs) if mine is not None)
        agree = ranks if len(ranks) > 1 and invocation.may_fail(inputs) else ()
        out = Outputs(self.session, invocation, Issued([], self.session.iterations.reported))
        seq = self.session.sequence()
        for rank, (host, mine) in enumerate(zip(self.hosts, inputs, strict=True)):
            if mine is None:
                out.skip()
                continue
            source = next((v for v in mine.values() if isinstance(v, BatchRef)), None)
            due = None if source is None or operation.resizes else source.rows * invocation.factor
            span = source.span if source else None
            call = Call(seq, self.placed.key, operation.name, mine, invocation.writes, agree, due, span)
            with arguments_sent(where, mine):
                ref, status = host.call.remote(call)
            out.add(ref, status, Origin(self.name, rank, operation.name), due, source)
        self.session.iterations.issued(out.call.statuses)
        out.count_rows()
        return out

    def check_open(self) -> None:
        """Errors: PlacementError when the group is closed."""
        if self._closed:
            raise PlacementError(f"{self.name} is closed{self._closed}: place it again with .on(pool, ...).")

    def close(self) -> None:
        """Free the models of this group; the pool stays. Can be called again.

        Errors: WorkerError of a rank that could not free all that it had; the group is closed nevertheless.
        """
        if not self._closed and (failure := self._drop(wait=60.0)) is not None:
            raise failure.error.as_cause()

    def _drop(self, wait: float) -> Failure | None:
        self._closed = " by close()"
        self._leave()
        return self.placed.drop(wait)

    def _leave(self) -> None:
        if self.listed:
            self.session.groups.pop(self.name, None)

    def forget_hosts(self) -> None:
        """Called when the pool closes: there is nothing left to free."""
        self._closed = self._closed or " with its pool"
        self._leave()
        self.session.links.close(self.placed.key)


def _several(result: Any) -> Any:
    """A list of futures (one per rank or stage) as one future of a list."""
    if isinstance(result, list) and result and all(isinstance(item, Future) for item in result):
        return Future(tuple(part for item in result for part in item.parts), "list", result[0].timeout)
    return result

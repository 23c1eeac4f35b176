"""WorkerGroup: the driver's proxy of one model group. Calling a registered method dispatches it to every rank.

group.method(batch, key=value)
  -> operation.columns_read  -> batch.select          only what the method reads travels
  -> protocol.distribute     -> one input per rank    references are rearranged
  -> backend.issue           -> one call per rank     returns at once
  -> protocol.collect        -> BatchRef | Future

Calls of a group may have different layouts (ReaL, section 4). The primary ranks train and run all calls without a
replica. A replica is a set of ranks with its own weights in another layout or on other devices, and runs some calls:
call -> weights stale? -> primary --weights--> replica -> the call, in call order; the driver does not wait.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

from hybridflow.batch.batch import Batch
from hybridflow.cluster.backend import RankCall, RankGroup
from hybridflow.cluster.batch_ref import BatchRef, LaterBatch, OneColumn
from hybridflow.cluster.future import Failure, Future
from hybridflow.cluster.held_calls import partners
from hybridflow.cluster.interactive import group_table
from hybridflow.cluster.row_refs import ColumnRef, RankOutput, SplitSpec, outputs_of
from hybridflow.cluster.session import Session
from hybridflow.cluster.store import Reader
from hybridflow.cluster.weight_channels import WEIGHTS
from hybridflow.errors import ConfigError, EmptyBatchError, HybridFlowError, MissingColumnError, PlacementError, nearest
from hybridflow.protocols.operation import Operation, kind_of
from hybridflow.protocols.protocol import ONE_TO_ALL, SKIP
from hybridflow.settings import bound_settings
from hybridflow.topology import RankGrid

_CLOSE_SECONDS = 60.0
_NOTHING: Any = SimpleNamespace(split=lambda parts: [_NOTHING] * parts)
"""Takes the place of rows in a call without batches."""


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

    def inputs(self, grid: RankGrid) -> list[dict[str, Any] | None]:
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
            called.append(protocol.split(grid, _NOTHING))
        found, out = dict[tuple[int, ...], dict[str, Any] | None](), list[dict[str, Any] | None]()
        for values in zip(*called, strict=True) if called else [()] * grid.size:
            if (key := tuple(map(id, values))) not in found:
                skipped = any(value is SKIP for value in values)
                found[key] = None if skipped else dict(zip(parts, values, strict=False))
            out.append(found[key])
        return out

    def asked(self, inputs: Sequence[dict[str, Any] | None], seq: int, key: str) -> list[RankCall | None]:
        """The RankCall of each rank, in rank order: call number `seq` of the ranks with this `key`."""
        called = tuple(rank for rank, mine in enumerate(inputs) if mine is not None)
        distinct = {id(mine): mine for mine in inputs if mine is not None}
        refs = [value for mine in distinct.values() for value in mine.values() if isinstance(value, BatchRef)]
        agree = called if len(called) > 1 and any(ref.may_fail for ref in refs) else ()

        def of_rank(mine: dict[str, Any]) -> RankCall:
            source = _source(mine)
            due = None if source is None or self.operation.resizes else source.rows * self.factor
            sent = {name: value.to_rank() if isinstance(value, BatchRef) else value for name, value in mine.items()}
            span = source.span if source else None
            more = (self.writes, agree, due, span, None, kind_of(self.operation), self.compares)
            return RankCall(seq, key, self.operation.name, sent, *more)

        calls = {key: of_rank(mine) for key, mine in distinct.items()}
        return [calls.get(id(mine)) for mine in inputs]

    def results(self, inputs: Sequence[dict[str, Any] | None], outputs: Sequence[RankOutput | None]) -> Sequence[Any]:
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


CallSchedule = Mapping[str, Sequence[int | None]]
"""For each operation and each of its calls in an iteration: the index of a replica, or None for the primary. Further
calls start again at the first."""


class WorkerGroup:
    """Ranks of one model on the devices of a pool (or slice); registered methods of the worker class are methods here.

    They return at once with a `BatchRef` (when the operation writes columns) or a `Future`. Built by
    `SomeWorker.on(pool, ...)` or `hf.place(SomeClass, pool, ...)`.

    The session registers a `listed` group by name. `schedule` assigns calls to replicas; the primary runs all calls
    that train. `ONE_TO_ALL` calls also go to the replicas' ranks, whose results follow those of the primary. Errors:
    WorkerError when a rank cannot be built; all ranks are then freed. `closed` says how it was closed, "" while open.
    """

    def __init__(
        self,
        session: Session,
        ranks: RankGroup,
        replicas: Sequence[RankGroup] = (),
        schedule: CallSchedule = MappingProxyType({}),
        listed: bool = True,
    ) -> None:
        self.session, self.ranks, self.name = session, ranks, ranks.name
        self.operations = session.backend.operations(ranks.worker_class, ranks.settings)
        self._signatures = {op: inspect.signature(getattr(self.worker_class, op)) for op in self.operations}
        self.closed, self._listed = "", listed
        self._replicas: list[WorkerGroup] = []
        self.response_stream: Any = None  # the one that advances its rows: `hf.stream`, `hf.Elastic`
        self.sleeping: dict[int, RankGroup] = {}  # ranks in other data parallel sizes, without memory (GroupSizes)
        self._schedule = schedule
        self._version = 0  # of the weights; all ranks start from those of the model directory
        self._source: tuple[str, int] | None = None  # of the weights: a group and its version
        self._start = self.weights = (str(ranks.settings.get("model")), 0)  # groups with equal weights have equal ones
        self._compared = set[tuple[str, str]]()  # who sampled rows that were compared, with whose weights
        self.calls_issued = Counter[str]()  # per operation, to the primary since it was built
        self._calls_made = Counter[str]()  # ... to all ranks, in this iteration
        self._iteration = session.iterations.current if replicas else 0
        if taken := [op for op in self.operations if op in self.__dict__ or hasattr(type(self), op)]:
            raise ConfigError(
                f"{self.worker_class.__name__} calls an operation {taken[0]!r}, which every group already has as an "
                f"attribute of its own. Give the method another name."
            )
        if listed:
            session.groups[self.name] = self
        try:
            session.backend.build(ranks)
            for other in replicas:
                self._replicas.append(WorkerGroup(session, other, listed=False))
        except BaseException:
            self._drop(wait=1.0)  # peers of the failed rank may still wait for it
            raise

    @property
    def all_ranks(self) -> tuple[RankGroup, ...]:
        """The primary, all replicas, and ranks that sleep."""
        return (self.ranks, *(replica.ranks for replica in self._replicas), *self.sleeping.values())

    @property
    def has_replicas(self) -> bool:
        """Whether some calls run on other ranks than the primary."""
        return bool(self._replicas)

    def move_to(self, ranks: RankGroup, ran: Mapping[str, int] = MappingProxyType({})) -> None:
        """The group's state is on these ranks now, which have run each operation so often already."""
        self.ranks, self.calls_issued = ranks, Counter(ran)

    def weights_changed(self, source: WorkerGroup | None = None, trained: bool = False) -> None:
        """Called when weights are written: by an optimizer step (`trained`), a checkpoint, or a transfer from
        `source`."""
        self._before = self.weights
        self._version += 1
        self._source = None if source is None else (source.name, source._version)
        self.weights = (self.name, self._version) if source is None else source.weights
        if not trained:
            self._compared.clear()

    @property
    def weights_version(self) -> int:
        """How often weights were written, or training was issued, since the group was built."""
        return self._version

    @property
    def weights_source(self) -> str | None:
        """The group whose current weights these are since the last transfer; "" while they are as first loaded."""
        if self._source is None:
            return None if self._version else ""
        name, version = self._source
        source = self.session.groups.get(name)
        return name if source is not None and source._version == version else None

    @property
    def trainer(self) -> WorkerGroup | None:
        """The group that trains the weights that this one has now, also by way of others; None for outdated weights."""
        found: WorkerGroup | None = self
        while found is not None and not found.training:
            found = found.session.groups.get(found.weights_source or "")
        return found

    @property
    def training(self) -> list[str]:
        """The operations that train."""
        return [name for name, operation in self.operations.items() if kind_of(operation) == "training"]

    def has_replica_for(self, name: str) -> bool:
        """Whether a replica runs calls of this operation."""
        return any(number is not None for number in self._schedule.get(name, ()))

    worker_class = property(lambda self: self.ranks.worker_class)
    members = property(lambda self: self.ranks.members, doc="The rank in the pool of each rank of the group.")
    pool_name = property(lambda self: self.ranks.pool_name)
    settings = property(lambda self: self.ranks.settings)
    grid = property(lambda self: self.ranks.grid)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = self.__dict__.get("operations", {})
        if name not in known:
            own = self.__dict__.get("name", "group")
            raise AttributeError(f"{own} has no operation {name!r}.{nearest(name, known)}")
        return partial(self._invoke, known[name])

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.operations]

    def __repr__(self) -> str:
        others = []
        for name, numbers in self._schedule.items():
            grids = [self._replicas[n].grid for n in dict.fromkeys(numbers) if n is not None]
            others += [f", {name} at ({grid.p},{grid.t},{grid.d})" for grid in grids]
        return f"<{self.name}: {self.worker_class.__name__} at {self.ranks}{''.join(others)}>"

    def _repr_html_(self) -> str:
        return group_table(self)

    def _invoke(self, operation: Operation, *args: Any, **kwargs: Any) -> Any:
        self.check_open()
        trains = kind_of(operation) == "training"
        if trains:
            self.weights_changed(trained=True)  # first: a failed update may have changed them
        if not self._replicas:
            return self._issued(operation, args, kwargs)
        if not trains and (replica := self._next(operation.name)) is not None:
            return replica._following(self, operation.name, args, kwargs)
        result = self._issued(operation, args, kwargs)
        if operation.protocol is not ONE_TO_ALL or trains:
            return result
        others = [replica for replica in self._replicas if operation.name in replica.operations]
        results = [result, *(other._following(self, operation.name, args, kwargs) for other in others)]
        futures = [answers for answers in results if isinstance(answers, Future)]
        return Future.concat(futures, "list") if futures else [answer for answers in results for answer in answers]

    def _next(self, name: str) -> WorkerGroup | None:
        """The replica for the next call of this operation."""
        if self._iteration != self.session.iterations.current:
            self._iteration = self.session.iterations.current
            self._calls_made.clear()
        if not (numbers := self._schedule.get(name)):
            return None
        number = numbers[self._calls_made[name] % len(numbers)]
        self._calls_made[name] += 1
        return None if number is None else self._replicas[number]

    def _following(self, primary: WorkerGroup, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of a replica with the current weights of `primary`; a failed transfer fails the call."""
        channels = self.session.backend.channels
        if self._version != primary._version or channels.failed(primary.ranks, self.ranks):
            of, pair = self.session.backend.weights_layout, (primary.ranks, self.ranks)
            channels.send(*pair, WEIGHTS, lambda: (of(pair[0]), of(pair[1])), required=True)
            self._version, self.weights = primary._version, primary.weights
        return self._issued(self.operations[name], args, kwargs)

    def _issued(self, operation: Operation, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call of the group's own ranks."""
        call, recorded = self._bind(operation, args, kwargs), self.session.recorded
        if recorded is not None and (kind_of(operation) == "generation" or operation.later):
            return recorded.call(self.name, call, partial(self._run, call))
        return self._run(call)

    def _run(self, call: GroupCall) -> Any:
        """Issue the call and collect its results."""
        inputs, operation = call.inputs(self.grid), call.operation
        asked = call.asked(inputs, self.session.iterations.sequence(), self.ranks.key)
        issued = self.session.backend.issue(self.ranks, asked, partners(self, operation))
        self.calls_issued[operation.name] += 1
        one = next(filter(None, issued), None)
        if one is not None and one.call and not (operation.later and self._version):
            one.call.weights = self.weights  # rows of a session may have been begun by earlier ones
        result = call.carried(operation.protocol.collect(self.grid, call.results(inputs, issued)))
        if isinstance(result, list) and result and all(isinstance(item, Future) for item in result):
            result = Future.concat(result, "list")
        if operation.blocking:
            calls = {id(output.call): output.call for output in issued if output is not None and output.call}
            self.session.iterations.wait([status for call in calls.values() for status in call.statuses])
            return result.get() if isinstance(result, Future) else result
        return result

    def _bind(self, operation: Operation, args: tuple, kwargs: dict[str, Any]) -> GroupCall:
        """Bind the arguments and run all checks that need no process."""
        signature, where = self._signatures[operation.name], f"{self.name}.{operation.name}"
        defaults = not operation.protocol.prepared  # a default is one value, not one per rank
        settings = bound_settings(signature, where, args, kwargs, defaults)
        for name, value in settings.items():
            if isinstance(value, Batch):
                settings[name] = BatchRef.from_batch(value)
            elif isinstance(value, OneColumn):
                settings[name] = value.batch
        if operation.binds is not None:
            settings = dict(operation.binds(self.settings, settings))
        if operation.check is not None:
            operation.check(self.settings, settings)
        operation = operation.of_call(self.settings, settings)
        rows = {name: value for name, value in settings.items() if isinstance(value, BatchRef)}
        reads = {name: self._reads(operation, settings, ref) for name, ref in rows.items()}
        compared = {name: self._compares(operation, ref) for name, ref in rows.items()} if operation.compares else {}
        reads |= {name: tuple(dict.fromkeys((*reads[name], *more))) for name, more in compared.items()}
        spec = self._split_spec(operation, settings, rows)
        rows = {name: replace(ref, split_spec=spec, part=None) for name, ref in rows.items()}
        factor = operation.repeat(self.settings, settings) if operation.repeat else 1
        writes = operation.columns_written(self.settings, settings)
        return GroupCall(operation, settings, rows, reads, writes, factor, any(compared.values()))

    def _reads(self, operation: Operation, settings: dict[str, Any], ref: BatchRef) -> tuple[str, ...]:
        """The columns that travel."""
        if ref.rows == 0:
            raise EmptyBatchError(f"{self.name}.{operation.name} was given a batch without rows.")
        try:
            return operation.columns_read(self.settings, settings, ref.columns)
        except MissingColumnError as error:
            column = getattr(error, "column", "")
            raise MissingColumnError(
                f"{self.name}.{operation.name} reads {column!r}; no call has written it"
                f"{self.session.who_writes(column, self, ref.columns)}"
            ) from None

    def _compares(self, operation: Operation, ref: BatchRef) -> list[str]:
        """The columns `operation.compares` for rows of the present weights, unless such rows were compared already."""
        named = [name for name in operation.compares if not name.endswith("?")]
        if not all(name in ref for name in named):
            return []
        weights = self._before if kind_of(operation) == "training" else self.weights
        first = next(outputs_of([ref.column_refs[named[0]].node]))
        if (first.origin.role, weights[0]) in self._compared:
            return []
        outputs = set(outputs_of([ref.column_refs[name].node for name in named]))
        if any(output.call is None or output.call.weights != weights for output in outputs):
            return []
        self._compared |= {(output.origin.role, weights[0]) for output in outputs}
        return [name for name in (each.removesuffix("?") for each in operation.compares) if name in ref]

    def _split_spec(self, operation: Operation, settings: dict[str, Any], rows: dict[str, BatchRef]) -> SplitSpec:
        """One split for all batches of a call, so that their rows stay together."""

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
        together = "group_id" if operation.groups else "trajectory_id" if operation.trajectories else None
        weights, groups = column(operation.balance), column(together)
        cost = self.ranks.spec.row_cost if weights is not None and self.grid.size > 1 else None
        return SplitSpec(weights, groups, chunks, cost)

    def can_run(self, name: str) -> bool:
        """Whether the group's settings alone do not forbid an operation."""
        check = self.operations[name].check
        try:
            if check is not None:
                check(self.settings, {})
        except (KeyError, TypeError, AttributeError):  # it looks at the call
            return True
        except HybridFlowError:
            return False
        return True

    def usually_writes(self, name: str) -> tuple[str, ...]:
        """Columns that an operation writes with its default settings."""
        if numbers := [n for n in self._schedule.get(name, ()) if n is not None]:
            return self._replicas[numbers[0]].usually_writes(name)
        parameters = self._signatures[name].parameters.values()
        call: Mapping[str, Any] = {p.name: p.default for p in parameters if p.default is not p.empty}
        operation = self.operations[name]
        try:
            call = call if operation.binds is None else operation.binds(self.settings, call)
            return operation.columns_written(self.settings, call)
        except (KeyError, HybridFlowError):  # they depend on a setting without a default
            return ()

    def check_open(self) -> None:
        """Errors: PlacementError when the group is closed."""
        if self.closed:
            raise PlacementError(f"{self.name} is closed{self.closed}: place it again with .on(pool, ...).")

    def close(self) -> None:
        """Free the models of this group; the pool stays. Can be called again.

        Errors: WorkerError of a rank that could not free everything; the group is closed anyway.
        """
        seconds = self.session.backend.deadlines.peers
        if not self.closed and (failure := self._drop(min(_CLOSE_SECONDS, seconds))) is not None:
            raise failure.error.as_cause()

    def _drop(self, wait: float) -> Failure | None:
        self._leave(" by close()")
        failures = [self.session.backend.drop(ranks, wait) for ranks in self.all_ranks]
        self.sleeping.clear()
        return next((failure for failure in failures if failure is not None), None)

    def _leave(self, how: str) -> None:
        self.closed = self.closed or how
        if self._listed:
            self.session.groups.pop(self.name, None)

    def rebuild(self, pools: Mapping[str, Any]) -> None:
        """Build the ranks again, as first placed, in the new hosts of their pools (by name).

        Errors: WorkerError when a rank cannot be built.
        """
        old = self.ranks
        pool = pools[old.pool_name].part(old.members)
        self.ranks = pool.ranks(old.name, old.worker_class, old.settings, old.grid, old.own_grid)
        self._version, self._source, self.weights = 0, None, self._start
        self._compared.clear()
        self._calls_made.clear()
        self.calls_issued.clear()
        self.sleeping.clear()  # their hosts are gone
        self.session.backend.build(self.ranks)
        for replica in self._replicas:
            replica.rebuild(pools)

    def forget_hosts(self) -> None:
        """Called when the pool closes and the hosts are gone."""
        self._leave(" with its pool")
        for ranks in self.all_ranks:
            self.session.backend.channels.close(ranks.key)
        self.sleeping.clear()

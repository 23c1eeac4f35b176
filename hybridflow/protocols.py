"""Transfer protocols: pure values that split the inputs of a group call over ranks and join their outputs, with the
eight of the paper's table 3; and `@register`, the declaration of an operation (architecture, idea 2), which decides
dispatch, column-pruned transfer, early errors for missing columns, and the dataflow graph.

Letters: p, t, d are the pipeline, tensor and data parallel index of a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, Self, TypeVar
from typing import Protocol as Structural

from hybridflow.errors import ConfigError, MissingColumnError, ProtocolError
from hybridflow.topology import RankGrid


class _Skip:
    """Stands for a rank that takes no part in a call."""

    def __repr__(self) -> str:
        return "SKIP"

    def __reduce__(self):
        return "SKIP"


SKIP = _Skip()


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


def _same_to_every_rank(grid: RankGrid, rows: Any) -> list[Any]:
    return [rows] * grid.size


def _to_rank_zero(grid: RankGrid, rows: Any) -> list[Any]:
    return [rows] + [SKIP] * (grid.size - 1)


def _one_item_per_rank(grid: RankGrid, items: Any) -> list[Any]:
    if not isinstance(items, Sequence) or isinstance(items, str) or len(items) != grid.size:
        found = f"{len(items)} items" if isinstance(items, Sequence) else type(items).__name__
        raise ProtocolError(f"ALL_TO_ALL takes a list with one item per rank ({grid.size}), got {found}.")
    return list(items)


def _split_over_all_ranks(grid: RankGrid, rows: Rows) -> Sequence[Rows]:
    return rows.split(grid.size)


def _split_over_d(grid: RankGrid, rows: Rows) -> list[Rows]:
    parts = rows.split(grid.d)
    return [parts[grid.coords(rank).d] for rank in range(grid.size)]


def _split_over_generation_replicas(grid: RankGrid, rows: Rows) -> list[Rows]:
    generation = grid.generation()
    parts = rows.split(generation.replicas)
    return [parts[generation.replica(rank)] for rank in range(grid.size)]


def _split_over_p_and_d(grid: RankGrid, rows: Rows) -> list[Rows]:
    parts = rows.split(grid.p * grid.d)
    return [parts[at.d * grid.p + at.p] for at in map(grid.coords, range(grid.size))]


def _from_every_rank(grid: RankGrid, outputs: Sequence[Any]) -> list[Any]:
    return list(outputs)


def _from_rank_zero(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return outputs[0]


def _from_every_stage(grid: RankGrid, outputs: Sequence[Any]) -> list[Any]:
    return [outputs[grid.rank(p=p, t=0, d=0)] for p in range(grid.p)]


def _join_all_ranks(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return join(outputs)


def _join_last_stages(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return join([outputs[grid.rank(p=-1, t=0, d=d)] for d in range(grid.d)])


def _join_generation_replicas(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    generation = grid.generation()
    first: dict[int, Any] = {}
    for rank in range(grid.size):
        if (at := generation.coords(rank)).p == 0 and at.t == 0:
            first[generation.replica(rank)] = outputs[rank]
    return join([first[replica] for replica in range(generation.replicas)])


def _join_stages_as_replicas(grid: RankGrid, outputs: Sequence[Any]) -> Any:
    return join([outputs[grid.rank(p=p, t=0, d=d)] for d in range(grid.d) for p in range(grid.p)])


ONE_TO_ALL = Protocol("ONE_TO_ALL", _same_to_every_rank, _from_every_rank)
"""The same arguments to every rank; a list of all outputs."""
ONE_TO_ONE = Protocol("ONE_TO_ONE", _to_rank_zero, _from_rank_zero)
"""Rank 0 only, and its output."""
ALL_TO_ALL = Protocol("ALL_TO_ALL", _one_item_per_rank, _from_every_rank, prepared=True)
"""Item i of a list to rank i; a list of all outputs."""
DP_PROTO = Protocol("DP_PROTO", _split_over_all_ranks, _join_all_ranks)
"""Rows split over all ranks, outputs joined."""
THREE_D_PROTO = Protocol("THREE_D_PROTO", _split_over_d, _join_last_stages)
"""Rows split over the data parallel replicas; outputs of their last pipeline stages, joined."""
THREE_D_ALL_MICRO_DP = Protocol("THREE_D_ALL_MICRO_DP", _split_over_generation_replicas, _join_generation_replicas)
"""Rows split over the generation replicas; outputs of their first ranks, joined."""
THREE_D_PP_ONLY = Protocol("THREE_D_PP_ONLY", _same_to_every_rank, _from_every_stage)
"""The same arguments to every rank; a list with one output per pipeline stage."""
THREE_D_PP_AS_DP = Protocol("THREE_D_PP_AS_DP", _split_over_p_and_d, _join_stages_as_replicas)
"""Rows split over pipeline stages and replicas, as if both were data parallel; outputs joined."""


def on_replica(number: int) -> Protocol:
    """Everything to the ranks of generation replica `number`, and the output of its first rank.

    Errors: ProtocolError for a replica that the grid does not have.
    """

    def distribute(grid: RankGrid, rows: Any) -> list[Any]:
        generation = grid.generation()
        if type(number) is not int or not 0 <= number < generation.replicas:
            raise ProtocolError(
                f"replica={number!r}: this group has the generation replicas 0..{generation.replicas - 1}."
            )
        return [rows if generation.replica(rank) == number else SKIP for rank in range(grid.size)]

    def collect(grid: RankGrid, outputs: Sequence[Any]) -> Any:
        return next(output for output in outputs if output is not SKIP)

    return Protocol("ON_REPLICA", distribute, collect)


Settings = Mapping[str, Any]
"""Keyword arguments: of the worker's constructor, or of one call."""

Reads = Sequence[str] | Callable[[Settings, Settings], Sequence[str] | None] | None
"""Columns that an operation reads. "a|b": the first that exists; "a?": a if it exists. A callable gets the worker's and
the call's settings; None reads every column."""

OperationKind = Literal["generation", "inference", "training", "function"]

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__hybridflow_operation__"
JOINS = ("mean", "sum", "max", "min")


@dataclass(frozen=True)
class Operation:
    """The declaration of one worker method: `@register(protocol, reads=..., writes=...)`.

    `writes` names the columns of the returned Batch; without any the method returns a plain value. `blocking` calls
    wait for their result. `groups` keeps the rows of one `group_id` on one rank,
    `trajectories` those of one `trajectory_id` (where the batch has it) on one rank and in one mini-batch. `balance`
    names a column of tokens per row, whose cost (the worker's `token_cost`) is spread evenly over ranks. `chunks` names
    the setting that counts mini-batches; each is split over all ranks, so it holds the same rows for every data
    parallel size. `repeat(worker
    settings, call settings)` is the number of output rows per input row; `carries` returns the input's columns with the
    output. `metrics` says how the metrics of ranks are joined, by name: "mean" (the default), "sum", "max", "min", or
    "by tokens" for the mean weighted by the metric `tokens`.
    `compares` are columns that travel, too, with rows that the group's present weights have sampled, in the first such
    call since these weights came: the method compares with them where `context.compares`. "name?": of any origin.
    `resizes`: the number of output rows is known only after the call (the call waits, or with `later` returns a
    `LaterBatch`); a callable gets the worker's and the call's settings, and where it answers True the method returns
    the columns of the input itself. `replica` names the setting that, unless None, numbers the one generation replica
    to call (`on_replica`). `check` validates a call's settings on the driver. `kind` classifies the operation for the
    planner; by default an operation with `repeat` and `carries` generates, one with `chunks` or named update_...
    trains.

    Errors: ConfigError when `protocol` is not a Protocol or columns are given as one string.
    """

    protocol: Protocol
    _: KW_ONLY
    reads: Reads = ()
    writes: Sequence[str] | Callable[[Settings, Settings], Sequence[str]] = ()
    compares: Sequence[str] = ()
    blocking: bool = False
    groups: bool = False
    trajectories: bool = False
    balance: str | None = None
    chunks: str | None = None
    repeat: Callable[[Settings, Settings], int] | None = field(default=None, repr=False)
    carries: bool = False
    resizes: bool | Callable[[Settings, Settings], bool] = False
    later: bool = False
    replica: str | None = None
    check: Callable[[Settings, Settings], None] | None = field(default=None, repr=False)
    kind: OperationKind | None = None
    metrics: Mapping[str, str] = field(default_factory=dict, compare=False)
    name: str = ""

    def __post_init__(self) -> None:
        if not isinstance(given := self.protocol, Protocol):
            raise ConfigError(f"@register takes a Protocol first, got {given!r}. Write @register(DP_PROTO, reads=...).")
        for what, columns in (("reads", self.reads), ("writes", self.writes)):
            if isinstance(columns, str):
                raise ConfigError(f"@register({what}={columns!r}): give a tuple of columns, ({columns!r},).")

        for metric, how in self.metrics.items():
            if how not in JOINS and not how.startswith("by "):
                raise ConfigError(f"@register(metrics={{{metric!r}: {how!r}}}): give one of {JOINS}, or 'by <metric>'.")

    def __call__(self, method: F) -> F:
        """Declare `method` as an operation of its group."""
        setattr(method, _MARK, replace(self, name=method.__name__))
        return method

    def of_call(self, settings: Settings, call: Settings) -> Operation:
        """As it is for a call with these settings."""
        operation = self
        if callable(self.resizes):
            resizes, kind = self.resizes(settings, call), kind_of(self)
            rows = {"carries": False, "repeat": None} if resizes else {}
            operation = replace(self, resizes=resizes, kind=kind, **rows)
        if self.replica is not None and (number := call[self.replica]) is not None:
            operation = replace(operation, protocol=on_replica(number))
        return operation

    def columns_read(self, settings: Settings, call: Settings, available: Iterable[str]) -> tuple[str, ...]:
        """The columns to send. Errors: MissingColumnError; its `.column` is the first missing one."""
        have = list(available)
        declared = self.reads(settings, call) if callable(self.reads) else self.reads
        if declared is None:
            return tuple(have)
        out: dict[str, None] = {}
        for entry in declared:
            options = entry.removesuffix("?").split("|")
            found = next((name for name in options if name in have), None)
            if found is not None:
                out[found] = None
            elif not entry.endswith("?"):
                error = MissingColumnError(f"{self.name} reads {options[0]!r}; no call has written it.")
                error.column = options[0]  # type: ignore[attr-defined]
                raise error
        if self.balance and self.balance in have:
            out[self.balance] = None
        return tuple(out)

    def columns_written(self, settings: Settings, call: Settings) -> tuple[str, ...]:
        return tuple(self.writes(settings, call) if callable(self.writes) else self.writes)


register = Operation


def kind_of(operation: Operation) -> OperationKind:
    """The operation's kind, declared or derived."""
    if operation.kind is not None:
        return operation.kind
    if operation.repeat is not None and operation.carries:
        return "generation"
    return "training" if operation.chunks or operation.name.startswith("update_") else "inference"


def operations(worker_class: type) -> dict[str, Operation]:
    """The operations that a class declares or inherits, by method name."""
    out = {}
    for name in dir(worker_class):
        operation = getattr(getattr(worker_class, name, None), _MARK, None)
        if isinstance(operation, Operation):
            out[name] = operation
    return out

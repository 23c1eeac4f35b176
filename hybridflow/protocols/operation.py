"""Operation, which is `@register`: the declaration of a worker's method (architecture, idea 2). It decides dispatch,
column-pruned transfer, early errors for missing columns, and the dataflow graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal, TypeVar

from hybridflow.errors import ConfigError, MissingColumnError
from hybridflow.protocols.protocol import ONE_TO_ONE, Protocol, on_replica

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
    wait for their result. `groups` keeps the rows of one `group_id` on one rank, `trajectories` those of one
    `trajectory_id` (where the batch has it) on one rank and in one mini-batch. `balance` names a column of tokens per
    row, whose cost (`WorkerSpec.token_cost`) is spread evenly over ranks. `chunks` names the setting that counts
    mini-batches; each is split over all ranks, so it holds the same rows for every data parallel size. `repeat(worker
    settings, call settings)` is the number of output rows per input row; `carries` returns the input's columns with the
    output. `metrics` says how the metrics of ranks are joined, by name: "mean" (the default), "sum", "max", "min", or
    "by tokens" for the mean weighted by the metric `tokens`. `compares` are columns that travel, too, with rows that
    the group's present weights have sampled, in the first such call since these weights came: the method compares with
    them where `context.compares`. "name?": of any origin. `resizes`: the number of output rows is known only after the
    call (the call waits, or with `later` returns a `LaterBatch`); a callable gets the worker's and the call's settings,
    and where it answers True the method returns the columns of the input itself. `replica` names the setting that,
    unless None, numbers the one generation replica to call (`on_replica`). `whole(worker settings)`: rank 0 alone gets
    all rows. `binds(worker settings, call settings)` gives the settings that travel, found once per call: the method
    and all other callables get these. `check` validates them on the driver. `kind` classifies the operation for the
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
    whole: Callable[[Settings], bool] | None = field(default=None, repr=False)
    binds: Callable[[Settings, Settings], Settings] | None = field(default=None, repr=False)
    check: Callable[[Settings, Settings], object] | None = field(default=None, repr=False)
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
        if self.whole is not None and self.whole(settings):
            operation = replace(operation, protocol=ONE_TO_ONE)
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
    found = {name: getattr(getattr(worker_class, name, None), _MARK, None) for name in dir(worker_class)}
    return {name: operation for name, operation in found.items() if isinstance(operation, Operation)}

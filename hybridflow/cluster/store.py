"""How a process stores the batches that it wrote and reads the rows that it needs, through Ray's object store.

What a call wrote is one manifest: small columns are part of it, every larger one is an object of its own. So a reader
moves only the large columns that it reads, straight from the node of the process that wrote them; on one node it reads
the stored bytes without copying. The driver sees none of them: it holds a reference to the manifest.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import ray.exceptions
import torch
from torch import Tensor

from hybridflow.batch import Batch
from hybridflow.cluster.columns import ColumnRef, Index, Issued, Located, Node, Order, Part, locate, stretches
from hybridflow.columns import Column, decode, encode, join, row_slice, take
from hybridflow.errors import BatchError, WaitTimeoutError, WorkerError
from hybridflow.ragged import Ragged
from hybridflow.rows import Assignment

# Columns up to these sizes travel in the manifest: below them a further object costs more than its bytes.
# A manifest of the driver's own is sent along with every call.
_SMALL_BYTES = 262144
_SMALL_DRIVER_BYTES = 2048
_LOOK_SECONDS = 1.0


@dataclass(slots=True)
class Manifest:
    """What one call wrote on one rank: rows, and per column the encoded column, or a reference to it if it is large."""

    rows: int
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Known:
    """Stands where a reference would be for a value that no process computes: in a trace."""

    value: Any


@dataclass(slots=True)
class Failure:
    """Stands where a result would be. `upstream` says that the call never ran because an input had failed."""

    error: WorkerError
    upstream: bool = False
    at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class Status:
    """How a call went on one rank: kept by the driver when nobody holds the data any more.

    `seconds` are those of the method once its inputs were there, and of the stages that it recorded.
    """

    failure: Failure | None
    seconds: tuple[tuple[str, float], ...] = ()


def write(batch: Batch, on_driver: bool = False, put: Callable[[Any], Any] | None = None) -> Manifest:
    """Store the large columns of a batch, each with `put` (Ray's); the small ones are part of the manifest."""
    limit = _SMALL_DRIVER_BYTES if on_driver else _SMALL_BYTES
    columns: dict[str, Any] = {}
    for name in batch.columns:
        encoded = encode(batch.peek(name))
        size = sum(item.nbytes for item in encoded if isinstance(item, np.ndarray))
        if on_driver and size <= limit:  # what the caller does to its tensors later must not reach the batch
            encoded = tuple(item.copy() if isinstance(item, np.ndarray) else item for item in encoded)
        columns[name] = encoded if size <= limit else (put or ray.put)(encoded)
    return Manifest(batch.rows, columns)


@dataclass
class Reader:
    """Reads columns by reference, waiting at most `timeout` seconds for those who still have to write them."""

    timeout: float
    _orders: OrderedDict[int, list[Index]] = field(default_factory=OrderedDict)

    def read(self, columns: Mapping[str, ColumnRef], chunk_rows: Sequence[int] | None = None) -> Batch:
        """All columns as one batch whose tensors may be shared memory. Errors: WorkerError of whoever failed."""
        sources = {id(ref.node): self._source(ref.node) for ref in columns.values()}
        held = {id(part): part for source in sources.values() for part in source.parts}
        manifests = dict(zip(held, self._manifests(list(held.values())), strict=True))
        stored = self._fetch(columns, sources, manifests)
        out = {name: _gather(ref, sources[id(ref.node)], stored) for name, ref in columns.items()}
        return Batch.from_shared(out, chunk_rows=chunk_rows)

    def _source(self, node: Node) -> _Source:
        if (found := stretches(node)) is not None:
            return _Source([part for part, _, _ in found], [(i, a, b) for i, (_, a, b) in enumerate(found)])
        located = locate(node, self._assign)
        return _Source(located.parts, located.runs(), located)

    def rows(self, parts: Sequence[Part]) -> list[int]:
        """Row counts of parts whose calls have no fixed number of rows (waits for them)."""
        return [manifest.rows for manifest in self._manifests(parts)]

    def _manifests(self, parts: Sequence[Part]) -> list[Manifest]:
        pending = [part for part in parts if not isinstance(part.ref, Manifest)]
        got = iter(fetch([part.ref for part in pending], pending, self.timeout))
        values = [part.ref if isinstance(part.ref, Manifest) else next(got) for part in parts]
        for part, value in zip(parts, values, strict=True):
            if isinstance(value, Failure):
                raise value.error
            if part.rows is not None and value.rows != part.rows:
                raise WorkerError(
                    f"{part.origin.role}.{part.origin.method} on rank {part.origin.rank} returned {value.rows} rows "
                    f"where {part.rows} were due. Declare @register(..., resizes=True) if it changes the rows."
                )
        return values

    def _fetch(self, columns, sources, manifests) -> dict[tuple[int, str], Column]:
        """Each needed stored column of each needed part, in one request."""
        wanted: dict[tuple[int, str], Any] = {}
        for ref in columns.values():
            for part in sources[id(ref.node)].parts:
                manifest: Manifest = manifests[id(part)]
                if ref.stored not in manifest.columns:
                    raise WorkerError(
                        f"{part.origin.role}.{part.origin.method} on rank {part.origin.rank} declared the column "
                        f"{ref.stored!r} and returned {sorted(manifest.columns)}."
                    )
                wanted[id(part), ref.stored] = (manifest.columns[ref.stored], part)
        remote = {entry: part for entry, part in wanted.values() if isinstance(entry, ray.ObjectRef)}
        objects = dict(zip(remote, fetch(list(remote), list(remote.values()), self.timeout, follow=False), strict=True))
        return {
            key: decode(objects[entry] if isinstance(entry, ray.ObjectRef) else entry)
            for key, (entry, _) in wanted.items()
        }

    def _assign(self, order: Order) -> list[Index]:
        """Rows of every part of an order, computed once per order from the columns that it names."""
        if (known := self._orders.get(order.key)) is None:
            known = [torch.cat(part).numpy() for part in self.assignment(order)]
            self._orders[order.key] = known
            if len(self._orders) > 64:
                self._orders.popitem(last=False)
        return known

    def assignment(self, order: Order) -> Assignment:
        """[part][chunk] -> rows of an order, from the columns that it names."""
        refs = {name: ref for name, ref in (("weights", order.weights), ("groups", order.groups)) if ref is not None}
        data = self.read(refs) if refs else None
        weights, groups = (data.peek(n) if data is not None and n in refs else None for n in ("weights", "groups"))
        weights = weights.lengths if isinstance(weights, Ragged) else weights
        for name, column in (("balance", weights), ("group_id", groups)):
            if column is not None and not isinstance(column, Tensor):
                raise BatchError(f"rows are split by {name}, a column of numbers; it holds Python objects.")
        if order.cost is not None and isinstance(weights, Tensor):
            weights = order.cost(weights)
        return order.plan.assign(weights=weights, groups=groups)  # type: ignore[arg-type]


def fetch(refs: Sequence[Any], parts: Sequence[Part], timeout: float, follow: bool = True) -> list[Any]:
    """The values of `refs`; `parts`, one for each, say who writes them. Errors: WorkerError, WaitTimeoutError.

    A `Failure` is a value like others, but on the driver it raises: also that of a rank whose output nobody collects,
    and as soon as it is there, since the peers of a rank that failed may be inside a collective that it never joins.
    `follow=False` does not look at the calls again.
    """
    if known := [ref.value for ref in refs if isinstance(ref, Known)]:
        return known  # a trace: no other reference is there
    if not refs:
        return []
    if not ray.is_initialized():
        raise _gone(parts)
    calls = list({id(part.call): part.call for part in parts if part.call is not None and follow}.values())
    statuses = [status for call in calls for status in call.statuses]
    everything = [*refs, *(status.ref for status in statuses)]
    try:
        values = _get(everything, calls, timeout)
    except ray.exceptions.RayError as error:
        raise _lost(everything, [*parts, *statuses], error) from None
    except ValueError as error:
        if "owner is unknown" not in str(error):  # Ray's words for a reference of another session
            raise
        raise _gone(parts) from None
    if values is None:
        raise WaitTimeoutError(f"waited {timeout:g} s for {_writers(parts)} without a result.")
    if calls:
        _raise_met(values, calls)
    return values[: len(refs)]


def _get(refs: list[Any], calls: Sequence[Issued], timeout: float) -> list[Any] | None:
    """All values, or None after the deadline. A driver looks for failures while it waits."""
    end = time.monotonic() + timeout
    while True:
        left = end - time.monotonic()
        try:
            return ray.get(refs, timeout=max(0.0, min(left, _LOOK_SECONDS) if calls else left))
        except ray.exceptions.GetTimeoutError:
            if calls:
                statuses = [status.ref for call in calls for status in call.statuses]
                ready, _ = ray.wait(statuses, num_returns=len(statuses), timeout=0)
                _raise_met(ray.get(ready), calls)
            if end <= time.monotonic():
                return None


def _gone(parts: Sequence[Part]) -> WorkerError:
    return WorkerError(f"{_writers(parts)} ran in a session that is closed: its results are gone.")


def first_failure(values: Sequence[Any]) -> Failure | None:
    """What failed first, if anything did: the rank that failed itself says more than those that heard of it."""
    failures = [failure for failure in map(_failure_in, values) if failure is not None]
    return min(failures, key=lambda failure: (failure.upstream, failure.at), default=None)


def _raise_met(values: Sequence[Any], calls: Sequence[Issued]) -> None:
    if (failure := first_failure(values)) is not None:
        for call in calls:
            call.met = True
            call.reported.add(failure.error.id)
        raise failure.error.as_cause()


def _failure_in(value: Any) -> Failure | None:
    if isinstance(value, Status):
        return value.failure
    return value if isinstance(value, Failure) else None


def _writers(parts: Sequence[Part]) -> str:
    names = sorted({f"{p.origin.role}.{p.origin.method} on rank {p.origin.rank}" for p in parts})
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _lost(refs: Sequence[Any], parts: Sequence[Part], error: Exception) -> WorkerError:
    """Name the part that was lost: Ray's own text tells neither role nor rank."""
    for ref, part in zip(refs, parts, strict=True):
        try:
            ray.get(ref, timeout=0)
        except ray.exceptions.GetTimeoutError:
            continue
        except ray.exceptions.RayError as own:
            origin = part.origin
            if isinstance(own, ray.exceptions.RayTaskError):  # our own code there raises nothing
                why = f"could not take its arguments or give back its result: {str(own.cause).strip()}"
            else:
                reason = str(own).strip().splitlines()[0]
                why = f"was lost: its host process died or its data cannot be reached ({type(own).__name__}: {reason})"
            return WorkerError(
                f"{origin.role}.{origin.method} on rank {origin.rank} {why}",
                role=origin.role,
                rank=origin.rank,
                method=origin.method,
            )
    return WorkerError(f"a result was lost: {type(error).__name__}: {error}")


@dataclass(slots=True)
class _Source:
    """Where the rows of a node are: adjacent `runs` (part, start, stop), and each row by itself where needed."""

    parts: list[Part]
    runs: list[tuple[int, int, int]]
    rows: Located | None = None


def _gather(ref: ColumnRef, found: _Source, stored: Mapping[tuple[int, str], Column]) -> Column:
    """The wanted rows of one column: a view where they lie side by side, else a copy."""
    columns = [stored[id(part), ref.stored] for part in found.parts]
    if found.rows is None or len(found.runs) <= max(8, len(columns)):
        out = join(ref.stored, [row_slice(columns[i], a, b) for i, a, b in found.runs] or [row_slice(columns[0], 0, 0)])
    else:
        starts = np.cumsum([0, *(len(column) for column in columns)])
        out = take(join(ref.stored, columns), torch.from_numpy(starts[found.rows.part] + found.rows.row))
    if ref.unique and isinstance(out, Tensor) and found.rows is not None:
        out = out * torch.from_numpy(found.rows.repeats) + torch.from_numpy(found.rows.copy)
    return out

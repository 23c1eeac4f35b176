"""Store: writes a call's batch to Ray's object store, and reads rows of other calls from it.

The output of a call is one manifest: small columns are part of it, each larger column is a separate object. So a reader
moves only the large columns that it reads, directly from their writer's node; on the same node it reads the stored
bytes without a copy. The driver holds only a reference to the manifest.
"""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import Column, decode, decode_rows, encode, join, take
from hybridflow.batch.ragged import Ragged, SharedRows
from hybridflow.batch.row_split import Assignment
from hybridflow.cluster.future import Failure, Lost, fetch, lost_output
from hybridflow.cluster.row_refs import (
    ColumnRef,
    Gather,
    Index,
    Located,
    RankOutput,
    RankRows,
    SplitPart,
    SplitSpec,
    Stretches,
    locate,
    stretches,
)
from hybridflow.errors import BatchError, WorkerError

# Columns up to these sizes travel in the manifest: below them a further object costs more than its bytes.
# A manifest of the driver's own is sent along with every call.
_SMALL_BYTES = 262144
_SMALL_DRIVER_BYTES = 2048
_CACHED_SPLITS = 64


@dataclass(slots=True)
class Manifest:
    """The output of one call on one rank: row count, and each column, encoded or (if large) by reference."""

    rows: int
    columns: dict[str, Any]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        """Arrays as buffers, which Ray's pickler takes as they are: of each array it would ask Python code."""
        if protocol < 5:
            return Manifest, (self.rows, self.columns)
        columns = [
            (name, tuple([_buffer(one) if isinstance(one, np.ndarray) else one for one in column]))
            if isinstance(column, tuple)
            else (name, column)
            for name, column in self.columns.items()
        ]
        return _manifest, (self.rows, columns)


def _buffer(array: np.ndarray) -> tuple[str, tuple[int, ...], pickle.PickleBuffer]:
    return array.dtype.str, array.shape, pickle.PickleBuffer(array)  # type: ignore[arg-type]


def _manifest(rows: int, columns: Sequence[tuple[str, Any]]) -> Manifest:
    """The inverse of its `__reduce_ex__`."""
    made = {}
    for name, column in columns:
        made[name] = column
        if isinstance(column, tuple):
            made[name] = tuple([np.ndarray(a[1], a[0], a[2]) if isinstance(a, tuple) else a for a in column])
    return Manifest(rows, made)


def write(batch: Batch, on_driver: bool = False) -> Manifest:
    """Store the large columns of a batch, if there is a store, and put the others into the manifest."""
    limit = _SMALL_DRIVER_BYTES if on_driver else _SMALL_BYTES
    stores = ray.is_initialized()  # not in a trace
    columns: dict[str, Any] = {}
    for name in batch.columns:
        encoded = encode(batch.peek(name))
        if stores and sum([item.nbytes for item in encoded if isinstance(item, np.ndarray)]) > limit:
            columns[name] = ray.put(encoded)
        elif on_driver:  # a copy: the caller may change its tensors later
            columns[name] = tuple(item.copy() if isinstance(item, np.ndarray) else item for item in encoded)
        else:
            columns[name] = encoded
    return Manifest(batch.rows, columns)


@dataclass
class Reader:
    """Reads columns by reference, waiting at most `timeout` seconds (None: the calls' own) for their writers."""

    timeout: float | None = None
    _splits: OrderedDict[SplitSpec, list[Index]] = field(default_factory=OrderedDict)

    def read(self, rows: RankRows) -> Batch:
        """All columns as one batch, perhaps in shared memory. Errors: WorkerError of a failed writer."""
        columns = rows.columns
        nodes = {id(ref.node): ref.node for ref in columns.values()}
        sources = {key: stretches(node, rows.rows) or locate(node, self._assign) for key, node in nodes.items()}
        held = {id(output): output for source in sources.values() for output in source.outputs}
        manifests = dict(zip(held, self._manifests(list(held.values())), strict=True))
        stored = self._fetch(columns, sources, manifests)
        out = {name: _gathered(ref, sources[id(ref.node)], stored) for name, ref in columns.items()}
        return Batch.from_shared(out, chunk_rows=rows.chunk_rows)

    def row_number(self, settings: Mapping[str, Any], span: tuple[int, int] | None, row: int) -> int:
        """The row of the call's batch that is `row` of this rank's part; `span` is the part's range, if it is one."""
        for rows in settings.values():
            for ref in rows.columns.values() if isinstance(rows, RankRows) else ():
                if isinstance(ref.node, Gather) and isinstance(part := ref.node.rows, SplitPart):
                    return int(self._assign(part.split)[part.index][row])
        return row + (span[0] if span else 0)

    def rows(self, outputs: Sequence[RankOutput]) -> list[int]:
        """Row counts of outputs without a fixed number of rows (waits for their calls)."""
        return [manifest.rows for manifest in self._manifests(outputs)]

    def _manifests(self, outputs: Sequence[RankOutput]) -> list[Manifest]:
        for output in outputs:
            output.note_read()
        values = [output.ref for output in outputs]
        if pending := [output for output in outputs if isinstance(output.ref, ray.ObjectRef)]:
            got = iter(fetch([output.ref for output in pending], pending, self.timeout))
            values = [next(got) if isinstance(value, ray.ObjectRef) else value for value in values]
        for output, value in zip(outputs, values, strict=True):
            if isinstance(value, Failure):
                raise value.error
            if isinstance(value, Lost):
                raise lost_output(output.origin, value.error)
            if output.rows is not None and value.rows != output.rows:
                raise WorkerError(
                    f"{output.origin} returned {value.rows} rows where {output.rows} were due. Declare "
                    f"@register(..., resizes=True) if it changes the rows."
                )
        return values

    def _fetch(
        self,
        columns: Mapping[str, ColumnRef],
        sources: Mapping[int, Located | Stretches],
        manifests: Mapping[int, Manifest],
    ) -> dict[tuple[int, str], Any]:
        """Each needed stored column of each needed output, encoded; those that are objects in one request."""
        found: dict[tuple[int, str], Any] = {}
        remote: dict[ray.ObjectRef, RankOutput] = {}
        for ref in columns.values():
            for output in sources[id(ref.node)].outputs:
                entry = manifests[id(output)].columns.get(ref.stored)
                if entry is None:
                    has = sorted(manifests[id(output)].columns)
                    raise WorkerError(f"{output.origin} declared the column {ref.stored!r} and returned {has}.")
                if isinstance(entry, Lost):
                    raise lost_output(output.origin, entry.error)
                if isinstance(entry, ray.ObjectRef):
                    remote[entry] = output
                found[id(output), ref.stored] = entry
        if remote:
            objects = fetch(list(remote), list(remote.values()), self.timeout, follow=False)
            there = dict(zip(remote, objects, strict=True))
            found = {key: there.get(one, one) if isinstance(one, ray.ObjectRef) else one for key, one in found.items()}
        return found

    def _assign(self, split: SplitSpec) -> list[Index]:
        """Rows of every part of a split, computed once."""
        if (known := self._splits.get(split)) is None:
            known = self._splits[split] = [torch.cat(part).numpy() for part in self.assignment(split)]
            if len(self._splits) > _CACHED_SPLITS:
                self._splits.popitem(last=False)
        return known

    def assignment(self, split: SplitSpec) -> Assignment:
        """[part][chunk] -> rows of a split, from the columns that it names."""
        refs = {name: ref for name, ref in (("weights", split.weights), ("groups", split.groups)) if ref is not None}
        data = self.read(RankRows(split.rows, refs)) if refs else Batch({})
        weights, groups = (data.peek(name) if name in refs else None for name in ("weights", "groups"))
        weights = weights.lengths if isinstance(weights, Ragged) else weights
        for name, column in (("balance", weights), ("group_id", groups)):
            if column is not None and not isinstance(column, Tensor):
                raise BatchError(f"rows are split by {name}, a column of numbers; it holds Python objects.")
        if split.cost is not None and isinstance(weights, Tensor):
            weights = split.cost(weights)
        return split.plan.assign(weights=weights, groups=groups)  # type: ignore[arg-type]


def _gathered(ref: ColumnRef, found: Located | Stretches, stored: Mapping[tuple[int, str], Any]) -> Column:
    """The wanted rows of one column: a view where they lie side by side, else a copy. Ragged rows of vectors that are
    wanted several times (images of a group) are in memory once."""
    columns = [stored[id(output), ref.stored] for output in found.outputs]
    if isinstance(found, Located) and columns[0][0] == "ragged" and columns[0][2].ndim > 1:
        places = found.which * (1 + found.row.max(initial=0)) + found.row
        once, index = np.unique(places, return_index=True, return_inverse=True)[1:]
        if len(once) < len(index):
            fields = (found.which, found.row, found.repeats, found.copy)
            distinct = _gathered(ref, Located(found.outputs, *(field[once] for field in fields)), stored)
            return SharedRows(distinct, torch.from_numpy(index))  # type: ignore[arg-type]
    if isinstance(found, Stretches) or len(found.runs) <= max(8, len(columns)):
        out = decode_rows(ref.stored, columns, found.runs)
    else:
        decoded = [decode(column) for column in columns]
        starts = np.cumsum([0, *map(len, decoded)])
        out = take(join(ref.stored, decoded), torch.from_numpy(starts[found.which] + found.row))
    if ref.unique and isinstance(out, Tensor) and isinstance(found, Located) and (found.repeats > 1).any():
        out = out * torch.from_numpy(found.repeats) + torch.from_numpy(found.copy)
    return out

"""CallRequest: how a call travels to its hosts.

What all ranks share is pickled once (the `head`), and so are inputs that several ranks get. References to results lie
beside the bytes as arguments of their own: Ray sends the call once they are there, with their values (a `Failure`, or
`Lost`, in place of one that is not), so that a host asks nobody for its inputs. Rows by reference travel as one flat
table: a node is a tuple that names its sources by number, so Python's pickler meets no class of ours.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import ray.exceptions
from ray import ObjectRef, cloudpickle
from ray._private.worker import global_worker

from hybridflow.cluster.backend import RankCall
from hybridflow.cluster.future import Lost, plainly_pickled
from hybridflow.cluster.row_refs import (
    CallOrigin,
    ColumnRef,
    Concat,
    Gather,
    IssuedCall,
    RankOutput,
    RankRows,
    SplitPart,
    SplitSpec,
    Unpermute,
)
from hybridflow.cluster.store import Manifest
from hybridflow.errors import ConfigError

_OUTPUT, _MANIFEST, _GATHER, _CONCAT, _SPLIT = range(5)
_PART, _UNPERMUTE = "part", "unpermute"
_LENGTH = struct.Struct("=Q")


class CallRequest(NamedTuple):
    """What a host is sent for one call: it gets the values of `refs`, and as references those that settings hold."""

    head: bytes
    own: bytes
    refs: Sequence[Any]
    kept: Sequence[Any] = ()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Of the host's method, which gives them to `call_of`; each further one takes Ray 5 us."""
        said = _LENGTH.pack(len(self.own)) + self.own + self.head
        return (said, *self.refs, *([[*self.kept]] if self.kept else ()))


def requests_of(
    calls: Sequence[RankCall | None], where: str, step: int | None, inputs: dict[int, IssuedCall]
) -> list[CallRequest | None]:
    """The request of each rank, for a call of `where` in iteration `step`; calls that are one object give one request.
    Adds the calls whose results they read to `inputs`.

    Errors: ConfigError for a setting that cannot be sent."""
    distinct = list({id(call): call for call in calls if call is not None}.values())
    if not distinct:
        return [None] * len(calls)
    shared_nodes, names = _survey(distinct)
    first, shared, kept = distinct[0], _Table(names, inputs), list[ObjectRef]()
    alike = {
        name: value
        for name, value in first.settings.items()
        if not isinstance(value, RankRows) and all(call.settings[name] is value for call in distinct)
    }
    for node in shared_nodes:
        shared.add(node)
    common = (first.seq, first.group, first.method, first.writes, first.agree, step, first.phase, first.compares)
    head = _dumps((common, alike, shared.entries), kept, where, alike)
    found = {id(call): _request(call, head, kept, shared, alike, where) for call in distinct}
    return [None if call is None else found[id(call)] for call in calls]


def _request(
    call: RankCall, head: bytes, kept: list[ObjectRef], shared: _Table, alike: Mapping[str, Any], where: str
) -> CallRequest:
    table, rows, others = _Table(shared.names, shared.inputs, shared), dict[str, Any](), dict[str, Any]()
    for name, value in call.settings.items():
        if isinstance(value, RankRows):
            columns = {name: (ref.stored, table.add(ref.node), ref.unique) for name, ref in value.columns.items()}
            rows[name] = (value.rows, columns, value.chunk_rows)
        elif name not in alike:
            others[name] = value
    own, mine = (call.rows, call.span, tuple(call.settings), rows, others, table.entries), kept.copy()
    plain = not others and all(entry[0] != _SPLIT for entry in table.entries)  # with arrays, perhaps
    return CallRequest(head, pickle.dumps(own, 5) if plain else _dumps(own, mine, where, others), table.refs, mine)


def call_of(said: bytes, *given: Any) -> RankCall:
    """The call, on its host, from the `arguments` of its request."""
    kept = given[-1] if given and type(given[-1]) is list else ()
    view, end = memoryview(said), _LENGTH.size + _LENGTH.unpack_from(said)[0]
    due, span, names, rows, others, more = _loads(view[_LENGTH.size : end], kept)
    common, alike, entries = _loads(view[end:], kept)
    seq, group, method, writes, agree, step, phase, compares = common
    nodes = list[Any]()
    for entry in (*entries, *more):
        nodes.append(_node(entry, nodes, given))
    settings = alike | others
    for name, (count, columns, chunk_rows) in rows.items():
        known = {name: ColumnRef(stored, nodes[at], unique) for name, (stored, at, unique) in columns.items()}
        settings[name] = RankRows(count, known, chunk_rows)
    if len(names) > 1:
        settings = {name: settings[name] for name in names}
    return RankCall(seq, group, method, settings, writes, agree, due, span, step, phase, compares)


class _Table:
    """Nodes as flat entries, each after those that it names, and the references in them; continues `before`. Of what
    the driver stored the columns `names`. `inputs` gets the calls that write them."""

    def __init__(self, names: Container[str], inputs: dict[int, IssuedCall], before: _Table | None = None) -> None:
        self.names, self.inputs, self.entries, self.known = names, inputs, list[tuple](), dict[int, int]()
        self.refs: list[Any] = [] if before is None else before.refs.copy()
        self.before, self.start = ({}, 0) if before is None else (before.known, len(before.entries))

    def add(self, node: Any) -> int:
        """The number of a node."""
        if (at := self.known.get(id(node), self.before.get(id(node)))) is None:
            entry = self._entry(node)
            at = self.known[id(node)] = self.start + len(self.entries)
            self.entries.append(entry)
        return at

    def reference(self, ref: Any) -> int:
        self.refs.append(ref)
        return len(self.refs) - 1

    def _entry(self, node: Any) -> tuple:
        if isinstance(node, RankOutput):
            ref, origin = node.ref, node.origin
            if node.call is not None:
                self.inputs[id(node.call)] = node.call
            held = isinstance(ref, Manifest)
            at = self.add(ref) if held else self.reference(ref)
            return _OUTPUT, held, at, node.rows, origin.role, origin.rank, origin.method, origin.node, origin.step
        if isinstance(node, Gather):
            rows: Any = node.rows
            if isinstance(rows, SplitPart):
                rows = (_PART, self.add(rows.split), rows.index, rows.chunk_rows)
            elif isinstance(rows, Unpermute):
                rows = (_UNPERMUTE, self.add(rows.split), rows.each)
            return _GATHER, self.add(node.source), rows, node.repeat
        if isinstance(node, Concat):
            return _CONCAT, tuple([self.add(child) for child in node.nodes]), node.rows
        if isinstance(node, Manifest):
            found = ((name, one) for name, one in node.columns.items() if name in self.names)
            columns = {name: self.reference(one) if isinstance(one, ObjectRef) else one for name, one in found}
            return _MANIFEST, node.rows, columns
        assert isinstance(node, SplitSpec)
        by = [one and (one.stored, self.add(one.node), one.unique) for one in (node.weights, node.groups)]
        return _SPLIT, *by, node.chunks, node.cost, node.rows, node.parts, node.key


def _node(entry: tuple, nodes: Sequence[Any], refs: Sequence[Any]) -> Any:
    """The inverse of an entry."""
    kind, *more = entry
    if kind == _OUTPUT:
        held, at, rows, *origin = more
        return RankOutput(nodes[at] if held else refs[at], rows, CallOrigin(*origin))
    if kind == _GATHER:
        source, rows, repeat = more
        if isinstance(rows, tuple):
            how, split, *part = rows
            rows = SplitPart(nodes[split], *part) if how == _PART else Unpermute(nodes[split], *part)
        return Gather(nodes[source], rows, repeat)
    if kind == _CONCAT:
        children, rows = more
        return Concat(tuple([nodes[at] for at in children]), rows)
    if kind == _MANIFEST:
        rows, columns = more
        return Manifest(rows, {name: refs[one] if isinstance(one, int) else one for name, one in columns.items()})
    by = [one and ColumnRef(one[0], nodes[one[1]], one[2]) for one in more[:2]]
    chunks, cost, rows, parts, key = more[2:7]
    return SplitSpec(by[0], by[1], chunks, cost, rows, parts, key)


def _survey(calls: Sequence[RankCall]) -> tuple[list[Any], set[str]]:
    """The nodes that the rows of several calls refer to, without those below them; and the names of stored columns."""
    seen, shared, names = dict[int, int](), dict[int, Any](), set[str]()

    def visit(node: Any, number: int) -> None:
        if (first := seen.get(id(node))) is None:
            seen[id(node)] = number
            if isinstance(node, SplitSpec):
                names.update(one.stored for one in (node.weights, node.groups) if one)
            for child in _below(node):
                visit(child, number)
        elif first != number:
            shared[id(node)] = node

    for number, call in enumerate(calls):
        for value in call.settings.values():
            if isinstance(value, RankRows):
                names.update(ref.stored for ref in value.columns.values())
                for ref in value.columns.values():
                    visit(ref.node, number)
    return list(shared.values()), names


def _below(node: Any) -> tuple[Any, ...]:
    if isinstance(node, RankOutput):
        return (node.ref,) if isinstance(node.ref, Manifest) else ()
    if isinstance(node, Gather):
        return (node.source, *((node.rows.split,) if isinstance(node.rows, SplitPart | Unpermute) else ()))
    if isinstance(node, Concat):
        return node.nodes
    return tuple(one.node for one in (node.weights, node.groups) if one) if isinstance(node, SplitSpec) else ()


class _Pickler(cloudpickle.CloudPickler):
    """Puts references aside."""

    def __init__(self, file: Any, refs: list[Any]) -> None:
        super().__init__(file, protocol=5)
        self.refs = refs

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, ObjectRef):
            self.refs.append(obj)
            return len(self.refs) - 1
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, refs: Sequence[Any]) -> None:
        super().__init__(file)
        self.refs = refs

    def persistent_load(self, pid: Any) -> Any:
        return self.refs[pid]


def _dumps(value: Any, kept: list[Any], where: str, settings: Mapping[str, Any]) -> bytes:
    if (plain := plainly_pickled(value)) is not None:
        return plain
    with arguments_sent(where, settings):
        _Pickler(out := io.BytesIO(), kept).dump(value)
    return out.getvalue()


def _loads(value: memoryview, kept: Sequence[Any]) -> Any:
    return _Unpickler(io.BytesIO(value), kept).load() if kept else pickle.loads(value)


@contextmanager
def arguments_sent(where: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Name the setting that cannot be pickled; pickle's message does not, Ray's shows all. Errors: ConfigError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, pickle.PicklingError):
        for name, value in settings.items():
            try:
                cloudpickle.dumps(value)
            except (TypeError, ValueError, AttributeError, pickle.PicklingError) as reason:
                raise ConfigError(f"{where}: {name}={value!r} cannot be sent to a host: {reason}.") from None
        raise


def take_lost_arguments() -> None:
    """From here on a lost argument of this process's methods is a `Lost`: Ray would skip the call, whose other ranks
    then wait for this one."""
    worker: Any = global_worker
    read = worker.deserialize_objects

    def deserialize(objects: Any, refs: Any, rdt_objects: Any = None) -> list[Any]:
        values = read(objects, refs, rdt_objects)
        if rdt_objects is not None:  # of ray.get
            return values
        return [Lost(value) if isinstance(value, ray.exceptions.RayError) else value for value in values]

    worker.deserialize_objects = deserialize

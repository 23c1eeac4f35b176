"""Member: a group's rank in a host process, and what happened to it. The ranks of a group agree through a tree of
connections, before they run a call.

    rank 0 <--what failed, or nothing-- ranks 1..16 <-- ranks 17..272 ...
           --the same answer to all-->

Gloo's all-reduce of n ranks takes 2 (n - 1) steps, each of which wakes two threads of every rank; here each rank sends
one message and waits for one, and for one of each of its children.
"""

from __future__ import annotations

import hmac
import json
import pickle
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from hybridflow.cluster.future import Failure
from hybridflow.cluster.liveness import listening_socket
from hybridflow.engines import process_groups
from hybridflow.engines.process_groups import Meeting, RankContext, end_waits, fail_with_machine
from hybridflow.errors import WaitTimeoutError

F = TypeVar("F")
_CHILDREN = 16
_LENGTH, _KEY_BYTES = struct.Struct("!I"), 16
_GREETING_SECONDS = 30.0


class ControlTree:
    """Rank `rank` of `size`, all of which make one of this `name` in `store`, reachable at `address`; waits for each
    of its neighbours for `seconds` at most.

    Once a neighbour did not come, or is gone, the tree is closed, since a late answer would be taken for that of
    another call: the other ranks notice at once, and every further agreement fails.
    """

    def __init__(self, store: dist.Store, name: str, size: int, rank: int, address: str, seconds: float) -> None:
        self._name, self._rank, self._address, self._seconds = name, rank, address, seconds
        self._children = len(range(rank * _CHILDREN + 1, min(size, (rank + 1) * _CHILDREN + 1)))
        self._neighbours, self._meeting = list[socket.socket](), Meeting(store)  # the parent first
        self._closed = False
        self._listener: socket.socket | None = None

    def agree(self, failure: F | None) -> F | None:
        """The failure of one of the ranks, the same on all of them; None where no rank has one. Errors:
        WaitTimeoutError when a rank did not come or is gone."""
        if self._closed:
            raise WaitTimeoutError("a peer did not take part in an earlier call, since when the ranks cannot agree.")
        said = b"" if failure is None else pickle.dumps(failure)
        try:
            if not self._neighbours:
                self._connect()
            parents = self._neighbours[: self._rank > 0]
            children = self._neighbours[len(parents) :]
            for child in children:
                said = _message(child) or said
            for parent in parents:
                parent.sendall(_LENGTH.pack(len(said)) + said)
                said = _message(parent)
            for child in children:
                child.sendall(_LENGTH.pack(len(said)) + said)
        except (OSError, RuntimeError, ValueError, WaitTimeoutError) as error:  # of sockets, or the store and its text
            self.close()
            raise WaitTimeoutError(f"a peer did not take part: {error}") from error
        return pickle.loads(said) if said else None

    def _connect(self) -> None:
        key, wanted = secrets.token_hex(_KEY_BYTES // 2), self._children + (self._rank > 0)
        with listening_socket(self._address) as listener:
            self._listener = listener
            listener.settimeout(0.0 if self._closed else self._seconds)
            if self._children:
                said = json.dumps([*listener.getsockname()[:2], key])
                self._meeting.store.set(f"{self._name}/{self._rank}", said)
            if self._rank:
                parent = f"{self._name}/{(self._rank - 1) // _CHILDREN}"
                with self._meeting.ending():
                    self._meeting.store.wait([parent], timedelta(seconds=self._seconds))
                    host, port, known = json.loads(self._meeting.store.get(parent))
                seconds = min(self._seconds, _GREETING_SECONDS)  # a busy rank's machine answers for it
                self._add(socket.create_connection((host, port), seconds)).sendall(known.encode())
            while len(self._neighbours) < wanted:
                other = self._add(listener.accept()[0])
                other.settimeout(_GREETING_SECONDS)
                try:
                    known = hmac.compare_digest(_receive(other, _KEY_BYTES), key.encode())
                except OSError:  # a stranger, such as a probe of ports
                    known = False
                other.settimeout(self._seconds)
                if not known:
                    self._neighbours.pop().close()
        self._meeting.close()

    def _add(self, connection: socket.socket) -> socket.socket:
        connection.settimeout(self._seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        fail_with_machine(connection)
        self._neighbours.append(connection)
        if self._closed:
            end_waits(connection)
        return connection

    def abort(self) -> None:
        """A rank is gone: this one's agreement fails, now and later. Called by another thread."""
        self._closed = True
        self._meeting.abort()
        for one in [*filter(None, [self._listener]), *self._neighbours]:
            end_waits(one)

    def close(self) -> None:
        self._closed = True
        for one in self._neighbours:
            one.close()


def _message(source: socket.socket) -> bytes:
    return _receive(source, _LENGTH.unpack(_receive(source, _LENGTH.size))[0])


def _receive(source: socket.socket, size: int) -> bytes:
    said = b""
    while len(said) < size:
        if not (part := source.recv(size - len(said))):
            raise ConnectionResetError("its connection ended")
        said += part
    return said


@dataclass
class Member:
    """A group's rank in this process; `incomplete` is the failure of a transfer that left its weights half written,
    `failed_update` what is known of the first update that raised, `calls` how often each method was run, and `buffers`
    the bytes on a CUDA device that building it left there beside its state."""

    role: str
    rank: int
    context: RankContext
    settings: Mapping[str, Any] = field(default_factory=dict)
    worker: Any = None
    failure: Failure | None = None
    incomplete: Failure | None = None
    failed_update: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    buffers: int = 0
    _controls: dict[tuple[int, ...], ControlTree] = field(default_factory=dict)

    def control(self, ranks: tuple[int, ...], seconds: float) -> ControlTree:
        """By which these ranks of the group, this one among them, agree."""
        if (found := self._controls.get(ranks)) is None:
            groups, address = self.context.groups, process_groups.gloo_address
            name, rank = groups.full_name("control", ranks), ranks.index(self.rank)
            found = self._controls[ranks] = ControlTree(groups.store, name, len(ranks), rank, address, seconds)
            groups.when_closed(found.close)
            if groups.meeting.lost:
                found.abort()
        return found

    def abort(self) -> None:
        """A rank of the group is gone: whatever waits for the others fails."""
        for control in list(self._controls.values()):
            control.abort()
        self.context.groups.abort()

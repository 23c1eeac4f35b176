"""HeldCalls: updates that the driver has issued and not sent yet, because the next may share its pipeline stages, or
send the weights that it makes.

    actor.update_actor(...)      held: a critic with the same stages exists
    critic.update_critic(...)    held, too
    hf.together(...)             both are sent as one call of each host
    hf.sync_weights(actor, ...)  they are sent one after the other, and the actor's knows of the transfer
    anything else                they are sent one after the other, before it

Only an update whose stages another group trains on, or of an actor with `overlap=True`, is held, for `HELD_SECONDS` at
most, and only until the driver does anything else with the session: issues another call, moves weights, or reads a
result of the update.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.call_request import CallRequest
from hybridflow.cluster.future import results_gone
from hybridflow.cluster.interactive import uninterrupted
from hybridflow.cluster.row_refs import CallOrigin, IssuedCall, RankOutput
from hybridflow.protocols.operation import Operation, kind_of

logger = logging.getLogger(__name__)
TRANSFER = ""
"""No group's key."""
HELD_SECONDS = 0.5  # the arguments of the next update are bound in milliseconds, on a busy machine in more


def partners(group: Any, operation: Operation) -> frozenset[str]:
    """The keys of other groups whose updates this call of a `WorkerGroup` could share pipeline stages with, and
    `TRANSFER` where the weights that it makes could be sent meanwhile."""
    if kind_of(operation) != "training" or operation.writes or operation.blocking:
        return frozenset()
    others = [other.ranks for other in group.session.groups.values() if other is not group]
    found = frozenset([TRANSFER] if others and group.ranks.spec.sends_parts else [])
    if not _pipelined(group.ranks):
        return found
    return found | {other.key for other in others if alike(group.ranks, other)}


def alike(one: RankGroup, other: RankGroup) -> bool:
    """Whether two groups train on the same pipeline stages, each with the same ranks."""
    same = (one.pool_name, one.members) == (other.pool_name, other.members)
    sizes = [(ranks.grid.p, ranks.grid.t, ranks.grid.d) for ranks in (one, other)]
    return same and sizes[0] == sizes[1] and _pipelined(one) and _pipelined(other)


def _pipelined(ranks: RankGroup) -> bool:
    return ranks.grid.p > 1 and ranks.spec.shares_stages


def why_apart(one: RankGroup, other: RankGroup) -> str:
    """Why two updates run one after the other; "" where there is no pipeline that could be shared."""
    if not (_pipelined(one) or _pipelined(other)):
        return ""
    if one.key == other.key:
        return f"they are updates of one model, {one.name}"
    if (one.pool_name, one.members) != (other.pool_name, other.members):
        return f"{one.name} and {other.name} are on different devices"
    for ranks in (one, other):
        if not _pipelined(ranks):
            return f"{ranks.name} at {ranks} has no pipeline: give train=hf.Megatron(pp=2) or more stages"
    if not alike(one, other):
        return f"{one.name} is at {one} and {other.name} at {other}: give both the same sizes"
    return f"another call, its result that was read, or more than {HELD_SECONDS} s came between them"


class HeldOutput(RankOutput):
    """A result of a held call: reading `ref` sends the call. Errors: WorkerError when it could not be sent."""

    __slots__ = ("_held", "_refs")

    _held: HeldCalls
    _refs: Mapping[int, Any]

    def __init__(
        self, held: HeldCalls, refs: Mapping[int, Any], origin: CallOrigin, call: IssuedCall, address: Any
    ) -> None:
        own = {"rows": None, "origin": origin, "call": call, "address": address, "_held": held, "_refs": refs}
        for name, value in own.items():
            object.__setattr__(self, name, value)  # the base is frozen, and `ref` is no field here

    @property
    def ref(self) -> Any:  # type: ignore[override]
        if self.origin.rank not in self._refs:
            self._held.send()
        if self.origin.rank not in self._refs:
            raise results_gone([self])
        return self._refs[self.origin.rank]

    @property
    def sent_ref(self) -> Any:
        return self._refs.get(self.origin.rank)


@dataclass
class HeldCall:
    """Call `seq` of `method` on all `ranks`: their requests, and by rank the references to results once it is sent."""

    ranks: RankGroup
    seq: int
    method: str
    requests: Sequence[CallRequest | None]
    issued: IssuedCall
    results: dict[int, Any] = field(default_factory=dict)

    def send(self) -> None:
        for rank, (host, request) in enumerate(zip(self.ranks.hosts, self.requests, strict=True)):
            if request is not None:
                self.results[rank] = host.handle.call.remote(*request.arguments)


class HeldCalls:
    """Calls of different groups that are `partners`. `automatic`: several are sent together without `hf.together`.
    `said`: why calls could not be sent together, as far as the user was told."""

    def __init__(self) -> None:
        self.automatic, self.said = False, set[str]()
        self._calls: list[HeldCall] = []
        self._together: list[IssuedCall] = []  # the latest that were sent together
        self._timer = threading.Timer(0.0, self._send_late)
        self._partners: frozenset[str] = frozenset()
        self._lock = threading.RLock()

    def accepts(self, ranks: RankGroup) -> bool:
        """Whether a call of these ranks could be sent with those that are held."""
        with self._lock:
            held = {call.ranks.key for call in self._calls}
            return bool(held) and ranks.key in self._partners - held

    def alone(self, key: str) -> int | None:
        """The number of the held call of these ranks; None without one."""
        with self._lock:
            return next((call.seq for call in self._calls if call.ranks.key == key), None)

    def hold(
        self, call: HeldCall, partners: frozenset[str], origin: Callable[..., CallOrigin]
    ) -> list[RankOutput | None]:
        """Keep a call until `send`, and return its results; it must be accepted, or no other may be held. With
        `automatic` the last one of all partners sends them."""
        out: list[RankOutput | None] = []
        for rank, (host, request) in enumerate(zip(call.ranks.hosts, call.requests, strict=True)):
            if request is None:
                out.append(None)
                continue
            at = origin(call.ranks.name, rank, call.method, host)
            found = HeldOutput(self, call.results, at, call.issued, host.address)
            out.append(found)
            call.issued.statuses.append(found)
        with self._lock:
            self._calls.append(call)
            self._partners = partners
            if self.automatic and len(self._calls) > len(partners - {TRANSFER}) > 0:
                self.send()
            else:
                self._timer.cancel()
                self._timer = threading.Timer(HELD_SECONDS, self._send_late)
                self._timer.daemon = True
                self._timer.start()
        return out

    def send(self, together: bool = False) -> None:
        """Send the calls that are held, in their order, or several `together`. Each is sent, or its results are gone;
        then the first error is raised."""
        with self._lock:
            if not self._calls:
                return
        with uninterrupted(), self._lock:
            self._timer.cancel()
            calls, self._calls = self._calls, []
            if len(calls) > 1 and (together or self.automatic):
                self._together = [call.issued for call in calls]
                for rank, host in enumerate(calls[0].ranks.hosts):
                    asked = [call for call in calls if call.requests[rank] is not None]
                    requests = [call.requests[rank].arguments for call in asked]  # type: ignore[union-attr]
                    both = host.handle.call_together.options(num_returns=len(asked))
                    refs = both.remote([*map(len, requests)], *itertools.chain.from_iterable(requests))
                    for call, ref in zip(asked, refs if len(asked) > 1 else [refs], strict=True):
                        call.results[rank] = ref
                return
            errors: list[Exception] = []
            for call in calls:
                try:
                    call.send()
                except Exception as error:
                    errors.append(error)
            if errors:
                raise errors[0]

    def _send_late(self) -> None:
        with self._lock:
            if threading.current_thread() is not self._timer:  # a later call is held by now
                return
            try:
                self.send()
            except Exception:
                logger.warning("an update could not be sent", exc_info=True)

    def together(self, issued: Sequence[IssuedCall | None]) -> bool:
        """Send exactly these calls together; False when they are not the ones that are held."""
        wanted = set(map(id, issued))
        with self._lock:
            if len(self._calls) > 1 and wanted == {id(call.issued) for call in self._calls}:
                self.send(together=True)
            return wanted == set(map(id, self._together))

"""Streams: batches of responses for a loop that trains while rollouts generate (AReaL, 2025; verl's fully async).

    loader -> prompts -> Admission -> chains of short `advance_rows` calls -> finished groups -> batches
                           ^ weights arrive (sync_weights), batches are trained

Each replica has its next call queued while one runs, so that it never waits for the driver, and a weight sync or
another call takes its place between two of them: between two decoding steps of rows that are under way.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from hybridflow.admission import Admission, Replica, StreamBatch, StreamOptions
from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef, LaterBatch, wait_for_one
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.session import Session
from hybridflow.config import Until
from hybridflow.data.prompts import PromptSource
from hybridflow.errors import BatchError, ConfigError
from hybridflow.protocols import kind_of
from hybridflow.settings import require

Function = Callable[[BatchRef], BatchRef]
_PER_ROW = ("row_id", "response_index", "oldest_version", "newest_version", "recomputed_tokens")
_SESSION = (*_PER_ROW, "spans")
"""Columns of `advance_rows` that batches do not have."""
_LOOK_SECONDS = 1.0
_streams: WeakValueDictionary[int, ResponseStream] = WeakValueDictionary()  # by the identity of their groups


def stream(
    loader: PromptSource,
    rollout: WorkerGroup | Sequence[WorkerGroup] | Function,
    *,
    rows: int,
    n: int = 1,
    max_staleness: int = 1,
    on_stale: str = "wait",
    call_seconds: float = 0.1,
    **sampling: Any,
) -> ResponseStream:
    """Iterates over batches of `rows` rows: `rows / n` whole groups of `n` responses, with the columns of
    `generate_sequences`.

    Generation continues while the loop trains. No token of a batch is more than `max_staleness` weight updates old (the
    versions are in `policy_version`): that bounds the groups under way, see `Admission`, and nothing is thrown away
    unless `on_stale="drop"`. Groups come in the order in which they finish, inside a batch in the loader's order. With
    `max_staleness=0` the loop is the synchronous one: each batch is a call of `generate_sequences`.

    `rollout` is one or several groups that generate: rollouts, to which the loop gives the new weights by
    `hf.sync_weights(actor, rollout)`, or an actor with generation, whose unfinished responses continue after its
    update. Or a function `prompts -> batch` that issues calls of your own, with `n` rows per prompt; its calls are not
    interrupted. Calls of rollouts decode for `call_seconds`; `sampling` overrides their `Sampling`.

    Prompts are drawn from `loader` one by one; its batches need not have the size of a batch of the stream.
    `hf.Checkpoints.resume(stream)` continues with the prompts that were under way. One iteration of the session is one
    batch.

    Errors: ConfigError for these settings, a group that cannot generate or has another stream, and a loop that does not
    give new weights to the rollouts when the bound asks for it.
    """
    if not isinstance(loader, PromptSource):
        raise ConfigError(f"stream takes a PromptLoader, got {type(loader).__name__}.")
    options = StreamOptions(rows=rows, n=n, max_staleness=max_staleness, on_stale=on_stale)  # type: ignore[arg-type]
    until = Until(seconds=call_seconds)
    groups = [rollout] if isinstance(rollout, WorkerGroup) else [] if callable(rollout) else list(rollout)
    require(callable(rollout) or bool(groups), f"stream(rollout={rollout!r}): give a group that generates.")
    for group in groups:
        _check_generates(group)
    require(not (sampling and callable(rollout)), "sampling settings belong into the function that generates.")
    require(len(groups) <= 1 or max_staleness > 0, "max_staleness=0 takes one group: give it all of the devices.")
    function: Any = partial(groups[0].generate_sequences, n=n, **sampling) if groups else rollout
    return ResponseStream(loader, groups, options, function, until if groups and max_staleness else None, sampling)


def _check_generates(group: object) -> None:
    if not isinstance(group, WorkerGroup):
        raise ConfigError(f"stream(rollout=...) takes groups such as hf.RolloutWorker.on(...) returns, got {group!r}.")
    group.check_open()
    if "advance_rows" not in group.operations or group.settings.get("generate") is None:
        raise ConfigError(f"stream(rollout={group.name}): this group cannot generate. Give it generate=hf.VLLM(...).")
    if group.has_replica_for("generate_sequences"):
        raise ConfigError(f"stream(rollout={group.name}): its placement generates elsewhere. Place a RolloutWorker.")


@dataclass
class _Drawn:
    """A batch of the loader whose first prompt is group `first`; `before` is the loader's state before it."""

    first: int
    before: Mapping[str, Any]
    prompts: Batch


@dataclass
class _ReplicaCalls:
    """The calls of one replica (None: of all replicas of a group): two are queued, one while the group also trains."""

    group: WorkerGroup
    replica: int | None
    depth: int
    calls: deque[LaterBatch] = field(default_factory=deque)
    new: list[int] = field(default_factory=list)  # groups to submit
    rows: list[Mapping[str, Any]] = field(default_factory=list)  # rows to continue
    unfinished: int = 0


class ResponseStream:
    """The batches of `stream`."""

    def __init__(
        self,
        loader: PromptSource,
        groups: Sequence[WorkerGroup],
        options: StreamOptions,
        function: Function,
        until: Until | None,
        sampling: Mapping[str, Any],
    ) -> None:
        self.loader, self.options = loader, options
        self._groups, self._until, self._sampling, self._function = groups, until, dict(sampling), function
        for group in groups:
            if (other := _streams.get(id(group))) is not None and other is not self:
                raise ConfigError(f"{group.name} has a stream already: end its loop and delete it first.")
        _streams.update((id(group), self) for group in groups)
        self._wait, self._recomputed = 0.0, 0  # seconds, tokens
        self._restored: Mapping[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        chains = [chain for group in self._sessions for chain in _chains(group)]
        self._chains: dict[Replica, _ReplicaCalls] = {f"{chain.group.name}/{chain.replica}": chain for chain in chains}
        self._admission = Admission(self.options, self._chains or ("function",))
        self._seen = {group.name: group.weights_version for group in self._groups}
        self._versions = dict.fromkeys(self._seen, 0)
        self._drawn: deque[_Drawn] = deque()
        self._prompts_drawn = self._offset = 0  # row_id of a prompt = number of its group + offset
        self._started = False
        self._found: dict[int, dict[int, tuple[BatchRef, int]]] = {}  # of groups under way: where responses are
        self._issued: deque[tuple[BatchRef, list[int]]] = deque()  # calls of the function, and their groups

    # Continuing

    def state(self) -> dict[str, Any]:
        """State for `load_state`: plain data, for JSON. Responses under way are generated again from their prompts."""
        if self._restored is not None:
            return dict(self._restored)
        state, taken = self._admission.state(), self._admission.taken
        # the loop has issued what it does with the last batch
        version = min(self._versions_now(taken).values(), default=taken)
        state["counts"] |= {"trained_batches": taken, "version": version}
        state["untrained"] = []
        first = min((group for group, _ in state["groups"]), default=self._admission.admitted)
        needed = next((drawn for drawn in self._drawn if drawn.first + drawn.prompts.rows > first), None)
        before, number = (self.loader.state(), self._prompts_drawn) if needed is None else (needed.before, needed.first)
        return {"admission": state, "loader": dict(before), "first": number}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue there with the next iteration. Errors: ConfigError when it is not a state of such a stream."""
        if not isinstance(state, Mapping) or not {"admission", "loader", "first"} <= state.keys():
            raise ConfigError("the saved state is not one of a stream: give what state() gave.")
        Admission(self.options, ("any",)).load_state(state["admission"])
        self.loader.load_state(state["loader"])
        self._restored = dict(state)

    def _begin(self, source: Iterator[Batch]) -> None:
        """Take up a saved state. Rows that replicas still have continue with their tokens, other groups begin anew."""
        if self._started and self._restored is None:
            return
        found = [row for group in self._sessions for rows in group.withdraw_rows().get() for row in rows]
        state, self._restored = self._restored, None
        self._reset()
        self._started = True
        if state is None:
            return
        self._prompts_drawn, admission = state["first"], self._admission
        places = admission.load_state(state["admission"])
        self._versions = dict.fromkeys(self._seen, admission.version)
        last = max((number for number, _ in state["admission"]["groups"]), default=-1)
        while self._prompts_drawn <= last and self._draw(source):
            pass
        kept: dict[int, dict[int, Mapping[str, Any]]] = {}
        for row in found:
            if all(version <= admission.trained_batches for version in row["policy_version"]):
                kept.setdefault(row["row_id"] - self._offset, {})[row["index"]] = row
        for number, group in state["admission"]["groups"]:
            rows = kept.get(number, {})
            whole = len(rows) == self.options.n and not group["oldest"] and number in places
            self._place({number: places[number]} if whole else admission.restarted(number), rows if whole else {})

    @property
    def _sessions(self) -> Sequence[WorkerGroup]:
        """The groups whose rows the stream advances."""
        return self._groups if self._until is not None else ()

    # Batches

    def __iter__(self) -> Iterator[BatchRef]:
        session = Session.current()
        if session.traces:
            yield from map(self._function, self.loader)
            return
        session.attach(self)
        source = self.loader.drawn()
        self._begin(source)
        while True:
            session.iterations.begin(self.loader.in_flight)  # type: ignore[attr-defined]
            start = time.monotonic()
            if (batch := self._next(source)) is None:
                break
            self._wait = time.monotonic() - start
            yield batch
            self._admission.trained()
            self._versions = self._versions_now(self._admission.trained_batches)
            self._seen = {group.name: group.weights_version for group in self._groups}
            self._admission.synced(min(self._versions.values(), default=None))
        for group in self._sessions:
            group.withdraw_rows()  # of groups that fill no batch
        session.iterations.drain()

    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch: those of `Admission.metrics`, `stream/wait` (seconds for which the loop waited for
        it) and `stream/recomputed_tokens` (so far, after new weights)."""
        found = {"stream/wait": self._wait, "stream/recomputed_tokens": float(self._recomputed)}
        return self._admission.metrics() | found

    def _versions_now(self, trained: int) -> dict[str, int]:
        """The versions of the groups' weights when `trained` batches have been trained."""
        versions = dict(self._versions)
        for group in self._groups:
            if _trains(group):
                versions[group.name] = trained
            elif group.weights_version != self._seen[group.name]:
                old = group.weights_source is None  # its source was updated after the sync
                versions[group.name] = max(versions[group.name], trained - old)
        return versions

    def _next(self, source: Iterator[Batch]) -> BatchRef | None:
        while True:
            self._admit(source)
            if (batch := self._admission.next_batch()) is not None:
                self._give_up(batch.given_up)
                return self._assembled(batch)
            if self._admission.ended:
                return None
            self._advance()

    def _admit(self, source: Iterator[Batch]) -> None:
        """Start as many groups as the bound on staleness allows."""
        last = self._admission.admitted + self._admission.capacity
        while self._prompts_drawn < last and self._draw(source):
            pass
        if (count := min(self._prompts_drawn, last) - self._admission.admitted) > 0:
            self._place(self._admission.admit(count))
        self._admission.prompts_ended |= self._prompts_drawn < last

    def _draw(self, source: Iterator[Batch]) -> bool:
        """Draw a batch of the loader; False at its end."""
        before = self.loader.state()
        if (prompts := next(source, None)) is None:
            return False
        self._offset = int(prompts["row_id"][0]) - self._prompts_drawn
        self._drawn.append(_Drawn(self._prompts_drawn, before, prompts))
        self._prompts_drawn += prompts.rows
        return True

    def _place(self, places: Mapping[int, Replica], rows: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Start groups; or continue `rows`, the responses of one group by their index."""
        for number in places:
            self._found[number] = {}
        if self._until is None:
            numbers, size = sorted(places), self.options.groups
            for batch in (numbers[i : i + size] for i in range(0, len(numbers), size)):
                self._issued.append((self._function(BatchRef.from_batch(self._prompts(batch))), batch))
            return
        for number, place in places.items():
            chain = self._chains[place]
            if chain.replica is not None and rows:
                chain.rows += [rows[index] for index in sorted(rows)]
            else:
                chain.new.append(number)
            chain.unfinished += self.options.n

    def _prompts(self, numbers: Sequence[int]) -> Batch:
        """The prompts of these groups."""
        parts = []
        for drawn in self._drawn:
            places = [number - drawn.first for number in numbers if 0 <= number - drawn.first < drawn.prompts.rows]
            if places:
                parts.append(drawn.prompts[places])
        return Batch.concat(parts)

    # Calls

    def _advance(self) -> None:
        """Keep calls queued, and take up what the next one to end has finished."""
        if self._until is None:
            self._take_function()
            return
        for chain in self._chains.values():
            while chain.unfinished and len(chain.calls) < chain.depth:
                self._issue(chain)
        running = [chain for chain in self._chains.values() if chain.calls]
        wait_for_one([chain.calls[0] for chain in running], _LOOK_SECONDS)
        for chain in running:
            while chain.calls and chain.calls[0].done():
                self._take(chain, chain.calls.popleft().get())

    def _issue(self, chain: _ReplicaCalls) -> None:
        batch, n = None, self.options.n
        if chain.new:
            prompts = self._prompts(sorted(chain.new))
            wanted = [name for name in ("prompt_ids", "prompt") if name in prompts][:1]
            batch = BatchRef.from_batch(prompts.select(*wanted, "row_id"))
        chain.calls.append(
            chain.group.advance_rows(
                batch,
                until=self._until,
                rows=chain.rows,
                replica=chain.replica,
                version=self._versions[chain.group.name],
                n=n,
                **self._sampling,
            )
        )
        chain.new, chain.rows = [], []

    def _take(self, chain: _ReplicaCalls, done: BatchRef) -> None:
        if not done.rows:
            return
        figures = done.get(_PER_ROW)
        for at, row in enumerate(zip(*(figures[name].tolist() for name in _PER_ROW), strict=True)):
            row_id, index, oldest, newest, recomputed = row
            chain.unfinished -= 1
            if (number := row_id - self._offset) not in self._found:  # given up meanwhile
                continue
            self._found[number][index] = done, at
            self._recomputed += recomputed
            self._admission.finished(number, [range(oldest, newest + 1)])

    def _take_function(self) -> None:
        """Take up the oldest call of the function without waiting: they end in order, and data is by reference."""
        batch, numbers = self._issued.popleft()
        if batch.rows != len(numbers) * self.options.n:
            raise BatchError(
                f"stream: the function made {batch.rows} rows of {len(numbers)} prompts, n={self.options.n} asks for "
                f"{len(numbers) * self.options.n}."
            )
        for at, number in enumerate(numbers):
            self._found[number] = {k: (batch, at * self.options.n + k) for k in range(self.options.n)}
            self._admission.finished(number)

    def _give_up(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._found[number]
        row_ids = [number + self._offset for number in numbers]
        for chain in self._chains.values() if numbers else ():
            rows = chain.group.withdraw_rows(replica=chain.replica, row_ids=row_ids).get()
            gone = len(rows) if chain.replica is not None else sum(map(len, rows))
            gone += self.options.n * len(set(chain.new) & set(numbers))
            chain.new = [number for number in chain.new if number not in numbers]
            chain.unfinished -= gone

    def _assembled(self, batch: StreamBatch) -> BatchRef:
        """The batch by reference: rows of many calls, in the order of admission."""
        found = [self._found.pop(number) for number in batch.groups]
        picked = [responses[k] for responses in found for k in range(self.options.n)]
        calls = list({id(call): call for call, _ in picked}.values())
        first = dict(zip(map(id, calls), itertools.accumulate((call.rows for call in calls), initial=0), strict=False))
        places = [first[id(call)] + at for call, at in picked]
        rows = calls[0] if len(calls) == 1 else BatchRef.concat(calls)
        if places != list(range(rows.rows)):
            rows = rows.take(places)
        if self._until is not None:
            prompts = BatchRef.from_batch(self._prompts(batch.groups)).repeat(self.options.n)
            rows = prompts | rows.without(*_SESSION)
        oldest = min(self._found, default=self._admission.admitted)
        while self._drawn and self._drawn[0].first + self._drawn[0].prompts.rows <= oldest:
            self._drawn.popleft()
        return rows


def _trains(group: WorkerGroup) -> bool:
    return any(kind_of(operation) == "training" for operation in group.operations.values())


def _chains(group: WorkerGroup) -> list[_ReplicaCalls]:
    if _trains(group):
        return [_ReplicaCalls(group, None, depth=1)]  # weights move to generation on all ranks
    return [_ReplicaCalls(group, replica, depth=2) for replica in range(group.grid.generation().replicas)]

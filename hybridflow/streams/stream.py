"""Streams: batches of responses for a loop that trains while rollouts generate (AReaL, 2025; verl's fully async).

    loader -> prompts -> Admission -> chains of short `advance_rows` calls -> finished groups -> batches
                           ^ weights arrive (sync_weights), batches are trained

Each replica has its next call queued while one runs, also while the loop waits for a result, and a weight sync or
another call takes its place between two of them: between two decoding steps of rows that are under way.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef, wait_for_one
from hybridflow.cluster.future import while_waiting
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.session import Session
from hybridflow.config import Until
from hybridflow.data.prompts import DrawnPrompts, PromptSource
from hybridflow.environments.agent import Agent
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.planner.admission import Admission, Replica, StreamBatch, StreamOptions
from hybridflow.settings import require
from hybridflow.streams.replica_calls import (
    Finished,
    ReplicaCalls,
    Responses,
    check_generates,
    function_responses,
    known_responses,
    replica_calls,
    with_prompts,
)

Function = Callable[[BatchRef], BatchRef]
_LOOK_SECONDS, _BATCHES = 1.0, 4  # the driver is at most two batches ahead of the hosts


def stream(
    loader: PromptSource,
    rollout: WorkerGroup | Sequence[WorkerGroup] | Function,
    *,
    rows: int,
    n: int = 1,
    max_staleness: int = 1,
    on_stale: str = "wait",
    call_seconds: float = 0.1,
    copy_seconds: float = 10.0,
    **sampling: Any,
) -> ResponseStream:
    """Iterates over batches of `rows` rows: `rows / n` whole groups of `n` responses, with the columns of
    `generate_sequences`.

    Generation continues while the loop trains. No token of a batch is more than `max_staleness` weight updates old (the
    versions are in `policy_version`): that bounds the groups under way, see `Admission`, and nothing is thrown away
    unless `on_stale="drop"`. Groups come in the order in which they finish, inside a batch in the loader's order. With
    `max_staleness=0` the loop is the synchronous one: each batch is a call of `generate_sequences`. A placement of
    `hf.auto` lowers the bound to what keeps its devices busy.

    `rollout` is one or several groups that generate: rollouts, to which the loop gives the new weights by
    `hf.sync_weights(actor, rollout)`, or an actor with generation, whose unfinished responses continue after its
    update. Or a function `prompts -> batch` that issues calls of your own, with `n` rows per prompt; its calls are not
    interrupted. Calls of rollouts decode for `call_seconds`; `sampling` overrides their `Sampling`.
    With `tools`, `environment` or `solve` (the program of `run`) among it, a response is a trajectory: `rows` and `n`
    count trajectories, and a batch has more rows where these fork. With `hf.Checkpoints`, responses under way are
    copied every `copy_seconds`, and continue from there when their host is lost; trajectories begin anew.

    Prompts are drawn from `loader` one by one; its batches need not have the size of a batch of the stream.
    `hf.Checkpoints.resume(stream)` continues with the prompts that were under way. One iteration of the session is one
    batch.

    A group has one stream: a new one takes it over and closes the one before.

    Errors: ConfigError for these settings, a group that cannot generate, a loop over a closed stream, and one that does
    not give new weights to the rollouts when the bound asks for it.
    """
    require(isinstance(loader, PromptSource), f"stream takes a PromptLoader, got {type(loader).__name__}.")
    planned = Session.assignment
    if planned is not None and planned.staleness is not None and max_staleness:
        max_staleness = min(max_staleness, planned.staleness)
    options = StreamOptions(rows=rows, n=n, max_staleness=max_staleness, on_stale=on_stale)  # type: ignore[arg-type]
    until = Until(seconds=call_seconds)
    require(copy_seconds > 0, f"stream(copy_seconds={copy_seconds}): give seconds above 0.")
    groups = [rollout] if isinstance(rollout, WorkerGroup) else [] if callable(rollout) else list(rollout)
    require(callable(rollout) or bool(groups), f"stream(rollout={rollout!r}): give a group that generates.")
    for group in groups:
        check_generates(group)
    require(not (sampling and callable(rollout)), "sampling settings belong into the function that generates.")
    _ = Agent.of(sampling)
    require(len(groups) <= 1 or max_staleness > 0, "max_staleness=0 takes one group: give it all of the devices.")
    function: Any = partial(groups[0].generate_sequences, n=n, **sampling) if groups else rollout
    sessions = until if groups and max_staleness else None
    return ResponseStream(loader, groups, options, function, sessions, {"n": n, **sampling}, copy_seconds)


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
        copy_seconds: float,
    ) -> None:
        self.loader, self.options = loader, options
        self._groups, self.until, self._sampling, self.function = groups, until, sampling, function
        self._copy_seconds, self._keeps = copy_seconds, False  # until a state is asked for
        self._closed = self._started = False
        for group in groups:
            if group.response_stream is not None:
                group.response_stream.close()
            group.response_stream = self
        self._waits = {"stream/wait": 0.0, "stream/rollout_wait": 0.0}
        self._restored: Mapping[str, Any] | None = None
        self._left: dict[str, int] | None = None  # the weights' versions when the loop was left
        self._given: deque[dict[int, dict[int, Finished]]] = deque(maxlen=_BATCHES)
        self._reset()

    def close(self) -> None:
        """Give up the responses under way; the groups are free, as they are for a new stream. Can be called again."""
        if self._closed:
            return
        self._closed = True
        session = Session.existing()
        for name, part in [] if session is None else list(session.parts.items()):
            if part is self and session is not None:
                del session.parts[name]
        for group in self._groups:
            group.response_stream = None
            if self._started and self.until is not None and not group.closed:
                with suppress(HybridFlowError):  # lost hosts have no rows
                    group.withdraw_rows()

    def _check_open(self) -> None:
        if self._closed:
            names = ", ".join(group.name for group in self._groups) or "its function"
            raise ConfigError(f"this stream of {names} is closed, or a newer one has taken over: loop over that one.")

    def _reset(self) -> None:
        until, copying = cast("Until", self.until), self._copy_seconds if self._keeps else None
        chains = [c for group in self._sessions for c in replica_calls(group, until, self._sampling, copying)]
        self._chains: dict[Replica, ReplicaCalls] = {f"{chain.group.name}/{chain.replica}": chain for chain in chains}
        self._admission = Admission(self.options, self._chains or ("function",))
        self._versions = {group.name: 0 for group in self._groups}
        self._seen = self._weights()
        self._prompts = DrawnPrompts(self.loader)  # the number of a prompt is that of its group
        self._started = False
        self._error: HybridFlowError | None = None  # of a call that was queued meanwhile
        self._found: dict[int, dict[int, Finished]] = {}  # of groups that no batch has: by index in the group
        self._issued: deque[tuple[BatchRef, list[int]]] = deque()  # calls of the function, and their groups
        self._measured = time.monotonic()

    def _weights(self) -> dict[str, int]:
        """The version of each group's weights, as the session counts them."""
        groups = self._groups[0].session.groups.values() if self._groups else ()
        return {group.name: group.weights_version for group in groups}

    def state(self) -> dict[str, Any]:
        """State for `load_state`: plain data, for JSON. Responses under way are generated again from their prompts,
        unless this stream itself continues: from now on it keeps copies."""
        self._keeps = True
        for chain in self._chains.values():
            chain.copy_seconds = self._copy_seconds
        return self._state()

    def _state(self) -> dict[str, Any]:
        if self._restored is not None:
            return dict(self._restored)
        state, taken = self._admission.state(), self._admission.taken
        # the loop has issued what it does with the last batch
        version = min(self._versions_now(taken).values(), default=taken)
        state["counts"] |= {"trained_batches": taken, "version": version}
        state["untrained"] = []
        oldest = min((group for group, _ in state["groups"]), default=self._admission.admitted)
        return {"admission": state, **self._prompts.state(oldest)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue there with the next iteration. Errors: ConfigError when it is not a state of such a stream."""
        if not isinstance(state, Mapping) or not {"admission", "loader", "first"} <= state.keys():
            raise ConfigError("the saved state is not one of a stream: give what state() gave.")
        Admission(self.options, ("any",)).load_state(state["admission"])
        self.loader.load_state(state["loader"])
        self._restored, self._left = dict(state), None

    def _begin(self, source: Iterator[Batch]) -> None:
        """Take up a saved state. Groups of which every response is still known continue, others begin anew: replicas
        have rows, the driver has copies of rows and of finished responses."""
        if self._started and self._restored is None:
            return
        rows = [row for chain in self._chains.values() for row in chain.copied_rows()]
        rows += [row for group in self._sessions for found in group.withdraw_rows().get() for row in found]
        for group in self._sessions:
            group.advance_rows(until=self.until, **self._sampling)  # drops what has finished meanwhile
        done = {number: group for groups in (*self._given, self._found) for number, group in groups.items()}
        state, self._restored = self._restored, None
        self._reset()
        self._started = True
        if state is None:
            return
        self._prompts = DrawnPrompts(self.loader, state["first"])
        numbers = [number for number, _ in state["admission"]["groups"]]
        self._prompts.draw(source, max(numbers, default=-1) + 1)
        known: dict[int, Responses] = {}
        if self._chains and all(chain.replica is not None for chain in self._chains.values()):  # which continue rows
            newest = state["admission"]["counts"]["trained_batches"]
            known = known_responses(numbers, self.options.n, newest, done, rows, self._prompts.offset)
        places = self._admission.load_state(state["admission"], unreported=known)
        self._admission.moved += len(known)
        self._versions = dict.fromkeys(self._versions, self._admission.version)
        self._seen, self._left = self._left or self._seen, None
        self._see_weights()
        for number in dict.fromkeys([*state["admission"]["complete"], *numbers]):
            if number not in known:
                self._place(self._admission.restarted(number))
                continue
            self._place({number: places[number]}, known[number].unfinished)
            for index, response in known[number].finished.items():
                self._found[number][index] = response
                self._admission.finished(number, [response.versions])

    @property
    def _sessions(self) -> Sequence[WorkerGroup]:
        """The groups whose rows the stream advances."""
        return self._groups if self.until is not None else ()

    def __iter__(self) -> Iterator[BatchRef]:
        self._check_open()
        yield from Session.current().backend.stream(self)

    def batches(self) -> Iterator[BatchRef]:
        """The batches of one loop."""
        session = Session.current()
        keeps = self._keeps
        session.attach(self)  # asks for a state
        self._keeps, source = keeps, session.iterations.timed(self.loader.drawn(), "loader")
        self._begin(source)
        with while_waiting(self._queue_meanwhile), self._resumable():
            while True:
                session.iterations.begin(self.loader.in_flight)  # type: ignore[attr-defined]
                start = time.monotonic()
                if (batch := self._next(source)) is None:
                    break
                self._measure(start)
                yield batch
                self._check_open()
                self._after_batch()
                self._admission.trained()
                self._see_weights()
        for group in self._sessions:
            group.withdraw_rows()  # of groups that fill no batch
        session.iterations.drain()

    @contextmanager
    def _resumable(self) -> Iterator[None]:
        """A loop that is left early can be entered again: it continues after its last batch."""
        try:
            yield
        except BaseException:
            if self._closed:
                raise
            self.load_state(self._state())
            self._left = self._weights()
            raise

    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch: those of `Admission.metrics`; `stream/wait`, seconds for which the loop waited for
        it; `stream/rollout_wait`, seconds since the batch before for which a replica did not decode (their mean); and
        `stream/recomputed_tokens` (so far, after new weights)."""
        recomputed = sum(chain.recomputed for chain in self._chains.values())
        return self._admission.metrics() | self._waits | {"stream/recomputed_tokens": float(recomputed)}

    def _measure(self, start: float) -> None:
        now, chains = time.monotonic(), self._chains.values()
        waits = [max(0.0, now - self._measured - chain.busy) for chain in chains]
        self._waits = {"stream/wait": now - start, "stream/rollout_wait": sum(waits) / max(1, len(waits))}
        self._measured = now
        for chain in chains:
            chain.busy = 0.0

    def _see_weights(self) -> None:
        """Admit by the weights that the groups have now."""
        self._versions = self._versions_now(self._admission.trained_batches)
        self._seen = self._weights()
        self._admission.synced(min(self._versions.values(), default=None))

    def _versions_now(self, trained: int) -> dict[str, int]:
        """The versions of the groups' weights when `trained` batches have been trained."""
        versions = dict(self._versions)
        for group in self._groups:
            if group.training:
                versions[group.name] = trained
            elif group.weights_version != self._seen[group.name]:
                old = group.trainer is None  # it was updated after the sync
                versions[group.name] = max(versions[group.name], trained - old)
        return versions

    def _version_of(self, group: WorkerGroup) -> int:
        """The version of the weights that a call has that is queued now, perhaps inside the loop."""
        if not group.training and group.weights_version != self._seen[group.name]:
            trainer = group.trainer
            old = trainer is None or trainer.weights_version == self._seen.get(trainer.name)  # not updated yet
            self._versions[group.name] = max(self._versions[group.name], self._admission.taken - old)
        return self._versions[group.name]

    def _next(self, source: Iterator[Batch]) -> BatchRef | None:
        while True:
            if self._error is not None:
                raise self._error
            self._admit(source)
            if self._may_train() and (batch := self._admission.next_batch()) is not None:
                self._give_up(batch.given_up)
                return self._assembled(batch)
            if self._admission.ended:
                return None
            self._advance()

    def _may_train(self) -> bool:
        """Whether the loop may get its next batch."""
        return True

    def _after_batch(self) -> None:
        """The loop has issued all that it does with a batch."""

    def _admit(self, source: Iterator[Batch]) -> None:
        """Start as many groups as the bound on staleness allows."""
        last = self._admission.admitted + self._admission.capacity
        self._prompts.draw(source, last)
        if (count := min(self._prompts.drawn, last) - self._admission.admitted) > 0:
            self._place(self._admission.admit(count))
        self._admission.prompts_ended |= self._prompts.drawn < last

    def _place(self, places: Mapping[int, Replica], rows: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Start groups; or continue `rows`, the unfinished responses of one group by their index."""
        for number in places:
            self._found[number] = {}
        if self.until is None:
            numbers, size = sorted(places), self.options.groups
            for batch in (numbers[i : i + size] for i in range(0, len(numbers), size)):
                self._issued.append((self.function(BatchRef.from_batch(self._prompts.rows(batch))), batch))
            return
        for number, place in places.items():
            chain = self._chains[place]
            if rows is None:
                chain.new.append(number)
            else:
                chain.rows += [rows[index] for index in sorted(rows)]
            chain.unfinished += self.options.n if rows is None else len(rows)

    def _queue_meanwhile(self) -> None:
        """Keep calls queued of groups that do nothing else. Errors come with the next batch: the loop's calls count."""
        chains = [chain for chain in self._chains.values() if chain.replica is not None]
        try:
            for chain in chains if self._error is None and not self._closed else ():
                chain.collect()
                self._queue_calls(chain)
        except HybridFlowError as error:
            self._error = error

    def _queue_calls(self, chain: ReplicaCalls) -> None:
        while chain.waits:
            prompts = self._prompts.rows(sorted(chain.new)) if chain.new else None
            chain.issue(prompts, self._version_of(chain.group))

    def _advance(self) -> None:
        """Keep calls queued, and take up what the next one to end has finished."""
        if self.until is None:
            self._take_function()
            return
        chains = list(self._chains.values())
        for chain in chains:
            self._queue_calls(chain)
        if not any(chain.collected for chain in chains):
            running = [chain.calls[0] for chain in chains if chain.calls]
            assert running, f"no call decodes groups {self._admission.under_way}"
            wait_for_one(running, _LOOK_SECONDS)
        self._take_up(chains)

    def _take_up(self, chains: Iterable[ReplicaCalls]) -> None:
        for chain in chains:
            for row_id, index, response in chain.ended():
                if (number := row_id - self._prompts.offset) in self._found:  # else given up meanwhile
                    self._found[number][index] = response
                    self._admission.finished(number, [response.versions])

    def _take_function(self) -> None:
        """Take up the oldest call of the function without waiting: they end in order, and data is by reference."""
        batch, numbers = self._issued.popleft()
        for number, responses in function_responses(batch, numbers, self.options.n).items():
            self._found[number] = responses
            self._admission.finished(number)

    def _give_up(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            del self._found[number]
        for chain in self._chains.values() if numbers else ():
            chain.withdraw(numbers, [number + self._prompts.offset for number in numbers])

    def _assembled(self, batch: StreamBatch) -> BatchRef:
        """The batch by reference: rows of many calls, in the order of admission."""
        found = {number: self._found.pop(number) for number in batch.groups}
        if self._keeps:
            self._given.append(found)
        picked = [responses[index] for responses in found.values() for index in range(self.options.n)]
        calls = list({id(one.rows): one.rows for one in picked}.values())
        first = dict(zip(map(id, calls), itertools.accumulate((call.rows for call in calls), initial=0), strict=False))
        places = [first[id(one.rows)] + one.at + row for one in picked for row in range(one.count)]
        rows = calls[0] if len(calls) == 1 else BatchRef.concat(calls)
        if places != list(range(rows.rows)):
            rows = rows.take(places)
        if self.until is not None:
            rows = with_prompts(rows, self._prompts.rows(batch.groups), picked, self.options.n)
        self._prompts.forget(min(self._found, default=self._admission.admitted))
        return rows

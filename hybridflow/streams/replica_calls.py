"""Calls of a generation replica in a stream: the next is always queued; copies of its rows outlive its hosts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef, LaterBatch
from hybridflow.cluster.future import Future
from hybridflow.cluster.group import WorkerGroup
from hybridflow.config import Until
from hybridflow.environments.agent import Agent
from hybridflow.errors import BatchError, ConfigError, HybridFlowError
from hybridflow.models.images import GRIDS, PIXELS
from hybridflow.planner.elastic.simulation import Measured
from hybridflow.planner.elastic.state import RunningGroup

PER_ROW = ("row_id", "response_index", "oldest_version", "newest_version", "recomputed_tokens", "response_tokens")
SESSION = (*PER_ROW, "spans")
"""Columns of `advance_rows` that batches do not have."""
_REPORT_SECONDS = 0.3
_COPY_TIMEOUT = 30.0  # seconds; the host that made the copy may be gone


class Finished(NamedTuple):
    """A response of `tokens`: row `at` of what a call returned, and of the driver's `copy` of it, if there is one. A
    trajectory has `count` rows from there on."""

    rows: BatchRef
    at: int
    versions: range
    copy: Batch | None = None
    tokens: int = 0
    count: int = 1

    def copied(self) -> Finished | None:
        """The same response from the copy, which needs no host; None without one."""
        if self.copy is None:
            return None
        own = self.copy[list(range(self.at, self.at + self.count))]
        return self._replace(rows=BatchRef.from_batch(own, number=False), at=0)


class Responses(NamedTuple):
    """The responses of one group, by their index."""

    finished: dict[int, Finished]
    unfinished: dict[int, Mapping[str, Any]]


@dataclass
class ReplicaCalls:
    """One replica of `group` (None: all of them, in the same calls). Two calls are queued, one while the group also
    trains. `copy_seconds`: how often unfinished rows are copied; None: never, finished ones neither. No copies are made
    of rows that only all replicas could continue."""

    group: WorkerGroup
    replica: int | None
    until: Until
    settings: Mapping[str, Any]
    copy_seconds: float | None
    calls: deque[LaterBatch] = field(default_factory=deque)
    new: list[int] = field(default_factory=list)  # groups to submit
    rows: list[Mapping[str, Any]] = field(default_factory=list)  # rows to continue
    unfinished: int = 0
    busy: float = 0.0  # seconds for which the replica has decoded; `decoding`: since the start
    decoding: float = 0.0
    tokens: int = 0  # of finished responses
    recomputed: int = 0  # tokens
    collected: list[tuple[int, int, Finished]] = field(default_factory=list)
    _copies: deque[Future] = field(default_factory=deque)  # the last two that are made, and those to be made
    _copied_at: float = 0.0

    @property
    def _copies_rows(self) -> bool:
        return self.copy_seconds is not None and self.replica is not None

    @property
    def waits(self) -> bool:
        """Whether another call should be queued."""
        depth = 1 if self.replica is None else 2
        return self.unfinished > 0 and (len(self.calls) < depth or self.calls[-depth].done())

    def issue(self, prompts: Batch | None, version: int) -> None:
        """Queue a call that submits `prompts` and `rows`, and now and then one that copies the rows."""
        batch, rows = None, self.rows
        if prompts is not None:
            wanted = [name for name in ("prompt_ids", "prompt") if name in prompts][:1]
            wanted += [name for name in (PIXELS, GRIDS) if name in prompts]
            chosen = prompts.select(*wanted, "row_id") if Agent.of(self.settings) is None else prompts
            batch = BatchRef.from_batch(chosen)
        self.new, self.rows = [], []
        settings = {"until": self.until, "replica": self.replica, "version": version, **self.settings}
        self.calls.append(self.group.advance_rows(batch, rows=rows, **settings))
        if self._copies_rows and time.monotonic() - self._copied_at >= (self.copy_seconds or 0.0):
            self._copied_at = time.monotonic()
            self._copies.append(self.group.withdraw_rows(replica=self.replica, keep=True))
            while len(self._copies) > 2 and self._copies[2].done():
                self._copies.popleft()

    def collect(self) -> None:
        """Take up what ended calls have finished. Errors: WorkerError of such a call."""
        while self.calls and self.calls[0].done():
            call = self.calls.popleft()
            rows = call.get()
            seconds = call.seconds().get("advance_rows/generation", 0.0)
            self.busy, self.decoding = self.busy + seconds, self.decoding + seconds
            if not rows.rows:
                continue
            copy = rows.get() if self._copies_rows and PIXELS not in rows else None  # the driver keeps no images
            acted = "trajectory_id" in rows
            numbers = rows.get((*PER_ROW, "trajectory_id") if acted else PER_ROW) if copy is None else copy
            values = list(zip(*(numbers[name].tolist() for name in PER_ROW), strict=True))
            spans = trajectory_spans(numbers["trajectory_id"].tolist() if acted else range(len(values)))
            for at, count in spans:
                row_id, index, oldest, newest, recomputed, _ = values[at]
                if acted:
                    row_id, index = divmod(int(numbers["trajectory_id"][at]), self.settings["n"])
                tokens = sum(row[-1] for row in values[at : at + count])
                self.recomputed, self.tokens = self.recomputed + recomputed, self.tokens + tokens
                finished = Finished(rows, at, range(oldest, newest + 1), copy, tokens, count)
                self.collected.append((row_id, index, finished))
            self.unfinished -= len(spans)

    def ended(self) -> list[tuple[int, int, Finished]]:
        """What was collected since: row id, index in the group, response."""
        self.collect()
        ended, self.collected = self.collected, []
        return ended

    def withdraw(self, groups: Sequence[int], row_ids: Sequence[int]) -> None:
        """Give up these groups, whose prompts have these row ids."""
        rows = self.group.withdraw_rows(replica=self.replica, row_ids=row_ids).get()
        gone = len(rows) if self.replica is not None else sum(map(len, rows))
        self.unfinished -= gone + self.settings["n"] * len(set(self.new) & set(groups))
        self.new = [number for number in self.new if number not in groups]

    def copied_rows(self) -> list[Mapping[str, Any]]:
        """The rows of the last copies, the newest at the end: those that have finished since are in older ones."""
        rows: list[Mapping[str, Any]] = []
        for copy in self._copies:
            with suppress(HybridFlowError):  # its host died before it ran
                rows += copy.get(_COPY_TIMEOUT)
        return rows


def trajectory_spans(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Where each trajectory begins, and its number of rows, which are adjacent."""
    ends = [at for at in range(1, len(ids) + 1) if at == len(ids) or ids[at] != ids[at - 1]]
    return [(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]


def function_responses(batch: BatchRef, groups: Sequence[int], n: int) -> dict[int, dict[int, Finished]]:
    """By group and index those in `batch`, which a function made of the groups' prompts. Waits for trajectories, whose
    rows must be adjacent. Errors: BatchError when they are not `n` for each group."""
    acted = "trajectory_id" in batch
    spans = trajectory_spans(batch.get("trajectory_id")["trajectory_id"].tolist() if acted else range(batch.rows))
    if len(spans) != len(groups) * n:
        what = "trajectories" if acted else "rows"
        raise BatchError(
            f"stream: the function made {len(spans)} {what} of {len(groups)} prompts, n={n} asks for {len(groups) * n}."
        )
    found = [Finished(batch, at, range(0), count=count) for at, count in spans]
    return {group: dict(enumerate(found[k * n : (k + 1) * n])) for k, group in enumerate(groups)}


def with_prompts(rows: BatchRef, prompts: Batch, picked: Sequence[Finished], n: int) -> BatchRef:
    """The `rows` of a batch of `picked` responses, `n` for each of `prompts`, with the columns of these."""
    if "trajectory_id" not in rows:
        return BatchRef.from_batch(prompts).repeat(n) | rows.without(*SESSION)
    of_row = [at // n for at, one in enumerate(picked) for _ in range(one.count)]
    own = rows.without(*(name for name in SESSION if name != "row_id"))
    prompts = prompts.without(*(name for name in (PIXELS, GRIDS) if name in prompts))  # rows have theirs
    return BatchRef.from_batch(prompts[of_row], number=False) | own


class RowReports:
    """What replicas have decoded, asked now and then without waiting for it, and how fast they are.

    `running` are the unfinished groups of each replica `at` the time (`time.monotonic`) of the last report, 0 if their
    rows have moved since.
    """

    def __init__(self, chains: Mapping[int, ReplicaCalls], measured: Measured) -> None:
        self.running: dict[int, tuple[RunningGroup, ...]] = {}
        self.at = 0.0
        self._chains, self._measured = chains, measured
        self._asked: list[tuple[int, Future]] = []
        self._seen: dict[int, _Decoded] = {}

    def begin(self, running: Mapping[int, tuple[RunningGroup, ...]]) -> None:
        """These groups are about to be submitted, and no others run."""
        self.forget()
        self.running = dict(running)
        self._seen = {i: self._decoded(i, sum(group.prompt for group in groups)) for i, groups in running.items()}

    def forget(self) -> None:
        """Rows have moved, or will."""
        self.at, self._asked, self._seen = 0.0, [], {}

    def poll(self, replicas: Iterable[int], offset: int) -> None:
        """Row ids are group + `offset`. Errors: WorkerError of a replica."""
        if self._asked and all(answer.done() for _, answer in self._asked):
            self._read(offset)
        elif not self._asked and time.monotonic() - self.at > _REPORT_SECONDS:
            self._ask(replicas)

    def wait(self, replicas: Iterable[int], offset: int) -> None:
        """Errors: as `poll`."""
        if not self._asked:
            self._ask(replicas)
        self._read(offset)

    def _ask(self, replicas: Iterable[int]) -> None:
        self._asked = [(i, self._chains[i].group.row_tokens(replica=i)) for i in replicas]

    def _read(self, offset: int) -> None:
        asked, self._asked = self._asked, []
        for replica, answer in asked:
            groups: dict[int, list[tuple[int, int]]] = {}
            for row_id, prompt, tokens in answer.get():
                groups.setdefault(row_id - offset, []).append((prompt, tokens))
            found = (RunningGroup(i, rows[0][0], tuple(tokens for _, tokens in rows)) for i, rows in groups.items())
            self.running[replica] = tuple(found)
            before, now = self._seen.get(replica), self._decoded(replica)
            self._seen[replica] = now
            if before is not None and (rows := (before.rows + now.rows) / 2) < now.tokens - before.tokens:
                self._measured.decoded(now.seconds - before.seconds, rows, now.tokens - before.tokens, before.prefill)
        self.at = time.monotonic()

    def _decoded(self, replica: int, prefill: int = 0) -> _Decoded:
        chain, running = self._chains[replica], self.running[replica]
        tokens = chain.tokens + sum(sum(group.tokens) for group in running)
        return _Decoded(chain.decoding, tokens, sum(len(group.tokens) for group in running), prefill)


class _Decoded(NamedTuple):
    """Of one replica until now: seconds, tokens of finished and running rows; running rows, tokens to prefill next."""

    seconds: float
    tokens: int
    rows: int
    prefill: int


def check_generates(group: object) -> None:
    """Errors: ConfigError for what a stream cannot generate with."""
    if not isinstance(group, WorkerGroup):
        raise ConfigError(f"stream(rollout=...) takes groups such as hf.RolloutWorker.on(...) returns, got {group!r}.")
    group.check_open()
    if "advance_rows" not in group.operations or group.settings.get("generate") is None:
        raise ConfigError(f"stream(rollout={group.name}): this group cannot generate. Give it generate=hf.VLLM(...).")
    if group.has_replica_for("generate_sequences"):
        raise ConfigError(f"stream(rollout={group.name}): its placement generates elsewhere. Place a RolloutWorker.")


def replica_calls(
    group: WorkerGroup, until: Until, settings: Mapping[str, Any], copy_seconds: float | None
) -> list[ReplicaCalls]:
    """Those of each replica."""
    # the weights of a group that trains move to generation on all ranks
    replicas = [None] if group.training else range(group.grid.generation().replicas)
    return [ReplicaCalls(group, replica, until, settings, copy_seconds) for replica in replicas]


def known_responses(
    groups: Iterable[int],
    n: int,
    newest: int,
    finished: Mapping[int, Mapping[int, Finished]],
    rows: Iterable[Mapping[str, Any]],
    offset: int,
) -> dict[int, Responses]:
    """Those of `groups` whose `n` responses are all known, up to their last token of version `newest`: from copies of
    finished responses, and from unfinished `rows` (row id = group + `offset`; of equal ones the last counts). Pure."""
    out = {number: Responses({}, {}) for number in groups}
    for number, known in out.items():
        for index, response in finished.get(number, {}).items():
            if response.versions.stop <= newest + 1 and (copy := response.copied()) is not None:
                known.finished[index] = copy
    for row in rows:
        known = out.get(row["row_id"] - offset)
        if known is not None and "token_ids" in row and row["index"] not in known.finished:
            kept = sum(version <= newest for version in row["policy_version"])  # versions ascend
            cut = {name: row[name][:kept] for name in ("token_ids", "log_probs", "policy_version")}
            known.unfinished[row["index"]] = {**row, **cut}
    return {number: known for number, known in out.items() if sum(map(len, known)) == n}

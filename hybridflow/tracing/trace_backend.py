"""TraceBackend: the session backend of a trace. It runs no process and records calls.

driver -> hf.ActorWorker.on(...)  -> ranks without hosts   no checkpoint is read, no device is asked for
          actor.method(batch)     -> GraphBuilder.call(...)     settings and columns are checked as ever
          batch.get(), .metrics() -> placeholders; later calls wait for the calls that write these
A driver ends where its fourth iteration would begin, or in an iteration that does not end.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import os
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hybridflow.algorithms.advantages.prompt_groups import GroupFilter
from hybridflow.algorithms.losses.distillation import TEACHER, TOP_K
from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import Column, Objects
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.backend import Deadlines, HostProcess, RankCall, RankGroup, SessionBackend
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.device import driver_answers
from hybridflow.cluster.future import Future, Known
from hybridflow.cluster.incidents import Incidents
from hybridflow.cluster.row_refs import CallOrigin, IssuedCall, RankOutput, RankRows, outputs_of
from hybridflow.cluster.session import Session
from hybridflow.cluster.store import Reader, write
from hybridflow.config import VLLM, Sampling
from hybridflow.data.tokenizer import has_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.models.images import GRIDS
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.describe.graph import HELPER, GraphBuilder, Source, Width
from hybridflow.protocols.operation import Operation, kind_of, operations
from hybridflow.streams.elastic import ElasticStream
from hybridflow.streams.stream import ResponseStream
from hybridflow.topology import RankGrid
from hybridflow.workers.placing import check_memory, ranks_on

ITERATIONS = 3  # the third is typical, even if the first has no data yet
_MOST = 64  # limit for a loop in which a group with an optimizer never trains
_MOST_CALLS, _MOST_READS = 4096, 16384  # in an iteration
_MOST_GUESSED = 1024  # calls of an iteration whose results are read
_CHARACTERS = 4  # of a token, in texts that are not tokenised yet
_TEXTS = ("prompt", "response")
_PER_TOKEN = ("_ids", "_mask", "log_probs", "values", "advantages", "returns", "routed_experts")
_VALUES = {"num_tokens": 2, "finished": True, "temperature": 1.0, "rewards": 1.0}  # all responses are good
_OF_ANNOTATION: dict[str, Any] = {"float": 0.0, "int": 0, "bool": False, "list": [], "None": None}


class TraceEndedError(BaseException):
    """Ends a traced driver. A BaseException, so the driver's `except Exception` does not catch it."""


class NoProcessError(ConfigError):
    """A traced driver asks a process for something."""


class NoHost:
    """Takes the place of a host process's handle. Of its device only the memory is known: that of this machine's
    largest, which the run will have without RAY_ADDRESS."""

    @property
    def about(self) -> Any:
        memory = None if "RAY_ADDRESS" in os.environ else driver_answers()[1]
        return SimpleNamespace(remote=lambda: {"node": "", "device": "", "name": "", "memory": memory})

    def __getattr__(self, name: str) -> Any:
        raise NoProcessError(
            f"a trace has no processes, and the driver asks one for {name!r}. Trace the loop's body, which need not "
            f"ask: hf.trace(step, groups)."
        )


@dataclass(frozen=True)
class SampledRows:
    """The largest generation of an iteration."""

    rows: int
    """Prompts."""
    factor: int
    """Responses to each prompt."""
    max_tokens: int | None
    """Of a response."""
    prompt_tokens: tuple[int, ...] = field(repr=False)
    patches: float
    """Of the images of a prompt, in the mean."""


class TraceSession(Session):
    """The session of a traced driver: it remains the driver's until the trace ends, and no checkpoint has its parts."""

    traces = True

    def opened_again(self) -> Session:
        return self

    def attach(self, part: Any, name: str | None = None) -> None: ...

    def shutdown(self) -> None:
        super().shutdown()
        Session._current = self


class TraceBackend(SessionBackend):
    """Records a driver's calls in `program`, and acts as its own `iterations`, with their `held` calls, and `channels`;
    also as the session's `replay`: files of trackers are temporary, checkpoints are neither read nor written.

    With `checks` groups are checked as before they are built, and one iteration is enough. `guessed`: the driver has
    read made-up results, so that whatever it does from then on may differ from a run.
    """

    events = recorded = None
    shows = automatic = False
    checkpoints = ()
    termination = SimpleNamespace(asked=0, deferred=contextlib.nullcontext)

    def __init__(self, checks: bool = False) -> None:
        self.checks = checks
        # what a cluster has is not known before it is joined: then only what holds on CUDA is checked
        self.has_cuda = checks and (torch.cuda.is_available() or "RAY_ADDRESS" in os.environ)
        self.name, self.deadlines = f"trace-{uuid.uuid4().hex[:6]}", Deadlines()
        self.iterations: Any = self
        self.channels = self.held = self.iterations
        self.program = GraphBuilder()
        self.sampled: SampledRows | None = None
        self.described: dict[str, tuple[type, Mapping[str, Any]]] = {}
        self._checked: dict[str, RankGroup] = {}  # the ranks that groups would have
        self._sequence, self.incidents = itertools.count(1), Incidents()
        self._recording = self._has_loader = self.guessed = self.elastic = False
        self._reads_of_driver, self._trained_most = True, 0
        self._calls = self._reads = 0  # since the iteration began
        self._endless = ""
        self._sources: dict[IssuedCall, tuple[Source, ...]] = {}  # the calls of the loop that a result comes from
        self._scratch = contextlib.ExitStack()

    @contextlib.contextmanager
    def within(self) -> Iterator[Session]:
        """Opens a session on this backend, until the end or a TraceEndedError; the previous session is current again
        afterwards. Errors: ConfigError for an iteration without an end, unless this is a check."""
        before, session = (Session._current, Session.replay), TraceSession(self)
        Session._current, Session.replay = session, self
        try:
            with contextlib.suppress(TraceEndedError), Session.assigning(None):
                yield session
        finally:
            session.shutdown()
            Session._current, Session.replay = before
            self._scratch.close()
        if self._endless and not self.checks:
            raise ConfigError(self._endless)

    def directory_of(self, tracker: Any) -> str:
        """A directory that is removed when the trace ends."""
        found = tempfile.TemporaryDirectory(prefix="hybridflow-trace-", ignore_cleanup_errors=True)
        return self._scratch.enter_context(found)

    def nothing(self, *_: Any, **__: Any) -> None:
        """No process has anything to do, to end or to report."""

    stop_hosts = build = drop = close = wait = collect = finished = nothing

    def listen(self) -> deque[Any]:
        """Nothing happens that could be collected."""
        return deque()

    # Groups

    def start_hosts(self, pool: str, per_node: Sequence[int], *_: Any) -> tuple[tuple[HostProcess, ...], None]:
        numbers = [node for node, count in enumerate(per_node or (1,)) for _ in range(count)]
        return tuple(HostProcess(NoHost(), node=node) for node in numbers), None

    def place(self, worker_class: type, pool: Any, settings: Mapping[str, Any], name: str, grid: Any) -> RankGroup:
        """A group of one rank, without a place; unless this `checks`, its `model` may be anything."""
        if self.checks:
            ranks = ranks_on(worker_class, pool, settings, name, grid)
            there = [one for open_, one in self._checked.items() if open_ in pool.session.groups]
            check_memory(pool, [ranks], there)
            self._checked[name], settings = ranks, dict(ranks.settings)
        self.described[name] = (worker_class, settings)
        model = settings.get("model")
        texts = {} if model is None else {"model": model.family if isinstance(model, ModelSpec) else str(model)}
        key = f"{name}/{self.sequence()}"
        own, hosts = {**settings, **texts}, (HostProcess(NoHost()),)
        return RankGroup(name, worker_class, own, RankGrid(), self.name, (0,), hosts, key)

    def operations(self, worker_class: type, settings: Mapping[str, Any]) -> dict[str, Operation]:
        """If the model is only a name or sizes, operations assume a tokenizer. Unless this `checks`, rows may divide in
        any way: their number is made up."""
        known, model = operations(worker_class), settings.get("model")
        if not self.checks:
            known = {name: _undivided(operation) for name, operation in known.items()}
        if model is None or has_tokenizer(model):
            return known
        return {name: _unchecked(operation, not Path(model).is_dir()) for name, operation in known.items()}

    def tell(self, ranks: RankGroup, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        return lambda: [getattr(host.handle, method) for host in ranks.hosts]

    def issue(
        self, ranks: RankGroup, calls: Sequence[RankCall | None], partners: frozenset[str] = frozenset()
    ) -> list[RankOutput | None]:
        self._calls += 1
        if self._calls > (most := _MOST_GUESSED if self._recording and self._reads else _MOST_CALLS):
            self._end(f"issued {most:,} calls, the last of {ranks.name}")
        issued = IssuedCall([], self.incidents, self.deadlines.peers, on_read=self._note_read)
        return [None if call is None else self._answer(ranks, call, issued) for call in calls]

    def _answer(self, ranks: RankGroup, call: RankCall, issued: IssuedCall) -> RankOutput:
        rows = [value for value in call.settings.values() if isinstance(value, RankRows)]
        operation = operations(ranks.worker_class)[call.method]
        due = call.rows if call.rows is not None else rows[0].rows if rows else 1
        if call.rows is None and operation.repeat is not None:  # one row for each trajectory
            due *= operation.repeat(ranks.settings, call.settings)
        if call.writes:
            made = placeholder_columns(call.writes, due)
            found = {name: _width(name, made[name], call.settings) for name in call.writes}
            self.program.widths |= {name: width for name, width in found.items() if width}
            ref: Any = write(made, on_driver=True)
        elif ranks.name == HELPER and call.method == "filter_groups":
            with self._not_by_driver():
                groups: dict[int, list[int]] = {}
                for row, group in enumerate(_column_of(rows[0], "group_id").tolist()):
                    groups.setdefault(group, []).append(row)
                ref = Known(GroupFilter(informative=list(groups.values()), rows=rows[0].rows))  # as if all differed
        else:
            ref = Known(placeholder_value(getattr(ranks.worker_class, call.method), call.settings))
        if self._recording:
            with self._not_by_driver():
                after = self.program.latest(ranks.name)  # of save and others without rows
                made = self._record(ranks, call, operation, rows, due) if operation.kind or rows else after
                self._sources[issued] = made
        return RankOutput(ref, due, CallOrigin(ranks.name, 0, call.method), issued)

    def _record(
        self, ranks: RankGroup, call: RankCall, operation: Operation, rows: Sequence[RankRows], due: int
    ) -> tuple[Source, ...]:
        """Record a call of the loop; of values for the driver alone (metrics), return the calls that they come from."""
        kind = kind_of(operation)
        reads: dict[str, dict[Source, None]] = {}
        for column, ref in itertools.chain.from_iterable(given.columns.items() for given in rows):
            written = (output.call for output in outputs_of([ref.node]) if output.call is not None)
            sources = (source for made in written for source in self._sources.get(made, ()))
            reads.setdefault(column, {}).update(dict.fromkeys(sources))
        if ranks.name == HELPER and not call.writes:
            return tuple(itertools.chain.from_iterable(reads.values()))
        if kind == "generation" and rows:
            sampled = _sampled(ranks, call, rows[0], due)
            if self.sampled is None or due >= self.sampled.rows * self.sampled.factor:
                self.sampled = sampled
        recorded = self.program.call(
            ranks.name,
            call.method,
            "function" if ranks.name == HELPER else kind,
            {column: tuple(sources) for column, sources in reads.items()},
            call.writes,
            rows=due,
            minibatches=call.settings.get(operation.chunks, 1) if operation.chunks else 1,
            epochs=call.settings.get("epochs", 1) if kind == "training" else 1,
        )
        return (recorded,)

    def _note_read(self, issued: IssuedCall) -> None:
        if self._reads_of_driver:
            self.guessed, self._reads = True, self._reads + 1
            if self._reads > _MOST_READS:
                self._end(f"read results {_MOST_READS:,} times")
            self.program.wait(self._sources.get(issued, ()))

    def _end(self, what: str) -> None:
        """Errors: TraceEndedError, of an iteration that would go on for ever."""
        self._endless = (
            f"one iteration of the loop has {what}. A loop until results are good may never end here: a trace makes "
            f"results up (rewards 1, other numbers and metrics 0, texts empty). Limit its rounds, such as "
            f"`for _ in range(8)` with a break, or use hf.dynamic_sampling. An iteration ends with the next batch of a "
            f"PromptLoader, else at tracker.log."
        )
        raise TraceEndedError

    @contextlib.contextmanager
    def _not_by_driver(self) -> Iterator[None]:
        """Inside the block, the trace itself reads."""
        self._reads_of_driver = False
        try:
            yield
        finally:
            self._reads_of_driver = True

    # Iterations

    def begin(self, in_flight: int) -> None:
        self._has_loader = True
        self.begin_iteration()

    def timed(self, source: Iterator[Any], what: str, ahead: int = 0) -> Iterator[Any]:
        return source

    def drain(self) -> None:
        self._has_loader = self._recording = False

    def stage_seconds(self) -> dict[str, float]:
        """Without a loader, an iteration ends where the driver asks for its metrics."""
        if not self._has_loader:
            self.begin_iteration()
        return {}

    def together(self, issued: Sequence[IssuedCall | None]) -> bool:
        return True

    def sequence(self) -> int:
        return next(self._sequence)

    def begin_iteration(self) -> None:
        """Errors: TraceEndedError when enough iterations were seen."""
        if self.seen_enough():
            self._recording = False
            raise TraceEndedError
        self.program.begin()
        self._recording, self._calls, self._reads = True, 0, 0

    def seen_enough(self) -> bool:
        """Whether the last iteration is typical: it trains every group with an optimizer. If none does (a group is only
        warmed up, or groups alternate), the late iteration that trains most counts."""
        done, trained = self.program.iteration, self.program.trained
        if self.checks:
            return done > 0
        self._trained_most = max(self._trained_most, len(trained))
        if done < ITERATIONS:
            return False
        if done < _MOST:
            optimized = {name for name, (_, own) in self.described.items() if own.get("optim") is not None}
            return bool(trained) and trained >= optimized
        return len(trained) == self._trained_most or done >= 2 * _MOST

    def stream(self, stream: ResponseStream) -> Iterator[BatchRef]:
        """One call of the stream's `function` for each batch. An elastic one is traced as whole iterations."""
        self.elastic, options = self.elastic or isinstance(stream, ElasticStream), stream.options
        for prompts in stream.loader:  # type: ignore[attr-defined]  a PromptLoader
            if self.elastic:
                yield stream.function(prompts)
                continue
            if len(prompts) != options.groups:
                prompts = prompts.take([i % len(prompts) for i in range(options.groups)])
            self.program.stream = options.max_staleness, stream.until is not None
            batch = stream.function(prompts)
            self.program.stream = 0, False
            yield batch

    # Weights

    def send(self, source: RankGroup, destination: RankGroup, *payload: Any) -> Future:
        issued = IssuedCall([], self.incidents, self.deadlines.peers, on_read=self._note_read)
        self._sources[issued] = self.program.sync(source.name, destination.name)
        moved = Known(PlaceholderMetrics(bytes=0.0, seconds=0.0))
        return Future((RankOutput(moved, None, CallOrigin(source.name, 0, "sync_weights"), issued),))


def _undivided(operation: Operation) -> Operation:
    """The operation with a check that does not ask whether rows divide into mini-batches."""
    if (check := operation.check) is None or not (chunks := operation.chunks):
        return operation
    return replace(operation, check=lambda own, call: check(own, {**call, chunks: 1}))


def _unchecked(operation: Operation, with_texts: bool) -> Operation:
    """The operation without its model check; a generation also writes texts."""
    if not with_texts or kind_of(operation) != "generation":
        return replace(operation, check=None)
    return replace(operation, check=None, writes=lambda own, call: (*operation.columns_written(own, call), "response"))


def _sampled(ranks: RankGroup, call: RankCall, rows: RankRows, due: int) -> SampledRows:
    strategy = ranks.settings.get("generate")
    own = strategy.sampling.longest if isinstance(strategy, VLLM) else None
    tokens: list[int] = []
    if "prompt_ids" in rows.columns:
        tokens = _column_of(rows, "prompt_ids").lengths.tolist()
    elif "prompt" in rows.columns:
        tokens = [max(1, len(str(text)) // _CHARACTERS) for text in _column_of(rows, "prompt")]
    asked = call.settings.get("sampling")
    longest = asked.longest if isinstance(asked, Sampling) else call.settings.get("max_tokens", own)
    grids = _column_of(rows, GRIDS).values if GRIDS in rows.columns else torch.zeros(0, 3)
    patches = float(grids.prod(-1).sum()) / max(rows.rows, 1)
    return SampledRows(rows.rows, due // max(rows.rows, 1), longest, tuple(tokens), patches)


def _column_of(rows: RankRows, name: str) -> Any:
    return Reader().read(RankRows(rows.rows, {name: rows.columns[name]}))[name]


class PlaceholderMetrics(dict[str, float]):
    """Metrics of a call that did not run: each reads as 0.0, and iteration yields none."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def get(self, name: str, default: Any = 0.0) -> Any:
        return super().get(name, default)


def placeholder_columns(names: Sequence[str], rows: int) -> Batch:
    """`rows` rows of the named columns: one token or a zero each, texts empty, ids of rows counted through."""
    return Batch({name: _placeholder_column(name, rows) for name in names})


def _placeholder_column(name: str, rows: int) -> Column:
    if name in _TEXTS or name.endswith("_failure"):
        return Objects(["" if name in _TEXTS else None] * rows)
    if name in ("row_id", "group_id"):
        return torch.arange(rows)
    if name in _VALUES:
        return torch.full((rows,), _VALUES[name])
    if not name.endswith(_PER_TOKEN):
        return torch.zeros(rows)
    values = torch.zeros(rows, dtype=torch.int64 if name.endswith("_ids") else torch.float32)
    return Ragged.from_lengths(torch.ones(rows, dtype=torch.bool) if name.endswith("_mask") else values, [1] * rows)


def _width(name: str, column: Any, settings: Mapping[str, Any]) -> Width | None:
    """None where only the engines know it, or the model's sizes tell."""
    if isinstance(column, Objects) or name in ("routed_experts", TEACHER):
        return None
    if name in TOP_K[:2]:  # of 4 bytes each
        return Width(response=4 * settings.get("k", 1))
    if not isinstance(column, Ragged):
        return Width(row=column.element_size())
    each = column.values.element_size()
    return Width(prompt=each) if name.startswith("prompt") else Width(response=each)


def placeholder_value(method: Callable[..., Any], settings: Mapping[str, Any]) -> Any:
    """A value of the method's annotated return type; metrics without an annotation."""
    declared = str(inspect.signature(method).return_annotation)
    if declared == "str":
        return str(settings.get("path", ""))
    if "None" in declared.split(" | "):
        return None
    return _OF_ANNOTATION.get(declared.partition("[")[0], PlaceholderMetrics())

"""TracedSession: the session of a driver that is only traced: groups have no processes, calls are written down.

driver -> hf.ActorWorker.on(...)  -> TracedGroup         no checkpoint is read, no device is asked for
          actor.method(batch)     -> Program.call(...)   settings and columns are checked as ever
          batch.get(), .metrics() -> stand-ins
A driver ends where its fourth iteration would begin.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridflow.algorithms.spread import Spread
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.columns import Issued, Origin, Part, parts_of
from hybridflow.cluster.future import Future
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.helper import Helper
from hybridflow.cluster.host import Deadlines
from hybridflow.cluster.invocation import Invocation, Outputs
from hybridflow.cluster.placed import Placed
from hybridflow.cluster.session import Session
from hybridflow.cluster.stand_ins import Figures, stand_in_columns, stand_in_value
from hybridflow.cluster.store import Known, write
from hybridflow.data.tokenizer import has_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.planner.graph import HELPER, Program, Source
from hybridflow.protocols import Operation, kind_of
from hybridflow.topology import RankGrid

ITERATIONS = 3  # the third is like all others, also where the first has nothing yet to work on
_MOST = 64  # of a loop that does not train all that has an optimizer
_CHARACTERS = 4  # of a token, where nobody has tokenised a text


class TraceEndedError(BaseException):
    """The driver was seen long enough. No `except Exception` of its own may stop that."""


class TracedHost:
    """Stands where the handle of a host process would be."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(
            f"a trace has no processes, and the driver asks one for {name!r}. Trace the loop's body, which need not "
            f"ask: hf.trace(step, groups)."
        )


class TracedPlaced(Placed):
    """Ranks that are nowhere."""

    def build(self, unset: bool = False) -> None:
        """Nothing has to be built."""

    def drop(self, wait: float) -> None:
        """Nothing has to be freed."""


class TracedGroup(WorkerGroup):
    """A group of one rank whose calls are checked, written down, and answered with stand-ins."""

    session: TracedSession

    @property
    def token_cost(self) -> None:  # type: ignore[override]
        """Rows are not spread over ranks here."""

    def _bind(self, operation: Operation, args: tuple, kwargs: dict[str, Any]) -> Invocation:
        return super()._bind(self._with_tokenizer(operation), args, kwargs)

    def usually_writes(self, name: str) -> tuple[str, ...]:
        known = super().usually_writes(name)
        return known if self._with_tokenizer(self.operations[name]) is self.operations[name] else (*known, "response")

    def _with_tokenizer(self, operation: Operation) -> Operation:
        """As of a checkpoint with a tokenizer where the model is only a name or sizes: a plan needs no more of it."""
        model = self.settings.get("model")
        if model is None or has_tokenizer(model):
            return operation
        operation = replace(operation, check=None)
        if kind_of(operation) != "generation" or Path(model).is_dir():
            return operation
        return replace(
            operation, writes=lambda own, call, known=operation: (*known.columns_written(own, call), "response")
        )

    def _dispatch(self, invocation: Invocation) -> Outputs:
        operation, name = invocation.operation, invocation.operation.name
        out = Outputs(self.session, invocation, Issued([], set()))
        rows = 1
        for rank, mine in enumerate(invocation.inputs(self.grid)):
            if mine is None:
                out.skip()
                continue
            source = next((value for value in mine.values() if isinstance(value, BatchRef)), None)
            rows = 1 if source is None else source.rows * invocation.factor
            if invocation.writes:
                ref = write(stand_in_columns(invocation.writes, rows), True, self.session.put)
            elif self.worker_class is Helper and name == "group_spread":
                ref = Known(_every_group(invocation))
            else:
                ref = Known(stand_in_value(getattr(self.worker_class, name), invocation.settings))
            out.add(ref, Known(None), Origin(self.name, rank, name), rows, source)
        if operation.kind or invocation.rows:
            self.session.record(self, invocation, out.call, rows)
        return out


class TracedIterations:
    """Counts the iterations of a traced driver, and ends it."""

    def __init__(self, session: TracedSession) -> None:
        self.reported: set[str] = set()
        self._session, self._has_loader = session, False

    def begin(self, in_flight: int) -> None:
        self._has_loader = True
        self._session.begin()

    def drain(self) -> None:
        self._has_loader = self._session.recording = False

    def stage_seconds(self) -> dict[str, float]:
        """Without a loader, an iteration ends where the driver asks for its figures."""
        if not self._has_loader:
            self._session.begin()
        return {}

    def issued(self, statuses: Sequence[Part]) -> None:
        """Nothing is under way."""

    def wait(self, parts: Sequence[Part]) -> list[Any]:
        return []


class TracedLinks:
    """Weights that would move between groups."""

    def __init__(self, session: TracedSession) -> None:
        self._session = session

    def send(self, source: Placed, destination: Placed, *cargo: Any) -> Future:
        self._session.program.sync(source.name, destination.name)
        return Future((Part(Known(Figures(bytes=0.0, seconds=0.0)), None, Origin(source.name, 0, "sync_weights")),))

    def close(self, key: str) -> None:
        """There are no links."""


@dataclass(frozen=True)
class Drawn:
    """The largest generation of an iteration: `rows` prompts with `factor` responses of up to `max_tokens` each."""

    group: str
    rows: int
    factor: int
    max_tokens: int | None
    prompt_tokens: tuple[int, ...] = field(repr=False)


class TracedSession(Session):
    """Takes the place of a session within `recording()`; `program` is what was called."""

    def __init__(self) -> None:  # without Ray, so nothing of the real one
        self.deadlines, self.name = Deadlines(), f"trace-{uuid.uuid4().hex[:6]}"
        self.pools, self.groups, self.described = [], {}, {}
        self._sequence, self._closing = itertools.count(1), []
        self.started_ray = self.has_cuda = self.recording = False
        self.iterations: Any = TracedIterations(self)
        self.links: Any = TracedLinks(self)
        self.program, self.drawn = Program(), None
        self._trained_most = 0
        self._sources: dict[Issued, Source] = {}
        self._directories: list[str] = []
        self._helper = TracedGroup(self._placed(Helper, "", {}, HELPER))

    program: Program
    drawn: Drawn | None
    described: dict[str, tuple[type, Mapping[str, Any]]]

    @contextlib.contextmanager
    def within(self) -> Iterator[TracedSession]:
        """This is the session of everything that is made within; afterwards, the one that was open is."""
        before, Session._current = Session._current, self
        try:
            yield self
        finally:
            self.shutdown()
            Session._current = before
            for directory in self._directories:
                shutil.rmtree(directory, ignore_errors=True)

    def begin(self) -> None:
        """The next iteration begins. Errors: TraceEndedError when enough of them were seen."""
        if self.seen_enough():
            self.recording = False
            raise TraceEndedError
        self.program.begin()
        self.recording = True

    def seen_enough(self) -> bool:
        """Whether the last iteration is one that all later ones are like: it trains all that has an optimizer. Where
        none does (a group is only warmed up, or groups take turns), it is the first late one that trains most."""
        done, trained = self.program.iteration, self.program.trained
        self._trained_most = max(self._trained_most, len(trained))
        if done < ITERATIONS:
            return False
        if done < _MOST:
            optimized = {name for name, (_, own) in self.described.items() if own.get("optim") is not None}
            return bool(trained) and trained >= optimized
        return len(trained) == self._trained_most

    @property
    def assignment(self) -> None:
        """Groups are nowhere."""

    def hosts(self, count: int) -> list[Any]:
        return [TracedHost() for _ in range(count)]

    def place(self, worker_class: type, pool_name: str, settings: Mapping[str, Any], name: str) -> TracedGroup:
        """A group that is nowhere; its `model` may be anything."""
        self.described[name] = (worker_class, settings)
        texts = {"model": str(settings["model"])} if settings.get("model") is not None else {}
        return TracedGroup(self._placed(worker_class, pool_name, {**settings, **texts}, name))

    def _placed(self, worker_class: type, pool: str, settings: Mapping[str, Any], name: str) -> TracedPlaced:
        return TracedPlaced(self, name, worker_class, (TracedHost(),), (0,), pool, settings, RankGrid())

    def scratch(self) -> str:
        """A directory that goes when the trace ends: a trace leaves no files."""
        self._directories.append(tempfile.mkdtemp(prefix="hybridflow-trace-"))
        return self._directories[-1]

    def put(self, value: Any) -> Any:
        return value

    def shutdown(self) -> None:
        closing, self._closing = self._closing, []
        for callback in closing:
            callback()

    def record(self, group: TracedGroup, invocation: Invocation, call: Issued, rows: int) -> None:
        """Write a call down; those outside of the loop, and the helper's that only give figures, are left out."""
        operation, settings = invocation.operation, invocation.settings
        if not self.recording or (group is self._helper and not invocation.writes):
            return
        kind = kind_of(operation)
        reads: dict[str, dict[Source, None]] = {}
        for name, ref in invocation.rows.items():
            for column in invocation.reads[name]:
                parts = parts_of([ref.column_refs[column].node])
                found = {self._sources[part.call]: None for part in parts if part.call in self._sources}
                reads.setdefault(column, {}).update(found)
        if kind == "generation" and (self.drawn is None or rows >= self.drawn.rows * self.drawn.factor):
            self.drawn = _drawn(group, invocation)
        self._sources[call] = self.program.call(
            group.name,
            operation.name,
            "function" if group is self._helper else kind,
            {column: tuple(sources) for column, sources in reads.items()},
            invocation.writes,
            rows=rows,
            minibatches=settings.get(operation.chunks, 1) if operation.chunks else 1,
            epochs=settings.get("epochs", 1) if kind == "training" else 1,
        )


def _drawn(group: TracedGroup, invocation: Invocation) -> Drawn:
    ref = next(iter(invocation.rows.values()))
    strategy = group.settings.get("generate")
    longest = invocation.settings.get("max_tokens", getattr(strategy, "max_tokens", None))
    tokens: list[int] = []
    if "prompt_ids" in ref:
        tokens = ref.get("prompt_ids")["prompt_ids"].lengths.tolist()
    elif "prompt" in ref:
        tokens = [max(1, len(str(text)) // _CHARACTERS) for text in ref.get("prompt")["prompt"]]
    return Drawn(group.name, ref.rows, invocation.factor, longest, tuple(tokens))


def _every_group(invocation: Invocation) -> Spread:
    """As if the scores of all groups differed."""
    ref = next(iter(invocation.rows.values()))
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(ref.get("group_id")["group_id"].tolist()):
        groups.setdefault(group, []).append(row)
    return Spread(kept=list(groups.values()), rows=ref.rows)

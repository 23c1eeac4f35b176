"""Calls that generate, recorded in a run and answered in its replay.

run:    group.generate_sequences -> Recorder.call: the call, kept by reference -> `ended`: the controller worker writes
replay: group.generate_sequences -> Replay.call: the recorded rows; no host is called

`step-00000012.0.pt` is the first such call of iteration 12, `program.json` the program that made the calls. Files hold
tensors and plain data only: reading one runs no code of it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import Objects, copy
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.future import Future, fetch
from hybridflow.cluster.group import GroupCall
from hybridflow.cluster.interactive import current_cell
from hybridflow.cluster.session import Session
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.errors import BatchError, ConfigError, HybridFlowError

logger = logging.getLogger(__name__)
_END_SECONDS, _READ_SECONDS, _SHOWN = 60.0, 5.0, 8
PROGRAM = "program.json"
BATCHES = "batches"
"""The directory of the records, beside the checkpoints of their run."""
_DAMAGED = (EOFError, BatchError, pickle.UnpicklingError)
_NAME = re.compile(r"step-(\d{8,})\.(\d+)\.pt")


@dataclass(frozen=True)
class BatchRecord:
    """One call of `role`.`method`: `prompts` are the columns that it read, `rows` those that it wrote, `factor` rows
    per prompt."""

    role: str
    method: str
    factor: int
    prompts: Batch
    rows: Batch

    def write(self, path: Path) -> None:
        """A complete file, or none. Errors: OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        half = path.with_name(f".{path.name}.partial")
        content = vars(self) | {"prompts": _plain(self.prompts), "rows": _plain(self.rows)}
        try:
            with half.open("wb") as file:
                torch.save(content, file)
            half.replace(path)
        except BaseException:
            with suppress(OSError):
                half.unlink()
            raise

    @classmethod
    def read(cls, path: Path) -> BatchRecord:
        """Errors: ConfigError for a file that is damaged, or has objects other than plain data."""
        try:
            with torch.serialization.safe_globals([EncodedImage]):
                content = torch.load(path, map_location="cpu", weights_only=True)
            return cls(**content | {name: _unplain(content[name]) for name in ("prompts", "rows")})
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, *_DAMAGED) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{path} cannot be read as a recorded batch: {why:.200} Replay another step.") from None


def _plain(batch: Batch) -> dict[str, Any]:
    """Tensors are copied: a view would be written with all of its memory."""
    own = {name: copy(batch.peek(name)) for name in batch.columns}
    return {name: {"values": c.values, "offsets": c.offsets} if isinstance(c, Ragged) else c for name, c in own.items()}


def _unplain(columns: dict[str, Any]) -> Batch:
    kinds: dict[type, Any] = {dict: lambda column: Ragged(**column), list: Objects}
    return Batch({name: kinds.get(type(column), lambda one: one)(column) for name, column in columns.items()})


@dataclass(frozen=True)
class BatchRecords:
    """The records in `directory`, by iteration and number of the call in it; iteration 0: before the loop."""

    directory: Path

    def path(self, step: int, index: int) -> Path:
        return self.directory / f"step-{step:08d}.{index}.pt"

    def read(self, step: int, index: int) -> BatchRecord:
        """Errors: ConfigError for a call that is not recorded."""
        if not (path := self.path(step, index)).is_file():
            where = f"step {step}" if step else "the calls before the loop"
            there = f"step {step} has {self._calls(step)} calls" if self._calls(step) else f"recorded are {self}"
            raise ConfigError(f"call {index + 1} that generates of {where} is not in {self.directory}: {there}.")
        return BatchRecord.read(path)

    def drop(self, after: int, until: float | None = math.inf) -> None:
        """Remove the records of the iterations after `after` up to `until`, if they can be removed."""
        for path in [path for path, step in self._files() if after < step <= (until or 0)]:
            with suppress(OSError):
                path.unlink()

    @property
    def steps(self) -> list[int]:
        """Iterations of the loop with a record."""
        return sorted({step for _, step in self._files() if step})

    def __str__(self) -> str:
        """Such as "steps 1-4, 7"."""
        parts: list[list[int]] = []
        for step in self.steps:
            if parts and parts[-1][1] == step - 1:
                parts[-1][1] = step
            else:
                parts.append([step, step])
        return f"steps {', '.join(f'{a}-{b}' if a < b else str(a) for a, b in parts)}" if parts else "no steps"

    def _calls(self, step: int) -> int:
        return sum(found == step for _, found in self._files())

    def _files(self) -> list[tuple[Path, int]]:
        found = [(path, _NAME.fullmatch(path.name)) for path in self.directory.glob("step-*.pt")]
        return [(path, int(name[1])) for path, name in found if name]


@dataclass(frozen=True)
class RecordedProgram:
    """How a run was started: `driver` with `arguments`, in the directory `directory`; "" without a file."""

    driver: str
    arguments: list[str]
    directory: str

    def write(self, records: BatchRecords) -> None:
        """Errors: OSError."""
        records.directory.mkdir(parents=True, exist_ok=True)
        half = records.directory / f".{PROGRAM}.{os.getpid()}"
        half.write_text(json.dumps(vars(self), indent=2) + "\n")
        half.replace(records.directory / PROGRAM)

    @classmethod
    def read(cls, records: BatchRecords) -> RecordedProgram:
        """Errors: ConfigError for a damaged file."""
        path = records.directory / PROGRAM
        try:
            found = cls(**json.loads(path.read_text()))
            if all(isinstance(one, str) for one in (found.driver, found.directory, *found.arguments)):
                return found
        except (OSError, ValueError, TypeError):
            pass
        raise ConfigError(f"{path} does not say which program made this run: it is damaged. Give --driver FILE.py.")


class CallOrder:
    """Numbers the calls of each iteration of the loop with checkpoints, from 0; those of loops inside it count on."""

    def __init__(self) -> None:
        self._step, self._index = 0, 0

    def batches(self, loader: Iterable[Any], done: Callable[[], int]) -> Iterator[Any]:
        """The batches of the loop, of which `done()` iterations are done; after an error it begins one of them anew."""
        self._step, self._index = done() + 1, 0
        for batch in loader:
            yield batch
            if (step := done() + 1) != self._step:
                self._step, self._index = step, 0

    def next(self) -> tuple[int, int]:
        """Step (0: before the loop) and number of the call that is made now."""
        self._index += 1
        return self._step, self._index - 1


class Recorder:
    """Records calls in `records`. Their rows are written by the controller worker at the end of their iteration: the
    driver neither waits nor reads them, and no call that the controller worker computes for the iteration waits."""

    def __init__(self, records: BatchRecords) -> None:
        self.records, self.order = records, CallOrder()
        self._due: list[Callable[[], Future]] = []
        self._writing: list[Future] = []
        self._told = set[str]()

    @classmethod
    def start(cls, records: BatchRecords, done: int, record: bool = True) -> Recorder | None:
        """Record the program that runs now from the iteration after `done`; None unless `record`. Records of later
        iterations, which are not the past of this run, are removed.

        Errors: ConfigError for a directory that cannot be written."""
        records.drop(done or -1)
        if not record:
            return None
        file = sys.argv[0].partition(":")[0]  # of FILE.py:FUNCTION
        driver = "" if current_cell() is not None or not os.path.isfile(file) else os.path.abspath(sys.argv[0])
        try:
            RecordedProgram(driver, sys.argv[1:], os.getcwd()).write(records)
        except OSError as error:
            raise ConfigError(f"batches=True: {records.directory} cannot be written: {error.strerror}.") from None
        recorder = cls(records)
        Session.current().before_shutdown(recorder.close)
        return recorder

    def call(self, role: str, call: GroupCall, run: Callable[[], Any]) -> Any:
        """Errors: ConfigError for rows that are generated across calls."""
        name = call.operation.name
        if call.operation.later:
            raise ConfigError(f"{role}.{name} is not recorded: its rows are generated across calls. Use batches=False.")
        result = run()
        if isinstance(result, BatchRef) and call.rows and call.writes:
            if (at := self.order.next())[1] == 0:  # of an iteration whose end was not seen
                self.ended(at[0])
            prompts, rows = call.prompts(), result.select(*call.writes)
            write = Session.current().controller.write_record
            self._due.append(partial(write, prompts, rows, str(self.records.path(*at)), role, name, call.factor))
        return result

    def ended(self, step: int) -> None:
        """The calls of the iteration are issued."""
        del step
        done = [one for one in self._writing if one.done()]
        self._writing = [one for one in self._writing if one not in done]
        self._report(done, _READ_SECONDS)
        while self._due:
            self._writing.append(self._due.pop(0)())

    def forget(self) -> None:
        """The hosts with the rows are gone."""
        self._due.clear()
        self._writing.clear()

    def close(self) -> None:
        """Wait until all records are written; those of failed calls never are."""
        with suppress(HybridFlowError):
            self.ended(0)
            self._report(self._writing, _END_SECONDS)

    def _report(self, writes: list[Future], seconds: float) -> None:
        outputs = [output for one in writes for output in one.outputs]
        with suppress(HybridFlowError):  # a lost host; failures of the calls themselves are values here
            found = fetch([output.ref for output in outputs], outputs, seconds, follow=False)
            for text in {one for one in found if isinstance(one, str) and one} - self._told:
                self._told.add(text)
                logger.warning("a batch is not recorded: %s. The run continues.", text)


class Replay:
    """Answers calls from `records` and ends the program after iteration `step`. The run continues from `checkpoint`
    (None: from its start); `directory` takes what its trackers write, in place of the run's directory `run`; they have
    their display if it `shows`."""

    def __init__(self, records: BatchRecords, step: int, checkpoint: Path | None, run: Path) -> None:
        self.records, self.step, self.checkpoint, self.run = records, step, checkpoint, run
        self.directory, self.ended_at = run / f"replay-{step}", 0
        self.order, self.shows, self.recorded = CallOrder(), True, self

    def directory_of(self, tracker: Any) -> Path:
        """The directory of a tracker that the run has at `tracker`."""
        path = Path(tracker)
        return self.directory if path.resolve() == self.run.resolve() else self.directory / path.name

    @property
    def checkpoints(self) -> list[Path]:
        return [] if self.checkpoint is None else [self.checkpoint]

    def call(self, role: str, call: GroupCall, run: Callable[[], Any]) -> Any:
        """Errors: ConfigError for another call than that of the run, or other prompts."""
        if not (call.rows and call.writes) or call.operation.later:
            return run()
        at = self.order.next()
        record, what = self.records.read(*at), f"step {at[0]}, call {at[1] + 1} that generates"
        for kind, then, now in (
            ("", f"{record.role}.{record.method}", f"{role}.{call.operation.name}"),
            ("responses per prompt: ", record.factor, call.factor),
        ):
            if then != now:
                raise ConfigError(f"{what}: {kind}{then} in the run, {now} in this driver. Replay with the run's.")
        if differing := differing_rows(record.prompts, call.prompts().get()):
            shown = ", ".join(map(str, differing[:_SHOWN])) + (", ..." if len(differing) > _SHOWN else "")
            raise ConfigError(
                f"{what}: {len(differing)} prompts of {role}.{call.operation.name} differ from those of the run, rows "
                f"{shown}. The driver or its data have changed: replay with those of the run."
            )
        return call.carried(BatchRef.from_batch(record.rows, number=False))

    def ended(self, step: int) -> None:
        """Errors: SystemExit (0) after the iteration that is replayed."""
        self.ended_at = step
        if step >= self.step:
            raise SystemExit(0)

    def finished(self) -> None:
        """Errors: ConfigError: the loop has no further iteration."""
        raise ConfigError(f"the loop ended after step {self.ended_at}, before that to replay.")

    def forget(self) -> None: ...

    def close(self) -> None: ...


def differing_rows(then: Batch, now: Batch) -> list[int]:
    """Rows that are not the same in both, or that one of the two does not have."""
    if then.equal(now):
        return []
    before, after = then.to_dicts(), now.to_dicts()
    common = min(len(before), len(after))
    rows = [row for row in range(common) if before[row] != after[row]]
    return [*rows, *range(common, max(len(before), len(after)))] or list(range(common))

"""Tracker: the record of a run: metrics on the terminal, `metrics.jsonl`, samples, and the reward curve."""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import re
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from hybridflow.batch.batch import Batch
from hybridflow.cluster import startup
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.interactive import current_cell
from hybridflow.cluster.iterations import IterationSeconds
from hybridflow.cluster.session import Session
from hybridflow.data.tokenizer import Tokenizer, TokenizerLike, as_tokenizer
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.models.images import PIXELS
from hybridflow.settings import by_name, is_number, local_path
from hybridflow.tracking.displays import LivePlot, RunDisplay, drawn_curve
from hybridflow.tracking.kept_files import KeptFiles, as_document, as_line, checked_state
from hybridflow.tracking.metric_loggers import Destinations, LoggerThread, Metrics, as_table, find_loggers, resolve
from hybridflow.tracking.report.record import EventRecorder
from hybridflow.tracking.report.run_files import RunFiles
from hybridflow.tracking.run_lock import RunLock

logger = logging.getLogger(__name__)
_KEPT = ("metrics.jsonl", "samples.jsonl", "events.jsonl", "notes.json", "reward.png", "config.yaml", "tensorboard")
_PER_ROW = ("prompt", "response", "answer", "rewards", "costs", "finished", "turns", "stop")
_PER_TOKEN = ("log_probs", "advantages", "policy_version", "turn_ids")
_FEW_END = 0.05
"""Share of responses that end by themselves, below which their rewards are doubtful."""
_FLUSH_SECONDS, _CLOSE_SECONDS = 5.0, 20.0  # the longest waits for loggers


class Tracker:
    """Writes a run's metrics to `directory`, sends them `to` loggers and shows them.

    - `metrics.jsonl`: one object per iteration with `step` (from 1), `time/iteration` (s), `time/total` (s) and all
      metrics of `log`, in complete lines, so that a running file can be followed. Groups add
      `time/<role>.<method>` (s, of the slowest rank).
    - `events.jsonl`: every call on every device, see `hybridflow.tracking.report.record`. Of several trackers,
      the newest writes it.
    - `samples.jsonl`: one object per sample row; `notes.json`: values of the whole run; `reward.png`: the reward curve.
    - `config.yaml`: the run's settings, if `config` gives them as plain data; written with the first of the others.
    - `to`: "tensorboard" (event files in the directory), "wandb" and "mlflow" (extras of the package), or objects of
      `hybridflow.tracking.metric_loggers.MetricLogger`. Each is called in a thread of its own.

    `load_state` continues the run that `state` was taken of. Without it, the first write renames the files of an
    earlier run in the directory to `metrics.<n>.jsonl` and so on. `total` is the number of iterations, for the display.
    `console=False` shows nothing.

    A failed write (full disk, removed directory, lost network) does not stop the run: each kind of error is logged
    once, the metrics are kept and written later, and the end of the run names the missing ones.

    `log` is one iteration behind; `finish` writes the last one and draws the curve. Without a call or `with`, it runs
    at the end of the session (`hf.shutdown()`) or of the program.

    Errors: ConfigError for a directory that cannot be written or that another process writes to (`run_lock`), an
    unknown logger, and one whose package is missing.
    """

    @by_name
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        to: Destinations = (),
        total: int | None = None,
        console: bool = True,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        directory = local_path(directory)
        if (replay := Session.replay) is not None:
            directory, to, console = replay.directory_of(directory), (), console and replay.shows
        startup.writes_to(directory)
        self._loggers = find_loggers(to)
        self.directory = Path(directory)
        if self.directory.exists() and not self.directory.is_dir():
            raise ConfigError(f"Tracker({str(directory)!r}): this is a file. Give a directory for the run.")
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / "metrics.jsonl").open("ab").close()
        except OSError as error:
            why = f"{error.strerror}: {error.filename}"
            raise ConfigError(f"Tracker({str(directory)!r}): {why}. Give a directory that can be written.") from error
        self._owner = RunLock(self.directory / ".lock", f"Tracker({str(directory)!r})")
        self._owner.take()
        if current_cell() is not None and (session := Session.existing()) is not None:
            for other in list(session.parts.values()):  # of an earlier run of the notebook
                if isinstance(other, Tracker) and other.directory == self.directory:
                    session.write_metrics()
                    other.finish_late()
        settings = {} if config is None else {"config.yaml": yaml.safe_dump(dict(config), sort_keys=False).encode()}
        self._files, self._closed = KeptFiles(self.directory, _KEPT, settings), False
        self._display = RunDisplay(total) if console else None
        self._threads, self._pending = list[LoggerThread](), deque[tuple[tuple[Metrics, ...], int]]()  # yet to write
        self._samples: list[tuple[int, str, Batch | BatchRef, Future[Tokenizer] | None]] = []
        self._tables: list[tuple[int, str, list[str], list[list[Any]]]] = []  # for loggers that are not open yet
        self._step = self._resumed = self._logged = 0
        self._warned = False
        self._last = self._start = time.perf_counter()
        self._plots: list[LivePlot] = []
        self._notes: dict[str, Any] = {}
        self._run = uuid.uuid4().hex
        self._session: Session | None = None
        self._recorder: EventRecorder | None = None
        self._lock = threading.RLock()  # a checkpoint's thread asks for the state
        self._register(newest=True)

    def log(self, *metrics: Metrics) -> None:
        """Log the metrics of one iteration; later arguments win.

        Futures are waited for in the *next* `log` (or `finish`), so the driver never waits for the iteration that it
        has just issued. Errors: ConfigError for metrics that are not a mapping of numbers, and the error of a failed
        call.
        """
        if self._closed:
            raise ConfigError("this run's tracker is finished: make a new Tracker to log more.")
        session = self._register()
        if session is not None and session is not self._session:  # a session may end before the program
            self._session = session
            session.before_shutdown(self.finish_late)
        with self._lock:
            self._step += 1
            stages = () if session is None else (session.iterations.stage_seconds(),)
            self._pending.append(((*stages, *metrics), self._step))
            try:
                self._write_until(self._step - 1)
            except HybridFlowError as error:
                if session is None or not session.defer(error):
                    raise

    def samples(
        self,
        samples: Sequence[Mapping[str, Any]] | Batch | BatchRef,
        *,
        rows: int = 8,
        every: int = 1,
        tokenizer: TokenizerLike | None = None,
        columns: Sequence[str] = (),
        title: str = "samples",
    ) -> None:
        """Append samples to `samples.jsonl`: rows of your own, which the console shows as a table, or rows of a batch.

        Of a batch, after `log` of its iteration, the first `rows` in the first and each `every`-th iteration: prompt,
        response, answer, rewards, costs, additional `columns`, small `images`, and, one entry per token, `log_probs`,
        `advantages`, `policy_version`, `turn_ids` (-1: not the model's) and, with a `tokenizer` (the model's
        directory), `tokens`. They are fetched like metrics, in the *next* `log`. Loggers get them as tables, without
        images and what is per token.
        Errors: MissingColumnError; as `as_tokenizer`.
        """
        if isinstance(samples, Batch | BatchRef):
            with self._lock:
                if self._step == 1 or self._step % max(every, 1) == 0:
                    usual = (*_PER_ROW, *_PER_TOKEN, "group_id", "response_ids")
                    names = list(dict.fromkeys([*(name for name in usual if name in samples), *columns]))
                    # in a thread: importing its library takes seconds
                    pool = ThreadPoolExecutor(1, "tokenizer")
                    reader = None if tokenizer is None else pool.submit(as_tokenizer, tokenizer)
                    shown = samples.select(names)[: max(rows, 0)] | thumbnails(samples, rows)
                    self._samples.append((self._step, title, shown, reader))
            return
        self._append_samples(self._step, title, samples)
        if self._display is not None:
            with self._files.forgiving("the display"):
                self._display.samples([{k: v for k, v in row.items() if k != "images"} for row in samples], title)

    def _append_samples(self, step: int, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._files.append("samples.jsonl", [as_line({"step": step, "title": title, **row}) for row in rows])
        if self._loggers and rows:
            name = re.sub(r"[^\w\-. ]", "_", title)  # as all of them take it
            self._tables.append((step, name, *as_table(rows, without=(*_PER_TOKEN, "tokens", "images"))))
            if self._threads:
                self._send_tables()

    def _send_tables(self) -> None:
        """Also those of before the first `log`; opens the loggers at first."""
        if not self._threads:
            self._threads = [LoggerThread(name, one, self._end_first) for name, one in self._loggers.items()]
            for thread in self._threads:
                thread.put("open", self.directory, self._run, self._resumed)
        for thread in self._threads:
            for table in self._tables:
                thread.put("samples", *table)
        self._tables.clear()

    def plot(self, *names: str) -> LivePlot:
        """Curves of these metrics (default: `reward/mean`); at the end of a notebook's cell they follow the run.

        Metrics that a run does not have stay empty. A script gets the picture by `.png()`.
        """
        plot = LivePlot(names or ("reward/mean",))
        with self._lock:
            if self._logged:  # otherwise the file is an earlier run's
                for line in RunFiles(self.directory).lines("metrics.jsonl"):
                    plot.iteration(line)
            self._plots.append(plot)
        return plot

    def note(self, **values: Any) -> None:
        """Write values of the whole run (accuracy before and after) to `notes.json`."""
        self._notes |= values
        self._files.replace("notes.json", as_document(self._notes))

    def flush(self, step: int | None = None) -> None:
        """Wait for the metrics of the last iteration, if it is not after `step`, and write them. Errors: as `log`."""
        with self._lock:
            self._write_until(self._step if step is None else step)
            self._files.write()
            self._wait_for_loggers(_FLUSH_SECONDS)

    def state(self, step: int | None = None) -> dict[str, Any]:
        """State for `load_state` at the end of iteration `step` (the last one), after `flush`: plain data, for JSON."""
        with self._lock:
            self.flush(step)
            step = self._step if step is None else step
            state = {"run": self._run, "step": step, "seconds": time.perf_counter() - self._start, "notes": self._notes}
            return json.loads(as_document(state), parse_constant=lambda _: None)  # JSON has no NaN

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue the run after the step of `state`, in the same files; discards the iteration that is pending.

        Lines of later steps, of a part of the run that was lost, go to `metrics.<n>.jsonl` and so on. Can be called
        again, and after `finish`. Errors: ConfigError when it is not a state; the tracker is then unchanged.
        """
        self._run, step, seconds, self._notes = checked_state(state)
        self._owner.take()
        self._step = self._resumed = self._logged = step
        for plot in self._plots:
            plot.forget(step)
        self._closed = False
        self._pending.clear()
        self._samples.clear()
        self._tables.clear()
        self._last = time.perf_counter()
        self._start = self._last - seconds
        if self._recorder is not None:
            self._recorder.forget(step)
        notes = as_document(self._notes) if self._notes else b""
        if Session.replay is None:  # whose files begin with the steps that are replayed
            self._files.rewind(step, {"notes.json": notes, "reward.png": b""})
        for thread in self._threads:
            thread.put("open", self.directory, self._run, step)
        self._register()

    def finish(self) -> None:
        """Wait for the last iteration, draw the reward curve, close. Can be called again."""
        self._finish(failed=False)

    def _finish(self, failed: bool) -> None:
        if self._closed:
            return
        try:
            self.flush()
            if self._recorder is not None and not failed:  # calls after the loop
                self._recorder.session.iterations.collect()
            with self._files.forgiving("reward.png"):
                lines = RunFiles(self.directory).lines("metrics.jsonl") if self._logged else ()
                found = [(line.get("step"), line.get("reward/mean")) for line in lines]
                if rewards := [(step, reward) for step, reward in found if type(step) is int and is_number(reward)]:
                    self._files.replace("reward.png", drawn_curve(rewards))
        finally:
            self._close(failed)

    def finish_late(self) -> None:
        """`finish` at program exit: logs errors; does not wait if the program failed."""
        if self._closed:
            return
        pending = (part for metrics, _ in self._pending for part in metrics)
        if _failed() and not all(getattr(part, "done", lambda: True)() for part in pending):
            logger.warning("%s: the last iteration had not ended when the program did.", self.directory)
            self._pending.clear()
            self._samples.clear()
        try:
            self._finish(_failed())
        except Exception:
            logger.warning("%s: the last iteration failed.", self.directory, exc_info=True)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if kind is None:
            self.finish()
        else:  # the pending results may never arrive
            self._close(True)

    def _write_until(self, step: int) -> None:
        """Wait for the pending iterations up to `step`, and write them; Ctrl-C in the wait loses none."""
        while self._pending and self._pending[0][1] <= step:
            metrics, number = self._pending[0]
            found: dict[str, float] = {}
            lost: HybridFlowError | None = None
            try:
                for part in metrics:
                    try:
                        found |= resolve(part)
                    except HybridFlowError as error:
                        if not isinstance(part, IterationSeconds):
                            raise
                        lost = error  # of a call, such as one of a host that is gone: the metrics may be there
            except Exception:
                self._pending.popleft()
                raise
            self._pending.popleft()
            self._write(found, number, metrics[0])
            if lost is not None:
                raise lost
        while self._samples and self._samples[0][0] <= step:
            at, title, batch, reader = self._samples.pop(0)
            self._append_samples(at, title, _sample_rows(batch, None if reader is None else reader.result()))

    def _write(self, metrics: dict[str, float], step: int, stages: Metrics) -> None:
        now = time.perf_counter()
        line = {"step": step, "time/iteration": now - self._last, "time/total": now - self._start} | metrics
        self._last = now
        if "response/tokens" in line:
            seconds = max(line["time/iteration"], 1e-9)
            line["perf/response_tokens_per_second"] = line["response/tokens"] / seconds
            if "prompt/tokens" in line:  # as the papers count: prompts and responses
                line["perf/tokens_per_second"] = (line["prompt/tokens"] + line["response/tokens"]) / seconds
        if (ended := line.get("response/finished", 1.0)) < _FEW_END and not self._warned:
            self._warned = True
            logger.warning(
                "Iteration %d: %.0f %% of the responses came to their end, the others were cut after %.0f tokens. "
                "Their rewards say little: give a larger max_tokens, or look whether the model knows its end token.",
                *(step, 100 * ended, line.get("response/length_mean", math.nan)),
            )
        line |= self._take_events(step, stages, line)
        # JSON has no NaN: a value that is not finite becomes null
        plain = {name: value if math.isfinite(value) else None for name, value in line.items()}
        self._logged = step
        self._files.append("metrics.jsonl", [as_line(plain)])
        self._send_tables()
        for thread in self._threads:
            thread.put("log", step, {name: value for name, value in line.items() if name != "step"})
        with self._files.forgiving("the display"):
            if self._display is not None:
                self._display.iteration(line)
            for plot in self._plots:
                plot.iteration(plain)

    def _take_events(self, step: int, stages: object, line: Mapping[str, float]) -> dict[str, float]:
        """Write the events of the calls that have ended; the metrics that follow from them."""
        if (recorder := self._recorder) is None:
            return {}
        iteration = stages.iteration if isinstance(stages, IterationSeconds) else None
        records, found = recorder.take(step, iteration, line.get("time/iteration", 0.0))
        self._files.append("events.jsonl", [as_line(record) for record in records])
        if "perf/tokens_per_second" in line and recorder.devices:
            found["perf/tokens_per_second_per_device"] = line["perf/tokens_per_second"] / recorder.devices
        return found

    def _record(self, session: Session, newest: bool) -> None:
        """Write the session's events, unless another tracker does; the `newest` one takes over."""
        if self._recorder is not None and self._recorder.session is session:
            return
        known = [part for part in session.parts.values() if isinstance(part, Tracker) and part is not self]
        for other in [part for part in known if part._recorder is not None and part._recorder.session is session]:
            if not newest:
                return
            other._take_events(other._step, None, {})
            other._recorder = None
        self._recorder = EventRecorder(session)

    def _register(self, newest: bool = False) -> Session | None:
        """Note this tracker in the session, if there is one, and for the end of the program."""
        self._end_first()
        if (session := Session.existing()) is not None and not self._closed:
            session.run_directory = session.run_directory or self.directory
            here = (n for n, part in session.parts.items() if getattr(part, "directory", None) == self.directory)
            session.attach(self, next(here, None))
            self._record(session, newest)
        return session

    def _end_first(self) -> None:
        """Run `finish` at program exit before functions that were registered earlier, such as those of loggers."""
        atexit.unregister(self.finish_late)
        if not self._closed:
            atexit.register(self.finish_late)

    def _close(self, failed: bool) -> None:
        atexit.unregister(self.finish_late)
        self._closed = True
        self._take_events(self._step, None, {})
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        self._files.write()
        if missing := self._files.missing():
            logger.warning("%s lacks what could not be written: %s.", self.directory, missing)
        if self._tables:
            self._send_tables()
        for thread in self._threads:
            thread.put("close", failed)
        for name in self._wait_for_loggers(_CLOSE_SECONDS, again=True):
            logger.warning("%s has not answered for %.0f s: it may lack metrics.", name, _CLOSE_SECONDS)
        for shown in [self._display, *self._plots]:
            with self._files.forgiving("the display"):
                if shown is not None:
                    shown.close()
        self._owner.release()

    def _wait_for_loggers(self, seconds: float, again: bool = False) -> list[str]:
        """Wait until the loggers have been called for all metrics. Returns the names of late ones."""
        due = time.monotonic() + seconds
        left = [one for one in self._threads if not one.wait(max(due - time.monotonic(), 0.0), again=again)]
        return [thread.name for thread in left]


def _failed() -> bool:
    """Whether an exception, including Ctrl-C, has ended the program or is propagating."""
    return getattr(sys, "last_value", None) is not None or sys.exc_info()[1] is not None


def thumbnails(samples: Batch | BatchRef, rows: int) -> Any:
    """The column `images` of the first rows, small, if a loader has made patches of them; no column otherwise."""
    if not isinstance(samples, BatchRef) or not {"images", PIXELS} <= {*samples.columns}:
        return samples.select()[: max(rows, 0)]
    return Session.current().controller.thumbnails(samples.select("images")[: max(rows, 0)])


def _sample_rows(batch: Batch | BatchRef, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """One object per row, for `samples.jsonl`; waits for a batch by reference.

    `group` numbers the prompts of the batch; `tokens` are the texts of the response's tokens, with a tokenizer.
    Errors: WorkerError of the call that failed.
    """
    rows = (batch.get() if isinstance(batch, BatchRef) else batch).to_dicts()
    groups: dict[int, int] = {}
    out = []
    for number, row in enumerate(rows):
        ids = row.pop("response_ids", None)
        group = groups.setdefault(row.pop("group_id", number), len(groups))
        tokens = {"tokens": [tokenizer.raw.decode([one]) for one in ids]} if tokenizer and ids is not None else {}
        out.append({"group": group, **{name: _short(value) for name, value in row.items()}, **tokens})
    return out


def _short(value: Any) -> Any:
    """Numbers with six digits: float32 has no more. JSON has no NaN: None."""
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value

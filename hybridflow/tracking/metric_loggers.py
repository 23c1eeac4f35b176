"""Loggers that a Tracker sends metrics to besides its files: TensorBoard, Weights & Biases, MLflow, or a user's own."""

from __future__ import annotations

import importlib
import io
import json
import logging
import numbers
import os
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hybridflow.batch.markup import markdown
from hybridflow.errors import ConfigError, nearest
from hybridflow.tracking.kept_files import KeptFiles

logger = logging.getLogger(__name__)


@runtime_checkable
class _Resolvable(Protocol):
    def get(self) -> Mapping[str, float]: ...


Metrics = Mapping[str, float] | _Resolvable
"""A flat dict of metrics, or anything whose `get()` returns one (a future of a group call)."""


@runtime_checkable
class MetricLogger(Protocol):
    """Receives the metrics of a run, from one thread. An exception does not stop the run: the call is made again later.

    `open` comes before the first `log`, and again after each `Tracker.load_state`; `run` is the same id in every part
    of a resumed run, and points after `step` are of a lost part (0: a new run). Metrics may be NaN or infinite. A
    method `samples(step, title, columns, rows)`, where there is one, gets tables of numbers, texts, booleans and None.
    """

    def open(self, directory: Path, run: str, step: int) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self, failed: bool) -> None: ...


class TensorBoard:
    """Event files in `<directory>/tensorboard`, made of complete records: `tensorboard --logdir DIRECTORY`."""

    def __init__(self) -> None:
        self._event = _installed("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summary = _installed("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._record = _installed("tensorboard.summary.writer.record_writer", "tensorboard").RecordWriter

    def open(self, directory: Path, run: str, step: int) -> None:
        self._files = KeptFiles(folder := directory / "tensorboard")
        folder.mkdir(parents=True, exist_ok=True)
        numbers = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
        number = max([int(time.time()), *(int(found) + 1 for found in numbers if found.isdecimal())])
        self._name = f"events.out.tfevents.{number:010d}"  # readers take files in the order of their names
        self._write(file_version="brain.Event:2")
        start = self._event.SessionLog(status=self._event.SessionLog.START)
        self._write(step=step + 1, session_log=start)  # hides the points from this step on in earlier files

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary(value=values))

    def samples(self, step: int, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        text = markdown(columns, [["" if cell is None else str(cell) for cell in row] for row in rows])
        value = self._summary.Value(tag=f"{title}/text_summary")
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = 7  # DT_STRING
        value.tensor.string_val.append(text.encode())
        value.tensor.tensor_shape.dim.add(size=1)
        self._write(step=step, summary=self._summary(value=[value]))

    def close(self, failed: bool) -> None:
        self._files.write()
        if missing := self._files.missing():
            raise OSError(f"not written: {missing}")

    def _write(self, **fields: Any) -> None:
        event = self._event.Event(wall_time=time.time(), **fields)
        self._record(record := io.BytesIO()).write(event.SerializeToString())
        self._files.append(self._name, [record.getvalue()])


class WandB:
    """Weights & Biases, in the project `WANDB_PROJECT` (else "hybridflow"); `WANDB_MODE=offline` needs no account.

    A resumed run keeps its id. Points of a lost part stay, since W&B cannot remove them: `step` is the x-axis.
    """

    def __init__(self) -> None:
        self._wandb = _installed("wandb", "wandb")
        self._run: Any = None
        if self._wandb.setup().settings.mode == "online" and not self._wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "Tracker(to='wandb'): no API key was found. Call `wandb login` once, or set WANDB_API_KEY, or set "
                "WANDB_MODE=offline and upload the run later with `wandb sync`."
            )

    def open(self, directory: Path, run: str, step: int) -> None:
        if self._run is not None and self._run.id == run:
            return
        self.close(False)
        settings = self._wandb.Settings(console="off", init_timeout=30)  # standard output stays the display's
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "hybridflow"), name=directory.name, id=run, dir=directory,
            resume="allow", reinit="create_new", settings=settings,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # W&B's own step never goes back

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        table = self._wandb.Table(columns=columns, data=rows, allow_mixed_types=True)  # of this step: it never changes
        self._run.log({"step": step, title: table})

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))
            self._run = None


class MLflow:
    """MLflow, at `MLFLOW_TRACKING_URI`, in the experiment `MLFLOW_EXPERIMENT_NAME` (else "hybridflow").

    A resumed run is found by its tag `hybridflow.run`. Points of a lost part stay, since MLflow cannot remove them.
    """

    def __init__(self) -> None:
        self._mlflow = _installed("mlflow", "mlflow")

    def open(self, directory: Path, run: str, step: int) -> None:
        self._client = self._mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "hybridflow")
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        runs = self._client.search_runs([experiment], f"tags.`hybridflow.run` = '{run}'", max_results=1)
        tags = {"hybridflow.run": run}
        opened = runs[0] if runs else self._client.create_run(experiment, tags=tags, run_name=directory.name)
        self._id = opened.info.run_id
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        plain = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in metrics.items()}
        points = [self._mlflow.entities.Metric(name, value, now, step) for name, value in plain.items()]
        for first in range(0, len(points), 1000):  # MLflow's limit
            self._client.log_batch(self._id, metrics=points[first : first + 1000])

    def samples(self, step: int, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        """To the end of the run's table `title`."""
        cells = {name: [row[at] for row in rows] for at, name in enumerate(columns)}
        self._client.log_table(self._id, {"step": [step] * len(rows), **cells}, f"{title}.json")

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


_LOGGERS: dict[str, Callable[[], MetricLogger]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
Destinations = str | MetricLogger | Iterable[str | MetricLogger]
"""Names of loggers ("tensorboard", "wandb", "mlflow") and objects that are MetricLoggers."""


def find_loggers(to: Destinations) -> dict[str, MetricLogger]:
    """The loggers by name. Errors: ConfigError for an unknown or repeated one, and for a missing package."""
    found: dict[str, MetricLogger] = {}
    for item in to if isinstance(to, Iterable) and not isinstance(to, str | MetricLogger) else (to,):
        if isinstance(item, str):
            if item not in _LOGGERS:
                raise ConfigError(f"Tracker(to={item!r}): there is no such logger.{nearest(item, _LOGGERS)}")
            name, one = item, _LOGGERS[item]()
        elif isinstance(item, MetricLogger) and not isinstance(item, type):
            name, one = type(item).__name__, item
        else:
            raise ConfigError(
                f"Tracker(to=...) was given {item!r:.80}: give names ({', '.join(_LOGGERS)}) or objects with the "
                f"methods open, log and close of hybridflow.tracking.metric_loggers.MetricLogger."
            )
        if name in found:
            raise ConfigError(f"Tracker(to=...) names {name!r} twice: name each logger once.")
        found[name] = one
    return found


class LoggerThread:
    """Calls one logger from a thread of its own: neither its errors nor its delays stop the run.

    Calls that fail are kept and made again with each next one; each kind of error is logged once. `opened` is called in
    the thread after each successful `open`.
    """

    def __init__(self, name: str, target: MetricLogger, opened: Callable[[], None]) -> None:
        self.name, self._target, self._after_open = name, target, opened
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._kept: list[tuple[str, tuple[Any, ...]]] = []
        self._is_open, self._why, self._reported = False, "", set[type]()
        self._mark = threading.Event()
        self._mark.set()
        threading.Thread(target=self._work, name=f"tracker {name}", daemon=True).start()

    def put(self, method: str, *arguments: Any) -> None:
        """Call this method of the logger, later, if it has it."""
        if hasattr(self._target, method):
            self._calls.put((method, arguments))

    def wait(self, seconds: float, *, again: bool = False) -> bool:
        """Whether all earlier calls have been tried; without `again`, only if no earlier wait has been in vain."""
        if again or self._mark.is_set():
            self._mark = threading.Event()
            self._calls.put(("", (self._mark,)))
            self._mark.wait(seconds)
        return self._mark.is_set()

    def _work(self) -> None:
        while True:
            calls = [self._calls.get()]
            while not self._calls.empty():  # one attempt for all: a failing one may take minutes
                calls.append(self._calls.get())
            for method, arguments in calls:
                if method == "open":  # earlier calls are of a part that is lost
                    self._kept, self._is_open = [], False
                if method:
                    self._kept.append((method, arguments))
            self._kept = [call for call in self._kept if not self._succeeds(*call)]
            lost = Counter(method for method, _ in self._kept)
            for what, number in (("the metrics of %d iterations", lost["log"]), ("%d tables", lost["samples"])):
                if number and any(method == "close" for method, _ in calls):
                    logger.warning(f"%s lacks {what} (%s).", self.name, number, self._why)
            for method, arguments in calls:
                if not method:
                    arguments[0].set()

    def _succeeds(self, method: str, arguments: tuple[Any, ...]) -> bool:
        if method != "open" and not self._is_open:
            return False
        try:
            getattr(self._target, method)(*arguments)
        except Exception as error:
            self._why = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
            if type(error) not in self._reported:
                self._reported.add(type(error))
                logger.warning("%s failed: %s. The run continues; metrics are sent again later.", self.name, self._why)
            return False
        if method == "open":
            self._is_open = True
            self._after_open()
        return True


def _installed(module: str, package: str) -> Any:
    """The module. Errors: ConfigError naming the extra when it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        what = package if package == "tensorboard" else f'"hybridflow[{package}]"'
        raise ConfigError(f"Tracker(to={package!r}): {error}. Install it: pip install {what}") from error


def as_table(rows: Sequence[Mapping[str, Any]], without: Collection[str] = ()) -> tuple[list[str], list[list[Any]]]:
    """Columns and cells of samples, in plain values: what is neither number nor text becomes JSON."""
    columns = list(dict.fromkeys(name for row in rows for name in row if name not in without))
    return columns, [[_cell(row.get(name)) for name in columns] for row in rows]


def _cell(value: Any) -> Any:
    plain = value.tolist() if hasattr(value, "tolist") else value
    if plain is None or isinstance(plain, bool | int | float):
        return plain
    text = plain if isinstance(plain, str) else json.dumps(plain, default=str)
    return text.encode(errors="replace").decode()  # half surrogates fit into no file


def resolve(part: Metrics) -> dict[str, float]:
    """The metrics as floats. Errors: ConfigError naming the metric."""
    found = part if isinstance(part, Mapping) else part.get() if isinstance(part, _Resolvable) else part
    if not isinstance(found, Mapping):
        raise ConfigError(f"tracker.log was given {found!r:.80}; it takes dicts of numbers, or futures of them.")
    out: dict[str, float] = {}
    for name, value in dict[str, Any](found).items():
        plain = value.tolist() if hasattr(value, "tolist") else value  # torch and numpy scalars
        if not isinstance(plain, numbers.Real):
            raise ConfigError(f"the metric {name!r} is {value!r:.80}; tracker.log takes numbers.")
        out[str(name)] = float(plain)
    return out

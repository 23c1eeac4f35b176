"""Run: the directory of a training run with its record, its checkpoints and its evaluation, around the loop."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.session import Session
from hybridflow.data.tokenizer import TokenizerLike
from hybridflow.engines.checkpoint.manifest import step_directory
from hybridflow.engines.checkpoint.remote_directory import RemoteDirectory
from hybridflow.held_out import HeldOut, HeldOutLoss
from hybridflow.run.checkpoints import Checkpoints
from hybridflow.run.run_state import metric_values
from hybridflow.settings import by_name, is_address, require, staging_directory
from hybridflow.tracking.metric_loggers import Destinations
from hybridflow.tracking.tracker import Tracker


class Run:
    """A run in `directory`: a Tracker there, Checkpoints below it, and what a loop does for both.

        run = hf.Run("runs/first")
        for prompts in run.loop(loader):
            batch = actor.generate_sequences(prompts)
            ...
            run.step(batch, actor.update_actor(batch))
        run.finish()

    At an address such as `s3://bucket/run` are the checkpoints (see Checkpoints); the record stays in `staging`. `to`,
    `total`, `config` and `console` are those of Tracker; `every`, `keep`, `best`, `resume`, `batches` and `in_memory`
    those of Checkpoints. Every `samples` iterations some rows are written, with a `tokenizer` (the model's directory)
    token by token. `held_out` is measured before and after the loop, and in between as it says; without `best` its
    metric chooses the best checkpoint, which is noted. `stop(metrics)`, of the metrics of an iteration, ends the loop
    one iteration later, as if the loader had ended: `stop=lambda metrics: metrics["reward/mean"] > 0.9`. `tracker` and
    `checkpoints` have further methods.

    Errors: as Tracker and Checkpoints.
    """

    @by_name
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        to: Destinations = (),
        total: int | None = None,
        config: Mapping[str, Any] | None = None,
        console: bool = True,
        every: int | None = 20,
        keep: int = 3,
        best: str | None = None,
        resume: str | os.PathLike[str] = "auto",
        batches: bool = False,
        in_memory: bool = False,
        staging: str | os.PathLike[str] | None = None,
        samples: int = 10,
        tokenizer: TokenizerLike | None = None,
        held_out: HeldOut | HeldOutLoss | None = None,
        stop: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> None:
        best = held_out.best if best is None and held_out is not None and held_out.every else best
        where = RemoteDirectory(directory).address if is_address(directory) else os.fspath(directory)
        home = Path(staging or staging_directory(where)) if is_address(where) else Path(where)
        self.tracker = Tracker(home, to=to, total=total, config=config, console=console)
        saved: dict[str, Any] = {"every": every, "keep": keep, "best": best, "resume": resume, "batches": batches}
        saved["in_memory"] = in_memory
        saved["staging"] = None if staging is None else home / "checkpoints"
        self.checkpoints = Checkpoints(f"{where}/checkpoints", **saved)
        self.directory, self.held_out = self.tracker.directory, held_out
        self._samples, self._tokenizer = samples, tokenizer
        self._stop, self._metrics = stop, deque[tuple[int, tuple[Any, ...]]](maxlen=2)  # with the restarts before
        self.checkpoints.stop = self._stops

    def loop(self, loader: Any) -> Iterator[Any]:
        """`loader`'s batches, from where the run continues: `Checkpoints.resume`, with `held_out` before and after."""
        if isinstance(self.held_out, HeldOut):
            self.held_out.check_loader(loader)
        batches = self.checkpoints.resume(loader)
        if self.held_out is not None and not self.checkpoints.done:
            self.held_out.measure("before", self.tracker)
        yield from batches
        if self.held_out is not None:
            self.held_out.measure("after", self.tracker)

    def step(self, batch: Batch | BatchRef, *metrics: Any) -> None:
        """An iteration has been issued: its `metrics`, and those of `batch`, are logged; samples, evaluation and
        checkpoint follow where it is time for them. Errors: as `Tracker.log` and `Checkpoints.step`."""
        right = isinstance(batch, Batch | BatchRef)
        require(right, f"run.step(batch, *metrics): the batch comes first, and this is a {type(batch).__name__}.")
        found = metrics if isinstance(batch, Batch) else (batch.metrics(), *metrics)
        if self.held_out is not None:
            found = (*found, self.held_out.after(self.checkpoints.done + 1))
        self.tracker.log(*found)
        self.tracker.samples(batch, every=self._samples, tokenizer=self._tokenizer)
        self._metrics.append((self.checkpoints.restarts, found))
        self.checkpoints.step(*found)

    def _stops(self) -> bool:
        """By the metrics of the iteration before the last, for which the tracker has waited."""
        if self._stop is None or len(self._metrics) < 2 or Session.current().traces:
            return False
        restarts, given = self._metrics[0]
        if restarts < self.checkpoints.restarts:  # the lost hosts had that iteration, which is done again
            return False
        found = metric_values(given)
        return bool(self._stop({name: math.nan if value is None else value for name, value in found.items()}))

    def finish(self) -> None:
        """Wait for the last iteration and write what is left; the best checkpoint becomes a note of the run."""
        if (best := self.checkpoints.best_saved) is not None:
            name = step_directory(self.directory, best[0]).name
            self.tracker.note(best_checkpoint=f"{name}, {self.checkpoints.best} {best[1]:.3f}")
        self.tracker.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.tracker.__exit__(kind, error, trace)

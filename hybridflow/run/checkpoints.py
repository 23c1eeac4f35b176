"""Checkpoints: saves the state of a run every few iterations, and continues it after its driver or a host has died.

checkpoints = hf.Checkpoints("runs/first/checkpoints", every=20, keep=3)
for prompts in checkpoints.resume(loader):
    ...
    tracker.log(batch.metrics(), metrics)
    checkpoints.step(batch.metrics())
"""

from __future__ import annotations

import logging
import os
import re
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

from hybridflow.cluster.recorded_calls import BATCHES, BatchRecords, Recorder
from hybridflow.cluster.session import Session
from hybridflow.engines.checkpoint.manifest import (
    MANIFEST,
    complete_steps,
    saved_steps,
    step_directory,
)
from hybridflow.engines.checkpoint.remote_directory import fetched_checkpoint
from hybridflow.errors import (
    BrokenGroupError,
    CheckpointError,
    ConfigError,
    HostLostError,
    HybridFlowError,
    PlacementError,
    WaitTimeoutError,
    WorkerError,
)
from hybridflow.run.checkpoint_store import CheckpointStore
from hybridflow.run.recovery import needs_moments, rebuild, recall, replace_lost
from hybridflow.run.run_state import (
    Moment,
    RunParts,
    Saving,
    StateLayouts,
    check_machines,
    metric_values,
    restore,
    verified,
)
from hybridflow.settings import by_name, is_address, require
from hybridflow.streams.stream import ResponseStream
from hybridflow.tracking.run_lock import RunLock

logger = logging.getLogger(__name__)
_END_SECONDS = 60.0
_UPLOAD_SECONDS, _TERMINATED_SECONDS = 600.0, 20.0  # without progress; a driver that was asked to end has 30 s
_STOP_SECONDS = 5.0  # for the file that is being sent
_MOMENTS = 4  # the driver is at most two iterations ahead of the hosts
_LOST = (BrokenGroupError, HostLostError, WaitTimeoutError)


class Checkpoints:
    """Checkpoints of a run in `directory`, which all nodes see: `step-00000020` after 20 iterations, and so on.

    They contain every group of the session (parameters, optimizer state, learning-rate schedule), KL and Lagrange
    coefficients, the random state of every process, the loaders' positions, trackers, and further `parts` (objects with
    `state()` and `load_state(state)`, by name); a list or mapping `only` names all parts instead. A run continues in
    any layout and on any number of devices; in the same layout exactly.

    `every` iterations (None: only on request and at the end) a checkpoint is made of what the calls issued so far will
    have done: training continues while the ranks write (`asynchronous=False` waits), at most one at a time. The newest
    `keep` stay, and with `best` the one with the highest value of that metric of `step` ("-name": the lowest).
    `on_failure`: "raise" reports a failed save at the next `step`, "continue" logs it and tries again at the next one.
    `batches` also keeps what calls have generated since the oldest of these checkpoints, for `hybridflow replay`.

    An address such as `s3://bucket/run`, of fsspec, has copies of them: they are written to `staging` (default: below
    $HYBRIDFLOW_STAGING, or ~/.cache/hybridflow/staging; with several machines a directory that all see) and sent in the
    background, with `keep` and `best` there, too. While it cannot be reached, training continues; the end of the loop
    waits for it, up to 600 s without progress. The newest checkpoint that is complete, here or there, is continued.

    `resume`: "auto" continues a run that has not ended, "never" starts anew, a path continues from that checkpoint.
    Checkpoints that are not continued are set aside, as `<directory>.1` and so on. Up to `max_restarts` times a lost
    host is replaced: pools and groups are built again in this driver, and the run continues from the newest checkpoint;
    from the last iteration that was done, if the pools that lost hosts have no group that trains.
    With `in_memory` the ranks also put their state into the memory of two machines after every iteration, and the run
    continues from there, without the disk, unless both are lost.
    Errors that the loop's own code meets, in a `.get()`, end the loop; `resume(loader)` once more does the same then.

    The first SIGTERM or Ctrl-C makes `step` save and end the program; a second one ends it at once.

    Errors: ConfigError.
    """

    @by_name
    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | None = 20,
        keep: int = 3,
        best: str | None = None,
        resume: str | os.PathLike[str] = "auto",
        parts: Mapping[str, Any] | None = None,
        only: Iterable[Any] | Mapping[str, Any] | None = None,
        asynchronous: bool = True,
        max_restarts: int = 3,
        on_failure: str = "raise",
        batches: bool = False,
        in_memory: bool = False,
        staging: str | os.PathLike[str] | None = None,
    ) -> None:
        require(every is None or (type(every) is int and every >= 1), f"every={every!r}: give iterations, or None.")
        require(type(keep) is int and keep >= 1, f"keep={keep!r}: at least the newest checkpoint is kept.")
        require(best is None or (isinstance(best, str) and bool(best)), f"best={best!r}: give a metric's name.")
        good = type(max_restarts) is int and max_restarts >= 0
        require(good, f"max_restarts={max_restarts!r} must be a whole number of at least 0.")
        require(on_failure in ("raise", "continue"), f"on_failure={on_failure!r}: give 'raise' or 'continue'.")
        for name, value in (("asynchronous", asynchronous), ("in_memory", in_memory)):
            require(type(value) is bool, f"{name}={value!r}: give True or False.")
        good = type(batches) is bool and (every is not None or not batches)
        require(good, f"batches={batches!r}, every={every!r}: give True or False; True keeps them with checkpoints.")
        require(staging is None or is_address(directory), f"staging={staging!r} is for an address such as s3://bucket.")
        self._store, self._shared = CheckpointStore(directory, staging, keep, best), staging is not None
        remote, self.directory = self._store.remote, self._store.directory
        if remote is not None and (Session.replay is None or getattr(Session.replay, "checks", False)):
            remote.check_writable()
        self._warned = False
        self.every, self.keep, self.best, self.max_restarts = every, keep, best, 0 if Session.replay else max_restarts
        self._mode, self._asynchronous, self._on_failure = os.fspath(resume), asynchronous, on_failure
        self._replay, self._records, self._record = Session.replay, BatchRecords(self.directory / BATCHES), batches
        self._named, self._only = dict(parts or {}), only
        locks = [self.directory.with_name(f".{self.directory.name}.lock"), *([] if remote is None else [remote.lock])]
        self._owners = [RunLock(lock, f"Checkpoints({str(directory)!r})") for lock in locks if self._replay is None]
        for owner in self._owners:
            owner.take()
        self._step, self._saved = 0, -1
        self._saving: Saving | None = None
        self._metrics: tuple[Any, ...] = ()
        self._loop: weakref.ref[Generator[Any]] | None = None
        self._exhausted, self._stopped = False, ""
        self._moments: deque[Moment] = deque(maxlen=_MOMENTS)
        self._in_memory, self._layouts, self._unkept = in_memory, StateLayouts(), set[str]()
        self.restarts = 0
        self.stop: Callable[[], bool] = lambda: False  # of a loop, after an iteration: `hf.Run`

    @property
    def done(self) -> int:
        """Iterations that are done, those before the run was resumed included."""
        return self._step

    @property
    def newest(self) -> Path | None:
        """The checkpoint from which a run continues now: the newest that is complete; its files are not read."""
        return self._store.newest

    @property
    def best_checkpoint(self) -> tuple[Path, float] | None:
        """The checkpoint with the best value of the metric `best`, and the value, if there is one."""
        if (found := self.best_saved) is None:
            return None
        path = step_directory(self.directory, found[0])
        return path if path.exists() else self._store.fetch(found[0]), found[1]

    @property
    def best_saved(self) -> tuple[int, float] | None:
        """The step and the value of the best checkpoint, which may be at the address only."""
        return self._store.best

    # Continuing

    def resume(self, loader: Any) -> Iterator[Any]:
        """Load the checkpoint from which the run continues, if there is one, and iterate over `loader`'s next batches.

        A damaged checkpoint is skipped with a warning that names the file. Errors: CheckpointError for a path that is
        not a checkpoint, or when none of the run's checkpoints is whole; ConfigError for other groups, data or
        settings than those of the saved run.
        """
        session = Session.current()
        if self._record and isinstance(loader, ResponseStream):
            raise ConfigError("batches=True: hf.stream and hf.Elastic generate across iterations and are not recorded.")
        if not (callable(getattr(loader, "state", None)) and callable(getattr(loader, "load_state", None))):
            raise ConfigError(
                f"resume({type(loader).__name__}): give a loader with state() and load_state(state), such as "
                f"hf.PromptLoader."
            )
        if self._loop is not None and not self._exhausted:
            if (loop := self._loop()) is not None:
                loop.close()
            self._count_restart("the loop was left by an error")
            self._rebuild(session)
            return self._iterate(session, loader)
        for owner in self._owners:
            owner.take()
        session.attach(loader, "loader")
        for name, part in self._named.items():
            session.attach(part, name)
        session.run_directory = session.run_directory or getattr(self._replay, "directory", self.directory.parent)
        session.before_shutdown(self._end)
        if self._replay is None:
            if self._store.remote is not None:
                check_machines(session, self._store.remote.address, self._shared)
            self._store.open()
        with closing(self._candidates(loader)) as candidates:  # a copy that was fetched for it is removed
            start = self._load(session, candidates)
        if self._replay is None:
            ours = start is not None and start.parent == self.directory
            batches = [] if ours or not self._records.steps else [self._records.directory]
            self._store.continue_from(self._step if ours else None, batches)
            session.recorded = Recorder.start(self._records, self._step if ours else 0, self._record)
            self._store.start()
        else:
            session.recorded = self._replay.recorded
        self._note(session)
        return self._iterate(session, loader)

    def _iterate(self, session: Session, loader: Any) -> Iterator[Any]:
        loop = self._batches(session, loader)
        self._exhausted, self._stopped = False, ""
        self._loop = weakref.ref(loop)  # a loop that is left gives the signals back
        return loop

    def _candidates(self, loader: Any) -> Generator[Path]:
        """The checkpoints to continue from, the best choice first. Errors: CheckpointError for a path without any."""
        if self._replay is not None:
            yield from self._replay.checkpoints
            return
        if is_address(self._mode):
            with fetched_checkpoint(self._mode) as path:
                yield path
        elif self._mode not in ("auto", "never"):
            chosen = Path(os.path.abspath(self._mode))
            below = saved_steps(chosen) or saved_steps(chosen / "checkpoints")
            if not (found := [chosen] if os.path.lexists(chosen / MANIFEST) else below):
                raise CheckpointError(f"resume={self._mode!r}: {chosen} is not a checkpoint and has none.")
            yield from found
        elif self._mode == "auto" and self._store.has_ended(getattr(loader, "steps", None)):
            logger.warning("%s: this run has ended; its checkpoints are set aside.", self.directory)
        elif self._mode == "auto":
            yield from self._store.steps()

    def _load(self, session: Session, candidates: Iterable[Path]) -> Path | None:
        """Load the first checkpoint that is whole. Errors: CheckpointError when none of several is."""
        parts, damaged = RunParts.of(session, self._only), list[str]()
        for path in candidates:
            try:
                manifest = verified(session, path, parts)
            except CheckpointError as error:
                damaged.append(str(error))
                logger.warning("%s is skipped: %s", path, error)
                continue
            self._step = restore(session, path, manifest, parts, everything=self._only is None)
            session.iterations.done_before = self._step
            logger.warning("continuing from %s: %d iterations are done", path, self._step)
            return path
        if damaged:
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {self.directory} is whole. resume='never' starts anew and "
                f"sets them aside. The first: {damaged[0]}"
            )
        return None

    def _batches(self, session: Session, loader: Any) -> Generator[Any]:
        """Errors: the first that is not of lost hosts, or of one restart too many."""
        lost: HybridFlowError | None = None
        try:
            while True:
                try:
                    if lost is not None:
                        self._rebuild(session)
                    lost = None
                    with session.recovering(self._may_restart), session.backend.termination.deferred():
                        order = None if session.recorded is None else session.recorded.order
                        for batch in loader if order is None else order.batches(loader, lambda: self._step):
                            yield batch
                            session.raise_deferred()
                            if self.stop():
                                session.iterations.drain()
                                self._stopped = f" of {getattr(loader, 'steps', None)}"
                                break
                        session.raise_deferred()
                    if self._step and self._saved != self._step:
                        self._save(session)
                    self._report(wait=True)
                    self._send()
                    if self._replay is not None:
                        self._replay.finished()
                    if status := session.backend.termination.asked:
                        raise SystemExit(status)
                    self._exhausted, session.recorded = True, None  # later loops number their own iterations
                    return
                except HybridFlowError as error:
                    if lost is not None:  # further hosts meanwhile: that is the next restart
                        error.add_note(f"The run could not be restarted after: {lost}")
                    if not self._may_restart(error):
                        raise
                    self._count_restart(str(error).splitlines()[0])
                    lost = error
        finally:
            session.iterations.done_before = 0

    def _may_restart(self, error: BaseException) -> bool:
        """Whether a host was lost or does not answer, and may be replaced once more."""
        lost = isinstance(error, _LOST) or isinstance(getattr(error, "cause", None), _LOST)
        return lost and self.restarts < self.max_restarts

    def _count_restart(self, reason: str) -> None:
        """Errors: PlacementError after `max_restarts` restarts."""
        if self.restarts >= self.max_restarts:
            raise PlacementError(f"the run failed again after {self.restarts} restarts (max_restarts): {reason}")
        self.restarts += 1
        logger.error("restart %d of %d: %s", self.restarts, self.max_restarts, reason)

    def _rebuild(self, session: Session) -> None:
        """Build pools and groups again, and continue from the newest checkpoint, or from the start without one."""
        if self._saving is not None:
            self._saving.cancel()
            self._saving = None
        self._saved = -1
        for way in (replace_lost, recall):
            try:
                moment = way(session, reversed(self._moments))
            except HybridFlowError as error:
                logger.warning("the run cannot continue from what is alive: %s", str(error).splitlines()[0])
                continue
            if moment is not None:
                self._step = session.iterations.done_before = moment.step
                self._moments.clear()
                self._note(session)
                return
        rebuild(session)
        self._moments.clear()
        self._step, session.iterations.done_before = 0, 0
        before = () if self._mode in ("auto", "never") else self._candidates(None)
        if self._load(session, chain(saved_steps(self.directory), before)) is None:
            for name, part in session.parts.items():
                part.load_state(session.first_states[name])
        self._note(session)

    def _note(self, session: Session) -> None:
        """Remember this moment, for the case that hosts are lost."""
        keeps, parts = self._in_memory and not session.traces, RunParts.of(session, self._only)
        try:
            if keeps or needs_moments(session):
                self._moments.append(moment := Moment.now(session, parts, self._step))
            if keeps:
                self._forget_images()
                moment.take_images(session, parts, self._layouts)
        except HybridFlowError as error:
            self._not_kept(self._step, error)

    def _forget_images(self) -> None:
        """Of moments before the newest whose images are there."""
        newer = False
        for old in reversed(self._moments):
            if newer:
                old.images.clear()
            elif old.images and all(one.answered for one in old.images.values()):
                try:
                    for one in old.images.values():
                        one.check()
                    newer = True
                except HybridFlowError as error:
                    self._not_kept(old.step, error)

    def _not_kept(self, step: int, error: HybridFlowError) -> None:
        """A warning, once per reason, where a run was asked to keep its state in memory."""
        reason = re.sub(r"\d+", "", said := str(error).splitlines()[0])
        level = logging.WARNING if self._in_memory and reason not in self._unkept else logging.INFO
        self._unkept.add(reason)
        logger.log(level, "iteration %d is not kept in memory: %s", step, said)

    # Saving

    def step(self, *metrics: Any) -> None:
        """An iteration has been issued: save if it is time to. `metrics` as for `Tracker.log`; `best` is one of them.

        Errors: CheckpointError of the last save, unless `on_failure="continue"`. SystemExit (143, 130) after the save
        that SIGTERM or Ctrl-C asked for.
        """
        session = Session.current()
        self._step, self._metrics = self._step + 1, metrics
        if self.restarts < self.max_restarts:
            self._note(session)
        if session.deferred is not None:
            return
        if session.recorded is not None:
            session.recorded.ended(self._step)
        self._report()
        status = session.backend.termination.asked
        if status or (self.every is not None and self._step % self.every == 0):
            self._save(session)
            if status or not self._asynchronous:
                self._report(wait=True)
        if status:
            self._send()
            raise SystemExit(status)

    def save(self) -> Path:
        """The checkpoint of the iterations so far, complete. Errors: CheckpointError."""
        self._save(Session.current())
        if (saving := self._saving) is not None:
            saving.result()
        self._report(wait=True)
        return step_directory(self.directory, self._step)

    def _save(self, session: Session) -> None:
        self._report(wait=True)  # one at a time
        target = step_directory(self.directory, self._step)
        if target.exists() or self._replay is not None:
            return
        given = self._metrics
        try:
            parts = RunParts.of(session, self._only)
            self._saving = Saving(session, target, parts, self._step, lambda: metric_values(given))
        except CheckpointError as error:
            self._failed(error)
        except (WorkerError, WaitTimeoutError) as error:
            if not session.defer(error):
                raise
        self._saved = self._step

    def _report(self, wait: bool = False) -> None:
        """Take note of a save that has ended. Errors: CheckpointError when it failed, unless failures are logged."""
        saving = self._saving
        if saving is None or (saving.running and not wait):
            return
        self._saving = None
        try:
            saving.result()
        except CheckpointError as error:
            self._failed(error)
        else:
            name = (self.best or "").removeprefix("-")
            _, saved = next(complete_steps(self.directory), (None, None))
            if name and saved is not None and name not in saved.metrics and not self._warned:
                self._warned = True
                logger.warning(
                    "Checkpoints(best=%r): checkpoint %d has no such metric and cannot be the best. Measure it where "
                    "checkpoints.done + 1, which counts on after a resume, is a multiple of every=%s, for step().",
                    *(self.best, self._saved, self.every),
                )
            if (oldest := self._store.prune()) is not None:
                self._records.drop(0, oldest)

    def _send(self, ending: bool = False) -> None:
        """Wait for uploads. Errors: CheckpointError where they stand still, unless failures are logged."""
        asked = Session.current().backend.termination.asked
        if asked and ending:  # it has waited
            return
        seconds = _TERMINATED_SECONDS if asked else _END_SECONDS if ending else _UPLOAD_SECONDS
        try:
            self._store.wait(seconds, whole=bool(asked))
        except CheckpointError as error:
            if asked or ending:
                logger.error("%s", error)
            else:
                self._failed(error)

    def _failed(self, error: CheckpointError) -> None:
        if self._on_failure == "raise":
            raise error
        logger.error("%s The run continues without it.", error)

    def _end(self) -> None:
        """At the end of the session: complete the save under way; a loop that ended regularly has ended the run."""
        if self._saving is not None and not self._exhausted:
            self._saving.wait(_END_SECONDS)
            self._saving.cancel()
        try:
            self._report(wait=True)
        except HybridFlowError as error:
            logger.warning("%s", str(error).splitlines()[0])
        ended = self._exhausted and self._replay is None
        if ended and sys.exc_info()[1] is None and getattr(sys, "last_value", None) is None:
            self._store.end(f"{self._step}{self._stopped}\n")
        self._send(ending=True)
        self._store.stop(_STOP_SECONDS)
        for owner in self._owners:
            owner.release()

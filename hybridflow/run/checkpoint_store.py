"""CheckpointStore: the checkpoints of a run in a directory, and copies at an address such as s3://bucket/run, sent by a
thread of the driver.

A checkpoint is complete in the staging directory before it is sent, newest first, and complete at the address when its
manifest is there, which is sent last. What was sent before, by this process or one that was killed, is not sent again.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridflow.engines.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    FileEntry,
    best_step,
    complete_steps,
    discard,
    leftovers,
    remove,
    saved_steps,
    set_aside,
    step_directory,
    step_of,
)
from hybridflow.engines.checkpoint.remote_directory import RemoteDirectory
from hybridflow.errors import CheckpointError
from hybridflow.settings import is_address, local_path, require, staging_directory

logger = logging.getLogger(__name__)
ENDED = "ended"  # the file of a run that has ended
_ADDRESS = "address"  # the file that says whose the staging directory is
_SENT = ".sent"  # in a checkpoint: which of its files are at the address
_LOOK_SECONDS, _FIRST_RETRY, _LONGEST_RETRY = 0.5, 1.0, 60.0


class CheckpointStore:
    """The checkpoints in a local directory, of which the newest `keep` and the `best` stay; of a run at an `address`
    this directory is `staging`, and the same checkpoints are at the address, too.

    `there` are the metrics of the checkpoints that are complete at the address, by step, newest first. One process
    sends to an address at a time. Errors: as RemoteDirectory; ConfigError for a file.
    """

    def __init__(
        self,
        address: str | os.PathLike[str],
        staging: str | os.PathLike[str] | None,
        keep: int,
        best: str | None,
    ) -> None:
        self.remote: Any = RemoteDirectory(address) if is_address(address) else None
        staging = staging_directory(self.remote.address) if self.remote and staging is None else staging
        self.directory = Path(os.path.abspath(local_path(address if staging is None else staging)))
        if os.path.lexists(self.directory):
            require(self.directory.is_dir(), f"Checkpoints({str(address)!r}): this is a file. Give a directory.")
        self._keep, self._best = keep, best
        self.there: dict[int, Mapping[str, float | None]] = {}
        self._sending: Path | None = None  # kept here meanwhile
        self._ended = ""  # the mark at the address
        self._begun = set[int]()  # steps with files at the address that are not complete
        self._known: dict[int, Mapping[str, float | None] | None] = {}  # those here; None: damaged
        self._why, self._progress = "", time.monotonic()
        self._thread: threading.Thread | None = None
        self._wake, self._stopped = threading.Event(), False

    @property
    def newest(self) -> Path | None:
        """The newest that is complete here; its files are not read."""
        return next((path for path, _ in complete_steps(self.directory)), None)

    @property
    def best(self) -> tuple[int, float] | None:
        """The step and the value of the best checkpoint, which may be at the address only."""
        if not self._best:  # else all manifests were read at every save
            return None
        here = ((one.step, one.metrics) for _, one in complete_steps(self.directory))
        return best_step([*here, *self.there.items()], self._best)

    def prune(self) -> int | None:
        """Remove those that are not kept; the oldest step that is, if there were others."""
        kept, surplus = (found := saved_steps(self.directory))[: self._keep], found[self._keep :]
        best, _ = (self.best if surplus else None) or (None, 0.0)
        for path in surplus:
            if step_of(path) != best and path != self._sending:  # a slow one would never be complete
                try:
                    remove(path)
                except OSError as error:  # the run does not need it to be gone
                    logger.warning("%s cannot be removed: %s", path, error)
        return step_of(kept[-1]) if surplus else None

    def end(self, mark: str) -> None:
        """Note that the run has ended."""
        with suppress(OSError):
            (self.directory / ENDED).write_text(mark)

    def has_ended(self, steps: int | None) -> bool:
        """Whether the run has ended, and a loader of this number of steps would not continue it."""
        here = [] if self.newest is None else [step_of(self.newest) or 0]
        done, mark = max([*self.there, *here], default=None), self._mark_here()
        whole = done is not None and steps is not None and done >= steps
        return bool(mark) and done is not None and (whole or mark == f"{done} of {steps}")

    def _mark_here(self) -> str:
        with suppress(OSError):
            return (self.directory / ENDED).read_text().strip()
        return ""

    # What is there, before the thread runs

    def open(self) -> None:
        """Remove what interrupted saves have left, and look at what is at the address; checkpoints here that a run
        elsewhere has replaced there are set aside.

        Errors: CheckpointError; ConfigError for the staging directory of another address."""
        for path in leftovers(self.directory):
            with suppress(OSError):
                discard(path)
        if self.remote is None:
            return
        if self._thread is not None:
            self.stop()
            self._thread.join()
        name = self.directory / _ADDRESS
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            found = name.read_text() if name.exists() else ""
            require(
                found in ("", self.remote.address),
                f"{self.directory} has the checkpoints of {found}, not those of {self.remote.address}: give this run a "
                f"staging= of its own, or remove {name} if the address was renamed.",
            )
            name.write_text(self.remote.address)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be written: {error.strerror}.") from error
        manifests = self.remote.complete_steps()
        self._known, self.there = {}, {step: one.metrics for step, one in manifests.items()}
        ids = {step: one.id for step, one in manifests.items()}
        here = {one.step: one.id for _, one in complete_steps(self.directory)}
        if any(ids.get(step, own) != own for step, own in here.items()):
            paths = {step_of(path) or 0: path for path in saved_steps(self.directory)}
            gone = [path for step, path in paths.items() if here.get(step, "") != ids.get(step)]
            aside = set_aside(self.directory, gone)
            logger.warning("%s is another run's: %d checkpoints here are in %s", self.remote.address, len(gone), aside)
        names = self.remote.sizes()
        steps = {step_of(Path(name.partition("/")[0])) for name in names}
        self._begun = {step for step in steps if step is not None} - self.there.keys()
        self._ended = self.remote.read(ENDED).decode(errors="replace").strip() if ENDED in names else ""
        if self._ended:
            self.end(self._ended)

    def steps(self) -> Generator[Path]:
        """The checkpoints of the run, newest first, those here before those at the address, which are fetched."""
        here = {step_of(path) or 0: path for path in saved_steps(self.directory)}
        for step in sorted({*here, *self.there}, reverse=True):
            if step in here:
                yield here[step]
            if step in self.there:
                yield self.fetch(step)

    def fetch(self, step: int) -> Path:
        """The checkpoint, copied to the staging directory. Errors: CheckpointError."""
        target = step_directory(self.directory, step)
        logger.warning("fetching %s from %s", target.name, self.remote.address)
        return self.remote.fetch_checkpoint(target.name, target)

    def continue_from(self, step: int | None, beside: Sequence[Path] = ()) -> None:
        """Move the checkpoints that are not the past of `step` (None: all), and `beside`, to `<directory>.1` and
        `<address>.1`, or the next free number; files are kept.

        Errors: CheckpointError."""
        (self.directory / ENDED).unlink(missing_ok=True)
        gone = [path for path in saved_steps(self.directory) if step is None or (step_of(path) or 0) > step]
        if gone or beside:
            aside, what = set_aside(self.directory, [*gone, *beside]), " and recorded batches" if beside else ""
            logger.warning("%d checkpoints%s that this run does not continue are in %s", len(gone), what, aside)
        if there := [one for one in self.there if step is None or one > step]:
            number = 1
            while (aside := RemoteDirectory(f"{self.remote.address}.{number}")).sizes():
                number += 1
            for one in there:
                self.remote.move(step_directory(Path(), one).name, aside, last=MANIFEST)
                del self.there[one]
            logger.warning("%d checkpoints that this run does not continue are in %s", len(there), aside.address)
        if self._ended:
            self.remote.remove(ENDED)
            self._ended = ""

    # The thread

    def start(self) -> None:
        if self.remote is None:
            return
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)
        self._thread.start()

    def stop(self, seconds: float = 0.0) -> None:
        """End the thread after the file that it is sending, for which this waits no longer than `seconds`."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None and seconds:
            self._thread.join(seconds)

    def wait(self, seconds: float, whole: bool = False) -> None:
        """Wait until all is sent, and no longer than `seconds` without progress, or `whole` with it.

        Errors: CheckpointError that says what was not sent, why, and where it lies."""
        if self._thread is None or self._stopped:
            return
        begin = self._progress = time.monotonic()
        self._wake.set()
        if left := self._names_left():
            logger.warning("waiting until %s is at %s", left, self.remote.address)
        while left := self._names_left():
            if time.monotonic() - (begin if whole else self._progress) > seconds:
                how = "" if whole else " without progress"
                raise CheckpointError(
                    f"{left} of {self.directory} is not at {self.remote.address} after {seconds:g} s{how}. {self._why} "
                    f"All stays in {self.directory}, and the same program sends it when it runs again."
                )
            time.sleep(0.02)

    def _run(self) -> None:
        delay = 0.0
        while not self._stopped:
            try:
                self._send_all()
            except (CheckpointError, OSError) as error:
                if not self._why:
                    say = "%s The run continues; checkpoints stay in %s and are sent later."
                    logger.warning(say, error, self.directory)
                self._why, delay = str(error), min(_LONGEST_RETRY, max(_FIRST_RETRY, 2 * delay))
            else:
                if self._why:
                    logger.warning("%s is reached again: all checkpoints are there", self.remote.address)
                self._why, delay = "", 0.0
            self._wake.wait(delay or _LOOK_SECONDS)
            self._wake.clear()

    def _here(self) -> dict[int, Mapping[str, float | None]]:
        """The metrics of the checkpoints here, newest first."""
        found = dict[int, Mapping[str, float | None]]()
        for path in saved_steps(self.directory):
            step = step_of(path) or 0
            if step not in self._known:
                try:
                    self._known[step] = CheckpointManifest.read(path).metrics
                except CheckpointError as error:
                    if not path.exists():
                        continue
                    self._known[step] = None
                    logger.error("%s is not sent: %s", path, error)
            if (metrics := self._known[step]) is not None:
                found[step] = metrics
        return found

    def _left(self) -> tuple[list[int], list[int]]:
        """The steps to send, and those to remove at the address, newest first."""
        here, there = self._here(), self.there
        wanted = self._kept(dict(sorted({**here, **there}.items(), reverse=True))) - there.keys()
        kept = self._kept(there)
        return [step for step in here if step in wanted], [step for step in there if step not in kept]

    def _kept(self, metrics: Mapping[int, Mapping[str, float | None]]) -> set[int]:
        best = best_step(metrics.items(), self._best)
        return {*list(metrics)[: self._keep], *(best[:1] if best else ())}

    def _names_left(self) -> str:
        send, remove = ([step_directory(Path(), step).name for step in steps] for steps in self._left())
        return ", ".join([*send, *(f"the removal of {name}" for name in remove), *[ENDED] * bool(self._mark())])

    def _mark(self) -> str:
        """What is still to be written at the address."""
        return mark if (mark := self._mark_here()) != self._ended else ""

    def _send_all(self) -> None:
        """Errors: CheckpointError."""
        while not self._stopped:
            waiting, surplus = self._left()
            for step in [*surplus, *(self._begun - self._here().keys())]:
                if self._stopped:
                    return
                self.remote.remove(step_directory(Path(), step).name, first=MANIFEST)
                self.there = {one: metrics for one, metrics in self.there.items() if one != step}
                self._begun.discard(step)
            if not waiting:
                break
            self._sending = step_directory(self.directory, waiting[0])
            try:
                self._send(self._sending)
            finally:
                self._sending = None
        if not self._stopped and (mark := self._mark()):
            self.remote.write(ENDED, mark.encode())
            self._ended = mark

    def _send(self, path: Path) -> None:
        """Errors: CheckpointError, unless the checkpoint has been removed here meanwhile."""
        step = step_of(path) or 0
        self._begun.add(step)
        try:
            manifest = CheckpointManifest.read(path)
            there = self.remote.sizes(path.name)
            if MANIFEST in there:  # of an upload that has no longer all of its files
                self.remote.remove(f"{path.name}/{MANIFEST}")
            missing, surplus = to_send(manifest.files, _sent(path), there)
            for name in surplus:
                if name != MANIFEST:
                    self.remote.remove(f"{path.name}/{name}")
            for name in missing:
                if self._stopped:
                    return
                self.remote.put(path / name, f"{path.name}/{name}", self._beat)
                self._beat()
                with suppress(OSError), (path / _SENT).open("a") as sent:  # without the line it is sent again
                    entry = manifest.files[name]
                    sent.write(json.dumps([name, entry.bytes, entry.checksum]) + "\n")
            there = self.remote.sizes(path.name)
            if wrong := [name for name, entry in manifest.files.items() if there.get(name) != entry.bytes]:
                raise CheckpointError(f"{self.remote.address}/{path.name}/{wrong[0]} has {there.get(wrong[0])} bytes.")
            if self._stopped:  # the address may be another process's now
                return
            self.remote.put(path / MANIFEST, f"{path.name}/{MANIFEST}", self._beat)
        except CheckpointError:
            if path.exists():
                raise
            return
        self._beat()
        self._begun.discard(step)
        self.there = dict(sorted({**self.there, step: manifest.metrics}.items(), reverse=True))
        (path / _SENT).unlink(missing_ok=True)

    def _beat(self) -> None:
        self._progress = time.monotonic()


def to_send(
    files: Mapping[str, FileEntry], sent: Mapping[str, FileEntry], there: Mapping[str, int]
) -> tuple[list[str], list[str]]:
    """Files of a checkpoint that are to be sent, and those at its address that are to be removed, when `sent` were sent
    before and the files `there` have these sizes. Pure."""
    done = {name for name, entry in files.items() if sent.get(name) == entry and there.get(name) == entry.bytes}
    return [name for name in files if name not in done], [name for name in there if name not in files]


def _sent(path: Path) -> dict[str, FileEntry]:
    """What a checkpoint's file says that was sent; the last line may be half."""
    found = {}
    with suppress(OSError):
        for line in (path / _SENT).read_text().splitlines():
            with suppress(ValueError, TypeError):
                name, size, checksum = json.loads(line)
                found[name] = FileEntry(size, checksum)
    return found

"""The state of a run as a directory: `save` and `load`.

groups: boxes of canonical tensors, written by their ranks in the background (`workers/worker.py`)
loaders, trackers, random number generators and other objects of the driver: JSON, in the manifest
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridflow.cluster.future import Status, fetch
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.row_refs import RankOutput
from hybridflow.cluster.session import Session
from hybridflow.cluster.state_images import GroupImages, redundant
from hybridflow.driver import sync_weights
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.checkpoint.manifest import (
    CheckpointManifest,
    FileEntry,
    SavedGroup,
    check_content,
    partial_directory,
    publish,
    step_of,
)
from hybridflow.engines.checkpoint.rank_state import random_state, report_file, set_random_state
from hybridflow.engines.checkpoint.remote_directory import fetched_checkpoint, opened, written_here
from hybridflow.errors import CheckpointError, ConfigError, HybridFlowError
from hybridflow.settings import STAGING, is_address
from hybridflow.tracking.metric_loggers import resolve
from hybridflow.tracking.tracker import Tracker
from hybridflow.workers.worker import Worker, has_state, rank_file

_LOOK_SECONDS, _CANCEL_SECONDS = 0.05, 10.0


@dataclass(frozen=True)
class RunParts:
    """What a checkpoint contains: worker groups and objects of the driver with `state()` and `load_state(state)`."""

    groups: Mapping[str, WorkerGroup]
    objects: Mapping[str, Any]

    @classmethod
    def of(cls, session: Session, chosen: Iterable[Any] | Mapping[str, Any] | None = None) -> RunParts:
        """All parts of the session, or the `chosen` groups and objects. Errors: ConfigError for other objects."""
        if chosen is None:
            return cls(dict(session.groups), dict(session.parts))
        named = chosen.items() if isinstance(chosen, Mapping) else ((None, part) for part in chosen)
        groups, objects = dict[str, WorkerGroup](), dict[str, Any]()
        for name, part in named:
            if isinstance(part, WorkerGroup):
                groups[part.name] = part
            elif has_state(part):
                session.attach(part, name)
                objects |= {known: one for known, one in session.parts.items() if one is part}
            else:
                raise ConfigError(
                    f"parts={part!r:.80}: a part is a worker group, or has state() and load_state(state)."
                )
        return cls(groups, objects)

    @property
    def workers(self) -> dict[str, WorkerGroup]:
        """The groups whose ranks write files."""
        return {name: one for name, one in self.groups.items() if issubclass(one.worker_class, Worker)}

    @property
    def valued(self) -> dict[str, WorkerGroup]:
        """The groups of which checkpoints keep what `state()` of each rank returns, and nothing else."""
        return {n: one for n, one in self.groups.items() if n not in self.workers and has_state(one.worker_class)}


def metric_values(metrics: Iterable[Any]) -> dict[str, float | None]:
    """Metrics, or futures of them, as numbers; None for those that are not finite."""
    found = {name: value for part in metrics for name, value in resolve(part).items()}
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def folder_of(name: str, taken: Iterable[str] = ()) -> str:
    """A directory name for a group."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name) or "group"
    return next(n for n in itertools.chain([plain], (f"{plain}_{i}" for i in itertools.count(2))) if n not in taken)


def save(path: str | os.PathLike[str], parts: Iterable[Any] | Mapping[str, Any] | None = None) -> str:
    """Write the state of the run to `path`, a new directory on a file system that all nodes share, or an address such
    as `s3://bucket/saved`; waits.

    `parts` are groups, loaders, trackers or other objects with `state()` and `load_state(state)`; default: all parts of
    the session. `load(path)` continues from it, in any layout. Returns the absolute path, or the address.

    Errors: CheckpointError, with nothing at `path`; ConfigError; WorkerError of a call that failed before.
    """
    session = Session.current()
    if Session.replay is None:
        check_machines(session, path)
        if (remote := opened(path)) is not None:
            remote.check_unsent()
        with written_here(path) as target:
            Saving(session, Path(os.path.abspath(target)), RunParts.of(session, parts)).result()
    return os.fspath(path) if is_address(path) else os.path.abspath(path)


StateLayouts = dict[tuple[str, bool], tuple[Layout | None, bool]]
"""By the key of a group's ranks, and whether it follows another group: the layout of its tensors, and whether images
need copies."""


@dataclass(frozen=True)
class Moment:
    """What the driver knows of its run when the calls of iteration `step` are issued: states of its objects (without
    trackers, whose metrics are still to come), waits for those of groups of other classes than Worker (`values`), and
    of each group the number of its calls, the version of its weights, and the group that it follows; and `images` of
    all groups of workers, or of none, where a run keeps them."""

    step: int
    states: Mapping[str, Any]
    values: Mapping[str, Callable[..., list[Any]]]
    random: Mapping[str, Any]
    calls: Mapping[str, Counter[str]]
    versions: Mapping[str, int]
    sources: Mapping[str, str | None]
    images: dict[str, GroupImages] = field(default_factory=dict)

    @classmethod
    def now(cls, session: Session, parts: RunParts, step: int) -> Moment:
        """Errors: WorkerError for a host of such a group that is lost."""
        objects = {name: part for name, part in parts.objects.items() if not isinstance(part, Tracker)}
        groups = parts.groups.items()
        return cls(
            step=step,
            states={name: copy.deepcopy(part.state()) for name, part in objects.items()},
            values={name: session.backend.tell(group.ranks, "state") for name, group in parts.valued.items()},
            random=random_state(),
            calls={name: group.calls_issued.copy() for name, group in groups},
            versions={name: group.weights_version for name, group in groups},
            sources={name: group.weights_source for name, group in groups},
        )

    def take_images(self, session: Session, parts: RunParts, layouts: StateLayouts) -> None:
        """Keep what a checkpoint would have of each group. Errors: WorkerError of a lost host, with no images."""
        session.iterations.held.send()
        images = dict[str, GroupImages]()
        for name, group in parts.workers.items():
            session.iterations.check_hosts(name, "image", group.ranks.hosts)
            ranks, settings = group.ranks, dict(group.settings) if self.sources[name] is None else None
            if (known := (ranks.key, settings is None)) not in layouts:
                layout = session.backend.ask(ranks, "state_layout", settings)[0]
                layouts[known] = layout, layout is not None and not redundant(ranks, layout)
            trained = {call: self.calls[name][call] for call in group.training}
            images[name] = GroupImages.take(ranks, settings, trained, *layouts[known])
        self.images.update(images)


@dataclass
class Saving:
    """A checkpoint that is being written: made when the ranks have their calls; a thread completes it.

    The states of trackers are taken then: they are behind the calls. `metrics` returns those of the iteration.
    """

    session: Session
    target: Path
    parts: RunParts
    step: int | None = None
    metrics: Callable[[], Mapping[str, float | None]] = dict
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    error: BaseException | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.partial, self._deadline = partial_directory(self.target), self.session.backend.deadlines.peers
        if os.path.lexists(self.target):
            raise CheckpointError(f"{self.target} exists already: a checkpoint is never written over. Remove it first.")
        self._folders: dict[str, str] = {}
        try:
            if self.partial.exists():
                shutil.rmtree(self.partial)
            for name in self.parts.groups:
                self._folders[name] = folder_of(name, self._folders.values())
                (self.partial / self._folders[name]).mkdir(parents=True)
            self.partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{self.target} cannot be written: {error.filename}: {error.strerror}.") from error
        self._now = now = Moment.now(self.session, self.parts, self.step or 0)
        self._states = {name: _plain(name, state) for name, state in now.states.items()}
        self._results = dict(now.values)
        for name, group in self.parts.workers.items():
            settings = dict(group.settings) if now.sources[name] is None else None
            where = (str(self.partial), self._folders[name], self.id)
            self._results[name] = self.session.backend.tell(group.ranks, "write_checkpoint", *where, settings)
        self._calls = [one for one in self.session.iterations.unsettled() if one.origin.role in self.parts.groups]
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            publish(self.partial, self.target, self._manifest())
        except BaseException as error:  # reported by the driver's thread
            self.error = error
            for _ in range(int(_CANCEL_SECONDS / _LOOK_SECONDS)):
                shutil.rmtree(self.partial, ignore_errors=True)
                if not self.partial.exists():  # a rank may have made its file meanwhile
                    break
                time.sleep(_LOOK_SECONDS)

    def _manifest(self) -> CheckpointManifest:
        groups = dict[str, SavedGroup]()
        answers = {name: self._results[name]() for name in self.parts.groups if name in self._results}
        self._check_calls()
        workers = {name: answers[name] for name in self.parts.workers}
        places = [(self._folders[name], rank) for name, answer in workers.items() for rank in range(len(answer))]
        reports = self._reports([report_file(self.partial, folder, rank) for folder, rank in places])
        files = {file: FileEntry(**entry) for report in reports for file, entry in report["files"].items()}
        for name, answer in answers.items():
            if name not in workers:
                groups[name] = SavedGroup(self.parts.groups[name].worker_class.__name__, values=tuple(answer))
                continue
            saved: SavedGroup = answer[0]
            size = len(answer)  # at the time of the save: the group may have been moved since
            ranks = tuple(rank_file(self._folders[name], rank) for rank in range(size))
            values = tuple(one.values[0] for one in answer) if saved.values is not None else None
            follows = None if saved.kinds else self._now.sources[name] or None
            groups[name] = replace(saved, values=values, ranks=ranks, dtypes=_compact(saved.dtypes), follows=follows)
        trackers = {name: part for name, part in self.parts.objects.items() if isinstance(part, Tracker)}
        states = self._states | {name: part.state(self.step) for name, part in trackers.items()}
        step = (step_of(self.target) or 0) if self.step is None else self.step
        return CheckpointManifest(step, self.id, groups, files, states, self._now.random, self.metrics())

    def _check_calls(self) -> None:
        """Errors: WorkerError of a call before the save: its state is not one to continue from."""
        calls: list[RankOutput] = self._calls
        statuses: list[Status] = fetch([one.ref for one in calls], calls, self._deadline, follow=False) if calls else []
        for output, status in zip(calls, statuses, strict=True):
            if status.failure is not None and not (output.call and output.call.observed):  # the driver knows of others
                raise CheckpointError(
                    f"{self.target} was not saved: a call before it failed: {str(status.failure.error.args[0])[:200]}"
                )

    def _reports(self, files: Sequence[Path]) -> list[dict[str, Any]]:
        """What each rank reports, once its file is written; removed. The first error ends the wait for all."""
        end, left = time.monotonic() + self._deadline, files
        found = dict[Path, dict[str, Any]]()
        while True:
            found |= {file: self._report(file) for file in left if file.exists()}
            left = [file for file in left if file not in found]
            if not left:
                return [found[file] for file in files]
            if self.cancelled:
                raise CheckpointError(f"{self.target} was not saved: the run was restarted.")
            for group in self.parts.groups.values():
                self.session.iterations.check_hosts(group.name, "write_checkpoint", group.ranks.hosts)
            if time.monotonic() > end:
                names = ", ".join(file.name[1:-5] for file in left[:3])
                raise CheckpointError(
                    f"{self.target} was not saved: {names} did not report its file in {self._deadline:g} s."
                )
            time.sleep(_LOOK_SECONDS)

    def _report(self, file: Path) -> dict[str, Any]:
        report = json.loads(file.read_text())
        file.unlink()
        if report.get("id") != self.id:
            raise CheckpointError(f"{self.target} was not saved: {file} is of another save. Give each run a directory.")
        if "error" in report:
            raise CheckpointError(f"{self.target} was not saved: {report['error']}")
        return report

    def cancel(self) -> None:
        """Give up: what was written is removed, unless the checkpoint is complete already."""
        self.cancelled = True
        self.wait(_CANCEL_SECONDS)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self) -> Path:
        """Wait until the checkpoint is complete. Errors: CheckpointError, WorkerError."""
        self._thread.join(2 * self._deadline)
        if self.running:
            raise CheckpointError(f"{self.target} was not complete after {2 * self._deadline:g} s.")
        if isinstance(error := self.error, HybridFlowError):
            raise error
        if error is not None:
            why = f"{type(error).__name__}: {error}"
            why = f"{error.filename or self.partial}: {error.strerror}" if isinstance(error, OSError) else why
            raise CheckpointError(f"{self.target} was not saved: {why}.") from error
        return self.target


def _compact(dtypes: Mapping[str, str]) -> dict[str, str]:
    """The most frequent dtype by the name "", and those of the other tensors."""
    most = max(Counter(dtypes.values()).items(), key=lambda one: one[1], default=("", 0))[0]
    return {"": most, **{name: dtype for name, dtype in dtypes.items() if dtype != most}} if dtypes else {}


def _plain(name: str, state: Any) -> Any:
    """Errors: ConfigError for a state that JSON does not give back as it is."""
    try:
        if json.loads(json.dumps(state, allow_nan=False)) == state:
            return state
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"the state of {name} is not plain data for JSON: {state!r:.120}.")


def load(path: str | os.PathLike[str], parts: Iterable[Any] | Mapping[str, Any] | None = None) -> int:
    """Continue from a checkpoint: groups take weights and optimizer state, in the layout that they have now, and the
    driver's objects their states. Waits. Returns the number of iterations that are done.

    Everything is verified before anything changes. Errors: CheckpointError for a checkpoint that is damaged, or of
    other models or optimizers; ConfigError for other groups, data or settings.
    """
    session = Session.current()
    if session.traces:
        return 0
    check_machines(session, path)
    with fetched_checkpoint(path) as directory:
        manifest = verified(session, directory, RunParts.of(session, parts))
        return restore(session, directory, manifest, RunParts.of(session, parts), everything=parts is None)


def verified(session: Session, directory: Path, parts: RunParts) -> CheckpointManifest:
    """The manifest, when all files have their checksums; the ranks read those of their groups.

    Errors: CheckpointError.
    """
    manifest, asked = CheckpointManifest.read(directory), []
    left = dict(manifest.files)
    for name, group in parts.workers.items():
        if (saved := manifest.groups.get(name)) is None:
            continue
        own = {file: left.pop(file) for file in (*saved.ranks, *saved.beside) if file in left}
        names, ranks = list(own), group.grid.size
        for rank, host in enumerate(group.ranks.hosts):
            one = replace(group.ranks, hosts=(host,))
            share = {file: own[file] for file in names[rank::ranks]}
            asked.append(session.backend.tell(one, "damaged_files", str(directory), share))
    for name, entry in left.items():
        check_content(directory, name, entry)
    if damaged := [text for wait in asked for found in wait() for text in found]:
        raise CheckpointError("\n".join(damaged))
    return manifest


def restore(
    session: Session, directory: Path, manifest: CheckpointManifest, parts: RunParts, everything: bool = True
) -> int:
    """Load a verified checkpoint. `everything`: it must have the same groups as the run."""
    saved = {name: one for name, one in manifest.groups.items() if name in parts.groups}
    missing = [name for name in (*parts.workers, *parts.valued) if name not in manifest.groups]
    surplus = [name for name in manifest.groups if everything and name not in parts.groups]
    if missing or surplus:
        raise ConfigError(
            f"{directory} has the groups {sorted(manifest.groups)}, the run has {sorted(parts.groups)}: they differ in "
            f"{', '.join([*missing, *surplus])}. Give groups the names of the saved run, or name the parts to load."
        )
    for name, part in parts.objects.items():
        if name in manifest.parts:
            part.load_state(manifest.parts[name])
    session.states = {name: state for name, state in manifest.parts.items() if name not in session.parts}
    waiting = []
    for name, one in saved.items():
        group, backend = parts.groups[name], session.backend
        if name in parts.workers:
            bare = replace(one, ranks=(), beside=())
            arguments = (str(directory), manifest.id, bare, one.ranks, dict(group.settings))
            _check_values(group, one.values)
            waiting.append(backend.tell(group.ranks, "read_checkpoint", *arguments))
            if one.kinds:
                group.weights_changed()
        elif one.values is not None:
            waiting += give_values(session, group, one.values)
    for wait in waiting:
        wait()
    follow(session, {name: one.follows for name, one in saved.items() if one.follows in parts.groups})
    set_random_state(manifest.random)
    return manifest.step


def follow(session: Session, sources: Mapping[str, str | None]) -> None:
    """Give groups the weights of those that they follow."""
    for name, source in sources.items():
        if source and source in session.groups:
            sync_weights(session.groups[source], session.groups[name]).get()


def give_values(session: Session, group: WorkerGroup, values: Sequence[Any]) -> list[Callable[[], list[Any]]]:
    """Give each rank what its `state()` returned."""
    _check_values(group, values)
    hosts = zip(group.ranks.hosts, values, strict=True)
    return [session.backend.tell(replace(group.ranks, hosts=(host,)), "load_state", value) for host, value in hosts]


def _check_values(group: WorkerGroup, values: Sequence[Any] | None) -> None:
    """Errors: ConfigError for values of another number of ranks."""
    if values is not None and len(values) != group.grid.size:
        raise ConfigError(
            f"{group.name} has {group.grid.size} ranks, its state in the checkpoint is that of {len(values)}: a class "
            f"with state() continues on as many ranks."
        )


def check_machines(session: Session, path: Any, shared: bool = False) -> None:
    """Errors: ConfigError for an address, where ranks of several machines have no staging directory that all share."""
    names = {host.node_name for group in session.groups.values() for host in group.ranks.hosts} - {""}
    names |= {socket.gethostname()} if names else set()  # the driver fetches and sends
    if is_address(path) and len(names) > 1 and not (shared or os.environ.get(STAGING)):
        raise ConfigError(
            f"{path} is written and read by way of a staging directory, which processes on {len(names)} machines have "
            f"to share: set {STAGING}, on all of them, to a directory that all see."
        )

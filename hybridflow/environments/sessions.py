"""Sessions: the trajectories that a model's host has under way, and the processes in which their agents run.

    start -> waiting -> running: poll gives turns to sample, answer returns them -> take

What the model said is kept here, so a process can die at any time: its trajectories run again in another, and get the
same answers to the same ids. Those that were in a process that died share the next one with fewer others, so the one
that kills its process is alone in the end, and fails alone.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from base64 import b64decode
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridflow.data.encoded_image import EncodedImage
from hybridflow.engines.contract import derived_seed
from hybridflow.environments.acting import STOPS, Ending
from hybridflow.environments.session_process import SessionProcess
from hybridflow.environments.trajectory import Trajectory
from hybridflow.errors import HybridFlowError
from hybridflow.processes.supervisor import Supervisor, WorkerProcess
from hybridflow.rewards.process_pool import pickled

if TYPE_CHECKING:  # they import torch
    from hybridflow.engines.contract import Row
    from hybridflow.engines.vllm.row_images import RowImages
    from hybridflow.environments.turn_images import TurnImages

_TOGETHER = (1 << 30, 32, 4, 1)
"""The most trajectories in one process, by the number of processes that died with them."""
_SPARE = 8  # further processes for these
_QUIET = "did not answer for"
_SILENT = 30.0  # seconds beyond the limit of a call until a process without a sign of life is killed


@dataclass(frozen=True)
class Asked:
    """A turn to sample: `number` is the process's word for it, `seed` its draws."""

    key: int
    number: int
    ids: list[int]
    seed: int
    sampling: dict[str, Any]
    images: RowImages | None = None  # whose tokens are among the ids

    def repeated(self, other: Asked) -> bool:
        """Whether `other` asks for the same, perhaps as another turn."""
        own, its = (None if one.images is None else one.images.names for one in (self, other))
        return self.ids == other.ids and self.sampling == other.sampling and own == its


@dataclass(frozen=True)
class EndedTrajectory:
    """A trajectory's end; `failure` says why an environment did not do its part."""

    trajectory: Trajectory
    ending: Ending
    failure: str | None = None


@dataclass
class _Said:
    asked: Asked
    row: Row
    temperature: float
    used: bool = True


@dataclass
class _Session:
    key: int
    row: Mapping[str, Any]
    seed: int
    pictures: int  # of its row
    images: dict[str, RowImages | bytes]  # each by the name that its process gave it; files that no turn had yet
    said: list[_Said] = field(default_factory=list)
    turns: int = 0  # asked for in this life
    deaths: int = 0
    asked: dict[int, Asked] = field(default_factory=dict)
    process: _Process | None = None  # None while it waits for one

    def image(self, name: str, images: TurnImages) -> RowImages:
        """Errors: PromptError."""
        if isinstance(found := self.images[name], bytes):
            found = self.images[name] = images.read(found)
        return found


@dataclass(eq=False)
class _Process:
    worker: WorkerProcess
    level: int
    sessions: dict[int, _Session] = field(default_factory=dict)
    retiring: bool = False


class Sessions:
    """At most `concurrency` trajectories at once, in `workers` processes that run `process`. `images`: how the model
    reads them.

    Errors: RewardError when it cannot be loaded in a process.
    """

    def __init__(
        self, process: SessionProcess, workers: int, concurrency: int, images: TurnImages | None = None
    ) -> None:
        self._given, self._workers, self._most, self._images = process, workers, concurrency, images
        self._template: Supervisor | None = None
        self._processes: list[_Process] = []
        self._waiting: deque[_Session] = deque()
        self._sessions: dict[int, _Session] = {}  # of both
        self._finished: dict[int, EndedTrajectory] = {}
        self._looked = 0.0

    @property
    def under_way(self) -> int:
        """Trajectories that have not ended."""
        return len(self._sessions)

    def start(self, key: int, row: Mapping[str, Any], seed: int, images: RowImages | None = None) -> None:
        """Run the agent for `row`, whose prompt has `images`. `key` names the trajectory, `seed` decides its draws."""
        own: dict[str, Any] = {str(number): one for number, one in enumerate(() if images is None else images.each)}
        self._sessions[key] = session = _Session(key, row, seed, len(own), own)
        self._waiting.append(session)

    def take(self) -> dict[int, EndedTrajectory]:
        """The trajectories that have ended since the last call, by key."""
        found, self._finished = self._finished, {}
        return found

    def poll(self, seconds: float) -> list[Asked]:
        """The turns that agents ask for, waiting up to `seconds` for the first; may be empty."""
        out: list[Asked] = []
        self._place()
        due = time.monotonic() + seconds
        while self._processes:
            self._step(max(0.0, due - time.monotonic()) if not out else 0.0, out)
            self._place()
            if out or self._finished or time.monotonic() >= due:
                break
        return [asked for asked in out if self._asking(asked)]

    def answer(self, asked: Asked, row: Row, temperature: float = 1.0) -> None:
        """The model's turn for what was asked. One that was asked in an earlier life is kept for when it is again."""
        if (session := self._sessions.get(asked.key)) is None:
            return
        waits = self._asking(asked)
        session.said.append(_Said(asked, row, temperature, waits))
        if waits:
            del session.asked[asked.number]
            self._tell(session, "turn", asked.number, row.token_ids, row.log_probs, row.end)

    def refuse(self, asked: Asked, why: str, full: bool) -> None:
        """The model cannot be given these ids; `full`: they leave no room for a response."""
        if self._asking(asked):
            session = self._sessions[asked.key]
            del session.asked[asked.number]
            self._tell(session, "full" if full else "refused", asked.number, why)

    def cancel(self, keys: Collection[int]) -> None:
        """Give these trajectories up: they will not be among those that have ended."""
        self._waiting = deque(one for one in self._waiting if one.key not in keys)
        for key in keys:
            session = self._sessions.pop(key, None)
            if session is not None and session.process is not None:
                del session.process.sessions[key]
                self._tell(session, "cancel")
            self._finished.pop(key, None)

    def close(self) -> None:
        """Kill the processes. May be called twice; `start` begins anew."""
        for held in (self._waiting, self._sessions, self._processes):
            held.clear()
        if self._template is not None:
            self._template.close()
            self._template = None

    def _asking(self, asked: Asked) -> bool:
        """Whether a process waits for this turn: it may have died since."""
        session = self._sessions.get(asked.key)
        return session is not None and session.asked.get(asked.number) is asked

    def _place(self) -> None:
        """Give waiting trajectories to processes."""
        room = self._most - (len(self._sessions) - len(self._waiting))
        for _ in range(min(room, len(self._waiting))):
            session = self._waiting.popleft()
            session.process = self._process_for(session.deaths)
            if session.process is None:
                self._waiting.append(session)
                continue
            session.turns = 0
            for said in session.said:
                said.used = False
            session.process.sessions[session.key] = session
            self._tell(session, "start", session.row, session.pictures)

    def _process_for(self, level: int) -> _Process | None:
        of_level = [one for one in self._processes if (one.level > 0) == (level > 0) and not one.retiring]
        open_ = [one for one in of_level if one.level == level and len(one.sessions) < _TOGETHER[level]]
        most = _SPARE if level else self._workers
        if (not open_ or (level == 0 and all(one.sessions for one in open_))) and len(of_level) < most:
            if self._template is None:
                self._template = Supervisor(pickled(self._given.main, "the agent"))
            self._template.lost = 0  # each has cost trajectories one of their lives
            self._processes.append(_Process(self._template.fork(), level))
            return self._processes[-1]
        return min(open_, key=lambda one: len(one.sessions), default=None)

    def _step(self, seconds: float, out: list[Asked]) -> None:
        """Wait for messages and ends of processes, and take them; end processes that are silent or not needed."""
        assert self._template is not None
        limit = self._given.seconds + _SILENT
        unheard = time.monotonic() - self._looked > 1.0  # silence says nothing: this process did not listen
        for process in self._processes:
            if process.worker.ready and (unheard or not process.sessions):
                process.worker.allow(limit, _QUIET)
        by_worker = {process.worker: process for process in self._processes}
        said = self._template.poll(seconds)
        self._looked = time.monotonic()
        for worker, message in said:
            process = by_worker[worker]
            if process not in self._processes:
                continue
            if isinstance(message, str):
                self._lost(process, message)
                continue
            worker.allow(limit, _QUIET)
            try:
                self._heard(process, json.loads(message), out)
            except (ValueError, TypeError, KeyError, IndexError):
                self._end_process(process)
        for process in list(self._processes):
            if (process.retiring or process.level) and not process.sessions:  # spare ones make room for others
                self._end_process(process)

    def _heard(self, process: _Process, message: list[Any], out: list[Asked]) -> None:
        what = message[0]
        if what == "stuck":
            process.retiring = True
        if what not in ("turn", "image", "end", "failed") or (session := process.sessions.get(message[1])) is None:
            return
        if what == "turn":
            self._asked(session, *message[2:], out=out)
            return
        if what == "image":
            _ = session.images.setdefault((file := EncodedImage(b64decode(message[2]))).name, file)
            return
        ending = Ending(**message[2]) if what == "end" else Ending("failure")
        figures = [*ending.metrics.values(), 0.0 if ending.reward is None else ending.reward]
        if ending.stop not in STOPS or not all(map(math.isfinite, figures)):
            raise ValueError(ending)
        failure = str(message[2]) if what == "failed" else None
        del process.sessions[session.key]
        self._end(session, ending, failure)

    def _asked(
        self, session: _Session, number: int, ids: list[int], sampling: dict[str, Any], shown: list[str], *, out: Any
    ) -> None:
        if not ids or not all(type(one) is int for one in ids):
            raise ValueError(ids)
        images: RowImages | None = None
        if self._images is not None:
            try:
                ids, images = self._images.expanded(ids, [session.image(name, self._images) for name in shown])
            except HybridFlowError as error:  # also of a processor that cannot be loaded
                self._tell(session, "refused", number, str(error))
                return
        turn, session.turns = session.turns, session.turns + 1
        seed = session.seed if turn == 0 else derived_seed(session.seed, turn)
        asked = Asked(session.key, number, ids, seed, sampling, images)
        for said in session.said:
            if not said.used and said.asked.repeated(asked):
                said.used = True
                self._tell(session, "turn", number, said.row.token_ids, said.row.log_probs, said.row.end)
                return
        session.asked[number] = asked
        out.append(asked)

    def _end(self, session: _Session, ending: Ending, failure: str | None) -> None:
        del self._sessions[session.key]
        trajectory = Trajectory()
        for said in session.said:
            if said.used:
                row = said.row
                turn = said.asked.ids, row.token_ids, row.log_probs, row.policy_version, row.finished
                trajectory.add(*turn, said.temperature, row.routed_experts, said.asked.images)
        self._finished[session.key] = EndedTrajectory(trajectory, ending, failure)

    def _end_process(self, process: _Process) -> None:
        assert self._template is not None
        self._lost(process, self._template.end(process.worker))

    def _lost(self, process: _Process, how: str) -> None:
        """A process has ended: its trajectories run again in others."""
        self._processes.remove(process)
        for session in process.sessions.values():
            session.deaths, session.asked, session.process = session.deaths + 1, {}, None
            if session.deaths < len(_TOGETHER):
                self._waiting.append(session)
            else:
                self._end(session, Ending("failure"), f"its process {how}, with nothing else in it")

    def _tell(self, session: _Session, what: str, *rest: Any) -> None:
        assert session.process is not None
        session.process.worker.send(pickle.dumps((what, session.key, *rest)))

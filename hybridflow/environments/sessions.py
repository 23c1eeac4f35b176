"""Sessions: the trajectories that a replica's first rank has under way, and the processes in which their agents run.

    start -> waiting -> running: poll gives turns to sample, finished returns them -> take

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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from hybridflow.config import Sampling
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.engines.contract import Row, derived_seed
from hybridflow.engines.vllm.row_images import RowImages
from hybridflow.environments.acting import STOPS, Ending
from hybridflow.environments.session_process import SessionProcess
from hybridflow.environments.trajectory import GREEDY, Acted, Trajectory
from hybridflow.environments.turn_images import TurnImages
from hybridflow.errors import ConfigError, HybridFlowError, nearest
from hybridflow.processes.supervisor import Supervisor, WorkerProcess
from hybridflow.rewards.limited_calls import pickled

_TOGETHER = (1 << 30, 32, 4, 1)
"""The most trajectories in one process, by the number of processes that died with them."""
_SPARE = 8  # further processes for these
_QUIET = "did not answer for"
_SILENT = 30.0  # seconds beyond the limit of a call until a process without a sign of life is killed
_CONVERSATIONS = 4
"""Of one trajectory that have their KV cache."""


class RecentProcesses:
    """The processes of the `most` agents that were asked for last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._made: dict[bytes, tuple[Supervisor, TurnImages | None]] = {}  # by what they run, the last one used last

    def of(
        self, process: SessionProcess, images: TurnImages | None, workers: int
    ) -> tuple[TurnImages | None, Supervisor]:
        """At most `workers`, of a recent call where they run the same, and `images` of that call, whose processor is
        loaded. Errors: ConfigError for what cannot be sent."""
        name = pickled((process, images), "the agent")
        found, images = self._made.pop(name, (None, images))
        found = Supervisor(pickled(process.main, "the agent")) if found is None else found
        self._made[name] = found, images
        kept = [one for one in found.workers if not one.retiring][:workers]
        for worker in [one for one in found.workers if one not in kept]:
            found.end(worker)
        while len(self._made) > self._most:
            self._made.pop(next(iter(self._made)))[0].close()
        return images, found

    def close(self) -> None:
        """May be called twice; `of` begins anew."""
        while self._made:
            self._made.popitem()[1][0].close()


@dataclass(eq=False)
class _Asked:
    """A turn that an agent asked for: `number` is its process's word for it, `seed` its draws. `row`: with what the
    model said, once it has, at a `temperature`. `used`: in this life of its trajectory."""

    key: int
    number: int
    asked: tuple[list[int], dict[str, Any], list[str]]  # ids, sampling, and names of images, as the agent gave them
    ids: list[int]  # with all tokens of images
    images: RowImages | None
    seed: int
    row: Row | None = None
    temperature: float = 1.0
    used: bool = True


@dataclass(eq=False)
class _Session:
    key: int
    begun: Row
    row: Mapping[str, Any]
    seed: int
    attempts: int  # that are left after this one
    past: dict[int, list[int]] = field(default_factory=dict)  # tokens of the last turn with an index
    said: list[_Asked] = field(default_factory=list)
    turns: int = 0  # asked for in this life
    deaths: int = 0
    asked: dict[int, _Asked] = field(default_factory=dict)
    process: _Process | None = None  # None while it waits for one

    def __post_init__(self) -> None:
        own = () if self.begun.images is None else self.begun.images.each
        # Each by the name that its process gave it; files that no turn had yet.
        self.images: dict[str, RowImages | bytes] = {str(number): one for number, one in enumerate(own)}
        self.pictures = len(self.images)  # of its row

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


def _row_id(key: int) -> int:
    """Of the turns of a trajectory."""
    return -1 - key


def _sampling(usual: Sampling, given: Mapping[str, Any]) -> Sampling:
    """That of a turn, which may give its own; a temperature ends the call's `greedy`. Errors: ConfigError."""
    if "n" in given or "seed" in given:
        raise ConfigError(
            f"n and seed are the call's: a turn has one answer, whose draws follow from the call's seed, the prompt "
            f"and the number of the trajectory. Leave {'n' if 'n' in given else 'seed'} out of the turn."
        )
    if unknown := sorted(given.keys() - Sampling.__dataclass_fields__):
        raise ConfigError(f"{unknown[0]}= is no setting of a turn.{nearest(unknown[0], Sampling.__dataclass_fields__)}")
    return replace(usual, **({"greedy": False} if "temperature" in given else {}), **given)


class Sessions:
    """The agents of trajectories: a RowSource of the model's turns, at most `concurrency` trajectories at once.

    Trajectories are started at any time, and wait for `take` when they have ended. The source pauses when `reached()`.
    `begin()` makes what `workers` processes run, how the model reads images, and the processes, in the first poll,
    whose errors all ranks are given. A trajectory that fails is begun anew while it has `attempts`. `numbers` name
    trajectories and turns, unlike any other of the same engine or processes.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[SessionProcess, TurnImages | None, Supervisor]],
        numbers: Iterator[int],
        *,
        workers: int = 1,
        concurrency: int = 256,
        attempts: int = 1,
    ) -> None:
        self._begin, self._numbers = begin, numbers
        self._workers, self._most, self._attempts = workers, concurrency, attempts
        self._template: Supervisor | None = None
        self._processes: list[_Process] = []
        self._waiting: deque[_Session] = deque()
        self._sessions: dict[int, _Session] = {}  # of both
        self._turns: dict[str, _Asked] = {}  # by the names of the rows under way
        self._done: list[str] = []
        self._looked = 0.0
        self.ended: dict[int, Acted] = {}
        self.reached: Callable[[], bool] = lambda: False

    def start(self, begun: Sequence[Row], rows: Sequence[Mapping[str, Any]]) -> None:
        """Run the agent for each of `rows`, as `begun` names, seeds and samples it, with its images."""
        for first, row in zip(begun, rows, strict=True):
            first = replace(first, sampling=replace(first.sampling, n=1))
            self._add(_Session(next(self._numbers), first, row, first.seed, self._attempts - 1))

    def _add(self, session: _Session) -> None:
        self._sessions[session.key] = session
        self._waiting.append(session)

    @property
    def under_way(self) -> int:
        """Trajectories that have not ended."""
        return len(self._sessions)

    def groups(self) -> int:
        """Prompts with trajectories that have ended, and none under way."""
        open_ = {one.begun.row_id for one in self._sessions.values()}
        return len({one.begun.row_id for one in self.ended.values()} - open_)

    def take(self) -> list[Acted]:
        """The trajectories that have ended since the last call, in the order in which they were started."""
        found, self.ended = self.ended, {}
        return [one for _, one in sorted(found.items())]

    def withdraw(self, row_ids: Collection[int] | None, keep: bool) -> list[dict[str, Any]]:
        """`row_id` and `index` of the trajectories under way (of the prompts `row_ids`), which end, unless `keep`."""
        found = [one for one in self._sessions.values() if row_ids is None or one.begun.row_id in row_ids]
        for session in () if keep else found:
            del self._sessions[session.key]
            self._forget(session)
            if session.process is None:
                self._waiting.remove(session)
            else:
                del session.process.sessions[session.key]
                self._tell(session, "cancel")
        return [{"row_id": one.begun.row_id, "index": one.begun.index} for one in found]

    def _forget(self, session: _Session) -> None:
        self._done += [f"{_row_id(session.key)}.{index}" for index in session.past]
        session.past.clear()

    def poll(self, seconds: float) -> list[Row] | None:
        """The turns to sample next, waiting up to `seconds` for the first; None for a pause, and once all trajectories
        have ended."""
        if self.reached():
            return None
        if self._template is None:
            self._given, self._images, self._template = self._begin()
            self._processes = [_Process(worker, 0) for worker in self._template.workers]
        asked, ended = list[_Asked](), len(self.ended)
        self._place()
        due = time.monotonic() + seconds
        while self._processes:
            self._step(max(0.0, due - time.monotonic()) if not asked else 0.0, asked)
            self._place()
            if asked or len(self.ended) > ended or time.monotonic() >= due:
                break
        out = [row for turn in asked if self._asking(turn) and (row := self._row(turn)) is not None]
        return out if out or self._sessions else None

    def finished(self, row: Row) -> None:
        """The engine has sampled this turn. One that was asked in an earlier life is kept for when it is again."""
        turn = self._turns.pop(row.name, None)  # None: of a source before
        if turn is None or (session := self._sessions.get(turn.key)) is None:
            self._done.append(row.name)
            return
        session.past[row.index] = row.prompt_ids + row.token_ids
        session.begun.prefilled += row.prefilled
        session.begun.recomputed += row.recomputed
        session.begun.spans += row.spans
        drawn = session.begun.sampling.greedy or not row.sampling.greedy
        turn.row, turn.temperature = row, row.sampling.policy_temperature if drawn else GREEDY
        turn.used = self._asking(turn)
        session.said.append(turn)
        if turn.used:
            del session.asked[turn.number]
            self._tell(session, "turn", turn.number, row.token_ids, row.log_probs, row.end)

    def refused(self, row: Row, why: str, full: bool) -> None:
        """The engine cannot take this turn; `full`: its ids leave no room for a response."""
        self._refuse(self._turns.pop(row.name), why, full)

    def _refuse(self, turn: _Asked, why: str, full: bool) -> None:
        if self._asking(turn):
            session = self._sessions[turn.key]
            del session.asked[turn.number]
            self._tell(session, "full" if full else "refused", turn.number, why)

    def done(self) -> list[str]:
        """The names, since the last call, of rows that no further turn continues: their trajectories have ended."""
        found, self._done = self._done, []
        return [name for name in found if name not in self._turns]

    def _asking(self, turn: _Asked) -> bool:
        """Whether a process waits for this turn: it may have died since."""
        session = self._sessions.get(turn.key)
        return session is not None and session.asked.get(turn.number) is turn

    def _row(self, turn: _Asked) -> Row | None:
        """The row to sample for a turn; None where its sampling is refused."""
        session = self._sessions[turn.key]
        try:
            sampling = _sampling(session.begun.sampling, turn.asked[1])
        except (HybridFlowError, TypeError) as error:
            self._refuse(turn, str(error), full=False)
            return None
        own = {"kept": turn.images is None, "images": turn.images}  # what is kept knows no images
        row = Row(_row_id(turn.key), self._index(session, turn.ids), turn.ids, sampling, turn.seed, **own)
        self._turns[row.name] = turn
        return row

    def _index(self, session: _Session, asked: list[int]) -> int:
        """The index of a row whose KV cache holds most of what was asked, or of none."""
        row_id, past = _row_id(session.key), session.past
        free = {index: ids for index, ids in past.items() if f"{row_id}.{index}" not in self._turns}
        fitting = [index for index, ids in free.items() if asked[: len(ids)] == ids]
        if fitting:
            return max(fitting, key=lambda index: len(free[index]))
        if len(free) >= _CONVERSATIONS:
            return next(iter(free))
        return next(index for index in count() if index not in past and f"{row_id}.{index}" not in self._turns)

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
            for turn in session.said:
                turn.used = False
            session.process.sessions[session.key] = session
            self._tell(session, "start", session.row, session.pictures)

    def _process_for(self, level: int) -> _Process | None:
        of_level = [one for one in self._processes if (one.level > 0) == (level > 0) and not one.worker.retiring]
        open_ = [one for one in of_level if one.level == level and len(one.sessions) < _TOGETHER[level]]
        most = _SPARE if level else self._workers
        if (not open_ or (level == 0 and all(one.sessions for one in open_))) and len(of_level) < most:
            assert self._template is not None
            self._template.lost = 0  # each has cost trajectories one of their lives
            self._processes.append(_Process(self._template.fork(), level))
            return self._processes[-1]
        return min(open_, key=lambda one: len(one.sessions), default=None)

    def _step(self, seconds: float, asked: list[_Asked]) -> None:
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
                self._heard(process, json.loads(message), asked)
            except (ValueError, TypeError, KeyError, IndexError):
                self._end_process(process)
        for process in list(self._processes):
            if (process.worker.retiring or process.level) and not process.sessions:  # spare ones make room for others
                self._end_process(process)

    def _heard(self, process: _Process, message: list[Any], asked: list[_Asked]) -> None:
        what = message[0]
        if what == "stuck":
            process.worker.retiring = True
        if what not in ("turn", "image", "end", "failed") or (session := process.sessions.get(message[1])) is None:
            return
        if what == "turn":
            if (turn := self._asked(session, *message[2:])) is not None:
                asked.append(turn)
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
        self, session: _Session, number: int, ids: list[int], sampling: dict[str, Any], shown: list[str]
    ) -> _Asked | None:
        """The turn that a process asks for; None where it has its answer."""
        if not ids or not all(type(one) is int for one in ids):
            raise ValueError(ids)
        asked, images = (ids, sampling, shown), None
        if self._images is not None:
            try:
                ids, images = self._images.expanded(ids, [session.image(name, self._images) for name in shown])
            except HybridFlowError as error:  # also of a processor that cannot be loaded
                self._tell(session, "refused", number, str(error))
                return None
        seed = session.seed if session.turns == 0 else derived_seed(session.seed, session.turns)
        session.turns += 1
        for turn in session.said:
            if not turn.used and turn.asked == asked and (row := turn.row) is not None:
                turn.used = True
                self._tell(session, "turn", number, row.token_ids, row.log_probs, row.end)
                return None
        session.asked[number] = turn = _Asked(session.key, number, asked, ids, images, seed)
        return turn

    def _end(self, session: _Session, ending: Ending, failure: str | None) -> None:
        """The trajectory has ended, or begins anew."""
        self._forget(session)
        if failure is not None and session.attempts:
            left = session.attempts - 1
            again = derived_seed(session.begun.seed, (1 << 40) + left)
            self._add(_Session(session.key, session.begun, session.row, again, left))
            return
        del self._sessions[session.key]
        trajectory = Trajectory()
        for turn in session.said:
            if turn.used and (row := turn.row) is not None:
                said = row.token_ids, row.log_probs, row.policy_version, row.finished
                trajectory.add(turn.ids, *said, turn.temperature, row.routed_experts, turn.images)
        self.ended[session.key] = Acted(session.begun, session.row, trajectory, ending, failure)

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

"""Liveness: a thread of each host process reports the current activity while a call runs.

A busy host takes no other call. Its `LivenessServer` tells each client the running call and its source line, or the
stacks of all threads. A process that is stopped, gone, or inside a function that holds the interpreter lock does not
answer. So errors and notices name the rank that holds up the others, not one that also waits.
"""

from __future__ import annotations

import copy
import hmac
import json
import logging
import math
import secrets
import selectors
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import FrameType
from typing import Any

import ray
import ray.exceptions

from hybridflow.cluster import startup
from hybridflow.cluster.row_refs import IssuedCall, RankOutput
from hybridflow.engines.time_sharing import UPDATE_THREAD
from hybridflow.errors import WaitTimeoutError, WorkerError

logger = logging.getLogger(__name__)

NOTICE_SECONDS = 30.0
"""A longer wait prints the ranks that it is for, again each time it has doubled."""
ANSWER_SECONDS = 2.0
"""A process that takes longer to answer counts as silent."""
_LOOK_AGAIN_SECONDS = 1.0
_AT_ONCE = 64  # processes that are asked at a time
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_COLLECTIVE = ("/torch/distributed/", "/engine3d/transfer/", "/pipeline_parallel/p2p_communication.py")
_COLLECTIVE += ("/engine3d/overlapped_move.py",)
_COLLECTIVE += ("/engines/megatron/engine.py:StageMessages", "/engines/megatron/engine.py:wait")
_COLLECTIVE += ("/engines/time_sharing.py:PipelineTurn", "/cluster/member.py")
SILENT = "no answer from its process, which is stopped, hangs, or cannot be reached"
ASK, WATCH, STACKS, LOST, ISSUED = b"a", b"w", b"s", b"l", b"i"
_LONGEST_ANSWER = 1 << 22
STARTING = "its process has not started yet"


@dataclass(frozen=True)
class Doing:
    """A process's activity: the `call` ("" for none), at `place`; `waiting`: inside a collective."""

    call: str = ""
    place: str = ""
    waiting: bool = False

    def __str__(self) -> str:
        if not self.call:
            return "idle"
        return f"{'waiting for its peers' if self.waiting else f'at {self.place}'}, in {self.call}"


def listening_socket(host: str) -> socket.socket:
    """A socket that listens at this address only, on a free port."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_AT_ONCE)


class LivenessServer:
    """Serves clients that begin with its `key`, then one byte at a time: `ASK` is answered with one line of JSON, a
    `Doing`, and `STACKS` with the stacks of all threads; then the connection is closed. After `WATCH` it stays open,
    until the process ends, for any number of `ASK`, and of `LOST` and `ISSUED` with a line of JSON: arguments of `lost`
    and of `issued`, which a thread calls for each.
    """

    def __init__(
        self,
        host: str,
        lost: Callable[[str, int, float], object] = lambda *_: None,
        issued: Callable[[str, int, int, bool], object] = lambda *_: None,
    ) -> None:
        self._call, self._thread, self._closed = "", threading.get_ident(), False
        self._news: dict[bytes, Callable[..., object]] = {LOST: lost, ISSUED: issued}
        self._socket = listening_socket(host)
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self.key = secrets.token_bytes(16)
        """Known to those who may ask Ray for it: stacks and source lines are not for other users of the machine."""
        threading.Thread(target=self._serve, name="liveness", daemon=True).start()

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Reports `call` as running inside."""
        before = self._call
        self._call, self._thread = call, threading.get_ident()
        try:
            yield
        finally:
            self._call = before

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in selector.select(_LOOK_AGAIN_SECONDS):
                    with suppress(OSError):  # the client is gone
                        self._serve_one(selector, key)
                self._close(selector, [key for key in _clients(selector) if time.monotonic() > key.data])
            self._close(selector, _clients(selector))
        self._socket.close()

    def _serve_one(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
        """Accept a client, or answer one; `key.data` is when it must have said what it wants."""
        if key.fileobj is self._socket:
            connection, _ = self._socket.accept()
            connection.settimeout(ANSWER_SECONDS)
            selector.register(connection, selectors.EVENT_READ, time.monotonic() + ANSWER_SECONDS)
            return
        client, watches = key.fileobj, key.data == math.inf
        assert isinstance(client, socket.socket)
        try:
            said = client.recv(1 if watches else len(self.key) + 1)
            asked = said[-1:] if watches or hmac.compare_digest(said[:-1], self.key) else b""
            if asked == WATCH:
                selector.modify(client, selectors.EVENT_READ, math.inf)
                return
            if asked in self._news and watches:
                line = b"".join(iter(lambda: client.recv(1).strip(b"\n"), b""))
                threading.Thread(target=self._news[asked], args=json.loads(line), name="news", daemon=True).start()
            elif asked == ASK:
                client.sendall(json.dumps(asdict(self._doing())).encode() + b"\n")
            elif asked == STACKS:
                client.sendall(self._stacks().encode())
        except (OSError, ValueError):
            watches = False
        if not (watches and asked):
            self._close(selector, [key])

    @staticmethod
    def _close(selector: selectors.BaseSelector, keys: Sequence[selectors.SelectorKey]) -> None:
        for key in keys:
            selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]

    def _stacks(self) -> str:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        names[self._thread] = f"{names.get(self._thread)} (runs the calls: {self._doing()})"
        return "\n".join(
            f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"
            for ident, frame in sys._current_frames().items()
        )

    def _doing(self) -> Doing:
        """Of the thread that runs the call, or of updates that share its stages: the first that does not wait."""
        updates = [thread.ident for thread in threading.enumerate() if thread.name == UPDATE_THREAD]
        first, *others = _frames([self._thread, *updates])
        frame = next((frame for frame in (first, *filter(None, others)) if not _in_collective(frame)), first)
        return Doing(self._call, _place(frame), _in_collective(frame))

    def close(self) -> None:
        """The thread ends within a second, and with it all connections."""
        self._closed = True


def _clients(selector: selectors.BaseSelector) -> list[selectors.SelectorKey]:
    return [key for key in selector.get_map().values() if key.data is not None]


def _place(frame: FrameType | None) -> str:
    """`file.py:12 in function` of the innermost frame outside installed libraries."""
    own, innermost = frame, frame
    while (
        own is not None
        and own.f_code.co_filename.startswith(_LIBRARIES)
        and "/hybridflow/" not in own.f_code.co_filename
    ):
        own = own.f_back
    found = own or innermost
    if found is None:
        return "its end"
    path = "/".join(found.f_code.co_filename.split("/")[-2:])
    return f"{path}:{found.f_lineno} in {found.f_code.co_name}"


def _frames(threads: Sequence[int | None]) -> list[FrameType | None]:
    """The innermost frame of each thread. Python's dict of all frames holds this one, too: a cycle, which would keep
    what the frames hold, such as a call's outputs."""
    every = sys._current_frames()
    try:
        return [None if thread is None else every.get(thread) for thread in threads]
    finally:
        every.clear()


def _in_collective(frame: FrameType | None) -> bool:
    for _ in range(3):
        if frame is not None:
            place = f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"
            if any(part in place for part in _COLLECTIVE):
                return True
        frame = None if frame is None else frame.f_back
    return False


def ask(address: Any, service: bytes = ASK) -> Doing | str:
    """The activity of the process at `address` (a reference to host and port), or its `STACKS`; or why it does not
    answer."""
    end, said = time.monotonic() + ANSWER_SECONDS, bytearray()
    try:
        host, port, key = ray.get(address, timeout=ANSWER_SECONDS)
        with socket.create_connection((host, port), timeout=max(0.01, end - time.monotonic())) as connection:
            connection.sendall(key + service)
            while len(said) < _LONGEST_ANSWER:
                connection.settimeout(max(0.01, end - time.monotonic()))
                if not (part := connection.recv(1 << 16)):
                    break
                said += part
        return Doing(**json.loads(said)) if service == ASK else said.decode(errors="replace")
    except ray.exceptions.GetTimeoutError:
        return STARTING
    except (ray.exceptions.RayError, OSError, ValueError, TypeError):
        return SILENT


def lives(address: Any) -> bool | None:
    """Whether the process at `address` lives, or has not started yet; None where its machine does not answer. A stopped
    process lives."""
    try:
        host, port, _ = ray.get(address, timeout=ANSWER_SECONDS)
        socket.create_connection((host, port), timeout=ANSWER_SECONDS).close()
    except ray.exceptions.GetTimeoutError:
        return True
    except (ray.exceptions.RayError, ConnectionRefusedError, ConnectionResetError):
        return False
    except OSError:
        return None
    return True


def ask_all(parts: Sequence[RankOutput], service: bytes = ASK) -> list[tuple[RankOutput, Any]]:
    """The activities of the processes that run these parts' calls, where they can be asked; or their `STACKS`."""
    asked = [part for part in parts if part.address is not None]
    if not asked:
        return []
    with ThreadPoolExecutor(min(_AT_ONCE, len(asked)), "liveness") as threads:
        answers = list(threads.map(partial(ask, service=service), [part.address for part in asked]))
    return list(zip(asked, answers, strict=True))


def unfinished(parts: Sequence[RankOutput]) -> list[RankOutput]:
    """The parts whose calls still run."""
    refs = {part.ref: part for part in parts if isinstance(part.ref, ray.ObjectRef)}
    if not refs:
        return []
    _, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return [refs[ref] for ref in waiting]


def whom(parts: Sequence[RankOutput]) -> str:
    """`trainer.update (ranks 0, 1: waiting ...; rank 2: at ...)`, for the pending parts; only the silent ranks, if
    there are any.
    """
    answers = ask_all(parts)
    said = [(part, doing) for part, doing in answers if isinstance(doing, str)]
    said = said or [(part, str(doing)) for part, doing in answers]
    said += [(part, "") for part in parts if part.address is None]
    calls: dict[str, dict[str, list[int]]] = {}
    for part, text in said:
        states = calls.setdefault(f"{part.origin.role}.{part.origin.method}", {})
        states.setdefault(text, []).append(part.origin.rank)
    return ", ".join(
        f"{call} ({'; '.join(f'{_ranks(ranks)}: {text}'.removesuffix(': ') for text, ranks in states.items())})"
        for call, states in calls.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = sorted(set(ranks))
    text = ", ".join(map(str, shown[:8])) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")
    return f"rank {text}" if len(shown) == 1 else f"ranks {text}"


class WaitNotice:
    """Reports on the console which ranks a long wait is for."""

    def __init__(self) -> None:
        self._start, self._next = time.monotonic(), NOTICE_SECONDS

    def look(self, waiting: Callable[[], Sequence[RankOutput]]) -> None:
        """Call about once a second; `waiting` returns the pending parts."""
        startup.progress(lambda: _waited_for(waiting()))
        waited = time.monotonic() - self._start
        if waited >= self._next:
            self._next *= 2
            logger.warning("waited %.0f s so far for %s", waited, whom(waiting()))


def _waited_for(parts: Sequence[RankOutput]) -> str:
    """The calls of these parts, without asking anyone; empty while groups are built."""
    calls = dict.fromkeys(f"{part.origin.role}.{part.origin.method}" for part in parts)
    names = [name for name in calls if not name.endswith(".__init__")]
    return f"waiting for {', '.join(names)}" if names else ""


def blamed(error: WorkerError, calls: Sequence[IssuedCall]) -> WorkerError:
    """Rewrites a rank's timeout in a collective to name the rank that did not take part.

    Any other error is returned unchanged, and so is a timeout without a rank that is silent or busy elsewhere.
    """
    if not isinstance(error.cause, WaitTimeoutError) or not (absent := _absent(calls)):
        return error
    (part, said), others = absent[0], sorted({part.origin.rank for part, _ in absent[1:]})
    origin = part.origin
    whose = "" if origin.role == error.role else f" of {origin.role}"
    found = copy.copy(error)
    found.args = (
        f"{error.role}.{error.method} failed: {origin.at}{whose} did not take part ({said}), and its peers "
        f"waited in vain." + (f" Nor did {_ranks(others)}." if others else ""),
    )
    found.role, found.rank, found.method, found.rows = origin.role, origin.rank, origin.method, None
    found.node, found.step = origin.node, origin.step
    return found


def with_text(error: WorkerError, more: str) -> WorkerError:
    """A copy of the error with a further sentence."""
    found = copy.copy(error)
    found.args = (f"{error.args[0]}{more}",)
    return found


def _absent(calls: Sequence[IssuedCall]) -> list[tuple[RankOutput, str]]:
    """The ranks of these calls that are silent, else those that are not in a collective, twice in a row."""
    found: dict[int, tuple[RankOutput, Doing | str]] | None = None
    for pause in (0.0, _LOOK_AGAIN_SECONDS):  # a rank that just failed may also answer late
        time.sleep(pause)
        asked = ask_all(unfinished([status for call in calls for status in call.statuses]))
        now = {id(part): (part, doing) for part, doing in asked if isinstance(doing, str) or not doing.waiting}
        found = now if found is None else {key: state for key, state in now.items() if key in found}
        if not found:
            return []
    states = list((found or {}).values())
    silent = [(part, doing) for part, doing in states if isinstance(doing, str)]
    return silent or [(part, str(doing)) for part, doing in states]

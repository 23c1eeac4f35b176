"""What a child process does: loads one function, runs it call by call, answers in frames over a socket.

Imports the standard library and cloudpickle only, so that a child is there at once; what the function needs comes with
the function.
"""

from __future__ import annotations

import gc
import io
import numbers
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cloudpickle

from hybridflow.rewards.calling import reason_of, settled
from hybridflow.rewards.outcome import Breakdown, RowFailure

LARGEST_FRAME = 2**28
"""Bytes of one call or answer. A function that answers with more failed: nobody's memory should pay for it."""

UNSENT = "answered with what cannot be sent back"
_LENGTH = struct.Struct("!Q")


def frame(payload: bytes) -> bytes:
    """`payload` with its length in front."""
    return _LENGTH.pack(len(payload)) + payload


class Frames:
    """Puts frames together from pieces of any size."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The frames that are complete with this piece. Errors: ConnectionError for a length beyond LARGEST_FRAME."""
        self._bytes += piece
        while len(self._bytes) >= _LENGTH.size:
            length = _LENGTH.unpack_from(self._bytes)[0]
            if length > LARGEST_FRAME:
                raise ConnectionError(f"a frame of {length} bytes")
            if len(self._bytes) < (end := _LENGTH.size + length):
                return
            payload = bytes(self._bytes[_LENGTH.size : end])
            del self._bytes[:end]
            yield payload


def live(connection: socket.socket) -> None:
    """Load the function that comes first, then serve calls until the other end closes.

    Answers are ("ready",) or ("broken", why) first, then ("value", value), ("raised", reason) or ("memory", reason),
    one per call.
    """
    frames = _received(connection)
    setup = pickle.loads(next(frames))
    if (function := _loaded(setup, connection)) is not None:
        _serve(connection, frames, function, setup["memory_mb"])


def stem(connection: socket.socket, orders: socket.socket, settle: Callable[[int, bool], None]) -> None:
    """Load the function once, answer ("ready", forkable) or ("broken", why), then fork a child per order.

    An order carries the child's socket and the end of the pipe that it prints to; the answer is its process id.
    `settle(output, True)` makes a fresh process a child of the nursery. Where loading has started threads, a fork could
    find their locks held for ever: then children have to load the function themselves.
    """
    setup = pickle.loads(next(_received(connection)))
    if (function := _loaded(setup, connection)) is None:
        return
    gc.collect()
    gc.freeze()  # what is shared with the children stays shared
    _answer(connection, ("ready", len(os.listdir("/proc/self/task")) == 1))
    while True:
        order, descriptors, _, _ = socket.recv_fds(orders, 1, 2)
        if not order:
            return
        ours, theirs = os.pipe()
        between = os.fork()  # it ends at once, and the nursery adopts its child
        if not between:
            if child := os.fork():
                os.write(theirs, b"%d" % child)
                os._exit(0)
            for end in (ours, theirs):
                os.close(end)
            orders.close()
            connection.close()
            settle(descriptors[1], True)
            with socket.socket(fileno=descriptors[0]) as own:
                _serve(own, _received(own), function, setup["memory_mb"])
            return
        os.close(theirs)
        for end in descriptors:
            os.close(end)
        number = os.read(ours, 32)
        os.close(ours)
        os.waitpid(between, 0)
        orders.send(number or b"0")


def _loaded(setup: dict[str, Any], connection: socket.socket) -> Callable[..., Any] | None:
    try:
        return cloudpickle.loads(setup["function"])
    except BaseException as error:  # the function's own imports run here: whatever they raise is answered
        _answer(connection, ("broken", reason_of(error)))
        return None


def _serve(
    connection: socket.socket, frames: Iterator[bytes], function: Callable[..., Any], memory_mb: float | None
) -> None:
    _limit_memory(memory_mb)
    _answer(connection, ("ready",))
    for call in frames:
        _answer(connection, _answered(function, call))
        _flush()


def _answered(function: Callable[..., Any], call: bytes) -> tuple[Any, ...]:
    try:
        args, kwargs = pickle.loads(call)
        return ("value", settled(function(*args, **kwargs)))
    except MemoryError as error:
        return ("memory", reason_of(error))
    except BaseException as error:  # it is the user's code, and SystemExit must not end the child either
        return ("raised", reason_of(error))


def _answer(connection: socket.socket, answer: tuple[Any, ...]) -> None:
    try:
        payload = pickle.dumps(plain(answer))
        if len(payload) > LARGEST_FRAME:
            raise ValueError(f"{len(payload) / 2**20:.0f} MiB is more than an answer may have")
    except Exception as error:  # the answer is of a type of the user's: whatever reading it raises is answered
        payload = pickle.dumps(("raised", f"{UNSENT}: {reason_of(error)}"))
    connection.sendall(frame(payload))


def plain(value: Any) -> Any:
    """The answer as plain data: arrays as lists, numbers of any type as Python's.

    Errors: TypeError for what is neither a number, a text, None, RowFailure nor a list, tuple, set or dict of them.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, RowFailure):
        return (Breakdown if isinstance(value, Breakdown) else RowFailure)(str(value.reason))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        return kind(map(plain, value))
    if isinstance(value, Mapping):
        return {plain(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(
        f"a {type(value).__name__} is neither a number, a text, None, RowFailure nor a list or dict of them"
    )


def read_answer(payload: bytes) -> Any:
    """What `_answer` sent. Errors: pickle.UnpicklingError, and others, for anything but plain data."""
    return _PlainData(io.BytesIO(payload)).load()


class _PlainData(pickle.Unpickler):
    """Calls nothing but RowFailure: a child runs the function's code, and should have ours run none of it."""

    def find_class(self, module: str, name: str) -> Any:
        for kind in (RowFailure, Breakdown):
            if (module, name) == (kind.__module__, kind.__name__):
                return kind
        raise pickle.UnpicklingError(f"{module}.{name} is no plain data")


def _received(connection: socket.socket) -> Iterator[bytes]:
    frames = Frames()
    while piece := connection.recv(1 << 20):
        yield from frames.feed(piece)


def _limit_memory(megabytes: float | None) -> None:
    """Let the process grow by so much beyond what it occupies now."""
    if megabytes is None:
        return
    with open("/proc/self/statm") as statm:
        occupied = int(statm.read().split()[0]) * resource.getpagesize()
    limit = occupied + int(megabytes * 2**20)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the function closed it
            continue


def prepare(output: int) -> None:
    """Make a freshly forked process a child: a session of its own, nothing to read, and `output` for what it prints."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115  as long as the process
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write("500")  # a machine out of memory takes a verifier before a model
    except OSError:
        return

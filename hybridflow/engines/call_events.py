"""Event: what a host records of a call, a transfer or a named part of a call, and how it measures the rows' work."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.protocols.operation import OperationKind
from hybridflow.topology import RankGrid

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SWITCHES = ("transition",)  # parts of a call in which weights move between training and generation


class Stage(NamedTuple):
    """A named part of a call; times as in `Event`. `loaded` and `stored` are bytes copied from and to host memory."""

    name: str
    start: float
    end: float
    memory_before: int
    memory_after: int
    loaded: int = 0
    stored: int = 0


class CallWork(NamedTuple):
    """What a call computed on one rank: its rows, their tokens, its optimizer steps, and its own share of the
    arithmetic [FLOP]. `longest` is the longest response in tokens, `tail` the share of the decode steps in which at
    most a quarter of the rows are unfinished (calls that generate)."""

    rows: int = 0
    tokens: int = 0
    flops: float = 0.0
    minibatches: int = 0
    longest: int = 0
    tail: float = 0.0


_NO_WORK = CallWork()


class Event(NamedTuple):
    """One call on one device, in seconds since the epoch and bytes; `ready`: its inputs have arrived.

    `kind` is "call", "transfer" (weights between groups), "switch" (the actor's weights between training and
    generation, inside a call) or "stage" (another named part of a call); parts are called `<method>/<part>`. `rank`
    is the device in its pool, `step` the iteration of a loader's loop (None outside of one). Memory is that of
    `MappedMemory` on CUDA, with its `peak`, and the process's resident memory on the CPU. `phase` is the operation's
    kind. `held` is the account of the device when the call ends: bytes by "role owner" of all models there, with
    "role image" in host memory, and on CUDA "activations": what the call had at its peak beside what stays.
    """

    kind: str
    step: int | None
    seq: int
    role: str
    method: str
    pool: str
    rank: int
    start: float
    ready: float
    end: float
    bytes_in: int = 0
    bytes_out: int = 0
    memory_before: int = 0
    memory_after: int = 0
    peak: int | None = None
    failed: bool = False
    phase: str = ""
    work: CallWork = _NO_WORK
    held: tuple[tuple[str, int], ...] = ()

    @property
    def seconds(self) -> float:
        """Without the wait for inputs."""
        return self.end - self.ready


def events_of(stages: Sequence[Stage], call: Event) -> list[Event]:
    """The events of a call's parts."""
    known = (call.step, call.seq, call.role)
    return [
        Event(
            *("switch" if stage.name in _SWITCHES else "stage", *known, f"{call.method}/{stage.name}"),
            *(call.pool, call.rank, stage.start, stage.start, stage.end, stage.loaded, stage.stored),
            *(stage.memory_before, stage.memory_after),
            phase=call.phase,
        )
        for stage in stages
    ]


def bytes_of(values: Iterable[Any]) -> int:
    """Bytes of the tensors in batches; other values count as 0."""
    return sum(value.nbytes for value in values if isinstance(value, Batch))


class MappedMemory:
    """What torch has allocated on this process's CUDA device, except tensors whose memory is unmapped: torch counts
    those of a sleeping vLLM too."""

    def __init__(self) -> None:
        self._unmapped = self._peak = self._highest = 0

    def set_unmapped(self, size: int) -> None:
        """From here on `size` bytes of what torch has allocated have no memory."""
        _ = self.peak()
        self._unmapped = size
        torch.cuda.reset_peak_memory_stats()

    def now(self) -> int:
        return torch.cuda.memory_allocated() - self._unmapped

    def peak(self, restart: bool = False) -> int:
        """Since the latest call with `restart`."""
        latest = torch.cuda.max_memory_allocated() - self._unmapped
        peak = self._peak = max(self._peak, latest)
        self._highest = max(self._highest, latest)
        if restart:
            self._peak = 0
            torch.cuda.reset_peak_memory_stats()
        return peak

    def highest(self) -> int:
        """Since the latest call of this method, also over calls with `restart`."""
        _ = self.peak()
        found, self._highest = self._highest, 0
        torch.cuda.reset_peak_memory_stats()
        return found


MAPPED = MappedMemory()


def memory_used(device: torch.device) -> int:
    """Bytes that a CUDA device holds for torch; on the CPU the resident memory of this process."""
    if device.type == "cuda":
        return MAPPED.now()
    try:
        return int(os.pread(_memory_file(os.getpid()), 128, 0).split()[1]) * _PAGE
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@lru_cache(maxsize=1)
def _memory_file(pid: int) -> int:
    """Kept open: every call reads it twice."""
    return os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)


def work_of(worker: Any, phase: OperationKind | str, grid: RankGrid, settings: dict[str, Any], result: Any) -> CallWork:
    """The work of a call with these inputs and this result; columns of unexpected types count as no tokens."""
    batch = next((value for value in settings.values() if isinstance(value, Batch)), None)
    generates = phase == "generation"
    rows = result if generates and isinstance(result, Batch) else batch
    if rows is None:
        return _NO_WORK
    lengths, flops, passes, minibatches = _lengths(rows), 0.0, 1, 0
    if phase == "training" and batch is not None:
        epochs = settings.get("epochs", 1)
        passes = epochs if type(epochs) is int else 1
        minibatches = max(1, len(batch.chunk_rows or ())) * passes
    if lengths is not None and (forward := getattr(worker, "forward_flops", None)) is not None:
        # the backward pass takes twice the forward pass; tensor and pipeline parallel ranks share the rows' work
        share = grid.generation().t * grid.generation().p if generates else grid.t * grid.p
        flops = forward(lengths) * passes * (3 if phase == "training" else 1) / share
    longest, tail = 0, 0.0
    responses = rows.peek("response_ids") if generates and "response_ids" in rows else None
    if isinstance(responses, Ragged) and len(responses):
        ordered = responses.lengths.sort().values
        longest, most = int(ordered[-1]), int(ordered[(3 * len(ordered) - 1) // 4])
        tail = (longest - most) / longest if longest else 0.0
    tokens = 0 if lengths is None else int(lengths.sum())
    return CallWork(rows.rows, tokens, flops, minibatches, longest, tail)


def _lengths(batch: Batch) -> Tensor | None:
    """[rows] tokens of prompt and response."""
    if "num_tokens" in batch and isinstance(known := batch.peek("num_tokens"), Tensor) and known.dim() == 1:
        return known
    parts = [batch.peek(name) for name in ("prompt_ids", "response_ids") if name in batch]
    found = [part.lengths for part in parts if isinstance(part, Ragged)]
    return sum(found[1:], found[0]) if found else None

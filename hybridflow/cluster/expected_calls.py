"""ExpectedCalls: calls that the driver has issued to a host, of models in host memory. Such a model comes back behind
the call before its own.

    driver   issue(j)  issue(k) ─ [group of k, k, j, trains] ─▶ the host's LivenessServer
    host     ...j: compute_log_prob │ k: compute_ref_log_prob
    copies        reference comes   │ is there

It may be in vain: a model whose call does not come, or fails before it computes, leaves again before the next call
begins, without a copy.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from hybridflow.cluster.backend import RankCall
from hybridflow.engines.call_events import MAPPED, memory_used
from hybridflow.engines.contract import PARAMETERS, STATES
from hybridflow.engines.host_memory import available

logger = logging.getLogger(__name__)
_GIB = 1 << 30
_MARGIN = 0.02  # of a device: what fragments may cost


class Expected(NamedTuple):
    """Call `seq` of a group; it `trains`, or computes only."""

    group: str
    seq: int
    trains: bool


class ExpectedCalls:
    """`worker_of(group)` is a group's worker, None where it is gone; `limit` bounds what one model brings back, in GiB.

    A model is fetched only where it fits beside the most that earlier calls of the running method took. Calls may run
    in several threads (`call_together`), and `add` is called by another one.
    """

    def __init__(self, worker_of: Callable[[str], Any], device: torch.device, limit: float | None = None) -> None:
        self._worker_of, self._device, self._limit = worker_of, device, limit
        self._lock = threading.Lock()
        self._expected: dict[int, Expected] = {}  # by the call before
        self._running: dict[int, RankCall] = {}
        self._fetched: list[Expected] = []
        self._bytes = 0  # fetched since the device was idle
        self._growth: dict[tuple[str, str], int] = {}  # by group and method: its peak, above what was there before
        self._newest = 0
        self._stream: Any = nullcontext()

    def add(self, group: str, seq: int, before: int, trains: bool) -> None:
        """The driver has issued call `seq` of a group behind call `before` of this host."""
        with self._lock:
            if seq > self._newest:
                self._expected[before] = Expected(group, seq, trains)
                if before in self._running:
                    self._fetch(before)

    @contextmanager
    def running(self, call: RankCall) -> Iterator[None]:
        """Inside runs a call; the one expected behind it gets its model meanwhile."""
        cuda, before = self._device.type == "cuda", memory_used(self._device)
        with self._lock:
            self._newest = max(self._newest, call.seq)
            self._expected = {at: one for at, one in self._expected.items() if one.seq > self._newest}
            self._leave(call.seq - 1)
            self._running[call.seq], self._bytes = call, 0 if not self._running else self._bytes
            self._stream = torch.cuda.stream(torch.cuda.current_stream(self._device)) if cuda else nullcontext()
            self._fetch(call.seq)
        try:
            yield
        finally:
            with self._lock:  # not in the middle of a fetch
                del self._running[call.seq]
                self._leave(call.seq)
                if cuda:
                    key, growth = (call.group, call.method), MAPPED.peak() - before - self._bytes
                    self._growth[key] = max(self._growth.get(key, 0), growth)

    def _fetch(self, running: int) -> None:
        """Bring back the model of the call behind this one."""
        one = self._expected.pop(running, None)
        worker: Any = None if one is None else self._worker_of(one.group)
        if one is None or one.group in {call.group for call in self._running.values()}:
            return  # its model is there, and works
        if getattr(worker, "fetch", None) is None:
            return
        what = STATES if one.trains else PARAMETERS
        try:
            size = worker.away_bytes(what)
            if 0 < size <= self._room(self._running[running]):
                self._fetched.append(one)
                self._bytes += size
                with self._stream:
                    worker.fetch(what)
        except Exception:  # the call itself fails by name, or has the memory then
            logger.debug("the model of call %d was not fetched", one.seq, exc_info=True)

    def _room(self, call: RankCall) -> float:
        """Bytes that a model may take while this call runs."""
        limit = float("inf") if self._limit is None else self._limit * _GIB
        if self._device.type != "cuda":
            found = available()
            return limit if found is None else min(limit, found)
        if (growth := self._growth.get((call.group, call.method))) is None:  # its first time
            return 0
        free, total = torch.cuda.mem_get_info(self._device)
        free += torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return min(limit, free - growth - _MARGIN * total)

    def _leave(self, last: int) -> None:
        """Fetched models whose calls, up to `last`, are over or did not come. Those that run in other threads stay."""
        over = [one for one in self._fetched if one.seq <= last and one.seq not in self._running]
        self._fetched = [one for one in self._fetched if one not in over]
        for one in over:
            if (worker := self._worker_of(one.group)) is not None:
                try:
                    worker.leave()
                except Exception:  # its calls fail by name
                    logger.debug("the model of call %d did not leave", one.seq, exc_info=True)

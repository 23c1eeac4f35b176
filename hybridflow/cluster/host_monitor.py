"""HostMonitor: one thread of the driver holds a connection to each host process, and notices at once when one ends.

starting --address--> connecting --connected--> open --end of stream, error--> connecting again --refused--> lost

Every `SAMPLE_SECONDS` an open host is asked for its activity: a machine that vanished does not acknowledge the
question, and the answers show which rank of a group its peers keep waiting for (`SlowRanks`). A host that does not
answer is named after `SILENT_SECONDS`: what waits for it may be a call of another group, or none. The processes that
are left learn of a loss at once, so that they do not wait for it in a collective.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import selectors
import socket
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
import ray.exceptions

from hybridflow.cluster import liveness
from hybridflow.cluster.backend import HostProcess, RankCall, RankGroup
from hybridflow.cluster.incidents import Incidents, LostHost
from hybridflow.cluster.liveness import ASK, WATCH, Doing
from hybridflow.engines.process_groups import fail_with_machine

logger = logging.getLogger(__name__)
SAMPLE_SECONDS = 2.0
SILENT_SECONDS = 15.0
_TICK_SECONDS = 0.5
_GONE_SECONDS = 2.5  # without an acknowledgement from a machine, and then
_AGAIN_SECONDS = 1.0  # without an answer to a new connection, it is gone
_REFUSED = (errno.ECONNREFUSED, errno.ECONNRESET)
_END_SECONDS = 5.0
_LONGEST = 1 << 16
WINDOW_SECONDS = 60.0
LEAST_SECONDS = 30.0
"""Samples must span this time before a rank is named, and its notices lie a window apart."""
_LEAST_SHARE = 0.2
_TIMES_OTHERS = 3.0
_FEW = 4  # at most one rank of this number is slow: else the peers of all wait for each other


@dataclass(frozen=True)
class Sample:
    """At a moment inside a call of a group: the ranks that work, and where, if all others wait for them."""

    at: float
    call: str
    working: dict[int, str]


def sample(role: str, at: float, doing: Sequence[Doing | None]) -> Sample | None:
    """A sample of the activities of all ranks (None: no answer), or None outside the group's calls."""
    calls = [each.call if each is not None and each.call.startswith(f"{role}.") else "" for each in doing]
    waiting = {rank for rank, each in enumerate(doing) if each is not None and each.waiting and calls[rank]}
    named = Counter(call for call in calls if call)
    if not named:
        return None
    working = {
        rank: "no answer from its process" if each is None else each.place
        for rank, each in enumerate(doing)
        if rank not in waiting and (each is None or calls[rank])
    }
    few = 0 < len(working) <= max(1, len(doing) // _FEW) and waiting
    return Sample(at, named.most_common(1)[0][0], working if few else {})


def slow(samples: Sequence[Sample], ranks: int) -> dict[int, float]:
    """Rank -> the share of the time in calls that its peers waited for it, of ranks that stand out from the others."""
    if not samples or samples[-1].at - samples[0].at < LEAST_SECONDS:
        return {}
    counts = Counter(rank for each in samples for rank in each.working)
    shares = [counts[rank] / len(samples) for rank in range(ranks)]
    usual = statistics.median_low(shares)
    found = {rank: share for rank, share in enumerate(shares) if share >= max(_LEAST_SHARE, _TIMES_OTHERS * usual)}
    return found if len(found) <= max(1, ranks // _FEW) else {}


class SlowRanks:
    """The latest samples of the group `role`, whose rank i is on `nodes[i]`."""

    def __init__(self, role: str, nodes: Sequence[str]) -> None:
        self._role, self._nodes = role, nodes
        self._samples: deque[Sample] = deque()
        self._noticed = -WINDOW_SECONDS

    def add(self, at: float, doing: Sequence[Doing | None]) -> None:
        """The activities of all ranks at `at` seconds."""
        if (found := sample(self._role, at, doing)) is not None:
            self._samples.append(found)
        while self._samples and self._samples[0].at < at - WINDOW_SECONDS:
            self._samples.popleft()

    def notice(self, now: float) -> str:
        """A message that names slow ranks, at most once a minute; "" without any."""
        if now - self._noticed < WINDOW_SECONDS or not (found := slow(self._samples, len(self._nodes))):
            return ""
        self._noticed = now
        span = self._samples[-1].at - self._samples[0].at
        said = []
        for rank, share in found.items():
            last = next(each for each in reversed(self._samples) if rank in each.working)
            node = f" (node {self._nodes[rank]})" if self._nodes[rank] else ""
            said.append(f"rank {rank}{node} for {share:.0%} of the time, last at {last.working[rank]}, in {last.call}")
        return f"{self._role} is slow: in its calls of the last {span:.0f} s its ranks waited for {'; '.join(said)}."


@dataclass(eq=False)
class _Watched:
    """One host and its connection. `told`: a reference to its address, asked for `again` where the first attempt to
    connect failed; `seen`: it was connected once; `until`: the deadline of a connection attempt; `away`: since when an
    open connection has ended."""

    pool: str
    rank: int
    host: HostProcess
    told: Any
    again: bool = False
    address: tuple[str, int] | None = None
    key: bytes = b""
    socket: socket.socket | None = None
    open: bool = False
    seen: bool = False
    until: float = math.inf
    away: float | None = None
    said: bytes = b""
    asked: float | None = None
    doing: Doing | None = None
    silent: bool = False  # and it was reported
    done: bool = False  # lost, or out of reach from here

    def __str__(self) -> str:
        return f"host {self.rank} of pool {self.pool} on node {self.host.node_name or '(unknown)'}"

    def take(self, said: bytes) -> None:
        """A part of an answer. A line that is not one is ignored."""
        *lines, self.said = (self.said + said).split(b"\n")
        self.said = self.said[-_LONGEST:]
        for line in lines:
            self.asked, self.silent = None, False
            with contextlib.suppress(ValueError, TypeError):
                self.doing = Doing(**json.loads(line))


class HostMonitor:
    """Watches hosts until they are forgotten; a loss is logged and recorded in `incidents`. Its thread starts with the
    first host and ends with `close`. A machine that does not answer for less than `tolerate` seconds is not lost."""

    def __init__(self, incidents: Incidents, tolerate: float = 0.0) -> None:
        self._incidents, self._lock, self._tolerate = incidents, threading.Lock(), tolerate
        self._news = deque[tuple[bytes, list[_Watched]]]()  # for the thread to send
        self._watched: dict[Any, _Watched] = {}
        self._groups: dict[str, tuple[RankGroup, SlowRanks]] = {}
        self._thread: threading.Thread | None = None
        self._closed = self._failed = False
        self._sampled = 0.0

    def watch(self, pool: str, hosts: Sequence[HostProcess]) -> None:
        """Watch all hosts of a pool, in rank order."""
        with self._lock:
            self._watched |= {host.address: _Watched(pool, rank, host, host.address) for rank, host in enumerate(hosts)}
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="host monitor", daemon=True)
                self._thread.start()

    def forget(self, hosts: Sequence[HostProcess]) -> None:
        """Stop watching hosts, which are about to be stopped."""
        addresses = {host.address for host in hosts}
        with self._lock:
            for address in addresses & self._watched.keys():
                self._watched.pop(address).done = True  # the thread closes its socket
            for address in addresses:
                self._incidents.lost.pop(address, None)
            gone = [key for key, (ranks, _) in self._groups.items() if addresses & {h.address for h in ranks.hosts}]
            for key in gone:
                del self._groups[key]

    def built(self, ranks: RankGroup) -> None:
        """These ranks are on their hosts from now on."""
        with self._lock:
            self._groups[ranks.key] = ranks, SlowRanks(ranks.name, [host.node_name for host in ranks.hosts])

    def dropped(self, ranks: RankGroup) -> None:
        with self._lock:
            self._groups.pop(ranks.key, None)

    def announce(self, host: HostProcess, call: RankCall, before: int) -> None:
        """Have a host know at once that this call was issued to it behind call `before`."""
        watched = self._watched.get(host.address)
        connection = watched.socket if watched is not None and watched.open else None
        if connection is not None:
            news = json.dumps([call.group, call.seq, before, call.phase == "training"]).encode()
            with contextlib.suppress(OSError):  # the call comes without it
                connection.send(liveness.ISSUED + news + b"\n")

    def find_lost(self, hosts: Sequence[HostProcess]) -> list[HostProcess]:
        """Those of the hosts that are lost, also if that was not noticed yet; asks the others."""
        left = [host for host in hosts if host.address not in self._incidents.lost]
        if left:
            with ThreadPoolExecutor(min(64, len(left)), "host monitor") as threads:
                for host, gone in zip(left, threads.map(partial(_refuses, self._tolerate), left), strict=True):
                    with self._lock:
                        watched = self._watched.get(host.address)
                    if gone and watched is not None and (watched.seen or watched.address is None):
                        self._lose(watched)
        return [host for host in hosts if host.address in self._incidents.lost]

    def close(self) -> None:
        """End the thread and close all connections. Can be called again."""
        self._closed = True
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    # The thread

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            while not self._closed:
                try:
                    self._look(selector)
                except Exception:  # hosts stay watched by Ray
                    if not (self._closed or self._failed):
                        logger.warning("the hosts could not be watched for a moment", exc_info=True)
                    self._failed = True
                    time.sleep(_TICK_SECONDS)
            for key in list(selector.get_map().values()):
                _disconnect(selector, key.data)

    def _look(self, selector: selectors.BaseSelector) -> None:
        """One round: what has come over the connections, then what is due."""
        for key, _ in selector.select(min(_TICK_SECONDS, SAMPLE_SECONDS)):
            watched: _Watched = key.data
            try:
                (self._receive if watched.open else self._connected)(selector, watched)
            except OSError as error:  # of this host's connection alone
                self._give_up(selector, watched, error)
        with self._lock:
            everyone = list(self._watched.values())
        for key in [key for key in selector.get_map().values() if key.data.done]:
            _disconnect(selector, key.data)
        while self._news:
            news, left = self._news.popleft()
            for connection in [w.socket for w in left if w.open and w.socket is not None]:
                with contextlib.suppress(OSError):
                    connection.send(news)
        self._find_started(selector, [w for w in everyone if w.address is None and not w.done])
        now = time.monotonic()
        for watched in everyone:
            if now > watched.until and not watched.done:
                if watched.socket is None:  # the next attempt
                    self._connect(selector, watched)
                else:
                    self._give_up(selector, watched, OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT)))
        if now >= self._sampled + SAMPLE_SECONDS:
            self._sample(now, everyone)

    def _find_started(self, selector: selectors.BaseSelector, starting: Sequence[_Watched]) -> None:
        """Connect to hosts whose processes have started."""
        if not starting or not ray.is_initialized():  # Ray's functions would start a cluster
            return
        refs = [watched.told for watched in starting]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0])
        for watched in starting:
            if watched.told in ready:
                try:
                    *where, watched.key = ray.get(watched.told, timeout=liveness.ANSWER_SECONDS)
                    watched.address = where[0], where[1]
                    self._connect(selector, watched)
                except ray.exceptions.GetTimeoutError:
                    continue
                except ray.exceptions.RayError:
                    self._lose(watched)

    def _connect(self, selector: selectors.BaseSelector, watched: _Watched) -> None:
        assert watched.address is not None
        watched.open, watched.said, watched.asked = False, b"", None
        watched.until = time.monotonic() + (_AGAIN_SECONDS if watched.seen else liveness.ANSWER_SECONDS)
        try:
            watched.socket = _new_socket(watched.address[0])
        except OSError as error:  # this process has too many open files
            logger.warning("%s is not watched: %s", watched, error)
            watched.done, watched.until = True, math.inf
            return
        code = watched.socket.connect_ex(watched.address)
        selector.register(watched.socket, selectors.EVENT_WRITE, watched)
        if code not in (0, errno.EINPROGRESS):
            self._give_up(selector, watched, OSError(code, os.strerror(code)))

    def _connected(self, selector: selectors.BaseSelector, watched: _Watched) -> None:
        assert watched.socket is not None
        if code := watched.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self._give_up(selector, watched, OSError(code, os.strerror(code)))
            return
        with self._lock:
            losses = list(self._incidents.lost.values())
            watched.socket.send(watched.key + WATCH + b"".join(map(_news, losses)))
            watched.open = watched.seen = True  # it learns of later losses, too, and calls are announced to it
        watched.until = math.inf
        if watched.away is not None and (seconds := time.monotonic() - watched.away) > _AGAIN_SECONDS:
            logger.warning("%s answers again, after %.1f s", watched, seconds)
        watched.away = None
        selector.modify(watched.socket, selectors.EVENT_READ, watched)

    def _receive(self, selector: selectors.BaseSelector, watched: _Watched) -> None:
        assert watched.socket is not None
        try:
            said = watched.socket.recv(_LONGEST)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            watched.take(said)
        else:  # its end, or only that of the connection
            _disconnect(selector, watched)
            if not watched.done:
                watched.away = time.monotonic()
                self._connect(selector, watched)

    def _give_up(self, selector: selectors.BaseSelector, watched: _Watched, why: OSError) -> None:
        """A connection attempt failed: the host is lost, unless it was away for a moment only, or lives and was never
        within reach."""
        _disconnect(selector, watched)
        watched.until = math.inf
        short = watched.away is not None and time.monotonic() < watched.away + self._tolerate
        if short and why.errno not in _REFUSED:  # else its machine is there
            watched.until = time.monotonic() + _TICK_SECONDS
        elif watched.seen:
            self._lose(watched)
        elif not watched.again:  # it may have died before: then Ray gives an error instead of the address
            watched.again, watched.address = True, None
            watched.told = watched.host.handle.address.remote()
        else:
            logger.debug("%s cannot be watched: %s", watched, why)
            watched.done = True

    def _lose(self, watched: _Watched) -> None:
        """Record and log a loss, once."""
        host = watched.host
        with self._lock:
            if watched.host.address not in self._watched or host.address in self._incidents.lost:
                return
            watched.done = True
            lost = LostHost(watched.pool, watched.rank, host.node_name, time.time())
            self._incidents.lost[host.address] = lost
            self._news.append((_news(lost), [other for other in self._watched.values() if other.open]))
        logger.error(
            "%s is lost: its process died or its machine is gone. It held %s, whose calls fail from now on. Close the "
            "pool and make a new one.",
            *(watched, self._held_by(host)),
        )

    def _held_by(self, host: HostProcess) -> str:
        """The ranks on this host."""
        with self._lock:
            groups = [ranks for ranks, _ in self._groups.values()]
        ranks = [(one.name, rank) for one in groups for rank, at in enumerate(one.hosts) if at.address == host.address]
        return ", ".join(f"{name} (rank {rank})" for name, rank in ranks) or "no group"

    def _sample(self, now: float, everyone: Sequence[_Watched]) -> None:
        """Look for ranks that their peers wait for, and ask all hosts for their activity once more."""
        self._sampled = now
        activity = {w.host.address: w.doing if w.asked is None else None for w in everyone if w.open}
        with self._lock:
            groups = list(self._groups.values())
        for ranks, slow in groups:
            if len(ranks.hosts) > 1 and all(host.address in activity for host in ranks.hosts):
                slow.add(now, [activity[host.address] for host in ranks.hosts])
                if text := slow.notice(now):
                    logger.warning("%s", text)
        for watched in everyone:
            if watched.asked is not None and now - watched.asked >= SILENT_SECONDS and not watched.silent:
                watched.silent = True
                said = "%s, which holds %s, has not answered for %.0f s: its process is stopped, or hangs in a function"
                logger.warning(said, watched, self._held_by(watched.host), now - watched.asked)
            if watched.open and watched.asked is None and watched.socket is not None:
                with contextlib.suppress(OSError):  # the next round reads the error
                    watched.socket.send(ASK)
                    watched.asked = now


def _news(lost: LostHost) -> bytes:
    return liveness.LOST + json.dumps([lost.pool, lost.rank, lost.at]).encode() + b"\n"


def _disconnect(selector: selectors.BaseSelector, watched: _Watched) -> None:
    if watched.socket is not None:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(watched.socket)
        watched.socket.close()
    watched.socket, watched.open, watched.doing = None, False, None


def _new_socket(host: str) -> socket.socket:
    """A socket that fails within `_GONE_SECONDS` when the other machine is gone."""
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setblocking(False)
    fail_with_machine(made, 1, 1, _GONE_SECONDS)
    return made


def _refuses(tolerate: float, host: HostProcess) -> bool:
    """Whether the process is gone: nothing listens at its address, or its machine does not answer within `tolerate` s.
    A stopped process still does."""
    end = time.monotonic() + tolerate
    while (found := liveness.lives(host.address)) is None and time.monotonic() < end:
        time.sleep(_TICK_SECONDS)
    return not found

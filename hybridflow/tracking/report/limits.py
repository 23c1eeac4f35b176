"""Limits of an iteration: the parts of its critical path, which is walked backwards over the events. Pure.

The path begins at the last call to end. Before a call comes the call that ended last before its inputs had arrived.
Time between two calls is a wait for data where the driver waited for its loader, and the driver's elsewhere. A call
that runs beside a longer one does not count, so the shares of all limits add up to at most 1.
"""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.tracking.report.event_summary import covered

Record = Mapping[str, Any]
Device = tuple[str, int]
_SLOW, _SKEW = 1.25, 1.15  # a device's time over that of its peers: slow; different at all
_RECOMPUTED = 4 / 3  # an update may compute its forward passes twice
_LEAST_MINIBATCHES = 4
_LEAST_OF_DRIVER = 0.005  # share of the time below which it is no limit: messages between calls

ADVICE = {
    "generation tail": "few responses still decode when the others have ended: lower max_tokens, or let the next batch "
    "begin meanwhile (hf.stream, hf.elastic)",
    "generation": "use more devices or a smaller tp for generation, or larger batches per engine",
    "weight transfer": "synchronize less often, keep the groups on the same devices, or use overlap=True and fewer "
    "differences between the layouts of training and generation",
    "preparation": "raise micro_tokens, place the frozen models on devices of their own, or leave one of them out",
    "update": "use more devices, micro_tokens, or less recomputation",
    "data": "the driver waits for its loader: give it workers=, or a simpler map=",
    "driver": "no call runs, because of the driver's own work and of messages: let workers compute what it does, read "
    "results (.get(), float(...)) only where the loop needs them, and give calls more rows",
    "reward": "give the reward more processes, a time limit, or devices of its own",
    "slow host": "replace this machine, or look for other programs on it",
    "tiny mini-batches": "use fewer and larger mini-batches",
}


@dataclass(frozen=True)
class Limit:
    """A part of the critical path."""

    name: str
    seconds: float
    """Per iteration."""
    share: float
    """Of the iterations' time."""
    advice: str


def find_limits(events: Sequence[Record]) -> list[Limit]:
    """Limits of the iterations in `events` (as of `read_events`), the largest first; without calls none.

    The first iteration, which warms up, counts only when there are fewer than three.
    """
    everything = [e for e in events if e["kind"] in ("call", "transfer") and (e.get("step") or 0) >= 1]
    steps = sorted({e["step"] for e in everything})
    steps = steps[1:] if len(steps) > 2 else steps
    if not steps:
        return []
    used = set(steps)
    calls = [e for e in everything if e["step"] in used]
    last = defaultdict[int, float](float)
    for call in calls:
        last[call["seq"]] = max(last[call["seq"]], call["ready"])
    # a transfer begins when its last rank does: the others wait for it
    calls = [{**e, "ready": min(last[e["seq"]], e["end"])} if e["kind"] == "transfer" else e for e in calls]
    waits = [(e["start"], e["end"]) for e in events if e["kind"] == "wait" and e.get("step") in used]
    restarts = [(e["start"], e["end"]) for e in events if e["kind"] == "restart"]
    parts = _Parts(calls, [e for e in events if e["kind"] == "switch" and e.get("step") in used])
    start, first = min([*(e["start"] for e in calls), *(begin for begin, _ in waits)]), min(e["ready"] for e in calls)
    start = max([start, *(e["end"] for e in everything if e["step"] not in used and e["end"] <= first)])
    total = max(e["end"] for e in calls) - start
    found: dict[str, float] = defaultdict(float)
    parts_of_run = [e["time"] for e in events if e["kind"] == "run"]
    for before, after, call in critical_path(calls, start):
        if call is None and any(before <= began <= after for began in parts_of_run):
            total -= after - before
            continue
        if call is not None:
            split = parts.of(call)
        else:
            data, lost = (covered(spans, (before, after)) for spans in (waits, restarts))
            split = [("data", data), ("driver", after - before - data - lost)]
            total -= lost
        for name, seconds in split:
            found[name] += seconds
    limits = [
        Limit(name, seconds / len(steps), seconds / total, parts.advice(name))
        for name, seconds in found.items()
        if seconds > (_LEAST_OF_DRIVER * total if name == "driver" else 0) and total > 0
    ]
    return sorted(limits, key=lambda limit: -limit.seconds)


def critical_path(calls: Sequence[Record], start: float) -> Iterator[tuple[float, float, Record | None]]:
    """Its parts from the last to the first, down to `start`: (begin, end, call), where None is a gap."""
    ordered = sorted(calls, key=lambda e: e["end"])
    ends, at = [e["end"] for e in ordered], len(ordered)
    now = ends[-1]
    while now > start:
        at = min(at - 1, bisect_right(ends, now) - 1)
        if at < 0:
            yield start, now, None
            return
        call = ordered[at]
        if call["end"] < now:
            yield call["end"], now, None
        now = min(now, call["ready"])
        yield now, call["end"], call


def category(event: Record) -> str:
    """The limit that a call belongs to as a whole."""
    method, phase, role = event["method"], event.get("phase", ""), event["role"]
    if event["kind"] == "transfer":
        return "weight transfer"
    if phase == "generation" or method.startswith(("generate", "advance_rows")):
        return "generation"
    if phase == "training" or method.startswith("update"):
        return "update"
    if method.startswith("compute_reward") or "reward" in role:
        return "reward"
    return "preparation"


class _Parts:
    """Splits the seconds of a call on the critical path; knows its peers, switches, and the slow device, if any."""

    def __init__(self, calls: Sequence[Record], switches: Sequence[Record]) -> None:
        self._peers: dict[int, list[Record]] = defaultdict(list)
        self._switched: dict[tuple[int, Device], float] = defaultdict(float)
        self._speed: dict[Device, float] = {}  # FLOP/s of the fastest inference on a device
        for call in calls:
            self._peers[call["seq"]].append(call)
            if call.get("phase") == "inference" and call.get("flops") and _seconds(call) > 0:
                speed = call["flops"] / _seconds(call)
                self._speed[_device(call)] = max(self._speed.get(_device(call), 0.0), speed)
        for switch in switches:
            self._switched[switch["seq"], _device(switch)] += switch["end"] - switch["start"]
        self.slow, self._ratios = _slow_device(self._peers.values())
        self._minibatches = 0.0

    def of(self, call: Record) -> list[tuple[str, float]]:
        """(name of a limit, seconds) of the call's parts."""
        left, name, out = _seconds(call), category(call), list[tuple[str, float]]()

        def take(part: str, seconds: float) -> None:
            nonlocal left
            seconds = min(max(seconds, 0.0), left)
            left -= seconds
            out.append((part, seconds))

        take("weight transfer", self._switched.get((call["seq"], _device(call)), 0.0))
        if _device(call) == self.slow and (ratio := self._ratios.get(call["method"], 1.0)) > 1:
            take("slow host", left * (1 - 1 / ratio))
        if name == "generation":
            peers = [e["end"] for e in self._peers[call["seq"]]]
            take("generation tail", max(call["end"] - statistics.median(peers), left * call.get("tail", 0.0)))
        number, speed = call.get("minibatches", 0), self._speed.get(_device(call))
        if name == "update" and speed and number >= _LEAST_MINIBATCHES and call.get("flops"):
            needed = _RECOMPUTED * call["flops"] / speed  # at the speed of inference in large batches
            if 2 * needed <= _seconds(call):
                self._minibatches = max(self._minibatches, number)
                take("tiny mini-batches", _seconds(call) - needed)
        take(name, left)
        return out

    def advice(self, name: str) -> str:
        found = ""
        if name == "slow host" and self.slow is not None:
            pool, rank = self.slow
            found = f"rank {rank} of pool {pool} takes {max(self._ratios.values()):.1f} times as long as its peers: "
        if name == "tiny mini-batches":
            found = f"an update makes {self._minibatches:g} steps, which take longer than their arithmetic: "
        return found + ADVICE[name]


def _slow_device(calls: Iterable[Sequence[Record]]) -> tuple[Device | None, dict[str, float]]:
    """The device that takes longer than its peers for the same work, and by how much in each method.

    A collective makes all ranks equally slow, so only methods whose ranks differ decide. A device is slow when it is
    in at least half of these.
    """
    ratios: dict[str, dict[Device, list[float]]] = defaultdict(lambda: defaultdict(list))
    for peers in calls:
        # seconds per unit of work, in the first unit that all peers have
        unit = next((one for one in ("longest", "flops", "rows") if all(peer.get(one) for peer in peers)), None)
        costs = {_device(e): _seconds(e) / (e[unit] if unit else 1) for e in peers if e["kind"] == "call"}
        for device, cost in costs.items():
            others = [other for at, other in costs.items() if at != device]
            if others and (middle := statistics.median(others)) > 0:
                ratios[peers[0]["method"]][device].append(cost / middle)
    medians = {m: {at: statistics.median(found) for at, found in of.items()} for m, of in ratios.items()}
    different = {method: of for method, of in medians.items() if max(of.values()) >= _SKEW}
    votes: dict[Device, dict[str, float]] = defaultdict(dict)
    for method, of in different.items():
        slowest = max(of, key=of.__getitem__)
        if of[slowest] >= _SLOW:
            votes[slowest][method] = of[slowest]
    if not votes:
        return None, {}
    device = max(votes, key=lambda at: (len(votes[at]), max(votes[at].values())))
    return (device, votes[device]) if 2 * len(votes[device]) >= len(different) else (None, {})


def _device(event: Record) -> Device:
    return event["pool"], event["rank"]


def _seconds(event: Record) -> float:
    return event["end"] - event["ready"]

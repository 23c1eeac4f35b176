"""`hybridflow profile`: measures a model's layers on the local devices, so that the planner can price calls.

Groups of 1, 2, 4, ... devices build real engines for the model with few layers and time them at powers of two. Sizes
that do not fit or do not divide the model are left out: the planner uses its formulas there.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config import VLLM
from hybridflow.engines.profile import BIG, EngineProbe, Points
from hybridflow.engines.vllm.requirements import check as check_vllm
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.spec import Head, ModelSpec
from hybridflow.planner.cost.hardware import Curve, LayerProfile, Pass, architecture
from hybridflow.planner.describe.cluster_spec import known_device, slowed
from hybridflow.planner.describe.mesh import powers
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL, THREE_D_PROTO
from hybridflow.settings import Size, require, settings
from hybridflow.topology import RankGrid
from hybridflow.tracing.trace import configuration
from hybridflow.workers.worker import Worker

logger = logging.getLogger(__name__)
_LEAST = 1e-7  # seconds: lower bound of a measurement, which noise may make zero or negative
_BUSY_SECONDS = 0.3
_BYTES = 18.0  # per trained parameter, at most: 16-bit parameter, float32 gradient, main parameter, moments
_CALLS = 10
_PASSES: tuple[tuple[Pass, Pass], ...] = (("forward", "output"), ("backward", "output_backward"))


class ProfileWorker(Worker):
    """One rank that measures. `config` is the model's Hugging Face configuration, rows have `length` tokens."""

    role = "profile"

    def __init__(self, *, config: Mapping[str, Any], length: int, repeats: int) -> None:
        self.probe = EngineProbe(self.context, config, length, repeats)

    @register(ONE_TO_ALL, blocking=True)
    def measure(self, what: str, arguments: tuple[Any, ...]) -> Any:
        """Run the probe's method `what` on each rank."""
        return getattr(self.probe, what)(*arguments)

    @register(ONE_TO_ALL, blocking=True)
    def device(self) -> tuple[str, float]:
        """Name and memory [bytes] of the rank's device; "host" on a processor."""
        if self.context.device.type != "cuda":
            return "host", float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        properties = torch.cuda.get_device_properties(self.context.device)
        return properties.name, float(properties.total_memory)

    @register(THREE_D_PROTO, reads=("prompt_ids", "response_ids"), writes=("seen",))
    def look(self, batch: Batch) -> Batch:
        """`seen` [B] float32: reads and writes columns and computes nothing."""
        return Batch({"seen": torch.zeros(batch.rows)})


@settings
class Amounts:
    """Sizes to measure: rows of `length` tokens, micro-batches of `least` to `tokens` tokens, decode steps of up to
    `rows` rows, models of `few` and `many` layers. A time is the median of `repeats` runs, for decoding of `steps`
    steps each. `between_nodes` measures the network, too, with as many devices of two nodes. Errors: ConfigError for
    sizes that are not positive, and unless `few` and `many` differ.
    """

    devices: Size
    length: Size = 128
    tokens: Size = 4096
    rows: Size = 128
    least: Size = 64
    few: Size = 1
    many: Size = 4
    steps: Size = 8
    repeats: Size = 5
    between_nodes: bool = False

    def __post_init__(self) -> None:
        require(self.few < self.many, f"Amounts(few={self.few}, many={self.many}): give two numbers of layers.")
        require(self.least <= self.tokens, f"Amounts(tokens={self.tokens}): the least are {self.least}.")

    @property
    def micro_batches(self) -> list[int]:
        return [n for n in powers(self.tokens) if n >= self.least]


def profile(model: str | os.PathLike[str], devices: int, **how: Any) -> LayerProfile:
    """Measure on the first `devices` devices of one node of the session's cluster; `how` are fields of `Amounts`.

    `model` is a directory with a `config.json`, such a file, or a hub name; no weights are read.
    Errors: ConfigError for wrong amounts, CheckpointError and ModelError for a path without a model or an unsupported
    one, PlacementError for more devices or nodes than there are.
    """
    amounts, config = Amounts(devices=devices, **how), configuration(model)
    spec = ModelSpec.from_hf_config(config)
    network = {}
    if amounts.between_nodes:  # first: it says at once where there is one node only
        with ResourcePool([devices] * 2) as pool:
            network = _Profiling(pool, config, spec, amounts).network()
    with ResourcePool([devices]) as pool:
        return replace(_Profiling(pool, config, spec, amounts).profile(), **network)


class _Profiling:
    def __init__(self, pool: ResourcePool, config: Mapping[str, Any], spec: ModelSpec, amounts: Amounts) -> None:
        self.pool, self.config, self.spec, self.amounts = pool, config, spec, amounts
        self.curves: list[Curve] = []
        self.slow: dict[int, float] = {1: 1.0}

    def profile(self) -> LayerProfile:
        with self._group(1, 1) as group:
            name, self.memory = group.device()[0]
            (host,) = group.measure("host", ())
        cuda = name != "host"
        if not cuda:
            self.memory /= self.amounts.devices
        self._slowdown()
        call = self._call_seconds()
        latency, bandwidth = self._link()
        for t in powers(self.amounts.devices):
            for d in powers(self.amounts.devices // t):
                self._passes(t, d)
        for t in powers(self.amounts.devices):
            self._decode(t, "cuda" if cuda else "cpu")
        slowdown = tuple((float(n), factor) for n, factor in sorted(self.slow.items()))
        return LayerProfile(known_device(name), tuple(self.curves), slowdown, latency, bandwidth, call, host)

    def network(self) -> dict[str, float]:
        """Of a pool of two nodes: latency [s] of a message between them, bandwidth [bytes/s] of all devices of one."""
        devices = self.amounts.devices
        with self._group(1, 2 * devices) as group:
            small, big = (max(column) for column in zip(*group.measure("pairs", ()), strict=True))
        return {"network_latency": small / 2, "network": devices * BIG / max(big - small, _LEAST)}

    @contextmanager
    def _group(self, t: int, d: int) -> Iterator[WorkerGroup]:
        own = {"config": self.config, "length": self.amounts.length, "repeats": self.amounts.repeats}
        start = time.perf_counter()
        group = ProfileWorker.on(self.pool.part(range(t * d)), grid=RankGrid(t=t, d=d), **own)
        try:
            yield group
        finally:
            group.close()
        logger.info("t=%d, d=%d: %.1f s", t, d, time.perf_counter() - start)

    def _slowdown(self) -> None:
        """Measure devices of one node that compute at once."""
        sizes = powers(self.amounts.devices)
        with self._group(1, sizes[-1]) as group:
            ranks = group.measure("busy", (self.amounts.tokens // 4, _BUSY_SECONDS, sizes))
        # each rank reports the larger sizes only, which are its last values
        took = {n: sum(found[i - len(sizes)] for found in ranks[:n]) / n for i, n in enumerate(sizes)}
        self.slow = {n: max(1.0, seconds / took[1]) for n, seconds in took.items()}

    def _call_seconds(self) -> float:
        """Time calls of alternating groups; each reads the columns of the call before."""
        rows, half = 8 * self.amounts.devices, max(1, self.amounts.length // 2)
        ids = Ragged.from_lengths(torch.zeros(rows * half, dtype=torch.int64), [half] * rows)
        with self._group(1, self.amounts.devices) as group:
            given = BatchRef.from_batch(Batch({"prompt_ids": ids, "response_ids": ids}))
            group.look(given).get()
            start = time.perf_counter()
            for _ in range(_CALLS):
                group.look(given).get()
            took = (time.perf_counter() - start) / _CALLS
        return max(_LEAST, took / self.slow[powers(self.amounts.devices)[-1]])

    def _link(self) -> tuple[float | None, float | None]:
        """Latency [s] and bandwidth [bytes/s] of messages between two devices, from an all-reduce of theirs."""
        if self.amounts.devices < 2:
            return None, None
        with self._group(2, 1) as group:
            small, big = (max(column) / self.slow[2] for column in zip(*group.measure("link", ())))
        # 2 log2(t) hops, and 2 (t-1)/t of the bytes, see `links`
        return small / 2, BIG / max(big - small, _LEAST)

    def _passes(self, t: int, d: int) -> None:
        """Curves of training and inference; with several data parallel ranks only their extra time per update."""
        few, many = self._layers(t)
        if not few or not self.spec.divides(t):
            logger.info("t=%d is not measured: it does not divide the model, or two layers do not fit.", t)
            return
        tokens = self.amounts.micro_batches if d == 1 else self.amounts.micro_batches[:1]
        with self._group(t, d) as group:
            ranks = group.measure("passes", (((few, "lm"), (many, "lm"), (few, "value")), tokens))
        less, more, other = (_slowest(column) for column in zip(*ranks, strict=True))
        for found in (less, more, other):
            both = zip(found["both"], found["forward"], strict=True)
            found["backward"] = [(n, max(_LEAST, total - forward)) for (n, total), (_, forward) in both]
        busy = _share(chain(*ranks), "busy update")
        self._add("update", t, [less["update"][0], more["update"][0]], d=d, busy=busy)
        at, one, two = (found["update"][0] for found in (other, less, more))
        grown = (at[0] + two[0] - one[0], at[1] + max(0.0, two[1] - one[1]))  # as many more layers
        self._add("update", t, [at, grown], d=d, head="value", busy=busy)
        if d > 1:
            return
        busy = _share(chain(*ranks), "busy")
        for kind, output in _PASSES:
            models: tuple[tuple[Head, Any], ...] = (("lm", less), ("value", other))
            for head, found in models:
                layer, beside = [], []
                for i, count in enumerate(tokens):
                    one, two, own = (of[kind][i][1] for of in (less, more, found))
                    each = max(_LEAST, (two - one) / (many - few))
                    layer.append((count, each))
                    whole, rest = divmod(count, self.amounts.length)  # rows of the probe, half of each is a response
                    answers = whole * max(1, self.amounts.length // 2) + (max(1, rest // 2) if rest else 0)
                    beside.append((answers, own - few * each))
                self._add(kind, t, layer, head=head, busy=busy)
                self._add(output, t, beside, head=head, busy=busy)

    def _decode(self, t: int, device: str) -> None:
        few, many = self._layers(t)
        steps = self.amounts.steps
        prompt = max(1, min(self.amounts.length // 2, self.spec.context - steps - 1))
        try:
            check_vllm(self.spec, VLLM(tp=t, max_length=prompt + steps + 1), device)
        except (ModelError, ConfigError) as error:
            logger.info("generation with t=%d is not measured: %s", t, error)
            return
        rows = powers(self.amounts.rows)
        with self._group(t, 1) as group:
            ranks = {n: group.measure("decode", (n, rows, prompt, steps)) for n in (few, many)}
        at, busy = {n: _slowest(found)["decode"] for n, found in ranks.items()}, _share(chain(*ranks.values()), "busy")
        layer, rest = [], []
        for (count, one), (_, more) in zip(at[few], at[many], strict=True):
            each = max(_LEAST, (more - one) / (many - few))
            layer.append((count, each))
            rest.append((count, one - few * each))
        self._add("decode", t, layer, busy=busy)
        self._add("step", t, rest, busy=busy)

    def _add(self, kind: Pass, t: int, points: Points, d: int = 1, head: Head = "lm", busy: float = 1.0) -> None:
        """Add a curve, corrected to devices that have their node to themselves, and non-decreasing."""
        alone = slowed(sorted(self.slow.items()), t * d * busy)
        model = architecture(replace(self.spec, head=head))
        kept = [max(_LEAST, seconds) / alone for seconds in rising([seconds for _, seconds in points])]
        self.curves.append(Curve(model, kind, t, tuple(zip((n for n, _ in points), kept, strict=True)), d, busy))

    def _layers(self, t: int) -> tuple[int, int]:
        """The two layer counts to measure: at most the model's own, and within memory."""
        few, many = self.amounts.few, self.amounts.many
        each = self._elements(few + 1) - self._elements(few)
        # two models of few layers and one of many are on a device at once
        while many > few and (3 * self._elements(few) + each * (many - few)) / t * _BYTES > 0.6 * self.memory:
            many -= 1
        return (few, many) if many > few else (0, 0)

    def _elements(self, layers: int) -> int:
        return replace(self.spec, layers=layers).num_parameters


def rising(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to `values` (neighbours that fall share their mean)."""
    from scipy.optimize import isotonic_regression  # takes a while to import

    return isotonic_regression(values).x.tolist()


def _slowest(found: Sequence[Mapping[str, Points]]) -> dict[str, Points]:
    """The largest seconds of all ranks at each point."""
    return {
        kind: [(points[0][0], max(seconds for _, seconds in points)) for points in zip(*(one[kind] for one in found))]
        for kind in found[0]
    }


def _share(found: Iterable[Mapping[str, Points]], kind: str) -> float:
    """The mean share of busy time over all ranks."""
    return max(_LEAST, statistics.fmean(share for one in found for _, share in one[kind]))

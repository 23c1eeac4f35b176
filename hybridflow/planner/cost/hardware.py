"""What devices and links reach: fitted shares of their peaks (`Coefficients`), the links of a mesh (`LinkModel`), and
measured seconds of a layer, which replace the roofline where available (`LayerProfile`). Pure.

Ranks lie on a mesh with t fastest, then p, then d (paper, section 5.3), so tensor parallel groups are neighbours.
Collectives move what rings do: n ranks that all-reduce b bytes each send and receive 2 (n-1)/n b (Thakur et al. 2005);
those of tensor parallel ranks and between nodes wait for as many messages as trees do, others inside a node as rings.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from hybridflow.config import DType
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.mesh import Mesh
from hybridflow.settings import NonNegative, PositiveFraction, read_yaml, require, settings


@settings
class Coefficients:
    """Achievable shares of the devices' and links' peaks, and fixed costs.

    `device` names what they were fitted on ("" for the defaults). `calibrate` fits the first five; the others are
    constants, each with its source. Efficiencies are shares of the data sheet's figure; a matrix product of which a
    device has n columns runs at `compute * n / (n + half_columns)` of the peak. Launches of a layer overlap with the
    device's work: the larger of the two counts. Other seconds are those of a device's host process, hidden only where a
    pipeline decodes other rows meanwhile."""

    device: str = ""
    compute: PositiveFraction = 0.7  # of the peak, in matrix products
    reduce: PositiveFraction = 0.55  # of the bandwidth inside a node, in all-reduces of tensor parallel ranks
    latency: NonNegative = 10e-6  # seconds in which a kernel or a collective is launched, beside those of its messages
    step_seconds: NonNegative = 3e-3  # what the host does for a decode step
    micro_seconds: NonNegative = 2e-3  # and for a pass of a micro-batch through a stage, beside its launches
    link: PositiveFraction = 0.75  # of the bandwidth inside a node, in other messages
    half_columns: NonNegative = 128.0  # columns at which half of that is reached: a tile of CUTLASS's products
    attention: PositiveFraction = 0.4  # of the peak: FlashAttention-2, causal, forward and backward (Dao 2023, fig. 5)
    memory: PositiveFraction = 0.75  # of the memory bandwidth: decode attention and element-wise kernels
    network: PositiveFraction = 0.75  # of the bandwidth between nodes: nccl-tests, many groups at once
    decode_layer_seconds: NonNegative = 12e-6  # launches of a layer in a decode step: 12 kernels of a CUDA graph
    row_seconds: NonNegative = 30e-6  # of the host for a row in a decode step: vLLM's scheduler, sampling, text
    call_seconds: NonNegative = 20e-3  # dispatch of a call, and of every optimizer step (`benchmarks.controller`)
    function_seconds: NonNegative = 100e-6  # of a host for a row in a function (`benchmarks.rewards`)
    usable_memory: PositiveFraction = 0.92  # of the device memory: vLLM's default gpu_memory_utilization
    error: NonNegative = 0.03  # relative, of predictions: by more than this a further layout of a group must win

    def save(self, path: str | Path) -> None:
        Path(path).write_text(yaml.safe_dump(asdict(self), sort_keys=False))  # type: ignore[call-overload]

    @classmethod
    def load(cls, path: str | Path) -> Coefficients:
        """Read what `save` wrote. Errors: ConfigError for a missing file or other contents."""
        found = read_yaml(path, "calibration file")
        require(isinstance(found, dict), f"{path} holds a {type(found).__name__}, not the coefficients of a planner.")
        return cls(**found)


DEFAULT = Coefficients()
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class LinkModel:
    """Achievable rates of one device of the mesh [bytes/s]."""

    local: int
    """Neighbours of the mesh that lie in one node."""
    flops: float
    """At the peak."""
    bandwidth: float
    """Of the device's memory."""
    link: float
    network: float
    """Of a whole node, which its devices share."""
    latency: float
    network_latency: float
    reduce: float
    """Of the link, in all-reduces of neighbours."""
    host: float
    """Copies to and from host memory."""
    launch: float = 0.0
    """Seconds before the first message of every collective."""
    p: int = 1
    t: int = 1
    d: int = 1
    shares: int = 1
    """Ranks of a tensor parallel group that share what is not cut (sequence parallelism: t, else 1)."""

    @classmethod
    def of(cls, cluster: ClusterSpec, mesh: Mesh, dtype: DType, k: Coefficients) -> LinkModel:
        """With sizes of 1. Errors: PlacementError for a device outside of the cluster, ConfigError for a dtype that it
        lacks."""
        counts, node, device = cluster.counts(mesh.devices), cluster.node, cluster.node.device
        return cls(
            local=min(counts.values()) if len(counts) > 1 else mesh.size,
            flops=device.peak(dtype),
            bandwidth=device.bandwidth * k.memory,
            link=node.bandwidth * k.link,
            network=cluster.bandwidth * k.network,
            latency=node.latency,
            network_latency=cluster.latency,
            reduce=node.bandwidth * k.reduce,
            host=device.host,
            launch=k.latency,
        )

    def inside(self, neighbours: int) -> bool:
        """Every group of `neighbours` ranks in a row lies in one node."""
        return neighbours <= self.local and self.local % neighbours == 0

    def tensor_all_reduce(self, nbytes: float) -> float:
        """Seconds in which t neighbours add up `nbytes` each. Beyond a node the ring enters each node once."""
        t = self.t
        if t == 1:
            return 0.0
        hops, volume = 2 * math.log2(t), 2 * (t - 1) / t * nbytes
        if self.inside(t):
            return self.launch + hops * self.latency + volume / self.reduce
        groups = max(1, self.local // t) + (1 if self.local % t else 0)  # that share the node's network
        return self.launch + hops * self.network_latency + volume * groups / min(self.network, self.reduce * groups)

    def stage_message(self, nbytes: float) -> float:
        """Seconds until a stage has handed `nbytes`, which its t ranks share or each have, to the next stage."""
        if self.p == 1:
            return 0.0
        if self.inside(self.p * self.t):
            return self.launch + self.latency + nbytes / self.shares / self.link
        copies = min(self.t, self.local) / self.shares
        return self.launch + self.network_latency + nbytes * copies / min(self.network, self.link * self.t)

    def all_to_all(self, nbytes: float, ranks: int, apart: int) -> float:
        """Seconds in which each of `ranks` ranks, `apart` ranks from each other, gives every other one its part of
        `nbytes`. All such groups work at once and share the network of their nodes."""
        if ranks == 1:
            return 0.0
        if self.inside(apart * ranks):
            return self.launch + self.latency + (ranks - 1) / ranks * nbytes / self.link
        near = max(1, min(ranks, self.local // apart))
        leaves, stays = (ranks - near) / ranks * nbytes, (near - 1) / ranks * nbytes
        return self.launch + self.network_latency + max(leaves * self.local / self.network, stays / self.link)

    def collective(self, nbytes: float, ranks: int, apart: int, buffers: int = 1) -> float:
        """Seconds of one reduce-scatter, or one all-gather, of `nbytes` in `buffers` over `ranks` ranks that are
        `apart` ranks from each other. All such groups work at once and share the network of their nodes."""
        if ranks == 1:
            return 0.0
        volume = (ranks - 1) / ranks * nbytes
        if self.inside(apart * ranks):
            return buffers * (self.launch + ranks * self.latency) + volume / self.link
        groups = min(self.local, apart)
        hops = self.launch + math.log2(ranks) * self.network_latency
        return buffers * hops + volume * max(groups / self.network, 1 / self.link)


class Seconds(NamedTuple):
    """Of one pass of one micro-batch: arithmetic, memory traffic, tensor parallel messages, all-to-alls, and what its
    launches take beyond these."""

    compute: float = 0.0
    memory: float = 0.0
    tensor_parallel: float = 0.0
    exchange: float = 0.0
    fixed: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.tensor_parallel + self.exchange + self.fixed

    def launched(self, seconds: float) -> Seconds:
        """With launches of `seconds`, which overlap with the device's work."""
        works = self.compute + self.memory + self.tensor_parallel + self.exchange
        return self._replace(fixed=max(self.fixed, seconds - works))

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*map(add, self, other))

    def times(self, factor: float) -> Seconds:
        compute, memory, tensor, exchange, fixed = self
        return Seconds(compute * factor, memory * factor, tensor * factor, exchange * factor, fixed * factor)


Pass = Literal["forward", "backward", "output", "output_backward", "decode", "step", "update"]


@dataclass(frozen=True)
class Curve:
    """Seconds at some numbers of tokens (of rows for "decode" and "step", of elements on a device for "update"),
    ascending; `t` devices share the layer, and an update has `d` data parallel ranks. `busy` is the share of the time
    in which a device computes instead of waiting."""

    model: str
    kind: Pass
    t: int
    points: tuple[tuple[float, float], ...]
    d: int = 1
    busy: float = 1.0

    def __post_init__(self) -> None:
        points = tuple((float(n), float(seconds)) for n, seconds in self.points)
        object.__setattr__(self, "points", points)
        known = get_args(Pass)
        require(self.kind in known, f"a profile has no pass {self.kind!r}. Known: {', '.join(known)}.")
        good = bool(points) and all(n > 0 and seconds > 0 and math.isfinite(seconds) for n, seconds in points)
        rising = all(a[0] < b[0] for a, b in pairwise(points))
        require(0 < self.busy <= 1, f"the profile of {self.kind!r} needs a share in (0, 1], got busy={self.busy}.")
        require(good and rising, f"the profile of {self.kind!r} needs ascending, positive numbers, got {points[:4]}.")

    def at(self, tokens: float) -> float:
        """Linear interpolation between points; below the first its seconds, above the last extrapolation with the slope
        from the first to the last."""
        points = self.points
        if tokens <= points[0][0]:
            return points[0][1]
        if tokens >= points[-1][0]:
            (n, low), (m, high) = points[0], points[-1]
            return high * tokens / m if n == m else high + max(0.0, high - low) * (tokens - m) / (m - n)
        above = bisect_left(points, (tokens, 0.0))
        (n, low), (m, high) = points[above - 1], points[above]
        return low + (high - low) * (tokens - n) / (m - n)


@dataclass(frozen=True)
class LayerProfile:
    """Curves measured on `device`, for each tensor parallel size: a decoder layer forward and backward, the rest of a
    micro-batch ("output": logits, loss, the engine's own work), a layer in a decode step, the rest of such a step
    ("step"), and an optimizer step with its data parallel messages ("update"). Those with t > 1 contain their
    collectives. Seconds hold for devices alone on their node.

    `slowdown` is that of a node (see `NodeSpec`), `latency` [s] and `bandwidth` [bytes/s] those of messages inside it,
    `call_seconds` those of a call beside what its engine does, `host` [bytes/s] that of host memory,
    `network_latency` and `network` [bytes/s of a whole node] those between nodes (None: not measured). Errors:
    ConfigError for a file that is missing or holds something else."""

    device: str
    curves: tuple[Curve, ...] = ()
    slowdown: tuple[tuple[float, float], ...] = ()
    latency: float | None = None
    bandwidth: float | None = None
    call_seconds: float | None = None
    host: float | None = None
    network_latency: float | None = None
    network: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "curves", tuple(self.curves))
        object.__setattr__(self, "slowdown", tuple((float(n), float(factor)) for n, factor in self.slowdown))
        object.__setattr__(self, "_index", {(c.model, c.kind, c.t, c.d): c for c in self.curves})

    def measured(self, cluster: ClusterSpec) -> ClusterSpec:
        """`cluster` with the measured values. Errors: ConfigError for other devices."""
        found = cluster.node.device
        require(
            found.name == self.device,
            f"the profile was measured on {self.device!r}, the cluster has {found.name}. "
            "Run `hybridflow profile` there, or plan without it.",
        )

        def known(**measured: Any) -> dict[str, Any]:
            return {name: value for name, value in measured.items() if value is not None}

        own = known(latency=self.latency, bandwidth=self.bandwidth, slowdown=self.slowdown or None)
        node = replace(cluster.node, device=replace(found, **known(host=self.host)), **own)
        between = known(latency=self.network_latency, bandwidth=self.network)
        return replace(cluster, nodes=(node,) * len(cluster.nodes), **between)

    def coefficients(self, given: Coefficients) -> Coefficients:
        """`given` with measured values: messages reach the measured bandwidth, not a share of the data sheet's."""
        reached = None if self.bandwidth is None else 1.0
        known = {"call_seconds": self.call_seconds, "link": reached, "reduce": reached}
        known["network"] = None if self.network is None else 1.0
        return replace(given, **{name: value for name, value in known.items() if value is not None})

    def parted(self, model: Decoder, kind: Pass, t: int, number: float, d: int = 1) -> tuple[float, float] | None:
        """Measured seconds at `number` tokens, rows or elements: (computing, waiting for others); None if not
        measured."""
        key = (architecture(model), kind, t, d) if isinstance(model, ModelSpec) else None
        curve: Curve | None = self.__dict__["_index"].get(key)
        return None if curve is None else (curve.at(number) * curve.busy, curve.at(number) * (1 - curve.busy))

    def layer(self, model: Decoder, kind: Pass, t: int, tokens: float, formula: Seconds) -> Seconds:
        """The measured seconds; `formula` if not measured."""
        found = self.parted(model, kind, t, tokens)
        if found is None:
            return formula
        works, waits = found if t > 1 else (sum(found), formula.tensor_parallel)
        known = formula.compute + formula.memory
        share = formula.compute / known if known else 1.0
        return Seconds(works * share, works * (1 - share), waits, formula.exchange)

    def __str__(self) -> str:
        lines = [f"profile of {self.device}"]
        if self.slowdown:
            busy = ", ".join(f"{n:g} at once {factor:.3g}x" for n, factor in self.slowdown)
            lines.append(f"devices that work at once take longer: {busy}")
        if self.latency is not None and self.bandwidth is not None:
            lines.append(f"messages: {self.latency * 1e6:.3g} us, {self.bandwidth / 1e9:.3g} GB/s")
        if self.network_latency is not None and self.network is not None:
            lines.append(f"between nodes: {self.network_latency * 1e6:.3g} us, {self.network / 1e9:.3g} GB/s of a node")
        if self.call_seconds is not None:
            lines.append(f"a call: {self.call_seconds * 1e3:.3g} ms beside its engine")
        if self.host is not None:
            lines.append(f"host memory: {self.host / 1e9:.3g} GB/s")
        lines.append(f"{'model':38} {'pass':15} {'t':>3} {'d':>3}   ms at the fewest and at the most")
        for c in self.curves:
            (n, low), (m, high) = c.points[0], c.points[-1]
            ends = f"{low * 1e3:.3g} at {n:g}, {high * 1e3:.3g} at {m:g}"
            lines.append(f"{c.model:38} {c.kind:15} {c.t:3} {c.d:3}   {ends}")
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        own = json.loads(json.dumps(asdict(self)))  # YAML has no tuples
        Path(path).write_text(yaml.safe_dump(own, sort_keys=False))

    @classmethod
    def load(cls, path: str | Path) -> LayerProfile:
        found = read_yaml(path, "profile (`hybridflow profile` makes one)")
        good = isinstance(found, dict) and {"device", "curves"} <= set(found) and isinstance(found["curves"], Sequence)
        require(good, f"{path} is not a profile: it needs `device` and `curves`.")
        try:
            own: dict[str, Any] = found | {"curves": tuple(Curve(**curve) for curve in found["curves"])}
            return cls(**own)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{path} is not a profile: {error}.") from None


def architecture(model: ModelSpec) -> str:
    """A profile's key for the curves of a model, equal for models with equal layers."""
    sizes = (model.hidden, model.intermediate, model.heads, model.kv_heads, model.head_dim)
    output = f"-{model.vocab}" if model.head == "lm" else ""
    return f"{model.family}-" + "-".join(map(str, sizes)) + output

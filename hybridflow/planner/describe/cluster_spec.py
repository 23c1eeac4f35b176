"""ClusterSpec: the nodes, devices and links that a plan is made for. Pure."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import get_args

from hybridflow.config import DType
from hybridflow.errors import ConfigError, PlacementError, nearest
from hybridflow.placement import GIB
from hybridflow.settings import Positive, Size, check_fields, is_number, require

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator; bandwidths in bytes/s, those of links one way. Errors: ConfigError for a size that is not a
    positive number, or without a single dtype."""

    name: str
    memory: Positive
    flops: Mapping[DType, float]
    """Dense peak [FLOP/s] by dtype."""
    bandwidth: Positive
    """Of its memory."""
    link: Positive = 25 * GIGA
    """Usual one between neighbours inside a node; a `NodeSpec` may override it."""
    network: Positive = 12.5 * GIGA
    """Usual one of a whole node to the others; a `ClusterSpec` may override it."""
    host: Positive = 25 * GIGA
    """Of copies between device and host memory."""

    def __post_init__(self) -> None:
        check_fields(self)
        who, known = f"DeviceSpec {self.name!r}", get_args(DType)
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise ConfigError(f"{who}: give flops for at least one dtype, {{'bfloat16': 312e12}}.")
        for dtype, peak in self.flops.items():
            require(dtype in known, f"{who}: models have no dtype {dtype!r}. Known: {', '.join(known)}.")
            require(is_number(peak) and peak > 0, f"{who}: flops[{dtype!r}]={peak!r} must be above 0.")

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.bandwidth))

    def peak(self, dtype: DType) -> float:
        """Dense FLOP/s. Errors: ConfigError when the device has no such dtype."""
        if dtype not in self.flops:
            raise ConfigError(f"device {self.name!r} does not compute in {dtype}. Use one of: {', '.join(self.flops)}.")
        return self.flops[dtype]


# TFLOP/s with dense bfloat16 operands (data sheets often give those with sparsity), by words of a device's name; the
# first that fits
PEAKS: Mapping[str, float] = MappingProxyType(
    {
        "B200": 2250.0,
        "H200 NVL": 835.0,
        "H200": 989.4,
        "H100 PCIe": 756.0,
        "H100 NVL": 835.0,
        "H100": 989.4,
        "H20": 148.0,
        "A100": 312.0,
        "L40S": 362.0,
        "L40": 181.0,
        "L4": 121.0,
        "RTX 4090$": 165.0,  # the 4090 D and those of laptops are slower
    }
)


def _gpu(
    name: str, gib: float, half: float, single: float, memory: float, link: float, network: float, host: float = 25
) -> DeviceSpec:
    """From a data sheet's units: GiB, TFLOP/s of dense 16-bit and of plain 32-bit arithmetic, GB/s, GB/s, Gbit/s; GB/s
    that pinned host memory is copied at (PCIe 4; twice that for PCIe 5)."""
    flops: dict[DType, float] = {"bfloat16": half * TERA, "float16": half * TERA, "float32": single * TERA}
    return DeviceSpec(name, gib * GIB, flops, memory * GIGA, link * GIGA, network / 8 * GIGA, host * GIGA)


# NVIDIA's data sheets: memory, dense tensor-core peak, plain fp32 peak, memory bandwidth, NVLink or PCIe one way. The
# network is that of published clusters (HybridFlow: 200 Gbit/s a node of A100s; ReaL: 3.2 Tbit/s a node of H100s).
DEVICES: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _gpu("a100", 80, PEAKS["A100"], 19.5, 2039, 300, 200),
            _gpu("a100-40gb", 40, PEAKS["A100"], 19.5, 1555, 300, 200),
            _gpu("a100-pcie", 80, PEAKS["A100"], 19.5, 1935, 32, 200),
            _gpu("a800", 80, PEAKS["A100"], 19.5, 2039, 200, 200),
            _gpu("h100", 80, PEAKS["H100"], 66.9, 3350, 450, 3200, 50),
            _gpu("h100-pcie", 80, PEAKS["H100 PCIe"], 51.2, 2000, 64, 400, 50),
            _gpu("h800", 80, PEAKS["H100"], 66.9, 3350, 200, 3200, 50),
            _gpu("h200", 140.4, PEAKS["H200"], 66.9, 4800, 450, 3200, 50),
            _gpu("h20", 96, PEAKS["H20"], 44, 4000, 450, 3200, 50),
            _gpu("b200", 180, PEAKS["B200"], 75, 7700, 900, 3200, 50),
            _gpu("l40s", 48, PEAKS["L40S"], 91.6, 864, 32, 200),
        )
    }
)


def known_device(name: str) -> str:
    """The planner's name of a device: "NVIDIA A100-SXM4-80GB" is a100."""
    plain = name.lower().replace(" ", "-")
    fitting = [known for known in DEVICES if set(known.split("-")) <= set(plain.split("-"))]
    return max(fitting, key=len) if fitting else plain


def device(name: str) -> DeviceSpec:
    """The accelerator called `name` in any case ("A100" and "a100-80gb" mean the same). Errors: ConfigError for an
    unknown one."""
    if not isinstance(name, str):
        raise ConfigError(f"device {name!r} is not a name. Known: {', '.join(DEVICES)}.")
    key = name.strip().lower().replace("_", "-")
    key = {"a100-80gb": "a100", "a100-sxm": "a100", "h100-80gb": "h100", "h100-sxm": "h100"}.get(key, key)
    if key not in DEVICES:
        raise ConfigError(f"device {name!r} is unknown.{nearest(key, DEVICES)} Or describe it with DeviceSpec(...).")
    return DEVICES[key]


LINK_LATENCY = 5e-6
NETWORK_LATENCY = 15e-6


def peak_flops(name: str, dtype: str = "bfloat16") -> float | None:
    """Peak FLOP/s of a device of this name for operands of `dtype`; None if unknown, and for a part of a device."""
    if dtype == "float32" or re.search(r"\bMIG\b", name):
        return None
    return next((peak * 1e12 for known, peak in PEAKS.items() if re.search(rf"\b{known}\b", name)), None)


MOST_DEVICES = 1 << 17
"""Limit of a description: more is a typo that would keep a search busy for hours."""
_PART = re.compile(r"(?P<device>[^:@]+):(?P<nodes>-?\d+)x(?P<count>-?\d+)(@(?P<network>\d+(\.\d+)?)(?P<unit>[gt])bps)?")
_HERE = re.compile(r"here(?::(?P<devices>\d+))?")
_FORM = 'Write "a100:16x8" (16 nodes of 8 devices), "a100:16x8@200Gbps", "here" or "here:4".'


def slowed(known: Sequence[tuple[float, float]], busy: float) -> float:
    """Slowdown of each of `busy` devices that compute at once, from known ascending pairs: 1 for one device, linear
    between two pairs, proportional beyond the last."""
    before, factor = 1.0, 1.0
    if busy <= 1:
        return factor
    for n, found in known:
        if busy <= n:
            return factor + (found - factor) * (busy - before) / (n - before) if n > before else found
        before, factor = n, found
    return factor * busy / before if known else 1.0


@dataclass(frozen=True)
class NodeSpec:
    """`count` equal devices; `bandwidth` [bytes/s per device, one way] and `latency` [s] of a message between them.

    `slowdown` are pairs (devices that work at once, how much slower each of them is than alone), ascending, for devices
    that share something, such as logical devices the cores of a host. Errors: ConfigError for a size that is not
    positive."""

    device: DeviceSpec
    count: Size
    bandwidth: Positive
    latency: Positive = LINK_LATENCY
    slowdown: tuple[tuple[float, float], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        good = all(is_number(n) and n > 0 for pair in self.slowdown for n in pair)
        good = good and all(a[0] < b[0] for a, b in pairwise(self.slowdown))
        require(good, f"NodeSpec(slowdown={self.slowdown}): numbers must be above 0, those of devices must ascend.")

    def slow(self, busy: float) -> float:
        """How much slower a device is when `busy` of the node work at once, see `slowed`."""
        return slowed(self.slowdown, busy)


@dataclass(frozen=True)
class ClusterSpec:
    """Equal nodes, whose devices are counted through; `bandwidth` [bytes/s, one way] is that of a whole node to the
    network, shared by its devices, and `latency` [s] that of a message between nodes. Errors: ConfigError for a cluster
    without nodes, for unlike ones, or a size that is not positive."""

    nodes: tuple[NodeSpec, ...]
    bandwidth: Positive
    latency: Positive = NETWORK_LATENCY

    def __post_init__(self) -> None:
        object.__setattr__(self, "nodes", tuple(self.nodes))
        require(bool(self.nodes), f"a ClusterSpec needs at least one node. {_FORM}")
        for node in self.nodes:
            good = isinstance(node, NodeSpec)
            require(good, f"ClusterSpec: {node!r} is not a NodeSpec. ClusterSpec.of reads a description. {_FORM}")
        first, *others = dict.fromkeys(self.nodes)
        for other in others:
            name = next(
                each.name for each in fields(NodeSpec) if getattr(first, each.name) != getattr(other, each.name)
            )
            found = [getattr(one, name) for one in (first, other)]
            cure = "Plan for those of one kind, or describe all of them as smaller nodes of one size."
            raise ConfigError(f"ClusterSpec: its nodes are alike, got {name}={found[0]!r} and {found[1]!r}. {cure}")
        check_fields(self)

    @classmethod
    def of(cls, text: str | ClusterSpec) -> ClusterSpec:
        """From "a100:16x8" (16 nodes of 8 A100s), whose network is the usual one of the devices, "a100:16x8@200Gbps",
        or "here" ("here:4": as four devices). Errors: ConfigError for another form, an unknown device, sizes below 1.
        """
        if isinstance(text, ClusterSpec):
            return text
        if not isinstance(text, str):
            raise ConfigError(f"cluster {text!r} is not a description of a cluster. {_FORM}")
        require("," not in text, f"cluster {text!r}: its nodes are alike, so give one kind and size. {_FORM}")
        if here := _HERE.fullmatch(text.strip().lower()):
            return cls.this_machine(int(here["devices"]) if here["devices"] else None)
        match = _PART.fullmatch(text.strip().lower())
        if match is None:
            raise ConfigError(f"cluster {text!r} is not of the form DEVICE:NODESxDEVICES. {_FORM}")
        spec, nodes, count = device(match["device"]), int(match["nodes"]), int(match["count"])
        good = nodes >= 1 and count >= 1
        require(good, f"cluster {text!r} asks for {nodes} nodes of {count} devices; both must be >= 1.")
        many = f"{nodes * count:,} devices are more than the {MOST_DEVICES:,} of any cluster."
        require(nodes * count <= MOST_DEVICES, f"cluster {text!r}: {many}")
        network = match["network"] and float(match["network"]) * {"g": 1e9, "t": 1e12}[match["unit"]] / 8
        return cls((NodeSpec(spec, count, spec.link),) * nodes, network or spec.network)

    @classmethod
    def this_machine(cls, devices: int | None = None, memory: float | None = None) -> ClusterSpec:
        """This host as one node of `devices` logical devices (default: one per processor core) that share its cores
        and its memory [bytes; default: all of it]. Values are those of an ordinary server core, shared equally by
        devices that compute at once; a profile is more accurate."""
        cores = len(os.sched_getaffinity(0))
        count = cores if devices is None else devices
        good = type(count) is int and count >= 1
        require(good, f"this_machine(devices={devices!r}): give a whole number of at least 1.")
        each = (memory or float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))) / count
        host = DeviceSpec("host", each, {"float32": 100e9, "bfloat16": 100e9}, 8 * GIGA, link=GIGA, host=4 * GIGA)
        shared = ((cores, 1.0), (count, count / cores)) if count > cores else ()
        return cls((NodeSpec(host, count, GIGA, 50e-6, shared),), GIGA, 200e-6)

    @property
    def node(self) -> NodeSpec:
        """Each of the nodes."""
        return self.nodes[0]

    @property
    def size(self) -> int:
        return len(self.nodes) * self.node.count

    def node_of(self, index: int) -> int:
        """The node of device `index`. Errors: PlacementError outside of the cluster."""
        if not 0 <= index < self.size:
            raise PlacementError(f"device {index} is not in this cluster, whose devices are 0 to {self.size - 1}.")
        return index // self.node.count

    def counts(self, devices: Sequence[int]) -> dict[int, int]:
        """How many of `devices`, which ascend, are in each node. Errors: PlacementError outside of the cluster."""
        first, last = devices[0], devices[-1]
        if last - first + 1 > len(devices):
            return dict(Counter(map(self.node_of, devices)))
        if (first, last) not in self._counts:  # neighbours: node by node, for there may be very many devices
            nodes, count = range(self.node_of(first), self.node_of(last) + 1), self.node.count
            counts = {n: min((n + 1) * count, last + 1) - max(n * count, first) for n in nodes}
            self._counts[first, last] = counts
        return self._counts[first, last]

    @cached_property
    def _counts(self) -> dict[tuple[int, int], dict[int, int]]:
        return {}

    def devices_of(self, node: int) -> range:
        return range(node * self.node.count, (node + 1) * self.node.count)

    def __str__(self) -> str:
        return f"{self.node.device.name}:{len(self.nodes)}x{self.node.count}"

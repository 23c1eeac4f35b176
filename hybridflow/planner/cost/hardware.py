"""LinkModel: the devices of one call's mesh and the links between them, at their achievable rates. Pure.

Ranks lie on a mesh with t fastest, then p, then d (paper, section 5.3), so tensor parallel groups are neighbours.
Collectives move what rings do: n ranks that all-reduce b bytes each send and receive 2 (n-1)/n b (Thakur et al. 2005);
those of tensor parallel ranks and between nodes wait for as many messages as trees do, others inside a node as rings.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from operator import add
from pathlib import Path
from typing import NamedTuple

import yaml

from hybridflow.config import DType
from hybridflow.planner.describe.cluster_spec import ClusterSpec, slowest
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
    """Achievable rates of one device of the mesh [bytes/s]; the slowest member of a group decides."""

    local: int
    """Neighbours of the mesh that lie in one node."""
    memory: float
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
        counts = cluster.counts(mesh.devices)
        nodes = list({id(cluster.nodes[node]): cluster.nodes[node] for node in counts}.values())  # most are one
        device = slowest(tuple(node.device for node in nodes))
        return cls(
            local=min(counts.values()) if len(counts) > 1 else mesh.size,
            memory=device.memory,
            flops=device.peak(dtype),
            bandwidth=device.bandwidth * k.memory,
            link=min(node.bandwidth for node in nodes) * k.link,
            network=cluster.bandwidth * k.network,
            latency=max(node.latency for node in nodes),
            network_latency=cluster.latency,
            reduce=min(node.bandwidth for node in nodes) * k.reduce,
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

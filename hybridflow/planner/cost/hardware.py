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

SHARES = ("compute", "attention", "memory", "link", "network")


@settings
class Coefficients:
    """Achievable shares of the devices' and links' peaks, and fixed costs.

    `device` names what they were fitted on ("" for the defaults). Efficiencies are shares of the data sheet's figure;
    a matrix product of which a device has n columns runs at `compute * n / (n + half_columns)` of the peak. Seconds
    are those of a device's host process, and are not hidden behind the device's work.
    """

    device: str = ""
    compute: PositiveFraction = 0.7  # of the peak, in matrix products
    half_columns: NonNegative = 128.0  # columns of a device's shard at which a product reaches half of that
    attention: PositiveFraction = 0.4  # of the peak, in attention scores and values
    memory: PositiveFraction = 0.75  # of the memory bandwidth
    link: PositiveFraction = 0.75  # of the bandwidth inside a node
    network: PositiveFraction = 0.75  # of the bandwidth between nodes
    layer_seconds: NonNegative = 200e-6  # launches of a layer, each time that it runs forward in training or inference
    decode_layer_seconds: NonNegative = 12e-6  # launches of a layer in a decode step (CUDA graphs)
    step_seconds: NonNegative = 3e-3  # what the host does for a decode step
    row_seconds: NonNegative = 30e-6  # what the host does for a row in a decode step: scheduling, sampling, text
    call_seconds: NonNegative = 20e-3  # dispatch of a call, and of every optimizer step
    function_seconds: NonNegative = 100e-6  # what a host does for a row in a function (a reward by rules)
    usable_memory: PositiveFraction = 0.92  # of the device memory: the rest is the runtime's own and fragmentation

    def save(self, path: str | Path) -> None:
        """Write YAML."""
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
    """Achievable rates of one device of the mesh: `flops` [FLOP/s] at the peak, `bandwidth` [bytes/s] of its memory,
    `link` [bytes/s] to its neighbours; `network` [bytes/s] is that of a whole node, which its devices share. The
    slowest member of a group decides. `local` neighbours of the mesh lie in one node. `shares` ranks of a tensor
    parallel group share what is not cut (sequence parallelism: t, else 1). `host` [bytes/s] copies to and from host
    memory.
    """

    local: int
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    latency: float
    network_latency: float
    host: float
    p: int = 1
    t: int = 1
    d: int = 1
    shares: int = 1

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
            host=device.host,
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
            return hops * self.latency + volume / self.link
        groups = max(1, self.local // t) + (1 if self.local % t else 0)  # that share the node's network
        return hops * self.network_latency + volume * groups / min(self.network, self.link * groups)

    def stage_message(self, nbytes: float) -> float:
        """Seconds until a stage has handed `nbytes`, which its t ranks share or each have, to the next stage."""
        if self.p == 1:
            return 0.0
        if self.inside(self.p * self.t):
            return self.latency + nbytes / self.shares / self.link
        copies = min(self.t, self.local) / self.shares
        return self.network_latency + nbytes * copies / min(self.network, self.link * self.t)

    def data_parallel(self, nbytes: float) -> float:
        """Seconds of one reduce-scatter, or one all-gather, of `nbytes` over the d ranks that hold the same shard."""
        return self.collective(nbytes, self.d, self.p * self.t)

    def collective(self, nbytes: float, ranks: int, apart: int) -> float:
        """Seconds of one reduce-scatter, or one all-gather, of `nbytes` over `ranks` ranks that are `apart` ranks from
        each other. All such groups work at once and share the network of their nodes."""
        if ranks == 1:
            return 0.0
        volume = (ranks - 1) / ranks * nbytes
        if self.inside(apart * ranks):
            return ranks * self.latency + volume / self.link
        groups = min(self.local, apart)
        return math.log2(ranks) * self.network_latency + volume * max(groups / self.network, 1 / self.link)


class Seconds(NamedTuple):
    """Of one pass of one micro-batch: arithmetic, memory traffic, tensor parallel messages, launches."""

    compute: float = 0.0
    memory: float = 0.0
    tensor_parallel: float = 0.0
    fixed: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.tensor_parallel + self.fixed

    def plus(self, other: Seconds) -> Seconds:
        return Seconds(*map(add, self, other))

    def times(self, factor: float) -> Seconds:
        return Seconds(*(part * factor for part in self))

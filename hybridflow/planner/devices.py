"""DeviceSpec: what a data sheet says of an accelerator, and the accelerators that have a name. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from hybridflow.config import DType
from hybridflow.errors import ConfigError, nearest

GIB = float(1 << 30)
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class DeviceSpec:
    """One accelerator: `memory` [bytes], dense peak `flops` by dtype [FLOP/s], `bandwidth` of its memory [bytes/s].

    `link` [bytes/s, one way] is what it exchanges with its neighbours inside a node as such nodes are usually built,
    `network` [bytes/s, one way] what a whole such node has to the others; a `NodeSpec` or `ClusterSpec` may say
    otherwise. `host` [bytes/s, one way] is what copies between its memory and the host's reach.

    Errors: ConfigError for a size that is not a positive number, or without a single dtype.
    """

    name: str
    memory: float
    flops: Mapping[DType, float]
    bandwidth: float
    link: float = 25 * GIGA
    network: float = 12.5 * GIGA
    host: float = 25 * GIGA

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "link", "network", "host"):
            check_size(f"DeviceSpec {self.name!r}", name, getattr(self, name))
        if not isinstance(self.flops, Mapping) or not self.flops:
            raise ConfigError(f"DeviceSpec {self.name!r}: give flops for at least one dtype, {{'bfloat16': 312e12}}.")
        for dtype, peak in self.flops.items():
            if dtype not in get_args(DType):
                known = ", ".join(get_args(DType))
                raise ConfigError(f"DeviceSpec {self.name!r}: models have no dtype {dtype!r}. Known: {known}.")
            check_size(f"DeviceSpec {self.name!r}", f"flops[{dtype!r}]", peak)
        object.__setattr__(self, "flops", MappingProxyType(dict(self.flops)))

    def __hash__(self) -> int:
        return hash((self.name, self.memory, self.bandwidth))

    def __reduce__(self):
        rest = self.bandwidth, self.link, self.network, self.host
        return DeviceSpec, (self.name, self.memory, dict(self.flops), *rest)

    def peak(self, dtype: DType) -> float:
        """Dense FLOP/s. Errors: ConfigError when the device has no such dtype."""
        if dtype not in self.flops:
            raise ConfigError(f"device {self.name!r} does not compute in {dtype}. Use one of: {', '.join(self.flops)}.")
        return self.flops[dtype]


def check_size(owner: str, name: str, value: object) -> None:
    """Errors: ConfigError unless `value` is a positive finite number."""
    good = isinstance(value, int | float) and type(value) is not bool and math.isfinite(value) and value > 0
    if not good:
        raise ConfigError(f"{owner}: {name}={value!r} must be a positive number.")


def _gpu(
    name: str, gib: float, half: float, single: float, memory: float, link: float, network: float, host: float = 25
) -> DeviceSpec:
    """From a data sheet's units: GiB, TFLOP/s of dense 16-bit and of plain 32-bit arithmetic, GB/s, GB/s, Gbit/s; GB/s
    that pinned host memory is copied at (PCIe 4; twice that for PCIe 5)."""
    flops: dict[DType, float] = {"bfloat16": half * TERA, "float16": half * TERA, "float32": single * TERA}
    return DeviceSpec(name, gib * GIB, flops, memory * GIGA, link * GIGA, network / 8 * GIGA, host * GIGA)


# NVIDIA's data sheets: memory, dense tensor-core peak, plain fp32 peak, memory bandwidth, NVLink or PCIe one way. The
# network is that of the clusters with which they are met in the literature (HybridFlow: 200 Gbit/s a node of A100s;
# ReaL: 3.2 Tbit/s a node of H100s).
DEVICES: Mapping[str, DeviceSpec] = MappingProxyType(
    {
        spec.name: spec
        for spec in (
            _gpu("a100", 80, 312, 19.5, 2039, 300, 200),
            _gpu("a100-40gb", 40, 312, 19.5, 1555, 300, 200),
            _gpu("a100-pcie", 80, 312, 19.5, 1935, 32, 200),
            _gpu("a800", 80, 312, 19.5, 2039, 200, 200),
            _gpu("h100", 80, 989.4, 66.9, 3350, 450, 3200, 50),
            _gpu("h100-pcie", 80, 756, 51.2, 2000, 64, 400, 50),
            _gpu("h800", 80, 989.4, 66.9, 3350, 200, 3200, 50),
            _gpu("h200", 140.4, 989.4, 66.9, 4800, 450, 3200, 50),
            _gpu("h20", 96, 148, 44, 4000, 450, 3200, 50),
            _gpu("b200", 180, 2250, 75, 7700, 900, 3200, 50),
            _gpu("l40s", 48, 362, 91.6, 864, 32, 200),
        )
    }
)


def device(name: str) -> DeviceSpec:
    """The accelerator called `name` in any case ("A100" and "a100-80gb" mean the same).

    Errors: ConfigError for an unknown one.
    """
    if not isinstance(name, str):
        raise ConfigError(f"device {name!r} is not a name. Known: {', '.join(DEVICES)}.")
    key = name.strip().lower().replace("_", "-")
    key = {"a100-80gb": "a100", "a100-sxm": "a100", "h100-80gb": "h100", "h100-sxm": "h100"}.get(key, key)
    if key not in DEVICES:
        raise ConfigError(f"device {name!r} is unknown.{nearest(key, DEVICES)} Or describe it with DeviceSpec(...).")
    return DEVICES[key]

"""Coefficients: the few physical numbers between a data sheet and a clock. Pure.

Each has a default from what is usually measured; `calibrate` fits them to observed calls.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml

from hybridflow.errors import ConfigError
from hybridflow.settings import at_least, require, settings


@settings
class Coefficients:
    """What devices and links reach of their peak, and what is paid whatever the size.

    `device` names what they were fitted on ("" for the defaults). Efficiencies are shares of the data sheet's figure;
    a matrix product of which a device has n columns runs at `compute * n / (n + half_columns)` of the peak. Seconds
    are those of a device's host process, and are not hidden behind the device's work.
    """

    device: str = ""
    compute: float = 0.7  # of the peak, in matrix products
    half_columns: float = 128.0  # columns of a device's shard at which a product reaches half of that
    attention: float = 0.4  # of the peak, in attention scores and values
    memory: float = 0.75  # of the memory bandwidth
    link: float = 0.75  # of the bandwidth inside a node
    network: float = 0.75  # of the bandwidth between nodes
    layer_seconds: float = 200e-6  # launches of a layer, each time that it runs forward in training or inference
    decode_layer_seconds: float = 12e-6  # launches of a layer in a decode step (CUDA graphs)
    step_seconds: float = 3e-3  # what the host does for a decode step
    row_seconds: float = 30e-6  # what the host does for a row in a decode step: scheduling, sampling, text
    call_seconds: float = 20e-3  # dispatch of a call, and of every optimizer step
    function_seconds: float = 100e-6  # what a host does for a row in a function (a reward by rules)
    usable_memory: float = 0.92  # of the device memory: the rest is the runtime's own and fragmentation

    def __post_init__(self) -> None:
        names = tuple(field.name for field in fields(type(self)) if field.name != "device")  # type: ignore[arg-type]
        at_least(self, 0, *names)
        for name in ("compute", "attention", "memory", "link", "network", "usable_memory"):
            require(0 < getattr(self, name) <= 1, f"Coefficients({name}={getattr(self, name)}): must be in (0, 1].")

    def save(self, path: str | Path) -> None:
        """Write YAML."""
        Path(path).write_text(yaml.safe_dump(asdict(self), sort_keys=False))  # type: ignore[call-overload]

    @classmethod
    def load(cls, path: str | Path) -> Coefficients:
        """Read what `save` wrote. Errors: ConfigError for a missing file or other contents."""
        try:
            found: Any = yaml.safe_load(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"there is no calibration file {path}. Save what `calibrate` found.") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not valid YAML: {error}.") from None
        require(isinstance(found, dict), f"{path} holds a {type(found).__name__}, not the coefficients of a planner.")
        return cls(**found)


DEFAULT = Coefficients()

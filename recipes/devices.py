"""Devices of a recipe whose settings do not say: two for each pool, or this machine's GPUs where these are fewer."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf

from hybridflow.errors import ConfigError

_POOLS = ("devices", "train_devices", "rollout_devices")
_MOST = 2


def fit_devices(cfg: Any) -> None:
    """Choose devices and tensor parallel sizes that are null: two, and one where that does not fit.

    Of several pools the first gets the odd GPU; the others may get none. Errors: ConfigError.
    """
    import torch  # late: --help is quick

    pools = [name for name in _POOLS if name in cfg]
    gpus = torch.cuda.device_count() if not os.environ.get("RAY_ADDRESS") else 0  # else those of the cluster
    for i, name in enumerate(pools):
        if cfg[name] is None:
            there = (gpus + len(pools) - 1 - i) // len(pools) if gpus else _MOST
            cfg[name] = [min(_MOST, there)] if there else []
        elif not OmegaConf.is_list(cfg[name]) or not all(type(count) is int for count in cfg[name]):
            raise ConfigError(f"{name}={cfg[name]}: give the devices of each node as a list, such as {name}=[2].")
    for options in cfg.values():
        train = options.get("train") if isinstance(options, type(cfg)) else None
        if train is not None and train.get("tp", 1) is None:
            train.tp = 1 if any(devices % _MOST for devices in cfg[pools[0]]) else _MOST

"""Sizes that the settings of a recipe leave open: devices, tensor parallelism, and the length of responses."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import OmegaConf

from hybridflow.errors import ConfigError

_POOLS = ("devices", "train_devices", "rollout_devices")
_MOST = 2
_RESPONSE = 1024


def fit(cfg: Any) -> None:
    """Choose all that is null."""
    _fit_devices(cfg)
    _fit_responses(cfg)


def _fit_devices(cfg: Any) -> None:
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
            share = _MOST * train.get("cp", 1)
            train.tp = 1 if any(devices % share for devices in cfg[pools[0]]) else _MOST


def _fit_responses(cfg: Any) -> None:
    """Choose response lengths that are null: half of the model's context, at most `_RESPONSE` tokens."""
    sections = [options for options in cfg.values() if isinstance(options, type(cfg))]
    given = [options.generate.sampling for options in sections if OmegaConf.select(options, "generate.sampling")]
    for sampling in given:
        if cfg.model is not None and sampling.get("max_tokens", 0) is None:
            from transformers import AutoConfig  # late: --help is quick

            try:
                text = AutoConfig.from_pretrained(cfg.model).get_text_config()
            except (OSError, ValueError):  # the actor says what is wrong with the model
                sampling.max_tokens = _RESPONSE
            else:
                sampling.max_tokens = min(_RESPONSE, (getattr(text, "max_position_embeddings", None) or 2048) // 2)

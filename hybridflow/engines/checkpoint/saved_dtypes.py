"""The dtypes in which weights are saved: those of the files that they came from, or one that is asked for."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, get_args

import torch

from hybridflow.config import DType
from hybridflow.engines.checkpoint.rank_state import torch_dtype
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import hf_config


def check_dtype(dtype: Any) -> None:
    """Errors: ConfigError for a dtype that weights are not saved in."""
    if dtype is not None and not (isinstance(dtype, str) and dtype in get_args(DType)):
        raise ConfigError(
            f"dtype={dtype!r}: weights are saved as {', '.join(map(repr, get_args(DType)))}, or, with None, in the "
            f"dtypes of the files that the model came from."
        )


def saved_dtypes(files: Mapping[str, str], dtype: DType | None, wide: Collection[str] = ()) -> dict[str, torch.dtype]:
    """By tensor the dtype to save it in: with `dtype` that, and float32 for those in `wide`; else that of `files`, as
    safetensors spells it."""
    if dtype is None:
        return {name: torch_dtype(found) for name, found in files.items()}
    return {name: torch.float32 if name in wide else getattr(torch, dtype) for name in files}


def kept_in_float32(config: Mapping[str, Any], names: Collection[str]) -> set[str]:
    """Those tensors of the model of a `config.json` that transformers computes in float32 where the rest has 16 bits:
    routers of some experts, decays of some recurrent layers."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config(config))]
    parts = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    return {name for name in names if any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in parts)}

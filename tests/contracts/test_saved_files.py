"""Saved weights are the most exact ones, in the dtypes of the files that the model came from, on every backend."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybridflow.config import FSDP, Megatron, ZeRO
from tests.contracts import state_tasks as tasks

BACKENDS: dict[str, Any] = {"fsdp": FSDP, "zero-1": ZeRO, "zero-3": ZeRO, "megatron": Megatron}
OPTIONS: dict[str, dict[str, Any]] = {"zero-1": {"stage": 1}, "zero-3": {"stage": 3}, "megatron": {"tp": 2}}
ASKED = (None, "bfloat16", "float16", "float32")


def weights(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(
    ("files", "computes"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_all_backends_save_by_one_rule(processes, models, tmp_path, files, computes):
    path, kind = tmp_path / "model", getattr(torch, files)
    AutoModelForCausalLM.from_pretrained(models["llama", "lm"], dtype=kind).save_pretrained(path)
    source, saved = weights(path), dict[str, dict[str | None, Path]]()
    for name, backend in BACKENDS.items():
        saved[name] = {dtype: tmp_path / f"{name}-{dtype}" for dtype in ASKED}
        for target in saved[name].values():
            target.mkdir()
        strategy = backend(dtype=computes, **OPTIONS.get(name, {}))
        processes.run(2, tasks.saved, processes.name(), strategy, 2, path, saved[name])
    for dtype in ASKED:
        for name in BACKENDS:
            check(saved[name][dtype], saved["fsdp"][dtype], source, getattr(torch, dtype or files))
            held = weights(saved[name]["float32"] / "after")
            assert all(t.equal(held[n].to(t.dtype)) for n, t in weights(saved[name][dtype] / "after").items())
        assert any(not t.equal(t.bfloat16().float()) for t in held.values()), "more bits than bfloat16 has"


def check(target: Path, fsdp: Path, source: dict[str, Tensor], dtype: torch.dtype) -> None:
    before, after = weights(target / "before"), weights(target / "after")
    assert before.keys() == source.keys()
    assert all(tensor.equal(source[name].to(dtype)) for name, tensor in before.items())
    names = [file.name for file in (target / "before").iterdir()]
    assert filecmp.cmpfiles(target / "before", fsdp / "before", names, shallow=False) == (names, [], [])
    assert json.loads((target / "after" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    apart = moved = 0.0
    for name, tensor in weights(fsdp / "after").items():
        apart += float((after[name].float() - tensor.float()).square().sum())
        moved += float((source[name].float() - tensor.float()).square().sum())
    assert apart < 0.03 * moved  # gradients are rounded otherwise
    model = AutoModelForCausalLM.from_pretrained(target / "after")
    assert model.dtype == dtype
    assert all(tensor.equal(after[name]) for name, tensor in model.state_dict().items() if name in after)

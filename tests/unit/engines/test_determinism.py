"""What `hf.init(deterministic=True)` refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.cluster import device
from hybridflow.engines.vllm.requirements import check
from hybridflow.errors import ConfigError
from hybridflow.models.spec import ModelSpec

MODEL = ModelSpec(family="qwen3", hidden=128, intermediate=64, layers=2, heads=4, kv_heads=4, head_dim=32, vocab=64)


@pytest.mark.parametrize(
    ("capability", "triton", "why"),
    [((7, 5), object(), r"this is Tesla T4 with 7\.5"), ((9, 0), None, "Triton is not installed")],
)
def test_devices_without_batch_invariant_kernels_are_refused(monkeypatch, capability: Any, triton: Any, why: str):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(device, "find_spec", lambda _: triton)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with pytest.raises(ConfigError, match=rf"deterministic=True.*{why}.*Leave it out"):
        device.make_deterministic(0)


def test_sums_over_many_ranks_are_refused(monkeypatch):
    check(MODEL, hf.VLLM(tp=4, max_length=32, sampling=hf.Sampling(max_tokens=8)), "cuda")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(ConfigError, match=r"VLLM\(tp=4\).*deterministic=True.*Use tp=1 or tp=2"):
        check(MODEL, hf.VLLM(tp=4, max_length=32, sampling=hf.Sampling(max_tokens=8)), "cuda")
    check(MODEL, hf.VLLM(tp=2, max_length=32, sampling=hf.Sampling(max_tokens=8)), "cuda")
    check(MODEL, hf.VLLM(tp=4, max_length=32, sampling=hf.Sampling(max_tokens=8)), "cpu")

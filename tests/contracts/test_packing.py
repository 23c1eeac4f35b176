"""Packed micro-batches against padded ones on the same engine: outputs, scores, gradients and metrics are the same."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.batch.ragged import Ragged
from hybridflow.config import FSDP, Megatron, ZeRO
from tests.contracts import engine_tasks as tasks

MODELS = [("llama", "lm"), ("qwen3-tied", "lm"), ("mistral", "lm"), ("qwen2-two-kv", "lm"), ("llama", "value")]
FEW = [("mistral", "lm"), ("llama", "value")]  # windows of attention, and another head
STRATEGIES: dict[str, tuple[int, Any, dict[str, Any], list[tuple[str, str]]]] = {
    "megatron 1-1-1": (1, Megatron, {}, MODELS),
    "megatron 2-1-1": (2, Megatron, {"pp": 2}, FEW),
    "megatron 1-2-1": (2, Megatron, {"tp": 2}, MODELS),
    "megatron 2-2-1": (4, Megatron, {"pp": 2, "tp": 2}, FEW),
    "megatron 1-2-2, sequence parallel": (4, Megatron, {"tp": 2, "sequence_parallel": True}, FEW),
    "megatron 2-1-1, recomputed": (2, Megatron, {"pp": 2, "recompute": True}, FEW),
    "megatron 1-1-1, row by row": (1, Megatron, {"micro_tokens": 1}, FEW),
    "fsdp 2": (2, FSDP, {}, MODELS),
    "fsdp 2, recomputed": (2, FSDP, {"recompute": True}, FEW),
    "fsdp 2 x tp 2": (4, FSDP, {"tp": 2}, FEW),
    "zero-2, recomputed": (2, ZeRO, {"stage": 2, "recompute": True}, FEW),
    "zero-3": (2, ZeRO, {"stage": 3}, FEW),
}


@pytest.mark.thinned(6)
@pytest.mark.parametrize("case", STRATEGIES)
def test_packed_micro_batches_compute_what_padded_ones_do(processes, models, case):
    size, kind, settings, names = STRATEGIES[case]
    settings, jobs = {"micro_tokens": 48, **settings}, [(size, models[key], key[1]) for key in names]
    found, want = (
        processes.run(size, tasks.passes, [(processes.name(), kind(packed=p, **settings), *more) for more in jobs])
        for p in (True, False)
    )
    compared = 0
    for ours, theirs in zip((p for part in found for p in part), (p for part in want for p in part), strict=True):
        assert (ours["outputs"] is None) == (theirs["outputs"] is None)
        for name, output in (theirs["outputs"] or {}).items():
            one, other = (o.values if isinstance(o, Ragged) else o for o in (ours["outputs"][name], output))
            assert float((one - other).abs().max()) < 1e-5, name
            compared += one.numel()
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=1e-5)
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4, abs=1e-6)
        assert float((ours["gradients"] - theirs["gradients"]).norm() / theirs["gradients"].norm()) < 1e-5
    assert compared

"""Packed micro-batches against padded ones on the same engine: outputs, scores, gradients and metrics are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_tasks as tasks
import pytest
import torch
from example_models import make_model
from rank_processes import RankProcesses

from hybridflow.config import FSDP, SGD, Megatron
from hybridflow.ragged import Ragged

MODELS = [("llama", "lm"), ("qwen3-tied", "lm"), ("mistral", "lm"), ("qwen2-two-kv", "lm"), ("llama", "value")]
STRATEGIES = {
    "megatron 1-1-1": (1, Megatron, {}),
    "megatron 2-1-1": (2, Megatron, {"pp": 2}),
    "megatron 1-2-1": (2, Megatron, {"tp": 2}),
    "megatron 1-1-2": (2, Megatron, {}),
    "megatron 2-2-1": (4, Megatron, {"pp": 2, "tp": 2}),
    "megatron 1-2-2, sequence parallel": (4, Megatron, {"tp": 2, "sequence_parallel": True}),
    "megatron 2-1-1, recomputed": (2, Megatron, {"pp": 2, "recompute": True}),
    "megatron 1-1-1, row by row": (1, Megatron, {"micro_tokens": 1}),
    "fsdp 2": (2, FSDP, {}),
    "fsdp 2, recomputed": (2, FSDP, {"recompute": True}),
    "fsdp 2 x tp 2": (4, FSDP, {"tp": 2}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    directory = tmp_path_factory.mktemp("models")
    return {(name, head): make_model(name, directory, head) for name, head in MODELS}


def both(processes: RankProcesses, case: str, run: Any) -> tuple[list[Any], list[Any]]:
    """What every rank gives, packed and padded."""
    size, kind, settings = STRATEGIES[case]
    packed, padded = (run(size, kind(**{"micro_tokens": 48, "packed": p, **settings})) for p in (True, False))
    return packed, padded


@pytest.mark.parametrize("case", STRATEGIES)
def test_outputs_are_those_of_padded_micro_batches(processes, models, case):
    def run(size: int, strategy: Any) -> list[Any]:
        jobs = [(processes.name(), strategy, size, path, head, 0.7) for (_, head), path in models.items()]
        return processes.run(size, tasks.outputs, jobs)

    compared = 0
    for ours, theirs in zip(*both(processes, case, run), strict=True):
        for found, want in zip(ours, theirs, strict=True):
            assert (found is None) == (want is None)
            for name, output in (want or {}).items():
                values = [o.values if isinstance(o, Ragged) else o for o in (found[name], output)]
                assert float((values[0] - values[1]).abs().max()) < 1e-5, name
                compared += values[0].numel()
    assert compared


@pytest.mark.parametrize("case", STRATEGIES)
def test_gradients_and_metrics_are_those_of_padded_micro_batches(processes, models, case):
    for (_, head), path in models.items():

        def run(size: int, strategy: Any, head=head, path=path) -> list[Any]:
            args = (processes.name(), strategy, size, path, head, SGD(lr=0.0, clip_grad=0), None, 1)
            return processes.run(size, tasks.updates, *args)

        for found, want in zip(*both(processes, case, run), strict=True):
            assert found["norms"][0]["grad_norm"] == pytest.approx(want["norms"][0]["grad_norm"], rel=1e-5)
            assert found["metrics"][0] == pytest.approx(want["metrics"][0], rel=1e-4, abs=1e-6)
            ours, theirs = (torch.cat([value.flatten() for *_, value in p["gradients"]]) for p in (found, want))
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-5

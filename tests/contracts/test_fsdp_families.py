"""Families on FSDP and ZeRO: what transformers computes and how it is trained, on every grid."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.config import FSDP
from tests.contracts.family_cases import QUICK_ON_SHARDS, SHARDED_CASES, marked, spread
from tests.contracts.rank_processes import DEVICE
from tests.contracts.train_contract import assert_trains

CASES: list[Any] = marked(SHARDED_CASES, QUICK_ON_SHARDS)
if DEVICE.type == "cuda":  # emulated: all of them would take hours, and these need a convolution that it lacks
    convolving = ("falcon_mamba", "jamba", "mamba", "qwen3_next", "recurrent_gemma")
    CASES = sorted(case for case in spread(SHARDED_CASES) if case[0] not in convolving)


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_it_computes_and_trains_as_transformers_does(processes, family, tmp_path, name, grid):
    strategy, (path, want) = SHARDED_CASES[name, grid], family(name)
    parts, spec = assert_trains(processes, strategy, path, want, tmp_path / "saved")
    if isinstance(strategy, FSDP) and (strategy.tp == 1 or not getattr(spec, "experts", ())):  # tp cuts no experts
        assert max(part["bytes"] for part in parts) < 0.8 * 4 * spec.num_parameters

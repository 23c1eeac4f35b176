"""Families on FSDP and ZeRO: what transformers computes and how it is trained, on every grid."""

from __future__ import annotations

import pytest

from hybridflow.config import FSDP
from tests.contracts.family_cases import SHARDED_CASES, marked, spread
from tests.contracts.rank_processes import DEVICE
from tests.contracts.train_contract import assert_trains

CASES = marked(SHARDED_CASES) if DEVICE.type == "cpu" else sorted(spread(SHARDED_CASES))
"""All of them would take hours on emulated CUDA."""


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_it_computes_and_trains_as_transformers_does(processes, family, tmp_path, name, grid):
    strategy, (path, want) = SHARDED_CASES[name, grid], family(name)
    parts, spec = assert_trains(processes, strategy, path, want, tmp_path / "saved")
    if isinstance(strategy, FSDP) and (strategy.tp == 1 or not getattr(spec, "experts", ())):  # tp cuts no experts
        assert max(part["bytes"] for part in parts) < 0.8 * 4 * spec.num_parameters

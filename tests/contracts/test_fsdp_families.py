"""Families on FSDP and ZeRO: what transformers computes and how it is trained, on every grid."""

from __future__ import annotations

import pytest

from hybridflow.config import FSDP
from tests.contracts.family_cases import SHARDED_CASES, marked
from tests.contracts.train_contract import assert_trains


@pytest.mark.parametrize(("name", "grid"), marked(SHARDED_CASES))
def test_it_computes_and_trains_as_transformers_does(processes, family, tmp_path, name, grid):
    strategy, (path, want) = SHARDED_CASES[name, grid], family(name)
    parts, spec = assert_trains(processes, strategy, path, want, tmp_path / "saved")
    if isinstance(strategy, FSDP):
        assert max(part["bytes"] for part in parts) < 0.8 * 4 * spec.num_parameters

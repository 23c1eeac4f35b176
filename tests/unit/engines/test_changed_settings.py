"""What set_optimizer changed, in an optimizer whose program was edited before it continues."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridflow.config import Adam
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.shard_optimizer import ShardOptimizer


def optimizer(settings: Adam) -> ShardOptimizer:
    shards: Any = SimpleNamespace(main={"w": torch.zeros(2)}, storage={}, adapters={}, updated=lambda names: None)
    shards.memory, shards.separate = Residency({}, torch.device("cpu")), True
    return ShardOptimizer(settings, shards, (), [frozenset({"w"})])


@pytest.mark.parametrize(("lr", "says"), [(1e-6, None), (3e-6, r"lr=5e-07\) replaced 1e-06.* 3e-06 of")])
def test_a_changed_setting_that_beats_an_edited_one_is_said(lr, says, caplog):
    saved = optimizer(Adam(lr=1e-6, betas=(0.9, 0.99)))
    saved.change({"lr": 5e-7, "betas": (0.8, 0.9)})
    continued = optimizer(Adam(lr=lr, betas=(0.9, 0.99)))
    continued.moved(json.loads(json.dumps(saved.counters())))
    assert continued.settings.lr == 5e-7
    assert len(caplog.messages) == (says is not None)
    assert says is None or re.search(says, caplog.text)

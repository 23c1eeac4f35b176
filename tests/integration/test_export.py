"""`hf.export` of checkpoints of real groups: bit for bit the directory that the group saves at the same step."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import pytest

import hybridflow as hf
from tests import tiny_models
from tests.tiny_models import away, make_rows

LORA = hf.LoRA(rank=4, alpha=8, targets=("q_proj", "v_proj"))
GROUPS: dict[str, tuple[Any, Any]] = {
    "megatron-bf16": (hf.ActorWorker, hf.Megatron(tp=2, dtype="bfloat16")),
    "fsdp-bf16": (hf.ActorWorker, hf.FSDP(dtype="bfloat16")),
    "zero1-bf16": (hf.ActorWorker, hf.ZeRO(stage=1, dtype="bfloat16")),
    "critic-stages": (hf.CriticWorker, hf.Megatron(pp=2)),
    "critic-bf16": (hf.CriticWorker, hf.ZeRO(stage=3, dtype="bfloat16")),
    "lora": (hf.ActorWorker, hf.FSDP(lora=LORA)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_an_export_equals_the_save_of_the_group(name: str, pool: hf.ResourcePool, tmp_path: Path):
    worker, train = GROUPS[name]
    model = tiny_models.make_policy(tmp_path / "model")
    group = worker.on(pool[0:2], name=name, model=str(model), train=train, optim=hf.Adam(lr=0.01))
    try:
        if worker is hf.ActorWorker:
            rows = hf.BatchRef.from_batch(make_rows())
            for _ in range(2):
                group.update_actor(rows, loss="pretrain").get()
        checkpoint = hf.save(tmp_path / "checkpoint", [group])
        group.save(tmp_path / "saved")
    finally:
        group.close()
    with away(model):
        hf.export(checkpoint, tmp_path / "out", group=name)
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert filecmp.cmpfiles(tmp_path / "out", tmp_path / "saved", names, shallow=False) == (names, [], [])

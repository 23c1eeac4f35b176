"""What runs save: exports equal saves, a replayed step has its run's figures, and copies that differ are not saved."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.cluster.recorded_calls import BatchRecord, BatchRecords, RecordedProgram
from hybridflow.errors import ReplicaError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from tests import tiny_models
from tests.integration.test_any_generation import QWEN3_MOE, make
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
def test_an_export_equals_the_save_of_the_group(place, name: str, pool: hf.ResourcePool, tmp_path: Path):
    worker, train = GROUPS[name]
    model = tiny_models.make_policy(tmp_path / "model")
    group = place(worker, pool[0:2], name=name, model=str(model), train=train, optim=hf.Adam(lr=0.01))
    if worker is hf.ActorWorker:
        rows = hf.BatchRef.from_batch(make_rows())
        for _ in range(2):
            group.update_actor(rows, loss="pretrain").get()
    checkpoint = hf.save(tmp_path / "checkpoint", [group])
    group.save(tmp_path / "saved")
    with away(model):
        hf.export(checkpoint, tmp_path / "out", group=name)
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert filecmp.cmpfiles(tmp_path / "out", tmp_path / "saved", names, shallow=False) == (names, [], [])


DRIVER = Path(__file__).with_name("resuming_driver.py")
ROOT = Path(__file__).resolve().parents[2]
STEPS, STEP = 6, 4


def contents(run: Path) -> dict[str, bytes]:
    """All files but those of replays."""
    names = {path: str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for path, name in names.items() if not name.startswith("replay-")}


def metrics(run: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: {k: v for k, v in line.items() if not k.startswith(("time/", "perf/"))} for line in lines}


@pytest.mark.slow
def test_a_replayed_step_has_the_metrics_of_the_run(tmp_path, warm):
    """It continues from the checkpoint before, over a step without one; the run's files stay as they are."""
    prompts, run = tmp_path / "prompts.jsonl", tmp_path / "run"
    prompts.write_text("".join(json.dumps({"prompt": f"{'abc xyz'[i % 5 :]} k{i}"}) + "\n" for i in range(20)))
    model = tiny_models.make_policy(tmp_path / "model")
    settings = ("every=2", "asynchronous=0", "batches=1")
    driver = f"{DRIVER}:as_function"
    warm.run(ROOT / "hybridflow" / "__main__.py", "run", "--no-check", driver, run, model, prompts, STEPS, *settings)
    records = BatchRecords(run / "checkpoints" / "batches")
    assert records.steps == [*range(1, STEPS + 1)]
    assert BatchRecord.read(records.path(STEP, 0)).rows.rows == 16
    before = contents(run)
    told = warm.run(ROOT / "hybridflow" / "__main__.py", "replay", run, "--step", STEP).stdout
    assert contents(run) == before
    assert RecordedProgram.read(records).driver == driver
    replayed = run / f"replay-{STEP}"
    assert metrics(replayed) == {step: metrics(run)[step] for step in (STEP - 1, STEP)}
    assert "\n0 of " in told, told
    methods = {json.loads(line).get("method") for line in (replayed / "events.jsonl").read_text().splitlines()}
    assert "update_actor" in methods
    assert "generate_sequences" not in methods


STRATEGIES = {
    "megatron": hf.Megatron(),
    "megatron-tp": hf.Megatron(tp=2),
    "hsdp": hf.FSDP(replicate=2),
    "zero-1": hf.ZeRO(stage=1),
    "zero-2": hf.ZeRO(stage=2),
    "hsdp-lora": hf.FSDP(replicate=2, lora=hf.LoRA(rank=2)),
    "hsdp-experts": hf.FSDP(replicate=2, ep=2),
    "megatron-lora": hf.Megatron(tp=2, lora=hf.LoRA(rank=2)),
}


class Flipped(hf.ActorWorker):
    @register(ONE_TO_ALL, blocking=True)
    def flip(self, rank: int) -> None:
        """Change the lowest bit of one trained weight on this rank."""
        if self.context.rank == rank:
            adapters = self.engine.adapters
            trained = self.engine.storage() if adapters is None else adapters.storage
            largest = max(trained.values(), key=torch.Tensor.numel)
            largest.detach().view(-1)[3:4].view(torch.int32).bitwise_xor_(1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_changed_bit_is_named_before_it_is_saved(place, pool, policy, tmp_path, name):
    if name == "hsdp-experts":
        policy = make(tmp_path / "experts", "qwen3_moe", **QWEN3_MOE)
    actor = place(Flipped, pool, model=policy, train=STRATEGIES[name], optim=hf.Adam(lr=0.01), name="flipped")
    rows = hf.BatchRef.from_batch(make_rows(8))
    for _ in range(2):
        actor.update_actor(rows).get()
    hf.save(tmp_path / "before", parts=[actor])
    actor.flip(3)
    named = r"flipped: \S+\[.*\] differs between data parallel ranks.* on ranks? (1, )?3 of \[(0, 1, 2|1), 3\]"
    with pytest.raises(ReplicaError, match=named):
        actor.check_replicas()
    with pytest.raises(ReplicaError, match=named):
        hf.save(tmp_path / "after", parts=[actor])
    assert not (tmp_path / "after").exists()

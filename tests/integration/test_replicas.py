"""A changed bit in one rank's copy of the weights is named, and no checkpoint has it."""

from __future__ import annotations

import pytest
import torch

import hybridflow as hf
from hybridflow.errors import ReplicaError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from tests.integration.test_any_generation import QWEN3_MOE, make
from tests.tiny_models import make_rows

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
def test_a_changed_bit_is_named_before_it_is_saved(pool, policy, tmp_path, name):
    if name == "hsdp-experts":
        policy = make(tmp_path / "experts", "qwen3_moe", **QWEN3_MOE)
    actor = Flipped.on(pool, model=policy, train=STRATEGIES[name], optim=hf.Adam(lr=0.01), name="flipped")
    try:
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
    finally:
        actor.close()

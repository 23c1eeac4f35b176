"""The column `routed_experts`: the experts that each token of a response was sampled with, by calls of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hybridflow as hf
from tests import tiny_models
from tests.example_agents import Echo

SIZES: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
SAMPLING = hf.Sampling(max_tokens=12, seed=5, n=2)
GENERATE = hf.VLLM(kv_cache_gb=0.05, return_routed_experts=True, sampling=SAMPLING)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversation model whose layers have experts."""
    directory = tiny_models.make_chat(tmp_path_factory.mktemp("chat"))
    given = AutoConfig.from_pretrained(directory).to_dict()
    kept = {name: given[name] for name in (*tiny_models.SIZES, "tie_word_embeddings") if name in given}
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **{**kept, **SIZES})).float()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, 0, 0.3)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def prompts() -> hf.Batch:
    return hf.Batch({"row_id": torch.tensor([3, 8, 9]), "prompt": ["a?", "bb?", "ccc?"]})


def check(found: hf.Batch, directory: str | Path) -> None:
    """Each row has the choices of transformers for its tokens, all but the last."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    made: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, given, out: made.append(out[2]))
    experts = found["routed_experts"]
    assert experts.dtype == torch.uint8
    assert len(experts) == found.rows
    for row in range(found.rows):
        ids = torch.cat([found["prompt_ids"].row(row), found["response_ids"].row(row)])[None, :-1]
        made.clear()
        with torch.no_grad():
            model(ids)
        assert torch.equal(experts.row(row).long(), torch.stack(made, 1))


def test_calls_and_conversations_of_a_rollout(hosts, prompts, chat) -> None:
    group = hf.RolloutWorker.on(hosts[0:2], name="routed", model=chat, generate=GENERATE)
    try:
        check(group.generate_sequences(prompts).get(), chat)
        turns = group.generate_sequences(prompts, environment=Echo, max_turns=4).get()
        assert set(turns["turns"].tolist()) > {1}
        check(turns, chat)
        given = hf.BatchRef.from_batch(prompts)
        rows = group.advance_rows(given, until=hf.Until(rows=100)).get().get()
        assert rows.rows == 6
        check(rows, chat)
        assert group.advance_rows(until=hf.Until(rows=100)).get().rows == 0
    finally:
        group.close()


def test_an_actor_captures_what_its_new_weights_choose(pool, place, prompts, chat, tmp_path) -> None:
    generate = hf.VLLM(tp=2, expert_parallel=True, kv_cache_gb=0.05, return_routed_experts=True, sampling=SAMPLING)
    actor = place(hf.ActorWorker, pool[0:2], model=chat, train=hf.FSDP(), optim=hf.SGD(lr=2.0), generate=generate)
    batch = actor.generate_sequences(prompts)
    assert "routed_experts" in batch.columns
    before = batch.get()
    check(before, chat)
    batch |= hf.Batch({"advantages": before["log_probs"].map(torch.ones_like)})
    _ = actor.update_actor(batch).get()
    after = actor.generate_sequences(prompts).get()
    check(after, actor.save(tmp_path / "saved"))
    assert not before["routed_experts"].equal(after["routed_experts"])

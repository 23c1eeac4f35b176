"""vLLM generates with mixtures of experts whose experts lie whole on the ranks of a replica."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.config import VLLM
from hybridflow.engines.vllm.requirements import check, expert_count
from hybridflow.errors import ModelError
from hybridflow.models.hf_spec import TransformersSpec
from tests.contracts.rank_processes import RankProcesses
from tests.integration.expert_tasks import FAMILIES, PROMPTS, SIZES, captured, generated, make, strategy, waited

NEAR = 1e-3
"""Nats, in float32."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.close()


def check_rows(directory: Path, rows: list[tuple[list[int], list[float]]]) -> None:
    """Tokens and log-probabilities are those of transformers."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, (token_ids, log_probs) in zip(PROMPTS, rows, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        assert token_ids == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), wanted, rtol=0, atol=NEAR)


SHARED_OUT = [("qwen2_moe", 1, 2), ("mixtral", 1, 2), ("qwen3_moe", 2, 2), ("qwen3_moe", 1, 4)]
"""Family, pp and tp; of four ranks the last has no rows of the vocabulary."""
SHARED_OUT += [("olmoe", 1, 2), ("glm4_moe", 1, 2)]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("family", "pp", "tp"), SHARED_OUT)
def test_experts_lie_whole_on_ranks(ranks, tmp_path, family, pp, tp) -> None:
    one, other = (make(tmp_path / f"{seed}", family, seed) for seed in (1, 2))
    chosen = strategy(pp=pp, tp=tp, expert_parallel=True)
    found = ranks.run(pp * tp, generated, ranks.name(), one, other, chosen)
    config: Any = AutoConfig.from_pretrained(one)
    layers = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    count = getattr(config, "num_local_experts", 0) or config.num_experts
    held = [list(rank["experts"].values()) for rank in found]
    share = [count // tp + (rank % tp < count % tp) for rank in range(pp * tp)]
    assert [{len(experts) for experts in layers} for layers in held] == [{n} for n in share]
    assert sum(len(experts) for layers in held for experts in layers) == layers * count
    for directory in (one, other):
        assert all(rank[directory.name] == found[0][directory.name] for rank in found)
        check_rows(directory, found[0][directory.name])


def test_what_cannot_be_shared_out_is_refused_on_the_driver() -> None:
    def spec(family: str, **sizes: Any) -> TransformersSpec:
        return TransformersSpec.of(AutoConfig.for_model(family, **{**SIZES, **FAMILIES.get(family, {}), **sizes}))

    assert expert_count(spec("mixtral")) == 3
    assert expert_count(spec("phi3")) == 0
    check(spec("mixtral"), VLLM(tp=2, expert_parallel=True), "cpu")
    with pytest.raises(ModelError, match=r"expert_parallel=True.* is about experts, and this phi3 model has none"):
        check(spec("phi3"), VLLM(tp=2, expert_parallel=True), "cpu")
    with pytest.raises(ModelError, match=r"expert_parallel=True\): the model has 3 experts.*Use tp up to 3"):
        check(spec("mixtral", num_key_value_heads=4), VLLM(tp=4, expert_parallel=True), "cpu")


def chosen_experts(directory: Path, ids: list[int]) -> torch.Tensor:
    """[tokens, layers, k]: the experts of transformers' own routers."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, given, out: found.append(out[2]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return torch.stack(found, 1)


CAPTURES = [(1, 1, False), (1, 2, True), (2, 1, False), pytest.param(2, 2, True, marks=pytest.mark.slow)]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("pp", "tp", "parallel"), CAPTURES)
def test_captured_experts_are_those_that_transformers_chooses(ranks, tmp_path, pp, tp, parallel) -> None:
    """In order, for prompts from the prefix cache and earlier turns too, and after other weights were written."""
    one, other = (make(tmp_path / f"{seed}", "qwen3_moe", seed, num_hidden_layers=3) for seed in (1, 2))
    chosen = strategy(pp=pp, tp=tp, expert_parallel=parallel, return_routed_experts=True)
    found = ranks.run(pp * tp, captured, ranks.name(), one, other, chosen)
    for directory in (one, other):
        for at, rows in enumerate(found[0][directory.name]):
            for number, row in enumerate(rows):
                assert row["experts"].dtype == torch.uint8
                assert row["experts"].shape == (len(row["ids"]) - 1, 3, 2)
                assert torch.equal(row["experts"].long(), chosen_experts(directory, row["ids"][:-1]))
                assert all(torch.equal(rank[directory.name][at][number]["experts"], row["experts"]) for rank in found)
        again, later = found[0][directory.name][1], found[0][directory.name][3]
        assert again[0]["prefilled"] <= 21  # of 149: a block of 128 was cached
        assert pp > 1 or [row["prefilled"] for row in later] == [4, 4]
    assert found[0]["bytes"] > found[0]["asleep"] == 0


def test_routing_of_a_model_without_experts_is_refused_on_the_driver() -> None:
    spec = TransformersSpec.of(AutoConfig.for_model("phi3", **SIZES))
    with pytest.raises(ModelError, match=r"return_routed_experts=True.* this phi3 model has none"):
        check(spec, strategy(return_routed_experts=True), "cpu")


YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
YARN |= {"original_max_position_embeddings": 64, "rope_theta": 10000.0}
GROUPS = {"n_group": 2, "topk_method": "group_limited_greedy", "rope_parameters": YARN}


LATENT = [("deepseek_v2", 1, {}), ("deepseek_v2", 2, GROUPS), ("deepseek_v3", 2, {})]


@pytest.mark.parametrize(("family", "tp", "sizes"), LATENT)
def test_latent_attention_follows_its_weights(ranks, tmp_path, family, tp, sizes) -> None:
    """Of several heads and with experts; also where weights were written in place a second time."""
    one, other = (make(tmp_path / f"{seed}", family, seed, **sizes) for seed in (1, 2))
    found = ranks.run(tp, generated, ranks.name(), one, other, strategy(tp=tp, expert_parallel=tp > 1))
    for directory in (one, other):
        assert all(rank[directory.name] == found[0][directory.name] for rank in found)
        check_rows(directory, found[0][directory.name])


WAITING = [("qwen3_moe", 2, 1), ("deepseek_v2", 1, 2), ("gemma3_text", 1, 1)]


@pytest.mark.parametrize(("family", "pp", "tp"), WAITING)
def test_keys_values_and_experts_wait_for_their_rows_only(ranks, tmp_path, family, pp, tp) -> None:
    """Also routed experts, latent attention and windows; blocks that did not wait are not found in the prefix cache."""
    one, other = (make(tmp_path / f"{seed}", family, seed) for seed in (1, 2))
    chosen = strategy(pp=pp, tp=tp, kv="keep", return_routed_experts=family == "qwen3_moe")
    found = ranks.run(pp * tp, waited, ranks.name(), one, other, chosen)

    def drawn(rows: list[dict[str, Any]]) -> list[list[int]]:
        return [row["token_ids"] for row in rows]

    for rank in found:
        for directory in (one, other):
            (kept, beside), (moved, _), (again, _) = (
                rank[f"{directory.name} {kv}"] for kv in ("keep", "offload", "recompute")
            )
            assert [row["recomputed"] for row in [*kept, *moved]] == [0] * 8
            assert all(0 < row["recomputed"] - len(row["prompt_ids"]) <= 4 for row in again)
            for name in ("token_ids", "log_probs"):
                assert [row[name] for row in kept] == [row[name] for row in moved]
            assert drawn(beside) == drawn(rank[directory.name])  # as without the rows that waited
            assert beside[0]["prefilled"] == len(beside[0]["prompt_ids"])
            if directory == one:
                assert drawn(kept) == drawn(again) == drawn(beside)
            if family == "qwen3_moe":
                for row, its in zip(kept, moved, strict=True):
                    assert torch.equal(row["routed_experts"], its["routed_experts"])
                    ids, experts = row["prompt_ids"] + row["token_ids"], row["routed_experts"]
                    by_first = row["policy_version"].count(min(row["policy_version"]))
                    before = len(ids) - 1 if directory == one else len(row["prompt_ids"]) + by_first - 1
                    assert torch.equal(experts[:before].long(), chosen_experts(one, ids[:-1])[:before])

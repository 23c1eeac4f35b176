"""vLLM generates with mixtures of experts whose experts lie whole on the ranks of a replica."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import hybridflow as hf
from hybridflow.config import VLLM, Sampling, Until
from hybridflow.engine3d.layout import Box
from hybridflow.engines.contract import Row
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.engines.vllm.requirements import check, expert_count
from hybridflow.errors import ModelError
from hybridflow.models.hf_spec import TransformersSpec, read_spec
from hybridflow.topology import RankGrid
from tests import tiny_models
from tests.contracts.rank_processes import RankProcesses, World
from tests.example_agents import Echo

SIZES: dict[str, Any] = {
    "vocab_size": 70,
    "hidden_size": 128,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 32, "num_experts": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 3},  # not the same number on each of two ranks
    "olmoe": {"num_experts": 4},
    "glm4_moe": {"head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    | {"first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    | {"head_dim": 32, "query_pre_attn_scalar": 32},
    "deepseek_v2": _LATENT | {"n_routed_experts": 4, "topk_method": "greedy", "norm_topk_prob": False},
    "deepseek_v3": _LATENT
    | {"n_routed_experts": 8, "n_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
}
PROMPTS = [[5, 9, 33, 69], [12, 7], list(range(3, 20)), [60]]
SEEDS = [11, 12, 13, 14]
GREEDY = Sampling(max_tokens=10, greedy=True, ignore_eos=True)


def make(directory: Path, family: str, seed: int = 0, **sizes: Any) -> Path:
    """A random model whose router decides clearly, with norms and biases that count."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **sizes})
    model: Any = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or "bias" in name:
                tensor.add_(torch.randn_like(tensor) * 0.2)
            elif name.endswith("gate.weight"):
                tensor.normal_(0, 0.3)
    model.save_pretrained(directory)
    return directory


def strategy(**options: Any) -> VLLM:
    return VLLM(**{"kv_cache_gb": 0.02, "memory_fraction": 0.2, "max_sequences": 16, "dtype": "float32", **options})


def build(world: World, name: str, directory: Path, chosen: VLLM) -> VLLMEngine:
    """An engine without weights."""
    context = world.context(name, RankGrid(chosen.pp, chosen.tp))
    spec = read_spec(directory, "lm")
    world.engines.append(VLLMEngine(context, chosen, context.grid.generation(chosen.pp, chosen.tp), spec, directory))
    return world.engines[-1]


def write(engine: VLLMEngine, rank: int, directory: Path) -> None:
    """The checkpoint's weights, through the layout; all else is poisoned first."""
    weights, storage = load_file(directory / "model.safetensors"), engine.storage()
    for tensor in storage.values():
        tensor.fill_(1e4)
    for region in engine.layout().regions(rank):
        box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        region.view(storage[region.storage]).copy_(weights[region.box.tensor][box])
    engine.weights_changed()


def experts(engine: VLLMEngine, rank: int) -> dict[str, list[str]]:
    """The experts that lie whole on this rank, by layer."""
    tensors, held = engine.layout().tensors, Counter[str]()
    for region in engine.layout().regions(rank):
        if "experts." in (name := region.box.tensor) and "shared" not in name:
            assert region.box == Box.whole(name, tensors[name])
            held[name.rsplit(".", 2)[0]] += 1
    found = defaultdict[str, list[str]](list)
    for name, matrices in held.items():
        assert matrices == 3
        found[name.rpartition(".")[0]].append(name)
    return dict(found)


def generated(world: World, name: str, first: Path, then: Path, chosen: VLLM) -> dict[str, Any]:
    """Greedy tokens and log-probabilities with the weights of the one and then of the other, and where experts lie."""
    engine = build(world, name, first, chosen)
    found: dict[str, Any] = {"experts": experts(engine, world.rank)}
    for directory in (first, then):
        write(engine, world.rank, directory)
        rows = engine.generate(PROMPTS, GREEDY)
        found[directory.name] = [(row.token_ids, row.log_probs) for [row] in rows]
    return found


LONG = list(range(2, 66)) * 2 + list(range(20, 40))  # more than a block of the KV cache
SHARED = [[*LONG, 60], [*LONG, 5, 9, 33], [12, 7], [*LONG, 60]]
DRAWN = Sampling(max_tokens=12, temperature=1.0, ignore_eos=True)


def plain(row: Row) -> dict[str, Any]:
    assert row.routed_experts is not None
    return {"ids": row.prompt_ids + row.token_ids, "experts": row.routed_experts, "prefilled": row.prefilled}


def captured(world: World, name: str, first: Path, then: Path, chosen: VLLM) -> dict[str, Any]:
    """Rows with shared prefixes, conversations of two turns, and both again after other weights were written."""
    engine = build(world, name, first, chosen)
    found: dict[str, Any] = {"bytes": engine.cache_bytes}
    for at, directory in enumerate((first, then)):
        write(engine, world.rank, directory)
        calls = [engine.generate(SHARED, DRAWN, SEEDS) for _ in range(2)]  # the second finds the cache of the first
        turns = []
        prompts = [[5, 9, 33], LONG]
        for turn in range(2):
            rows = [Row(at * 10 + i, 0, prompt, DRAWN, turn, kept=True) for i, prompt in enumerate(prompts)]
            engine.submit(rows)
            engine.advance()
            done = sorted(engine.take(), key=lambda row: row.row_id)
            prompts = [row.prompt_ids + row.token_ids + [7, 8, 9] for row in done]
            turns.append([plain(row) for row in done])
        found[directory.name] = [*([plain(row) for [row] in rows] for rows in calls), *turns]
        engine.sleep()
        engine.wake()
    found["asleep"] = engine.sleep() or engine.cache_bytes
    return found


def waited(world: World, name: str, first: Path, then: Path, chosen: VLLM) -> dict[str, Any]:
    """Rows whose keys and values have waited while the engine slept, and rows of the same prompts that begin later,
    also under other weights."""
    engine = build(world, name, first, chosen)
    found: dict[str, Any] = {}
    for directory in (first, then):
        for kv in ("keep", "offload", "recompute"):
            write(engine, world.rank, first)
            engine.submit(engine.new_rows(SHARED, DRAWN, SEEDS))
            engine.advance(Until(steps=4))
            engine.sleep(kv)
            engine.wake()
            write(engine, world.rank, directory)
            fresh = engine.generate(SHARED, DRAWN, SEEDS)
            engine.advance()
            rows = sorted(engine.take(), key=lambda row: row.row_id)
            beside = [row for [row] in fresh]
            found[f"{directory.name} {kv}"] = [[asdict(row) for row in each] for each in (rows, beside)]
        found[directory.name] = [asdict(row) for [row] in engine.generate(SHARED, DRAWN, SEEDS)]
    return found


NEAR = 1e-3
"""Nats, in float32."""


@pytest.fixture(scope="module")
def ranks(rank_processes) -> RankProcesses:
    return rank_processes(4)


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


FEW: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
SAMPLING = hf.Sampling(max_tokens=12, seed=5, n=2)
GENERATE = hf.VLLM(kv_cache_gb=0.05, return_routed_experts=True, sampling=SAMPLING)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversation model whose layers have experts."""
    directory = tiny_models.make_chat(tmp_path_factory.mktemp("chat"))
    given = AutoConfig.from_pretrained(directory).to_dict()
    kept = {name: given[name] for name in (*tiny_models.SIZES, "tie_word_embeddings") if name in given}
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **{**kept, **FEW})).float()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, 0, 0.3)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def prompts() -> hf.Batch:
    return hf.Batch({"row_id": torch.tensor([3, 8, 9]), "prompt": ["a?", "bb?", "ccc?"]})


def check_choices(found: hf.Batch, directory: str | Path) -> None:
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


def test_calls_and_conversations_of_a_rollout(place, hosts, prompts, chat) -> None:
    group = place(hf.RolloutWorker, hosts[0:2], name="routed", model=chat, generate=GENERATE)
    check_choices(group.generate_sequences(prompts).get(), chat)
    turns = group.generate_sequences(prompts, environment=Echo, max_turns=4).get()
    assert set(turns["turns"].tolist()) > {1}
    check_choices(turns, chat)
    given = hf.BatchRef.from_batch(prompts)
    rows = group.advance_rows(given, until=hf.Until(rows=100)).get().get()
    assert rows.rows == 6
    check_choices(rows, chat)
    assert group.advance_rows(until=hf.Until(rows=100)).get().rows == 0


def test_an_actor_captures_what_its_new_weights_choose(pool, place, prompts, chat, tmp_path) -> None:
    generate = hf.VLLM(tp=2, expert_parallel=True, kv_cache_gb=0.05, return_routed_experts=True, sampling=SAMPLING)
    actor = place(hf.ActorWorker, pool[0:2], model=chat, train=hf.FSDP(), optim=hf.SGD(lr=2.0), generate=generate)
    batch = actor.generate_sequences(prompts)
    assert "routed_experts" in batch.columns
    before = batch.get()
    check_choices(before, chat)
    batch |= hf.Batch({"advantages": before["log_probs"].map(torch.ones_like)})
    _ = actor.update_actor(batch).get()
    after = actor.generate_sequences(prompts).get()
    check_choices(after, actor.save(tmp_path / "saved"))
    assert not before["routed_experts"].equal(after["routed_experts"])

"""VLLMEngine against Hugging Face, in one set of four gloo processes that builds every grid one after the other.

The processes run all scenarios once and return plain values; the tests below look at them.
"""

from __future__ import annotations

import datetime
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from hybridflow.config import VLLM, Sampling
from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.engines.vllm.requirements import check
from hybridflow.errors import ConfigError, HybridFlowError, ModelError
from hybridflow.model_spec import ModelSpec
from hybridflow.topology import RankGrid

VOCAB, CONTEXT, EOS = 70, 64, 1  # 70 rows of vocabulary: vLLM pads them to 128
FAMILIES = ("llama", "qwen2", "qwen3")
PROMPTS = [[5, 9, 33, 69], [12, 7], [3, 3, 40, 41, 42, 8], [60]]
SEEDS = [11, 12, 13, 14]
GREEDY = Sampling(max_tokens=6, greedy=True, ignore_eos=True)
RANDOM = Sampling(max_tokens=8, temperature=0.7, n=2)

# name: (world ranks, training grid (p, t, d), p_g, t_g, family)
SCENARIOS: dict[str, tuple[list[int], tuple[int, int, int], int, int, str]] = {
    "p1t4-p1t2": ([0, 1, 2, 3], (1, 4, 1), 1, 2, "llama"),
    "p2t2-p2t1": ([0, 1, 2, 3], (2, 2, 1), 2, 1, "llama"),
    "p2t2-p1t2": ([0, 1, 2, 3], (2, 2, 1), 1, 2, "qwen3"),
    "slice-p1t2-p1t2": ([2, 3], (1, 2, 1), 1, 2, "qwen2"),
    "slice-p2t1-p2t1": ([2, 3], (2, 1, 1), 2, 1, "qwen3"),
    "p1t2-p1t1": ([0, 1], (1, 2, 1), 1, 1, "llama"),
    "qwen2": ([0], (1, 1, 1), 1, 1, "qwen2"),
    "qwen3": ([1], (1, 1, 1), 1, 1, "qwen3"),
    "llama": ([2], (1, 1, 1), 1, 1, "llama"),
}


def _save_model(family: str, directory: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    extra = {"head_dim": 32} if family != "qwen2" else {}
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1 if family == "qwen2" else 2,  # one kv-head is replicated over two ranks
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=family == "qwen3",
        initializer_range=0.15,
        eos_token_id=EOS,
        **extra,
    )
    torch.manual_seed(len(family) + ord(family[-1]))
    model = AutoModelForCausalLM.from_config(config).float()
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(directory)


def _weights(directory: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def _write(engine: VLLMEngine, rank: int, weights: dict[str, Tensor], scale: float = 1.0) -> None:
    """Write canonical tensors through the layout; vocabulary padding is poisoned to show that nobody reads it."""
    storage = engine.storage()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in storage:
            storage[name].fill_(1e4)
    for region in engine.layout().regions(rank):
        box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        storage[region.storage][region.index()].copy_(weights[region.box.tensor][box] * scale)
    engine.weights_changed()


def _plain(rows: list[list[Any]]) -> list[list[tuple[list[int], list[float], bool]]]:
    return [[(c.token_ids, c.log_probs, c.finished) for c in row] for row in rows]


def _error(call) -> str:
    try:
        call()
    except HybridFlowError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _context(world_rank: int, store: dist.Store, name: str, ranks: list[int], grid: RankGrid) -> RankContext:
    groups = ProcessGroups(store, name, ranks, ranks.index(world_rank), torch.device("cpu"), 60.0)
    return RankContext("actor", ranks.index(world_rank), grid, torch.device("cpu"), groups)


def _scenario(world_rank: int, store: dist.Store, name: str, root: Path) -> dict[str, Any] | None:
    ranks, sizes, p_g, t_g, family = SCENARIOS[name]
    if world_rank not in ranks:
        return None
    os.environ["HYBRIDFLOW_SESSION"] = "5e5510"
    context = _context(world_rank, store, name, ranks, RankGrid(*sizes))
    grid = context.grid.generation(p_g, t_g)
    strategy = VLLM(tp=t_g, pp=p_g, kv_cache_gb=0.02, max_sequences=16)
    spec, weights = ModelSpec.from_checkpoint(root / family), _weights(root / family)
    generator_state = torch.get_rng_state()
    engine = VLLMEngine(context, strategy, grid, spec, root / family)
    out: dict[str, Any] = {
        "replica": grid.replica(context.rank),
        "rng": torch.equal(generator_state, torch.get_rng_state()),
    }
    out["covered"] = sum(region.box.numel for region in engine.layout().regions(context.rank))
    out["stored"] = sum(tensor.numel() for tensor in engine.storage().values())
    dist.barrier(context.groups.everyone())
    out["ident"] = engine._groups.ident
    out["segments"] = [str(p) for p in Path("/dev/shm").glob(f"*{engine._groups.ident}*")]
    _write(engine, context.rank, weights)
    out["greedy"] = _plain(engine.generate(PROMPTS, GREEDY))
    out["random"] = _plain(engine.generate(PROMPTS, RANDOM, SEEDS))
    rows = slice(grid.replica(context.rank) % 2 * 2, grid.replica(context.rank) % 2 * 2 + 2)
    out["split"] = (rows.start, _plain(engine.generate(PROMPTS[rows], RANDOM, SEEDS[rows])))
    out["unseeded"] = [_plain(engine.generate(PROMPTS, RANDOM)) for _ in range(2)]
    out["empty"] = engine.generate([], GREEDY)
    _write(engine, context.rank, weights, scale=0.8)
    out["scaled"] = _plain(engine.generate(PROMPTS, GREEDY))
    if name == "llama":
        out |= _single(engine, context, strategy, spec, weights, root / family)
    engine.close()
    engine.close()
    out["world"] = dist.is_initialized() and dist.get_world_size()
    context.groups.close()
    return out


def _single(
    engine: VLLMEngine, context: RankContext, strategy: VLLM, spec: ModelSpec, weights: dict[str, Tensor], path: Path
) -> dict[str, Any]:
    """What one rank is enough for."""
    _write(engine, 0, weights)
    out: dict[str, Any] = {}
    for name, sampling in {
        "top_k": Sampling(max_tokens=12, top_k=3, temperature=1.3),
        "top_p": Sampling(max_tokens=12, top_p=0.5, temperature=1.3),
        "eos": Sampling(max_tokens=40, temperature=3.0, n=4),
        "no_eos": Sampling(max_tokens=40, temperature=3.0, n=4, ignore_eos=True),
    }.items():
        out[name] = _plain(engine.generate(PROMPTS, sampling, SEEDS))
    long = [[t % 60 + 2 for t in range(40)]]
    out["cached"] = [_plain(engine.generate(long, GREEDY)) for _ in range(2)]
    engine.sleep()
    out["asleep"] = (sum(s.nbytes() for s in engine._cache_storages()), _error(lambda: engine.generate(long, GREEDY)))
    engine.wake()
    out["woken"] = _plain(engine.generate(long, GREEDY))
    out["errors"] = {
        "long": _error(lambda: engine.generate([[1, 2], list(range(CONTEXT))], GREEDY)),
        "room": _error(lambda: engine.generate([[1] * (CONTEXT - 5)], GREEDY)),
        "empty": _error(lambda: engine.generate([[4], []], GREEDY)),
        "vocabulary": _error(lambda: engine.generate([[4], [VOCAB]], GREEDY)),
        "stop": _error(lambda: engine.generate(PROMPTS, Sampling(stop=("x",)))),
        "seeds": _error(lambda: engine.generate(PROMPTS, GREEDY, [1])),
        "second": _error(lambda: VLLMEngine(context, strategy, engine.grid, spec, path)),
    }
    _save_tokenizer(path)
    text = Sampling(max_tokens=30, temperature=3.0, stop=("w7", "w8 w"), ignore_eos=True)
    out["stop"] = _plain(engine.generate(PROMPTS, text, SEEDS))
    return out


def _save_tokenizer(directory: Path) -> None:
    """Words w0..w69, one per token id."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)


def _process(world_rank: int, port: int, root: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 4, world_rank == 0, datetime.timedelta(seconds=100))
    world = dist.PrefixStore("world", store)
    dist.init_process_group("gloo", store=world, rank=world_rank, world_size=4, timeout=datetime.timedelta(seconds=100))
    torch.save({name: _scenario(world_rank, store, name, root) for name in SCENARIOS}, root / f"rank{world_rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        _save_model(family, directory / family)
    return directory


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """scenario -> world rank -> what that process saw."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.start_processes(_process, (port, root), nprocs=4, start_method="spawn")
    ranks = [torch.load(root / f"rank{r}.pt", weights_only=False) for r in range(4)]
    return {name: {r: ranks[r][name] for r in SCENARIOS[name][0]} for name in SCENARIOS}


@pytest.fixture(scope="module")
def models(root: Path) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    return {family: AutoModelForCausalLM.from_pretrained(root / family).float().eval() for family in FAMILIES}


def _scale(model: Any, factor: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)


@torch.no_grad()
def _logits(model: Any, prompt: list[int], response: list[int]) -> Tensor:
    """[R, V]: Hugging Face's logits at the positions that predict each response token."""
    return model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()


def _check_log_probs(model: Any, rows: list, temperature: float) -> None:
    for prompt, completions in zip(PROMPTS, rows, strict=True):
        for token_ids, log_probs, _ in completions:
            wanted = (_logits(model, prompt, token_ids) / temperature).log_softmax(-1)
            wanted = wanted.gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
            assert torch.tensor(log_probs).sub(wanted).abs().max() < 1e-3


def _check_greedy(model: Any, rows: list) -> None:
    _check_log_probs(model, rows, 1.0)
    for prompt, [(token_ids, _, finished)] in zip(PROMPTS, rows, strict=True):
        assert len(token_ids) == GREEDY.max_tokens
        assert not finished
        assert token_ids == _logits(model, prompt, token_ids).argmax(-1).tolist()


@pytest.mark.parametrize("name", SCENARIOS)
def test_greedy_tokens_and_log_probs_equal_hugging_face(results, models, name) -> None:
    for out in results[name].values():
        _check_greedy(models[SCENARIOS[name][4]], out["greedy"])


@pytest.mark.parametrize("name", SCENARIOS)
def test_outputs_follow_weights_written_in_place(results, models, name) -> None:
    model = models[SCENARIOS[name][4]]
    _scale(model, 0.8)
    try:
        for out in results[name].values():
            _check_greedy(model, out["scaled"])
            assert out["scaled"] != out["greedy"]
    finally:
        _scale(model, 1 / 0.8)


@pytest.mark.parametrize("name", SCENARIOS)
def test_sampled_log_probs_are_those_at_the_temperature(results, models, name) -> None:
    for out in results[name].values():
        _check_log_probs(models[SCENARIOS[name][4]], out["random"], RANDOM.temperature)


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_ranks_of_a_replica_return_the_same(results, name) -> None:
    by_replica: dict[int, list] = {}
    for out in results[name].values():
        by_replica.setdefault(out["replica"], []).append((out["greedy"], out["random"], out["unseeded"]))
    sizes = SCENARIOS[name][2] * SCENARIOS[name][3]
    assert all(len(same) == sizes and same.count(same[0]) == sizes for same in by_replica.values())


@pytest.mark.parametrize("name", SCENARIOS)
def test_seeds_make_tokens_independent_of_the_split(results, name) -> None:
    tokens = lambda rows: [[c[0] for c in row] for row in rows]  # noqa: E731
    whole = tokens(next(iter(results[name].values()))["random"])
    for out in results[name].values():
        start, part = out["split"]
        assert tokens(out["random"]) == whole
        assert tokens(part) == whole[start : start + 2]


def test_responses_to_one_prompt_differ_and_unseeded_calls_differ(results) -> None:
    for out in results["llama"].values():
        assert any(row[0][0] != row[1][0] for row in out["random"])
        assert out["unseeded"][0] != out["unseeded"][1]


@pytest.mark.parametrize("name", SCENARIOS)
def test_storage_is_covered_and_the_training_process_left_as_it_was(results, name) -> None:
    _, _, p_g, _, family = SCENARIOS[name]
    for out in results[name].values():
        assert out["empty"] == []
        assert out["rng"]
        assert out["world"] == 4
        assert out["ident"].startswith("hf5e5510")  # by which the session finds what a killed process left
        assert out["segments"] == []  # also while it runs: a killed process leaves none
        padding = 58 * 128 * (1 if family == "qwen3" or p_g == 2 else 2)  # at most this much is not covered
        assert 0 <= out["stored"] - out["covered"] <= padding


def test_truncation_limits_tokens_and_not_log_probs(results, models) -> None:
    out = results["llama"][2]
    for name, allowed in (("top_k", lambda p: 3), ("top_p", lambda p: int((p.cumsum(-1) < 0.5).sum()) + 1)):
        _check_log_probs(models["llama"], out[name], 1.3)
        for prompt, [(token_ids, _, _)] in zip(PROMPTS, out[name], strict=True):
            probs = (_logits(models["llama"], prompt, token_ids) / 1.3).softmax(-1)
            for row, token in zip(probs, token_ids, strict=True):
                ranked, order = row.sort(descending=True)
                assert token in order[: allowed(ranked)]


def test_stop_tokens_end_responses_and_stay_in_them(results) -> None:
    out = results["llama"][2]
    completions = [c for row in out["eos"] for c in row]
    assert any(finished for _, _, finished in completions)
    for token_ids, log_probs, finished in completions:
        assert len(token_ids) == len(log_probs)
        assert finished == (token_ids[-1] == EOS)
        assert EOS not in token_ids[:-1]
        assert finished or len(token_ids) == 40
    assert all(len(c[0]) == 40 and not c[2] for row in out["no_eos"] for c in row)


def test_stop_strings_end_responses_and_stay_in_them(results) -> None:
    completions = [c for row in results["llama"][2]["stop"] for c in row]
    assert any(finished for _, _, finished in completions)
    for token_ids, log_probs, finished in completions:
        text = " ".join(f"w{i}" for i in token_ids)
        before = " ".join(f"w{i}" for i in token_ids[:-1])
        assert len(token_ids) == len(log_probs)
        assert finished == ("w7" in text or "w8 w" in text)
        assert "w7" not in before
        assert "w8 w" not in before


def test_sleep_frees_the_cache_and_wake_restores_it(results) -> None:
    out = results["llama"][2]
    assert out["cached"][0] == out["cached"][1]
    assert out["asleep"][0] == 0
    assert "wake()" in out["asleep"][1]
    assert out["woken"] == out["cached"][0]


def test_errors_say_what_was_asked_and_found(results) -> None:
    errors = results["llama"][2]["errors"]
    assert errors["long"].startswith("PromptError: prompt 1 has 64 tokens")
    assert errors["room"].startswith("PromptError: prompt 0 has 59 tokens")
    assert errors["empty"].startswith("PromptError: prompt 1 is empty")
    assert errors["vocabulary"].startswith("PromptError: prompt 1 has token ids")
    assert errors["stop"].startswith("ConfigError")
    assert "tokenizer" in errors["stop"]
    assert errors["seeds"].startswith("ConfigError: generate got 1 seeds for 4 prompts")
    assert errors["second"].startswith("PlacementError")
    assert "already has a vLLM engine" in errors["second"]


def test_what_vllm_cannot_run_is_refused_on_the_driver(root) -> None:
    spec = ModelSpec.from_checkpoint(root / "llama")
    for change, strategy, device, error, words in (
        ({"head_dim": 16}, VLLM(), "cpu", ModelError, "head_dim=16"),
        ({"head": "value"}, VLLM(), "cpu", ModelError, "'value' head"),
        ({}, VLLM(tp=3), "cpu", ModelError, "Use tp in [1, 2, 4]"),
        ({}, VLLM(pp=3), "cuda", ModelError, "2 layers"),
        ({}, VLLM(max_length=CONTEXT + 1), "cuda", ConfigError, "context is 64"),
        ({"context": 10**6}, VLLM(), "cpu", ConfigError, "kv_cache_gb"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            check(replace(spec, **change), strategy, device)
    check(replace(spec, head_dim=16), VLLM(tp=2), "cuda")

"""Variations of one model directory: training and generation compute the same from it, or it is refused. None differs
in silence.

The table of `pytest -s` says which."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import FSDP, VLLM, Megatron, Sampling
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.errors import HybridFlowError
from hybridflow.models.hf_spec import read_spec
from hybridflow.topology import RankGrid
from hybridflow.workers.actor import ActorWorker
from tests.contracts import generating_families
from tests.contracts.engine_tasks import build
from tests.contracts.rank_processes import RankProcesses, World

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": None,
}
HEADS = {"llama": {"head_dim": 32}, "mistral": {"head_dim": 32}, "qwen3": {"head_dim": 32}}
GENERATE = VLLM(kv_cache_gb=0.02, sampling=Sampling(max_tokens=12, ignore_eos=True, seed=1))
PROMPTS = [[(7 * i + j) % 62 + 2 for j in range(30 + i)] for i in range(3)]


def make(path: Path, family: str = "llama", **sizes: Any) -> Path:
    """A random float32 model with weights that are far from trivial."""
    torch.manual_seed(11)
    config = AutoConfig.for_model(family, **(SIZES | HEADS.get(family, {}) | sizes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return path


def edit(path: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> None:
    file = path / name
    content = json.loads(file.read_text()) if file.is_file() else {}
    change(content)
    file.write_text(json.dumps(content))


def refusal(path: Path, strategy: Any) -> str | None:
    """What the driver says of an actor of this directory before a process starts."""
    settings = {"model": str(path), "train": strategy, "generate": GENERATE, "optim": None, "offload": ()}
    settings |= {"overlap": False, "bucket_mb": None, "teacher": None}
    try:
        ActorWorker.worker_spec(settings).check(RankGrid(), "cpu")
    except HybridFlowError as error:
        return f"{type(error).__name__}: {error}"
    return None


def outcomes(world: World, name: str, path: Path) -> dict[str, str | float]:
    """By backend the largest difference, in nats, from what vLLM drew with; or how it was refused or stopped."""
    strategies = {"FSDP": FSDP(), "Megatron": Megatron()}
    found: dict[str, str | float] = {}
    for kind, strategy in strategies.items():
        if (said := refusal(path, strategy)) is not None:
            found[kind] = f"refused: {said}"
    if len(found) == len(strategies):
        return {**found, "vLLM": found["FSDP"]}
    os.environ.setdefault("HYBRIDFLOW_SESSION", "5e5511")
    spec, context = read_spec(path, "lm"), world.context(name, RankGrid())
    try:
        engine = VLLMEngine(context, GENERATE, context.grid.generation(), spec, path)
    except HybridFlowError as error:
        return {**dict.fromkeys(strategies, f"stopped: {error}"), **found, "vLLM": f"stopped: {error}"}
    try:
        Checkpoint(path).read_into(engine.layout(), 0, engine.storage())
        engine.weights_changed()
        rows = [several[0] for several in engine.generate(PROMPTS, GENERATE.sampling)]
    finally:
        engine.close()
    batch = Batch(
        {
            "prompt_ids": Ragged.from_rows([torch.tensor(row.prompt_ids) for row in rows]),
            "response_ids": Ragged.from_rows([torch.tensor(row.token_ids) for row in rows]),
        }
    )
    drawn = torch.tensor([value for row in rows for value in row.log_probs])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    found["vLLM"] = _apart(drawn, _log_probs(model, rows))
    for kind, strategy in strategies.items():
        if kind not in found:
            own = build(world, f"{name}-{kind}", strategy, 1, path, spec=read_spec(path, "lm"))
            found[kind] = _apart(drawn, own.forward(batch, ("log_probs",))["log_probs"].values)
            own.close()
    return found


def save_tokenizer(path: Path, end: int | None, special: int | None = None) -> None:
    """Words `w0 w1 ...`; token `end` ends a text, and the special token `special` is written `<|im_end|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<|im_end|>" if i == special else f"w{i}": i for i in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
    named: dict[str, Any] = {} if end is None else {"eos_token": f"w{end}"}
    if special is not None:
        tokenizer.add_special_tokens(["<|im_end|>"])
        named["additional_special_tokens"] = ["<|im_end|>"]
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", **named).save_pretrained(path)


def stopped(world: World, name: str, path: Path) -> dict[str, Any]:
    """Responses without stops, and with the token at the fifth place as a stop in each way."""
    os.environ.setdefault("HYBRIDFLOW_SESSION", "5e5511")
    context, plain = world.context(name, RankGrid()), GENERATE.sampling

    def run(sampling: Sampling) -> tuple[list[int], bool]:
        engine = VLLMEngine(context, GENERATE, context.grid.generation(), read_spec(path, "lm"), path)
        try:
            Checkpoint(path).read_into(engine.layout(), 0, engine.storage())
            engine.weights_changed()
            row = engine.generate(PROMPTS[:1], sampling)[0][0]
            return row.token_ids, row.finished
        finally:
            engine.close()

    edit(path, "config.json", lambda config: config.update(eos_token_id=None))
    (path / "generation_config.json").unlink(missing_ok=True)
    whole, _ = run(plain)
    token = whole[4]
    found: dict[str, Any] = {"whole": whole, "at": whole.index(token)}
    found["stop_token_ids"] = run(replace(plain, stop_token_ids=(token,)))
    save_tokenizer(path, None, special=token)
    found["special string"] = run(replace(plain, stop=("<|im_end|>",)))
    save_tokenizer(path, end=token)
    found["tokenizer's end"] = run(replace(plain, ignore_eos=False))
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    edit(path, "generation_config.json", lambda config: config.update(eos_token_id=[63, token]))
    found["generation_config"] = run(replace(plain, ignore_eos=False))
    edit(path, "generation_config.json", lambda config: config.update(eos_token_id=63))
    edit(path, "config.json", lambda config: config.update(eos_token_id=token))
    found["config"] = run(replace(plain, ignore_eos=False))
    return found


def _log_probs(model: Any, rows: list[Any]) -> torch.Tensor:
    found = []
    for row in rows:
        ids, length = torch.tensor([row.prompt_ids + row.token_ids]), len(row.token_ids)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0, -length - 1 : -1].float()
        found.append(logits.log_softmax(-1).gather(-1, ids[0, -length:, None])[:, 0])
    return torch.cat(found)


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


NEAR = 1e-4
"""Nats, in float32."""
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WINDOW = {"use_sliding_window": True, "sliding_window": 6}


def keys(path: Path, family: str = "llama", sizes: dict[str, Any] | None = None, **added: Any) -> None:
    """A model of `sizes` with further keys in its config.json."""
    make(path, family, **(sizes or {}))
    edit(path, "config.json", lambda config: config.update(added))


def scaled(path: Path, family: str, name: str, **rope: Any) -> None:
    """Rope settings under the one name or both."""
    keys(path, family, **{name: rope})


def old_names(path: Path) -> None:
    make(path)

    def change(config: dict[str, Any]) -> None:
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": 500.0 if rope else 0.0, "rope_scaling": {**LLAMA3, "type": "llama3"}}

    edit(path, "config.json", change)


def tensors(path: Path, family: str, change: Callable[[dict[str, torch.Tensor]], Any], **sizes: Any) -> None:
    make(path, family, **sizes)
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def another_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()


def same_head(weights: dict[str, torch.Tensor]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


VARIATIONS: dict[str, Callable[[Path], Any]] = {
    "llama": make,
    "qwen2": partial(make, family="qwen2"),
    "qwen3": partial(make, family="qwen3"),
    "mistral with a window": partial(make, family="mistral", sliding_window=6),
    "rope_scaling linear beside rope_parameters": partial(
        scaled, family="llama", name="rope_scaling", rope_type="linear", factor=4.0
    ),
    "rope_scaling llama3 beside rope_parameters": partial(
        scaled, family="llama", name="rope_scaling", original_max_position_embeddings=32, **LLAMA3
    ),
    "rope_scaling of theta alone": partial(
        scaled, family="qwen3", name="rope_scaling", rope_type="default", rope_theta=37.0
    ),
    "rope of old files": old_names,
    "rope_theta at the top as well": partial(keys, rope_theta=37.0),
    "rope_parameters by layer type": partial(
        keys, rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 37.0}}
    ),
    "rope factor without a type": partial(keys, rope_parameters={"rope_theta": 1e4, "factor": 4.0}),
    "partial_rotary_factor at the top": partial(keys, partial_rotary_factor=0.5),
    "partial_rotary_factor in rope_parameters": partial(
        keys, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    ),
    "mrope_section": partial(keys, family="qwen2", rope_parameters={"rope_theta": 1e4, "mrope_section": [8, 4, 4]}),
    "sliding_window in llama": partial(keys, sliding_window=6),
    "use_sliding_window in llama": partial(keys, **WINDOW),
    "layer_types in llama": partial(keys, sliding_window=6, layer_types=["sliding_attention"] * 2),
    "use_sliding_window false in mistral": partial(
        keys, family="mistral", sizes={"sliding_window": 6}, use_sliding_window=False
    ),
    "qwen2 with a window in all layers": partial(make, family="qwen2", max_window_layers=0, **WINDOW),
    "qwen2 with a window beyond its layers": partial(make, family="qwen2", max_window_layers=2, **WINDOW),
    "qwen2 with a window in one layer": partial(make, family="qwen2", max_window_layers=1, **WINDOW),
    "qwen2 with head_dim": partial(make, family="qwen2", head_dim=64),
    "logit_scale": partial(keys, logit_scale=0.5),
    "attention_bias": partial(keys, family="qwen3", attention_bias=True),
    "qk_norm in qwen2": partial(keys, family="qwen2", qk_norm=True),
    "is_causal false": partial(keys, is_causal=False),
    "rms_norm_eps": partial(keys, rms_norm_eps=0.3),
    "tied with another head": partial(tensors, family="llama", change=another_head, tie_word_embeddings=True),
    "tied with the same head": partial(tensors, family="qwen2", change=same_head, tie_word_embeddings=True),
    "gemma2 with soft caps": partial(
        make,
        family="gemma2",
        head_dim=32,
        sliding_window=6,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=2.0,
        query_pre_attn_scalar=64,
    ),
    "gemma2 by its generation's layers": partial(
        make, family="gemma2", head_dim=32, sliding_window=6, layer_types=["full_attention", "sliding_attention"]
    ),
    "granite with scales": partial(
        make, family="granite", logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5
    ),
}


@pytest.fixture(scope="module")
def process(rank_processes) -> RankProcesses:
    return rank_processes(1)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIATIONS)
def test_no_variation_differs_in_silence(process, tmp_path, name):
    VARIATIONS[name](path := tmp_path / "model")
    found = process.run(1, outcomes, process.name(), path)[0]
    print(f"\n{name}")
    for kind, outcome in found.items():
        print(f"  {kind:9}", outcome if isinstance(outcome, str) else f"{outcome:.1e} nats")
        assert isinstance(outcome, str) or outcome < NEAR, (name, found)
    shutil.rmtree(path)


AGREE = (
    "cohere deepseek_v2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm4 gpt-sw3 gpt2 gptj granite granite_swa "
    "granitemoe granitemoe_swa granitemoeshared hyperclovax minicpm3 ministral3 mixtral nemotron olmoe opt phi3 "
    "qwen2_moe qwen3_moe stablelm"
)
DIFFER = {
    "cohere2": "refused: ModelError: vLLM computes cohere2 with windows of sliding_window + 1",
    "ernie4_5_moe": "refused: ModelError: vLLM on CPU leaves out what routers of ernie4_5_moe add to scores",
    "llama4_text": "stopped: vLLM reads this llama4_text model otherwise than training does",
    "mamba": "has no attention heads",
    "mimo_v2_flash": "refused: ModelError: whether vLLM adds to the scores of experts",
    "minimax_m2": "a minimax_m2 checkpoint calls",
    "nemotron_h": "transformers does not take this nemotron_h config.json",
    **{
        family: f"does not compute the linear attention of {family}"
        for family in ("olmo_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", [*AGREE.split(), *DIFFER])
def test_families_generate_as_they_train_or_not_at_all(process, tmp_path, family):
    path = generating_families.make(tmp_path / "model", family)
    found = process.run(1, outcomes, process.name(), path)[0]
    for kind in ("FSDP", "vLLM"):
        if family in DIFFER:
            assert DIFFER[family] in str(found[kind])
        else:
            assert isinstance(found[kind], float)
            assert found[kind] < NEAR


def test_every_kind_of_end_stops_a_response(process, tmp_path):
    found = process.run(1, stopped, process.name(), make(tmp_path / "model"))[0]
    whole = found.pop("whole")
    cut = whole[: found.pop("at") + 1], True
    assert found == dict.fromkeys(found, cut)
    assert len(found) == 5

"""Tiny model directories, variations of their files, and how far apart the readers of one directory are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
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
from tests.contracts.engine_tasks import build
from tests.contracts.rank_processes import World

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

"""Small models of families that only transformers knows, what it computes from them, and what ranks do with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import SGD
from hybridflow.engine3d.layout import Box, Region
from hybridflow.engines.checkpoint.reader import Checkpoint, read_boxes
from hybridflow.engines.checkpoint.writer import save_checkpoint
from hybridflow.models.hf_spec import read_spec
from tests.contracts.engine_tasks import boxes, build, share
from tests.contracts.example_models import VOCABULARY, load_model, loss_of, make_batch, totals_of
from tests.contracts.rank_processes import World

LR, UPDATES = 0.05, 2
_OLD: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": None}
_SIZES = _OLD | {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_labels": 1}
_NEW = _SIZES | {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
_TWO = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"model_type": "gemma2", "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **_TWO},
    "gemma3": {"model_type": "gemma3_text", **_TWO},
    "gpt2": {"model_type": "gpt2"},  # dropout, transposed matrices, positions that are learned
    "gpt_neox": {"model_type": "gpt_neox", "tie_word_embeddings": False},
    "phi3": {"model_type": "phi3"},
    "olmo2": {"model_type": "olmo2"},
    "granite": {"model_type": "granite", "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": None},
    "bloom": {"model_type": "bloom"},  # attends by distance, in a way of its own: rows cannot be packed
}


OTHERS: dict[str, dict[str, Any]] = {
    "rwkv": {"model_type": "rwkv", "attention_hidden_size": 32},  # a row of one token has no gradient of its decay
}


def config(name: str, **sizes: int) -> PreTrainedConfig:
    given = _SIZES if name in ("gpt2", "bloom") else _NEW
    return AutoConfig.for_model(**(given | (FAMILIES | OTHERS)[name] | sizes))


def make(name: str, head: str, path: Path, **sizes: int) -> Path:
    """A random model as a Hugging Face directory; norms and biases are not the trivial ones."""
    torch.manual_seed(len(name))
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = auto.from_config(config(name, **sizes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
    model.save_pretrained(path)
    return path


def reference(model: nn.Module, head: str, batch: Batch) -> dict[str, Ragged]:
    """What transformers gives, one row at a time, differentiable."""
    found: dict[str, list[Tensor]] = {}
    for prompt, response in zip(batch.peek("prompt_ids").rows(), batch.peek("response_ids").rows(), strict=True):
        ids, at = torch.cat([prompt, response])[None], slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        if head == "value":
            hidden = model.base_model(ids, use_cache=False)[0]
            found.setdefault("values", []).append(model.score(hidden)[0, at, 0])
            continue
        log_probs = model(ids, use_cache=False).logits[0, at].log_softmax(-1)
        found.setdefault("log_probs", []).append(log_probs.gather(-1, response[:, None])[:, 0])
        found.setdefault("entropy", []).append(-(log_probs.exp() * log_probs).sum(-1))
    return {name: Ragged.from_rows(rows) for name, rows in found.items()}


def expected(path: Path, head: str) -> dict[str, Any]:
    """Outputs before, gradient norms and the checkpoint's tensors after updates in plain PyTorch."""
    model = load_model(path, head).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    found: dict[str, Any] = {"norms": []}
    with torch.no_grad():
        found |= reference(model, head, make_batch())
    for seed in range(UPDATES):
        optimizer.zero_grad()
        batch = make_batch(seed=seed)
        loss_of(head)(reference(model, head, batch), batch, totals_of(batch))[0].backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found["norms"].append(float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]).double())))
        optimizer.step()
    model.save_pretrained(path.with_name(f"{path.name}-after"))
    return found


def trained(world: World, names: list[str], strategy: Any, path: Path, head: str, target: Path) -> dict[str, Any]:
    """The same on this rank; what was trained is saved in `target`, and read again by another engine."""
    spec = read_spec(path, head, strategy)  # type: ignore[arg-type]
    engine = build(world, names[0], strategy, 2, path, head, SGD(lr=LR, clip_grad=0.0), spec)
    loss, outputs = loss_of(head), ("values",) if head == "value" else ("log_probs", "entropy")
    rows = share(make_batch(), engine.grid, world.rank)
    found: dict[str, Any] = {"outputs": engine.forward(rows, outputs), "norms": []}
    for seed in range(UPDATES):
        engine.forward_backward(share(make_batch(seed=seed), engine.grid, world.rank), loss, loss.outputs)
        found["norms"].append(engine.step()["grad_norm"])
    group = engine.context.groups.everyone()
    save_checkpoint(target, engine.layout(), engine.storage(), like=path, group=group, rank=world.rank)
    found["after"] = engine.forward(rows, outputs)
    found["bytes"] = engine.memory().total_bytes
    engine.close()
    again = build(world, names[1], strategy, 2, target, head, None, read_spec(target, head, strategy))  # type: ignore[arg-type]
    found["again"] = again.forward(rows, outputs)
    found["boxes"] = boxes(again, again.storage())
    again.close()
    return found


def norms(world: World, name: str, strategy: Any, path: Path) -> list[float]:
    """Of the first gradients."""
    engine = build(world, name, strategy, 2, path, "lm", SGD(lr=LR, clip_grad=0.0), read_spec(path, "lm", strategy))
    loss = loss_of("lm")
    engine.forward_backward(share(make_batch(), engine.grid, world.rank), loss, loss.outputs)
    return [engine.step()["grad_norm"]]


def norms_of_one(world: World, name: str, strategy: Any, path: Path) -> list[float]:
    """Of the gradients of one rank's rows; the others have none."""
    engine = build(world, name, strategy, 2, path, "lm", SGD(lr=LR, clip_grad=0.0), read_spec(path, "lm", strategy))
    loss, found = loss_of("lm"), []
    for seed in range(UPDATES):
        batch = make_batch(seed=seed)
        engine.forward_backward(batch if world.rank == 0 else batch[:0], loss, loss.outputs)
        found.append(engine.step()["grad_norm"])
    return found


def loaded(world: World, name: str, strategy: Any, path: Path, infers: bool = False) -> list:
    """What this rank has read."""
    engine = build(world, name, strategy, 2, path, "lm", None, read_spec(path, "lm", strategy))
    if infers:
        engine.forward(make_batch(seed=0), ("log_probs",))
    return boxes(engine, engine.storage())


def held(world: World, name: str, strategy: Any, path: Path) -> int:
    """Bytes of this rank's parameters."""
    return build(world, name, strategy, 2, path, "lm", None, read_spec(path, "lm", strategy)).memory().total_bytes


def tensors(path: Path, names: Any) -> dict[str, Tensor]:
    """Those tensors of a Hugging Face directory."""
    found, files = {}, Checkpoint(path)
    for name in names:
        entry: Any = files.find(name)
        found[name] = torch.empty(entry.shape)
        read_boxes(entry, [Region(Box.whole(name, entry.shape), name, (0,) * len(entry.shape))], found)
    return found

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


_FULL = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "sliding_window": 5}
_OF_QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_OF_GLM = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
}
_YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
MEGATRON: dict[str, dict[str, Any]] = {
    "gemma": {"model_type": "gemma"},
    "gemma2-more": {**FAMILIES["gemma2"], "query_pre_attn_scalar": 11},
    "gemma3-scaled": {
        **FAMILIES["gemma3"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
        },
    },
    "vaultgemma": {"model_type": "vaultgemma", **_TWO},
    "phi3-window": {"model_type": "phi3", "sliding_window": 6},
    "olmo2-again": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", **_FULL},
    "glm": {"model_type": "glm", "attention_bias": True},
    "glm4": {"model_type": "glm4", "attention_bias": True},
    "helium": {"model_type": "helium"},
    "granite-more": {
        **FAMILIES["granite"],
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.4,
    },
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "seed_oss": {"model_type": "seed_oss"},
    "exaone4": {"model_type": "exaone4", **_FULL},
    "cwm": {"model_type": "cwm", **_FULL},
    "ernie4_5": {"model_type": "ernie4_5"},
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": _YARN,
    },
    "qwen2-windows": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5},
    "qwen2_moe": {"model_type": "qwen2_moe", **_OF_QWEN, "shared_expert_intermediate_size": 32},
    "qwen3_moe": {"model_type": "qwen3_moe", **_OF_QWEN, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2},
    "mixtral-6": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6},
    "glm4_moe": {"model_type": "glm4_moe", **_OF_GLM, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5},
    "solar_open": {"model_type": "solar_open", **_OF_GLM},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **_LATENT,
        **_OF_GLM,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_LATENT,
        **_OF_GLM,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7},
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **_LATENT, **_OF_GLM, "rope_interleave": False},
    "youtu": {"model_type": "youtu", **_LATENT, "num_key_value_heads": 4},
}
"""On Megatron, beside the four families of ModelSpec."""
OTHERS: dict[str, dict[str, Any]] = {
    "rwkv": {"model_type": "rwkv", "attention_hidden_size": 32},  # a row of one token has no gradient of its decay
}


def config(name: str, **sizes: int) -> PreTrainedConfig:
    given = _SIZES if name in ("gpt2", "bloom") else _NEW
    return AutoConfig.for_model(**(given | (FAMILIES | MEGATRON | OTHERS)[name] | sizes))


def make(name: str, head: str, path: Path, **sizes: int) -> Path:
    """A random model as a Hugging Face directory; norms and biases are not the trivial ones."""
    torch.manual_seed(len(name))
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = auto.from_config(config(name, **sizes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
        for buffer in model.buffers():
            if buffer.dim() == 1 and buffer.is_floating_point() and buffer.eq(0).all():  # what routers add to scores
                buffer.normal_(0.0, 0.1)
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


def trained(
    world: World, names: list[str], strategy: Any, path: Path, head: str, target: Path, size: int = 2
) -> dict[str, Any]:
    """The same on this rank; what was trained is saved in `target`, and read again by another engine."""
    spec = read_spec(path, head)  # type: ignore[arg-type]
    engine = build(world, names[0], strategy, size, path, head, SGD(lr=LR, clip_grad=0.0), spec)
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
    again = build(world, names[1], strategy, size, target, head, None, read_spec(target, head))  # type: ignore[arg-type]
    found["again"] = again.forward(rows, outputs)
    found["boxes"] = boxes(again, again.storage())
    again.close()
    return found


def norms(world: World, name: str, strategy: Any, path: Path) -> list[float]:
    """Of the first gradients."""
    engine = build(world, name, strategy, 2, path, "lm", SGD(lr=LR, clip_grad=0.0), read_spec(path, "lm"))
    loss = loss_of("lm")
    engine.forward_backward(share(make_batch(), engine.grid, world.rank), loss, loss.outputs)
    return [engine.step()["grad_norm"]]


def norms_of_one(world: World, name: str, strategy: Any, path: Path) -> list[float]:
    """Of the gradients of one rank's rows; the others have none."""
    engine = build(world, name, strategy, 2, path, "lm", SGD(lr=LR, clip_grad=0.0), read_spec(path, "lm"))
    loss, found = loss_of("lm"), []
    for seed in range(UPDATES):
        batch = make_batch(seed=seed)
        engine.forward_backward(batch if world.rank == 0 else batch[:0], loss, loss.outputs)
        found.append(engine.step()["grad_norm"])
    return found


def loaded(world: World, name: str, strategy: Any, path: Path, infers: bool = False) -> list:
    """What this rank has read."""
    engine = build(world, name, strategy, 2, path, "lm", None, read_spec(path, "lm"))
    if infers:
        engine.forward(make_batch(seed=0), ("log_probs",))
    return boxes(engine, engine.storage())


def held(world: World, name: str, strategy: Any, path: Path) -> int:
    """Bytes of this rank's parameters."""
    return build(world, name, strategy, 2, path, "lm", None, read_spec(path, "lm")).memory().total_bytes


def tensors(path: Path, names: Any) -> dict[str, Tensor]:
    """Those tensors of a Hugging Face directory."""
    found, files = {}, Checkpoint(path)
    for name in names:
        entry: Any = files.find(name)
        found[name] = torch.empty(entry.shape)
        read_boxes(entry, [Region(Box.whole(name, entry.shape), name, (0,) * len(entry.shape))], found)
    return found


def with_routing(batch: Batch, layers: int, each: int, count: int) -> Batch:
    """Random experts for all tokens of a row but its last."""
    generator = torch.Generator().manual_seed(3)
    lengths = batch.peek("prompt_ids").lengths + batch.peek("response_ids").lengths - 1
    shape = (int(lengths.sum()), layers, count)
    chosen = torch.rand(shape, generator=generator).argsort(-1)[..., :each].to(torch.uint8)
    return batch.with_columns(routed_experts=Ragged.from_lengths(chosen, lengths))


class _Forced:
    """Hook of a router of transformers: the experts of the next row."""

    def __init__(self, normalized: bool) -> None:
        self.normalized, self.experts = normalized, torch.empty(0)

    def __call__(self, module: nn.Module, args: Any, out: Any) -> Any:
        logits, weights, own = out
        scores, chosen = logits.float().softmax(-1), own.clone()
        if hasattr(module, "e_score_correction_bias"):
            scores = logits.float().sigmoid()
        chosen[: len(self.experts)] = self.experts
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) if self.normalized else weights
        return logits, weights * getattr(module, "routed_scaling_factor", 1.0), chosen


def replayed(path: Path, batch: Batch) -> dict[str, Any]:
    """Log-probabilities, and the norm of the gradient of an update, of transformers' model whose routers are forced."""
    model = load_model(path, "lm").eval()
    normalized = model.config.model_type == "mixtral" or bool(model.config.norm_topk_prob)
    hooks = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            hooks.append(_Forced(normalized))
            layer.mlp.gate.register_forward_hook(hooks[-1])
    rows = []
    for i, experts in enumerate(batch.peek("routed_experts").rows()):
        for at, hook in enumerate(hooks):
            hook.experts = experts[:, at].to(torch.int64)
        rows.append(reference(model, "lm", batch[i : i + 1]))
    outputs = {name: Ragged.concat([row[name] for row in rows]) for name in rows[0]}
    loss_of("lm")(outputs, batch, totals_of(batch))[0].backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]).double()))
    return {"norm": norm, "log_probs": outputs["log_probs"].with_values(outputs["log_probs"].values.detach())}


def replays(world: World, name: str, strategy: Any, path: Path, size: int, batch: Batch) -> dict[str, Any]:
    """The same of an engine."""
    engine = build(world, name, strategy, size, path, "lm", SGD(lr=LR, clip_grad=0.0), read_spec(path, "lm"))
    engine.replay_routing()
    rows = share(batch, engine.grid, world.rank)
    loss, found = loss_of("lm"), {"outputs": engine.forward(rows, ("log_probs",))}
    engine.forward(rows, ("log_probs",))
    found["metrics"] = engine.forward_backward(rows, loss, loss.outputs)
    return found | {"norm": engine.step()["grad_norm"]}


def activation_bytes(world: World, name: str, strategy: Any, path: Path, size: int, batch: Batch) -> int:
    """Bytes that the backward pass of a mini-batch finds, beside parameters."""
    engine = build(world, name, strategy, size, path, "lm", SGD(lr=LR), read_spec(path, "lm"))
    loss, kept = loss_of("lm"), {tensor.untyped_storage().data_ptr() for tensor in engine.storage().values()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in kept:
            found[memory.data_ptr()] = memory.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.forward_backward(share(batch, engine.grid, world.rank), loss, loss.outputs)
    return sum(found.values())


def bias_after(world: World, name: str, strategy: Any, path: Path, size: int, target: Path) -> dict[str, Any]:
    """The router biases of a rank before an update and after it, in float32 main parameters, and what is saved."""
    engine = build(world, name, strategy, size, path, "lm", SGD(lr=LR, momentum=0.9), read_spec(path, "lm"))
    loss, found = loss_of("lm"), {"before": {n: t.clone() for n, t in engine.storage().items() if n.endswith(".bias")}}
    for seed in range(UPDATES):
        rows = share(make_batch(seed=seed), engine.grid, world.rank)
        engine.forward_backward(rows, loss, loss.outputs)
        engine.step()
    found["after"] = {n: engine.storage()[n].clone() for n in found["before"]}
    found["owned"] = [region.box.tensor for region in engine.optimizer_layout().regions(world.rank)]
    layout, exact = engine.exact_weights()
    save_checkpoint(target, layout, exact, like=path, group=engine.context.groups.everyone(), rank=world.rank)
    return found

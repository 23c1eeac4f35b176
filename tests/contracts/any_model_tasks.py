"""Small models of families that only transformers knows, what it computes from them, and what ranks do with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import SGD, Adam
from hybridflow.engine3d.layout import Box, Region
from hybridflow.engines.checkpoint.reader import Checkpoint, read_boxes
from hybridflow.engines.checkpoint.writer import save_checkpoint
from hybridflow.models.hf_spec import ROUTER_BIAS
from tests.contracts.engine_tasks import boxes, build, share
from tests.contracts.example_models import load_model, loss_of, make_batch, totals_of
from tests.contracts.family_cases import config
from tests.contracts.rank_processes import World

LR, UPDATES = 0.05, 3


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
    engine = build(world, names[0], strategy, size, path, head, SGD(lr=LR, clip_grad=0.0))
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
    again = build(world, names[1], strategy, size, target, head)
    found["again"] = again.forward(rows, outputs)
    found["boxes"] = boxes(again, again.storage())
    again.close()
    return found


def norms(world: World, name: str, strategy: Any, path: Path) -> list[float]:
    """Of the first gradients."""
    engine = build(world, name, strategy, 2, path, "lm", SGD(lr=LR, clip_grad=0.0))
    loss = loss_of("lm")
    engine.forward_backward(share(make_batch(), engine.grid, world.rank), loss, loss.outputs)
    return [engine.step()["grad_norm"]]


def norms_of_one(world: World, name: str, strategy: Any, path: Path) -> list[float]:
    """Of the gradients of one rank's rows; the others have none."""
    engine = build(world, name, strategy, 2, path, "lm", SGD(lr=LR, clip_grad=0.0))
    loss, found = loss_of("lm"), []
    for seed in range(UPDATES):
        batch = make_batch(seed=seed)
        engine.forward_backward(batch if world.rank == 0 else batch[:0], loss, loss.outputs)
        found.append(engine.step()["grad_norm"])
    return found


def loaded(world: World, name: str, strategy: Any, path: Path, infers: bool = False) -> list:
    """What this rank has read."""
    engine = build(world, name, strategy, 2, path)
    if infers:
        engine.forward(make_batch(seed=0), ("log_probs",))
    return boxes(engine, engine.storage())


def held(world: World, name: str, strategy: Any, path: Path) -> int:
    """Bytes of this rank's parameters."""
    return build(world, name, strategy, 2, path).memory().total_bytes


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
    engine = build(world, name, strategy, size, path, "lm", SGD(lr=LR, clip_grad=0.0))
    engine.replay_routing()
    rows = share(batch, engine.grid, world.rank)
    loss, found = loss_of("lm"), {"outputs": engine.forward(rows, ("log_probs",))}
    engine.forward(rows, ("log_probs",))
    found["metrics"] = engine.forward_backward(rows, loss, loss.outputs)
    return found | {"norm": engine.step()["grad_norm"]}


def activation_bytes(world: World, name: str, strategy: Any, path: Path, size: int, batch: Batch) -> int:
    """Bytes that the backward pass of a mini-batch finds, beside parameters."""
    engine = build(world, name, strategy, size, path, "lm", SGD(lr=LR))
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
    decay = {"*mlp*": {"weight_decay": 0.5}}
    engine = build(world, name, strategy, size, path, "lm", Adam(lr=LR, weight_decay=0.5, groups=decay))
    kept = {n: t.clone() for n, t in engine.storage().items() if n.endswith(("router.bias", ROUTER_BIAS))}
    loss, found = loss_of("lm"), {"before": kept}
    for seed in range(UPDATES):
        rows = share(make_batch(seed=seed), engine.grid, world.rank)
        engine.forward_backward(rows, loss, loss.outputs)
        engine.step()
    found["after"] = {n: engine.storage()[n].clone() for n in found["before"]}
    found["owned"] = [region.box.tensor for region in engine.optimizer_layout().regions(world.rank)]
    layout, exact = engine.exact_weights()
    save_checkpoint(target, layout, exact, like=path, group=engine.context.groups.everyone(), rank=world.rank)
    return found

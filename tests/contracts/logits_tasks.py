"""What the processes of the logits suite do: distillation on every rank of a teacher and a student."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridflow import config
from hybridflow.algorithms import logits as blocks
from hybridflow.algorithms.logits import Columns, Logits
from hybridflow.algorithms.losses.distillation import divergence
from hybridflow.algorithms.registry import policy_loss
from hybridflow.topology import RankGrid
from tests.contracts.engine_tasks import boxes, build, share
from tests.contracts.example_models import make_batch
from tests.contracts.rank_processes import World

TEMPERATURE, K = 0.7, 5
SMALL_BLOCK = 4 * 16 * 3  # three tokens at t = 4


def parts(world: World, name: str, size: int, seed: int) -> dict[str, Any]:
    """What `Logits` of this rank's columns give, and its gradient of a random function of that."""
    context = world.context(name, RankGrid(t=size))
    group = context.groups.new("t", range(size))
    case = {name: value.to(world.device) for name, value in logits_case(seed).items()}
    scores, teacher, ids, mask = case["logits"], case["teacher"], case["ids"], case["mask"]
    width, total = -(-scores.shape[1] // size), scores.shape[1]
    first, last = min(total, world.rank * width), min(total, (world.rank + 1) * width)
    columns = Columns(first, last, total, group)
    mine = torch.nn.functional.pad(scores[:, first:last], (0, width - (last - first))).requires_grad_()
    student = Logits(mine, columns, TEMPERATURE, block_bytes=SMALL_BLOCK)
    other = Logits(case["hidden"], columns, TEMPERATURE, weight=case["weight"][first:last], block_bytes=SMALL_BLOCK)
    assert torch.allclose(case["hidden"] @ case["weight"].T, teacher)
    found = {
        "divergence": student.sum(lambda p, q: divergence(p, q, 0.3).sum(-1), other, mask=mask),
        "log_probs": student.log_probs(ids[:, 0]),
        "entropy": student.entropy(),
        "rest": student.log_probs_and_rest(ids, mask).sum(-1),
    }
    torch.stack([value * case["by"][i] for i, value in enumerate(found.values())]).sum().backward()
    top = student.top_k(K)
    context.groups.close()
    return {name: value.detach() for name, value in found.items()} | {"gradient": mine.grad, "top": top}


def logits_case(seed: int, tokens: int = 11, columns: int = 13, hidden: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, columns, generator=generator) * 4
    scores[0, 3], scores[1] = 300.0, -500.0
    states, weight = torch.randn(tokens, hidden, generator=generator), torch.randn(columns, hidden, generator=generator)
    return {
        "logits": scores,
        "hidden": states,
        "weight": weight,
        "teacher": states @ weight.T,
        "ids": torch.stack([torch.randperm(columns, generator=generator)[:4] for _ in range(tokens)]),
        "mask": torch.rand(tokens, generator=generator) < 0.8,
        "by": torch.randn(4, tokens, generator=generator),
    }


def head_of(path: Path) -> Tensor:
    tensors = load_file(path / "model.safetensors")
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


def distilled(
    world: World,
    name: str,
    strategy: Any,
    size: int,
    student: Path,
    teacher: Path,
    losses: Sequence[Any],
    counts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """What the teacher writes, and the metrics and gradients of a student by each loss, with small blocks."""
    rows, usual = None, blocks.BLOCK_BYTES
    blocks.BLOCK_BYTES = SMALL_BLOCK
    try:
        reference = build(world, f"{name}-teacher", strategy, size, teacher)
        rows = share(make_batch(), reference.grid, world.rank, counts)
        written = reference.infer(rows, reference.tokens.hidden_states, hidden=True)
        if written is not None:
            written |= reference.infer(rows, partial(reference.tokens.top_k, k=K, temperature=TEMPERATURE))
            rows = rows.with_columns(**{f"ref_{column}": value for column, value in written.items()})
        else:  # other stages take part
            reference.infer(rows, partial(reference.tokens.top_k, k=K, temperature=TEMPERATURE))
        reference.close()
        engine = build(world, name, strategy, size, student, "lm", config.SGD(lr=0.0, clip_grad=0))
        if engine.last_stage:
            first, last = engine.tokens.vocabulary
            engine.tokens.teacher = head_of(teacher)[first:last].to(world.device)
        found: dict[str, Any] = {"written": written, "losses": []}
        for loss in [policy_loss(**options) for options in losses]:
            metrics = engine.forward_backward(rows, loss, loss.outputs, TEMPERATURE)
            gradients = boxes(engine, engine.gradients())
            found["losses"].append((metrics, gradients, engine.step()))
        engine.close()
        return found
    finally:
        blocks.BLOCK_BYTES = usual


def poisoned(world: World, name: str, strategy: Any, size: int, student: Path, teacher: Path) -> list[Any]:
    """Steps by a teacher's columns that are not finite, at a token that counts and at one that does not."""
    engine = build(world, name, strategy, size, student, "lm", config.SGD(lr=0.1))
    first, last = engine.tokens.vocabulary
    engine.tokens.teacher = head_of(teacher)[first:last].to(world.device)
    rows = share(make_batch(), engine.grid, world.rank)
    mask = rows.peek("response_mask")
    counts = mask.values.nonzero()[:1, 0]
    masked = (~mask.values).nonzero()[:, 0]
    hidden = torch.randn(len(mask.values), engine.tokens.teacher.shape[1])
    top = torch.randn(len(mask.values), K)
    good = {
        "ref_hidden_states": hidden,
        "ref_top_log_probs": top.log_softmax(-1),
        "ref_tail_log_probs": torch.full((len(top),), -9.0),
    }
    ids = torch.stack([torch.randperm(20)[:K] for _ in top])
    rows = rows.with_columns(**{name: mask.with_values(value) for name, value in good.items()})
    rows = rows.with_columns(ref_top_ids=mask.with_values(ids))
    found = []
    for over, column in (("vocabulary", "ref_hidden_states"), ("top_k", "ref_top_log_probs")):
        loss = policy_loss("gkd", over=over)
        for at, value in ((counts, math.nan), (counts, math.inf), (masked, math.nan)):
            flat = good[column].clone()
            flat[at] = value
            before = [tensor.clone() for tensor in engine.storage().values()]
            engine.forward_backward(rows.with_columns(**{column: mask.with_values(flat)}), loss, loss.outputs)
            skipped, why = engine.step()["skipped"], engine.skip_reason
            same = all(map(torch.equal, before, engine.storage().values()))
            finite = all(bool(tensor.isfinite().all()) for tensor in engine.storage().values())
            found.append((skipped, same, finite, why))
    engine.close()
    return found

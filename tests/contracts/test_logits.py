"""Losses on logits: distillation on every engine, against loops over tokens in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hybridflow import config
from hybridflow.algorithms import logits as blocks
from hybridflow.algorithms.logits import Columns, Logits
from hybridflow.algorithms.losses.distillation import divergence
from hybridflow.algorithms.registry import policy_loss
from hybridflow.config import FSDP, Megatron, ZeRO
from hybridflow.topology import RankGrid
from tests.contracts.engine_tasks import boxes, build, share
from tests.contracts.example_models import load_model, make_batch, relative, spec_of
from tests.contracts.rank_processes import World
from tests.contracts.train_contract import joined, whole

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


SMALL: dict[str, Any] = {"micro_tokens": 48}
LOSSES = [
    {"loss": "gkd", "beta": 0.0},
    {"loss": "gkd", "beta": 0.4, "aggregation": "seq-mean-token-mean"},
    {"loss": "gkd", "beta": 1.0},
    {"loss": "gkd", "beta": 0.4, "over": "top_k"},
    {"loss": "gkd", "beta": 1.0, "over": "top_k"},
]
CASES: dict[str, Any] = {
    "megatron-1": (Megatron(**SMALL), (1, 1, 1)),
    "megatron-tp-2": (Megatron(tp=2, **SMALL), (1, 2, 1)),
    "megatron-tp-4": (Megatron(tp=4, **SMALL), (1, 4, 1)),
    "megatron-tp-2-sequence-parallel": (Megatron(tp=2, sequence_parallel=True, **SMALL), (1, 2, 2)),
    "megatron-pp-2-tp-2": (Megatron(pp=2, tp=2, **SMALL), (2, 2, 1)),
    "megatron-padded": (Megatron(packed=False, **SMALL), (1, 1, 2)),
    "fsdp-2": (FSDP(**SMALL), (1, 1, 2)),
    "fsdp-tp-2": (FSDP(tp=2, **SMALL), (1, 2, 2)),
    "fsdp-tp-4": (FSDP(tp=4, **SMALL), (1, 4, 1)),
    "zero-2": (ZeRO(stage=2, **SMALL), (1, 1, 2)),
    "zero-3": (ZeRO(stage=3, **SMALL), (1, 1, 2)),
}


def looped(student: Any, teacher: Any, options: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss and what the teacher says, token by token from the definition."""
    batch, beta = make_batch(), options["beta"]
    mean_of_rows = options.get("aggregation") == "seq-mean-token-mean"
    rows, said = [], {"hidden_states": [], "top_ids": [], "top_log_probs": [], "tail_log_probs": []}
    columns = (batch.peek(name).rows() for name in ("prompt_ids", "response_ids", "response_mask"))
    for prompt, response, mask in zip(*columns, strict=True):
        ids, found = torch.cat([prompt, response]), []
        with torch.no_grad():
            states = teacher.model(ids[None]).last_hidden_state[0]
        every = student(ids[None]).logits[0]
        for at in range(len(prompt) - 1, len(ids) - 1):
            q, p = (
                (teacher.lm_head(states[at]).detach() / TEMPERATURE).softmax(-1),
                (every[at] / TEMPERATURE).softmax(-1),
            )
            best = q.argsort(descending=True)
            said["hidden_states"].append(states[at])
            said["top_ids"].append(best[:K])
            said["top_log_probs"].append(q[best[:K]].log())
            said["tail_log_probs"].append(q[best[K:]].sum().log())
            if "over" in options:
                q, p = (torch.cat([x[best[:K]], x[best[K:]].sum()[None]]) for x in (q, p))
            m = beta * q + (1 - beta) * p
            to_teacher, to_student = (q * (q / m).log()).sum(), (p * (p / m).log()).sum()
            ends = {0.0: (q * (q / p).log()).sum(), 1.0: (p * (p / q).log()).sum()}
            found.append(ends.get(beta, beta * to_teacher + (1 - beta) * to_student))
        rows.append([one for one, counts in zip(found, mask.tolist(), strict=True) if counts])
    tokens = sum(map(len, rows))
    if mean_of_rows:
        total = sum(sum(row) / len(row) for row in rows if row) / len(rows)
    else:
        total = sum(one for row in rows for one in row) / tokens
    return total, {name: torch.stack(values) for name, values in said.items()}  # type: ignore[return-value]


@pytest.fixture(scope="module")
def oracle(models) -> list[tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    teacher, found = load_model(models["qwen2", "lm"]).double(), []
    for options in LOSSES:
        student = load_model(models["llama", "lm"]).double()
        total, said = looped(student, teacher, options)
        total.backward()
        gradients = {name: p.grad.clone() for name, p in student.named_parameters()}
        found.append((float(total.detach()), gradients, said))
    return found


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", CASES)
def test_distillation_is_that_of_a_loop_in_float64(processes, models, oracle, name):
    strategy, sizes = CASES[name]
    p, t, d = sizes
    paths, shapes = (models["llama", "lm"], models["qwen2", "lm"]), spec_of(models["llama", "lm"]).tensors()
    found = processes.run(p * t * d, distilled, processes.name(), strategy, p * t * d, *paths, LOSSES)
    written = joined([part["written"] for part in found], sizes)
    for column, want in oracle[0][2].items():
        got = written[column].values
        if column == "top_ids":
            assert got.dtype == torch.int32
            assert torch.equal(got.long(), want)
        else:
            assert torch.allclose(got.double(), want, atol=1e-5), column
    for i, (want, gradients, _) in enumerate(oracle):
        reported = [part["losses"][i][0] for part in found if part["losses"][i][0]]
        assert len(reported) == t * d
        assert all(metrics["actor/loss"] == pytest.approx(want, rel=1e-5) for metrics in reported)
        assert not any(part["losses"][i][2]["skipped"] for part in found)
        assert relative(whole([part["losses"][i][1] for part in found], shapes), gradients) < 1e-5


def test_ranks_without_rows_take_part(processes, models, oracle):
    paths, shapes = (models["llama", "lm"], models["qwen2", "lm"]), spec_of(models["llama", "lm"]).tensors()
    for strategy in (Megatron(tp=2, **SMALL), FSDP(tp=2, **SMALL)):
        args = (processes.name(), strategy, 4, *paths, LOSSES[:1], (0, 7))
        found = processes.run(4, distilled, *args)
        assert relative(whole([part["losses"][0][1] for part in found], shapes), oracle[0][1]) < 1e-5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_logits_and_their_gradients(processes, size):
    """13 columns on 4 ranks: the last one has one column, and three of padding."""
    found, case = processes.run(size, parts, processes.name(), size, size), logits_case(size)
    wide, ids, mask = case["logits"].double().requires_grad_(), case["ids"], case["mask"]
    log_p, log_q = (wide / TEMPERATURE).log_softmax(-1), (case["teacher"].double() / TEMPERATURE).log_softmax(-1)
    log_m = (0.3 * log_q.exp() + 0.7 * log_p.exp()).log()
    terms = 0.3 * log_q.exp() * (log_q - log_m) + 0.7 * log_p.exp() * (log_p - log_m)
    left = torch.ones_like(log_p, dtype=torch.bool).scatter_(1, ids, False)
    rest = torch.where(left, log_p, -torch.inf).logsumexp(-1).clamp(min=math.log(1e-30))
    want = {
        "divergence": torch.where(mask, terms.sum(-1), 0.0),
        "log_probs": log_p.gather(-1, ids[:, :1])[:, 0],
        "entropy": -(log_p.exp() * log_p).sum(-1),
        "rest": torch.where(mask, log_p.gather(-1, ids).sum(-1) + rest, math.log(1e-30)),
    }
    torch.stack([value * case["by"][i] for i, value in enumerate(want.values())]).sum().backward()
    for part in found:
        for name, value in want.items():
            assert torch.allclose(part[name].double(), value.detach(), rtol=1e-5, atol=1e-5), name
        best, at = log_p[2:].topk(K)
        assert torch.equal(part["top"][0][2:], at)
        assert torch.allclose(part["top"][1][2:].double(), best, atol=1e-5)
        assert torch.allclose(part["top"][1].exp().sum(-1) + part["top"][2].exp(), torch.ones(11), atol=1e-5)
    assert wide.grad is not None
    gradient = torch.cat([part["gradient"] for part in found], 1)
    assert torch.allclose(gradient[:, :13].double(), wide.grad, atol=2e-5)
    assert not gradient[:, 13:].any()


@pytest.mark.parametrize("strategy", [Megatron(tp=2, **SMALL), FSDP(**SMALL)], ids=str)
def test_a_teacher_that_is_not_finite_changes_nothing(processes, models, strategy):
    args = (processes.name(), strategy, 2, models["llama", "lm"], models["qwen2", "lm"])
    for found in processes.run(2, poisoned, *args):
        assert all(finite for _, _, finite, _ in found)
        assert [bool(skipped) for skipped, *_ in found] == [True, True, False] * 2
        assert [same for _, same, *_ in found] == [True, True, False] * 2
        assert all("ref_" in why for skipped, *_, why in found if skipped)

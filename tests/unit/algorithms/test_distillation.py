"""Distillation and losses on logits in one process: definitions in float64, memory by counting bytes, bad input."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hybridflow as hf
from hybridflow.algorithms.logits import Logits
from hybridflow.algorithms.losses.loss import Totals
from hybridflow.algorithms.registry import policy_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ConfigError, MissingColumnError

FLOAT = torch.float64


def loop(p: Tensor, q: Tensor, beta: float) -> float:
    """The generalized Jensen-Shannon divergence of one token, from Agarwal et al. (2024), eq. 1, in Python floats."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    student, teacher = p.tolist(), q.tolist()
    mixed = [beta * y + (1 - beta) * x for x, y in zip(student, teacher, strict=True)]
    if beta in (0.0, 1.0):
        return kl(student, teacher) if beta else kl(teacher, student)
    return beta * kl(teacher, mixed) + (1 - beta) * kl(student, mixed)


def case(lengths: list[int], columns: int, seed: int, scale: float = 3.0) -> tuple[Batch, Tensor, Tensor, Ragged]:
    """Rows, the logits of student and teacher, and the mask."""
    generator, tokens = torch.Generator().manual_seed(seed), sum(lengths)
    mask = Ragged.from_lengths(torch.rand(tokens, generator=generator) < 0.7, lengths)
    ids = Ragged.from_lengths(torch.randint(columns, (tokens,), generator=generator), lengths)
    student, teacher = (torch.randn(tokens, columns, generator=generator, dtype=FLOAT) * scale for _ in range(2))
    return Batch({"response_ids": ids, "response_mask": mask}), student.requires_grad_(), teacher, mask


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    columns=st.integers(1, 9),
    beta=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    block=st.integers(1, 400),
    seed=st.integers(0, 99),
)
def test_gkd_is_the_definition(lengths, columns, beta, temperature, block, seed):
    rows, student, teacher, mask = case(lengths, columns, seed)
    logits = Logits(student, temperature=temperature, block_bytes=block)
    other = Logits(teacher, temperature=temperature, block_bytes=block)
    tokens = int(mask.values.sum())
    share, metrics = policy_loss("gkd", beta=beta)({"logits": logits, "ref_logits": other}, rows, Totals(tokens, 1))
    p, q = ((x / temperature).softmax(-1) for x in (student.detach(), teacher))
    want = sum(loop(p[i], q[i], beta) for i in mask.values.nonzero()[:, 0]) / max(tokens, 1)
    assert float(share.detach()) == pytest.approx(want, abs=1e-9)
    assert metrics["actor/loss"] == metrics["actor/divergence"] == share.detach()
    if tokens:
        share.backward()
        assert student.grad is not None
        step = torch.randn(student.shape, dtype=FLOAT, generator=torch.Generator().manual_seed(seed)) * 1e-6
        ends = [((student.detach() + sign * step) / temperature).softmax(-1) for sign in (1, -1)]
        change = [sum(loop(p[i], q[i], beta) for i in mask.values.nonzero()[:, 0]) / tokens for p in ends]
        assert float((student.grad * step).sum()) == pytest.approx((change[0] - change[1]) / 2, rel=1e-4, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    columns=st.integers(2, 9),
    k=st.integers(1, 9),
    beta=st.sampled_from([0.0, 0.3, 1.0]),
    block=st.integers(1, 400),
    seed=st.integers(0, 99),
)
def test_top_k_is_the_divergence_over_k_tokens_and_the_rest(columns, k, beta, block, seed):
    k = min(k, columns)
    rows, student, teacher, mask = case([4, 0, 3], columns, seed)
    ids, top, tail = Logits(teacher, block_bytes=block).top_k(k)
    written = {"ref_top_ids": ids.int(), "ref_top_log_probs": top, "ref_tail_log_probs": tail}
    rows = rows.with_columns(**{name: mask.with_values(value) for name, value in written.items()})
    loss, tokens = policy_loss("gkd", over="top_k", beta=beta), int(mask.values.sum())
    share, _ = loss({"logits": Logits(student, block_bytes=block)}, rows, Totals(tokens, 3))
    found = []
    for i in mask.values.nonzero()[:, 0]:
        p, q = student[i].detach().softmax(-1), teacher[i].softmax(-1)
        best = q.argsort(descending=True)
        p, q = (torch.cat([x[best[:k]], x[best[k:]].sum()[None]]) for x in (p, q))
        found.append(loop(p[: k + (k < columns)], q[: k + (k < columns)], beta))
    assert float(share.detach()) == pytest.approx(sum(found) / max(tokens, 1), abs=1e-6)
    whole = policy_loss("gkd", beta=beta)(
        {"logits": Logits(student), "ref_logits": Logits(teacher)}, rows, Totals(7, 3)
    )
    assert float(share.detach()) * max(tokens, 1) / 7 <= float(whole[0].detach()) + 1e-9
    assert torch.autograd.grad(share, student)[0].isfinite().all()


class Largest(TorchDispatchMode):
    """The largest tensor that operators give, and the largest sum of those alive at one time, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.largest = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.alive:
                self.alive[key] = storage.nbytes()
                weakref.finalize(storage, self.alive.pop, key, None)
            self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


BLOCK = 8 << 10


@pytest.mark.parametrize("tokens", [64, 256])
@pytest.mark.parametrize("over", ["vocabulary", "top_k"])
def test_memory_does_not_grow_with_the_tokens(tokens, over):
    """A model in bfloat16: beside its logits and their gradient, a few blocks, whatever the number of tokens."""
    columns, hidden = 512, 16
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(tokens, columns, generator=generator).bfloat16().requires_grad_()
    states = torch.randn(tokens, hidden, generator=generator).bfloat16()
    weight = torch.randn(columns, hidden, generator=generator).bfloat16()
    ids, top, tail = Logits(states, weight=weight).top_k(8)
    columns_of = {"ref_top_ids": ids, "ref_top_log_probs": top, "ref_tail_log_probs": tail, "response_ids": ids[:, 0]}
    rows = Batch({name: Ragged.from_lengths(value, [tokens]) for name, value in columns_of.items()})
    loss, counted = policy_loss("gkd", over=over), Largest()
    with counted:
        outputs = {"logits": Logits(student, block_bytes=BLOCK)}
        if over == "vocabulary":
            outputs["ref_logits"] = Logits(states, weight=weight, block_bytes=BLOCK)
        share, _ = loss(outputs, rows, Totals(tokens, 1))
        share.backward()
    gradient, per_token = student.numel() * 2, 64 * tokens
    assert counted.largest == gradient
    assert gradient < counted.peak < 2 * gradient + 20 * BLOCK + per_token  # autograd copies the gradient of a leaf
    assert student.grad is not None
    assert student.grad.dtype == torch.bfloat16


def test_masked_tokens_have_no_influence_whatever_stands_there():
    rows, student, teacher, mask = case([3, 4], 5, 1)
    found = []
    for garbage in (0.0, math.nan):
        own, other = student.detach().clone(), teacher.clone()
        own[~mask.values], other[~mask.values] = garbage, garbage
        own.requires_grad_()
        outputs = {"logits": Logits(own), "ref_logits": Logits(other)}
        share, _ = policy_loss("gkd")(outputs, rows, Totals(5, 2))
        share.backward()
        found.append((share.detach(), own.grad))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert not found[0][1][~mask.values].any()


def test_shares_of_parts_add_up():
    rows, student, teacher, _ = case([3, 4, 2], 6, 2)
    loss, totals = policy_loss("gkd", aggregation="seq-mean-token-mean"), Totals(5, 3)

    def share(first: int, last: int, at: slice) -> Tensor:
        outputs = {"logits": Logits(student[at]), "ref_logits": Logits(teacher[at])}
        return loss(outputs, rows[first:last], totals)[0]

    parts = share(0, 1, slice(0, 3)) + share(1, 3, slice(3, 9))
    assert torch.allclose(parts, share(0, 3, slice(0, 9)))


def test_a_users_loss_per_token_reads_logits():
    def forward_kl(log_probs, logits, ref_logits, mask):
        return logits.sum(lambda p, q: (q.exp() * (q - p)).sum(-1), ref_logits, mask=mask)

    rows, student, teacher, mask = case([3, 4], 5, 3)
    loss = policy_loss(forward_kl, aggregation="token-mean")
    assert loss.outputs == ("log_probs", "logits", "ref_logits")
    assert loss.reads == ("response_mask",)
    logits = Logits(student)
    log_probs = rows["response_ids"].with_values(logits.log_probs(rows["response_ids"]))
    totals = Totals(float(mask.values.sum()), 2)
    found = loss({"log_probs": log_probs, "logits": logits, "ref_logits": Logits(teacher)}, rows, totals)[0]
    want = policy_loss("gkd", beta=0.0)({"logits": logits, "ref_logits": Logits(teacher)}, rows, totals)[0]
    assert torch.allclose(found, want)


def test_what_cannot_work_is_said():
    rows, student, teacher, mask = case([3, 4], 5, 4)
    logits = Logits(student)
    with pytest.raises(BatchError, match="token id 5 is not in the vocabulary of the model that trains"):
        logits.log_probs(torch.full((7,), 5))
    with pytest.raises(BatchError, match="logits of 7 tokens were to be summed with 6 rows"):
        logits.sum(lambda p, q: p.sum(-1), Logits(teacher[:6]))
    with pytest.raises(BatchError, match="the 6 most probable tokens of 5"):
        logits.top_k(6)
    with pytest.raises(ConfigError, match="beta"):
        policy_loss("gkd", beta=1.5)
    with pytest.raises(ConfigError, match="over"):
        policy_loss("gkd", over="topk")
    with pytest.raises(MissingColumnError, match="ref_top_ids"):
        policy_loss("gkd", over="top_k")({"logits": logits}, rows, Totals(7, 2))
    short = mask.with_values(torch.zeros(7)).slice(0, 1)
    with pytest.raises(BatchError, match="ref_tail_log_probs"):
        policy_loss("gkd", over="top_k").check(
            rows[:1].with_columns(
                ref_top_ids=short, ref_top_log_probs=short, ref_tail_log_probs=Ragged.from_rows([torch.zeros(2)])
            )
        )
    assert hf.algorithms.GKD(beta=1.0) == policy_loss("gkd", beta=1.0)

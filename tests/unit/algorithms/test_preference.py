"""Pairwise losses against the published formulas, which TRL's trainers compute as well, gradients included.

TRL is not installed here. `trl_dpo` and `trl_reward` are written from the formulas in the DPO paper (eq. 7), cDPO
(eq. 3) and InstructGPT (eq. 1), and agree with `DPOTrainer` (loss_type="sigmoid") and `RewardTrainer.compute_loss` of
TRL's repository: there log-probabilities are summed over the completion, and a reward is the logit at the last token.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridflow.algorithms import DPO, BradleyTerry, Totals, policy_loss, value_loss
from hybridflow.algorithms.losses.loss import Loss
from hybridflow.algorithms.trajectories import Trajectories
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.data.lm_dataset import TextSource
from hybridflow.errors import BatchError, ConfigError, PromptError
from recipes.small_model import SmallModel

F64 = torch.float64


def trl_dpo(policy: list[Tensor], reference: list[Tensor], beta: float, smoothing: float) -> Tensor:
    """Rows are preferred, other, preferred, other, ..."""
    sums, refs = (torch.stack([row.sum() for row in rows]) for rows in (policy, reference))
    h = beta * ((sums[::2] - sums[1::2]) - (refs[::2] - refs[1::2]))
    return -(
        (1 - smoothing) * torch.log(1 / (1 + torch.exp(-h))) + smoothing * torch.log(1 / (1 + torch.exp(h)))
    ).mean()


def trl_reward(scores: Tensor, center: float) -> Tensor:
    y, z = scores[::2], scores[1::2]
    return -torch.log(1 / (1 + torch.exp(-(y - z)))).mean() + center * ((y + z) ** 2).mean()


def pairs(lengths: list[int], seed: int = 0) -> Batch:
    """Two rows for each pair, with some tokens masked; prompts do not matter here."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    mask = torch.rand(total, generator=generator) < 0.8
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    mask[starts] = True  # each response has a valid token
    signs = torch.cat([torch.full((n,), 1.0 - 2.0 * (i % 2)) for i, n in enumerate(lengths)])
    columns = {
        "row_id": torch.arange(len(lengths)),
        "trajectory_id": torch.arange(len(lengths)) // 2,
        "response_ids": Ragged.from_lengths(torch.arange(total), lengths),
        "response_mask": Ragged.from_lengths(mask, lengths),
        "preference": Ragged.from_lengths(signs, lengths),
        "ref_log_probs": Ragged.from_lengths(-torch.rand(total, generator=generator, dtype=F64) * 3, lengths),
    }
    return Batch(columns)


def run(loss: Loss, rows: Batch, output: str, values: Tensor, parts: int = 1) -> tuple[Tensor, dict[str, float]]:
    """The loss as the engine computes it: trajectories joined, in `parts` micro-batches whose shares add up."""
    loss.check(rows)
    total, metrics, pairs = torch.zeros((), dtype=F64), dict[str, float](), rows.rows // 2
    like = rows.peek("response_ids")
    for part in range(parts):
        own = [row for pair in range(part, pairs, parts) for row in (2 * pair, 2 * pair + 1)]
        if not own:
            continue
        micro = rows.reorder(own)
        given = Ragged(values, like.offsets).index(own)
        whole = Trajectories.of(micro)
        assert whole is not None
        outputs = {output: whole.joined(given)}
        found, figures = loss(outputs, whole.join(micro), Totals(tokens=1.0, rows=float(pairs)))
        total = total + found
        metrics = {name: metrics.get(name, 0.0) + float(value) for name, value in figures.items()}
    return total, metrics


LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    lengths=LENGTHS,
    beta=st.floats(0.01, 2.0),
    smoothing=st.sampled_from([0.0, 0.1, 0.4]),
    seed=st.integers(0, 99),
    parts=st.integers(1, 3),
)
def test_dpo_is_the_published_loss(lengths, beta, smoothing, seed, parts):
    flat = [n for pair in lengths for n in pair]
    rows = pairs(flat, seed)
    values = (-torch.rand(sum(flat), dtype=F64, generator=torch.Generator().manual_seed(seed + 1)) * 3).requires_grad_()
    kept = rows["response_mask"].values
    expected = trl_dpo(
        list(torch.where(kept, values, 0.0).split(flat)),
        list(torch.where(kept, rows["ref_log_probs"].values, 0.0).split(flat)),
        beta,
        smoothing,
    )
    (gradient,) = torch.autograd.grad(expected, values)
    found, metrics = run(policy_loss("dpo", beta=beta, label_smoothing=smoothing), rows, "log_probs", values, parts)
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(torch.autograd.grad(found, values)[0], gradient, atol=1e-6)
    assert metrics["actor/loss"] == pytest.approx(expected.item(), abs=1e-6)
    assert metrics["actor/margin"] == pytest.approx(metrics["actor/chosen_reward"] - metrics["actor/rejected_reward"])


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, center=st.sampled_from([0.0, 0.01, 0.5]), seed=st.integers(0, 99), parts=st.integers(1, 3))
def test_bradley_terry_is_the_published_loss_on_the_value_before_the_last_token(lengths, center, seed, parts):
    flat = [n for pair in lengths for n in pair]
    rows = pairs(flat, seed).without("ref_log_probs")
    rows = rows.with_columns(response_mask=rows["response_ids"].map(lambda ids: torch.ones_like(ids, dtype=torch.bool)))
    values = torch.randn(sum(flat), dtype=F64, generator=torch.Generator().manual_seed(seed + 1)).requires_grad_()
    scores = torch.stack([row[-1] for row in values.split(flat)])
    expected = trl_reward(scores, center)
    (gradient,) = torch.autograd.grad(expected, values)
    found, metrics = run(value_loss("bradley_terry", center=center), rows, "values", values, parts)
    assert found.item() == pytest.approx(expected.item(), abs=1e-6)
    assert torch.allclose(torch.autograd.grad(found, values)[0], gradient, atol=1e-6)
    assert metrics["critic/accuracy"] == pytest.approx(float((scores[::2] > scores[1::2]).double().mean()))
    assert metrics["critic/reward"] == pytest.approx(float(scores.detach().mean()), abs=1e-6)


def test_large_differences_stay_finite():
    rows = pairs([3, 3])
    values = (rows["preference"].values.double() * -500).requires_grad_()
    found, _ = run(DPO(beta=1.0), rows, "log_probs", values)
    (gradient,) = torch.autograd.grad(found, values)
    assert math.isfinite(found.item())
    assert gradient.isfinite().all()


@pytest.mark.parametrize("loss", [DPO(), BradleyTerry()], ids=["dpo", "bradley_terry"])
def test_rows_that_are_no_pairs_are_refused(loss):
    rows = pairs([2, 3, 1, 4])
    with pytest.raises(BatchError, match="pair 1 of the batch has no valid token with a positive and a negative"):
        loss.check(
            rows.with_columns(preference=rows["preference"].map(lambda sign: torch.cat([sign[:5], sign[5:].abs()])))
        )
    with pytest.raises(BatchError, match="pair 1 of the batch"):
        loss.check(rows.without("trajectory_id"))
    with pytest.raises(ConfigError, match="must be from 0 to below"):
        DPO(label_smoothing=0.5)


def test_a_text_loader_writes_pairs(tmp_path):
    SmallModel(characters="0123456789+=").tokenizer().save_pretrained(tmp_path)
    records = [{"prompt": f"{i}+1=", "good": str(i + 1), "bad": str(10 * i + 25)} for i in range(4)]
    options = {"tokenizer": str(tmp_path), "batch_size": 2, "max_tokens": 16, "prompt": "prompt", "steps": 3}
    plain, scored = (
        list(TextSource(records, completion=("good", "bad"), scored=scored, **options)) for scored in (False, True)
    )
    assert [batch.rows for batch in plain] == [4, 4, 4]
    assert [batch["trajectory_id"].tolist() for batch in plain] == [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]
    assert [row for batch in plain for row in batch["row_id"].tolist()] == list(range(12))
    for batch, longer in zip(plain, scored, strict=True):
        for i in range(4):
            own, more = batch["response_ids"].row(i).tolist(), longer["response_ids"].row(i).tolist()
            assert more == [*own, own[-1]]
            assert batch["preference"].row(i).tolist() == [1.0 - 2.0 * (i % 2)] * len(own)
        assert longer["num_tokens"].tolist() == [n + 1 for n in batch["num_tokens"].tolist()]
        policy_loss("dpo").check(batch.with_columns(ref_log_probs=batch["preference"]))
    source = TextSource(records, completion=("good", "bad"), **options)
    assert source.whole()["trajectory_id"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    state = source.state()
    next(batches := iter(source))
    source.load_state(state)
    assert next(batches).equal(plain[0])
    with pytest.raises(ConfigError, match="scored"):
        TextSource(records, completion=("good", "bad"), scored=True, **options).load_state(state)
    for wrong in ({"completion": ("good",)}, {"completion": "good", "scored": True}):
        with pytest.raises(ConfigError, match="pairs have two columns, the preferred one first"):
            TextSource(records, **options, **wrong)
    with pytest.raises(PromptError, match="has no column 'worse'"):
        TextSource(records, completion=("good", "worse"), **options)

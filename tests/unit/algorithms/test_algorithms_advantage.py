"""compute_advantage, batch figures, and losses as the workers call them."""

from __future__ import annotations

import math
import pickle

import pytest
import torch

from hybridflow.algorithms import GAE, AdaptiveKL, Totals, policy_loss, value_loss
from hybridflow.algorithms.advantage import AdvantageCall, compute_advantage
from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.masked import whiten
from hybridflow.algorithms.metrics import METRIC_COLUMNS, batch_metrics
from hybridflow.algorithms.registry import find_estimator
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ConfigError, EmptyBatchError


def rollout(rows: int = 12, seed: int = 0, masked: bool = True) -> Batch:
    """A batch as it is before compute_advantage; some rows have holes, one has no valid token."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (rows,), generator=g)
    n = int(lengths.sum())
    mask = torch.rand(n, generator=g) < 0.75 if masked else torch.ones(n, dtype=torch.bool)
    mask[: int(lengths[0])] = not masked
    columns = {"response_mask": Ragged.from_lengths(mask, lengths)}
    for name in ("log_probs", "old_log_probs", "ref_log_probs", "values"):
        columns[name] = Ragged.from_lengths(torch.randn(n, generator=g), lengths)
    columns["response_ids"] = Ragged.from_lengths(torch.randint(9, (n,), generator=g), lengths)
    return Batch(
        {
            **columns,
            "rewards": torch.rand(rows, generator=g),
            "group_id": torch.arange(rows) // 3,
            "baseline": torch.rand(rows, generator=g),
            "row_id": torch.arange(rows),
        }
    )


def test_a_sequence_reward_goes_to_the_last_valid_token():
    mask = Ragged.from_rows([[True, True, False], [False, False], [True], []], dtype=torch.bool)
    batch = Batch(
        {
            "response_mask": mask,
            "rewards": torch.tensor([1.0, 2.0, 3.0, 4.0]),
            "values": mask.map(lambda m: torch.zeros(len(m))),
        }
    )
    out = compute_advantage(batch, "gae", lam=1.0, whiten=False)
    assert out["returns"].tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0], [3.0], []]
    assert out.columns == ("advantages", "returns")


def test_gae_with_kl_penalty_and_whitening_is_its_parts():
    batch = rollout()
    mask = batch["response_mask"]
    token_kl = batch["old_log_probs"].values - batch["ref_log_probs"].values
    out = compute_advantage(batch, "gae", gamma=0.99, lam=0.9, kl_coef=0.1)
    rewards = torch.zeros(len(mask.values))
    for i in range(len(batch)):
        valid = mask.row(i).nonzero()[:, 0]
        if len(valid):
            rewards[int(mask.offsets[i]) + int(valid[-1])] = batch["rewards"][i]
    rewards -= 0.1 * token_kl
    advantages, returns = gae(mask.with_values(rewards), batch["values"], mask, gamma=0.99, lam=0.9)
    torch.testing.assert_close(out["advantages"].values.double(), whiten(advantages, mask).values)
    torch.testing.assert_close(out["returns"].values.double(), returns.values)
    value = compute_advantage(batch, GAE(gamma=0.99, lam=0.9), kl_coef=0.1)
    assert all(value[name].equal(out[name]) for name in ("advantages", "returns"))
    torch.testing.assert_close(out["kl"], mask.with_values(token_kl * mask.values).row_sum())
    assert out["kl_coef"].tolist() == pytest.approx([0.1] * len(batch))
    assert tuple(out.columns) == AdvantageCall(find_estimator("gae", {}), 0.1).writes


def test_token_rewards_are_taken_as_they_are():
    batch = rollout()
    tokens = batch["response_mask"].map(lambda m: torch.arange(len(m), dtype=torch.float32))
    out = compute_advantage(batch.with_columns(rewards=tokens), "reinforce")
    expected = [
        float(sum(t for t, m in zip(tokens.row(i).tolist(), batch["response_mask"].row(i).tolist()) if m))
        for i in range(len(batch))
    ]
    first = [int(m.nonzero()[0]) if m.any() else None for m in batch["response_mask"].rows()]
    for i, at in enumerate(first):
        assert at is None or float(out["returns"].row(i)[at]) == pytest.approx(expected[i])


def test_an_adaptive_coefficient_is_used_and_then_updated():
    batch, kl = rollout(), AdaptiveKL(init=0.2, target=0.001, horizon=100)
    out = compute_advantage(batch, "gae", kl_coef=kl)
    assert out["kl_coef"].tolist() == pytest.approx([0.2] * 12)
    error = min(max(float(out["kl"].mean()) / 0.001 - 1, -0.2), 0.2)
    assert kl.state == pytest.approx(0.2 * (1 + error * 12 / 100))
    fixed = compute_advantage(batch, "gae", kl_coef=0.2)
    assert fixed["advantages"].equal(out["advantages"])
    assert AdvantageCall(find_estimator("gae", {}), 0, "k3").reads == (
        "rewards",
        "response_mask",
        "values",
    )  # 0 asks for no penalty


def types_seen(rewards: Ragged, batch: Batch):
    assert (rewards.dtype, batch["response_mask"].dtype) == (torch.float32, torch.bool)
    return rewards, rewards


def test_a_users_estimator():
    def centred(rewards: Ragged, batch: Batch, *, scale: float = 1.0):
        scores = rewards.row_sum()
        spread = rewards.with_values(rewards.expand(scale * (scores - scores.mean())))
        return spread, spread

    assert AdvantageCall(find_estimator(centred, {})).reads is None
    numbers = rollout().with_columns(response_mask=rollout()["response_mask"].to(torch.int64))
    whole = compute_advantage(rollout(), types_seen)
    assert compute_advantage(numbers, types_seen)["advantages"].equal(whole["advantages"])
    assert len(compute_advantage(rollout(), centred, scale=2.0)["advantages"]) == 12
    with pytest.raises(ConfigError, match="Did you mean 'scale'"):
        compute_advantage(rollout(), centred, scal=2.0)


def test_bad_rewards_are_refused():
    batch = rollout()
    rewards = batch["rewards"].clone()
    rewards[5] = math.nan
    with pytest.raises(BatchError, match="row 5 is nan"):
        compute_advantage(batch.with_columns(rewards=rewards), "gae")
    with pytest.raises(BatchError, match="do not fit"):
        compute_advantage(batch.with_columns(rewards=torch.zeros(12, 2)), "gae")
    short = Ragged.from_lengths(torch.zeros(12), [1] * 12)
    with pytest.raises(BatchError, match="same length"):
        compute_advantage(batch.with_columns(values=short), "gae")
    with pytest.raises(EmptyBatchError):
        compute_advantage(batch[0:0], "gae")


def trained(seed: int = 0) -> tuple[Batch, dict[str, Ragged]]:
    batch = rollout(rows=13, seed=seed)
    batch |= compute_advantage(batch, "gae", kl_coef=0.1)
    g = torch.Generator().manual_seed(seed + 1)
    noise = [torch.randn(len(batch["response_mask"].values), generator=g) * 0.3 for _ in range(3)]
    like = batch["response_mask"].with_values
    outputs = {
        "log_probs": like(batch["old_log_probs"].values + noise[0]),
        "values": like(batch["values"].values + noise[1]),
        "entropy": like(noise[2].abs()),
    }
    return batch, outputs


def totals(batch: Batch) -> Totals:
    return Totals(float(batch["response_mask"].values.sum()), float(len(batch)))


def test_pretraining_needs_no_mask():
    """Without `response_mask` every response token counts."""
    batch, outputs = trained()
    loss = policy_loss("pretrain")
    assert loss.reads == ("response_mask?",)
    everything = batch.with_columns(response_mask=batch["response_mask"].map(torch.ones_like))
    plain = Batch({"response_ids": batch["response_mask"].map(lambda mask: mask.to(torch.int64))})
    share, _ = loss(outputs, plain, totals(everything))
    assert float(share) == pytest.approx(-float(outputs["log_probs"].values.mean()), rel=1e-5)


def test_losses_say_what_they_need_and_travel():
    plain, full = policy_loss("ppo"), policy_loss("ppo", entropy_coef=0.01, kl_coef=0.1)
    assert plain.outputs == ("log_probs",)
    assert plain.reads == ("old_log_probs", "advantages", "response_mask")
    assert full.outputs == ("log_probs", "entropy")
    assert "ref_log_probs" in full.reads
    assert value_loss("value").outputs == ("values",)
    batch, outputs = trained()
    again = pickle.loads(pickle.dumps(full))
    assert torch.equal(again(outputs, batch, totals(batch))[0], full(outputs, batch, totals(batch))[0])

    def mine(outputs, rows, totals, *, weight=1.0):
        return weight * outputs["log_probs"].values.sum(), {}

    assert policy_loss(mine, weight=2.0).reads is None
    for call, message in (
        (lambda: policy_loss("pppo"), "Did you mean 'ppo'"),
        (lambda: policy_loss("ppo", clipp=0.1), "Did you mean 'clip'"),
        (lambda: policy_loss("ppo", aggregation="token"), "Did you mean 'token-mean'"),
        (lambda: policy_loss("ppo", kl="k4"), "Did you mean 'k3'"),
        (lambda: policy_loss(mine, wight=1.0), "Did you mean 'weight'"),
        (lambda: value_loss("ppo"), "value loss 'ppo' is unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_batch_metrics():
    batch, _ = trained()
    figures = batch_metrics(batch)
    valid = batch["response_mask"].values
    drift = (batch["log_probs"].values - batch["old_log_probs"].values)[valid].abs()
    counts = torch.stack([mask.any() for mask in batch["response_mask"].rows()])
    assert figures["reward/mean"] == pytest.approx(float(batch["rewards"][counts].mean()))
    assert figures["response/length_max"] == float(batch["response_ids"].lengths.max())
    assert figures["response/tokens"] == len(batch["response_ids"].values)
    assert figures["actor/rollout_log_prob_diff"] == pytest.approx(float(drift.mean()), rel=1e-5)
    assert figures["actor/rollout_log_prob_diff_max"] == pytest.approx(float(drift.max()), rel=1e-5)
    assert figures["advantage/mean"] == pytest.approx(0.0, abs=1e-5)
    assert figures["advantage/std"] == pytest.approx(1.0, abs=1e-3)
    assert figures["kl/coef"] == pytest.approx(0.1)
    assert figures["kl/ref_row"] == pytest.approx(float(batch["kl"].mean()), rel=1e-4, abs=1e-5)
    assert batch_metrics(batch.select("rewards")).keys() == {"reward/mean", "reward/std", "reward/min", "reward/max"}
    used = batch.select(*[name for name in METRIC_COLUMNS if name in batch])
    assert batch_metrics(used) == figures
    assert batch_metrics(batch[0:0]) == {}


def test_explained_variance():
    batch, _ = trained()
    perfect = batch_metrics(batch.with_columns(values=batch["returns"]))
    constant = batch_metrics(batch.with_columns(values=batch["returns"].map(torch.zeros_like)))
    assert perfect["critic/explained_variance"] == pytest.approx(1.0)
    assert constant["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)

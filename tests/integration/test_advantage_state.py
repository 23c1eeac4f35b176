"""What compute_advantage learns on the helper process: one object is one coefficient, kept between iterations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import hybridflow as hf
from hybridflow.errors import ConfigError, MissingColumnError

pytestmark = pytest.mark.usefixtures("pool")


def rollout() -> hf.Batch:
    tokens = hf.Ragged.from_lengths(torch.zeros(4), [1, 2, 0, 1])
    columns = ("values", "cost_values", "old_log_probs")
    return hf.Batch(
        {
            "response_mask": tokens.map(lambda t: torch.ones_like(t, dtype=torch.bool)),
            "rewards": torch.ones(4),
            "costs": torch.tensor([1.0, 1.0, 1.0, 0.25]),  # 0.75 on average: one response is empty
            "group_id": torch.tensor([0, 0, 1, 1]),
            "rewards/a": torch.tensor([1.0, 0.0, 0.0, 1.0]),
            "ref_log_probs": tokens.map(lambda t: t - 1.0),
            **dict.fromkeys(columns, tokens),
        }
    )


def test_a_multiplier_and_a_coefficient_go_on_from_call_to_call():
    lagrange, other = hf.algorithms.Lagrange(limit=0.25, lr=0.2), hf.algorithms.Lagrange(limit=0.25, lr=0.2)
    kl = hf.algorithms.AdaptiveKL(init=0.1, target=100.0, horizon=40)
    multiplier = 1.0
    for step in range(3):
        out = hf.compute_advantage(rollout(), "safe_rlhf", lagrange=lagrange, kl_coef=kl)
        assert {"cost_advantages", "cost_returns", "lagrange", "kl", "kl_coef"} <= set(out.columns)
        multiplier *= math.exp(0.2 * multiplier * 0.5)
        got = out.get(["lagrange", "kl_coef"])
        assert got["lagrange"].tolist() == pytest.approx([multiplier] * 4)
        assert got["kl_coef"].tolist() == pytest.approx([0.1 * (1 - 0.2 * 4 / 40) ** step] * 4)
    fresh = hf.compute_advantage(rollout(), "safe_rlhf", lagrange=other).get("lagrange")["lagrange"]
    assert fresh.tolist() == pytest.approx([math.exp(0.2 * 0.5)] * 4)


def test_the_statistics_of_rewards_continue_with_a_checkpoint(cluster, tmp_path):
    def step(norm: hf.algorithms.RunningNorm, rewards: list[float]) -> tuple[float, float]:
        batch = rollout().with_columns(rewards=torch.tensor(rewards))
        metrics = (hf.compute_advantage(batch, "reinforce", reward_norm=norm) | batch).metrics().get()
        return metrics["reward/norm_mean"], metrics["reward/norm_std"]

    norm, valid = hf.algorithms.RunningNorm(), [1.0, 2.0, 4.0]  # the third response is empty
    assert step(norm, [1.0, 2.0, 9.0, 4.0]) == pytest.approx((np.mean(valid), np.std(valid, ddof=1)))
    saved = hf.save(tmp_path / "saved", parts=[cluster.controller])
    after = step(norm, [0.0, 7.0, 9.0, 1.0])
    everything = [*valid, 0.0, 7.0, 1.0]
    assert after == pytest.approx((np.mean(everything), np.std(everything, ddof=1)))
    hf.load(saved, parts=[cluster.controller])
    assert step(norm, [0.0, 7.0, 9.0, 1.0]) == after
    fresh = step(hf.algorithms.RunningNorm(), [0.0, 7.0, 9.0, 1.0])
    assert fresh == pytest.approx((8 / 3, np.std([0.0, 7.0, 1.0], ddof=1)))


def test_figures_of_components_reach_the_driver():
    batch = hf.compute_advantage(rollout(), "gdpo", components=("a",)) | rollout()
    figures = batch.metrics().get()
    assert figures["reward/a/mean"] == pytest.approx(2 / 3)  # an empty response counts in no mean
    assert figures["cost/mean"] == pytest.approx(0.75)


def test_a_call_is_checked_before_it_is_sent():
    with pytest.raises(ConfigError, match="SafeRLHF needs lagrange="):
        hf.compute_advantage(rollout(), "safe_rlhf")
    with pytest.raises(MissingColumnError, match="rewards/b"):
        hf.compute_advantage(rollout(), "gdpo", components=("a", "b"))
    with pytest.raises(ConfigError, match="no setting 'components'"):
        hf.compute_advantage(rollout(), "grpo", components=("a",))

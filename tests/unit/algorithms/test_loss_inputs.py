"""What losses are given: masks of numbers, options that are None or of numpy, and a cost critic's columns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.algorithms.losses.loss import Loss, Totals
from hybridflow.algorithms.masked import not_finite
from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ConfigError
from hybridflow.workers.critic import cost_loss
from hybridflow.workers.model_worker import batch_temperature
from tests.example_losses import AGGREGATIONS, LOSSES, make_loss

MASK = Ragged.from_rows([[True, False, True], [False, False], [True], [True, True]], dtype=torch.bool)
TOTALS = Totals(float(MASK.values.sum()), float(len(MASK)), longest=3.0)


def rollout() -> tuple[Batch, dict[str, Ragged]]:
    noise = torch.randn(8, len(MASK.values), generator=torch.Generator().manual_seed(0))
    names = ("old_log_probs", "log_probs", "ref_log_probs", "advantages", "values", "returns")
    columns = {name: MASK.with_values(noise[i]) for i, name in enumerate(names)}
    outputs = {"log_probs": MASK.with_values(noise[6]), "values": MASK.with_values(noise[7])}
    outputs["entropy"] = outputs["log_probs"].map(torch.abs)
    return Batch({"response_mask": MASK, "response_ids": MASK.to(torch.int64), **columns}), outputs


def figures(loss: Loss, batch: Batch) -> dict[str, float]:
    scalar, metrics = loss(rollout()[1], batch, TOTALS)
    return {"loss": float(scalar), **{name: float(value) for name, value in metrics.items()}}


@pytest.mark.parametrize("case", LOSSES)
def test_a_mask_may_be_0_and_1(case):
    batch, _ = rollout()
    loss = make_loss(case, "token-mean")
    expected = figures(loss, batch)
    for dtype in (torch.int64, torch.float32):
        assert figures(loss, batch.with_columns(response_mask=MASK.to(dtype))) == expected
    with pytest.raises(BatchError, match=r"response_mask: row 0 has 2; .* True and False"):
        figures(loss, batch.with_columns(response_mask=MASK.map(lambda mask: mask * 2)))


def test_a_whole_loss_of_one_s_own_sees_a_mask_of_bools():
    def mine(outputs, rows, totals):
        return torch.where(rows["response_mask"].values, outputs["log_probs"].values, 0.0).sum() / totals.tokens

    batch, outputs = rollout()
    found = figures(policy_loss(mine), batch.with_columns(response_mask=MASK.to(torch.int32)))
    assert found["loss"] == pytest.approx(float(outputs["log_probs"].values[MASK.values].mean()))


def test_the_default_aggregation_can_be_asked_for():
    batch, _ = rollout()
    for make, name in ((policy_loss, "pretrain"), (value_loss, "value"), (policy_loss, "gspo"), (policy_loss, "ppo")):
        assert figures(make(name, aggregation=None), batch) == figures(make(name), batch)
        with pytest.raises(ConfigError, match="norm=2 is of aggregation='seq-mean-token-sum-norm'"):
            make(name, aggregation=None, norm=2)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_pretraining_loss_is_reinforce_on_advantages_of_1(aggregation):
    batch, _ = rollout()
    same = batch.with_columns(advantages=batch["advantages"].map(torch.ones_like))
    pretrain, reinforce = (policy_loss(name, aggregation=aggregation) for name in ("pretrain", "reinforce"))
    assert figures(pretrain, batch)["loss"] == pytest.approx(figures(reinforce, same)["loss"])


def test_options_may_be_numbers_of_numpy():
    batch, _ = rollout()
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (policy_loss, "ppo", {"clip": 0.25, "dual_clip": 2, "kl_coef": 0.5, "entropy_coef": -0.5}),
        (policy_loss, "gspo", {"clip": 0.25, "clip_high": 0.5, "aggregation": "seq-mean-token-sum-norm", "norm": 7}),
        (policy_loss, "cispo", {"clip": 1}),
        (policy_loss, "geo_mean", {"clip": 0.25, "clip_high": 0.5}),
        (policy_loss, "sapo", {"tau_pos": 0.5, "tau_neg": 2}),
        (policy_loss, "pretrain", {"coef": 0.5}),
        (value_loss, "value", {"clip": 0.25}),
    ]
    for make, name, options in cases:
        theirs = {
            option: value if isinstance(value, str) else (np.int64 if isinstance(value, int) else np.float32)(value)
            for option, value in options.items()
        }
        assert figures(make(name, **theirs), batch) == pytest.approx(figures(make(name, **options), batch), rel=1e-6)


def test_a_kl_without_its_coefficient_is_refused():
    for loss in ("ppo", "gspo", lambda log_probs, mask: -log_probs.values):
        with pytest.raises(ConfigError, match="kl='k2'\\) without kl_coef adds no KL"):
            policy_loss(loss, kl="k2")
        for wrong in (-0.1, math.nan, "0.1"):
            with pytest.raises(ConfigError, match=rf"kl_coef={wrong!r}\): must be at least 0"):
                policy_loss(loss, kl_coef=wrong)
        assert policy_loss(loss, kl="k2", kl_coef=0.0).reads == policy_loss(loss).reads
    batch, _ = rollout()
    plain, named = policy_loss("ppo", kl_coef=0.1), policy_loss("ppo", kl_coef=0.1, kl="k3")
    assert figures(plain, batch) == figures(named, batch) != figures(policy_loss("ppo", kl_coef=0.1, kl="k2"), batch)


def as_costs(batch: Batch) -> Batch:
    """The columns of a cost critic, beside those of the other one, which it must not take."""
    renamed = {"values": "cost_values", "returns": "cost_returns"}
    wrong = batch["values"].map(lambda x: x + 100)
    return batch.rename(renamed).with_columns(values=wrong, returns=wrong)


def test_a_cost_critic_has_the_losses_of_the_other_one():
    batch, _ = rollout()
    loss = cost_loss("value", clip=0.1)
    assert loss.reads == loss.per_token == ("cost_values", "cost_returns", "response_mask")
    expected = figures(value_loss("value", clip=0.1), batch)
    found = figures(loss, as_costs(batch))
    assert found == {name.replace("critic/", "cost_critic/"): value for name, value in expected.items()}


def test_a_cost_critic_takes_every_form_of_a_loss_of_one_s_own():
    def error(outputs, rows, totals):
        return 0.5 * (outputs["values"].values - rows["returns"].values)[rows["response_mask"].values].square().sum()

    def alone(outputs, rows, totals, *, scale=1.0):
        return scale * error(outputs, rows, totals)

    def with_numbers(outputs, rows, totals):
        return error(outputs, rows, totals), {"critic/mine": 2.0, "other": 3}

    batch, _ = rollout()
    for form, options, metrics in (
        (alone, {"scale": 0.5}, {}),
        (with_numbers, {}, {"cost_critic/mine": 2.0, "other": 3.0}),
    ):
        expected = figures(value_loss(form, **options), batch)["loss"]
        assert figures(cost_loss(form, **options), as_costs(batch)) == {"loss": expected, **metrics}

    def each(outputs, rows, totals):
        return outputs["values"].values

    with pytest.raises(BatchError, match="loss 'each' gave a tensor"):
        figures(cost_loss(each), as_costs(batch))


@pytest.mark.parametrize("case", LOSSES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_in_a_column_that_a_loss_reads_is_named(case, value):
    loss, (batch, _) = make_loss(case, "token-mean"), rollout()
    read = {name.removesuffix("?") for name in loss.reads or ()} - {"response_mask"}
    garbage = torch.where(MASK.values, 0.0, value)  # masked tokens do not count
    for name in set(batch.columns) - {"response_mask", "response_ids"}:
        dirty = batch.with_columns(**{name: batch[name].with_values(batch[name].values + garbage)})
        assert not not_finite(dirty, loss.reads)
        flat = dirty[name].values.clone()
        flat[5] = value  # of row 2
        found = not_finite(dirty.with_columns(**{name: MASK.with_values(flat)}), loss.reads)
        assert found == (f"{name}: row 2 is {value}" if name in read else "")


def test_columns_of_every_kind_are_looked_at():
    batch, _ = rollout()
    rows = torch.tensor([1.0, math.inf, 1.0, 1.0])  # row 1 has no valid token
    batch = batch.with_columns(
        weight=rows, pair=torch.ones(4, 2), prompts=Ragged.from_rows([[1.0]] * 4), name=["x"] * 4
    )
    assert not not_finite(batch)
    assert not_finite(batch.with_columns(weight=rows / 0)) == "weight: row 0 is inf (3 of 4 are not finite)"
    pair = torch.tensor([[1.0, 1.0]] * 3 + [[1.0, math.nan]])
    assert not_finite(batch.with_columns(pair=pair), ("pair", "nowhere?")) == "pair: row 3 is [1.0, nan]"
    assert "prompts: row 2 is" in not_finite(
        batch.with_columns(prompts=Ragged.from_rows([[1.0], [1.0], [math.inf], []]))
    )
    assert "weight: row 0 is 1e+300" in not_finite(batch.with_columns(weight=rows.double() * 1e300))
    for value, counts in ((math.nan, False), (math.inf, True)):  # nan: the function does not apply to the row
        assert bool(not_finite(batch.with_columns(**{"rewards/math": rows * value}))) is counts


def test_a_temperature_that_is_not_finite_is_refused():
    batch = Batch({"temperature": torch.tensor([0.7, math.nan])})
    with pytest.raises(BatchError, match="temperature: row 1 is nan"):
        batch_temperature(batch)

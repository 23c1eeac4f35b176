"""Every estimator, through compute_advantage, against float64 loops written from its paper's formula.

Batches are ragged, with uneven and scattered groups, groups of one row, holes in the middle of a response, rows without
a valid token, and garbage at every masked token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms import GAE, GRPO, OPO, PPO, GRPOPassK
from hybridflow.algorithms.advantage import AdvantageCall, compute_advantage
from hybridflow.algorithms.advantages.prompt_groups import PromptGroups
from hybridflow.algorithms.registry import ESTIMATORS, find_estimator
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ConfigError, MissingColumnError

FLOAT = torch.float64
quick = settings(max_examples=40, deadline=None)
SCORES = (0.0, 1.0, 0.5, -1.25, 3.0)
TOKEN_COLUMNS = ("old_log_probs", "ref_log_probs", "values", "cost_values")


@st.composite
def batches(draw, garbage: float = math.nan) -> Batch:
    """A rollout with everything that any estimator reads; at least two rows share a prompt."""
    rows = draw(st.integers(2, 9))
    mask = Ragged.from_rows(
        draw(st.lists(st.lists(st.booleans(), max_size=7), min_size=rows, max_size=rows)), dtype=torch.bool
    )
    groups = draw(st.lists(st.sampled_from([11, 3, 7, 400]), min_size=rows - 1, max_size=rows - 1))
    spread = draw(st.sampled_from([None, 1.0, 1e-4]))
    return make(mask, [*groups, groups[0]], draw(st.integers(0, 9999)), garbage, spread)


def make(mask: Ragged, groups: list[int], seed: int, garbage: float = math.nan, spread: float | None = None) -> Batch:
    """Scores are a few numbers, many of them equal, or with a `spread` all different and far from 0."""
    rng = np.random.default_rng(seed)
    rows, tokens = len(mask), len(mask.values)
    columns: dict[str, Any] = {"response_mask": mask, "group_id": torch.tensor(groups)}
    for name in TOKEN_COLUMNS:
        values = torch.tensor(rng.normal(size=tokens), dtype=torch.float32)
        columns[name] = mask.with_values(torch.where(mask.values, values, garbage))
    for name in ("rewards", "costs", "baseline", "rewards/a", "rewards/b"):
        scores = rng.choice(SCORES, rows) if spread is None else 100 + spread * rng.normal(size=rows)
        columns[name] = torch.tensor(scores, dtype=torch.float32)
    columns["rewards/b"][torch.tensor(rng.random(rows) < 0.3)] = math.nan  # does not apply
    return Batch(columns)


# Oracles: rows as lists of valid tokens


def valid(batch: Batch, name: str) -> list[np.ndarray]:
    """The column's values at the valid tokens of each row."""
    rows = zip(batch[name].rows(), batch["response_mask"].rows(), strict=True)
    return [row[mask].numpy().astype(np.float64) for row, mask in rows]


def lengths(batch: Batch) -> list[int]:
    return [int(mask.sum()) for mask in batch["response_mask"].rows()]


def at_last(batch: Batch, name: str) -> list[np.ndarray]:
    """A score per row as rewards of its valid tokens."""
    out = [np.zeros(n) for n in lengths(batch)]
    for i, row in enumerate(out):
        if len(row):
            row[-1] = float(batch[name][i])
    return out


def same_prompt(batch: Batch, i: int, scores: Any) -> list[int]:
    """Row numbers of the group of row i (i included) that have a valid token and a score."""
    ids, counts = batch["group_id"].tolist(), lengths(batch)
    return [j for j in range(len(batch)) if ids[j] == ids[i] and counts[j] and not math.isnan(scores[j])]


def per_row(batch: Batch, scores: Any, formula: Callable[[int, list[int]], float]) -> list[np.ndarray]:
    """`formula(row, rows of its group)` at each valid token; 0 where the row has no score."""
    found = [(n, i, same_prompt(batch, i, scores)) for i, n in enumerate(lengths(batch))]
    return [np.full(n, formula(i, group) if i in group else 0.0) for n, i, group in found]


def whitened(rows: list[np.ndarray]) -> list[np.ndarray]:
    flat = np.concatenate([*rows, np.zeros(0)])
    if len(flat) == 0:
        return rows
    variance = flat.var(ddof=1) if len(flat) > 1 else 0.0
    return [(row - flat.mean()) / math.sqrt(variance + 1e-8) for row in rows]


def deviation(values: list[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def to_go(rewards: np.ndarray, gamma: float) -> np.ndarray:
    return np.array([sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))])


def gae_rows(rewards: list[np.ndarray], values: list[np.ndarray], gamma: float, lam: float):
    """The sum of equation 16, term by term."""
    advantages = []
    for r, v in zip(rewards, values, strict=True):
        delta = [r[t] + gamma * (v[t + 1] if t + 1 < len(v) else 0.0) - v[t] for t in range(len(v))]
        advantages.append(to_go(np.array(delta), gamma * lam))
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def grpo_rows(batch: Batch, scores: Any, normalize: bool = True) -> list[np.ndarray]:
    def formula(i: int, group: list[int]) -> float:
        members = [scores[j] for j in group]
        return (scores[i] - np.mean(members)) / (deviation(members) + 1e-6 if normalize else 1.0)

    return per_row(batch, scores, formula)


def passk(i: int, group: list[int], scores: Any, k: int) -> float:
    """By enumeration of every set of k rows that holds i."""
    others = [j for j in group if j != i]
    chosen = list(itertools.combinations(others, min(k, len(group)) - 1))
    leads = [max(0.0, scores[i] - max(scores[j] for j in rest)) for rest in chosen if rest]
    return float(np.mean(leads)) if leads else 0.0


def check(batch: Batch, out: Batch, expected: dict[str, list[np.ndarray]]) -> None:
    masked = ~batch["response_mask"].values
    for name, rows in expected.items():
        assert out[name].dtype == torch.float32
        assert torch.all(out[name].values[masked] == 0)
        for found, row in zip(valid(out | batch.select("response_mask"), name), rows, strict=True):
            np.testing.assert_allclose(found, row, atol=1e-5, rtol=1e-5)


# The estimators


@quick
@given(batches(), st.sampled_from([1.0, 0.9]), st.sampled_from([0.0, 0.95, 1.0]), st.booleans())
def test_gae(batch, gamma, lam, whiten):
    out = compute_advantage(batch, "gae", gamma=gamma, lam=lam, whiten=whiten, kl_coef=0.1)
    drift = zip(valid(batch, "old_log_probs"), valid(batch, "ref_log_probs"), strict=True)
    rewards = [r - 0.1 * (a - b) for r, (a, b) in zip(at_last(batch, "rewards"), drift, strict=True)]
    advantages, returns = gae_rows(rewards, valid(batch, "values"), gamma, lam)
    check(batch, out, {"advantages": whitened(advantages) if whiten else advantages, "returns": returns})
    kl = [float((a - b).sum()) for a, b in zip(valid(batch, "old_log_probs"), valid(batch, "ref_log_probs"))]
    assert out["kl"].tolist() == pytest.approx(kl, abs=1e-5)
    assert out["kl_coef"].tolist() == pytest.approx([0.1] * len(batch))


@quick
@given(batches(), st.booleans())
def test_grpo_and_dr_grpo(batch, normalize):
    scores = batch["rewards"].tolist()
    returns = [np.full(n, s) for n, s in zip(lengths(batch), scores, strict=True)]
    expected = {"advantages": grpo_rows(batch, scores, normalize), "returns": returns}
    check(batch, compute_advantage(batch, "grpo", normalize=normalize), expected)
    if not normalize:
        check(batch, compute_advantage(batch, "dr_grpo"), expected)


@quick
@given(batches())
def test_rloo(batch):
    scores = batch["rewards"].tolist()

    def formula(i: int, group: list[int]) -> float:
        others = [scores[j] for j in group if j != i]
        return scores[i] - float(np.mean(others)) if others else 0.0

    check(batch, compute_advantage(batch, "rloo"), {"advantages": per_row(batch, scores, formula)})


@quick
@given(batches())
def test_opo(batch):
    scores, n = batch["rewards"].tolist(), lengths(batch)

    def formula(i: int, group: list[int]) -> float:
        return scores[i] - sum(n[j] * scores[j] for j in group) / sum(n[j] for j in group)

    check(batch, compute_advantage(batch, "opo"), {"advantages": per_row(batch, scores, formula)})


@quick
@given(batches())
def test_gpg(batch):
    scores = batch["rewards"].tolist()
    rows = [i for i, n in enumerate(lengths(batch)) if n]
    useless = [i for i in rows if len({scores[j] for j in same_prompt(batch, i, scores)}) == 1]
    alpha = len(rows) / max(len(rows) - len(useless), 1)

    def formula(i: int, group: list[int]) -> float:
        return alpha * (scores[i] - float(np.mean([scores[j] for j in group])))

    check(batch, compute_advantage(batch, "gpg"), {"advantages": per_row(batch, scores, formula)})


@quick
@given(batches(), st.sampled_from([None, 2, 3, 5]), st.booleans())
def test_grpo_passk(batch, k, normalize):
    scores = batch["rewards"].tolist()

    def formula(i: int, group: list[int]) -> float:
        lead = passk(i, group, scores, k or len(group))
        return lead / (deviation([scores[j] for j in group]) + 1e-6) if normalize else lead

    out = compute_advantage(batch, "grpo_passk", k=k, normalize=normalize)
    check(batch, out, {"advantages": per_row(batch, scores, formula)})


def test_passk_of_a_large_group_does_not_overflow():
    scores = torch.linspace(0, 1, 512, dtype=torch.float64)
    found = GRPOPassK(k=256, normalize=False).row_advantages(
        scores, PromptGroups.of(torch.zeros(512, dtype=torch.int64))
    )
    assert torch.isfinite(found).all()
    assert bool((found.diff() >= 0).all())  # the better, the more it is worth
    assert 0 < float(found[-1]) < 1


@quick
@given(batches(), st.sampled_from([None, (1.0, 0.25)]))
def test_gdpo(batch, weights):
    out = compute_advantage(batch, "gdpo", components=("a", "b"), weights=weights)
    first, second = weights or (1.0, 1.0)
    parts = [grpo_rows(batch, batch[f"rewards/{name}"].tolist()) for name in ("a", "b")]
    summed = [first * a + second * b for a, b in zip(*parts, strict=True)]
    returns = [np.full(n, s) for n, s in zip(lengths(batch), batch["rewards"].tolist(), strict=True)]
    check(batch, out, {"advantages": whitened(summed), "returns": returns})


def test_gdpo_takes_components_per_token():
    mask = Ragged.from_rows([[True, False, True], [True], [True, True]], dtype=torch.bool)
    batch = make(mask, [5, 5, 5], 0)
    tokens = mask.with_values(torch.tensor([0.5, math.nan, 1.0, 0.0, 2.0, 1.0]))
    summed = batch.with_columns(**{"rewards/a": torch.tensor([1.5, 0.0, 3.0])})
    expected = compute_advantage(summed, "gdpo", components=["a"])["advantages"]
    found = compute_advantage(batch.with_columns(**{"rewards/a": tokens}), "gdpo", components=["a"])["advantages"]
    assert found.equal(expected)


@quick
@given(batches(), st.sampled_from([1.0, 0.9]))
def test_remax_reinforce_and_reinforce_plus_plus(batch, gamma):
    returns = [to_go(row, gamma) for row in at_last(batch, "rewards")]
    baseline = batch["baseline"].tolist()
    everything = np.concatenate([*returns, np.zeros(0)])
    mean = everything.mean() if len(everything) else 0.0
    for name, expected in {
        "remax": [row - b for row, b in zip(returns, baseline, strict=True)],
        "reinforce": [row - mean for row in returns],
        "reinforce_plus_plus": whitened(returns),
    }.items():
        check(batch, compute_advantage(batch, name, gamma=gamma), {"advantages": expected, "returns": returns})
    plain = compute_advantage(batch, "reinforce", gamma=gamma, normalize=True)
    assert plain["advantages"].equal(compute_advantage(batch, "reinforce_plus_plus", gamma=gamma)["advantages"])


@quick
@given(batches())
def test_reinforce_plus_plus_baseline(batch):
    centred = grpo_rows(batch, batch["rewards"].tolist(), normalize=False)
    check(batch, compute_advantage(batch, "reinforce_plus_plus_baseline"), {"advantages": whitened(centred)})


@quick
@given(batches(), st.sampled_from([0.0, 0.5, 4.0]), st.booleans(), st.sampled_from([0.0, 0.2]))
def test_safe_rlhf(batch, multiplier, whiten, kl_coef):
    out = compute_advantage(
        batch, "safe_rlhf", lagrange=multiplier, gamma=0.98, lam=0.9, whiten=whiten, kl_coef=kl_coef
    )
    drift = [a - b for a, b in zip(valid(batch, "old_log_probs"), valid(batch, "ref_log_probs"), strict=True)]
    rewards = [r - kl_coef / 2 * d for r, d in zip(at_last(batch, "rewards"), drift, strict=True)]
    costs = [c + kl_coef / 2 * d for c, d in zip(at_last(batch, "costs"), drift, strict=True)]
    advantages, returns = gae_rows(rewards, valid(batch, "values"), 0.98, 0.9)
    cost_advantages, cost_returns = gae_rows(costs, valid(batch, "cost_values"), 0.98, 0.9)
    if whiten:
        advantages, cost_advantages = whitened(advantages), whitened(cost_advantages)
    weighed = [(a - multiplier * c) / (1 + multiplier) for a, c in zip(advantages, cost_advantages, strict=True)]
    expected = {
        "advantages": weighed,
        "returns": returns,
        "cost_advantages": cost_advantages,
        "cost_returns": cost_returns,
    }
    check(batch, out, expected)
    assert out["lagrange"].tolist() == pytest.approx([multiplier] * len(batch))


# What holds for all of them

OPTIONS: dict[str, dict[str, Any]] = {"gdpo": {"components": ("a", "b")}, "safe_rlhf": {"lagrange": 1.0}}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_reads_what_it_says_and_nothing_at_masked_tokens(name):
    mask = Ragged.from_rows([[True, False, True], [False, False], [True], [], [False, True, True]], dtype=torch.bool)
    groups, options = [4, 4, 9, 9, 4], OPTIONS.get(name, {})
    kl_coef = 0.0 if name == "gdpo" else 0.1
    call = AdvantageCall(find_estimator(name, options), kl_coef)
    reads = call.reads
    assert reads is not None
    out = compute_advantage(make(mask, groups, 5).select(*reads), name, kl_coef=kl_coef, **options)
    assert out.columns == call.writes
    other = make(mask, groups, 5, garbage=-math.inf)
    hidden = torch.tensor([1.0, math.nan, 1.0, math.inf, 1.0])  # no valid token: what it earned does not matter
    other = other.with_columns(**{c: other[c] * hidden for c in ("rewards", "costs", "baseline", "rewards/a")})
    again = compute_advantage(other.select(*reads), name, kl_coef=kl_coef, **options)
    for column in ("advantages", "returns"):
        assert torch.any(out[column].values != 0)
        assert torch.all(out[column].values[~mask.values] == 0)
        assert again[column].equal(out[column])
    for dtype in (torch.int64, torch.float32, torch.uint8):  # 0 and 1 are a mask as well
        numbers = other.select(*reads).with_columns(response_mask=mask.to(dtype))
        found = compute_advantage(numbers, name, kl_coef=kl_coef, **options)
        assert all(found[column].equal(out[column]) for column in ("advantages", "returns"))
    for missing in reads:
        with pytest.raises(MissingColumnError, match=missing):
            compute_advantage(other.select(*reads).without(missing), name, kl_coef=kl_coef, **options)


@pytest.mark.parametrize(
    "name", [name for name, e in ESTIMATORS.items() if "group_id" in (e(**OPTIONS.get(name, {})).reads or ())]
)
def test_groups_of_one_row_are_refused_only_when_there_is_no_other(name):
    mask = Ragged.from_rows([[True, True], [True], [True]], dtype=torch.bool)
    options = OPTIONS.get(name, {})
    with pytest.raises(BatchError, match="n >= 2"):
        compute_advantage(make(mask, [1, 2, 3], 0), name, **options)
    batch = make(mask, [1, 2, 2], 3).with_columns(rewards=torch.tensor([3.0, 1.0, 0.0]))
    out = compute_advantage(batch.with_columns(**{"rewards/b": torch.ones(3)}), name, **options)["advantages"]
    whitens = name in ("gdpo", "reinforce_plus_plus_baseline")  # which then moves the row off 0
    assert whitens or torch.all(out.row(0) == 0)


def test_groups_of_equal_scores_and_of_one_row_have_exactly_no_advantage():
    alone = PromptGroups.of(torch.arange(3), torch.tensor([3, 7, 49]))
    assert torch.equal(OPO().row_advantages(torch.tensor([0.1, 0.7, 100.3]), alone), torch.zeros(3, dtype=FLOAT))
    pairs = PromptGroups.of(torch.tensor([0, 0, 1, 1]))
    assert torch.equal(GRPO().row_advantages(torch.ones(4), pairs), torch.zeros(4, dtype=FLOAT))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gae", {"gamma": 1.5}, r"GAE\(gamma=1.5\): must be a number from 0 to 1"),
        ("gae", {"lam": None}, r"lam=None\): must be"),
        ("gae", {"whiten": 1}, r"whiten=1\): give True or False"),
        ("grpo", {"eps": 0.0}, r"eps=0.0\): must be a finite number above 0"),
        ("grpo_passk", {"k": 1}, "whole number of at least 2"),
        ("gdpo", {}, "GDPO needs components="),
        ("gdpo", {"components": "ab"}, "names of reward components"),
        ("gdpo", {"components": ("a", "a")}, "each once"),
        ("gdpo", {"components": ("a",), "weights": (1.0, 2.0)}, "one number for each of 1 components"),
        ("gdpo", {"components": ("a",), "weights": (math.nan,)}, "weights=.* one number for each"),
        ("gdpo", {"components": ("a",), "kl_coef": 0.1}, "update_actor"),
        ("safe_rlhf", {}, "SafeRLHF needs lagrange="),
        ("safe_rlhf", {"lagrange": -1.0}, "at least 0"),
        ("dr_grpo", {"normalize": True}, "It takes none"),
        ("gea", {}, "Did you mean 'gae'"),
        ("gae", {"lambd": 0.9}, "no setting 'lambd'.*'lam'"),
        ("gae", {"kl_coef": -0.1}, "at least 0"),
        ("gae", {"kl": "k9"}, "KL estimator 'k9'"),
        ("gae", {"kl": "k3"}, r"kl='k3'\) without kl_coef"),
        (GAE, {}, r"GAE is a class: give a value, GAE\(...\)"),
        (GAE(), {"lam": 0.5}, r"write GAE\(lam=...\)"),
        (PPO(), {}, "is of another kind"),
    ],
)
def test_options_are_checked_before_there_is_data(name, options, message):
    batch = make(Ragged.from_rows([[True]] * 2, dtype=torch.bool), [1, 1], 0)
    with pytest.raises(ConfigError, match=message):
        compute_advantage(batch, name, **options)


def test_a_users_estimator_may_write_more_columns():
    def centred(rewards: Ragged, batch: Batch, *, column: str):
        scores = rewards.row_sum() - batch[column]
        spread = rewards.with_values(rewards.expand(scores))
        return {"advantages": spread, "returns": spread, "margin": scores}

    centred.reads = lambda options: (options["column"],)  # type: ignore[attr-defined]
    centred.writes = ("margin",)  # type: ignore[attr-defined]
    mask = Ragged.from_rows([[True, False, True], [True]], dtype=torch.bool)
    batch = make(mask, [1, 1], 0)
    assert AdvantageCall(find_estimator(centred, {"column": "baseline"})).reads == (
        "rewards",
        "response_mask",
        "baseline",
    )
    assert AdvantageCall(find_estimator(centred, {"column": "baseline"})).writes == ("advantages", "returns", "margin")
    out = compute_advantage(batch, centred, column="baseline")
    torch.testing.assert_close(out["margin"], batch["rewards"] - batch["baseline"])
    assert out["advantages"].values[1] == 0  # masked, whatever the function put there
    with pytest.raises(ConfigError, match="needs the option 'column'"):
        compute_advantage(batch, centred)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda rewards: rewards, "returned a Ragged: it must return"),
        (lambda rewards: {"advantages": rewards}, r"returned columns \('advantages',\)"),
        (lambda rewards: (rewards, rewards.row_sum()), "returned returns Tensor"),
        (lambda rewards: (rewards.slice(0, 1), rewards), "ragged like it"),
        (lambda rewards: (rewards.map(torch.log), rewards), "advantages of row 0 is -inf"),
    ],
)
def test_what_a_users_estimator_returns_is_checked(result, message):
    batch = make(Ragged.from_rows([[True, True], [True]], dtype=torch.bool), [1, 1], 0)
    with pytest.raises(BatchError, match=message):
        compute_advantage(batch, lambda rewards, batch: result(rewards))


def test_values_that_are_not_finite_are_found():
    batch = make(Ragged.from_rows([[True], [True]], dtype=torch.bool), [1, 1], 0)
    broken = batch.with_columns(values=Ragged.from_rows([[0.0], [math.nan]]))
    with pytest.raises(BatchError, match="values: row 1 is nan"):
        compute_advantage(broken, "gae", whiten=False)
    for column, name, options in (
        ("costs", "safe_rlhf", {"lagrange": 1.0}),
        ("baseline", "remax", {}),
        ("rewards/a", "gdpo", {"components": ("b", "a")}),
    ):
        with pytest.raises(BatchError, match=f"{column}: row 1 is -inf"):
            compute_advantage(batch.with_columns(**{column: torch.tensor([0.0, -math.inf])}), name, **options)
    for column in ("old_log_probs", "ref_log_probs"):
        with pytest.raises(BatchError, match=f"{column}: row 1 is nan"):
            compute_advantage(batch.with_columns(**{column: broken["values"]}), "rloo", kl_coef=0.1)


@pytest.mark.parametrize("odd", [0.5, 2.0, -1.0, math.nan])
def test_a_mask_is_true_or_false(odd):
    batch = make(Ragged.from_rows([[True], [True, True]], dtype=torch.bool), [1, 1], 0)
    mask = Ragged.from_rows([[1.0], [0.0, odd]])
    with pytest.raises(BatchError, match=f"response_mask: row 1 has {odd}; .* True and False, or 1 and 0"):
        compute_advantage(batch.with_columns(response_mask=mask), "grpo")


def test_options_may_be_numbers_of_numpy():
    batch = make(Ragged.from_rows([[True, True]] * 4, dtype=torch.bool), [1, 1, 1, 1], 2)
    for name, options, plain in (
        ("gae", {"gamma": np.float32(0.5), "lam": np.float64(1), "kl_coef": np.float32(0.25)}, {"gamma": 0.5}),
        ("grpo_passk", {"k": np.int64(2), "eps": np.float32(0.125)}, {"k": 2, "eps": 0.125}),
        ("safe_rlhf", {"lagrange": np.int32(2)}, {"lagrange": 2.0}),
        ("gdpo", {"components": ("a",), "weights": [np.float32(2)]}, {"components": ("a",), "weights": [2.0]}),
    ):
        plain |= {"lam": 1.0, "kl_coef": 0.25} if name == "gae" else {}
        found, expected = (compute_advantage(batch, name, **given) for given in (options, plain))
        assert found["advantages"].equal(expected["advantages"])

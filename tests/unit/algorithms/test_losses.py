"""Policy and value losses by name against float64 oracles written row by row from the papers, gradients included."""

from __future__ import annotations

import math
import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.losses.loss import TokenWeights, Totals
from hybridflow.algorithms.losses.policy import TokenLoss
from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ConfigError
from tests.example_losses import AGGREGATIONS, made

FLOAT = torch.float64
Array = np.ndarray
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ppo", {}),
    ("ppo", {"clip": 0.1, "clip_high": 0.28}),
    ("ppo", {"clip": 0.3, "dual_clip": 1.4}),
    ("gspo", {"clip": 0.05, "clip_high": 0.1}),
    ("gspo", {}),
    ("cispo", {}),
    ("cispo", {"clip": 1.0, "clip_high": 0.4}),
    ("geo_mean", {}),
    ("geo_mean", {"clip": 0.1, "clip_high": 0.2}),
    ("sapo", {}),
    ("sapo", {"tau_pos": 0.7, "tau_neg": 2.0}),
    ("reinforce", {}),
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
DEFAULTS = {"gspo": "seq-mean-token-mean", "geo_mean": "seq-mean-token-mean", "sapo": "seq-mean-token-mean"}


def ppo_row(lp: Array, old: Array, a: Array, clip: float = 0.2, clip_high: float | None = None, dual_clip=None):
    """Of the valid tokens of one row: the loss of each, its derivative by every log-probability, what was clipped."""
    high = clip if clip_high is None else clip_high
    ratio = np.exp(lp - old)
    objective = np.minimum(ratio * a, np.clip(ratio, 1 - clip, 1 + high) * a)
    flows = objective == ratio * a
    if dual_clip is not None:
        capped = (a < 0) & (objective < dual_clip * a)
        objective, flows = np.where(capped, dual_clip * a, objective), flows & ~capped
    return -objective, np.diag(np.where(flows, -ratio * a, 0.0)), ~flows


def gspo_row(lp: Array, old: Array, a: Array, clip: float = 3e-4, clip_high: float = 4e-4):
    s = np.exp(np.mean(lp - old))
    bounded = min(max(s, 1 - clip), 1 + clip_high)
    objective = np.minimum(s * a, bounded * a)
    flows = objective == s * a
    return -objective, np.diag(np.where(flows, -s * a, 0.0)), ~flows


def cispo_row(lp: Array, old: Array, a: Array, clip: float = 0.2, clip_high: float | None = None):
    ratio = np.exp(lp - old)
    weight = np.clip(ratio, 1 - clip, 1 + (clip if clip_high is None else clip_high))
    return -weight * a * lp, np.diag(-weight * a), weight != ratio


def geo_mean_row(lp: Array, old: Array, a: Array, clip: float = 0.4, clip_high: float | None = None):
    """The paper's product of ratios to the power of the sign, each cut from above."""
    n, a_row = len(lp), float(np.mean(a))
    high, sign = math.exp(clip if clip_high is None else clip_high), np.sign(a_row)
    ratio = np.exp(lp - old)
    cut = np.minimum(ratio, high) if sign > 0 else np.maximum(ratio, math.exp(-clip))
    loss = -a_row * float(np.prod(cut)) ** (1 / n)
    return np.full(n, loss), np.outer(np.ones(n), np.where(cut == ratio, loss / n, 0.0)), cut != ratio


def sapo_row(lp: Array, old: Array, a: Array, tau_pos: float = 1.0, tau_neg: float = 1.05):
    ratio, tau = np.exp(lp - old), np.where(a > 0, tau_pos, tau_neg)
    gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    return -4 / tau * gate * a, np.diag(-4 * gate * (1 - gate) * ratio * a), None


def reinforce_row(lp: Array, old: Array, a: Array):
    return -a * lp, np.diag(-a), None


ROWS = {
    "ppo": ppo_row,
    "gspo": gspo_row,
    "cispo": cispo_row,
    "geo_mean": geo_mean_row,
    "sapo": sapo_row,
    "reinforce": reinforce_row,
}


@st.composite
def batches(draw, dtype: torch.dtype = FLOAT) -> tuple[Batch, dict[str, Ragged]]:
    """Rows with holes in the mask, rows without a valid token, empty rows; the engine's outputs of them."""
    mask = Ragged.from_rows(draw(st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=6)), torch.bool)
    return made(mask, draw(st.integers(0, 9999)), dtype)


def totals_of(batch: Batch) -> Totals:
    mask: Any = batch.peek("response_mask")
    longest = float(mask.lengths.max()) if len(mask) else 0.0
    return Totals(float(mask.values.sum()), float(len(mask)), longest=longest)


def token_weights(mask: Ragged, how: str, norm: float | None) -> list[float]:
    """What one token of each row weighs in the whole loss."""
    lengths = [int(row.sum()) for row in mask.rows()]
    longest = max([len(row) for row in mask.rows()] + [1])
    return {
        "token-mean": [1 / max(sum(lengths), 1)] * len(lengths),
        "seq-mean-token-mean": [1 / len(lengths) / max(n, 1) for n in lengths],
        "seq-mean-token-sum": [1 / len(lengths)] * len(lengths),
        "seq-mean-token-sum-norm": [1 / len(lengths) / (norm or longest)] * len(lengths),
    }[how]


def rollout_row(
    old: Array, sampled: Array, new: Array, a: Array, correction: hf.algorithms.RolloutCorrection
) -> tuple[Array, dict[str, Array]]:
    d = old - sampled
    level = {"token": d, "sequence": np.full_like(d, d.sum()), "geometric": np.full_like(d, d.mean()), None: 0 * d}
    w = np.exp(np.clip(level[correction.level], -20, 20))
    shares = {}
    if correction.level and correction.mode == "truncate":
        cut = np.maximum(np.minimum(w, correction.high), correction.low or 0.0)
        shares["truncated"], w = cut != w, cut
    elif correction.level:
        shares["rejected"] = (w > correction.high) | (w < (correction.low or 1 / correction.high))
    if correction.divergence:
        kl = d**2 / 2 if correction.divergence == "k2" else np.exp(d) - 1 - d
        of = {"token": kl, "sequence": np.full_like(d, kl.mean()), "max": np.full_like(d, kl.max())}
        far = of[correction.divergence_level] > correction.divergence_limit
        shares["rejected"] = far | shares.get("rejected", False)
    if correction.negative_limit:
        shares["sequence_mask"] = (a < 0) & (np.mean(sampled - new) > correction.negative_limit)
    zero = np.logical_or.reduce([0 * d > 0, *(share for name, share in shares.items() if name != "truncated")])
    return np.where(zero, 0.0, w), shares


def oracle(name: str, batch: Batch, outputs: dict[str, Ragged], how: str, own: dict, shared: dict):
    """The loss, its gradient by log-probabilities and by entropy, and the metrics, from plain loops over rows."""
    mask: Any = batch.peek("response_mask")
    new = outputs["log_probs"].values.detach().double().numpy()
    column = {n: batch.peek(n).values.double().numpy() for n in ("old_log_probs", "log_probs", "ref_log_probs")}  # type: ignore[union-attr]
    advantages = batch.peek("advantages").values.double().numpy()  # type: ignore[union-attr]
    entropy = outputs["entropy"].values.detach().double().numpy()
    total, gradient, sums = 0.0, np.zeros(len(new)), {}
    entropy_gradient = np.zeros(len(new))
    tokens = max(int(mask.values.sum()), 1)

    def add(metric: str, values: Any) -> None:
        sums[metric] = sums.get(metric, 0.0) + float(np.sum(values)) / tokens

    for i, weight in enumerate(token_weights(mask, how, shared.get("norm"))):
        at = np.arange(int(mask.offsets[i]), int(mask.offsets[i + 1]))[mask.row(i).numpy()]
        if not len(at):
            continue
        old = column["old_log_probs"][at]
        loss, jacobian, clipped = ROWS[name](new[at], old, advantages[at], **own)
        if "rollout_correction" in shared:
            correction = shared["rollout_correction"]
            w, shares = rollout_row(old, column["log_probs"][at], new[at], advantages[at], correction)
            loss, jacobian = w * loss, w[:, None] * jacobian
            add("rollout/weight", w)
            add("rollout/weight_squared", w**2)
            for share, where in shares.items():
                add(f"rollout/{share}", where)
        total += weight * float(loss.sum())
        gradient[at] += weight * jacobian.sum(0)
        if (coef := shared.get("entropy_coef", 0.0)) != 0.0:
            total -= weight * coef * float(entropy[at].sum())
            entropy_gradient[at] -= weight * coef
            add("actor/entropy", entropy[at])
        if (coef := shared.get("kl_coef", 0.0)) != 0.0:
            d = new[at] - column["ref_log_probs"][at]
            total += weight * coef * float((np.exp(-d) - 1 + d).sum())
            gradient[at] += weight * coef * (1 - np.exp(-d))
            add("actor/kl_loss", np.exp(-d) - 1 + d)
        if clipped is not None:
            add("actor/clip_fraction", clipped)
        if name != "reinforce":
            ratio = np.exp(new[at] - old)
            add("actor/ratio", ratio)
            add("actor/ppo_kl", ratio - 1 - np.log(ratio))
    return total, gradient, entropy_gradient, {"actor/loss": total, **sums}


def run(loss: Any, batch: Batch, outputs: dict[str, Ragged], totals: Totals | None = None):
    leaves = {name: outputs[name].values.clone().requires_grad_(True) for name in loss.outputs}
    given = {name: outputs[name].with_values(leaf) for name, leaf in leaves.items()}
    reads = [name.removesuffix("?") for name in loss.reads or batch.columns]
    scalar, metrics = loss(given, batch.select(*reads), totals or totals_of(batch))
    scalar.backward()
    return float(scalar.detach()), leaves, {name: float(value) for name, value in metrics.items()}


def compare(name: str, batch: Batch, outputs: dict[str, Ragged], how: str | None, own: dict, shared: dict, atol: float):
    options = own | shared | ({} if how is None else {"aggregation": how})
    value, leaves, metrics = run(policy_loss(name, **options), batch, outputs)
    expected, gradient, of_entropy, figures = oracle(
        name, batch, outputs, how or DEFAULTS.get(name, "token-mean"), own, shared
    )
    assert value == pytest.approx(expected, rel=atol, abs=atol)
    np.testing.assert_allclose(leaves["log_probs"].grad.double(), gradient, rtol=atol, atol=atol)
    if "entropy" in leaves:
        np.testing.assert_allclose(leaves["entropy"].grad.double(), of_entropy, rtol=atol, atol=atol)
    for metric, figure in figures.items():
        assert metrics[metric] == pytest.approx(figure, rel=atol, abs=atol), metric
    if figures.keys() > {"actor/loss"}:
        assert metrics.keys() >= figures.keys()
        assert all(metrics[extra] == 0 for extra in metrics.keys() - figures.keys())


@pytest.mark.parametrize(("name", "own"), CASES, ids=IDS)
@settings(max_examples=25, deadline=None)
@given(batches(), st.sampled_from([None, *AGGREGATIONS]))
def test_each_loss_is_its_paper_s(name, own, made_batch, how):
    compare(name, *made_batch, how, own, {}, 1e-10)


@pytest.mark.parametrize(("name", "own"), CASES, ids=IDS)
def test_each_loss_in_float32(name, own):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 40, (20,), generator=generator)
    mask = Ragged.from_lengths(torch.rand(int(lengths.sum()), generator=generator) < 0.8, lengths)
    for how in AGGREGATIONS:
        compare(name, *made(mask, 5, torch.float32), how, own, {}, 1e-5)


MASKS = [
    {"divergence": kind, "divergence_limit": limit, "divergence_level": level, **also}
    for kind, limit, level, also in (
        ("k2", 0.1, "token", {}),
        ("k3", 0.1, "sequence", {"negative_limit": 0.02}),
        ("k3", 0.2, "max", {}),
        ("k2", 0.05, "sequence", {}),
    )
]


@pytest.mark.parametrize(("name", "own"), CASES, ids=IDS)
@settings(max_examples=10, deadline=None)
@given(
    batches(),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(["token", "sequence", "geometric"]),
    st.sampled_from([{}, {"high": 1.2}, {"high": 1.5, "low": 0.8}]),
    st.sampled_from(["truncate", "reject"]),
    st.sampled_from([{}, {}, {"negative_limit": 0.05}, *MASKS]),
)
def test_what_all_losses_share(name, own, made_batch, how, level, limits, mode, masks):
    correction = hf.algorithms.RolloutCorrection(level, mode=mode, **limits, **masks)
    shared = {"entropy_coef": 0.03, "kl_coef": 0.2, "rollout_correction": correction}
    if how == "seq-mean-token-sum-norm":
        shared["norm"] = 17.0
    compare(name, *made_batch, how, own, shared, 1e-10)


@pytest.mark.parametrize(("name", "own"), [*CASES, ("pretrain", {})], ids=[*IDS, "pretrain"])
def test_garbage_at_masked_tokens_stays_out_of_loss_and_gradient(name, own):
    mask = Ragged.from_rows([[True, False, True], [False, False], [False, True], []], torch.bool)
    clean, outputs = made(mask, 1)
    hidden = ~mask.values
    dirty_batch, dirty = made(mask, 1)
    garbage = torch.tensor([math.nan, math.inf, -math.inf, 500.0], dtype=FLOAT)
    for i, column in enumerate([*(dirty_batch.peek(n) for n in dirty_batch.columns), *dirty.values()]):
        if column.values.dtype == FLOAT:  # type: ignore[union-attr]
            column.values[hidden] = garbage.roll(i)[: int(hidden.sum())]  # type: ignore[union-attr]
    if name != "pretrain":
        correction = hf.algorithms.RolloutCorrection("sequence", **MASKS[1])
        own = {**own, "entropy_coef": 0.1, "kl_coef": 0.1, "rollout_correction": correction}
    expected, got = (run(policy_loss(name, **own), *given) for given in ((clean, outputs), (dirty_batch, dirty)))
    assert math.isfinite(got[0])
    assert got[0] == expected[0]
    assert got[2] == expected[2]
    for output, leaf in got[1].items():
        assert torch.equal(leaf.grad, expected[1][output].grad)
        assert torch.all(leaf.grad[hidden] == 0)


def test_the_token_form_of_gspo_has_the_gradient_of_the_sequence_objective():
    mask = Ragged.from_rows([[True] * 5, [True, False, True], [True] * 9], torch.bool)
    batch, outputs = made(mask, 0)
    per_row = torch.tensor([1.0, -0.5, 2.0], dtype=FLOAT)
    batch = batch.with_columns(advantages=mask.with_values(mask.expand(per_row)))
    _, leaves, _ = run(policy_loss("gspo", clip=0.5, clip_high=0.5), batch, outputs)
    leaf = outputs["log_probs"].values.clone().requires_grad_(True)
    objective = []
    for i in range(3):
        span = slice(int(mask.offsets[i]), int(mask.offsets[i + 1]))
        difference = (leaf[span] - batch["old_log_probs"].values[span])[mask.row(i)]
        s = difference.mean().exp()
        objective.append(torch.minimum(s * per_row[i], s.clamp(0.5, 1.5) * per_row[i]))
    (-torch.stack(objective).mean()).backward()
    torch.testing.assert_close(leaves["log_probs"].grad, leaf.grad, atol=1e-12, rtol=1e-12)


def test_ratios_far_away_stay_finite():
    mask = Ragged.from_rows([[True] * 4, [True] * 4], torch.bool)
    far = mask.with_values(torch.tensor([-300.0, 300.0, -1e4, 0.0] * 2))
    batch = Batch(
        {name: mask.with_values(torch.zeros(8)) for name in ("old_log_probs", "log_probs", "ref_log_probs")}
        | {"advantages": mask.with_values(torch.tensor([1.0, -1.0] * 4)), "response_mask": mask}
    )
    for name in ROWS:
        value, leaves, _ = run(policy_loss(name, kl_coef=0.1), batch, {"log_probs": far})
        assert math.isfinite(value), name
        assert torch.isfinite(leaves["log_probs"].grad).all(), name
    for level in ("token", "sequence", "geometric"):
        found = hf.algorithms.RolloutCorrection(level, high=math.exp(30)).weights(far, batch["log_probs"], mask)
        assert torch.isfinite(found.weight).all()


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([{"negative_limit": 0.05}, *MASKS]))
def test_masks_without_weights(made_batch, masks):
    correction = hf.algorithms.RolloutCorrection(None, **masks)
    compare("ppo", *made_batch, None, {}, {"rollout_correction": correction}, 1e-10)


def test_k3_is_kept_within_what_float32_can_say():
    far = kl_estimate(torch.tensor([-200.0, 200.0]), torch.zeros(2), "k3")
    np.testing.assert_allclose(far, [math.exp(20) - 21, math.exp(-20) + 19], rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(batches(), st.sampled_from(AGGREGATIONS), st.sampled_from([None, 0.1]))
def test_value_loss(made_batch, how, clip):
    batch, outputs = made_batch
    value, leaves, metrics = run(value_loss("value", clip=clip, aggregation=how), batch, outputs)
    mask, v = batch["response_mask"], outputs["values"].values.numpy()
    old, r = (batch["values"].values.numpy(), batch["returns"].values.numpy())
    expected, gradient = 0.0, np.zeros(len(v))
    for i, weight in enumerate(token_weights(mask, how, None)):
        for at in np.arange(int(mask.offsets[i]), int(mask.offsets[i + 1]))[mask.row(i).numpy()]:
            bounded = v[at] if clip is None else old[at] + min(max(v[at] - old[at], -clip), clip)
            plain, cut = (v[at] - r[at]) ** 2 / 2, (bounded - r[at]) ** 2 / 2
            expected += weight * max(plain, cut)
            gradient[at] = weight * (v[at] - r[at]) * (plain >= cut or bounded == v[at])
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(leaves["values"].grad, gradient, rtol=1e-9, atol=1e-12)
    assert metrics.keys() == {f"critic/{name}" for name in ("loss", "clip_fraction", "squared_error")}


def test_sums_are_divided_by_a_norm():
    mask = Ragged.from_rows([[True, True, False], [True]], torch.bool)
    ones = torch.ones(4)
    known, unknown = Totals(3.0, 2.0, longest=3.0), Totals(3.0, 2.0)
    how = "seq-mean-token-sum-norm"
    assert float(TokenWeights(mask, known).reduce(ones, how)) == pytest.approx(1.5 / 3)
    assert float(TokenWeights(mask, unknown).reduce(ones, how, norm=50.0)) == pytest.approx(1.5 / 50)
    with pytest.raises(ConfigError, match="needs norm="):
        TokenWeights(mask, unknown).reduce(ones, how)
    with pytest.raises(ConfigError, match=r"norm=50\.0 is of aggregation='seq-mean-token-sum-norm'"):
        policy_loss("ppo", norm=50.0)


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        ("gsp0", {}, "Did you mean 'gspo'"),
        ("ppo", {"clip": 0.0}, r"PPO\(clip=0.0\): must be a finite number above 0"),
        ("ppo", {"clip": True}, r"clip=True\): must be"),
        ("ppo", {"clip": math.nan}, r"clip=nan\): must be"),
        ("ppo", {"dual_clip": 1.0}, r"dual_clip=1.0\): must be a finite number above 1 or None"),
        ("gspo", {"clip_high": -1e-4}, r"clip_high=-0.0001\): must be"),
        ("gspo", {"dual_clip": 3.0}, "GSPO has no setting 'dual_clip'"),
        ("sapo", {"tau_neg": 0}, r"tau_neg=0\): must be a finite number above 0"),
        ("cispo", {"entropy_cof": 0.2}, "Did you mean 'entropy_coef'"),
        ("geo_mean", {"entropy_coef": math.inf}, r"entropy_coef=inf\): must be a finite number"),
        ("reinforce", {"kl": "k4"}, "kl='k4'.*'k3'"),
        ("ppo", {"kl": "k1", "kl_coef": 0.1}, r"PPO\(kl='k1'\).*expected gradient .* is 0. Use kl='k2'"),
        ("reinforce", {"aggregation": "token"}, "Did you mean 'token-mean'"),
        ("ppo", {"rollout_correction": "tokens"}, "level='tokens'.*Did you mean 'token'"),
        ("ppo", {"rollout_correction": 2.0}, "give 'token', 'sequence', 'geometric'"),
        ("pretrain", {"kl_coef": 0.1}, "PretrainLoss has no setting 'kl_coef'"),
        ("pretrain", {"coef": math.nan}, r"coef=nan\): must be a finite number"),
    ],
)
def test_bad_options_are_refused_by_name(loss, options, message):
    with pytest.raises(ConfigError, match=message):
        policy_loss(loss, **options)


def test_bad_value_loss_and_rollout_settings_are_refused():
    for call, message in (
        (lambda: value_loss("value", clip=-1.0), r"clip=-1.0\): must be a finite number above 0"),
        (lambda: value_loss("value", clp=0.1), "Did you mean 'clip'"),
        (lambda: value_loss("ppo"), "value loss 'ppo' is unknown"),
        (lambda: hf.algorithms.RolloutCorrection(mode="drop"), "mode='drop'"),
        (lambda: hf.algorithms.RolloutCorrection(high=0.0), r"high=0.0\): must be"),
        (lambda: hf.algorithms.RolloutCorrection(low=3.0), "from 3 to 2: the lower limit must be below"),
        (lambda: hf.algorithms.RolloutCorrection(mode="reject", high=0.9), "from 1.11111 to 0.9"),
        (lambda: hf.algorithms.RolloutCorrection(divergence="k3"), "divergence_limit=None.: give both"),
        (lambda: hf.algorithms.RolloutCorrection(divergence_limit=0.1), "divergence=None.*: give both"),
        (lambda: hf.algorithms.RolloutCorrection(divergence="k1", divergence_limit=0.1), "divergence='k1'. is unknown"),
        (lambda: hf.algorithms.RolloutCorrection(negative_limit=0), "negative_limit=0.: must be"),
        (lambda: hf.algorithms.RolloutCorrection(None), "corrects nothing"),
        (lambda: hf.algorithms.RolloutCorrection(None, high=3.0, negative_limit=0.1), "level=None. has no weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_losses_say_what_they_read():
    assert policy_loss("reinforce").reads == ("advantages", "response_mask")
    assert policy_loss("reinforce", rollout_correction="token").reads == (
        *("advantages", "response_mask", "old_log_probs", "log_probs"),
    )
    negative = hf.algorithms.RolloutCorrection(None, negative_limit=0.1)
    assert policy_loss("reinforce", rollout_correction=negative).reads == ("advantages", "response_mask", "log_probs")
    for name in ("ppo", "gspo", "cispo", "geo_mean", "sapo"):
        loss = policy_loss(
            name, kl_coef=0.1, entropy_coef=0.1, rollout_correction=hf.algorithms.RolloutCorrection("sequence")
        )
        assert loss.reads == ("old_log_probs", "advantages", "response_mask", "ref_log_probs", "log_probs")
        assert loss.outputs == ("log_probs", "entropy")
        assert set(loss.per_token) == set(loss.reads)
        again = pickle.loads(pickle.dumps(loss))
        batch, outputs = made(Ragged.from_rows([[True, False], [True]], torch.bool), 0)
        assert run(again, batch, outputs)[0] == run(loss, batch, outputs)[0]


MASK = Ragged.from_rows([[True, False, True], [True], []], torch.bool)


def test_a_loss_of_one_s_own_per_token_is_used_like_a_named_one():
    def clipped(log_probs, old_log_probs, advantages, mask, *, clip=0.2):
        ratio = (log_probs.values - old_log_probs.values).exp()
        assert torch.all(advantages.values[~mask.values] == 0)
        return -torch.minimum(ratio * advantages.values, ratio.clamp(1 - clip, 1 + clip) * advantages.values)

    batch, outputs = made(MASK, 4)
    options = {"clip": 0.1, "kl_coef": 0.1, "entropy_coef": 0.1, "rollout_correction": "sequence"}
    for how in ({}, {"aggregation": "seq-mean-token-sum-norm", "norm": 7.0}):
        mine, named = (policy_loss(loss, **options, **how) for loss in (clipped, "ppo"))
        assert (mine.reads, mine.outputs, mine.per_token) == (named.reads, named.outputs, named.per_token)
        sent = pickle.loads(cloudpickle.dumps(mine))  # as a call carries it
        found, expected = run(sent, batch, outputs), run(named, batch, outputs)
        assert found[0] == expected[0]
        assert torch.equal(found[1]["log_probs"].grad, expected[1]["log_probs"].grad)
        assert found[2] == {key: expected[2][key] for key in expected[2] if key != "actor/clip_fraction"}


def test_a_loss_of_one_s_own_reads_what_its_parameters_name():
    def by_entropy(log_probs, entropy, advantages, difficulty, *, power):
        hard = log_probs.expand(difficulty)
        loss = -(entropy.values**power) * hard * advantages.values * log_probs.values
        return TokenLoss(log_probs.with_values(loss).values, clipped=torch.zeros_like(loss))

    by_entropy.aggregation = "seq-mean-token-mean"
    loss = policy_loss(by_entropy, power=2.0)
    assert loss.reads == ("advantages", "difficulty", "response_mask")
    assert loss.outputs == ("log_probs", "entropy")
    assert loss.per_token == ("advantages", "response_mask")
    batch, outputs = made(MASK, 4)
    batch = batch.with_columns(difficulty=torch.tensor([1.0, 2.0, 3.0], dtype=FLOAT))
    value, _, metrics = run(loss, batch, outputs)
    new, entropy, a = (x.values for x in (outputs["log_probs"], outputs["entropy"], batch["advantages"]))
    each = -(entropy**2) * a * new
    assert value == pytest.approx(float((each[0] + each[2]) / 2 + 2 * each[3]) / 3)
    assert metrics.keys() == {"actor/loss", "actor/clip_fraction"}


def test_a_loss_of_one_s_own_may_return_ragged():
    def plain(log_probs, advantages):
        return log_probs.with_values(-advantages.values * log_probs.values)

    batch, outputs = made(MASK, 4)
    assert run(policy_loss(plain), batch, outputs)[0] == run(policy_loss("reinforce"), batch, outputs)[0]


def test_losses_of_one_s_own_that_are_wrong_say_so():
    def scalar(log_probs, mask):
        return log_probs.values.mean()

    def nothing(log_probs, mask):
        return None

    def needs(log_probs, mask, *, power):
        return power * log_probs.values

    def clashes(log_probs, mask, *, kl_coef=0.1):
        return log_probs.values

    def unaggregated(log_probs, mask):
        return log_probs.values

    unaggregated.aggregation = "mean"
    batch, outputs = made(MASK, 4)
    with pytest.raises(BatchError, match=r"policy loss 'scalar' is a tensor \[\], it must be one value per response"):
        run(policy_loss(scalar), batch, outputs)
    with pytest.raises(BatchError, match="'nothing' is NoneType"):
        run(policy_loss(nothing), batch, outputs)
    for make, message in (
        (lambda: policy_loss(needs), "'needs' needs the option 'power'"),
        (lambda: policy_loss(needs, powr=2), "Did you mean 'power'"),
        (lambda: policy_loss(clashes), "has a parameter 'kl_coef', which every policy loss has"),
        (lambda: policy_loss(unaggregated), "loss aggregation 'mean' is unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


def test_a_whole_loss_of_one_s_own_may_return_the_scalar_alone():
    batch, outputs = made(MASK, 4)

    def alone(outputs, rows, totals, *, weight=1.0):
        return weight * outputs["log_probs"].values.sum() / totals.tokens

    def with_numbers(outputs, rows, totals):
        return outputs["log_probs"].values.sum() / totals.tokens, {"mine": 2.0}

    assert policy_loss(alone, weight=2.0).reads is None
    with pytest.raises(ConfigError, match="Did you mean 'weight'"):
        policy_loss(alone, wight=1.0)
    assert run(policy_loss(alone), batch, outputs)[2] == {}
    assert run(policy_loss(with_numbers), batch, outputs)[2] == {"mine": 2.0}

    def per_token(outputs, rows, totals):
        return outputs["log_probs"].values

    with pytest.raises(BatchError, match=r"loss 'per_token' gave a tensor \[4\]"):
        run(policy_loss(per_token), batch, outputs)


def test_expected_gradients_of_kl_estimators_as_losses():
    """Exact expectations over a vocabulary of five: what the docstring of PolicyLoss says of each estimator."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1, -0.4], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([1.0, 0.2, -0.7, 0.0, 0.4], dtype=torch.float64).log_softmax(0)

    def gradient(scalar: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(scalar, logits)[0]

    def expected_gradient(kind: str) -> torch.Tensor:
        log_probs = logits.log_softmax(0)
        return gradient((log_probs.detach().exp() * kl_estimate(log_probs, reference, kind)).sum())

    log_probs = logits.log_softmax(0)
    forward = gradient((log_probs.exp() * (log_probs - reference)).sum())
    backward = gradient((reference.exp() * (reference - logits.log_softmax(0))).sum())
    assert expected_gradient("k1").abs().max() < 1e-12
    assert torch.allclose(expected_gradient("k2"), forward)
    assert torch.allclose(expected_gradient("k3"), backward)
    assert not torch.allclose(expected_gradient("abs"), forward)

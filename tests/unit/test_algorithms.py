"""Estimators and losses against float64 oracles written with plain Python loops, on random ragged masked batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.gae import gae, rewards_to_go
from hybridflow.algorithms.kl import AdaptiveKL, FixedKL, KLState, kl_estimate, penalise
from hybridflow.algorithms.ppo import ppo_terms
from hybridflow.algorithms.pretrain import negative_log_likelihood
from hybridflow.algorithms.reinforce import reinforce
from hybridflow.algorithms.remax import remax
from hybridflow.algorithms.value_loss import value_terms
from hybridflow.algorithms.whitening import whiten
from hybridflow.errors import ConfigError
from hybridflow.ragged import Ragged

FLOAT = torch.float64


@st.composite
def masks(draw) -> Ragged:
    """Ragged bool: empty rows, rows without a valid token and holes in the middle included."""
    rows = draw(st.lists(st.lists(st.booleans(), max_size=9), min_size=1, max_size=7))
    return Ragged.from_rows(rows, dtype=torch.bool)


def numbers(mask: Ragged, seed: int, scale: float = 1.0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return mask.with_values(scale * torch.randn(len(mask.values), generator=generator, dtype=FLOAT))


def gae_oracle(rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float):
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            next_advantage = advantages[t] = delta + gamma * lam * next_advantage
            returns[t] = advantages[t] + values[t]
            next_value = values[t]
    return advantages, returns


@given(masks(), st.integers(0, 999), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.95, 1.0]))
def test_gae_is_the_recursion_over_valid_tokens(mask, seed, gamma, lam):
    rewards, values = numbers(mask, seed), numbers(mask, seed + 1)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    for i in range(len(mask)):
        expected = gae_oracle(rewards.row(i).tolist(), values.row(i).tolist(), mask.row(i).tolist(), gamma, lam)
        np.testing.assert_allclose(advantages.row(i), expected[0], atol=1e-12)
        np.testing.assert_allclose(returns.row(i), expected[1], atol=1e-12)
    assert torch.all(advantages.values[~mask.values] == 0)
    assert torch.all(returns.values[~mask.values] == 0)


def test_gae_ignores_what_stands_at_masked_tokens():
    mask = Ragged.from_rows([[True, False, True], [False], [True]], dtype=torch.bool)
    clean, dirty = numbers(mask, 0), numbers(mask, 0)
    dirty.values[~mask.values] = math.nan
    for a, b in zip(gae(clean, clean, mask), gae(dirty, dirty, mask)):
        assert torch.equal(a.values, b.values)


def test_gae_in_float32_is_close_to_float64_on_long_rows():
    lengths = torch.randint(500, 1025, (64,), generator=torch.Generator().manual_seed(0))
    mask = Ragged.from_lengths(torch.ones(int(lengths.sum()), dtype=torch.bool), lengths)
    rewards, values = numbers(mask, 1), numbers(mask, 2)
    exact, _ = gae(rewards, values, mask)
    single, _ = gae(rewards.to(torch.float32), values.to(torch.float32), mask)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.values.to(FLOAT), exact.values, atol=1e-4, rtol=1e-4)


@given(masks(), st.integers(0, 999), st.booleans())
def test_whitening_is_over_the_valid_tokens_of_all_rows(mask, seed, shift):
    values = numbers(mask, seed, 3.0)
    white = whiten(values, mask, shift_mean=shift)
    kept = values.values[mask.values].numpy()
    if len(kept):
        variance = kept.var(ddof=1) if len(kept) > 1 else 0.0
        expected = (kept - kept.mean()) / np.sqrt(variance + 1e-8) + (0.0 if shift else kept.mean())
        np.testing.assert_allclose(white.values[mask.values], expected, atol=1e-9)
    assert torch.all(white.values[~mask.values] == 0)


@given(masks(), st.integers(0, 999))
def test_kl_estimators_and_penalty(mask, seed):
    policy, reference, rewards = numbers(mask, seed), numbers(mask, seed + 1), numbers(mask, seed + 2)
    d = (policy.values - reference.values).numpy()
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "abs": np.abs(d)}
    for kind, oracle in expected.items():
        np.testing.assert_allclose(kl_estimate(policy.values, reference.values, kind), oracle, atol=1e-12)
    penalised = penalise(rewards, policy, reference, mask, 0.3, "k2")
    oracle = np.where(mask.values, rewards.values.numpy() - 0.3 * d**2 / 2, 0.0)
    np.testing.assert_allclose(penalised.values, oracle, atol=1e-12)


def test_kl_estimates_average_to_the_divergence():
    generator = torch.Generator().manual_seed(0)
    policy = torch.randn(8, generator=generator, dtype=FLOAT).log_softmax(0)
    reference = torch.randn(8, generator=generator, dtype=FLOAT).log_softmax(0)
    exact = (policy.exp() * (policy - reference)).sum()
    for kind in ("k1", "k3"):
        assert torch.allclose((policy.exp() * kl_estimate(policy, reference, kind)).sum(), exact)


def test_unknown_kl_estimator_names_the_nearest():
    with pytest.raises(ConfigError, match="KL estimator 'k33' is unknown"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k33")


def test_adaptive_kl_steers_towards_its_target():
    state = KLState(AdaptiveKL(init=0.1, target=6.0, horizon=1000))
    assert state.coef == 0.1
    assert state.update(measured=6.6, rows=100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    before = state.coef
    assert state.update(measured=60.0, rows=100) == pytest.approx(before * 1.02)  # the error is clipped to 0.2
    assert state.update(measured=0.0, rows=100) == pytest.approx(before * 1.02 * 0.98)
    assert state.update(measured=math.nan, rows=100) == pytest.approx(before * 1.02 * 0.98)
    assert state.update(measured=0.0, rows=10_000_000) == 0.0
    fixed = KLState(FixedKL(0.05))
    assert fixed.update(100.0, 1000) == 0.05


def test_kl_rules_check_their_numbers():
    for make in (lambda: FixedKL(-0.1), lambda: FixedKL(math.nan), lambda: AdaptiveKL(0.1, 0.0, 100)):
        with pytest.raises(ConfigError, match="must be a finite number"):
            make()


@settings(max_examples=60)
@given(
    st.integers(1, 30),
    st.integers(0, 999),
    st.sampled_from([(0.2, None), (0.2, 0.28)]),
    st.sampled_from([None, 1.5, 3.0]),
)
def test_ppo_terms(n, seed, clips, dual):
    generator = torch.Generator().manual_seed(seed)
    new, old, advantages = torch.randn(3, n, generator=generator, dtype=FLOAT)
    mask = torch.rand(n, generator=generator) < 0.7
    new.requires_grad_(True)
    terms = ppo_terms(new, old, advantages, mask, clip=clips[0], clip_high=clips[1], dual_clip=dual)
    terms.loss.sum().backward()
    low, high = clips[0], clips[0] if clips[1] is None else clips[1]
    for i in range(n):
        ratio, a = math.exp(float(new[i].detach() - old[i])), float(advantages[i])
        objective = min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        objective = max(objective, dual * a) if dual is not None and a < 0 else objective
        flows = mask[i] and objective == pytest.approx(ratio * a)
        assert float(terms.loss[i].detach()) == pytest.approx(-objective if mask[i] else 0.0)
        assert float(new.grad[i]) == pytest.approx(-ratio * a if flows else 0.0)
        assert float(terms.clipped[i]) == float(bool(mask[i]) and not flows)
        assert float(terms.kl[i]) == pytest.approx(ratio - 1 - math.log(ratio) if mask[i] else 0.0)


def test_ppo_keeps_garbage_at_masked_tokens_out_of_loss_and_gradient():
    new = torch.tensor([0.0, math.inf, math.nan, 500.0], requires_grad=True)
    old = torch.tensor([0.0, -math.inf, 0.0, 0.0])
    advantages = torch.tensor([1.0, math.nan, 1.0, -1.0])
    terms = ppo_terms(new, old, advantages, torch.tensor([True, False, False, True]))
    terms.loss.sum().backward()
    assert torch.equal(terms.loss[1:3], torch.zeros(2))
    assert torch.isfinite(terms.loss).all()
    assert torch.isfinite(new.grad).all()


@settings(max_examples=60)
@given(st.integers(1, 30), st.integers(0, 999), st.sampled_from([None, 0.2, 5.0]))
def test_value_terms(n, seed, clip):
    generator = torch.Generator().manual_seed(seed)
    values, old, returns = torch.randn(3, n, generator=generator, dtype=FLOAT)
    mask = torch.rand(n, generator=generator) < 0.7
    values.requires_grad_(True)
    terms = value_terms(values, old, returns, mask, clip=clip)
    terms.loss.sum().backward()
    for i in range(n):
        v, o, r = float(values[i].detach()), float(old[i]), float(returns[i])
        plain = 0.5 * (v - r) ** 2
        bounded = plain if clip is None else 0.5 * (o + min(max(v - o, -clip), clip) - r) ** 2
        assert float(terms.loss[i].detach()) == pytest.approx(max(plain, bounded) if mask[i] else 0.0)
        bit = clip is not None and abs(v - o) > clip and bounded > plain
        assert float(terms.clipped[i]) == float(bool(mask[i]) and bit)
        if not mask[i]:
            assert values.grad[i] == 0


def test_negative_log_likelihood():
    log_probs = torch.tensor([-1.0, -math.inf, -0.5])
    assert torch.equal(
        negative_log_likelihood(log_probs, torch.tensor([True, False, True])), -torch.tensor([-1, 0, -0.5])
    )


@given(masks(), st.integers(0, 999), st.sampled_from([1.0, 0.9]))
def test_remax_and_reinforce(mask, seed, gamma):
    rewards = numbers(mask, seed)
    baseline = torch.randn(len(mask), generator=torch.Generator().manual_seed(seed), dtype=FLOAT)
    advantages, returns = remax(rewards, baseline, mask, gamma=gamma)
    for i in range(len(mask)):
        valid = mask.row(i)
        kept = rewards.row(i)[valid].tolist()
        to_go = [sum(r * gamma**k for k, r in enumerate(kept[t:])) for t in range(len(kept))]
        np.testing.assert_allclose(returns.row(i)[valid], to_go, atol=1e-9)
        np.testing.assert_allclose(advantages.row(i)[valid], np.array(to_go) - float(baseline[i]), atol=1e-9)
    assert torch.all(advantages.values[~mask.values] == 0)
    plain, again = reinforce(rewards, mask, gamma=gamma)
    assert again.equal(rewards_to_go(rewards, mask, gamma))
    if bool(mask.values.any()):
        assert abs(float(plain.values[mask.values].mean())) < 1e-9

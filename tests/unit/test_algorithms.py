"""What estimators are made of: sums that keep their digits, the KL estimators, and the coefficient of their penalty."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.algorithms.gae import gae, rewards_to_go
from hybridflow.algorithms.gdpo import gdpo
from hybridflow.algorithms.gpg import gpg
from hybridflow.algorithms.group import Groups
from hybridflow.algorithms.grpo import grpo
from hybridflow.algorithms.grpo_passk import grpo_passk
from hybridflow.algorithms.kl import AdaptiveKL, FixedKL, KLState, kl_estimate, penalise
from hybridflow.algorithms.opo import opo
from hybridflow.algorithms.reinforce import reinforce
from hybridflow.algorithms.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from hybridflow.algorithms.remax import remax
from hybridflow.algorithms.rloo import rloo
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
    for make in (
        lambda: FixedKL(-0.1),
        lambda: FixedKL(math.nan),
        lambda: AdaptiveKL(0.1, 0.0, 100),
        lambda: FixedKL("a"),
    ):
        with pytest.raises(ConfigError, match="must be a finite number"):
            make()


GIVEN = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
GROUPS = Groups.of(torch.tensor([3, 1, 3, 3, 1]))
MASK = Ragged.from_rows([[True, False, True], [True], [False], [True, True], []], dtype=torch.bool)
PER_TOKEN = {
    "gae": lambda x: gae(x, x, MASK, gamma=0.5, lam=0.5)[0],
    "rewards_to_go": lambda x: rewards_to_go(x, MASK, 0.5),
    "whiten": lambda x: whiten(x, MASK),
    "remax": lambda x: remax(x, torch.full((5,), 0.25), MASK, gamma=0.5)[0],
    "reinforce": lambda x: reinforce(x, MASK, gamma=0.5)[0],
    "reinforce_plus_plus": lambda x: reinforce_plus_plus(x, MASK, gamma=0.5)[0],
    "penalise": lambda x: penalise(x, x, x.map(torch.zeros_like), MASK, 0.25, "k2"),
}
PER_ROW = {
    "grpo": lambda x: grpo(x, GROUPS),
    "rloo": lambda x: rloo(x, GROUPS),
    "opo": lambda x: opo(x, GROUPS, torch.tensor([2, 1, 1, 2, 3])),
    "gpg": lambda x: gpg(x, GROUPS),
    "grpo_passk": lambda x: grpo_passk(x, GROUPS, k=2),
    "gdpo": lambda x: gdpo([x, x.flip(0)], GROUPS, MASK).values,
    "reinforce_plus_plus_baseline": lambda x: reinforce_plus_plus_baseline(x, GROUPS, MASK).values,
}


@pytest.mark.parametrize("dtype", GIVEN, ids=str)
@pytest.mark.parametrize("name", [*PER_TOKEN, *PER_ROW])
def test_results_are_float32_or_better_whatever_the_inputs_are(name, dtype):
    """Integers and half precision, which the inputs may be, would round what comes out."""
    if name in PER_TOKEN:
        exact = MASK.with_values(torch.tensor([1, 50, 2, -3, 7, 4, -1], dtype=FLOAT))
        found, expected = (PER_TOKEN[name](exact.to(t)).values for t in (dtype, FLOAT))
    else:
        exact = torch.tensor([101, 103, 100, 104, 101], dtype=FLOAT)
        found, expected = (PER_ROW[name](exact.to(t)) for t in (dtype, FLOAT))
    assert expected.dtype == FLOAT
    assert found.dtype == (FLOAT if dtype == FLOAT else torch.float32)
    torch.testing.assert_close(found.to(FLOAT), expected, atol=1e-6, rtol=1e-6)
    assert bool((expected != expected.round()).any())  # or nothing could have been lost


def test_float32_rewards_close_to_each_other_keep_their_digits():
    """As an intermediate result float32 would lose what whitening magnifies."""
    lengths = [7] * 50
    mask = Ragged.from_lengths(torch.ones(350, dtype=torch.bool), lengths)
    rewards = mask.with_values(14 + 1e-4 * torch.randn(350, generator=torch.Generator().manual_seed(1)))
    to_go = rewards.values.numpy().astype(np.float64).reshape(50, 7)[:, ::-1].cumsum(1)[:, ::-1]
    found, _ = remax(rewards, torch.full((50,), 98.0), mask)
    np.testing.assert_allclose(found.values.reshape(50, 7), to_go - 98, atol=1e-5)
    to_go = to_go - to_go.mean()
    found, _ = reinforce_plus_plus(rewards, mask)
    np.testing.assert_allclose(found.values.reshape(50, 7), to_go / np.sqrt(to_go.var(ddof=1) + 1e-8), atol=1e-6)
    found, _ = reinforce(rewards, mask)
    np.testing.assert_allclose(found.values.reshape(50, 7), to_go, atol=1e-5)


def test_whitening_keeps_its_digits_far_from_zero():
    values = 1e4 + 1e-2 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    mask = Ragged.from_lengths(torch.ones(1000, dtype=torch.bool), [1000])
    kept = values.numpy().astype(np.float64)
    found = whiten(mask.with_values(values), mask).values
    np.testing.assert_allclose(found, (kept - kept.mean()) / kept.std(ddof=1), atol=1e-3)

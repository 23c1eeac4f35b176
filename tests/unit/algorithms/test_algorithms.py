"""What estimators are made of: sums that keep their digits, the KL estimators, and the coefficient of their penalty."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms import (
    GDPO,
    GPG,
    GRPO,
    OPO,
    RLOO,
    AdaptiveKL,
    GRPOPassK,
    Reinforce,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    ReMax,
)
from hybridflow.algorithms.advantages.gae import gae
from hybridflow.algorithms.advantages.token_rewards import rewards_to_go
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.masked import whiten
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import ConfigError

FLOAT = torch.float64


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5), max_size=9))
def test_kl_estimators(differences):
    d = np.array(differences)
    expected = {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d, "abs": np.abs(d)}
    for kind, oracle in expected.items():
        found = kl_estimate(torch.tensor(d) - 1, torch.full((len(d),), -1.0, dtype=FLOAT), kind)
        np.testing.assert_allclose(found, oracle, atol=1e-12)


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
    kl = AdaptiveKL(init=0.1, target=6.0, horizon=1000)
    assert kl.state == 0.1
    assert kl.update(measured=6.6, rows=100) == pytest.approx(0.1 * (1 + 0.1 * 100 / 1000))
    before = kl.state
    assert kl.update(measured=60.0, rows=100) == pytest.approx(before * 1.02)  # the error is clipped to 0.2
    assert kl.update(measured=0.0, rows=100) == pytest.approx(before * 1.02 * 0.98)
    assert kl.update(measured=math.nan, rows=100) == pytest.approx(before * 1.02 * 0.98)
    assert kl.update(measured=0.0, rows=10_000_000) == 0.0
    for numbers in ((0.1, 0.0, 100), (-0.1, 1, 100), (0.1, math.nan, 100), (0.1, 1, "a")):
        with pytest.raises(ConfigError, match="must be a finite number"):
            AdaptiveKL(*numbers)


GIVEN = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
MASK = Ragged.from_rows([[True, False, True], [True], [False], [True, True], []], dtype=torch.bool)
COLUMNS = {"response_mask": MASK, "group_id": torch.tensor([3, 3, 3, 3, 1]), "baseline": torch.full((5,), 0.25)}
ESTIMATORS = [
    *(ReMax(gamma=0.5), Reinforce(gamma=0.5), ReinforcePlusPlus(gamma=0.5), ReinforcePlusPlusBaseline()),
    *(GRPO(), RLOO(), OPO(), GPG(), GRPOPassK(k=2), GDPO(components=["a", "b"])),
]


@pytest.mark.parametrize("dtype", GIVEN, ids=str)
def test_results_are_float64_whatever_the_inputs_are(dtype):
    """Integers and half precision, which the inputs may be, would round what comes out."""
    exact = torch.tensor([1, 50, 3, -3, 7, 4, -6], dtype=FLOAT)

    def results(given: torch.dtype) -> dict[str, Ragged]:
        x = MASK.with_values(exact.to(given))
        scores = torch.tensor([101, 103, 100, 104, 101]).to(given)
        batch = Batch({**COLUMNS, "rewards/a": scores, "rewards/b": scores.flip(0)})
        own = {
            "gae": gae(x, x, MASK, gamma=0.5, lam=0.5)[0],
            "to_go": rewards_to_go(x, MASK, 0.5),
            "whiten": whiten(x, MASK),
        }
        return own | {estimator.name: estimator(x, batch)[0] for estimator in ESTIMATORS}

    for (name, found), expected in zip(results(dtype).items(), results(FLOAT).values(), strict=True):
        assert found.dtype == FLOAT, name
        torch.testing.assert_close(found.values, expected.values, atol=1e-6, rtol=1e-6)
        assert bool((expected.values != expected.values.round()).any()), name  # or nothing could have been lost


def test_float32_rewards_close_to_each_other_keep_their_digits():
    """As an intermediate result float32 would lose what whitening magnifies."""
    lengths = [7] * 50
    mask = Ragged.from_lengths(torch.ones(350, dtype=torch.bool), lengths)
    rewards = mask.with_values(14 + 1e-4 * torch.randn(350, generator=torch.Generator().manual_seed(1)))
    to_go = rewards.values.numpy().astype(np.float64).reshape(50, 7)[:, ::-1].cumsum(1)[:, ::-1]
    batch = Batch({"response_mask": mask, "baseline": torch.full((50,), 98.0)})
    found, _ = ReMax()(rewards, batch)
    np.testing.assert_allclose(found.values.reshape(50, 7), to_go - 98, atol=1e-5)
    to_go = to_go - to_go.mean()
    found, _ = ReinforcePlusPlus()(rewards, batch)
    np.testing.assert_allclose(found.values.reshape(50, 7), to_go / np.sqrt(to_go.var(ddof=1) + 1e-8), atol=1e-6)
    found, _ = Reinforce()(rewards, batch)
    np.testing.assert_allclose(found.values.reshape(50, 7), to_go, atol=1e-5)


def test_whitening_keeps_its_digits_far_from_zero():
    values = 1e4 + 1e-2 * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    mask = Ragged.from_lengths(torch.ones(1000, dtype=torch.bool), [1000])
    kept = values.numpy().astype(np.float64)
    found = whiten(mask.with_values(values), mask).values
    np.testing.assert_allclose(found, (kept - kept.mean()) / kept.std(ddof=1), atol=1e-3)

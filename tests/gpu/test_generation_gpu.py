"""Generation on CUDA: vLLM's GPU worker and sleep mode, one engine after the other, and engines of two devices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from tests.tiny_models import make_policy, make_prompts, response_log_probs

pytestmark = pytest.mark.gpu
GREEDY = hf.Sampling(max_tokens=6, greedy=True, ignore_eos=True)
SMALL: dict[str, Any] = {"memory_fraction": 0.2, "max_sequences": 16, "sampling": GREEDY}
NEAR = 0.05  # of log-probabilities in bfloat16


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def pool() -> Iterator[hf.ResourcePool]:
    """Two devices, with a host on each."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    hf.init()
    yield hf.ResourcePool([2])
    hf.shutdown()


def test_ranks_that_see_their_own_device_only_share_layers(pool, policy):
    """Also where vLLM's own all-reduce would ask for the devices of its peers."""
    prompts = make_prompts(4)
    rollout = hf.RolloutWorker.on(pool, model=str(policy), generate=hf.VLLM(tp=2, **SMALL))
    found = rollout.generate_sequences(prompts).get()
    rollout.close()
    exact = response_log_probs(policy, found)
    assert (found["log_probs"].values - exact.values).abs().max() < NEAR

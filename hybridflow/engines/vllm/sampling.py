"""From our `Sampling` to vLLM's parameters: one request per response, each with a seed of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hybridflow.config import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

_MASK = 2**64 - 1


def derived_seed(seed: int, index: int) -> int:
    """A seed in 0..2^63-1 for the index-th draw under `seed`: SplitMix64, so neighbours have nothing in common."""
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return (z ^ (z >> 31)) >> 1


def request_parameters(sampling: Sampling, stop_ids: Sequence[int], seeds: Sequence[int]) -> list[SamplingParams]:
    """vLLM parameters of every request, in (prompt, response) order; `stop_ids` end a response unless ignored.

    Stop tokens and stop strings stay in the response: its token ids are exactly what was sampled.
    """
    from vllm import SamplingParams

    shared = SamplingParams(
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if sampling.greedy else sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        ignore_eos=sampling.ignore_eos,
        stop_token_ids=[] if sampling.ignore_eos else list(stop_ids),
        logprobs=0,
    )
    shared.temperature = 0.0 if sampling.greedy else sampling.temperature  # vLLM's constructor refuses more than 2
    if sampling.greedy:
        return [shared] * (len(seeds) * sampling.n)
    requests = []
    for seed in seeds:
        for index in range(sampling.n):
            own = copy.copy(shared)
            own.seed = derived_seed(seed, index)
            requests.append(own)
    return requests

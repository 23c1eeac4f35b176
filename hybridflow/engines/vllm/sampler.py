"""The sampler inside vLLM's model runner: log-probabilities of the policy, then truncation, then the draw.

vLLM's own sampler takes log-probabilities either before the temperature or after top-k/top-p, where truncation has
renormalised them. Training needs the policy at its temperature over the whole vocabulary. It also needs no ranks and
no top tokens, which cost vLLM a compilation at the first step and a third of the sampling time afterwards.

Shapes: B requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, random_sample
from vllm.v1.sample.sampler import Sampler


class PolicySampler(Sampler):
    """Samples tokens with log-probabilities after temperature and before truncation."""

    def __init__(self) -> None:
        super().__init__("processed_logprobs")
        self._streams: dict[torch.Generator, Iterator[int]] = {}

    def forget(self) -> None:
        """Drop the seed streams of requests that have ended."""
        self._streams.clear()

    def sample(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: object = None
    ) -> tuple[Tensor, Tensor]:
        """`logits` [B, V] float32 -> tokens [B] int64 and log-probabilities [B, V] float32 they were drawn with."""
        del logprobs_mode_override
        if sampling_metadata.all_greedy:
            return self.greedy_sample(logits), logits.log_softmax(-1)
        temperature = sampling_metadata.temperature
        assert temperature is not None
        logits = self.apply_temperature(logits, temperature, sampling_metadata.all_random)
        logp_BV = logits.log_softmax(-1)
        kept_BV = logits
        if sampling_metadata.top_k is not None or sampling_metadata.top_p is not None:
            kept_BV = apply_top_k_top_p(logp_BV.clone(), sampling_metadata.top_k, sampling_metadata.top_p)
        return self._draw(kept_BV, sampling_metadata.generators), logp_BV

    def _draw(self, logits_BV: Tensor, generators: dict[int, torch.Generator]) -> Tensor:
        if logits_BV.device.type != "cpu":
            return random_sample(logits_BV.softmax(-1, dtype=torch.float32), generators)
        seeds, streams = [0] * len(logits_BV), self._streams
        for row, generator in generators.items():
            if (stream := streams.get(generator)) is None:
                stream = streams[generator] = _stream(generator)
            seeds[row] = next(stream)
        return torch.ops._C.fused_gumbel_argmax(logits_BV, torch.tensor(seeds))

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Of the sampled tokens [B] only: no top tokens, no ranks (zeros)."""
        del num_logprobs
        ids_B1 = token_ids.unsqueeze(-1)
        return LogprobsTensors(ids_B1.to(torch.int32), logprobs.gather(-1, ids_B1), torch.zeros_like(token_ids))


def _stream(generator: torch.Generator) -> Iterator[int]:
    """Seeds of a request's draws, made 64 at a time: one call of torch per token and row costs more than the draw."""
    while True:
        yield from torch.randint(0, 2**62, (64,), generator=generator).tolist()

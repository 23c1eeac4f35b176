"""The sampler inside vLLM's model runner: log-probabilities of the policy, then truncation, then the draw.

vLLM's own sampler takes log-probabilities either before the temperature or after top-k/top-p, where truncation has
renormalised them. Training needs the policy at its temperature over the whole vocabulary. It also needs no ranks and
no top tokens, which cost vLLM a compilation at the first step and a third of the sampling time afterwards.

A draw from given logits depends on the row's seed and the position of the token in its response only: not on the rows
beside it, on where it is drawn, or on how often the row was interrupted. On CUDA the logits depend on the
rows beside it, to rounding.

Shapes: B requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import _SAMPLING_EPS, Sampler

from hybridflow.engines.contract import draw_seeds
from hybridflow.engines.vllm.engine_loop import LogitEdits


class PolicySampler(Sampler):
    """Samples tokens with log-probabilities after temperature and before truncation.

    `streams` holds, for every request in vLLM's scheduler, the seed of its row and the tokens of the row's prompt.
    `runner` is vLLM's model runner, whose batch says which request and how many tokens each row of logits has. Ids from
    `known` on are never sampled (None: all may be): a vocabulary is often padded beyond its tokenizer. Neither are
    `never`, tokens of images, which only prompts have. `edits` holds what else changes the draws of a request. Like
    truncation, none of these changes log-probabilities.
    """

    def __init__(self, runner: Any, never: Sequence[int] = ()) -> None:
        super().__init__("processed_logprobs")
        self._runner, self._never = runner, list(never)
        self.streams: dict[str, tuple[int, int]] = {}
        self.known: int | None = None
        self.edits: dict[str, LogitEdits] = {}
        self._ids: dict[str, NDArray[np.int32]] = {}  # of requests whose edits read them, with room for more

    def forget(self, name: str) -> None:
        """The request has left vLLM's scheduler."""
        for known in (self.streams, self.edits, self._ids):
            known.pop(name, None)

    def sample(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, logprobs_mode_override: object = None
    ) -> tuple[Tensor, Tensor]:
        """`logits` [B, V] float32 -> tokens [B] int64 and log-probabilities [B, V] float32 they were drawn with."""
        del logprobs_mode_override
        edited = self._edits(len(logits))
        rows = torch.tensor([row for row, edits in edited if edits.changes], device=logits.device, dtype=torch.int64)
        own_EV = self._edited(logits[rows], edited) if len(rows) else None
        if sampling_metadata.all_greedy:
            logp_BV = logits.log_softmax(-1)
            if own_EV is not None:
                logits[rows] = own_EV
            return self._noted(self.greedy_sample(self._sampled(logits)), edited), logp_BV
        temperature = sampling_metadata.temperature
        assert temperature is not None
        logits = self.apply_temperature(logits, temperature, sampling_metadata.all_random)
        logp_BV = logits.log_softmax(-1)
        if own_EV is not None:
            logits[rows] = self.apply_temperature(own_EV, temperature[rows], sampling_metadata.all_random)
        kept_BV = self._sampled(logits)
        greedy_B = None if sampling_metadata.all_random else self.greedy_sample(kept_BV)
        for row, edits in edited:
            edits.truncate(kept_BV[row])
        if sampling_metadata.top_k is not None or sampling_metadata.top_p is not None:
            every = [row for row, _ in edited]
            own_BV, kept_BV = kept_BV[every], self._sampled(logp_BV.clone())
            kept_BV[every] = own_BV.log_softmax(-1)
            kept_BV = apply_top_k_top_p(kept_BV, sampling_metadata.top_k, sampling_metadata.top_p)
        drawn_B = gumbel_argmax(kept_BV, self._seeds(len(logits)))
        if greedy_B is not None:
            drawn_B = torch.where(temperature < _SAMPLING_EPS, greedy_B, drawn_B)
        return self._noted(drawn_B, edited), logp_BV

    def _edits(self, rows: int) -> list[tuple[int, LogitEdits]]:
        """Of the rows of logits that have some."""
        names = self._runner.input_batch.req_ids[:rows] if self.edits else ()
        return [(row, self.edits[name]) for row, name in enumerate(names) if name in self.edits]

    def _edited(self, logits: Tensor, edited: list[tuple[int, LogitEdits]]) -> Tensor:
        """`logits` [E, V] of the rows whose logits change, in place."""
        batch = self._runner.input_batch
        for logits_V, (row, edits) in zip(logits, [one for one in edited if one[1].changes], strict=True):
            name, ids = batch.req_ids[row], np.empty(0, np.int32)
            if edits.reads:
                count = int(batch.num_tokens_no_spec[row])
                if name not in self._ids:
                    self._ids[name] = batch.token_ids_cpu[row, :count].copy()
                ids = self._ids[name][:count]
            prompt = self.streams[name][1]
            edits.edit(logits_V, ids[:prompt], ids[prompt:])
        return logits

    def _noted(self, tokens: Tensor, edited: list[tuple[int, LogitEdits]]) -> Tensor:
        """`tokens` [B], of which those that the next draw depends on are read here: vLLM schedules ahead of the device,
        and its batch has -1 in their places."""
        if rows := [row for row, edits in edited if edits.reads]:
            batch = self._runner.input_batch
            for row, token in zip(rows, tokens[rows].tolist(), strict=True):
                ids, at = self._ids[batch.req_ids[row]], int(batch.num_tokens_no_spec[row])
                if at >= len(ids):
                    self._ids[batch.req_ids[row]] = ids = np.concatenate([ids, np.full(max(256, at), -1, ids.dtype)])
                ids[at] = token
        return tokens

    def _sampled(self, logits: Tensor) -> Tensor:
        """`logits` [B, V], in place, with ids that may not be sampled at minus infinity."""
        if self.known is not None and self.known < logits.shape[1]:
            logits[:, self.known :] = -torch.inf
        if self._never:
            logits[:, self._never] = -torch.inf
        return logits

    def _seeds(self, rows: int) -> Tensor:
        """[B] int64 of the next tokens."""
        batch, streams = self._runner.input_batch, self.streams
        seed_B, prompt_B = zip(*(streams[name] for name in batch.req_ids[:rows]), strict=True)
        positions_B = batch.num_tokens_no_spec[:rows].astype(np.int64) - np.array(prompt_B)
        return torch.from_numpy(draw_seeds(np.array(seed_B, np.uint64), positions_B))

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """Of the sampled tokens [B] only: no top tokens, no ranks (zeros)."""
        del num_logprobs
        ids_B1 = token_ids.unsqueeze(-1)
        return LogprobsTensors(ids_B1.to(torch.int32), logprobs.gather(-1, ids_B1), torch.zeros_like(token_ids))


def gumbel_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    """A token [B] int64 from each row of `logits` [B, V], whose noise depends on its seed [B] int64 (CPU) only."""
    if logits.device.type == "cpu":
        return torch.ops._C.fused_gumbel_argmax(logits, seeds)
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    rows = torch.arange(len(seeds), device=logits.device)
    on_device = seeds.pin_memory().to(logits.device, non_blocking=True)
    ones = torch.ones(len(seeds), device=logits.device)  # the temperature has been applied
    return gumbel_sample(logits, rows, ones, on_device, torch.zeros_like(rows), False, False)

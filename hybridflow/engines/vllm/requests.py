"""vLLM requests of rows: our `Sampling` as vLLM's parameters, stop tokens and stop strings, edits of logits.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.config import Sampling
from hybridflow.data.tokenizer import Tokenizer, end_token_ids, has_tokenizer, load_tokenizer
from hybridflow.engines.contract import Row
from hybridflow.engines.vllm.image_features import features
from hybridflow.errors import ConfigError
from hybridflow.models.images import ImageTokens

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer


class RequestMaker:
    """Makes the requests of rows for a model with the end tokens and the tokenizer of `checkpoint`, which reads
    `images` so."""

    def __init__(self, checkpoint: Path, images: ImageTokens | None = None) -> None:
        self._checkpoint, self._images = checkpoint, images
        self.stop_ids = end_token_ids(checkpoint)
        self._parameters = lru_cache(maxsize=4096)(self._new_parameters)
        self._edits = lru_cache(maxsize=64)(self._new_edits)

    def check(self, row: Row) -> None:
        """Errors: ConfigError for stop strings or bad words without a tokenizer in the checkpoint."""
        asked = "stop" if row.sampling.stop else "bad_words" if row.sampling.bad_words else ""
        if asked and not has_tokenizer(self._checkpoint):
            raise ConfigError(
                f"Sampling({asked}=...) needs a tokenizer to see text, {self._checkpoint} has none. Save one there, or "
                "use stop_token_ids= and logit_bias=."
            )

    def edits(self, sampling: Sampling) -> LogitEdits | None:
        """What the sampler does to the logits of such a row; None: nothing."""
        return self._edits(sampling) if sampling.edits else None

    def _new_edits(self, sampling: Sampling) -> LogitEdits:
        return LogitEdits.of(sampling, load_tokenizer(self._checkpoint) if sampling.bad_words else None)

    def request(self, row: Row, salt: str | None, cached: int = 0, holds: bool = False) -> EngineCoreRequest:
        """The rest of the response, after the prompt and the tokens so far; rows of another `salt` share no cache.

        `cached` tokens are in the cache of the row's name, and with `holds` that of a row that is `kept` stays.
        """
        left, ids = row.sampling.longest - len(row.token_ids), row.prompt_ids + row.token_ids
        request = _request(row.name, ids[cached:], self._parameters(row.sampling, left), salt, row.kept and holds)
        if row.images is not None and self._images is not None:
            request.mm_features = features(row.prompt_ids, row.images, self._images, salt)
        return request

    def watch(self, row: Row) -> IncrementalDetokenizer | None:
        """Finds stop strings in a response: `update(new_token_ids, False)` returns a string that was completed or None.

        It has seen the tokens so far. None for a row without stop strings.
        """
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        if not row.sampling.stop:
            return None
        asked = _request(row.name, row.prompt_ids, self._parameters(row.sampling, row.sampling.longest), None)
        watch = IncrementalDetokenizer.from_new_request(load_tokenizer(self._checkpoint).raw, asked)
        watch.update(row.token_ids, False)
        return watch

    def _new_parameters(self, sampling: Sampling, tokens: int) -> SamplingParams:
        """Parameters of a request for at most `tokens` tokens. Draws take their seeds from `PolicySampler.streams`.

        Stop tokens and stop strings stay in the response: its token ids are exactly what was sampled.
        """
        from vllm import SamplingParams

        out = SamplingParams(
            top_p=1.0 if sampling.greedy else sampling.top_p,
            top_k=0 if sampling.greedy else sampling.top_k,
            max_tokens=tokens,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,  # a stop string may be one
            ignore_eos=sampling.ignore_eos,
            stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.stop_ids)],
            logprobs=0,
        )
        out.temperature = 0.0 if sampling.greedy else sampling.temperature  # vLLM's constructor refuses more than 2
        return out


def _request(
    name: str, token_ids: list[int], parameters: SamplingParams, salt: str | None, resumable: bool = False
) -> EngineCoreRequest:
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(token_ids),
        mm_features=None,
        sampling_params=parameters,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
        resumable=resumable,
    )


@dataclass(frozen=True)
class LogitEdits:
    """Bad words, bias, penalties and min_p of a row's draws, as `sampling` asks for them, by the tokens of its prompt
    and its response; `bad_words` are its words as token ids.

    vLLM counts the tokens of a request: of a row that was interrupted, those before would be part of the prompt. Here a
    row has its own prompt, so an interruption changes no draw.
    """

    sampling: Sampling
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def reads(self) -> bool:
        """Whether they depend on the tokens so far."""
        return self.sampling.penalties or bool(self.bad_words)

    @property
    def changes(self) -> bool:
        """Whether `edit` does something."""
        return self.reads or bool(self.sampling.logit_bias)

    @classmethod
    def of(cls, sampling: Sampling, tokenizer: Tokenizer | None) -> LogitEdits:
        """A word is banned where it begins a text and, if it then has as many tokens, after a space, as in vLLM."""
        words: list[tuple[int, ...]] = []
        for word in sampling.bad_words:
            assert tokenizer is not None  # `RequestMaker.check`
            first, spaced = tokenizer.continuations([word.lstrip(), " " + word.lstrip()])
            words.append(tuple(first))
            if spaced[:1] != first[:1] and len(spaced) == len(first):
                words.append(tuple(spaced))
        return cls(sampling, tuple(words))

    def edit(self, logits_V: Tensor, prompt: NDArray[np.int32], response: NDArray[np.int32]) -> None:
        """In place, before the temperature, in vLLM's order: bad words, bias, penalties."""
        for *begun, last in self.bad_words:
            if not begun or response[len(response) - len(begun) :].tolist() == begun:
                logits_V[last] = -torch.inf
        sampling, place = self.sampling, logits_V.device
        if sampling.logit_bias:
            ids, bias = zip(*sampling.logit_bias, strict=True)
            logits_V[torch.tensor(ids, device=place)] += torch.tensor(bias, device=place)
        if sampling.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.union1d(prompt, response).astype(np.int64)).to(place)
            found, penalty = logits_V[seen], sampling.repetition_penalty
            logits_V[seen] = torch.where(found > 0, found / penalty, found * penalty)
        if sampling.frequency_penalty or sampling.presence_penalty:
            ids, counts = np.unique(response, return_counts=True)
            said = torch.from_numpy(ids.astype(np.int64)).to(place)
            amount = sampling.frequency_penalty * torch.from_numpy(counts).to(place) + sampling.presence_penalty
            logits_V[said] -= amount.to(logits_V.dtype)

    def truncate(self, logits_V: Tensor) -> None:
        """In place, after the temperature: tokens below `min_p` of the largest probability are not drawn."""
        if self.sampling.min_p:
            least = logits_V.max() + math.log(self.sampling.min_p)
            logits_V.masked_fill_(logits_V < least, -torch.inf)

"""LogitEdits: bad words, bias, penalties and min_p of a row's draws, by the tokens of its prompt and its response.

vLLM counts the tokens of a request: of a row that was interrupted, those before would be part of the prompt. Here a row
has its own prompt, so an interruption changes no draw. Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridflow.config import Sampling
from hybridflow.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class LogitEdits:
    """The edits that `sampling` asks for; `bad_words` are its words as token ids."""

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

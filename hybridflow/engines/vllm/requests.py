"""vLLM requests of rows: our `Sampling` as vLLM's parameters, stop tokens and stop strings."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from hybridflow.config import Sampling
from hybridflow.data.tokenizer import end_token_ids, has_tokenizer, load_tokenizer
from hybridflow.engines.contract import Row
from hybridflow.engines.vllm.image_features import features
from hybridflow.engines.vllm.logit_edits import LogitEdits
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

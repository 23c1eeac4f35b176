"""The engine loop: requests go to vLLM's scheduler, and its core is stepped until each of them has ended.

Also what a request is made of: our `Sampling` as vLLM's parameters, a seed for each response, stop tokens and strings.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.config import Sampling
from hybridflow.data.tokenizer import has_tokenizer, load_tokenizer
from hybridflow.engines.vllm.core import model_runner
from hybridflow.errors import ConfigError

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer


@dataclass(slots=True)
class Response:
    """A response that is being drawn; `watch` looks for stop strings."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    finished: bool = False
    watch: IncrementalDetokenizer | None = None

    def take(self, output: EngineCoreOutput) -> bool:
        """Add what one step gave; True when the response has ended."""
        self.token_ids += output.new_token_ids
        if output.new_logprobs is not None:
            self.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
        reason = output.finish_reason
        self.finished = reason is not None and str(reason) == "stop"
        if self.watch is not None and self.watch.update(output.new_token_ids, False) is not None:
            self.finished = True
        return self.finished or reason is not None


def submit(
    core: EngineCore,
    call: str,
    prompts: Sequence[Sequence[int]],
    parameters: Sequence[SamplingParams],
    watch: Callable[[EngineCoreRequest], IncrementalDetokenizer] | None = None,
) -> dict[str, Response]:
    """Hand one request per entry of `parameters` to the scheduler: equally many of each prompt, prompt by prompt.

    Returns what will become of each request by its name, in order; names begin with `call`. `watch` makes what looks
    for stop strings in a request.
    """
    from vllm.v1.engine import EngineCoreRequest

    responses: dict[str, Response] = {}
    each = len(parameters) // len(prompts)
    for index, own in enumerate(parameters):
        request = EngineCoreRequest(
            request_id=f"{call}-{index}",
            prompt_token_ids=list(prompts[index // each]),
            mm_features=None,
            sampling_params=own,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        responses[request.request_id] = Response(watch=watch(request) if watch else None)
        core.add_request(*core.preprocess_add_request(request))
    return responses


def draw(core: EngineCore, responses: Mapping[str, Response]) -> None:
    """Step vLLM until every response has ended; even after an error none stays in its scheduler."""
    live = set(responses)
    try:
        while live:
            outputs, executed = core.step_fn()
            core.post_step(executed)
            if not outputs:  # pipeline parallelism fills its queue first
                continue
            stopped = []
            for output in outputs[0].outputs:
                name = output.request_id
                if name in live and responses[name].take(output):
                    live.discard(name)
                    if output.finish_reason is None:
                        stopped.append(name)
            if stopped:
                core.abort_requests(stopped)
    finally:
        if live:
            core.abort_requests(list(live))
        model_runner(core).sampler.forget()


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
        max_tokens=sampling.longest,
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


def stop_token_ids(checkpoint: Path) -> list[int]:
    """End-of-sequence ids of `generation_config.json`, or of `config.json` where that says nothing. Ascending."""
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return sorted({found} if isinstance(found, int) else set(found))
    return []


def stop_string_watch(checkpoint: Path, request: EngineCoreRequest) -> IncrementalDetokenizer:
    """Finds stop strings in a response: its `update(new_token_ids, False)` returns the one that was completed, or None.

    Errors: ConfigError for a checkpoint without a tokenizer.
    """
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    if not has_tokenizer(checkpoint):
        raise ConfigError(
            f"Sampling(stop=...) needs a tokenizer to see text, {checkpoint} has none. Save one there, or end "
            "responses by the model's stop token."
        )
    return IncrementalDetokenizer.from_new_request(_tokenizer(checkpoint), request)


@lru_cache(maxsize=1)
def _tokenizer(checkpoint: Path) -> Any:
    return load_tokenizer(checkpoint).raw

"""Drawing responses: requests go to vLLM's scheduler, its core is stepped until each of them has ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridflow.engines.vllm.core import model_runner

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
    """Step vLLM until every response has ended; whatever happens, none is left in its scheduler."""
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

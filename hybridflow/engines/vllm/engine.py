"""VLLMEngine: one rank of a vLLM replica inside a training process (GenerateEngine; paper, section 5).

Weights are never loaded by vLLM: it starts with random ones, and whoever owns the real ones writes them through
`layout()` into `storage()`. We drive vLLM's engine core step by step and read token ids and log-probabilities from it
directly; its front end (text, streaming, statistics) is for servers.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.config import VLLM, Sampling
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.contract import Completion
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.vllm import environment
from hybridflow.engines.vllm.core import model_runner, start_core
from hybridflow.engines.vllm.groups import ReplicaGroups, in_use
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.engines.vllm.requirements import check, max_length
from hybridflow.engines.vllm.sampling import derived_seed, request_parameters
from hybridflow.engines.vllm.stopping import StopStrings, stop_token_ids
from hybridflow.errors import ConfigError, PlacementError, PromptError
from hybridflow.model_spec import ModelSpec
from hybridflow.topology import GenerationGrid

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer


@dataclass(slots=True)
class _Response:
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


class VLLMEngine:
    """One rank of a generation replica.

    `checkpoint` is a Hugging Face directory; only its `config.json`, stop tokens and tokenizer are read. Collective
    over the ranks of the replica, like every method except `layout` and `storage`.

    Errors: PlacementError when this process already has a live vLLM engine; ModelError and ConfigError of `check`.
    """

    def __init__(
        self,
        context: RankContext,
        strategy: VLLM,
        generation: GenerationGrid,
        spec: ModelSpec,
        checkpoint: str | Path,
    ) -> None:
        check(spec, strategy, context.device.type)
        if (generation.p, generation.t) != (strategy.pp, strategy.tp):
            raise PlacementError(
                f"{context.role} generates with VLLM(tp={strategy.tp}, pp={strategy.pp}), its generation grid has "
                f"t_g={generation.t}, p_g={generation.p}."
            )
        self.grid, self.strategy, self.spec = generation, strategy, spec
        self.checkpoint, self.device = Path(checkpoint), context.device
        self.max_length = max_length(spec, strategy)
        self._layout = vllm_layout(spec, generation)
        self._stop_ids = stop_token_ids(self.checkpoint)
        self._stop_strings = StopStrings(self.checkpoint)
        self._calls, self._asleep = 0, False
        environment.prepare(self.device.type)
        with environment.fence(self.device):
            if in_use():
                raise PlacementError(
                    f"{context.role}: this process already has a vLLM engine, and vLLM keeps its groups in globals, so "
                    "one at a time is the limit. Close the other one, or place this group on other devices."
                )
            self._groups = ReplicaGroups(context, generation)
            self._core: EngineCore | None = start_core(strategy, spec, self.checkpoint, self.device, self._groups)
        self._cache_sizes = [storage.nbytes() for storage in self._cache_storages()]

    def _alive(self) -> EngineCore:
        if self._core is None:
            raise PlacementError("this vLLM engine has been closed. Build a new one.")
        return self._core

    def _runner(self) -> Any:
        return model_runner(self._alive())

    def _cache_storages(self) -> list[torch.UntypedStorage]:
        storages = (cache.untyped_storage() for cache in self._runner().kv_caches)
        return list({storage._cdata: storage for storage in storages}.values())

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        names: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """`sampling.n` completions of each prompt (token ids), in order.

        Token ids are exactly what was sampled, the stop token or the tokens of a stop string included.
        Log-probabilities are those of the policy at `sampling.temperature` over the whole vocabulary, before top-k and
        top-p (greedy: at temperature 1). A response ends at `max_length` tokens of prompt plus response at the latest.
        `seeds` (one per prompt) decide what is drawn, whichever other prompts are in the call; without them
        `sampling.seed` and the row's index do, or a random number per replica and call. `names` (one per prompt) are
        what messages call the prompts (default: their positions).

        Errors: PromptError for an empty prompt, unknown token ids, or one too long; ConfigError for `stop` without
        a tokenizer in the checkpoint directory.
        """
        if not prompts:
            return []
        core = self._alive()
        if self._asleep:
            raise PlacementError("this vLLM engine sleeps and has no KV cache. Call wake() first.")
        self._check_prompts(prompts, sampling, range(len(prompts)) if names is None else names)
        seeds = self._seeds(len(prompts), sampling) if seeds is None else seeds
        if len(seeds) != len(prompts):
            raise ConfigError(f"generate got {len(seeds)} seeds for {len(prompts)} prompts. Give one per prompt.")
        self._calls += 1
        responses = self._submit(core, prompts, request_parameters(sampling, self._stop_ids, seeds), sampling)
        self._draw(core, responses)
        drawn = [Completion(r.token_ids, r.log_probs, r.finished) for r in responses.values()]
        return [drawn[i : i + sampling.n] for i in range(0, len(drawn), sampling.n)]

    def _check_prompts(self, prompts: Sequence[Sequence[int]], sampling: Sampling, names: Sequence[int]) -> None:
        needed = sampling.max_tokens if sampling.ignore_eos else 1
        for row, prompt in zip(names, prompts, strict=True):
            if not len(prompt):
                raise PromptError(f"prompt {row} is empty. Give it at least one token.")
            if len(prompt) + needed > self.max_length:
                raise PromptError(
                    f"prompt {row} has {len(prompt)} tokens and leaves no room for {needed} response tokens within "
                    f"max_length={self.max_length} (the model's context is {self.spec.context}). Shorten or filter "
                    "the prompts, or raise VLLM(max_length=...)."
                )
            if min(prompt) < 0 or max(prompt) >= self.spec.vocab:
                raise PromptError(
                    f"prompt {row} has token ids from {min(prompt)} to {max(prompt)}, the vocabulary is "
                    f"0..{self.spec.vocab - 1}. Was it made with another tokenizer?"
                )

    def _seeds(self, rows: int, sampling: Sampling) -> list[int]:
        """One per row; equal on all ranks of the replica, which sample independently."""
        base = sampling.seed
        if base is None:
            base = derived_seed(self._groups.seed, self._calls)
        return [derived_seed(base, row) for row in range(rows)]

    def _submit(
        self,
        core: EngineCore,
        prompts: Sequence[Sequence[int]],
        parameters: Sequence[SamplingParams],
        sampling: Sampling,
    ) -> dict[str, _Response]:
        """Hand one request per response to vLLM's scheduler, in (prompt, response) order."""
        from vllm.v1.engine import EngineCoreRequest

        responses: dict[str, _Response] = {}
        for index, own in enumerate(parameters):
            request = EngineCoreRequest(
                request_id=f"{self._calls}-{index}",
                prompt_token_ids=list(prompts[index // sampling.n]),
                mm_features=None,
                sampling_params=own,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            watch = self._stop_strings.watch(request) if sampling.stop else None
            responses[request.request_id] = _Response(watch=watch)
            core.add_request(*core.preprocess_add_request(request))
        return responses

    def _draw(self, core: EngineCore, responses: Mapping[str, _Response]) -> None:
        """Step vLLM until every response has ended."""
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
            self._runner().sampler.forget()

    def weights_changed(self) -> None:
        """Forget what was computed with the old weights (prefix cache)."""
        done = self._alive().reset_prefix_cache()
        assert done, "blocks of the KV cache are in use outside generate()"

    def layout(self) -> Layout:
        return self._layout

    def storage(self) -> Mapping[str, Tensor]:
        """vLLM's own parameters of this rank, by its names, detached: write in place, then `weights_changed()`."""
        return {name: parameter.data for name, parameter in self._runner().model.named_parameters()}

    def sleep(self) -> bool:
        """Release the memory of the KV cache until `wake()`; weights stay. False where it cannot be released.

        That is on CUDA, where captured graphs hold the cache's addresses: there, generating goes on to work.
        """
        if self.device.type == "cuda":
            return False
        self.weights_changed()
        for storage in self._cache_storages():
            storage.resize_(0)
        self._asleep = True
        return True

    def wake(self) -> None:
        """Allocate the KV cache again. Views of it, which vLLM holds in every layer, stay valid."""
        if self._asleep:
            for storage, size in zip(self._cache_storages(), self._cache_sizes, strict=True):
                storage.resize_(size)
                storage.fill_(0)  # pyright: ignore[reportAttributeAccessIssue]
        self._asleep = False

    def close(self) -> None:
        """Shut vLLM down and remove its shared memory. May be called twice.

        vLLM's own shutdown would destroy the whole process's torch.distributed; the parts that are its own are called
        one by one instead. Process groups stay with the context that made them.
        """
        if (core := self._core) is None:
            return
        for storage in self._cache_storages():
            storage.resize_(0)
        self._core = None
        with environment.uncollected():
            core.model_executor.shutdown()
            core.scheduler.shutdown()
            core.structured_output_manager.clear_backend()
            self._groups.remove()
        gc.unfreeze()  # vLLM freezes the heap when it starts

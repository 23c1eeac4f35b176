"""VLLMEngine: one rank of a vLLM replica inside a training process (paper, section 5).

Weights are never loaded by vLLM: it starts with random ones, and the owner of the real ones writes them through
`layout()` into `storage()`. We drive vLLM's engine core step by step and read token ids and log-probabilities from it
directly; its front end (text, streaming, statistics) is for servers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from traceback import clear_frames
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hybridflow.config import KV, VLLM, Sampling, Until
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.offloadable import Memory, Residency
from hybridflow.engine3d.transition import alike
from hybridflow.engines.contract import Row, RowSource, derived_seed
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.vllm import isolation
from hybridflow.engines.vllm.cache_image import CacheImage, CachePricing
from hybridflow.engines.vllm.core import collect, memory, model_runner, start_core, stop_core, zero_pages
from hybridflow.engines.vllm.discovery import LayoutProbe, flat_storages, flattened
from hybridflow.engines.vllm.engine_loop import MOMENT, EngineLoop, RequestMaker
from hybridflow.engines.vllm.layout import probed_layout, vllm_layout
from hybridflow.engines.vllm.requirements import check, expert_count, max_length, runs_eagerly
from hybridflow.engines.vllm.routed_experts import RoutedExperts
from hybridflow.engines.vllm.row_images import RowImages, check_prompt
from hybridflow.errors import ConfigError, HybridFlowError, LayoutError, PlacementError, PromptError
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import GenerationGrid

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore

logger = logging.getLogger(__name__)


class VLLMEngine:
    """One rank of a generation replica.

    A session: `submit` rows, `advance` them, `take` the finished ones; `generate` is the three in a row. All ranks of
    the replica make the same calls with the same rows and get the same results: every method is collective over them,
    except `layout` and `storage`, and so is building. Tokens record `policy_version`.

    `checkpoint` is a Hugging Face directory; only its `config.json`, stop tokens and tokenizer are read.

    Where graphs are captured (CUDA, unless `VLLM(eager=True)`), memory of the weights and of the KV cache comes and
    goes as a whole, through vLLM's own allocator; otherwise tensor by tensor.

    Errors: PlacementError when this process already has a live vLLM engine; ModelError and ConfigError of `check`.
    """

    def __init__(
        self,
        context: RankContext,
        strategy: VLLM,
        generation: GenerationGrid,
        spec: Decoder,
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
        probe = None if isinstance(spec, ModelSpec) else LayoutProbe(spec.tensors(), spec.family)
        self._calls, self._generated, self._eager = 0, 0, runs_eagerly(strategy, context.device.type)
        isolation.prepare(self.device.type)
        if isolation.in_use():
            raise PlacementError(
                f"{context.role}: this process already has a vLLM engine, and vLLM keeps its groups in globals, so one "
                "at a time is the limit. Close the other one, or place this group on other devices."
            )
        self._core: EngineCore | None = None
        self._model_runner: Any = None
        self._routing: RoutedExperts | None = None
        try:
            with isolation.fence(self.device), isolation.batch_invariant(self.device):
                self._groups = isolation.ReplicaGroups(context, generation)
                if strategy.return_routed_experts:
                    experts = expert_count(spec)
                    self._routing = RoutedExperts(spec.family, experts, strategy.pp, self._groups.gather)
                self._core = start_core(
                    strategy, spec, self.checkpoint, self.device, self._groups, probe, self._routing
                )
            self._model_runner = model_runner(self._core)
            self._layout = self._layout_of(probe)
            self._flat = flat_storages(self._layout.regions(context.rank))
            self._viewed = frozenset[str]() if probe is None else probe.viewed
            caches = {f"layer {i}": cache for i, cache in enumerate(self._runner().kv_caches)}
            if self._routing is not None:
                caches["routed experts"] = self._routing.buffer
            self._cache: Memory = memory(self._core, "kv_cache", caches, eager=self._eager)
            requests, keeps = RequestMaker(self.checkpoint, spec.images), strategy.kv != "recompute"
            agreed = self._groups.of_first
            runner, length = self._model_runner, self.max_length
            self._loop = EngineLoop(self._core, runner, requests, agreed, length, keeps, self._routing)
            self._image = self._new_image(caches)
        except BaseException as error:
            for one in (error, error.__context__):  # or memory stays as long as the error
                clear_frames(None if one is None else one.__traceback__)
            self._shut_down()  # or no other engine could start in this process
            raise
        self._written: object = None  # another one with other weights
        self._shared: set[str] = set()
        self._weights: Memory | None = None  # made when it is asked for

    def _new_image(self, caches: Mapping[str, Tensor]) -> CacheImage:
        """`caches` of layers, and of routed experts, which have a last slot for padding."""
        runner, grid = self._runner(), self.grid
        parts = [cache[:-1] if name == "routed experts" else cache for name, cache in caches.items()]
        pricing = None
        if self.strategy.kv == "auto":
            weights = max(self._groups.gather(sum(weight.nbytes for weight in runner.model.parameters())))
            pricing = CachePricing(self.device, runner.dtype, self.spec.cost, grid.p * grid.t, weights)
        return CacheImage(parts, runner.kv_cache_config.num_blocks, self._loop, self._groups, pricing)

    def _layout_of(self, probe: LayoutProbe | None) -> Layout:
        """Collective over the replica, whose ranks either all have a layout or all raise."""
        if probe is None:
            assert isinstance(self.spec, ModelSpec)
            return vllm_layout(self.spec, self.grid)
        found = self._groups.gather((probe.regions, probe.failure))
        return probed_layout(self.spec.tensors(), self.spec.family, self.grid, found)

    def _alive(self) -> EngineCore:
        if self._core is None:
            raise PlacementError("this vLLM engine has been closed. Build a new one.")
        return self._core

    def _runner(self) -> Any:
        return self._alive() and self._model_runner

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        names: Sequence[int] | None = None,
        images: Sequence[RowImages | None] | None = None,
    ) -> list[list[Row]]:
        """`sampling.n` finished rows of each prompt (token ids), in order; other rows of the session advance with them.

        Token ids are exactly what was sampled, the stop token or the tokens of a stop string included.
        Log-probabilities are those of the policy at `sampling.temperature` over the whole vocabulary, before top-k and
        top-p (greedy: at temperature 1). A response ends at `max_length` tokens of prompt plus response at the latest.
        `seeds` (one per prompt) decide what is drawn, whatever prompts are beside (on CUDA to rounding, unless the
        session is deterministic); without them `sampling.seed` and the row's index do, or a random number per replica
        and call. `names` (one per prompt) are what messages call the prompts (default: their positions), `images` those
        whose tokens are in them.

        Errors: PromptError for an empty prompt, unknown token ids, or one too long; ConfigError for `stop` without
        a tokenizer in the checkpoint directory.
        """
        self._check_memory()
        first, self._generated = -1 - self._generated, self._generated + len(prompts)
        row_ids = range(first, first - len(prompts), -1)  # rows of a session have ids of at least 0
        rows = self.new_rows(prompts, sampling, seeds, row_ids, images)
        self._check_rows(rows, range(len(prompts)) if names is None else names)
        own = {row.name for row in rows}
        try:
            self._loop.submit(rows)
            self._loop.run(lambda: own.isdisjoint(self._loop.rows))
        finally:
            self._loop.withdraw(own)
            finished = {row.name: row for row in self._loop.take(own)}
        drawn = [finished[row.name] for row in rows]
        return [drawn[i : i + sampling.n] for i in range(0, len(drawn), sampling.n)]

    def new_rows(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        row_ids: Sequence[int] | None = None,
        images: Sequence[RowImages | None] | None = None,
    ) -> list[Row]:
        """`sampling.n` rows without tokens per prompt; `row_ids` default to positions, `seeds` and `images` as in
        `generate`."""
        if seeds is None:  # equal on all ranks of the replica, which sample independently
            base = derived_seed(self._groups.seed, self._calls) if sampling.seed is None else sampling.seed
            seeds = [derived_seed(base, row) for row in range(len(prompts))]
        row_ids = range(len(prompts)) if row_ids is None else row_ids
        for what, given in (("seeds", seeds), ("row_ids", row_ids)):
            if len(given) != len(prompts):
                raise ConfigError(f"generate got {len(given)} {what} for {len(prompts)} prompts. Give one per prompt.")
        self._calls += 1
        rows = []
        seen = [None] * len(prompts) if images is None else images
        for row_id, prompt, seed, own in zip(row_ids, prompts, seeds, seen, strict=True):
            ids, drawn = list(prompt), [derived_seed(seed, index) for index in range(sampling.n)]
            rows += [Row(row_id, index, ids, sampling, one, images=own) for index, one in enumerate(drawn)]
        return rows

    def submit(self, rows: Sequence[Row]) -> None:
        """Take up copies of unfinished rows; those with tokens are continued. Works while the engine sleeps.

        Errors: as `generate`, and ConfigError for a row that is finished or that the engine has already; then none is
        taken up.
        """
        self._check_rows(rows)
        self._loop.submit(rows)

    def advance(self, until: Until = Until()) -> None:  # noqa: B008  a frozen value
        """Decode all unfinished rows until `until`.

        After an error all rows that are not finished can be withdrawn, with the tokens that they have.
        """
        if self._loop.rows:
            self._check_memory()
            self._loop.advance(until)

    def advance_while(self, going: Callable[[], bool]) -> None:
        """Decode all unfinished rows as long as `going()` on the replica's first rank, and for at most 50 ms more."""
        if self._loop.rows:
            self._check_memory()
            self._loop.advance_while(going if self._groups.rank == 0 else lambda: False)

    @property
    def is_first(self) -> bool:
        """Whether this is the replica's first rank, whose outputs are collected."""
        return self._groups.rank == 0

    @property
    def no_routing(self) -> Tensor | None:
        """[0, layers, k]: `routed_experts` of a row without computed tokens; None where they are not captured."""
        return None if self._routing is None else self._routing.nothing

    def serve(self, source: RowSource | None, kept: set[str] | None = None) -> int:
        """Decode the rows that `source` gives until it has no more (None on all but the replica's first rank), or, with
        `kept`, until it pauses: unfinished rows of it stay, and `kept` names them. Returns what it has under way. Other
        rows advance, too. Errors: the source's, on all ranks, and nothing is kept."""
        self._check_memory()
        own, paused = set[str]() if kept is None else kept, False
        try:
            while True:
                polled = self._polled(source, 0.0 if own else MOMENT)
                given, done, error, left = self._groups.object_of_first((*polled, source.under_way if source else 0))
                if error is not None:
                    raise error
                self._loop.drop(done)
                if given is None:
                    paused = kept is not None
                    return left
                self._loop.submit(given)
                own.update(row.name for row in given)
                if own:
                    self._loop.run(lambda: not own <= self._loop.rows.keys(), seconds=MOMENT)
                for row in self._loop.take(own):
                    own.discard(row.name)
                    if source:
                        source.finished(row)
        finally:
            if not paused:
                self.abandon(own)

    def abandon(self, names: set[str]) -> None:
        """Forget rows that `serve` has kept, finished or not, and what is kept of those that have ended."""
        self._loop.withdraw(names)
        _ = self._loop.take(names)
        self._loop.drop()
        names.clear()

    def _polled(self, source: RowSource | None, seconds: float) -> tuple[list[Row] | None, list[str], Exception | None]:
        """What the source gives that can be sampled, the names that it is done with, or what it raises."""
        out: list[Row] = []
        if source is None:
            return out, [], None
        try:
            if (found := source.poll(seconds)) is None:
                return None, source.done(), None
            for row in found:
                try:
                    self._check_rows([row])
                except PromptError as error:
                    source.refused(row, str(error), len(row.prompt_ids) + 1 > self.max_length)
                else:
                    out.append(row)
            return out, source.done(), None
        except Exception as error:  # others are of the user's programs, and may not be pickled
            known = isinstance(error, HybridFlowError)
            return None, [], error if known else RuntimeError(f"{type(error).__name__}: {error}")

    def take(self) -> list[Row]:
        """The finished rows that were not taken yet, in the order in which they finished."""
        return self._loop.take()

    def withdraw(self, names: Collection[str] | None = None) -> list[Row]:
        """The unfinished rows (with these names), in the order of `submit`. The engine forgets them."""
        found = self._loop.withdraw(names)
        if not self._loop.admitted:
            self._image.drop()
        return found

    @property
    def unfinished(self) -> list[Row]:
        """The unfinished rows as they are now, in the order of `submit`; they stay the engine's."""
        return list(self._loop.rows.values())

    @property
    def policy_version(self) -> int:
        """Version of the weights, recorded with each token; the owner may set it. -1 before the first weights."""
        return self._loop.policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._loop.policy_version = version

    def restrict(self, tokens: int) -> None:
        """Sample ids below `tokens` only, those of the tokenizer, and the stop tokens."""
        self._loop.restrict(tokens)

    def _check_memory(self) -> None:
        _ = self._alive()
        if self.asleep:
            raise PlacementError("this vLLM engine sleeps and has no KV cache. Call wake() first.")
        weights = self.memory()
        if missing := weights.total_bytes - weights.resident_bytes:
            raise PlacementError(
                f"{missing} of {weights.total_bytes} bytes of this vLLM engine's weights are released. Move the "
                "weights in before generating: HybridEngine.to_generation(), or memory().acquire() and a plan."
            )

    def _check_rows(self, rows: Sequence[Row], names: Sequence[int] | None = None) -> None:
        """`names`: of their prompts, where those are not their `row_id`s."""
        called = dict(zip(dict.fromkeys(row.row_id for row in rows), names, strict=True)) if names is not None else {}
        checked = None
        for row in rows:
            prompt, sampling, name = row.prompt_ids, row.sampling, called.get(row.row_id, row.row_id)
            if prompt is checked:  # of another response
                continue
            checked, needed = prompt, sampling.longest if sampling.ignore_eos else 1
            bias = tuple(token for token, _ in sampling.logit_bias)  # type: ignore[misc]  pairs, once it is made
            for setting, ids in (("stop_token_ids", sampling.stop_token_ids), ("logit_bias", bias)):
                if max(ids, default=0) >= self.spec.vocab:
                    raise ConfigError(f"Sampling({setting}={ids}): the vocabulary is 0..{self.spec.vocab - 1}.")
            if not prompt:
                raise PromptError(f"prompt {name} is empty. Give it at least one token.")
            if len(prompt) + needed > self.max_length:
                raise PromptError(
                    f"prompt {name} has {len(prompt)} tokens and leaves no room for {needed} response tokens within "
                    f"max_length={self.max_length} (the model's context is {self.spec.context}). Shorten or filter "
                    "the prompts, or raise VLLM(max_length=...)."
                )
            if row.images is not None or self.spec.images:
                check_prompt(name, prompt, row.images, self.spec, self.strategy.image_tokens)
            if min(prompt) < 0 or max(prompt) >= self.spec.vocab:
                raise PromptError(
                    f"prompt {name} has token ids from {min(prompt)} to {max(prompt)}, the vocabulary is "
                    f"0..{self.spec.vocab - 1}. Was it made with another tokenizer?"
                )

    def weights_changed(self, version: int | None = None) -> None:
        """Continue with the weights that have been written: `version`, by default the next number.

        The KV cache of unfinished rows stays, or is computed again (`VLLM(kv="recompute")`); that of the past is never
        shared.
        """
        _ = self._alive()
        self._written = object()
        self.memory().changed()
        self._loop.weights_changed(version)
        if not self._loop.admitted:
            self._image.drop()

    def layout(self) -> Layout:
        return self._layout

    def storage(self) -> Mapping[str, Tensor]:
        """vLLM's own parameters of this rank, by its names, detached: write in place, then `weights_changed()`.

        Those that the layout addresses element by element (turned or stacked tensors) have one dimension.
        """
        if self._weights is not None:
            self._weights.changed()
        return flattened(self._runner().model, self._flat)

    def fixed_weights(self) -> tuple[frozenset[str], Any]:
        """All canonical tensors, and a value that is another one after they were written or dropped."""
        return frozenset(self.spec.tensors()), (self._written, self.memory(), self.memory().losses)

    def memory(self) -> Memory:
        """Memory of the weights in `storage()`. Buffers (rotary caches) are no weights and always stay.

        Released weights are lost: after `acquire` they have to be written again before the next `generate`.
        """
        if self._weights is None:
            self._weights = memory(self._alive(), "weights", self.storage(), eager=self._eager, shared=self._shared)
        return self._weights

    def share(self, name: str, tensor: Tensor) -> bool:
        """Make parameter `name` use the memory of `tensor` from now on, and give its own back.

        True if done: `memory()` is then another object, which leaves `name` alone. False where captured graphs or views
        hold the old address, or shape, dtype, device or memory format differ.

        Errors: LayoutError for a name that is not in `storage()`; PlacementError while weights are released.
        """
        parameters = dict(self._runner().model.named_parameters())
        if (own := parameters.get(name)) is None:
            raise LayoutError(f"vLLM has no parameter {name!r} on this rank. It has {sorted(parameters)[:8]}, ...")
        if not self._eager or name in self._viewed or not alike(own, tensor):
            return False
        if self._weights is not None and self._weights.resident_bytes < self._weights.total_bytes:
            raise PlacementError("memory is shared while all weights have some. Call memory().acquire() before.")
        own.data = tensor.detach()
        self._shared.add(name)
        self._weights = None
        return True

    @property
    def cache_bytes(self) -> int:
        """Device memory that the KV cache has now, that of rows which wait for it included."""
        return self._cache.resident_bytes + self._image.device_bytes

    @property
    def asleep(self) -> bool:
        """Whether the KV cache has no memory."""
        return not self._cache.resident_bytes

    def copied_bytes(self) -> tuple[int, int]:
        """Bytes of the KV cache that were copied from and to host memory so far."""
        return self._image.copied_in, self._image.copied_out

    def sleep(self, kv: KV | None = None) -> None:
        """Release the memory of the KV cache until `wake()`; weights stay, see `memory()` for theirs.

        Unfinished rows stay. Their keys and values wait where `kv` says (default: that of the strategy), or the next
        `advance` computes them again.
        """
        _ = self._alive()
        if not self.asleep:
            self._image.put_away(kv or self.strategy.kv)
            self._cache.release()
            self._image.falls_asleep()

    def wake(self) -> None:
        """Allocate the KV cache again, zero, with what waits for it. Views of it, which vLLM holds in every layer, stay
        valid. Where a rank lacks memory for both, what waits is computed again.

        After an error, which all ranks of the replica raise, it sleeps as before.
        """
        if not self.asleep:
            return
        self._image.wakes_up()
        try:
            if (lacking := self._groups.attempt(self._restore)) is not None and self._image.waits:
                logger.warning("device memory lacks room for the KV cache of unfinished rows: it is computed again")
                self._cache.release()
                self._loop.rest(self._loop.admitted)
                self._image.drop()
                lacking = self._groups.attempt(self._restore)
            if lacking is not None:
                raise lacking
        except BaseException:
            self._cache.release()
            raise
        self._image.drop()

    def _restore(self) -> None:
        self._cache.acquire()
        storages = [cache.untyped_storage() for cache in self._runner().kv_caches]
        for storage in {storage.data_ptr(): storage for storage in storages}.values():  # layers may share one
            zero_pages(storage)  # a masked NaN is still a NaN
        self._image.bring_back()

    def together(self, take: Callable[[], object]) -> None:
        """Run `take` on the ranks of this replica; where memory is lacking on one, all raise instead of waiting for it.

        Errors: OutOfMemoryError there, WorkerError of that rank on the others.
        """
        if (lacking := self._groups.attempt(take)) is not None:
            raise lacking

    def close(self) -> None:
        """Shut vLLM down and free its memory, also shared memory. May be called twice. Process groups stay with the
        context. Drop what was bound to `storage()` first."""
        if self._core is not None:
            self._cache.release()
            self.memory().release()
            self._weights, self._cache = None, Residency({}, self.device)
            self._image.close()
            self._loop.close()
            self._shut_down()

    def _shut_down(self) -> None:
        if self._core is not None:
            stop_core(self._core, self._groups)
            self._core = self._model_runner = None
        collect(self.device)

"""ActorWorker: the policy that generates and trains (paper, table 4)."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.algorithms.losses.pretrain import negative_log_likelihood
from hybridflow.algorithms.masked import response_mask
from hybridflow.algorithms.metrics import log_prob_mismatch
from hybridflow.algorithms.registry import policy_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.pinned import to_device
from hybridflow.config import VLLM, Megatron, Mismatch, Optimizer, TrainStrategy
from hybridflow.engine3d.hybrid_engine import HybridEngine, Offloaded, TransitionReport, check_offload
from hybridflow.engines.agreement import agree, of_every_rank
from hybridflow.engines.contract import PARAMETERS, STATES, TrainState
from hybridflow.engines.router_replay import ROUTING, replay_sizes
from hybridflow.engines.vllm.requirements import check as check_vllm
from hybridflow.engines.vllm.requirements import check_config
from hybridflow.engines.worker_spec import WorkerSpec
from hybridflow.errors import ConfigError, MismatchError, PlacementError
from hybridflow.models.images import IMAGES
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.protocol import ONE_TO_ALL, THREE_D_PROTO
from hybridflow.settings import require
from hybridflow.topology import RankGrid
from hybridflow.workers.generation import Generation, RowSession
from hybridflow.workers.model_worker import ModelWorker, lora_of
from hybridflow.workers.reference import TeacherHead, check_teacher
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.update_call import UpdateCall

logger = logging.getLogger(__name__)


def _with_generation(role: str, train: RankGrid, generate: Any) -> RankGrid:
    if generate is None:
        return train
    if not isinstance(generate, VLLM):
        raise ConfigError(f"ActorWorker(generate={generate!r}): give hf.VLLM(...) or None.")
    try:
        return replace(train, p_g=generate.pp, t_g=generate.tp)
    except PlacementError as error:
        raise PlacementError(f"{role}: VLLM(tp={generate.tp}, pp={generate.pp}): {error}") from None


def _check(name: str, settings: Settings, spec: WorkerSpec, grid: RankGrid, device_type: str) -> None:
    """Errors: ConfigError for settings that are unknown or have no effect, and those of `spec`."""
    spec.check(grid, device_type)
    generate, optim, bucket_mb = settings["generate"], settings["optim"], settings["bucket_mb"]
    offload, overlap = settings["offload"], settings["overlap"]
    good = bucket_mb is None or (isinstance(bucket_mb, int | float) and 0 < bucket_mb < math.inf)
    require(good, f"{name}(bucket_mb={bucket_mb!r}): give megabytes above 0, or None.")
    if isinstance(offload, bool):
        require(
            not offload or (generate is None and optim is None),
            f"{name}: offload=True: give several, such as offload=('optimizer',). An actor that generates or trains "
            f"never waits as a whole.",
        )
        offload = ()
    check_offload(offload)
    require(
        generate is not None or not (offload or bucket_mb is not None),
        f"{name}(bucket_mb={bucket_mb!r}, offload={offload!r}) says how weights move to generation, and this actor "
        f"does not generate: give generate=hf.VLLM(...).",
    )
    require(
        not overlap or lora_of(settings) is None,
        f"{name}(overlap=True) moves weights while others are stepped; with LoRA adapters are stepped, and merged "
        f"into the weights afterwards: use overlap=False.",
    )
    trained = [] if optim is not None else [name for name in offload if name != "generation"]
    require(not trained, f"{name}(offload={offload!r}): without optim= there are no {' and '.join(trained)}.")
    require(
        not overlap or optim is not None,
        f"{name}(overlap=True) moves weights during optimizer steps: give optim=hf.Adam(lr=...).",
    )
    assert spec.model is not None
    check_teacher(model := spec.model(), settings)
    good = type(replays := settings.get("replay_routing", False)) is bool
    require(good, f"{name}(replay_routing={replays!r}): give True or False.")
    if replays:
        replay_sizes(model, name)
    good = isinstance(given := settings.get("mismatch", Mismatch()), Mismatch)
    require(good, f"{name}(mismatch={given!r}): give hf.Mismatch(...).")
    if generate is not None:
        check_config(settings["model"])
        check_vllm(model, generate, device_type)


_NO_ADAPTERS = (
    "compute_ref_log_prob of an actor is that of its model without adapters, and this one trains the model itself: "
    "place a ReferenceWorker, or give train=hf.FSDP(lora=hf.LoRA(...))."
)
_WITHOUT_GENERATION = {"generate": None, "bucket_mb": None, "offload": (), "overlap": False}
_COMPARED = ("log_probs", "temperature", "prompt_ids", "response_ids", "response_mask?")


def _log_prob_reads(settings: Settings, call: Settings) -> tuple[str, ...]:
    columns = ("prompt_ids", "response_ids", "temperature?", *IMAGES)
    return (*columns, ROUTING) if settings.get("replay_routing", False) else columns


def _with_routing(resolve: Callable[[Settings], Settings], settings: Settings) -> Settings:
    """Its own engines say which experts they chose, where updates need it."""
    found = resolve(settings)
    if not settings.get("replay_routing", False) or settings["generate"] is None:
        return found
    return {**found, "generate": replace(settings["generate"], return_routed_experts=True)}


_UPDATE = UpdateCall("actor", policy_loss, ("temperature?",))


class ActorWorker(RowSession, ModelWorker):
    """One rank of a policy: a training engine, and a generation engine in the same process that shares its weights.

    `bucket_mb` bounds the buffers of weight transfers between them (None: a small part of the shard). `offload` moves
    state to host memory: "optimizer" and "gradients" while generating, "generation" (its weights) while training; True,
    for an actor that neither trains nor generates, moves everything between calls. `overlap=True` moves the weights to
    generation during the last optimizer step of an update (PUZZLE, section 5.2); both copies stay in memory from then
    on. Without `generate` they move so by the `hf.sync_weights` that comes right after the update, to a group on other
    devices. `teacher` is the model of a ReferenceWorker, for losses that read `ref_logits`: only its output layer is
    loaded, cut as the actor's is, and it is in device memory during those updates only. `mismatch` bounds how much the
    log-probabilities of generation and training differ. With `replay_routing` a mixture of experts trains each token on
    the experts that it was generated with: its own engines, and those of rollouts with
    `VLLM(return_routed_experts=True)`, give the column `routed_experts`, which `compute_log_prob` and updates read.
    """

    role = "actor"
    hybrid: HybridEngine | None = None

    @classmethod
    def worker_spec(cls, settings: Settings) -> WorkerSpec:
        generate, rest = settings["generate"], {**settings, **_WITHOUT_GENERATION}
        idle, offload = generate is None and settings.get("optim") is None, settings.get("offload")
        spec = super().worker_spec({**rest, "offload": False})
        replicas = dict(spec.replicas)
        if generate is not None and not spec.fixed and cls.generate_sequences is ActorWorker.generate_sequences:
            own = {"model": settings["model"], "generate": generate, "offload": True}
            replicas["generation"] = RolloutWorker, own
        return replace(
            spec,
            grid=lambda devices: _with_generation(cls.role, spec.grid(devices), generate),
            check=partial(_check, cls.__name__, settings, spec),
            waits=offload if idle and isinstance(offload, bool) else None,
            without_generation=_WITHOUT_GENERATION,
            sends_parts=generate is None and settings["overlap"],
            replicas=replicas,
            resolve=partial(_with_routing, spec.resolve),
        )

    def __init__(
        self,
        *,
        model: str | os.PathLike[str],
        train: TrainStrategy = Megatron(),  # noqa: B008  a frozen value
        optim: Optimizer | None = None,
        generate: VLLM | None = None,
        offload: Collection[Offloaded] | bool = (),
        overlap: bool = False,
        bucket_mb: float | None = None,
        teacher: str | os.PathLike[str] | None = None,
        mismatch: Mismatch = Mismatch(),  # noqa: B008  a frozen value
        replay_routing: bool = False,
    ) -> None:
        self._build(model, train, optim, offload is True)
        if replay_routing:
            self.engine.replay_routing()
        self._teacher = TeacherHead(self.context, teacher)
        self._bucket_bytes = None if bucket_mb is None else int(bucket_mb * 1e6)
        self.strategy, self._overlap, self._mismatch = generate, overlap, mismatch
        self._measured: dict[str, float] = {}  # for the metrics of the next update
        self._offload: Collection[Offloaded] = () if isinstance(offload, bool) else offload
        if not self.context.uninitialized:
            self.open_generation()

    def open_generation(self) -> None:
        if self.strategy is None:
            return
        context = self.context
        waits: list[TrainState] = [name for name in self._offload if name != "generation"]
        self.engine.offload(waits)  # first: vLLM sizes its KV cache by what is free
        agree(context, self._start_generation)
        assert self.generation is not None
        generator = self.generation.engine
        several, everyone = context.grid.size > 1, range(context.grid.size)
        self.hybrid = HybridEngine(
            self.engine,
            generator,
            context.groups.everyone() if several else None,
            context.rank,
            bucket_bytes=self._bucket_bytes,
            offload=self._offload,
            overlap=self._overlap,
            overlap_group=context.groups.new("overlap", everyone) if several and self._overlap else None,
            nodes=context.nodes,
            agree=partial(agree, context),
        )
        self.engine.reload(waits)

    def _start_generation(self) -> None:
        from hybridflow.engines.vllm.engine import VLLMEngine

        assert self.strategy is not None
        layout = self.context.grid.generation()
        engine = VLLMEngine(self.context, self.strategy, layout, self.spec, self.checkpoint)
        self.generation = Generation(engine, self.strategy, self.checkpoint)

    def close_generation(self, keep_weights: bool = True) -> None:
        if self.hybrid is not None and keep_weights:
            self.hybrid.to_training()
        self.hybrid = None  # first: the hybrid engine holds views of the generation engine's memory
        if self.generation is not None:
            self.generation.close()
            self.generation = None

    @contextmanager
    def resident(self, what: Collection[TrainState] = STATES) -> Iterator[None]:
        """Puts the weights into their training layout, where they stay until the next generation."""
        if self.hybrid is not None and not self.hybrid.in_training:
            with self.context.stage("transition"):
                self.hybrid.to_training()
        self._restore()  # undo the merge for generation
        with super().resident(what):
            yield

    def on_weights_loaded(self) -> None:
        super().on_weights_loaded()
        if self.hybrid is not None:
            self.hybrid.trained()

    def on_state_loaded(self) -> None:
        if self.hybrid is not None:
            self.hybrid.trained()

    @contextmanager
    def generating(self, alone: bool = False) -> Iterator[Generation]:
        assert self.hybrid is not None  # checked on the driver
        require(
            not alone or self.hybrid.phase == "generation" or self.context.grid.generation().replicas == 1,
            "this actor's weights are in their training layout, and all ranks move them: call "
            "advance_rows(replica=None) first.",
        )
        with self.context.stage("transition"):
            if self.hybrid.phase == "training":
                self._merge()
            self.hybrid.to_generation()
        with self.context.stage("generation"):
            yield self.rollout

    @register(
        THREE_D_PROTO,
        reads=_log_prob_reads,
        writes=("old_log_probs",),
        compares=_COMPARED,
        balance="num_tokens",
    )
    def compute_log_prob(self, batch: Batch) -> Batch | None:
        """`old_log_probs` ragged [B, R] float32: the responses under the training weights, in training precision.

        Errors: MismatchError where `log_probs` of the same weights are others, see `hf.Mismatch`.
        """
        found = self._computed(batch, "log_probs", "old_log_probs")
        if self.context.compares:
            self._compare(batch, found)
        return found

    def _compare(self, batch: Batch, found: Batch | None) -> None:
        """`hf.Mismatch` for rows of the present weights and what training has `found`; alike on all ranks. Where
        routing is replayed, the next update says what that changes."""
        limits, context, tokens = self._mismatch, self.context, self.engine.tokens
        mean, count, largest = self._difference(batch, found)
        if tokens.replays is not None:
            with tokens.own_routing():
                own, *_ = self._difference(batch, self._computed(batch, "log_probs", "old_log_probs"))
            self._measured = {"actor/log_prob_difference": mean, "actor/log_prob_difference_without_replay": own}
        text = (
            f"{context.role}: log_probs of generation and those of training differ by {mean:.3g} nats per token (mean "
            f"|d| over {count} tokens), though both have the same weights; most in the rows "
            f"{', '.join(f'{row} ({value:.3g})' for value, row in largest)}. "
            f"The two engines read the model differently (config.json, dtype), or have other weights"
        )
        if limits.refuse is not None and mean > limits.refuse:
            raise MismatchError(
                f"{text}. An update would train another policy than the one that samples. The limit is "
                f"{limits.refuse:g}: ActorWorker.on(..., mismatch=hf.Mismatch(refuse=...)) sets it, None: never."
            )
        many = limits.warn is not None and mean > limits.warn
        if (many or largest[0][0] > (limits.refuse or math.inf)) and context.rank == 0:
            logger.warning("%s. ActorWorker.on(..., mismatch=hf.Mismatch(warn=...)) sets the limit.", text)

    def _difference(self, batch: Batch, found: Batch | None) -> tuple[float, int, list[tuple[float, int]]]:
        """Of all ranks' rows: the mean |d| per token, the tokens, and the largest means of rows with their numbers."""
        context, own = self.context, list[tuple[float, int, list[tuple[float, int]]]]()

        def measure() -> None:
            if found is not None and context.coords.t == 0:  # one rank of the last stage
                total, tokens, rows = log_prob_mismatch(batch.with_columns(old_log_probs=found.peek("old_log_probs")))
                own.append((total, tokens, [(value, context.row_number(row)) for value, row in rows]))

        agree(context, measure)
        shares = [share for shares in of_every_rank(context, own) for share in shares]
        mean = sum(total for total, *_ in shares) / max(tokens := sum(count for _, count, _ in shares), 1)
        return mean, tokens, sorted((row for *_, rows in shares for row in rows), reverse=True)[:4]

    @register(
        THREE_D_PROTO,
        reads=("prompt_ids", "response_ids", "temperature?", *IMAGES),
        writes=("ref_log_probs",),
        balance="num_tokens",
        check=lambda settings, call: require(lora_of(settings) is not None, _NO_ADAPTERS),
    )
    def compute_ref_log_prob(self, batch: Batch) -> Batch | None:
        """`ref_log_probs` ragged [B, R] float32 of the model without its adapters, as a ReferenceWorker gives them."""
        adapters = self.engine.adapters
        assert adapters is not None  # checked on the driver
        with adapters.disabled(), self.engine.tokens.own_routing():
            return self._computed(batch, "log_probs", "ref_log_probs")

    @register(THREE_D_PROTO, reads=("prompt_ids", "response_ids", "response_mask?", *IMAGES), balance="num_tokens")
    def compute_loss(self, batch: Batch) -> dict[str, float]:
        """The pretraining loss (paper, table 4): mean negative log-likelihood of response tokens, in nats per token."""
        with self.resident(PARAMETERS), self.engine.tokens.own_routing():
            _ = self._agreed(batch, ("log_probs",))  # without the sampling temperature
            out = self.engine.forward(batch, ("log_probs",))
        if out is None:
            return {}
        mask = response_mask(batch).values
        total = negative_log_likelihood(out["log_probs"].values.double(), mask).sum()
        (sums,) = to_device([torch.stack([total, mask.sum().double()])], self.context.device)
        peers = self.context.grid.group(self.context.rank, "d")
        dist.all_reduce(sums, group=self.context.groups.of(peers))
        return {"actor/pretrain_loss": float(sums[0] / sums[1].clamp(min=1))}

    @register(
        THREE_D_PROTO,
        binds=_UPDATE.binds,
        reads=_UPDATE.reads,
        compares=_COMPARED,
        chunks="minibatches",
        trajectories=True,
        balance="num_tokens",
        check=_UPDATE.check,
    )
    def update_actor(
        self,
        batch: Batch,
        loss: Any = "ppo",
        minibatches: int = 1,
        epochs: int = 1,
        uneven: bool = False,
        **options: Any,
    ) -> dict[str, float]:
        """Steps on a policy loss over `epochs` x `minibatches`.

        `loss` is a value such as `hf.PPO(clip=0.2)`, a name with its `options`, or a function: see `policy_loss`.
        Without `old_log_probs` in the batch, `log_probs` take their place. Where no `compute_log_prob` has compared
        them (`hf.Mismatch`), the log-probabilities of the first mini-batch are computed and compared before any step.
        Mini-batches are the same row ranges for every data parallel size, and differ by a row only with `uneven=True`.
        """
        del uneven  # used by the driver only
        if self.context.compares:  # no compute_log_prob has
            first = batch.chunks()[0]
            self._compare(first, self._computed(first, "log_probs", "old_log_probs"))
        if "old_log_probs" not in batch and "log_probs" in batch:
            batch = batch.with_columns(old_log_probs=batch.peek("log_probs"))
        with self.resident():
            if self.hybrid is not None:
                self.hybrid.trained()  # first: a failed update may have changed the weights
            found = policy_loss(loss, **options)
            with self._teacher.on(self.engine) if "ref_logits" in found.outputs else nullcontext():
                metrics = self._update(batch, found, epochs)
        measured, self._measured = self._measured, {}
        return metrics | measured

    def _step(self, last: bool) -> dict[str, float]:
        if last and self._overlap and self.hybrid is not None:
            return self.hybrid.step()
        return super()._step(last)

    @register(ONE_TO_ALL, blocking=True)
    def transition_report(self) -> TransitionReport | None:
        """Measured bytes, memory and seconds of each rank's latest transition to generation; None before the first."""
        return None if self.hybrid is None else self.hybrid.report

    def resident_bytes(self) -> dict[str, int]:
        found = super().resident_bytes()
        if self.generation is not None:
            engine = self.generation.engine
            found |= {"generation": engine.memory().resident_bytes, "kv_cache": engine.cache_bytes}
        if self.hybrid is not None:
            found["buffers"] = self.hybrid.buffer_bytes
        return found

    def close(self) -> None:
        self.close_generation(keep_weights=False)
        super().close()

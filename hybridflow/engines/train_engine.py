"""TrainEngine: one rank of a sharded model that computes and trains, for every training backend.

A backend supplies a `ShardedModel`: sharded parameters and gradients (`Shards`), a loop over micro-batches
(`MicroBatchLoop`), and the layouts of parameters and optimizer state. Losses are shares of a global sum, so gradients
are added over micro-batches and data parallel ranks and never averaged.

Shapes: B rows, R response tokens, N tokens of a micro-batch that are read, C columns of the head on this rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from hybridflow import config
from hybridflow.algorithms.losses.loss import LossFunction
from hybridflow.batch.batch import Batch
from hybridflow.batch.pinned import settle, to_host
from hybridflow.batch.ragged import Ragged
from hybridflow.engine3d.layout import Layout, Region
from hybridflow.engines.agreement import Operations, Replicas, StepCheck, random_state
from hybridflow.engines.contract import Output, TrainState, Uninitialized
from hybridflow.engines.initial_weights import fill, rounded
from hybridflow.engines.lora.adapters import Adapters
from hybridflow.engines.lora.targets import modules
from hybridflow.engines.micro_batches import MicroBatch, Positions, in_order
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.router_replay import replay_sizes
from hybridflow.engines.shard_optimizer import ShardOptimizer
from hybridflow.engines.sharded_model import ShardedModel, compute_dtype
from hybridflow.engines.time_sharing import PipelineTurn
from hybridflow.engines.train_states import TrainStates
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import Decoder

ReadHead = Callable[[MicroBatch, Tensor], Mapping[str, Tensor]]
BuildModel = Callable[[RankContext, Any, Any, config.Optimizer | None], ShardedModel]


class TrainEngine(TrainStates):
    """One rank's part of one model; a `engine3d.transition.Trainer`. Without an optimizer it only computes.

    Its inputs are the rows of this rank's data parallel replica as `prompt_ids` and `response_ids` (ragged); outputs
    are ragged over response tokens, log-probabilities after dividing logits by `temperature`. A rank without rows still
    takes part in collectives. With `adapters` the weights of `layout()` are frozen: call `adapters.merge()` to read the
    effective weights from `storage()`, and `adapters.restore()` before computing.

    `build` makes the model of `strategy`, its weights undefined. `checkpoint` is a Hugging Face directory; without one,
    weights are initialised from a fixed seed, independent of the sharding; with `UNINITIALIZED` they stay undefined. A
    value model whose checkpoint has no `score.weight` starts with zeros there. No rank ever holds more than its part.

    Errors: ModelError when the model cannot be cut by the strategy's sizes, CheckpointError for a bad checkpoint,
    ConfigError (with several ranks a WorkerError of that cause, on all of them) for `offload` without host memory.

    An operation that fails raises on all ranks and leaves the engine as it was; where that cannot be, every later one
    raises BrokenGroupError (`agreement.Operations`).
    """

    _model: Any = None  # these are None before they are built and after `close`
    adapters: Adapters | None = None

    def __init__(
        self,
        build: BuildModel,
        context: RankContext,
        strategy: config.TrainStrategy,
        spec: Decoder,
        checkpoint: str | Path | Uninitialized | None = None,
        optimizer: config.Optimizer | None = None,
    ) -> None:
        self.context, self.strategy, self.spec, self.grid = context, strategy, spec, context.grid
        self.device = context.device
        self._replicas, self._check, self._operations = Replicas(context), StepCheck(context), Operations(context)
        self._announced: dict[int, tuple[Batch, Batch, list[MicroBatch]]] = {}
        try:
            model: ShardedModel = build(context, strategy, spec, optimizer)
            self._model, self._shards, self.tokens, self.adapters = model, model.shards, model.tokens, model.adapters
            self._layout, self._optimizer_layout = model.layout, model.optimizer_layout
            if optimizer:
                beside = model.adapters.layout.regions(context.rank) if model.adapters else ()
                regions = (*model.layout.regions(context.rank), *beside)
                tensors = {region.storage: region.box.tensor for region in regions}
                shards = model.shards
                self._optimizer = ShardOptimizer(optimizer, shards, model.no_decay, model.parts, model.fp16, tensors)
            if not isinstance(checkpoint, Uninitialized):
                for tensor in self.storage().values():
                    tensor.zero_()  # including vocabulary padding
            fill(spec, checkpoint, self._layout, context.rank, self.storage())
            if self.adapters is not None:
                self.adapters.start()
            self.weights_loaded()
            own = compute_dtype(strategy, context.device)
            if optimizer and self._shards.separate and rounded(spec, checkpoint, own):
                layout, main = self.exact_weights()
                fill(spec, checkpoint, layout, context.rank, main)
        except Exception:
            self.close()
            raise

    def replay_routing(self) -> None:
        """From now on send tokens to the experts of the column `routed_experts`. Errors: those of `replay_sizes`."""
        self.tokens.replays, self._model.loop.replays = replay_sizes(self.spec), self._model.replays()

    # Computing

    def check(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> None:
        """Check these rows without a collective, so that ranks can agree before they compute.

        Errors: BatchError naming the row, ModelError for an output that the model's head does not give, and
        BrokenGroupError.
        """
        self._operations.check()
        self.tokens.check(batch, outputs, temperature)

    def forward(self, batch: Batch, outputs: Sequence[Output], temperature: float = 1.0) -> dict[str, Ragged] | None:
        """Without gradients: each output ragged [B, R] float32 on the CPU, rows in order; None off the last stage.

        `values` are at the positions that predict each response token. Errors: those of `check`.
        """
        self.tokens.check(batch, outputs, temperature, without_loss=True)
        return self.infer(batch, partial(self.tokens.read, names=outputs, temperature=temperature))

    def score(self, batch: Batch, tokens: bool = False) -> Tensor | Ragged | None:
        """[B] float32 on the CPU: the value head at the last token; None off the last stage.

        With `tokens` ragged [B, R] float32, a score for each response token: the head at the token's own position,
        where the model has read it (one behind those of `values`, which are what is expected before it).
        """
        self.tokens.check(batch, ("values",))
        read = partial(self.tokens.read, names=("values",), temperature=1.0)
        found = self.infer(batch, read, "own" if tokens else "last")
        return found and (found["values"] if tokens else found["values"].values)

    def infer(self, batch: Batch, read: ReadHead, at: Positions = "before", hidden: bool = False) -> Any:
        """Name -> ragged output on the CPU, rows in order; None off the last stage. Does not check the batch.

        `read(micro-batch, rows)`, such as a method of `tokens`, is given the rows of the head at the positions `at`,
        with `hidden` those of its input.
        """
        self._require("parameters", by_layer=True)
        loop, errors = self._model.loop, list[Exception]()

        def to_host_read(micro: MicroBatch, rows: Tensor) -> dict[str, Tensor]:
            return {name: to_host(value) for name, value in read(micro, rows).items()}

        with self._operations.run("infer", self._shards.reset, loop.lockstep):
            rows, own = self.tokens.pooled(batch)
            micro_batches = self.tokens.micro_batches(rows, at)
            if (turn := self._turn) is not None and turn.takes_forwards():
                turn.announce([len(micro_batches)], self._cost(micro_batches))
            found = loop.infer(micro_batches, to_host_read, errors.append, hidden)
            if self.last_stage or errors:
                settle(self.device)
            if errors:
                raise errors[0]
            if not self.last_stage:
                return None
            whole = {name: in_order(micro_batches, [part[name] for part in found]) for name in found[0]}
            return {name: value if own is None else value.index(own) for name, value in whole.items()}

    @property
    def last_stage(self) -> bool:
        """Whether this rank has the head."""
        return self._model.loop.last_stage

    # Training

    def forward_backward(
        self, batch: Batch, loss: LossFunction, outputs: Sequence[Output], temperature: float = 1.0
    ) -> dict[str, float]:
        """Add the gradients of one mini-batch; metrics are summed over micro-batches and data parallel ranks.

        Several calls before a `step` add up; it (or `gradients`) reduces them over ranks. Metrics are returned on the
        last pipeline stage (equal on its ranks), {} on the others. When `loss` raises, with Megatron (dense) and ZeRO
        (stages 1 and 2) any computation, all ranks raise after the last micro-batch and drop their gradients: where
        others of this step were, call `zero_grad` and begin it anew. Within layers that ranks compute together, an
        error is raised on one rank alone; its peers wait for their timeout, and all are broken. When a column that
        `loss` reads (its attribute `reads`; without one, any), an output or its value is not finite where it counts, on
        any rank, the step that follows is skipped on all. Errors: as `check` and `loss`.
        """
        self._training()
        self._require("parameters", "gradients", by_layer=True)
        self.tokens.check(batch, outputs, temperature)
        metrics: list[dict[str, Tensor]] = []
        joined: dict[str, float] = {}

        def agreed(error: Exception | None, seconds: float | None) -> None:
            self._check.agree(error, seconds)
            joined.update(self._replicas.joined(metrics, getattr(loss, "metrics", {})) if self.last_stage else {})

        undo = partial(self._drop, self._gradients != "zero", random_state(self.device))
        with self._operations.run("forward_backward", undo, settle=agreed):
            self._pass(batch, loss, outputs, temperature, metrics)
        return joined

    def _pass(
        self,
        batch: Batch,
        loss: LossFunction,
        outputs: Sequence[Output],
        temperature: float,
        metrics: list[dict[str, Tensor]],
    ) -> None:
        """The pass of `forward_backward`; gives the metrics of each micro-batch to `metrics`."""
        optimizer, last_stage = self._training(), self.last_stage
        _, rows, micro_batches = self._announced.get(id(batch)) or self.tokens.laid_out(batch, loss)
        self._check.begin(batch, loss)
        totals = None
        if last_stage:
            totals = self._replicas.totals(batch)
            micro_batches = [self.tokens.with_columns(micro, rows, loss) for micro in micro_batches]

        def share(micro: MicroBatch, head_NC: Tensor) -> Tensor:
            if not len(micro.rows):
                return _nothing(head_NC)
            found = self.tokens.ragged(micro, head_NC, outputs, temperature)
            given = self._check.share(loss, found, micro.columns, totals)  # type: ignore[arg-type]
            if given is None:
                return _nothing(head_NC)
            if (cp := self.tokens.context) is None or cp.rank == 0:  # its ranks compute the same loss
                metrics.append(given[1])
            return optimizer.scale_loss(given[0] if given[0].requires_grad else given[0] + _nothing(head_NC))

        self._model.loop.train(micro_batches, share, self._check.failed)
        self._gradients = "own"
        if totals is not None and (replays := self._model.loop.replays) is not None:
            metrics += replays.metrics(batch, totals.sequence_tokens)
        if (turn := self._turn) is not None:
            self._reduce()  # while another model computes
            self._check.failed(turn.settle())

    def _drop(self, others: bool, generators: Sequence[Tensor] = ()) -> None:
        """Undo a failed pass, or a failed end of a step; with its gradients go `others` of the step: it is lost."""
        if self._training().changed:
            raise RuntimeError("parameters or optimizer state have changed")
        self._shards.reset()
        self._training().zero_grad()
        self._gradients = "lost" if others else "zero"
        for state, restore in zip(generators, (torch.set_rng_state, torch.cuda.set_rng_state)):
            restore(state)

    def zero_grad(self) -> None:
        """Drop the gradients of the step that has begun, if any."""
        if self._gradients != "zero":
            self._training().zero_grad()
            self._check.take()
            self._gradients = "zero"

    @property
    def _turn(self) -> PipelineTurn | None:
        """This model's side while others compute beside it."""
        return getattr(self._model.loop, "turn", None)

    def offload(self, what: Collection[TrainState]) -> None:
        if (turn := self._turn) is not None:
            turn.rejoin()
        super().offload(what)

    @contextmanager
    def in_turns(self, turn: PipelineTurn, others: Sequence[TrainEngine]) -> Iterator[None]:
        """Inside, mini-batches are run by `turn`, and a loss that raises in one of these engines stops all steps."""
        self._model.loop.turn = turn
        self._check.beside([other._check for other in others])
        try:
            yield
        finally:
            self._model.loop.turn, self._check.others, self._announced = None, [], {}

    def announce(self, minibatches: Sequence[Batch], loss: LossFunction) -> None:
        """Called before the first of these mini-batches: a pipeline that is shared plans them."""
        if (turn := self._turn) is not None:
            once = {id(batch): batch for batch in minibatches}  # epochs repeat them
            self._announced = {key: self.tokens.laid_out(batch, loss) for key, batch in once.items()}
            micro_batches = [self._announced[id(batch)][2] for batch in minibatches]
            turn.announce([len(each) for each in micro_batches], self._cost(itertools.chain(*micro_batches)))

    def _cost(self, micro_batches: Iterable[MicroBatch]) -> float:
        """The mean cost of one."""
        return float(self.spec.cost(torch.tensor([micro.ids.numel() for micro in micro_batches])).mean())

    def step(self, leaving: bool = False, send: Callable[[Iterator[int]], None] | None = None) -> dict[str, float]:
        """Clip, update, zero the gradients: `grad_norm` (global, unclipped, over all ranks), `lr`, `skipped`.

        `skipped` is 1.0 when gradients, or what they were computed from, were not finite: then nothing has changed,
        moments and counters included (except the loss scale, by gradients that were too large for float16). `leaving`:
        everything is offloaded next, and copied to host memory part by part already. `send` receives `step_parts`.
        """
        if send is not None:
            send(self.step_parts())
            return self.step_result
        optimizer = self._training()
        with self._stepping():
            optimizer.step(self._check.take(), leaving)
        return optimizer.result

    def step_groups(self) -> list[frozenset[str]]:
        """Canonical tensors of each part of a step: the ends of the model, then the k-th layer of every stage."""
        return self._model.step_groups

    def step_parts(self) -> Iterator[int]:
        """`step` in parts: yields k when the parameters of `step_groups()[k]` are final; then see `step_result`."""
        optimizer = self._training()
        with self._stepping():
            yield from optimizer.step_parts(self._check.take())

    @property
    def step_result(self) -> dict[str, float]:
        return self._training().result

    @property
    def skip_reason(self) -> str:
        """Why the last step was skipped, the same on all ranks; "" when it was made."""
        return self._check.reason(self.step_result)

    @property
    def overflowed(self) -> bool:
        """Whether the last step was skipped for gradients that were too large for float16 at the loss scale."""
        return self._training().overflowed

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._require(*get_args(TrainState))
        with self._operations.run("step", partial(self._drop, True)):
            self._reduce()
            yield
            self._gradients = "zero"
        self._training().changed = False

    def gradients(self) -> Mapping[str, Tensor]:
        """This rank's gradients by the names of `storage()` (with LoRA of `adapters.storage`), float32, added up over
        data parallel ranks; valid until `step`, which must come next. Collective."""
        self._training()
        self._require("gradients")
        with self._operations.run("gradients", partial(self._drop, True)):
            self._reduce()
            found = self._shards.gradients.tensors
            trained = self.storage() if self.adapters is None else self.adapters.storage
            return {
                name: found[name] if name in found else torch.zeros_like(parameter, dtype=torch.float32)
                for name, parameter in trained.items()
            }

    def _reduce(self) -> None:
        if self._gradients == "own":
            self._shards.reduce()
            self._gradients = "summed"

    # Weights

    def layout(self) -> Layout:
        return self._layout

    def storage(self) -> Mapping[str, Tensor]:
        """The parameters themselves: writing into them changes the model; then call `weights_loaded` before they are
        offloaded, or they come back as they were. Errors: BrokenGroupError."""
        self._operations.check()
        self._shards.memory.arrive()
        return self._shards.storage

    def exact_weights(self) -> tuple[Layout, Mapping[str, Tensor]]:
        """The most exact weights here: the optimizer's main parameters where they are apart, or the parameters."""
        trained, weights = self._optimizer_layout, self._layout
        if trained is None or not self._shards.separate:
            return weights, self.storage()

        def regions(rank: int) -> list[Region]:
            frozen = [region for region in weights.regions(rank) if region.box.tensor not in trained.tensors]
            return [*trained.regions(rank), *frozen]

        return Layout(weights.tensors, weights.ranks, regions), {**self.storage(), **self.optimizer_storage()["main"]}

    def weights_loaded(self) -> None:
        """Copy parameters that a transfer has written to the optimizer's main parameters."""
        self._written = object()
        for memory in self._memories():
            memory.arrive()
            memory.changed()
        self._shards.parameters_changed()

    def fixed_weights(self) -> tuple[frozenset[str], object]:
        """Canonical tensors that neither steps nor adapters change, and a value that is another one after parameters
        were written from outside or dropped."""
        if self._optimizer_layout is not None or self.adapters is not None:
            return self._fixed, self._written
        return self._fixed, (self._written, sum(tensor._version for tensor in self._shards.storage.values()))

    @cached_property
    def _fixed(self) -> frozenset[str]:
        adapted = () if self.adapters is None else modules(self.spec, self.adapters.lora)
        trained = () if self._optimizer_layout is None else self._optimizer_layout.tensors
        return frozenset(self.spec.tensors()).difference((f"{name}.weight" for name in adapted), trained)

    @property
    def restorable(self) -> bool:
        """Whether float32 main parameters of all weights exist apart from the parameters."""
        layout = self._optimizer_layout
        return layout is not None and self._shards.separate and len(layout.tensors) == len(self._layout.tensors)

    def restore(self) -> None:
        """Parameters := main parameters, all of them resident again; released when that fails. Collective over the
        data parallel ranks. Errors: ConfigError where parameters are their own main parameters."""
        if not self.restorable:
            raise ConfigError(f"{self.context.role} has no main parameters apart from its parameters.")
        try:
            self.reload(("parameters", "optimizer"))
            self._arrive()
            self._training().restore()
        except Exception:
            self._shards.memory.release()  # they are undefined: nothing may compute with them
            raise

    def optimizer_layout(self) -> Layout | None:
        """Boxes of every rank's optimizer state, alike for each kind of it; None without an optimizer."""
        return self._optimizer_layout

    def optimizer_storage(self, writes: bool = False) -> dict[str, Mapping[str, Tensor]]:
        """Kind of state -> this rank's float32 tensors by the names of `optimizer_layout()`.

        Kinds are "main" (main parameters; without separate ones, views of the parameters), and "exp_avg",
        "exp_avg_sq" of Adam or "momentum_buffer" of SGD with momentum. With `writes` they are written into before they
        leave, and `optimizer_moved` may come later.
        """
        self._require("optimizer")
        for memory in self._memories() if writes else ():
            memory.changed()
        settle(self.device)  # an update may still be copied from main parameters in host memory
        return self._training().storage()

    def optimizer_counters(self) -> dict[str, Any]:
        """Steps made, the state of the loss scale and changed settings, equal on all ranks."""
        return self._training().counters()

    def change_optimizer(self, changes: Mapping[str, Any]) -> None:
        """Settings of the optimizer from the next step on."""
        self._training().change(changes)

    def optimizer_moved(self, counters: Mapping[str, Any]) -> None:
        """`optimizer_storage()` was written from outside: take the counters, and the parameters from `main`. Collective
        over the data parallel ranks."""
        optimizer = self._training()
        self._require("parameters", "optimizer")
        optimizer.moved(counters)

    def close(self) -> None:
        """Free the model, gradients and optimizer, at once, also tensors of `storage()` that others still refer to:
        models form reference cycles, and the collector never visits objects that vLLM froze (`gc.freeze`)."""
        if self._optimizer:
            self._optimizer.close()
        if self._model:
            self._model.shards.close()
        self._optimizer = self._model = self._shards = self.adapters = None


def _nothing(head_NC: Tensor) -> Tensor:
    """Zero with a graph, for what reads no token of the head: its backward pass takes as much memory as the head."""
    return head_NC.flatten()[:0].sum().float()

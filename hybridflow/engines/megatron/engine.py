"""Megatron-core's 3D parallelism as a `ShardedModel`: its model, our flat shards, passes and messages of stages.

Paper, section 5: training runs with 3D parallelism and a distributed optimizer, whose state is split over data
parallel ranks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from hybridflow import config
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.agreement import FAIL_SECONDS, Replicas
from hybridflow.engines.flat_shards import FlatShards
from hybridflow.engines.lora.adapters import Adapters
from hybridflow.engines.megatron.experts import Router
from hybridflow.engines.megatron.layers import PackedRow, SelectedPositions
from hybridflow.engines.megatron.layout import (
    EMBEDDING,
    OUTPUT,
    adapter_units,
    check,
    stages,
    state_layout,
    trained_layout,
    units,
    vocabulary_rows,
    weights_layout,
)
from hybridflow.engines.megatron.model import (
    build_gpt,
    building,
    prepare,
    sequence_parallel,
    transformer_config,
    without_output_layer,
)
from hybridflow.engines.megatron.parallel_adapters import add_adapters
from hybridflow.engines.micro_batches import MicroBatch, Split
from hybridflow.engines.process_groups import RankContext, is_communication_error
from hybridflow.engines.rank_exchanges import ContextParallel
from hybridflow.engines.router_replay import Replays
from hybridflow.engines.sharded_model import Failed, Read, ShardedModel, compute_dtype
from hybridflow.engines.token_outputs import TokenOutputs
from hybridflow.engines.units import Unit, step_groups
from hybridflow.errors import WaitTimeoutError
from hybridflow.models.architecture import architecture
from hybridflow.models.hf_spec import Decoder
from hybridflow.planner.pipeline.schedule import WINDOW, Instruction, Work, one_f_one_b

Direction = Literal["forward", "backward"]


def build_model(
    context: RankContext, strategy: config.Megatron, spec: Decoder, optimizer: config.Optimizer | None
) -> ShardedModel:
    """This rank's part of `spec`, its weights undefined. Errors: those of `layout.check`."""
    grid, at, device, split = context.grid, context.coords, context.device, strategy.stage_layers
    check(strategy, spec, grid, context.role)
    arch, dtype = architecture(spec), compute_dtype(strategy, device)
    of_stage, of_stages = units(spec, grid, context.rank, split), stages(spec.layers, grid.p, split)
    prepare(device)
    groups = process_group_collection(context)
    with building(device):
        settings = transformer_config(arch, strategy, grid, dtype, device)
        model, selection = build_gpt(arch, settings, at, of_stages[at.p], groups, device)
    model.requires_grad_(optimizer is not None)
    weights, layers = weights_layout(strategy, spec, grid), list[Any]()
    trained, lora = trained_layout(strategy, spec, grid), strategy.lora
    if lora is not None:
        layers = add_adapters(model, weights, trained, context.rank, lora, optimizer is not None, groups.tp)
        of_stage += adapter_units(trained, context.rank, of_stage)
    shards = MegatronShards(context, spec, model, of_stage, groups)
    micro_batches = Split(
        strategy.micro_tokens,
        multiple=(grid.t if sequence_parallel(strategy, grid, arch) else 1) * strategy.cp,
        count=2 * grid.p if grid.p > 1 else 1,
        vocab=spec.vocab,
        packed=strategy.packed,
        cost=spec.cost,
    )
    parts = step_groups({**spec.tensors(), **trained.tensors}, of_stages)
    tokens = TokenOutputs(context.role, spec, micro_batches, vocabulary_rows(spec.vocab, grid.t, at.t), groups.tp)
    tokens.context = ContextParallel(context, strategy.cp) if strategy.cp > 1 else None
    together = arch.experts is not None or strategy.cp > 1
    return ShardedModel(
        shards=shards,
        loop=PipelineLoop(context, model, selection, lockstep=together, tokens=tokens),
        tokens=tokens,
        layout=weights,
        optimizer_layout=state_layout(strategy, spec, grid) if optimizer else None,
        step_groups=parts,
        parts=[
            frozenset(name for unit in of_stage if unit.part == part for name in unit.parameters)
            for part in range(len(parts))
        ],
        no_decay=frozenset(n for unit in of_stage for n, shape in unit.parameters.items() if len(shape) == 1),
        fp16=dtype == torch.float16,
        replays=lambda: Replays(
            [module.replay for module in model.modules() if isinstance(module, Router)],
            sum(arch.sparse[: of_stages[at.p].start]),
            groups.tp,
        ),
        adapters=lora and Adapters(context, spec, lora, trained, weights, shards, layers),
    )


def process_group_collection(context: RankContext) -> ProcessGroupCollection:
    """Every group that Megatron reads, for this rank.

    There is no context parallelism: its groups hold this rank alone. `tp_ep` are the ranks that share experts and their
    columns, `expt_dp` those that hold the same. `embd` joins the two stages
    that have a copy of tied embeddings; without it Megatron would silently not add up their gradients.
    """
    grid, rank, at, group = context.grid, context.rank, context.coords, context.groups.of
    alone, everyone, model = group([rank]), group(grid.ranks()), group(grid.group(rank, "p", "t"))
    tp, pp, dp = group(grid.group(rank, "t")), group(grid.group(rank, "p")), group(grid.group(rank, "d"))
    ep, expt_tp, tp_ep, expt_dp = (
        group(grid.experts.group(rank, *axes)) for axes in (("ep",), ("etp",), ("ep", "etp"), ("edp",))
    )
    ends = [grid.rank(0, at.t, at.d), grid.rank(-1, at.t, at.d)]
    return ProcessGroupCollection(
        **dict.fromkeys(("tp", "tp_cp"), tp),
        **dict.fromkeys(("dp", "dp_cp", "intra_dp_cp"), dp),
        **dict.fromkeys(("expt_dp", "intra_expt_dp"), expt_dp),
        **dict.fromkeys(("mp", "tp_ep_pp"), model),
        ep=ep,
        expt_tp=expt_tp,
        tp_ep=tp_ep,
        cp=alone,
        hcp=[alone],
        pp=pp,
        tp_dp_cp=group(grid.group(rank, "t", "d")),
        inter_dist_opt=None,
        intra_dist_opt=everyone,
        embd=group(ends) if grid.p > 1 and rank in ends else None,
        pos_embd=None,
    )


class MegatronShards(FlatShards):
    """The flat shards of a GPTModel, by the names of its parameters.

    Gradients are also summed over ranks that share a parameter, by Megatron, to which this looks like a wrapped model
    (`module`, `config`, `ddp_config`, `finish_grad_sync`, and `main_grad` of its parameters). Rows that pad the
    vocabulary must be finite, or they would spoil what they are multiplied with by zero: they are zero from the start,
    and again whenever memory comes back.
    """

    def __init__(
        self,
        context: RankContext,
        spec: Decoder,
        model: GPTModel,
        of_stage: Sequence[Unit],
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(context, model, of_stage, groups.dp, expert_group=groups.expt_dp)
        self.module, self.config, self.ddp_config = model, model.config, DistributedDataParallelConfig()
        self._collection, self._first = groups, context.coords.t == 0
        self._named: dict[str, Any] = dict(model.named_parameters())
        for name, gradient in self.gradients.buffers.items():
            if name in self._named:  # what Megatron adds up; parts of experts are of no interest to it
                self._named[name].main_grad = gradient
        start, stop = vocabulary_rows(spec.vocab, context.grid.t, context.coords.t)
        padded = (EMBEDDING,) if spec.head == "value" else (EMBEDDING, OUTPUT)
        padding = {name: self.storage[name][stop - start :] for name in padded if name in self.storage}
        for rows in padding.values():
            rows.zero_()
        self.memory: Residency = _PaddedMemory(self.storage, padding, self.memory)

    def reduce(self) -> None:
        finalize_model_grads([self], None, pg_collection=self._collection)  # type: ignore[list-item]

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Called by Megatron for the sum over data parallel ranks."""
        self.gradients.reduce()

    def counts(self, name: str) -> bool:
        """Each parameter once: not its tensor parallel copies, not the second of tied embeddings. Of experts every
        rank has a share of its own."""
        if name not in self._named:
            return True
        cut = self._first or getattr(self._named[name], "tensor_model_parallel", False)
        return cut and not getattr(self._named[name], "shared", False)

    def close(self) -> None:
        super().close()
        self.model = self.module = None
        self._named = {}


class _PaddedMemory(Residency):
    """Zeroes the padding whose memory it gives back."""

    def __init__(self, tensors: Mapping[str, Tensor], padding: Mapping[str, Tensor], plain: Residency) -> None:
        super().__init__(tensors, plain.device, images=plain.images)
        self._padding = padding

    def fetch(self, names: Iterable[str] | None = None) -> set[str]:
        fresh = super().fetch(names)
        for name in fresh & self._padding.keys():
            self._padding[name].zero_()
        return fresh


class PipelineLoop:
    """Fulfils `sharded_model.MicroBatchLoop` for stage `at` of `stages`.

    `selection` receives the positions that the output layer computes for each micro-batch. While `turn` is set, several
    models train on these stages, and it says when a pass of this one may run what (`time_sharing`). Stages get zeros in
    place of what a failed computation would have sent. In `lockstep` (experts, context parallelism) data parallel ranks
    compute every micro-batch together, and empty ones of `tokens` where their replica has fewer.
    """

    turn: Any  # a `PipelineTurn`, or None
    replays: Replays | None = None

    def __init__(
        self,
        context: RankContext,
        model: GPTModel,
        selection: SelectedPositions,
        *,
        lockstep: bool,
        tokens: TokenOutputs,
    ) -> None:
        self.model, self.selection, self.device = model, selection, context.device
        self.lockstep, self._tokens = lockstep and context.grid.size > 1, tokens
        self._replicas = Replicas(context) if self.lockstep else None
        self.at, self.stages, self.turn = context.coords.p, context.grid.p, None
        self.last_stage = self.at == self.stages - 1
        self._messages, self._context, self._passes = StageMessages(context), context, 0

    @torch.no_grad()
    def infer(self, micro_batches: Sequence[MicroBatch], read: Read, failed: Failed, hidden: bool = False) -> list[Any]:
        self.model.eval()
        found, given = list[Any](), len(micro_batches)
        micro_batches = self._padded(micro_batches)
        mine = self._pass(micro_batches, lambda micro, out: found.append(read(micro, out)), failed, trains=False)
        with without_output_layer(self.model) if hidden and self.last_stage else nullcontext():
            if self.turn is not None and self.turn.takes_forwards():
                self.turn.take(mine)
            else:
                work = Work(micro_batches=(len(micro_batches),), trains=False)
                mine.run_all(one_f_one_b(self.stages, work).stages[self.at])
        return found[:given]

    def train(self, micro_batches: Sequence[MicroBatch], loss: Read, failed: Failed) -> None:
        self.model.train()
        if self.replays is not None:
            self.replays.clear()
        micro_batches = self._padded(micro_batches)
        mine = self._pass(micro_batches, loss, failed, trains=True)
        if self.turn is not None:
            self.turn.take(mine)
        else:
            mine.run_all(one_f_one_b(self.stages, Work(micro_batches=(len(micro_batches),))).stages[self.at])

    def _padded(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """With empty ones at the end, where ranks compute together."""
        if self._replicas is None:
            return list(micro_batches)
        missing = self._replicas.most(len(micro_batches)) - len(micro_batches)
        return [*micro_batches, *[self._tokens.empty()] * missing]

    def _pass(self, micro_batches: Sequence[MicroBatch], read: Read, failed: Failed, trains: bool) -> StagePass:
        self._passes += 1

        def continues(error: Exception) -> None:
            failed(error)
            if not self._all_failed():
                raise error from WaitTimeoutError("the tensor parallel ranks of this stage did not fail as well.")

        own = read if self.last_stage else None
        args = self.model, self._messages, micro_batches, self.device, self._forward, own, continues, trains
        return StagePass(*args, self.lockstep, self._replay)

    def _all_failed(self) -> bool:
        """Whether the ranks of this stage that compute the same rows have all failed in this pass, as for an error in
        their data; if not, the others are in a collective that this rank cannot continue."""
        at, groups = self._context.coords, self._context.groups
        cp = 1 if (shared := self._tokens.context) is None else shared.size
        size, key = self._context.grid.t * cp, f"{groups.name}/failed/{self._passes}/{at.p}-{at.d // cp}"
        end, found = time.monotonic() + FAIL_SECONDS, groups.store.add(key, 1)
        while found < size and time.monotonic() < end:
            time.sleep(0.02)
            found = groups.store.add(key, 0)
        return found >= size

    def _replay(self, micro: MicroBatch) -> None:
        """Before a computation of a micro-batch: Megatron's order of tokens is position-major, and those of a rank."""
        if self.replays is None:
            return
        routing = micro.routing_on(self.device)
        if routing is not None:
            routing = routing.transpose(0, 1)
            if self.model.config.sequence_parallel:
                routing = routing.chunk(self._context.grid.t)[self._context.coords.t]
            routing = routing.flatten(0, 1)
        self.replays.set(routing)

    def _forward(self, micro: MicroBatch) -> Tensor:
        self._replay(micro)
        self.selection.index = micro.position_major
        packed = PackedRow(sequences=micro.sequences) if micro.sequences is not None else None
        return self.model(input_ids=micro.ids, position_ids=None, attention_mask=None, packed_seq_params=packed)  # type: ignore[arg-type]


class StagePass:
    """The micro-batches of one pass on one pipeline stage of a model, run instruction by instruction.

    receive_forward -> forward -> send_forward      activations [S, b, H], S over tensor parallel ranks where the
    receive_backward -> backward -> send_backward   sequence is parallel; H hidden

    When a computation raises, the pass continues with zeros in place of every message: the neighbours run the same
    schedule, and would wait for them. The pass is refused where all ranks agree on it (`agreement.Operations`).

    `forward(micro-batch)` of the model on this stage gives its output; `loss`, on the last stage only, makes it the
    scalar whose gradients are added up. Without `trains` nothing is added up, and `loss` may return anything.

    `failed(error)` receives the first error of a computation, and raises where the pass cannot continue without it.
    Errors of communication are raised. In `lockstep` other ranks wait for each computation of this one: only `loss` may
    fail, and what it would have read is computed on. `replay` is called before a backward pass.
    """

    def __init__(
        self,
        model: Any,
        messages: StageMessages,
        micro_batches: Sequence[MicroBatch],
        device: torch.device,
        forward: Callable[[MicroBatch], Tensor],
        loss: Callable[[MicroBatch, Tensor], Tensor] | None,
        failed: Callable[[Exception], None],
        trains: bool = True,
        lockstep: bool = False,
        replay: Callable[[MicroBatch], None] = lambda micro: None,
    ) -> None:
        self.micro_batches, self._model, self._messages = micro_batches, model, messages
        self._device, self._forward, self._loss, self._failed = device, forward, loss, failed
        self._trains, self._broken, self._lockstep, self._replay = trains, False, lockstep, replay
        self._arriving: dict[tuple[Direction, int], tuple[dist.Work, Tensor]] = {}
        self._inputs: dict[int, Tensor | None] = {}
        self._outputs: dict[int, Tensor] = {}

    def run(self, each: Instruction) -> None:
        """Run an instruction of this pass other than "finish"."""
        verb, _, direction = each.kind.partition("_")
        if verb == "forward":
            arrived = self._arrived("forward", each.micro)
            out = self._attempt(partial(self._run_forward, each.micro, arrived))
            if self._trains:
                self._inputs[each.micro] = arrived
            if self._trains or self._loss is None:
                self._outputs[each.micro] = self._buffer(each.micro).zero_() if out is None else out
        elif verb == "backward":
            gradient, arrived = self._arrived("backward", each.micro), self._inputs.pop(each.micro)
            self._replay(self.micro_batches[each.micro])  # layers may be computed again
            self._attempt(partial(self._outputs.pop(each.micro).backward, gradient))
            if arrived is not None:  # until it is sent
                self._inputs[each.micro] = torch.zeros_like(arrived) if arrived.grad is None else arrived.grad
        elif verb == "receive":
            buffer = self._buffer(each.micro)
            self._arriving[direction, each.micro] = self._messages.receive(direction, buffer), buffer  # type: ignore[index]
        elif direction == "forward":
            self._messages.send("forward", self._outputs[each.micro])
            if not self._trains:
                del self._outputs[each.micro]
        else:
            gradient = self._inputs.pop(each.micro)
            assert gradient is not None
            self._messages.send("backward", gradient)

    def run_all(self, instructions: Sequence[Instruction]) -> None:
        """The whole pass, when no other model trains on these stages."""
        for each in instructions:
            if each.kind != "finish":
                self.run(each)
        self.end()

    def end(self) -> None:
        """After the last instruction."""
        self._messages.flush()
        assert not self._outputs, "a schedule sends every output, or runs its backward"

    def _attempt(self, compute: Callable[[], Tensor | None]) -> Tensor | None:
        """The result of a computation; None after an error."""
        if not self._broken or self._lockstep:
            try:
                return compute()
            except Exception as error:
                if self._lockstep or is_communication_error(error):
                    raise
                self._failed(error)
                self._broken = True
                self._outputs = {other: out.detach() for other, out in self._outputs.items()}  # frees activations
        return None

    def _run_forward(self, micro: int, arrived: Tensor | None) -> Tensor:
        if arrived is not None:
            self._model.set_input_tensor([arrived.requires_grad_(self._trains)])
        moved = self.micro_batches[micro].to(self._device)
        with torch.set_grad_enabled(self._trains):
            out = self._forward(moved)
            if self._loss is None:
                return out
            if not self._lockstep:
                return self._loss(moved, out[0])
            try:
                if not self._broken:
                    return self._loss(moved, out[0])
            except Exception as error:
                if is_communication_error(error):
                    raise
                self._failed(error)
                self._broken = True
            return out[0].sum() * 0.0

    def _arrived(self, direction: Direction, micro: int) -> Tensor | None:
        """The message that was announced; None where a stage has no such neighbour."""
        work, buffer = self._arriving.pop((direction, micro), (None, None))
        if work is not None:
            wait(work)
        return buffer

    def _buffer(self, micro: int) -> Tensor:
        settings = self._model.config
        rows, length = self.micro_batches[micro].ids.shape
        if settings.sequence_parallel:
            length //= settings.tensor_model_parallel_size
        return torch.empty(length, rows, settings.hidden_size, dtype=settings.pipeline_dtype, device=self._device)


class StageMessages:
    """Activations and gradients of one model between this stage and its neighbours; at most `WINDOW` of a direction are
    on their way, as `simulate` assumes. Every wait ends with the timeout of the context's groups.

    Both sides know the shape of each message from its micro-batch, and both send and receive in the order of one
    schedule, because NCCL has no tags. Each direction has a group of its own there: one stream would make them wait for
    each other.
    """

    def __init__(self, context: RankContext) -> None:
        members = context.grid.group(context.rank, "p")
        at, ranks = context.coords.p, [context.groups.ranks[member] for member in members]
        before, after = ranks[at - 1] if at else None, ranks[at + 1] if at + 1 < len(ranks) else None
        self.first = before is None  # nothing comes from a stage before this one
        self._peers = {"forward": (before, after), "backward": (after, before)}  # to receive from, to send to
        both = own = context.groups.of(members)
        if context.device.type == "cuda":
            both, own = (context.groups.new(f"pipeline-{name}", members, priority=True) for name in self._peers)
        self._groups = {"forward": both, "backward": own}
        context.groups.between_stages.update((both, own))
        self._sent: dict[str, deque[tuple[dist.Work, Tensor]]] = {"forward": deque(), "backward": deque()}

    def receive(self, direction: Direction, buffer: Tensor) -> dist.Work:
        """Announce the next message of a direction; it is in `buffer` once `wait` returns."""
        work = dist.irecv(buffer, self._peers[direction][0], group=self._groups[direction])
        assert work is not None
        return work

    def send(self, direction: Direction, message: Tensor) -> None:
        """Without waiting for the peer, except for a message that it should have received long ago."""
        sent = self._sent[direction]
        if len(sent) == WINDOW:
            sent.popleft()[0].wait()
        message = message.detach().contiguous()
        work = dist.isend(message, self._peers[direction][1], group=self._groups[direction])
        assert work is not None
        sent.append((work, message))

    def flush(self) -> None:
        """Wait until the peers have received everything."""
        for sent in self._sent.values():
            while sent:
                sent.popleft()[0].wait()


def wait(work: dist.Work) -> None:
    """Until the message has arrived."""
    work.wait()

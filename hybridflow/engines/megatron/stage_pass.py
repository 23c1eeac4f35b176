"""StagePass: the micro-batches of one pass on one pipeline stage of a model, run instruction by instruction.

receive_forward -> forward -> send_forward      activations [S, b, H], S over tensor parallel ranks where the
receive_backward -> backward -> send_backward   sequence is parallel; H hidden

When a computation raises, the pass continues with zeros in place of every message: the neighbours run the same
schedule, and would wait for them. The pass is refused where all ranks agree on it (`agreement.Operations`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engines.micro_batches import MicroBatch
from hybridflow.engines.process_groups import RankContext, is_communication_error
from hybridflow.planner.pipeline.schedule import WINDOW, Instruction

Direction = Literal["forward", "backward"]


class StagePass:
    """`forward(micro-batch)` of the model on this stage gives its output; `loss`, on the last stage only, makes it the
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

"""ZeroShards: a model that every data parallel rank holds whole, and 1/N of what trains it.

Bytes on each of N ranks, for a model of P parameters of b bytes each (2 or 4) whose optimizer keeps K bytes for one
(Rajbhandari et al. 2020, section 5 and table 1, with gradients in float32; Adam's K is 12, in float32 8, since its main
parameters are the parameters themselves):

    stage 1     (b + 4) P + K P / N
    stage 2     b P + (4 + K) P / N, and the gradients of one unit while a backward pass runs

Stage 3 cuts the parameters too: that is FSDP.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.sharded_model import ShardGradients
from hybridflow.engines.zero.gradients import Gradients
from hybridflow.engines.zero.layout import Tensors, units
from hybridflow.engines.zero.parameters import FlatParameters
from hybridflow.errors import ConfigError
from hybridflow.models.spec import Part


class ZeroShards:
    """Fulfils `DataParallelShards` for `ZeRO(stage=1)` and `ZeRO(stage=2)` over all ranks of the group.

    Gives `model`, whose parameters may be on the meta device, new parameters on the context's device; `tensors` are
    their canonical names and shapes in the order of `layout.optimizer_layout`, and `parts` parameters that consist of
    several of them. A frozen model keeps only its parameters. `offload` keeps main parameters, optimizer state and,
    with stage 2, gradients in host memory (Ren et al. 2021, "ZeRO-Offload").

    Attributes as in `Shards`; storage of `main` is by canonical name, flat, of what this rank owns.

    Errors: ConfigError for another stage, ModelError when the parameters are not `tensors` or partly frozen.
    """

    def __init__(
        self,
        context: RankContext,
        model: nn.Module,
        tensors: Tensors,
        parts: Mapping[str, Part] | None = None,
        *,
        stage: int,
        offload: bool = False,
        overlap: bool | None = None,
    ) -> None:
        if stage not in (1, 2):
            raise ConfigError(f"stage={stage!r} does not keep parameters whole: use 1 or 2 here, FSDP for stage 3.")
        self.model: Any = model
        on_cuda = context.device.type == "cuda"
        host = torch.device("cpu") if offload else context.device
        self._parameters = FlatParameters(model, units(tensors, parts), context.groups.everyone(), context.device)
        self.storage: Mapping[str, Tensor] = self._parameters.storage
        self.memory = self._parameters.memory
        self._gradients = Gradients(self._parameters, stage, host, on_cuda if overlap is None else overlap)
        self.gradients: ShardGradients = self._gradients
        self._host, self._own = host, self._parameters.pieces(self._parameters.own if self._parameters.trained else ())
        self.separate = next(iter(self.storage.values())).dtype != torch.float32 or offload
        self.main: Mapping[str, Tensor] = self._own
        if self.separate:
            self.main = {
                name: torch.empty(piece.shape, dtype=torch.float32, device=host, pin_memory=offload and on_cuda)
                for name, piece in self._own.items()
            }
            self.parameters_changed()

    def before_backward(self, last: bool = True) -> None:
        """The next micro-batch is computed with gradients. With stage 2 ranks go through equally many of them."""
        self._gradients.before_backward()

    def after_pass(self) -> None:
        """The micro-batches of a pass are done. Collective after those with gradients."""
        self._gradients.after_backward()

    def reduce(self) -> None:
        """Complete the gradients: this rank's are the sums over all ranks. Collective."""
        self._gradients.reduce()

    def main_gradients(self) -> dict[str, Tensor]:
        """Reduced gradients by the names of `main`, float32, where `main` is; views where they are there already."""
        return {name: piece.to(self._host) for name, piece in self._gradients.pieces.items()}

    def square_sum(self) -> Tensor:
        """float64, the same on all ranks: of all reduced gradients. Collective."""
        return self._gradients.square_sum()

    @torch.no_grad()
    def updated(self, names: Collection[str]) -> None:
        """`main` of these canonical tensors was updated on the ranks that have it: parameters follow. Collective."""
        if self.separate and (mine := [name for name in names if name in self.main]):
            torch._foreach_copy_([self._own[name] for name in mine], [self.main[name] for name in mine])
        self._parameters.gather(names)

    @torch.no_grad()
    def parameters_changed(self) -> None:
        """Parameters were written from outside: `main` follows them."""
        if self.separate and self.main:
            torch._foreach_copy_(list(self.main.values()), list(self._own.values()))

    def close(self) -> None:
        """Free all memory, also where others still refer to it."""
        self._gradients.close()
        self.memory.release()
        if self.separate:
            Residency(self.main, device=self.memory.device).release()
        self.main, self._own = {}, {}

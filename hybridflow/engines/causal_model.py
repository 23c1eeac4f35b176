"""CausalModel: any language model of transformers, computed by its own forward pass (soft caps, logit scales, biases).

Shapes: b rows of a micro-batch, S positions, N positions that are read, C columns of the head.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.module import register_module_parameter_registration_hook

from hybridflow.config import LoRA
from hybridflow.engines.attention import register_packed_attention
from hybridflow.engines.lora.injection import inject
from hybridflow.engines.micro_batches import Sequences
from hybridflow.models.hf_spec import TransformersSpec, make_model
from hybridflow.models.packing_support import is_packable


class CausalModel(nn.Module):
    """What `TokenModel` is for other models: parameters have the names of transformers' module and are on the meta
    device, `score` is the head of a value model. `packable`: it takes packed rows; else rows come one by one.

    It computes without dropout in training too: log-probabilities must be those of the policy that drew the tokens.
    """

    def __init__(
        self, spec: TransformersSpec, dtype: torch.dtype, *, recompute: bool = False, lora: LoRA | None = None
    ) -> None:
        super().__init__()
        self.packable = is_packable(spec.config)
        with _parameters_on_meta():
            whole: Any = make_model(spec.config, dtype, register_packed_attention() if self.packable else None)
        kept = [(name, child) for name, child in whole.named_children() if spec.head == "lm" or name == spec.decoder]
        for name, child in kept:
            self.add_module(name, child)
        self._score = spec.head == "value"
        if self._score:
            with torch.device("meta"):
                self.score = nn.Linear(spec.hidden, 1, bias=False, dtype=torch.float32 if lora else dtype)
        self._all: tuple[Any] = (whole,)  # no child: its children are those of this module
        self._names = (spec.decoder, spec.layer_list)
        forward = whole.forward if spec.head == "lm" else self.decoder.forward
        self._takes = frozenset(inspect.signature(forward).parameters)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # its embedding would not be trained
        self._made = [(module, n, buffer) for module in self.modules() for n, buffer in module._buffers.items()]
        if lora is not None:
            inject(self.decoder, spec, lora)
        if recompute:
            random = lora is not None and lora.dropout > 0
            for i, layer in enumerate(self.layers):
                self.layers[i] = checkpoint_wrapper(layer, preserve_rng_state=random)

    @property
    def decoder(self) -> Any:
        return getattr(self._all[0], self._names[0])

    @property
    def layers(self) -> Any:
        return self._all[0].get_submodule(self._names[1])

    def tie(self) -> None:
        """Embeddings are tied by transformers itself."""

    def make_buffers(self, device: torch.device) -> None:
        """Put what is no parameter where the model computes, as its constructors made it."""
        for module, name, buffer in self._made:
            module._buffers[name] = buffer if buffer is None else buffer.to(device, copy=True)

    def train(self, mode: bool = True) -> CausalModel:
        """Only adapters know training from computing."""
        super().train(False)
        for name, module in self.named_modules():
            if name.endswith("lora_dropout"):
                module.train(mode)
        return self

    def forward(self, ids_bS: Tensor, index_N: Tensor, positions_bS: Tensor, sequences: Sequences | None) -> Tensor:
        """[N, C] or [1, N, C]: the head at `index_N`; as that of `TokenModel`."""
        given: dict[str, Any] = {"input_ids": ids_bS, "use_cache": False}
        if "position_ids" in self._takes:
            given["position_ids"] = positions_bS
        if sequences is not None:
            assert self.packable, "rows of this model are not packed"
            given["sequences"] = sequences
        if self._score:
            return self.score(self.decoder(**given)[0].flatten(0, 1)[index_N])
        if len(ids_bS) == 1 and "logits_to_keep" in self._takes:
            return self._all[0](**given, logits_to_keep=index_N).logits
        return self._all[0](**given).logits.flatten(0, 1)[index_N]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that this thread makes within get their parameters on the meta device, and everything else for real."""
    here = threading.get_ident()

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()

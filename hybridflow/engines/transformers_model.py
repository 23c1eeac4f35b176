"""TransformersModel: any language model of transformers, computed by its own forward pass (soft caps, logit scales).

Shapes: b rows of a micro-batch, S positions, N positions that are read, C columns of the head.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.modules.module import register_module_parameter_registration_hook

from hybridflow.config import LoRA
from hybridflow.engines.attention import register_packed_attention
from hybridflow.engines.flat_shards import canonical_name
from hybridflow.engines.lora.adapters import inject
from hybridflow.engines.micro_batches import Images, Sequences
from hybridflow.models.families import is_packable
from hybridflow.models.hf_spec import Decoder, make_model


class TransformersModel(nn.Module):
    """The decoder with its output layer, or with `score` in a value model; the head is computed where it is read.

    Parameters have the names of transformers' module and are on the meta device: nothing is allocated before the model
    is cut. `packable`: it takes packed rows; else rows come one by one. With `recompute` activations of layers, those
    that encode images too, are computed again in the backward pass. With `lora` the decoder has adapters, float32.

    It computes without dropout in training too: log-probabilities must be those of the policy that drew the tokens.
    """

    def __init__(self, spec: Decoder, dtype: torch.dtype, *, recompute: bool = False, lora: LoRA | None = None) -> None:
        super().__init__()
        self.packable, self._value = is_packable(spec.config), spec.head == "value"
        with _parameters_on_meta():
            whole: Any = make_model(spec.config, dtype, register_packed_attention() if self.packable else None)
        for name, child in whole.named_children():
            if not self._value or name == spec.decoder:
                self.add_module(name, child)
        if self._value:
            with torch.device("meta"):
                self.score = nn.Linear(spec.hidden, 1, bias=False, dtype=torch.float32 if lora else dtype)
        self._whole: tuple[Any] = (whole,)  # no child: its children are those of this module
        self._index: Tensor | None = None
        whole.get_output_embeddings().register_forward_pre_hook(lambda _, args: (self._read(args[0]),))
        self._names, self._parts = (spec.decoder, spec.layer_list), spec.parts
        forward = self.decoder.forward if self._value else whole.forward
        self._positions = "position_ids" in inspect.signature(forward).parameters
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # its embedding would not be trained
        for name in getattr(spec, "constants", ()):  # float32, with state like a parameter, and never a gradient
            at, _, own = name.rpartition(".")
            module = whole.get_submodule(at)
            shape = module._buffers.pop(own).shape
            module.register_parameter(own, nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta")))
        self._made = [(module, n, buffer) for module in self.modules() for n, buffer in module._buffers.items()]
        if lora is not None:
            inject(self.decoder, spec, lora)
        if recompute:
            random = lora is not None and lora.dropout > 0
            for layers in (self.layers, *([self.decoder.visual.blocks] if spec.images else [])):
                for i, layer in enumerate(layers):
                    layers[i] = checkpoint_wrapper(layer, preserve_rng_state=random)

    @property
    def decoder(self) -> Any:
        return getattr(self._whole[0], self._names[0])

    @property
    def layers(self) -> Any:
        return self._whole[0].get_submodule(self._names[1])

    @property
    def output(self) -> nn.Module | None:
        """The output layer; None in a value model."""
        return None if self._value else self._whole[0].get_output_embeddings()

    def tie(self) -> None:
        """Make tied embeddings one parameter again, after something replaced one of them."""
        self.output.weight = self._whole[0].get_input_embeddings().weight  # type: ignore[union-attr]

    def train_all(self, trains: bool, frozen: Collection[str]) -> None:
        """All parameters get gradients, or none; never those of the canonical tensors `frozen`."""
        for full, parameter in self.named_parameters():
            name = canonical_name(full)
            tensor = self._parts[name].tensors[0] if name in self._parts else name
            parameter.requires_grad_(trains and tensor not in frozen)

    def make_buffers(self, device: torch.device) -> None:
        """Put what is no parameter where the model computes, as its constructors made it."""
        for module, name, buffer in self._made:
            module._buffers[name] = buffer if buffer is None else buffer.to(device, copy=True)

    def train(self, mode: bool = True) -> TransformersModel:
        """Only adapters know training from computing."""
        super().train(False)
        for name, module in self.named_modules():
            if name.endswith("lora_dropout"):
                module.train(mode)
        return self

    def forward(
        self,
        ids_bS: Tensor,
        index_N: Tensor,
        positions_bS: Tensor,
        sequences: Sequences | None,
        hidden: bool = False,
        images: Images | None = None,
    ) -> Tensor:
        """[N, C]: the head at `index_N`, positions in the flattened [b * S]; with `hidden` its input, [N, H].

        `ids_bS` and `positions_bS`, each token's place in its row, int64. With `sequences` ids are one packed row;
        else rows are padded on the right, where a causal mask needs no other. Of rows with `images` their positions
        take the place of `positions_bS`.
        """
        given: dict[str, Any] = {"input_ids": ids_bS, "use_cache": False}
        if self._positions:
            given["position_ids"] = positions_bS
        if images is not None:
            given |= {"position_ids": images.positions, "mm_encoder_outputs": {"image": self._encoded(images)}}
        if sequences is not None:
            assert self.packable, "rows of this model are not packed"
            given["sequences"] = sequences
        self._index = index_N
        if self._value or hidden:
            rows = self._read(self.decoder(**given)[0])
            return rows if hidden else self.score(rows)
        return self._whole[0](**given).logits

    def _encoded(self, images: Images) -> Any:
        """What transformers makes of the images in the order of their tokens, each computed once."""
        found = self.decoder.get_image_features(images.patches, images.grids, return_dict=True)
        found.pooler_output = [found.pooler_output[at] for at in images.order]
        if levels := getattr(found, "deepstack_features", None):
            found.deepstack_features = [[level[at] for at in images.order] for level in levels]
        return found

    def _read(self, hidden_bSH: Tensor) -> Tensor:
        return hidden_bSH.flatten(0, 1)[self._index]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that this thread makes within get their parameters on the meta device, and everything else for real.

    transformers does not initialize them, which would take most of the time.
    """
    from transformers import PreTrainedModel

    here = threading.get_ident()

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]
    initialize = PreTrainedModel.initialize_weights
    PreTrainedModel.initialize_weights = lambda self: None
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = initialize
        hook.remove()

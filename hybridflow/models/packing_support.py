"""Whether a transformers decoder computes a packed row like its rows one by one; found out without any weights.

Packed, rows are kept apart by our attention function alone. So a model can be packed if every layer attends through it
exactly once, with nothing that it does not compute, under the very mask that it assumes, and nothing else in a layer
looks at other positions. Whatever cannot be shown counts as no.

Shapes: S positions of the dry pass, b rows, N heads, D head dimension.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from hybridflow.errors import ModelError
from hybridflow.models.hf_spec import decoder_layers, make_model

_LENGTH = 7
# what may come to an attention function without changing what is attended to
_HARMLESS = {"position_ids", "use_cache", "cache_position", "return_dict", "position_embeddings"}
_HARMLESS |= {"output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep", "labels"}
_MIXING = (nn.modules.conv._ConvNd, nn.RNNBase)  # they see neighbouring positions

MaskFunction = Callable[[Any, Any, Tensor, Tensor], Tensor]


@dataclass
class _Probe:
    """What the attention function of one dry pass was called with."""

    callers: list[nn.Module] = field(default_factory=list)
    masks: list[tuple[Tensor, MaskFunction]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def mask(self, *, q_length: int, kv_length: int, mask_function: MaskFunction, **_: Any) -> Tensor:
        made = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        self.masks.append((made, mask_function))
        return made

    def attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        sequences: object = None,
        **more: Any,
    ) -> tuple[Tensor, None]:
        self.callers.append(module)
        if sequences is not self:
            self.refused.append("no sequences")
        self.refused += [name for name, given in more.items() if given is not None and name not in _HARMLESS]
        if dropout or is_causal is False or not getattr(module, "is_causal", True):
            self.refused.append("dropout or no causal mask")
        if not query.shape[2] == key.shape[2] == value.shape[2] == _LENGTH:
            self.refused.append("other positions than its own")
        function = next((known for made, known in self.masks if made is attention_mask), None)
        if attention_mask is not None and (function is None or not _same_mask(function, sliding_window)):
            self.refused.append("a mask of its own")
        heads = query.shape[1]
        return query.new_empty((query.shape[0], _LENGTH, heads, value.shape[-1])), None


def is_packable(config: Mapping[str, Any]) -> bool:
    """Of the model of a `config.json`. Nothing is allocated."""
    probe = _Probe()
    with _registered(probe) as name:
        try:
            model = _meta(config, name)
        except ModelError:  # attention of its own only
            return False
        if not _takes_positions(model):
            return False
        here = torch.zeros((1, _LENGTH), dtype=torch.int64, device="meta")
        try:  # with a mask, as without one transformers looks at positions, which have no values here
            model(input_ids=here, attention_mask=here + 1, use_cache=False, sequences=probe)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError, KeyError, IndexError):
            return False
    layers: Any = model.get_submodule(decoder_layers(model))
    owners = {module: at for at, layer in enumerate(layers) for module in layer.modules()}
    attending = Counter(owners.get(module) for module in probe.callers)
    mixing = any(isinstance(module, _MIXING) for module in model.modules())
    return not probe.refused and not mixing and attending == Counter(range(len(layers)))


def _meta(config: Mapping[str, Any], attention: str) -> PreTrainedModel:
    with torch.device("meta"):  # where experts must not be chosen by values
        return make_model(config, torch.float32, attention, experts="batched_mm").eval()


def _takes_positions(model: nn.Module) -> bool:
    return "position_ids" in inspect.signature(model.forward).parameters


def _same_mask(function: MaskFunction, window: int | None) -> bool:
    """Whether a mask of transformers is the causal one with this window; looked at where masks that are not differ."""
    near = window or 1
    queries = sorted({0, 1, 2, 5, 7, 8, 63, 64, 127, 128, near - 1, near, near + 1, 2 * near, 3 * near, 8192, 100_003})
    gaps = sorted({-near, -1, 0, 1, 2, 5, 64, near - 1, near, near + 1, 2 * near, 4096, 50_000})
    pairs = [(q, q - gap) for q in queries for gap in gaps if q >= gap]
    q, k = (torch.tensor(side) for side in zip(*pairs, strict=True))
    zero = torch.zeros_like(q)
    expected = (k <= q) & (q - k < window if window else True)
    try:
        return bool((torch.as_tensor(function(zero, zero, q, k)) == expected).all())
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False


@contextmanager
def _registered(probe: _Probe) -> Iterator[str]:
    """The probe's functions known to transformers, by a name of their own."""
    name = f"hybridflow_probe_{id(probe)}"
    AttentionInterface.register(name, probe.attention)
    AttentionMaskInterface.register(name, probe.mask)
    try:
        yield name
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name, None)

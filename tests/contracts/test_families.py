"""What the lists of `models.families` are checked with: small random copies of families, and dry passes.

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

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridflow.errors import ModelError
from hybridflow.models.families import check_causal, is_packable
from hybridflow.models.hf_spec import decoder_layers, hf_config, make_model
from tests.contracts import family_cases as tasks
from tests.contracts.family_cases import (
    DOCUMENT,
    FAMILIES,
    MEGATRON,
    MEGATRON_CASES,
    OTHERS,
    QUICK_ON_MEGATRON,
    QUICK_ON_SHARDS,
    SHARDED_CASES,
    written,
)

_ROW, _TOKENS = 12, 7  # positions of the rows that it reads, and different tokens in them
_MOST = 2_000_000  # parameters of a copy, which is made in well under a second
_WIDTH, _HEADS, _EXPERTS, _INNER = 32, 4, 4, 16
_SMALL: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim_model", "word_embed_proj_dim", "embedding_size"), _WIDTH),
    **dict.fromkeys(("num_attention_heads", "n_head", "encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_inner", "dim_ff", "n_inner", "decoder_ffn_dim"), _INNER),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), _INNER),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), _EXPERTS),
    **dict.fromkeys(("head_dim", "d_head", "dim_head", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 8),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
}


def sees_later(model: PreTrainedModel) -> bool | None:
    """Whether what a small copy says of all tokens but the last changes with the last; None without a copy."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(0)
        try:
            config = _small(model.config)
            with torch.device("meta"):
                if type(model)(config).num_parameters() > _MOST:
                    return None
            copy: Any = type(model)(config).eval().float()
            for parameter in copy.parameters():
                parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.1))
            ids = torch.arange(1, _ROW + 1)[None] % _TOKENS
            first, second = _early(copy, ids), _early(copy, torch.cat([ids[:, :-1], ids[:, -1:] * 0], 1))
        except (ValueError, TypeError, AttributeError, LookupError, RuntimeError, AssertionError, ImportError):
            return None
        except StrictDataclassError:
            return None
    difference, size = (first - second).abs().max(), first.abs().max()
    return None if not bool(size.isfinite()) else bool(difference > 1e-5 * size)


def _early(copy: Any, ids_1S: torch.Tensor) -> torch.Tensor:
    """[S - 1, vocabulary]"""
    return copy(input_ids=ids_1S, use_cache=False).logits[0, :-1]


def _small(config: Any) -> Any:
    """A config of two layers and of few parameters; what says something of each layer does so of the two."""
    given = config.to_dict()
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in given.items():
        if isinstance(value, int) and not isinstance(value, bool) and name in _SMALL:
            given[name] = min(value, _SMALL[name])
        elif isinstance(value, list) and len(value) == layers:
            given[name] = [value[0], value[-1]]
    given.update(dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), None))
    return type(config).from_dict(given)


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


def can_be_packed(config: Mapping[str, Any]) -> bool:
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


SOME = ["bert", "gpt_neox", "llama", "qwen3_moe", "roformer", "xlnet"]  # the others take minutes
EVERY = [
    pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
]


@pytest.mark.parametrize("family", EVERY)
def test_a_family_is_in_the_lists_that_its_small_copy_says(family):
    try:
        with torch.device("meta"):
            model = make_model({"model_type": family})
    except ModelError:  # not made of its default config
        return
    found = sees_later(model)
    try:
        check_causal(hf_config({"model_type": family}))
        assert not found
        assert not is_packable({"model_type": family}) or can_be_packed({"model_type": family})
    except ModelError:
        assert found is not False


@pytest.mark.parametrize("name", tasks.FAMILIES)
def test_only_what_can_be_packed_is_packed(name):
    config = tasks.config(name).to_dict()
    assert is_packable(config) == can_be_packed(config)


def test_the_document_says_what_is_tested():
    text = DOCUMENT.read_text()
    assert written(text) == text, "run python -m tests.contracts.family_cases"


def test_there_are_enough_families():
    configs = FAMILIES | MEGATRON | OTHERS
    for cases, count in ((MEGATRON_CASES, 15), (SHARDED_CASES, 25)):
        assert len({configs[name]["model_type"] for name, _ in cases}) >= count


def test_quick_cases_have_most_families_and_every_grid():
    families = {name for name, _ in SHARDED_CASES}
    assert len({name for name, _ in QUICK_ON_SHARDS}) >= 0.6 * len(families)
    assert {name for name, _ in QUICK_ON_MEGATRON} == set(MEGATRON)
    assert {grid for _, grid in QUICK_ON_SHARDS} == {grid for _, grid in SHARDED_CASES}

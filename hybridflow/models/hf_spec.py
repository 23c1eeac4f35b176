"""TransformersSpec: sizes and tensors of any decoder of transformers, read from its class on the meta device.

Canonical tensors have the names and shapes of a checkpoint that transformers writes. `parts` lists the parameters in
which transformers keeps several of them (experts, since version 5) or another name.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from difflib import SequenceMatcher, get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hybridflow.config import FSDP, ZeRO
from hybridflow.errors import ConfigError, ModelError, nearest
from hybridflow.models.families import FUSED_LINEAR, check_causal
from hybridflow.models.images import LANGUAGE_MODEL, VISION_FAMILIES, VISION_TOWER, ImageTokens
from hybridflow.models.spec import FAMILIES, NEEDED, Cost, Head, ModelSpec, Part, read_config

if TYPE_CHECKING:
    import torch
    from torch.nn import Module
    from transformers import PreTrainedConfig, PreTrainedModel

SCORE = "score.weight"
ROUTER_BIAS = ".e_score_correction_bias"
_CONTEXT = 2048  # of models that put no limit on it


@dataclass(frozen=True, kw_only=True, eq=False)
class TransformersSpec:
    """Sizes and tensors of a decoder, `config` being its `config.json`; made by `TransformersSpec.of`.

    `parts`: by name the parameters of transformers' model that are no canonical tensor of the same name. `decoder` is
    the name of the model without its head, `layer_list` that of its layers (`model.layers`). `linear` are the weights
    of layers that can have adapters, `experts` the parameters whose first dimension counts experts, `zeros` the
    vectors, besides biases, that begin as zero, `constants` those that no gradient changes (buffers, float32). With
    `learned_positions` no row may be longer than `context`. Of a model that also reads `images` the sizes are those of
    its text decoder.
    """

    config: Mapping[str, Any]
    head: Head
    family: str
    hidden: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    context: int
    learned_positions: bool
    tied: bool
    decoder: str
    layer_list: str
    cost: Cost = field(repr=False)
    linear: frozenset[str] = field(repr=False)
    experts: frozenset[str] = field(repr=False)
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    parts: Mapping[str, Part] = field(repr=False)
    zeros: frozenset[str] = field(repr=False)
    constants: frozenset[str] = field(repr=False)
    images: ImageTokens | None = None

    @classmethod
    def of(cls, config: Any, head: Head = "lm") -> TransformersSpec:
        """From a `config.json` mapping or a transformers config object.

        Errors: ModelError for a model that AutoModelForCausalLM does not know, that is quantized or more than a
        decoder and does not read images, or whose tensors lie in a checkpoint otherwise than as pieces of its
        parameters.
        """
        given = config if isinstance(config, Mapping) else config.to_dict()
        return _read(json.dumps(given, sort_keys=True, default=str), head)

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Canonical names and shapes of the whole checkpoint, in model order."""
        return dict(self.shapes)

    def parameter(self, tensor: str) -> str:
        """The parameter of transformers' model that the canonical `tensor` is, or is a part of."""
        return self._parameters.get(tensor, tensor)

    @cached_property
    def _parameters(self) -> dict[str, str]:
        return {tensor: name for name, part in self.parts.items() for tensor in part.tensors}

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Canonical names and shapes of one decoder layer; with two dimensions those of linear layers only."""
        at = f"{self.layer_list}.{layer}."
        own = {name: shape for name, shape in self.shapes.items() if self.parameter(name).startswith(at)}
        return {name: shape for name, shape in own.items() if len(shape) == 1 or name in self.linear}

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


Decoder: TypeAlias = ModelSpec | TransformersSpec
"""What is known of a decoder with a head before it exists."""


_USE = ("heads", "kv_heads", "head_dim", "norm_eps", "rope_theta", "rope_scaling", "sliding_window")
_LABELS = ("transformers_version", "architectures", "dtype", "_name_or_path", "use_cache", "_token_id")  # how names end


def use_of(spec: Decoder) -> dict[str, Any]:
    """The settings, beside the shapes of tensors, that decide how a model computes, as JSON has them: for a
    TransformersSpec, its config without labels."""
    if isinstance(spec, ModelSpec):
        return json.loads(json.dumps({name: getattr(spec, name) for name in _USE}))
    return {name: value for name, value in spec.config.items() if not name.endswith(_LABELS)}


@lru_cache(maxsize=16)
def _read(text: str, head: Head) -> TransformersSpec:
    import torch

    given = json.loads(text)
    with torch.device("meta"):
        model = make_model(given)
    config, family = model.config.get_text_config(), str(given.get("model_type"))
    check_causal(config)
    decoder, layer_list = model.base_model_prefix, decoder_layers(model)
    if not hasattr(model, decoder):  # the prefix is that of a larger model which this one is a part of
        decoder = layer_list.partition(".")[0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    output = model.get_output_embeddings()
    if output is None or not hasattr(model, decoder) or not layer_list.startswith(f"{decoder}."):
        raise ModelError(f"{type(model).__name__} is no decoder with layers and an output layer: it cannot be cut.")
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    constants = {name: tuple(t.shape) for name, t in model.state_dict().items() if name not in own}
    if kept := [name for name in constants if not name.endswith(ROUTER_BIAS)]:
        raise ModelError(f"a {family} checkpoint has {kept[0]}, which is no parameter. Such models are not supported.")
    if (other := _renamed(model, constants)) is not None:
        raise ModelError(
            f"a {family} checkpoint calls {other[0]} of transformers' model {other[1]}. Such models are not supported."
        )
    hidden, vocab = int(output.weight.shape[1]), int(output.weight.shape[0])
    tied = names[id(output.weight)].startswith(f"{decoder}.")
    pieces = checkpoint_pieces(model, family)
    if head == "value":
        pieces = {name: found for name, found in pieces.items() if name.startswith(f"{decoder}.")}
        pieces[SCORE] = {SCORE: (1, hidden)}
    linear = [f"{name}.weight" for name in _linear(model)]
    heads = getattr(config, "num_attention_heads", 0) or 1
    return TransformersSpec(
        config=given,
        head=head,
        family=family,
        hidden=hidden,
        vocab=vocab,
        layers=len(model.get_submodule(layer_list)),  # type: ignore[arg-type]
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        context=int(getattr(config, "max_position_embeddings", None) or _CONTEXT),
        learned_positions=_learns_positions(model),
        tied=tied,
        decoder=decoder,
        layer_list=layer_list,
        cost=_cost(model, layer_list, 1 if head == "value" else vocab, hidden, heads),
        linear=frozenset(piece for name in linear for piece in pieces.get(name, {})),
        experts=frozenset(
            f"{at}.{name}" for at, module in expert_modules(model).items() for name in dict(module.named_parameters())
        ),
        shapes={name: shape for found in pieces.values() for name, shape in found.items()} | constants,
        parts={
            name: Part(tuple(model.get_parameter(name).shape), tuple(found))
            for name, found in pieces.items()
            if tuple(found) != (name,)
        },
        zeros=_zeros(model),
        constants=frozenset(constants),
        images=ImageTokens.of(model.config.to_dict()) if family in VISION_FAMILIES else None,
    )


def _renamed(model: PreTrainedModel, constants: Iterable[str]) -> tuple[str, str] | None:
    """The first of these buffers that has another name in a checkpoint, and that name."""
    from transformers.core_model_loading import revert_weight_conversion

    for name in constants:
        (saved,) = revert_weight_conversion(model, {name: model.get_buffer(name)}) or (name,)
        if saved != name:
            return name, saved
    return None


def hf_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The transformers configuration of a `config.json`.

    Errors: ModelError for a model that is not supported, and for sizes that transformers refuses.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = config.get("model_type")
    known = CONFIG_MAPPING[family] if isinstance(family, str) and family in CONFIG_MAPPING else None
    if known is None or (known not in MODEL_FOR_CAUSAL_LM_MAPPING and family not in VISION_FAMILIES):
        hint = _family_hint(str(family), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        raise ModelError(f"model_type {family!r} is not supported: AutoModelForCausalLM does not know it.{hint}")
    if config.get("quantization_config"):
        raise ModelError(f"this {family} checkpoint is quantized, which cannot be trained. Use the unquantized one.")
    try:
        made = known.from_dict(dict(config))
    except (StrictDataclassError, ValueError, TypeError, AttributeError, KeyError, ArithmeticError) as error:
        said = " ".join(str(error).split())
        raise ModelError(f"transformers does not take this {family} config.json: {said}.") from None
    if made.get_text_config() is not made and family not in VISION_FAMILIES:
        raise ModelError(
            f"model_type {family!r} has more than a text decoder. Save its language model alone, or use a model that "
            f"reads images of {', '.join(VISION_FAMILIES)}."
        )
    return made


def text_config(spec: Decoder) -> PreTrainedConfig:
    """The transformers configuration of its text decoder."""
    return hf_config(spec.config).get_text_config()


def latent_size(spec: Decoder) -> int:
    """Numbers of a token that latent attention (MLA) caches; 0 for other attention.

    vLLM computes minicpm3, whose config has the same keys, with plain attention.
    """
    if isinstance(spec, ModelSpec) or not spec.config.get("kv_lora_rank") or spec.family == "minicpm3":
        return 0
    return spec.config["kv_lora_rank"] + (getattr(hf_config(spec.config), "qk_rope_head_dim", None) or 0)


def _family_hint(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for a family whose name differs in one letter; others only look alike."""
    for family in get_close_matches(name, known, n=1):
        same = SequenceMatcher(None, name, family).ratio() * (len(name) + len(family)) / 2  # letters in common
        if max(len(name), len(family)) - same < 1.5:
            return f" Did you mean {family!r}?"
    return ""


def make_model(
    config: Mapping[str, Any],
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    experts: str | None = None,
) -> PreTrainedModel:
    """The language model, with these ways to compute attention and experts of transformers.

    Errors: ModelError when transformers cannot make it of this config.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    made = hf_config(config)
    if getattr(made, "rescale_every", 0):  # rwkv would divide its own weights whenever it infers after training
        made.rescale_every = 0
    ways: dict[str, Any] = {"attn_implementation": attention, "experts_implementation": experts}
    auto: Any = AutoModelForCausalLM
    if made.model_type in VISION_FAMILIES:  # patches of an image see each other
        auto, ways["attn_implementation"] = AutoModelForImageTextToText, {"text_config": attention}
    try:
        return auto.from_config(made, dtype=dtype, trust_remote_code=False, **ways)
    except (ValueError, TypeError, AttributeError, KeyError, ImportError, RuntimeError, AssertionError) as error:
        raise ModelError(f"transformers cannot make this {made.model_type} model: {error}") from None


def decoder_layers(model: PreTrainedModel) -> str:
    """The name of the longest list of modules that transformers itself would never split over devices, of the text
    decoder where a model has more."""
    from torch import nn

    if model.config.model_type in VISION_FAMILIES:
        return f"{LANGUAGE_MODEL}.layers"
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    }
    whole = set(getattr(model, "_no_split_modules", None) or ())
    found = {n: m for n, m in lists.items() if {type(layer).__name__ for layer in m} <= whole} or lists
    return max(found, key=lambda name: len(found[name]), default="")


def expert_modules(model: Module) -> dict[str, Any]:
    """The modules of a transformers model that are called with rows, and the experts of each row with their weights."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")}


def checkpoint_pieces(model: PreTrainedModel, family: str) -> dict[str, dict[str, tuple[int, ...]]]:
    """Parameter of a meta model -> names and shapes of the checkpoint's tensors in it, in the order of its memory.

    transformers itself says what it would save. Its operations are views of the parameters (copies are not made), so
    where each result lies in which parameter can be read from its strides.

    Errors: ModelError for a tensor that is not a contiguous piece of one parameter.
    """
    from transformers.core_model_loading import revert_weight_conversion

    parameters = dict(model.named_parameters())
    owners = {_memory(parameter): name for name, parameter in parameters.items()}
    no_piece = (
        f"of a {family} checkpoint is no contiguous piece of a parameter of transformers' model. This model cannot be "
        "cut over ranks yet."
    )
    try:
        with _views_only():
            saved = revert_weight_conversion(model, {name: p.detach() for name, p in parameters.items()})
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ModelError(
            f"how transformers saves the tensors of a {family} model cannot be followed: {error}"
        ) from None
    found: dict[str, list[tuple[int, str, tuple[int, ...]]]] = {name: [] for name in parameters}
    for name, tensor in saved.items():
        if _memory(tensor) not in owners or not tensor.is_contiguous():
            raise ModelError(f"{name} {no_piece}")
        found[owners[_memory(tensor)]].append((int(tensor.storage_offset()), name, tuple(tensor.shape)))
    for name, pieces in found.items():
        pieces.sort()
        ends = [at + math.prod(shape) for at, _, shape in pieces]
        if [at for at, _, _ in pieces] != [0, *ends[:-1]] or ends[-1:] != [parameters[name].numel()]:
            raise ModelError(f"{name} {no_piece}")
    return {name: {piece: shape for _, piece, shape in pieces} for name, pieces in found.items()}


def read_spec(directory: str | Path, head: Head) -> Decoder:
    """What a Hugging Face directory has: a ModelSpec of its four families, a TransformersSpec of all others.

    Errors: CheckpointError without a readable `config.json`, or if it asks for code; ModelError for a model that
    transformers does not know.
    """
    return spec_of_config(read_config(directory), head)


def image_tokens(model: str | os.PathLike[str]) -> ImageTokens | None:
    """How the model of this directory reads images; None for others, and where it is not here, as in a trace."""
    return read_spec(Path(model), "lm").images if (Path(model) / "config.json").is_file() else None


def spec_of_config(config: Mapping[str, Any], head: Head) -> Decoder:
    """`read_spec` of what is in `config.json`."""
    try:
        return ModelSpec.from_hf_config(config, head)
    except ModelError:
        if config.get("model_type") in FAMILIES and any(name not in config for name in NEEDED):
            raise
    return TransformersSpec.of(config, head)


def check_reading(directory: str | Path, spec: Decoder) -> None:
    """Errors: ModelError where transformers' config of the same `config.json` says something else than `spec`."""
    if not isinstance(spec, ModelSpec):
        return  # it is transformers' reading
    theirs = ModelSpec.from_hf_config(hf_config(read_config(directory)), spec.head)
    for one in fields(spec):
        own, other = getattr(spec, one.name), getattr(theirs, one.name)
        if own != other:
            raise ModelError(
                f"{directory}/config.json: {one.name} is {own!r} to hybridflow and {other!r} to transformers. Save "
                f"the config again with transformers, or delete keys that name the same setting twice."
            )


def check_shared_heads(spec: Decoder, cp: int, tp: int, packed: bool, role: str = "the model") -> None:
    """Errors: ModelError when `cp` ranks cannot share the heads that each of `tp` ranks has, or rows are not packed."""
    if cp == 1:
        return
    if not packed:
        raise ModelError(f"{role}: cp={cp} cuts packed rows. Use packed=True and a model whose rows can be packed.")
    heads, kv_heads = spec.heads // tp, max(1, spec.kv_heads // tp)
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]
        raise ModelError(
            f"{role} has {heads} heads and {kv_heads} kv-heads on each of tp={tp} ranks, which cp={cp} ranks cannot "
            f"share. Use cp in {fitting}."
        )


def _cost(model: PreTrainedModel, layer_list: str, columns: int, hidden: int, heads: int) -> Cost:
    """Matrices of the layers, of experts those that a token meets; attention of all heads."""
    config: Any = model.config.get_text_config()
    matrices = float(columns * hidden)
    for parameter in model.get_submodule(layer_list).parameters():
        if parameter.dim() == 3:  # experts
            chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
            matrices += parameter.numel() * min(1.0, (chosen or len(parameter)) / len(parameter))
        elif parameter.dim() == 2:
            matrices += parameter.numel()
    layers = len(model.get_submodule(layer_list))  # type: ignore[arg-type]
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds = set(getattr(config, "layer_types", None) or ())
    window = config.sliding_window if kinds == {"sliding_attention"} else None
    return Cost(2.0 * matrices, 2.0 * layers * width, window)


def _learns_positions(model: PreTrainedModel) -> bool:
    """Whether it looks positions up in a table, as GPT-2 (wpe) and OPT (embed_positions) do."""
    from torch import nn

    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return any(re.search(r"position|wpe", name) for name in tables)


def _linear(model: PreTrainedModel) -> list[str]:
    """Names of the text decoder's layers that are called as nn.Linear is: something can be added to what they give.

    Left out are subclasses that give something else (routers), and those of `FUSED_LINEAR`.
    """
    import torch
    from torch import nn

    found = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name.startswith(VISION_TOWER):
            continue
        if type(module).forward is not nn.Linear.forward:
            try:
                given = module(torch.empty(1, module.in_features, dtype=module.weight.dtype, device="meta"))
            except (ValueError, TypeError, AttributeError, RuntimeError, IndexError):
                continue
            if not isinstance(given, torch.Tensor) or tuple(given.shape) != (1, module.out_features):
                continue
        above, _, own = name.rpartition(".")
        if own not in FUSED_LINEAR.get(type(model.get_submodule(above)).__name__, ()):
            found.append(name)
    return found


def _zeros(model: PreTrainedModel) -> frozenset[str]:
    """Vectors that the model itself would begin with as zeros (norms around one); what is left of `model` is unusable.

    They are small, so each is made for real and given to the model's own initialisation.
    """
    found = set()
    for at, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or any(parameter.dim() != 1 for parameter in own.values()):
            continue
        module.to_empty(device="cpu", recurse=False)
        for name, parameter in module.named_parameters(recurse=False):
            parameter.data.fill_(1.0)
            parameter.requires_grad_(False)
            own[name] = parameter
        model._init_weights(module)
        found.update(f"{at}.{name}" for name, parameter in own.items() if not parameter.any())
    return frozenset(found)


def _memory(tensor: torch.Tensor) -> int:
    """What tensors that share their memory have in common, on the meta device too."""
    return tensor.untyped_storage()._cdata


def _views_only() -> AbstractContextManager:
    """Within, a copy of a tensor is the tensor itself."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Views(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.ops.aten.clone.default else func(*args, **(kwargs or {}))

    return Views()


def matches(pattern: str, tensor: str) -> bool:
    return fnmatchcase(tensor, f"*{pattern}*")


def frozen_tensors(strategy: FSDP | ZeRO, spec: Decoder) -> frozenset[str]:
    """Canonical tensors that `freeze` names. Errors: ConfigError for a pattern that fits none, for all tensors, and for
    a part of a parameter."""
    tensors, name = spec.tensors(), type(strategy).__name__
    fitting = {pattern: {one for one in tensors if matches(pattern, one)} for pattern in strategy.freeze}
    found = frozenset[str]().union(*fitting.values())
    for pattern, several in fitting.items():
        if not several or len(found) == len(tensors):
            known = {part for tensor in tensors for part in tensor.split(".")}
            raise ConfigError(
                f"{name}(freeze={strategy.freeze}): {'all tensors have' if several else 'no tensor has'} {pattern!r} "
                f"in the name.{'' if several else nearest(pattern, known)} Their names are those of model.safetensors, "
                f"such as {next(iter(tensors))}."
            )
    for part in spec.parts.values():
        if found.intersection(part.tensors) and not found.issuperset(part.tensors):
            raise ConfigError(
                f"{name}(freeze={strategy.freeze}): {' and '.join(part.tensors[:3])} are one parameter. Freeze all of "
                f"them or none."
            )
    return found

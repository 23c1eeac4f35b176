"""ModelSpec: sizes and tensors of a decoder-only model, read from a Hugging Face `config.json`.

Pure. Canonical tensors have the names and shapes of the Hugging Face checkpoint. Weight transfers use boxes of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hybridflow.errors import CheckpointError, ModelError, nearest

if TYPE_CHECKING:
    from torch import Tensor

Head = Literal["lm", "value"]
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
# what a config.json may leave out, and what Hugging Face takes then
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
}
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@dataclass(frozen=True)
class Cost:
    """Floating point operations of a forward pass over a sequence of n tokens: linear * n + quadratic * n^2.

    The quadratic term is causal attention; beyond a `window` of tokens it grows linearly.
    """

    linear: float
    quadratic: float
    window: int | None = None

    def __call__(self, tokens: Tensor) -> Tensor:
        """[rows] float64 for sequences of `tokens` [rows], any number dtype."""
        n = tokens.double()
        inside = n if self.window is None else n.clamp(max=self.window)
        return self.linear * n + self.quadratic * inside * (2 * n - inside)


@dataclass(frozen=True)
class Part:
    """A parameter of transformers' model, of `shape`, that holds other canonical tensors one behind the other."""

    shape: tuple[int, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Sizes of a Llama-style decoder. `head="value"` has a `score.weight` [1, hidden] instead of an output embedding.

    Errors: ModelError when a field is missing or sizes do not fit.
    """

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float], ...] = ()
    context: int = 4096
    sliding_window: int | None = None
    head: Head = "lm"

    # no fields: the same in all families
    decoder, layer_list, learned_positions = "model", "model.layers", False
    parts: ClassVar[Mapping[str, Part]] = {}
    zeros: ClassVar[frozenset[str]] = frozenset()
    images: ClassVar[None] = None

    @classmethod
    def from_hf_config(cls, config: Any, head: Head = "lm") -> ModelSpec:
        """From a `config.json` mapping or a transformers config object."""
        given = config if isinstance(config, Mapping) else config.to_dict()
        family = given.get("model_type")
        if family not in FAMILIES:
            raise ModelError(f"model_type {family!r} is not supported.{nearest(str(family), FAMILIES)}")
        get = {**_DEFAULTS[family], **given}
        if missing := [name for name in NEEDED if type(get.get(name)) is not int]:
            raise ModelError(f"the config of this {family} model lacks {', '.join(missing)}.")
        if (act := get.get("hidden_act", "silu")) != "silu":
            raise ModelError(f"hidden_act={act!r} is not supported: {family} models use 'silu'.")
        if get.get("mlp_bias"):
            raise ModelError("mlp_bias=True is not supported.")
        if family != "qwen2" and get.get("attention_bias"):
            raise ModelError(f"attention_bias=True is not supported for {family} (it would add a bias to o_proj).")
        heads, hidden = get["num_attention_heads"], get["hidden_size"]
        if not get.get("head_dim") and heads > 0 and hidden % heads:
            raise ModelError(f"hidden_size={hidden} does not divide by {heads} heads, and the config has no head_dim.")
        theta, kind, rope = _rope(get)
        return cls(
            family=family,
            hidden=hidden,
            intermediate=get["intermediate_size"],
            layers=get["num_hidden_layers"],
            heads=heads,
            kv_heads=get.get("num_key_value_heads") or heads,
            head_dim=get.get("head_dim") or hidden // max(heads, 1),
            vocab=get["vocab_size"],
            tied=bool(get.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2",
            qk_norm=family == "qwen3",
            norm_eps=_number(get, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=tuple(sorted(rope.items())) if kind == "llama3" else (),
            context=int(_number(get, "max_position_embeddings", _DEFAULTS[family]["max_position_embeddings"])),
            sliding_window=_sliding_window(family, get),
            head=head,
        )

    @classmethod
    def from_checkpoint(cls, directory: str | Path, head: Head = "lm") -> ModelSpec:
        """From a Hugging Face directory. Errors: CheckpointError without a readable `config.json`."""
        return cls.from_hf_config(read_config(directory), head)

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab", "context"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise ModelError(f"{name}={getattr(self, name)!r} must be a positive whole number.")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} heads cannot share {self.kv_heads} kv-heads evenly.")

    def check_parallel(
        self, p: int, t: int, role: str = "the model", stage_layers: Sequence[int] | None = None
    ) -> None:
        """Errors: those of `check_cut`."""
        sizes = self.heads, self.kv_heads, self.head_dim, [self.intermediate], self.layers
        check_cut(role, p, t, *sizes, stage_layers)

    def divides(self, t: int) -> bool:
        """Whether every layer can be cut into t equal parts."""
        return _divides(t, self.heads, self.kv_heads, self.head_dim, [self.intermediate])

    def layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Canonical names and shapes of one decoder layer."""
        at, q, kv = f"model.layers.{layer}.", self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (self.hidden,),
            "self_attn.q_proj.weight": (q, self.hidden),
            "self_attn.k_proj.weight": (kv, self.hidden),
            "self_attn.v_proj.weight": (kv, self.hidden),
            "self_attn.o_proj.weight": (self.hidden, q),
            "post_attention_layernorm.weight": (self.hidden,),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }
        if self.qkv_bias:
            shapes |= {
                "self_attn.q_proj.bias": (q,),
                "self_attn.k_proj.bias": (kv,),
                "self_attn.v_proj.bias": (kv,),
            }
        if self.qk_norm:
            shapes |= {"self_attn.q_norm.weight": (self.head_dim,), "self_attn.k_norm.weight": (self.head_dim,)}
        return {at + name: shape for name, shape in shapes.items()}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Canonical names and shapes of the whole checkpoint, in model order."""
        out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            out |= self.layer_tensors(layer)
        out["model.norm.weight"] = (self.hidden,)
        if self.head == "value":
            out["score.weight"] = (1, self.hidden)
        elif not self.tied:
            out["lm_head.weight"] = (self.vocab, self.hidden)
        return out

    @property
    def config(self) -> dict[str, Any]:
        """A `config.json` of this model, as transformers reads it."""
        scaling = {name: int(value) if name.startswith("original") else value for name, value in self.rope_scaling}
        window: dict[str, Any] = {"sliding_window": self.sliding_window}
        if self.family.startswith("qwen"):
            window |= {"use_sliding_window": self.sliding_window is not None, "max_window_layers": 0}
        return {
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": {
                "rope_type": "llama3" if scaling else "default",
                "rope_theta": self.rope_theta,
                **scaling,
            },
            "tie_word_embeddings": self.tied,
            "pad_token_id": None,
            **window,
        }

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors().values())

    @property
    def cost(self) -> Cost:
        """What a token costs in the matrices of layers and head, and a pair of tokens in attention (half of all pairs
        are seen, each is multiplied and added twice per head dimension)."""
        width = self.heads * self.head_dim
        attention = 2 * self.hidden * (width + self.kv_heads * self.head_dim)
        head = self.hidden * (self.vocab if self.head == "lm" else 1)
        matrices = self.layers * (attention + 3 * self.hidden * self.intermediate) + head
        return Cost(2.0 * matrices, 2.0 * self.layers * width, self.sliding_window)


def check_cut(
    role: str,
    p: int,
    t: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    columns: Sequence[int],
    layers: int,
    stage_layers: Sequence[int] | None,
) -> None:
    """Errors: ModelError when a model cannot be split by t and p.

    Heads and MLP `columns` divide by t; kv-heads divide by t, or t by them; every stage has a decoder layer, and
    `stage_layers`, when given, are the layers of each of the p stages.
    """
    sizes = [n for n in range(1, math.gcd(heads, *columns) + 1) if _divides(n, heads, kv_heads, head_dim, columns)]
    for what, count in (("heads", heads), *(("MLP columns", count) for count in columns)):
        if count % t:
            raise ModelError(f"{role} has {count} {what}, not divisible by t={t}. Use tp in {sizes}.")
    if t not in sizes:
        raise ModelError(
            f"{role} has {kv_heads} kv-heads, which neither divide by t={t} nor t by them. Use tp in {sizes}."
        )
    if layers < p:
        raise ModelError(f"{role} has {layers} layers, fewer than p={p} stages. Use pp up to {layers}.")
    if stage_layers is not None and (len(stage_layers) != p or sum(stage_layers) != layers or min(stage_layers) < 1):
        raise ModelError(
            f"stage_layers={tuple(stage_layers)} are {sum(stage_layers)} layers on {len(stage_layers)} stages; "
            f"{role} has {layers} layers and p={p}. Give the layers of each stage in order, at least one each."
        )


def _divides(t: int, heads: int, kv_heads: int, head_dim: int, columns: Sequence[int]) -> bool:
    rows = (heads + 2 * kv_heads) * head_dim  # of fused query, key and value
    whole = heads % t == 0 and rows % t == 0 and not any(count % t for count in columns)
    return whole and (kv_heads % t == 0 or t % kv_heads == 0)


def read_config(directory: str | Path) -> dict[str, Any]:
    """The `config.json` of a Hugging Face directory.

    Errors: CheckpointError when it is not there or no mapping; those of `check_no_code`.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} is not a Hugging Face checkpoint directory: {path} does not exist.")
    check_no_code(directory)
    return read_settings(path)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in a JSON file. Errors: CheckpointError when it has something else."""
    try:
        found = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, not the settings of a model.")
    return found


_SETTINGS_FILES = tuple(
    f"{name}config.json" for name in ("", "tokenizer_", "generation_", "processor_", "preprocessor_", "adapter_")
)
_CODE = ("auto_map", "custom_generate")
_KERNELS = ("attn_implementation", "experts_implementation")  # a name with a slash is a kernel on the hub


def check_no_code(directory: str | os.PathLike[str]) -> None:
    """Errors: CheckpointError for a Hugging Face directory whose files ask for code of its authors.

    Also where transformers has a class for the same `model_type`: it may compute something else.
    """
    for path in (Path(directory) / name for name in _SETTINGS_FILES):
        if path.is_file() and (found := next(_code(read_settings(path)), None)) is not None:
            raise CheckpointError(
                f"{path} asks by {found[0]!r} for code of the model's authors, {found[1]!r:.200}, which hybridflow "
                f"never runs. If transformers has a class of its own for this model and computes the same, delete the "
                f"key in a copy of the directory and use that."
            )


def _code(value: Any) -> Iterator[tuple[str, Any]]:
    """Keys, at any depth, that name code, and what they say."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        hub_kernel = str(key).lstrip("_") in _KERNELS and "/" in str(inner)
        if hub_kernel or (key in _CODE and inner):
            yield key, inner
        yield from _code(inner)
    for inner in value if isinstance(value, list) else ():
        yield from _code(inner)


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A setting that may be missing or null. Errors: ModelError for what is no number."""
    value = config.get(name)
    try:
        return float(default if value is None else value)
    except (TypeError, ValueError):
        raise ModelError(f"{name}={value!r} of this model's config is not a number.") from None


_LLAMA3 = ("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings")


def _rope(config: Mapping[str, Any]) -> tuple[float, str, dict[str, float]]:
    """Theta, kind and the kind's other parameters, read as transformers does: `rope_scaling`, as older checkpoints
    call it, replaces `rope_parameters`. Errors: ModelError for a parameter that would be left out."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ModelError(f"config.json has the rope parameters {rope!r}: they must be a mapping.")
    rope = {name: value for name, value in rope.items() if value is not None}
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    legacy = rope.pop("type", None)
    kind = rope.pop("rope_type", legacy or "default")
    if kind not in ("default", "llama3"):
        raise ModelError(f"rope type {kind!r} is not supported. Known: default, llama3.")
    if legacy not in (None, kind):
        raise ModelError(f"the rope settings have rope_type={kind!r} and type={legacy!r}. Delete the wrong one.")
    for partial in (rope.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")):
        if partial not in (None, 1.0):
            raise ModelError(f"partial_rotary_factor={partial} is not supported.")
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    known = _LLAMA3 if kind == "llama3" else ()
    if unknown := sorted(rope.keys() - set(known)):
        raise ModelError(f"rope parameters {', '.join(unknown)} are not read with rope type {kind!r}. Delete them.")
    if missing := [name for name in known if rope.get(name) is None]:
        raise ModelError(f"rope type {kind!r} needs {', '.join(missing)}, which the config lacks.")
    return (
        _number({"rope_theta": theta}, "rope_theta", 10000.0),
        kind,
        {name: _number(rope, name, 0.0) for name in known},
    )


def _sliding_window(family: str, config: Mapping[str, Any]) -> int | None:
    """The attention window of all layers, or None. Errors: ModelError when only some layers have one.

    Only keys that transformers reads in this family count: none of llama, and `sliding_window` alone of mistral.
    """
    if family in ("llama", "mistral"):
        return config.get("sliding_window") if family == "mistral" else None
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if window is None:
        return None
    layers = config["num_hidden_layers"]
    full = min(layers, config.get("max_window_layers", 0))  # the first layers attend to everything
    if types := config.get("layer_types"):
        full = sum(kind == "full_attention" for kind in types)
    if 0 < full < layers:
        raise ModelError(
            f"{full} of {layers} layers attend to everything and the others to {window} tokens, which is not supported."
        )
    return None if full else window


_LLAMA = {"family": "llama", "head_dim": 128, "vocab": 128256, "rope_theta": 500000.0, "context": 8192}
_SIZES = {
    "llama3-7b": (4096, 14336, 32, 32, 8),
    "llama3-13b": (5120, 13824, 40, 40, 40),
    "llama3-34b": (8192, 22016, 48, 64, 8),
    "llama3-70b": (8192, 28672, 80, 64, 8),
}
PUBLISHED: Mapping[str, ModelSpec] = MappingProxyType(
    {
        name: ModelSpec(hidden=h, intermediate=i, layers=layers, heads=heads, kv_heads=kv, **_LLAMA)  # type: ignore[arg-type]
        for name, (h, i, layers, heads, kv) in _SIZES.items()
    }
)
"""The models of ReaL's and HybridFlow's evaluations."""

"""Sizes: what the planner knows of a decoder of any family: the elements of its parts. Pure.

Stored elements decide memory and messages, those that a token meets arithmetic: of a mixture's experts a part."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from hybridflow.errors import ModelError
from hybridflow.models.hf_spec import Decoder, TransformersSpec, hf_config, latent_size, text_config
from hybridflow.models.images import VISION_TOWER
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import even_bounds

_EXPERTS = re.compile(r"\.experts\.")
_WITHOUT_KEYS = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "mlp", "moe")
_ATTENTION = re.compile(r"att(ention|n)|mixer|temporal", re.IGNORECASE)


@dataclass(frozen=True)
class Tower:
    """What encodes images of patches of `patch` numbers, `merge` x `merge` of which are a token: its `elements`, those
    that a patch `meets` in products, and `layers` blocks of `width` columns and `intermediate` ones, `gated` or not. Of
    them `windowed` look at `window` patches, the others at all of an image."""

    elements: int = 0
    meets: float = 0.0
    patch: int = 0
    merge: int = 1
    layers: int = 0
    width: int = 0
    intermediate: int = 0
    gated: bool = False
    windowed: int = 0
    window: int = 0

    def pairs(self, patches: float) -> float:
        """Of all blocks, in an image of `patches` patches."""
        return patches * ((self.layers - self.windowed) * patches + self.windowed * min(patches, self.window))


@dataclass(frozen=True)
class Sizes:
    """Elements of a model's parts: a decoder `layer` of `tensors` tensors, the `embedding` and the `output`; where
    layers differ the mean, and `each` has (elements, of these in routed experts) of every layer. Its `tower` is one of
    its ends.

    Of a layer, `expert` elements are those of `experts` routed experts with `columns` each in the share `sparse` of the
    layers, `chosen` of which a token meets; `attention` and `mlp` those of all other matrices, keys and values counted
    apart. Latent attention keeps one kv-head, half as wide as what it caches, of which `latent` columns are made.
    `windows` are what layers attend to (None: everything), and the share of the layers that do.
    """

    hidden: int
    intermediate: float
    layers: int
    queries: float
    kv_heads: int
    head_dim: float
    vocab: int
    layer: float
    tensors: int
    embedding: int
    output: int
    total: int
    attention: float
    mlp: float
    windows: tuple[tuple[int | None, float], ...] = ((None, 1.0),)
    latent: float = 0.0
    expert: float = 0.0
    experts: int = 0
    chosen: int = 0
    columns: int = 0
    sparse: float = 0.0
    each: tuple[tuple[int, int], ...] = ()
    tower: Tower = Tower()

    def __hash__(self) -> int:
        return hash((self.total, self.layers, self.layer))

    @staticmethod
    @lru_cache(maxsize=256)
    def of(model: Decoder) -> Sizes:
        return _plain(model) if isinstance(model, ModelSpec) else _read(model)

    @property
    def outside(self) -> float:
        return self.total - self.layers * self.layer

    @property
    def met(self) -> float:
        """The share of a layer's experts that a token meets."""
        return self.chosen / self.experts if self.experts else 0.0

    def keys_on(self, t: int) -> float:
        """Columns of keys on a device: kv-heads are repeated where t is larger than their number."""
        return max(self.kv_heads / t, 1) * self.head_dim

    def seen(self, tokens: float) -> float:
        """Of `tokens` tokens before one, those that a layer attends to."""
        return sum(share * (tokens if size is None else min(tokens, size)) for size, share in self.windows)

    def pairs(self, tokens: float, square: float) -> float:
        """Causal attention pairs of one row of `tokens` tokens (mean; `square` is the mean square)."""
        each = (
            share * (square if size is None or size >= tokens else size * (2 * tokens - size)) / 2
            for size, share in self.windows
        )
        return sum(each)

    def outside_on(self, t: int, towers: int) -> float:
        """Elements outside of the layers on each of `t` ranks, `towers` of which share the tower."""
        return (self.outside - self.tower.elements) / t + self.tower.elements / towers

    def held(self, p: int, t: int, experts: int, towers: int = 1) -> tuple[float, float]:
        """Elements of the stage with most on one rank, of p stages whose layers `t` ranks share, routed experts
        `experts` ranks, and the tower `towers`: outside of experts, and in them."""
        bounds, stages = even_bounds(self.layers, p), list[tuple[float, float]]()
        for stage in {0, p - 1} if not self.each else range(p):  # larger stages come first
            first, last = bounds[stage], bounds[stage + 1]
            routed = (last - first) * self.expert
            layers = (last - first) * self.layer
            if self.each:
                layers, routed = map(sum, zip(*self.each[first:last], strict=True))
            ends = self.embedding * (stage == 0) + (self.hidden + self.output) * (stage == p - 1)
            outside = ends / t + self.tower.elements / towers * (stage == 0)
            outside = self.outside_on(t, towers) if p == 1 else outside  # of one stage: a tied output is no copy
            stages.append(((layers - routed) / t + outside, routed / experts))
        return max(stages, key=sum)


def _plain(model: ModelSpec) -> Sizes:
    layer = sum(prod(shape) for shape in model.layer_tensors(0).values())
    total, embedding, queries = model.num_parameters, model.vocab * model.hidden, model.heads * model.head_dim
    output = total - layer * model.layers - embedding - model.hidden
    if model.head == "lm" and model.tied:
        output = embedding  # the last stage keeps a copy of what it computes logits with
    return Sizes(
        hidden=model.hidden,
        intermediate=model.intermediate,
        layers=model.layers,
        queries=queries,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        vocab=model.vocab if model.head == "lm" else 1,
        layer=layer,
        tensors=len(model.layer_tensors(0)),
        embedding=embedding,
        output=output,
        total=total,
        attention=2 * model.hidden * queries,
        mlp=3 * model.hidden * model.intermediate,
        windows=((model.sliding_window, 1.0),),
    )


def _read(model: TransformersSpec) -> Sizes:
    """From the tensors of the checkpoint: of matrices in layers, experts are those that lie in a parameter with an axis
    for them."""
    config, of_layer = text_config(model), re.compile(re.escape(model.layer_list) + r"\.(\d+)\.")
    mixture = _mixture(config)  # other tensors with three axes are convolutions
    whole = [part for part in model.parts.values() if len(part.shape) == 3 and part.shape[0] == mixture["experts"]]
    stacked = {name for part in whole for name in part.tensors}
    count, elements, routed = Counter[str](), [0] * model.layers, [0] * model.layers
    for name, shape in model.shapes.items():
        of = model.parameter(name)
        if (at := of_layer.match(of)) is None:
            count["output" if not of.startswith(f"{model.decoder}.") else "outside"] += prod(shape)
            continue
        number, size = int(at[1]), prod(shape)
        elements[number] += size
        if name in stacked or (len(shape) == 3 and shape[0] == mixture["experts"]) or _EXPERTS.search(name):
            routed[number] += size
            count["experts"] += size if len(shape) > 1 else 0
        elif len(shape) == 2:
            count["attention" if _ATTENTION.search(name.removeprefix(at[0])) else "mlp"] += size
    if any(routed) and not mixture["experts"]:
        raise ModelError(f"{model.family} has experts, and its config does not say how many: it cannot be planned yet.")
    hidden, layers, total, tower = model.hidden, model.layers, model.num_parameters, _tower(model)
    heads, get = model.heads, lambda name: getattr(config, name, None) or 0
    width = get("head_dim") or (get("qk_nope_head_dim") + get("qk_rope_head_dim")) or hidden // heads
    width *= _attending(config)  # the mean of all layers
    queries, kv_heads, head_dim, latent = heads * width, model.kv_heads, width, 0.0
    if cached := latent_size(model):
        both = heads * (get("qk_nope_head_dim") + get("qk_rope_head_dim") + get("v_head_dim"))
        queries, latent, kv_heads, head_dim = both / 2, both / 2, 1, cached / 2
    return Sizes(
        hidden=hidden,
        intermediate=count["mlp"] / layers / (3 * hidden),
        layers=layers,
        queries=queries,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=model.vocab if model.head == "lm" else 1,
        layer=sum(elements) / layers,
        tensors=-(-sum(map(bool, map(of_layer.match, map(model.parameter, model.shapes)))) // layers),
        embedding=count["outside"] - hidden - tower.elements,
        output=model.vocab * hidden if model.tied and model.head == "lm" else count["output"],
        total=total,
        attention=count["attention"] / layers - 2 * hidden * kv_heads * head_dim,
        mlp=count["mlp"] / layers,
        windows=_windows(config, layers),
        latent=latent,
        expert=count["experts"] / layers,
        each=tuple(zip(elements, routed, strict=True)) if any(routed) else (),
        sparse=sum(map(bool, routed)) / layers,
        tower=tower,
        **(mixture if any(routed) else {}),
    )


def _tower(model: TransformersSpec) -> Tower:
    """A patch meets all matrices but tables of positions; what merges patches, a share of them."""
    if model.images is None:
        return Tower()
    config, merge, elements, meets = hf_config(model.config).vision_config, model.images.merge, 0, 0.0
    own = [(model.parameter(name), shape) for name, shape in model.shapes.items()]
    for name, shape in own:
        if name.startswith(VISION_TOWER):
            elements += prod(shape)
            if len(shape) > 1 and "pos_embed" not in name:
                meets += prod(shape) / (merge**2 if "merger" in name else 1)
    whole = getattr(config, "fullatt_block_indexes", None)
    side = merge * (config.window_size // merge // config.patch_size) if whole is not None else 0
    return Tower(
        elements=elements,
        meets=meets,
        patch=model.images.patch,
        merge=merge,
        layers=config.depth,
        width=config.hidden_size,
        intermediate=config.intermediate_size,
        gated=any(name.startswith(VISION_TOWER) and ".gate_proj." in name for name, _ in own),
        windowed=0 if whole is None else config.depth - len(whole),
        window=side**2,
    )


def _windows(config: Any, layers: int) -> tuple[tuple[int | None, float], ...]:
    """By the kinds of layers; where the config has none, all are alike."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    sliding = sum(kind == "sliding_attention" for kind in kinds) / len(kinds) if window else 0.0
    return tuple(one for one in ((window, sliding), (None, 1.0 - sliding)) if one[1])


def _attending(config: Any) -> float:
    """The share of the layers that have keys; where none has, one: what a row keeps is never nothing."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [""]
    return max(1, sum(kind not in _WITHOUT_KEYS for kind in kinds)) / len(kinds)


def _mixture(config: Any) -> dict[str, Any]:
    """Of a config that calls its experts as families do: their number, how many a token meets, columns of each."""
    first = lambda *names: next((found for name in names if (found := getattr(config, name, None))), 0)  # noqa: E731
    experts = first("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    chosen = first("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk") or experts
    columns = first("moe_intermediate_size", "intermediate_size")
    return {"experts": experts, "chosen": chosen, "columns": columns}

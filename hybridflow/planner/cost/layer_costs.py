"""Layer costs: seconds of one decoder layer, and of the output, on one device for one micro-batch. Pure.

Roofline (Williams et al. 2009): a matrix product takes as long as its arithmetic or as its weights, whichever is more.
Between the products lie operations that only move memory; norms and residuals do so on every tensor parallel rank.

T tokens of a micro-batch, H hidden, I intermediate, Q and K columns of queries and of keys, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.hardware import Coefficients, Site

# Elements that pass by between products, for each that there is, as one kernel after another reads and writes them:
# two norms and two residuals, on every rank unless these share the sequence; a rotation (a product, then a sum with a
# second one) and the gate (its activation, then a product), of its own shard.
APART, ROTATED, GATED = 10, 5, 5
LOGITS = 4 * 4.0  # bytes of float32 logits that pass by: written, read twice (maximum and sum), gathered


@dataclass(frozen=True)
class Sizes:
    """Elements of a model's parts: a decoder `layer`, its `matrices`, the `embedding` and the `output`."""

    hidden: int
    intermediate: int
    layers: int
    queries: int
    keys: int
    kv_heads: int
    head_dim: int
    vocab: int
    layer: int
    embedding: int
    output: int
    total: int
    window: int | None

    @staticmethod
    @lru_cache(maxsize=256)
    def of(model: ModelSpec) -> Sizes:
        layer = sum(prod(shape) for shape in model.layer_tensors(0).values())
        total, embedding = model.num_parameters, model.vocab * model.hidden
        output = total - layer * model.layers - embedding - model.hidden
        if model.head == "lm" and model.tied:
            output = embedding  # the last stage keeps a copy of what it computes logits with
        return Sizes(
            hidden=model.hidden,
            intermediate=model.intermediate,
            layers=model.layers,
            queries=model.heads * model.head_dim,
            keys=model.kv_heads * model.head_dim,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            vocab=model.vocab if model.head == "lm" else 1,
            layer=layer,
            embedding=embedding,
            output=output,
            total=total,
            window=model.sliding_window,
        )

    def keys_on(self, t: int) -> float:
        """Columns of keys on a device: kv-heads are repeated where t is larger than their number."""
        return max(self.kv_heads / t, 1) * self.head_dim

    def stage(self, p: int) -> tuple[float, float]:
        """Elements of the first and of the last of p stages (the same when p is 1); larger stages come first."""
        if p == 1:
            both = self.total
            return both, both
        most, least = -(-self.layers // p), self.layers // p
        return most * self.layer + self.embedding, least * self.layer + self.hidden + self.output


@dataclass(frozen=True)
class Seconds:
    """Of one pass of one micro-batch: arithmetic, memory traffic, tensor parallel messages, launches."""

    compute: float = 0.0
    memory: float = 0.0
    tensor_parallel: float = 0.0
    fixed: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.memory + self.tensor_parallel + self.fixed

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.compute + other.compute,
            self.memory + other.memory,
            self.tensor_parallel + other.tensor_parallel,
            self.fixed + other.fixed,
        )

    def times(self, factor: float) -> Seconds:
        return Seconds(self.compute * factor, self.memory * factor, self.tensor_parallel * factor, self.fixed * factor)


def product(site: Site, k: Coefficients, rows: float, weights: float, columns: float, itemsize: int) -> float:
    """Seconds of products of `rows` rows with `weights` elements on this device; `columns` is the side that tensor
    parallelism cuts: thin shards do not fill the device."""
    arithmetic = 2 * rows * weights / (site.flops * k.compute * columns / (columns + k.half_columns))
    return max(arithmetic, weights * itemsize / site.bandwidth)


def layer_forward(
    site: Site, size: Sizes, k: Coefficients, tokens: float, pairs: float, itemsize: int, launch: float | None = None
) -> Seconds:
    """A decoder layer over `tokens` tokens, which look at `pairs` pairs of tokens (causal ones only)."""
    t, hidden, keys = site.t, size.hidden, size.keys_on(site.t)
    queries, wide = size.queries / t, size.intermediate / t
    products = layer_products(site, size, k, tokens, itemsize)
    attention = 4 * pairs * queries / (site.flops * k.attention)
    moved = APART * hidden / site.shares + ROTATED * (queries + keys) + GATED * wide
    return Seconds(
        compute=products + attention,
        memory=tokens * moved * itemsize / site.bandwidth,
        tensor_parallel=2 * site.tensor_all_reduce(tokens * hidden * itemsize),
        fixed=k.layer_seconds if launch is None else launch,
    )


def layer_products(site: Site, size: Sizes, k: Coefficients, tokens: float, itemsize: int) -> float:
    """Seconds of a decoder layer's products with its weights."""
    hidden, queries, wide = size.hidden, size.queries / site.t, size.intermediate / site.t
    attention = product(site, k, tokens, hidden * (2 * queries + 2 * size.keys_on(site.t)), queries, itemsize)
    return attention + product(site, k, tokens, 3 * hidden * wide, wide, itemsize)


def layer_backward(forward: Seconds, frozen: float = 0.0) -> Seconds:
    """Twice the products (by inputs and by weights) and traffic, and one all-reduce for each of the forward's.
    `frozen` are seconds of products with weights that get no gradient."""
    return Seconds(2 * forward.compute - frozen, 2 * forward.memory, forward.tensor_parallel, 2 * forward.fixed)


def output_forward(site: Site, size: Sizes, k: Coefficients, tokens: float, itemsize: int) -> Seconds:
    """Logits and log-probabilities of `tokens` tokens, cut by t along the vocabulary; next to nothing for a value."""
    if size.vocab == 1 or tokens == 0:
        return Seconds()
    columns = size.vocab / site.t
    return Seconds(
        compute=product(site, k, tokens, size.hidden * columns, columns, itemsize),
        memory=tokens * columns * LOGITS / site.bandwidth,
        tensor_parallel=site.tensor_all_reduce(3 * 4 * tokens),
        fixed=k.layer_seconds,
    )


def causal_pairs(size: Sizes, tokens: float, square: float) -> float:
    """Pairs of tokens that one row of `tokens` tokens (mean; `square` their mean square) looks at."""
    if size.window is None or size.window >= tokens:
        return square / 2
    inside = size.window
    return inside * (2 * tokens - inside) / 2

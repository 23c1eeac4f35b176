"""What a pipeline stage consists of: units, and the parts in which an optimizer step runs through them. Pure.

A *unit* (the embedding, a decoder layer without its fused query, key and value, those of one layer, the final norm,
the output layer) has flat buffers of its own for its parameters and gradients. So its memory can be released alone, or
shared with generation, which stores the rest of a layer alike but seldom the fused rows; and an optimizer step can
update and gather it alone. With Megatron's distributed optimizer every data parallel rank owns one contiguous range of
each unit's buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.models.spec import ModelSpec
from hybridflow.topology import Coords, RankGrid

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
_PARAMETER_ALIGNMENT, _BUFFER_ALIGNMENT = 64, 128  # elements: Megatron's _ParamAndGradBuffer


def stages(layers: int, p: int, stage_layers: Sequence[int] | None = None) -> tuple[range, ...]:
    """Decoder layers of each pipeline stage; by default as even as can be, larger stages first."""
    counts = stage_layers or [layers // p + (stage < layers % p) for stage in range(p)]
    starts = [sum(counts[:stage]) for stage in range(p)]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def padded_vocab(vocab: int, t: int) -> int:
    """Rows of the embedding over all t ranks: the vocabulary rounded up to a multiple of t."""
    return -(-vocab // t) * t


def vocabulary_rows(vocab: int, t: int, at: int) -> tuple[int, int]:
    """The token ids whose rows tensor parallel rank `at` holds; the rest of its rows are padding."""
    here = padded_vocab(vocab, t) // t
    return min(vocab, at * here), min(vocab, (at + 1) * here)


@dataclass(frozen=True)
class Unit:
    """Names and local shapes of the parameters that share a buffer, stepped in part `part`."""

    part: int
    parameters: dict[str, tuple[int, ...]]

    def owned(self, d: int, at: int) -> dict[str, tuple[int, int]]:
        """The range of each flattened parameter that data parallel rank `at` of `d` owns; nothing where it is empty.

        Megatron lays parameters out from the last to the first, aligned, and cuts the padded buffer into d ranges.
        """
        placed, end = {}, 0
        for name, shape in reversed(self.parameters.items()):
            start = -(-end // _PARAMETER_ALIGNMENT) * _PARAMETER_ALIGNMENT
            end = start + math.prod(shape)
            placed[name] = (start, end)
        multiple = math.lcm(d, _BUFFER_ALIGNMENT)
        share = -(-end // multiple) * multiple // d
        found = {}
        for name, (start, stop) in placed.items():
            first, last = max(start, at * share), min(stop, (at + 1) * share)
            if first < last:
                found[name] = (first - start, last - start)
        return found


def units(spec: ModelSpec, grid: RankGrid, at: Coords, stage_layers: Sequence[int] | None = None) -> list[Unit]:
    """The units of the stage of a rank at `at`."""
    here, hidden = stages(spec.layers, grid.p, stage_layers)[at.p], spec.hidden
    vocabulary = (padded_vocab(spec.vocab, grid.t) // grid.t, hidden)
    first, last = at.p == 0, at.p == grid.p - 1
    ends = _end_parts(spec)
    found = [Unit(ends["embedding"], {EMBEDDING: vocabulary})] if first else []
    parts = max(ends.values()) + 1
    found += [unit for local in range(len(here)) for unit in _layer(spec, grid.t, local, parts + local)]
    if last:
        found.append(Unit(ends["norm"], {"decoder.final_layernorm.weight": (hidden,)}))
    if last and spec.head == "value":
        found.append(Unit(ends["output"], {OUTPUT: (1, hidden)}))
    elif last and not (spec.tied and first):
        # a copy of tied embeddings steps with the original, and is cut over data parallel ranks like it
        found.append(Unit(ends["embedding" if spec.tied else "output"], {OUTPUT: vocabulary}))
    return found


def _end_parts(spec: ModelSpec) -> dict[str, int]:
    """The part of each end of the model; a final norm without an output layer of its own is too small for one."""
    own_output = spec.head == "value" or not spec.tied
    return {"embedding": 0, "norm": int(own_output), "output": int(own_output)}


def _layer(spec: ModelSpec, t: int, local: int, part: int) -> list[Unit]:
    """The fused query, key and value of a decoder layer, and the rest of it."""
    at, hidden, query = f"decoder.layers.{local}.", spec.hidden, spec.heads * spec.head_dim
    rows = (query + 2 * spec.kv_heads * spec.head_dim) // t
    fused: dict[str, tuple[int, ...]] = {"self_attention.linear_qkv.weight": (rows, hidden)}
    if spec.qkv_bias:
        fused["self_attention.linear_qkv.bias"] = (rows,)
    rest: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attention.linear_proj.weight": (hidden, query // t),
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * spec.intermediate // t, hidden),
        "mlp.linear_fc2.weight": (hidden, spec.intermediate // t),
    }
    if spec.qk_norm:
        rest["self_attention.q_layernorm.weight"] = (spec.head_dim,)
        rest["self_attention.k_layernorm.weight"] = (spec.head_dim,)
    return [Unit(part, {at + name: shape for name, shape in names.items()}) for names in (fused, rest)]

"""Workload: how many rows of what lengths an iteration works on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridflow.config import IMAGE_TOKENS, KV, DType
from hybridflow.errors import ConfigError
from hybridflow.settings import NonNegative, Positive, Size, check_fields, is_number, require, settings


@dataclass(frozen=True)
class Lengths:
    """Lengths in tokens: their `mean`, `max` and mean square (attention works on pairs of tokens). Errors: ConfigError
    for lengths that are not positive, or whose figures contradict each other."""

    mean: Positive
    max: Positive
    square_mean: Positive

    def __post_init__(self) -> None:
        check_fields(self)
        good = self.mean <= self.max * (1 + 1e-9)
        require(good, f"Lengths: a mean of {self.mean:g} tokens is above the maximum of {self.max:g}.")

    @classmethod
    def of(cls, lengths: int | float | tuple[float, float] | list[float] | Sequence[int] | Lengths) -> Lengths:
        """From one length that all rows have, a pair (mean, max) (as if evenly spread around the mean), or a sample of
        at least three lengths."""
        if isinstance(lengths, Lengths):
            return lengths
        if is_number(lengths):
            return cls(lengths, lengths, float(lengths) * lengths)
        if not isinstance(lengths, list | tuple) or not lengths or not all(is_number(n) and n > 0 for n in lengths):
            raise ConfigError(f"lengths {lengths!r:.80}: give a positive number, a pair (mean, max), or a list.")
        if len(lengths) == 2 and isinstance(lengths, tuple):
            mean, longest = lengths
            spread = max(0.0, min(longest - mean, mean))
            return cls(mean, longest, mean * mean + spread * spread / 3)
        total = len(lengths)
        return cls(sum(lengths) / total, max(lengths), sum(n * n for n in lengths) / total)


@settings
class Workload:
    """One iteration: `rows` responses (`responses_per_prompt` of them share a prompt), and how they are trained on.

    `prompt` and `response` take what `Lengths.of` takes. `minibatches` and `epochs` hold for training calls that do not
    say otherwise. `recompute` trains with activation recomputation. `micro_tokens` is the token budget of a
    micro-batch; `micro_batches` per data parallel rank are those of another system's runs instead, for `calibrate`.
    With `sequence_parallel` the ranks of a tensor parallel group share what lies between the cut matrices, too, and
    hand it to the next stage once. With `time_sharing` two updates that follow each other run together where they have
    one layout with several stages (`hf.together`). Without `cuda_graphs` (`VLLM(eager=True)`) the kernels of a decode
    step are launched one by one. `kv` is that of a stream's VLLM. `patches` are those of the image of a row, whose
    tokens are part of `prompt`, and `image_tokens` those of `VLLM`. Errors: ConfigError for sizes that are not
    positive, and for more responses per prompt than rows."""

    rows: Size
    prompt: Any  # given as what Lengths.of takes, a Lengths from then on
    response: Any
    minibatches: Size = 1
    epochs: Size = 1
    recompute: bool = False
    dtype: DType = "bfloat16"
    responses_per_prompt: Size = 1
    micro_tokens: Size = 4096
    micro_batches: Size | None = None
    sequence_parallel: bool = True
    time_sharing: bool = False
    cuda_graphs: bool = True
    kv: KV = "recompute"
    patches: NonNegative = 0
    image_tokens: Size = IMAGE_TOKENS

    def __post_init__(self) -> None:
        for name in ("prompt", "response"):
            object.__setattr__(self, name, Lengths.of(getattr(self, name)))
        require(
            self.rows % self.responses_per_prompt == 0,
            f"Workload(rows={self.rows}, responses_per_prompt={self.responses_per_prompt}): rows are responses, and "
            "must be a multiple of those per prompt.",
        )

    @property
    def tokens(self) -> float:
        return self.prompt.mean + self.response.mean

    @property
    def longest(self) -> float:
        return self.prompt.max + self.response.max

    @property
    def under_way(self) -> float:
        """Mean tokens that the rows which are being generated at some moment end with: longer ones are more often met,
        in proportion to their length."""
        return self.prompt.mean + self.response.square_mean / self.response.mean

    @property
    def square(self) -> float:
        """Mean square of a row's tokens, prompt and response taken as independent."""
        return self.prompt.square_mean + self.response.square_mean + 2 * self.prompt.mean * self.response.mean

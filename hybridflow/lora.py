"""LoRA: a strategy's option to train low-rank adapters of a frozen model. Pure."""

from __future__ import annotations

import os
from typing import Annotated

from hybridflow.settings import Check, Positive, Size, is_number, require, settings


@settings
class LoRA:
    """Low-rank adapters (Hu et al. 2021), in peft's format: the model is frozen, and each target, a linear layer with
    weight W [out, in], computes (W + alpha / rank * B A) x (equation 3) with trained A [rank, in] and B [out, rank].

    `targets` name linear layers of the decoder as peft does: "q_proj", "mlp.up_proj", or
    "model.layers.0.self_attn.q_proj" for a single one; "all-linear" is all of them. `dropout` applies to x before A in
    training. `start` is a directory in peft's format whose adapters training continues; without it B starts at zero.
    """

    rank: Size = 16
    alpha: Positive = 32
    targets: tuple[str, ...] = ("all-linear",)
    dropout: Annotated[float, Check("a number in [0, 1)", lambda value: is_number(value) and 0 <= value < 1)] = 0.0
    start: str | None = None

    def __post_init__(self) -> None:
        if self.start is not None:
            good = isinstance(self.start, str | os.PathLike) and str(self.start)
            require(bool(good), f"LoRA(start={self.start!r}): give a directory of saved adapters, or None.")
            object.__setattr__(self, "start", os.fspath(self.start))
        require(
            bool(self.targets) and all(isinstance(target, str) and target for target in self.targets),
            f"LoRA(targets={self.targets!r}): name linear layers such as 'q_proj', or give 'all-linear'.",
        )
        require(
            "all-linear" not in self.targets or len(self.targets) == 1,
            f"LoRA(targets={self.targets!r}): 'all-linear' is every linear layer and stands alone.",
        )

    def adapts(self, layer: str) -> bool:
        """Whether the linear layer of this name has adapters."""
        return any(self.matches(target, layer) for target in self.targets)

    @staticmethod
    def matches(target: str, layer: str) -> bool:
        return target == "all-linear" or layer == target or layer.endswith(f".{target}")

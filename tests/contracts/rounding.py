"""How far an engine that computes in 16 bits may be from the float32 model of transformers, and what it is asked for.

A result of a 16-bit operation is off by at most u, the rounding unit, of itself: 2^-8 in bfloat16, 2^-11 in float16.
Of numbers m * 2^e, whose m in [1, 2) is spread as 1 / m, the mean square of that is u^2 / (8 ln 2). Residual paths and
norms hand relative errors on about as large as they are, and roundings know nothing of each other, so k of them add up
in squares: what comes out is off by u * sqrt(k / (8 ln 2)). That takes all k to lie one behind the other; those in
a branch weigh less than the residual that it is added to, so what is found is two to four times smaller. The loss is
linear in what the head gives, and nothing is clipped: no step function lies between rounding and gradients.

Shapes: B rows, R response tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import SGD
from hybridflow.models.spec import ModelSpec
from tests.contracts.engine_tasks import boxes, build, share
from tests.contracts.example_models import load_model, make_batch, reference, relative, totals_of
from tests.contracts.rank_processes import World
from tests.contracts.state_tasks import state_boxes

UNIT = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
# all updates together are a few roundings of the parameters: those of bfloat16 would be off by a tenth of them
UPDATES, LR, TEMPERATURE = 3, 0.05, 0.7
OPTIMIZER = SGD(lr=LR, clip_grad=0.0)


def roundings(spec: ModelSpec) -> int:
    """Results that are rounded between a token id and what the head gives, weights included."""
    norm = 3  # what was divided, its product with the weight, the weight
    linear = 2 + (2 if spec.qkv_bias else 0)  # the weight and the result; a bias and what it is added to
    heads = (norm if spec.qk_norm else 0) + 4  # of queries and of keys: and the rotation's cosines, products and sum
    attention = norm + 3 * linear + 2 * heads + 2 + 2 + 1  # probabilities and what they weigh; projection; residual
    mlp = norm + 2 * 2 + 2 + 2 + 1  # gate and up; activation and product; down; residual
    return 1 + spec.layers * (attention + mlp) + norm + 2


@dataclass(frozen=True)
class Tolerance:
    """Of what the head gives, relative to its spread; and of gradients, relative to their norm.

    A gradient sees the roundings of the forward pass twice, in the activations and in what the loss says, and those of
    the backward pass once.
    """

    outputs: float
    gradients: float

    @classmethod
    def of(cls, dtype: str, spec: ModelSpec) -> Tolerance:
        unit, k = UNIT[dtype] / math.sqrt(8 * math.log(2)), roundings(spec)
        return cls(unit * math.sqrt(k), unit * math.sqrt(3 * k))


def weighted(found: Mapping[str, Ragged], rows: Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss that is linear in what the head gives: each token has its advantage as weight."""
    values = found["values" if "values" in found else "log_probs"].values
    loss = (values * rows["advantages"].values.to(values.device)).sum() / totals.tokens
    return loss, {"loss": loss}


def names(head: str) -> tuple[str, ...]:
    return ("values",) if head == "value" else ("log_probs",)


def observe(engine: Any, rank: int, head: str) -> dict[str, Any]:
    """What the head gives, gradients of one mini-batch, and main parameters before and after updates, as boxes."""
    found: dict[str, Any] = {
        "outputs": engine.forward(share(make_batch(), engine.grid, rank), names(head), TEMPERATURE)
    }
    found["before"] = state_boxes(engine)["main"]
    for step in range(UPDATES):
        engine.forward_backward(share(make_batch(seed=step), engine.grid, rank), weighted, names(head), TEMPERATURE)
        if step == 0:
            (scale,) = engine.optimizer_counters()["loss_scale"].get("scale", [1.0])
            found["gradients"] = [(*box[:3], box[3] / scale) for box in boxes(engine, engine.gradients())]
        assert engine.step()["skipped"] == 0.0
    found["after"] = state_boxes(engine)["main"]
    return found


def observed(world: World, name: str, strategy: Any, size: int, path: Path, head: str) -> dict[str, Any]:
    """`observe` on a rank of the processes."""
    engine = build(world, name, strategy, size, path, head, OPTIMIZER)
    found = observe(engine, world.rank, head)
    engine.context.groups.close()
    return found


@dataclass(frozen=True)
class Errors:
    """Of what the head gives, over its spread; of the first gradients and of movements, over their norms."""

    outputs: float
    gradients: float
    moved: float

    def within(self, tolerance: Tolerance) -> bool:
        return self.outputs < tolerance.outputs and max(self.gradients, self.moved) < tolerance.gradients

    def beyond(self, tolerance: Tolerance) -> bool:
        """Every one of them."""
        return self.outputs > tolerance.outputs and min(self.gradients, self.moved) > tolerance.gradients


@dataclass(frozen=True)
class Exact:
    """What transformers gives in float32, with plain SGD: outputs [B, R], the first gradients, how parameters move."""

    outputs: Ragged
    spread: float  # what an error of the head's input makes of them, over the relative size of that error
    gradients: dict[str, Tensor]
    moved: dict[str, Tensor]

    @classmethod
    def of(cls, path: Path, head: str) -> Exact:
        model: Any = load_model(path, head)
        parameters = dict(model.named_parameters())
        start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        first, name = {}, names(head)[0]
        with torch.no_grad():
            outputs = reference(model, head, make_batch(), TEMPERATURE)[name]
            spread = _spread(model, head, outputs)
        for step in range(UPDATES):
            batch = make_batch(seed=step)
            model.zero_grad()
            weighted(reference(model, head, batch, TEMPERATURE), batch, totals_of(batch))[0].backward()
            first = first or {name: parameter.grad.clone() for name, parameter in parameters.items()}
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter -= LR * parameter.grad
        moved = {name: parameter.detach() - start[name] for name, parameter in parameters.items()}
        return cls(outputs, spread, first, moved)

    def errors(self, outputs: Ragged, gradients: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> Errors:
        difference = (outputs.values - self.outputs.values).square().mean().sqrt()
        return Errors(float(difference) / self.spread, relative(gradients, self.gradients), relative(moved, self.moved))


def _spread(model: Any, head: str, outputs: Ragged) -> float:
    """Root of the mean square of the values, or of logits around their mean: an error of the target's logit and one of
    the normaliser, which is at most as large, make that of a log-probability."""
    if head == "value":
        return float(outputs.values.square().mean().sqrt())
    batch, rows = make_batch(), []
    for prompt, response in zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True):
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        rows.append(logits - logits.mean(-1, keepdim=True))
    return math.sqrt(2) * float(torch.cat(rows).square().mean().sqrt())

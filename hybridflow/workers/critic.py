"""CriticWorker: values of response tokens (paper, table 4), of rewards or of costs (Safe-RLHF)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from hybridflow.algorithms.losses.loss import Loss, Outputs, Share, Totals
from hybridflow.algorithms.registry import value_loss
from hybridflow.batch.batch import Batch
from hybridflow.config import Megatron, Optimizer, TrainStrategy
from hybridflow.engines.worker_spec import WorkerSpec
from hybridflow.errors import ConfigError, nearest
from hybridflow.models.images import IMAGES
from hybridflow.protocols.operation import Settings, register
from hybridflow.protocols.protocol import THREE_D_PROTO
from hybridflow.topology import RankGrid
from hybridflow.workers.model_worker import ModelWorker
from hybridflow.workers.update_call import UpdateCall

_OF_COSTS = MappingProxyType({"values": "cost_values", "returns": "cost_returns"})
"""A cost critic's columns for the `values` and `returns` of a value loss."""


class CostLoss(Loss):
    """A value loss on cost columns, renamed to the columns that it reads."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.outputs, self.by_sequence = loss, loss.outputs, loss.by_sequence
        self.reads = None if loss.reads is None else tuple(map(_cost_column, loss.reads))
        self.metrics = {_cost_metric(name): how for name, how in loss.metrics.items()}

    @property
    def per_token(self) -> tuple[str, ...]:
        return tuple(map(_cost_column, self.loss.per_token))

    def __call__(self, outputs: Outputs, rows: Batch, totals: Totals, /) -> Share:
        known = {own: name for name, own in _OF_COSTS.items() if own in rows}
        hidden = [name for name in known.values() if name in rows]
        scalar, metrics = self.loss(outputs, rows.without(*hidden).rename(known), totals)
        return scalar, {_cost_metric(name): value for name, value in metrics.items()}


def _cost_column(read: str) -> str:
    name = read.removesuffix("?")
    return _OF_COSTS.get(name, name) + read[len(name) :]


def _cost_metric(name: str) -> str:
    return re.sub("^critic/", "cost_critic/", name)


def cost_loss(loss: str | Loss | Callable[..., Any], **options: Any) -> Loss:
    """`value_loss` on the columns of costs."""
    return CostLoss(value_loss(loss, **options))


_UPDATES = MappingProxyType({"rewards": UpdateCall("critic", value_loss), "costs": UpdateCall("critic", cost_loss)})


def _values(of: str) -> str:
    return "cost_values" if of == "costs" else "values"


class CriticWorker(ModelWorker):
    """One rank of a value model: the decoder of a checkpoint with a value head (zeros where it has none).

    With `of="costs"` it is the critic of a CostWorker's costs (Dai et al., "Safe RLHF", 2023): it writes
    `cost_values`, trains on `cost_values` and `cost_returns` (a custom loss reads them as `values` and `returns`), and
    its metrics are `cost_critic/...`. `offload=True` keeps parameters, gradients and optimizer state in host memory
    between calls.
    """

    role = "critic"
    head = "value"

    @classmethod
    def worker_spec(cls, settings: Settings) -> WorkerSpec:
        spec = super().worker_spec(settings)

        def check(grid: RankGrid, device_type: str) -> None:
            if not isinstance(of := settings["of"], str) or of not in _UPDATES:
                raise ConfigError(f"{cls.__name__}(of={of!r}) is unknown.{nearest(str(of), _UPDATES)}")
            spec.check(grid, device_type)

        return replace(spec, check=check)

    def __init__(
        self,
        *,
        model: str | os.PathLike[str],
        train: TrainStrategy = Megatron(),  # noqa: B008  a frozen value
        optim: Optimizer | None = None,
        of: Literal["rewards", "costs"] = "rewards",
        offload: bool = False,
    ) -> None:
        self.of = of
        self._build(model, train, optim, offload)

    @property
    def prefix(self) -> str:
        return "cost_critic" if self.of == "costs" else "critic"

    @register(
        THREE_D_PROTO,
        reads=("prompt_ids", "response_ids", *IMAGES),
        writes=lambda settings, call: (_values(settings["of"]),),
        balance="num_tokens",
    )
    def compute_values(self, batch: Batch) -> Batch | None:
        """`values` (of costs: `cost_values`) ragged [B, R] float32: the value before each response token is sampled."""
        return self._computed(batch, "values", _values(self.of))

    @register(
        THREE_D_PROTO,
        binds=lambda settings, call: _UPDATES[settings["of"]].binds(settings, call),
        reads=lambda settings, call: _UPDATES[settings["of"]].reads(settings, call),
        chunks="minibatches",
        trajectories=True,
        balance="num_tokens",
        check=lambda settings, call: _UPDATES[settings["of"]].check(settings, call),
    )
    def update_critic(
        self,
        batch: Batch,
        minibatches: int = 1,
        epochs: int = 1,
        loss: Any = "value",
        uneven: bool = False,
        **options: Any,
    ) -> dict[str, float]:
        """Steps on the value loss over `epochs` x `minibatches`.

        `loss` is a value such as `hf.algorithms.ValueLoss(clip=0.1)`, "value" with its `options`, or a
        function: see `value_loss`. Row counts of mini-batches may differ by one only with `uneven=True`.
        """
        del uneven  # used by the driver only
        with self.resident():
            return self._update(batch, _UPDATES[self.of].find_loss(loss, **options), epochs)

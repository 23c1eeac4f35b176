"""CallEstimate: what the calls of a training engine take on one rank, counted by running the engine on a FakeDevice."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import Optimizer, TrainStrategy
from hybridflow.engines.contract import UNINITIALIZED
from hybridflow.engines.fake_device import FakeDevice
from hybridflow.engines.profile import example_rows
from hybridflow.engines.router_replay import ROUTING, replay_sizes
from hybridflow.engines.train_backends import build_engine
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.models.hf_spec import Decoder
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.topology import RankGrid


@dataclass(frozen=True)
class CallEstimate:
    """Of one call on one rank."""

    held: Mapping[str, int]
    """Bytes by owner, as `TrainEngine.resident_bytes` has them, while the call runs."""
    active: int
    """Bytes beside these at the peak: activations, logits, what is gathered, message buffers."""
    flops: float
    collectives: Mapping[str, tuple[float, float]]
    """By kind: their number, and the bytes of their largest sides."""

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + self.active


@dataclass(frozen=True)
class CallRows:
    """A call of a group on one rank: its `rows` of (prompt, response) tokens, of one mini-batch in training, which is
    done `times` times."""

    kind: Literal["inference", "training"]
    rows: Sequence[tuple[int, int]]
    times: int = 1


def estimate_rank(
    role: str,
    rank: int,
    grid: RankGrid,
    strategy: TrainStrategy,
    spec: Decoder,
    optimizer: Optimizer | None,
    calls: Mapping[str, CallRows],
) -> dict[str, CallEstimate]:
    """Each of `calls` on this rank.

    Of a pass of many micro-batches twice as many as there are pipeline stages run, and at least four, whose rotations
    Megatron keeps, since peaks do not grow after these; FLOP and collectives of the others are added as of those.
    Errors: ConfigError in a process that is part of a torch world, and those of the engine.
    """
    device, found = FakeDevice(), dict[str, CallEstimate]()
    with device.rank(role, rank, grid) as context:
        engine = build_engine(context, strategy, spec, UNINITIALIZED, optimizer)
        if Sizes.of(spec).experts:
            engine.replay_routing()
        for name, asked in calls.items():
            found[name] = _Counted(device, engine, asked).estimate()
        engine.close()
        context.groups.close()
        del engine
        gc.collect()
    return found


def asked_rows(rows: Sequence[tuple[int, int]], spec: Decoder) -> Batch:
    """Rows of these numbers of prompt and response tokens, which meet all experts alike."""
    batch = example_rows(*zip(*rows, strict=True), spec=spec)
    if not Sizes.of(spec).experts:
        return batch
    layers, each, count = replay_sizes(spec)
    tokens = [sum(row) for row in rows]
    chosen = torch.arange(sum(tokens) * each).remainder(count).view(-1, 1, each).expand(-1, layers, -1)
    return batch.with_columns(**{ROUTING: Ragged.from_lengths(chosen, tokens)})


class _Counted:
    """Runs a call on the rows of the largest of its micro-batches."""

    def __init__(self, device: FakeDevice, engine: TrainEngine, asked: CallRows) -> None:
        self.device, self.engine, self.asked = device, engine, asked
        tokens = torch.tensor([prompt + response for prompt, response in asked.rows])
        self.parts = sorted(engine.tokens.split.rows(tokens), key=lambda rows: -int(tokens[rows].sum()))
        self.held: dict[str, int] = {}
        self.loss: Any = policy_loss() if engine.spec.head == "lm" else value_loss()

    def estimate(self) -> CallEstimate:
        stages, total = self.engine.grid.p, len(self.parts)
        least = max(4, 2 * stages)  # rows are split into two for each stage at least, however few they are
        taken = least + max(2, stages // 2)
        many, few = self._made(taken), self._made(least)
        peak, flops, collectives = self._run(taken)
        if few < many < total:  # the difference of two passes is what more micro-batches would add
            more = (total - many) / (many - few)
            _, less, before = self._run(least)
            flops += more * (flops - less)
            for kind, (count, size) in list(collectives.items()):
                fewer, smaller = before.get(kind, (0.0, 0.0))
                collectives[kind] = count + more * (count - fewer), size + more * (size - smaller)
        times = self.asked.times
        found = {kind: (times * count, times * size) for kind, (count, size) in collectives.items()}
        return CallEstimate(dict(self.held), peak - sum(self.held.values()), times * flops, found)

    def _rows(self, count: int) -> list[tuple[int, int]]:
        """Those of the `count` largest micro-batches."""
        return [self.asked.rows[at] for part in self.parts[:count] for at in part.tolist()]

    def _made(self, count: int) -> int:
        """How many micro-batches the engine makes of them."""
        return len(self.engine.tokens.split.rows(torch.tensor([sum(row) for row in self._rows(count)])))

    def _run(self, count: int) -> tuple[int, float, dict[str, tuple[float, float]]]:
        """Peak bytes, FLOP and collectives with the `count` largest micro-batches."""
        device, engine = self.device, self.engine
        batch = asked_rows(self._rows(count), engine.spec)
        device.restart()
        if self.asked.kind == "inference":
            engine.forward(batch, ("log_probs",) if engine.spec.head == "lm" else ("values",))
            self.held = engine.resident_bytes()
        else:
            engine.forward_backward(batch, self.loss, self.loss.outputs)
            self.held = engine.resident_bytes()
            engine.step()
        gc.collect()
        return device.peak, device.flops, dict(device.collectives)

"""What the processes of the split invariance tests do: gradients of every loss on this rank's rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import SGD
from tests.contracts.engine_tasks import boxes, build
from tests.contracts.rank_processes import World
from tests.example_losses import make_loss
from tests.tiny_models import cut_rows

Cases = Sequence[tuple[str, str]]


def make_rows(rows: int = 12) -> Batch:
    """Responses of 0 to 13 tokens with holes, near the policy of a model that has learnt nothing.

    Few different tokens: gradients of rows then add up more than they cancel, and rounding stays small against them.
    """
    generator = torch.Generator().manual_seed(0)

    def ids(low: int, high: int) -> Ragged:
        lengths = torch.randint(low, high, (rows,), generator=generator)
        return Ragged.from_lengths(torch.randint(20, 26, (int(lengths.sum()),), generator=generator), lengths)

    prompts, responses = ids(1, 9), ids(0, 14)
    mask = responses.with_values(torch.rand(len(responses.values), generator=generator) < 0.85)
    mask.row(2).fill_(False)
    noise = torch.randn(6, len(mask.values), generator=generator)
    columns = {
        "old_log_probs": -4.0 + 0.3 * noise[0],
        "log_probs": -4.0 + 0.3 * noise[0] + 0.1 * noise[1],
        "ref_log_probs": -4.0 + 0.3 * noise[2],
        "advantages": noise[3] + 0.5,
        "values": 0.1 * noise[4],
        "returns": noise[5],
    }
    token_columns = {name: mask.with_values(column) for name, column in columns.items()}
    return Batch({"prompt_ids": prompts, "response_ids": responses, "response_mask": mask, **token_columns})


def gradients(
    world: World,
    name: str,
    strategy: Any,
    paths: dict[str, Path],
    parts: Sequence[Sequence[int]],
    cases: Cases,
    cut: bool = False,
) -> list[tuple[Tensor, dict[str, float]]]:
    """All gradients of each case as one tensor, with its metrics; `parts` are the rows of every replica, or with `cut`
    its trajectories.

    Only the first rank returns them: with d alone, every rank has all.
    """
    optimizer, found = SGD(lr=0.0), []  # weights stay what they are, and the step zeroes the gradients
    engines = {
        head: build(world, f"{name}-{head}", strategy, len(parts), path, head, optimizer)
        for head, path in paths.items()
    }
    mine = make_rows().reorder(list(parts[world.rank]))
    mine = cut_rows(mine) if cut else mine
    for case, aggregation in cases:
        loss = make_loss(case, aggregation, 20.0 if case == "ppo" else None)
        engine = engines["value" if loss.outputs == ("values",) else "lm"]
        metrics = engine.forward_backward(mine, loss, loss.outputs)
        flat = torch.cat([value.flatten() for *_, value in boxes(engine, engine.gradients())])
        found.append((flat, metrics))
        engine.step()
    for engine in engines.values():
        engine.context.groups.close()
        engine.close()
    return found if world.rank == 0 else []

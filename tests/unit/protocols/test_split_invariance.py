"""Gradients, losses and metrics do not depend on how a mini-batch is split over ranks and micro-batches.

Here without an engine: rows are dealt to d ranks, in any order, and there to micro-batches; shares are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.losses.loss import Loss, Totals
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from tests.example_losses import AGGREGATIONS, LOSSES, make_loss

ROWS = 13


def rollout(seed: int) -> tuple[Batch, dict[str, Ragged]]:
    """Responses of 0 to 24 tokens with holes; one row has no valid token, one no token at all."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 25, (ROWS,), generator=generator)
    lengths[5] = 0
    mask = Ragged.from_lengths(torch.rand(int(lengths.sum()), generator=generator) < 0.8, lengths)
    mask.row(3).fill_(False)
    noise = torch.randn(8, len(mask.values), generator=generator)
    old = -1.5 + 0.3 * noise[0]
    columns = {
        "old_log_probs": old,
        "log_probs": old + 0.2 * noise[1],
        "ref_log_probs": old + 0.3 * noise[2],
        "advantages": noise[3],
        "values": noise[4],
        "returns": noise[5],
    }
    outputs = {"log_probs": old + 0.2 * noise[6], "entropy": noise[7].abs(), "values": noise[4] + 0.2 * noise[6]}
    batch = Batch({name: mask.with_values(x) for name, x in columns.items()} | {"response_mask": mask})
    return batch, {name: mask.with_values(x) for name, x in outputs.items()}


def added_up(loss: Loss, batch: Batch, outputs: dict[str, Ragged], micro_batches: Sequence[torch.Tensor]):
    """Loss, metrics and gradients of the mini-batch from its micro-batches, each the indices of its rows."""
    mask: Any = batch.peek("response_mask")
    totals = Totals(float(mask.values.sum()), float(len(mask)), longest=float(mask.lengths.max()))
    leaves = {name: outputs[name].values.clone().requires_grad_(True) for name in loss.outputs}
    figures: dict[str, float] = {}
    for rows in micro_batches:
        given = {name: outputs[name].with_values(leaf).index(rows) for name, leaf in leaves.items()}
        share, metrics = loss(given, batch.reorder(rows), totals)
        share.backward()
        for name, value in {"loss": share.detach(), **metrics}.items():
            figures[name] = figures.get(name, 0.0) + float(value)
    return figures, {name: leaf.grad for name, leaf in leaves.items()}


@st.composite
def partitions(draw) -> list[torch.Tensor]:
    """Rows in any order, dealt to 1, 2 or 4 ranks, and by each to micro-batches."""
    order, ranks = draw(st.permutations(range(ROWS))), draw(st.sampled_from([1, 2, 4]))
    cuts = sorted(draw(st.lists(st.integers(0, ROWS), min_size=ranks - 1, max_size=ranks - 1)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, ROWS], strict=True)]
    size = draw(st.integers(1, ROWS))
    return [torch.tensor(part[i : i + size]) for part in parts for i in range(0, len(part), size)]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("case", LOSSES)
@settings(max_examples=10, deadline=None)
@given(partitions(), st.integers(0, 3), st.sampled_from([None, 100.0]))
def test_any_split_gives_the_same(case, aggregation, micro_batches, seed, norm):
    loss = make_loss(case, aggregation, norm)
    batch, outputs = rollout(seed)
    expected, whole = added_up(loss, batch, outputs, [torch.arange(ROWS)])
    found, parts = added_up(loss, batch, outputs, micro_batches)
    assert found.keys() == expected.keys()
    for name, figure in expected.items():
        assert found[name] == pytest.approx(figure, rel=1e-5, abs=1e-6), name
    for name, gradient in whole.items():
        largest = float(gradient.abs().max())
        assert largest > 0
        assert float((parts[name] - gradient).abs().max()) < 1e-6 * max(largest, 1.0)
        assert torch.all(gradient[~batch["response_mask"].values] == 0)

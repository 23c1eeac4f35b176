"""Gradients of every loss are those of the whole mini-batch, however ranks, micro-batches and balancing split it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from hybridflow.batch.row_split import balance
from hybridflow.config import Megatron
from tests.contracts import split_tasks as tasks
from tests.contracts.rank_processes import RankProcesses
from tests.example_losses import AGGREGATIONS, LOSSES
from tests.tiny_models import make_classifier, make_policy

CASES = list(itertools.product(LOSSES, AGGREGATIONS))
SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.04,
}
WHOLE, SOME, ONE_ROW = 100_000, 48, 1  # tokens of a micro-batch
ROWS = list(range(12))
SPLITS = {
    "1 rank, row by row": (ONE_ROW, [ROWS]),
    "1 rank, other order": (SOME, [ROWS[::-1]]),
    "2 ranks, uneven": (SOME, [ROWS[:1], ROWS[1:]]),
    "2 ranks, balanced": (SOME, 2),
    "4 ranks, balanced": (WHOLE, 4),
    "4 ranks, one without rows": (ONE_ROW, [ROWS[:5], [], ROWS[5:6], ROWS[6:]]),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    policy = make_policy(directory / "policy", tokenizer=False, **SMALL)
    return {"lm": policy, "value": make_classifier(directory / "critic", **SMALL)}


def run(
    processes: RankProcesses,
    paths: dict[str, Path],
    micro_tokens: int,
    parts: list[list[int]],
    cases=CASES,
    cut=False,
    packed=True,
):
    strategy = Megatron(dp=len(parts), micro_tokens=micro_tokens, packed=packed)
    args = (processes.name(), strategy, paths, parts, cases, cut)
    return dict(zip(cases, processes.run(len(parts), tasks.gradients, *args)[0], strict=True))


@pytest.fixture(scope="module")
def whole(processes, paths):
    """Everything in one micro-batch of one rank."""
    return run(processes, paths, WHOLE, [ROWS])


def some(split: str) -> list[tuple[str, str]]:
    """Every loss with half of the aggregations, every aggregation with half of the losses, and each pair under half of
    the splits: in all of them, tests/unit/protocols/test_split_invariance.py computes it without an engine."""
    shift = list(SPLITS).index(split)
    at = {name: i for names in (LOSSES, AGGREGATIONS) for i, name in enumerate(names)}
    return [(loss, aggregation) for loss, aggregation in CASES if (at[loss] + at[aggregation] + shift) % 2]


def token_balanced(ranks: int) -> list[list[int]]:
    rows = tasks.make_rows()
    tokens = rows["prompt_ids"].lengths + rows["response_ids"].lengths
    return [part.tolist() for part in balance(tokens, ranks)]


@pytest.mark.parametrize("split", SPLITS)
def test_gradients_do_not_depend_on_the_split(processes, paths, whole, split):
    micro_tokens, parts = SPLITS[split]
    parts = token_balanced(parts) if isinstance(parts, int) else parts
    assert_equal(run(processes, paths, micro_tokens, parts, some(split)), whole)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("split", ["1 rank, row by row", "2 ranks, balanced", "4 ranks, one without rows"])
def test_a_trajectory_of_several_rows_counts_as_one_row(processes, paths, whole, split, packed):
    """Also for losses with means, ratios and masks of whole sequences."""
    micro_tokens, parts = SPLITS[split]
    parts = token_balanced(parts) if isinstance(parts, int) else parts
    cases = CASES if packed else some(split)
    assert_equal(run(processes, paths, micro_tokens, parts, cases, cut=True, packed=packed), whole)


def assert_equal(found: dict, whole: dict) -> None:
    for case, (gradient, metrics) in found.items():
        expected, figures = whole[case]
        largest = float(expected.abs().max())
        assert largest > 1e-4, f"{case}: there is nothing to compare"
        difference = float((gradient - expected).abs().max()) / largest
        assert difference < 1e-6, f"{case}: gradients differ by {difference:.1e} of the largest"
        assert metrics.keys() == figures.keys()
        for name, figure in figures.items():
            assert metrics[name] == pytest.approx(figure, rel=1e-5, abs=1e-6), f"{case} {name}"


def test_the_cases_differ(whole):
    """Each loss and aggregation has a gradient of its own, so that none of them is compared with another."""
    for (case, (gradient, _)), (other, (second, _)) in itertools.combinations(whole.items(), 2):
        if gradient.shape == second.shape:
            assert not torch.allclose(gradient, second, rtol=1e-4, atol=1e-8), f"{case} and {other}"

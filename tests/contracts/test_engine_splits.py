"""Gradients of every loss are those of the whole mini-batch, however ranks, micro-batches and balancing split it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.batch.row_split import balance
from hybridflow.config import SGD, Megatron
from tests.contracts.engine_tasks import boxes, build
from tests.contracts.rank_processes import RankProcesses, World
from tests.example_losses import AGGREGATIONS, LOSSES, make_loss
from tests.tiny_models import cut_rows, make_classifier, make_policy

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
    return dict(zip(cases, processes.run(len(parts), gradients, *args)[0], strict=True))


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
    rows = make_rows()
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

"""Six gloo processes for all files, as importing the backends in each takes longer than most tests, and
what transformers in one process says about the models of those files."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts import any_model_tasks
from tests.contracts.example_models import (
    FAMILIES,
    Oracle,
    load_model,
    make_batch,
    make_model,
    reference,
    reference_scores,
    reference_token_scores,
)
from tests.contracts.rank_processes import RankProcesses, World
from tests.contracts.train_contract import FEW_KV, OPTIMIZERS, UPDATED, UPDATES


@pytest.fixture(scope="session")
def everyone() -> Iterator[RankProcesses]:
    made = RankProcesses(6)
    yield made
    made.close()


@pytest.fixture(scope="module")
def processes(everyone: RankProcesses) -> Iterator[RankProcesses]:
    """Those of all files; groups that a file's engines shared end with it, and their threads with them."""
    yield everyone
    if not everyone.failed:
        everyone.run(everyone.size, World.forget)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every family's language model, and value models of two."""
    directory = tmp_path_factory.mktemp("models")
    wanted = [(name, "lm") for name in FAMILIES] + [("llama", "value"), ("qwen2", "value"), ("thirds", "value")]
    return {(name, head): make_model(name, directory, head) for name, head in wanted}


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """The model of `family_cases` with this name and head, made once, and what plain PyTorch makes of it."""
    directory = tmp_path_factory.mktemp("families")

    @cache
    def of(name: str, head: str = "lm") -> tuple[Path, dict[str, Any]]:
        path = any_model_tasks.make(name, head, directory / f"{name}-{head}")
        return path, any_model_tasks.expected(path, head)

    return of


@pytest.fixture(scope="session")
def expected(models: dict[tuple[str, str], Path]) -> dict[tuple[str, str], dict[str, Any]]:
    """What transformers says, at temperature 1 for value models and 0.7 for language models."""
    batch, found = make_batch(), {}
    with torch.no_grad():
        for (name, head), path in models.items():
            model = load_model(path, head)
            found[name, head] = reference(model, head, batch, 0.7)
            if head == "value":
                found[name, head]["scores"] = reference_scores(model, batch)
                found[name, head]["token_scores"] = reference_token_scores(model, batch)
    return found


@pytest.fixture(scope="session")
def oracles(models: dict[tuple[str, str], Path]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Updates of each model with each optimizer in plain PyTorch."""
    found = {}
    for (name, head), kind in itertools.product([*UPDATED, FEW_KV], OPTIMIZERS):
        oracle = Oracle(models[name, head], head, OPTIMIZERS[kind][1], clip=0.7)
        before = oracle.parameters()
        updates = [oracle.update(make_batch(seed=step)) for step in range(UPDATES)]
        after = oracle.parameters()
        moved = max(float((after[n] - before[n]).abs().max()) for n in after)
        assert moved > 1e-3, "the tolerance of 1e-5 must be small against the movement"
        assert all(norm > 0.7 for norm, _, _ in updates), "clipping must take part"
        found[name, head, kind] = {"updates": updates, "parameters": after}
    return found

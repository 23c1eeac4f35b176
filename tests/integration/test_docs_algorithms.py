"""Every page of docs/algorithms, and coming_from_*: its loop runs as printed, on one small model, and is short."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hybridflow as hf
from hybridflow.algorithms.registry import ESTIMATORS, POLICY_LOSSES
from recipes import arithmetic

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(page for page in (ROOT / "docs/algorithms").glob("*.md") if page.name != "README.md")
PAGES += sorted((ROOT / "docs").glob("coming_from_*.md"))
LOOP = re.compile(r"^```python loop\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ROWS = 4
PAIRS = [{"prompt": f"{i}+1=", "chosen": f"{i + 1}", "rejected": f"{i + 2}"} for i in range(6)]


def correct(completions: list[str], answer: list[str]) -> list[float]:
    return arithmetic.exact_match(completions, answer)


def short(completions, **columns) -> list[float]:
    return [-float(len(text)) for text in completions]


def too_large(completions: list[str], answer: list[str]) -> list[float]:
    return [float(text.isdigit() and int(text) > int(right)) for text, right in zip(completions, answer, strict=True)]


class Tracked:
    """Takes what a loop logs, as the tracker does, and keeps the figures."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def log(self, *figures: Any) -> None:
        self.steps.append({name: value for found in figures for name, value in found.get().items()})


@pytest.fixture(scope="module")
def names(cluster, settle) -> Any:
    """What the loops call by name: all groups live on one host, with the models that the recipes train."""
    settle()
    task = arithmetic.make(ROOT / ".cache")
    pool = hf.ResourcePool([1])
    optim = hf.Adam(lr=1e-5)
    groups = {
        "actor": hf.ActorWorker.on(
            pool,
            model=task.model,
            optim=optim,
            generate=hf.VLLM(sampling=hf.Sampling(max_tokens=5)),
            teacher=task.model,
        ),
        "reference": hf.ReferenceWorker.on(pool, model=task.model),
        "critic": hf.CriticWorker.on(pool, model=task.model, optim=optim),
        "cost_critic": hf.CriticWorker.on(pool, model=task.model, optim=optim, of="costs"),
        "reward": hf.RewardWorker.on(pool, function=correct),
        "rewards": hf.RewardWorker.on(pool, function=[correct, short]),
        "cost": hf.CostWorker.on(pool, function=too_large),
    }
    yield SimpleNamespace(task=task, groups=groups)
    for group in groups.values():
        group.close()
    pool.close()


def loop(page: Path) -> str:
    (source,) = LOOP.findall(page.read_text())
    return source


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_loop_of_a_page_runs(page: Path, names: Any):
    tracker, task = Tracked(), names.task
    scope = names.groups | {
        "hf": hf,
        "tracker": tracker,
        "loader": hf.PromptLoader(task.train, batch_size=ROWS, steps=1, seed=3),
        "text": hf.TextLoader(
            task.train, tokenizer=task.model, batch_size=ROWS, max_tokens=32, prompt="prompt", completion="answer"
        ),
        "pairs": hf.TextLoader(
            PAIRS,
            tokenizer=task.model,
            batch_size=ROWS,
            max_tokens=32,
            prompt="prompt",
            completion=("chosen", "rejected"),
            steps=1,
        ),
        "lagrange": hf.algorithms.Lagrange(limit=0.25),
    }
    if "dynamic_sampling" in loop(page):
        scope["loader"] = hf.PromptLoader(task.train, batch_size=ROWS, steps=8, seed=3)
    exec(compile(loop(page), str(page), "exec"), scope)
    assert tracker.steps
    for figures in tracker.steps:
        assert figures["actor/grad_norm"] >= 0
        assert all(math.isfinite(value) for value in figures.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_loop_is_short(page: Path):
    (body,) = [node.body for node in ast.walk(ast.parse(loop(page))) if isinstance(node, ast.For)]
    lines = sum(statement.end_lineno - statement.lineno + 1 for statement in body)
    assert lines <= (15 if page.stem == "safe_rlhf" else 10)


def test_every_estimator_and_loss_has_a_page():
    text = "".join(page.read_text() for page in PAGES)
    missing = [name for name in (*ESTIMATORS, *POLICY_LOSSES) if f'"{name}"' not in text and f"`{name}`" not in text]
    used_by_default = {"ppo"}
    assert set(missing) <= used_by_default

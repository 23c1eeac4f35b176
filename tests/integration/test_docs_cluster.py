"""Blocks of the documentation that need a cluster run as printed: those of a page in a program, after those that need
none; those of docs/how_do_i.md in one session, in at most ten lines; the loops of docs/algorithms and coming_from_*."""

from __future__ import annotations

import ast
import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import hybridflow as hf
from hybridflow.algorithms.registry import ESTIMATORS, POLICY_LOSSES
from recipes import arithmetic
from tests.example_templates import byte_tokenizer
from tests.hub_server import served_hub
from tests.warm_programs import WarmPrograms

ROOT = Path(__file__).resolve().parents[2]
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "```python cluster" in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_cluster_blocks_run(warm: WarmPrograms, page: Path, tmp_path: Path):
    program = tmp_path / "blocks.py"
    program.write_text(
        "\n".join(re.findall(r"^```python (?:runnable|cluster)\n(.*?)^```$", page.read_text(), re.M | re.S))
    )
    warm.run(program, cwd=ROOT)


PAGE = ROOT / "docs" / "how_do_i.md"
BLOCK = re.compile(r"^### ([^\n]+)\n(?:(?!^###).)*?^```python how\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = dict(BLOCK.findall(PAGE.read_text()))
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is not defined %}<think>{% endif %}"


def write(path: Path, records: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture(scope="module")
def groups(cluster, settle) -> Iterator[dict[str, Any]]:
    settle()
    task = arithmetic.make(ROOT / ".cache")
    pool, optim = hf.ResourcePool([1]), hf.Adam(lr=1e-5)
    generate = hf.VLLM(sampling=hf.Sampling(max_tokens=5))
    made = {
        "actor": hf.ActorWorker.on(pool, model=task.model, optim=optim, generate=generate),
        "reference": hf.ReferenceWorker.on(pool, model=task.model),
        "critic": hf.CriticWorker.on(pool, model=task.model, optim=optim),
        "reward": hf.RewardWorker.on(pool, function=hf.rewards.Exact("answer")),
    }
    yield {**made, "pool": pool, "model": str(task.model), "task": task}
    for group in made.values():
        group.close()
    pool.close()


@pytest.fixture
def names(cluster, groups, tmp_path, monkeypatch) -> Iterator[dict[str, Any]]:
    """What the page says that there is, new for each block."""
    monkeypatch.chdir(tmp_path)
    train = [json.loads(line) for line in groups["task"].train.read_text().splitlines()][:40]
    write(tmp_path / "train.jsonl", train)
    write(tmp_path / "held_out.jsonl", train[:8])
    write(tmp_path / "words.jsonl", [{"prompt": f"{i}=", "answer": "0"} for i in range(9)])
    write(tmp_path / "pairs.jsonl", [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": "1"} for r in train])
    tokenizer = byte_tokenizer("qwen3")
    tokenizer.chat_template = THINKS
    cluster.parts.clear()
    cluster.run_directory = None
    prompts = hf.Batch({name: [record[name] for record in train[:4]] for name in ("prompt", "answer")})
    batch = groups["actor"].generate_sequences(prompts, n=2)
    batch |= groups["reward"].compute_reward(batch)
    batch |= hf.compute_advantage(batch, "grpo")
    known = {"hf": hf, "asyncio": asyncio, "Path": Path, "AutoModelForCausalLM": AutoModelForCausalLM}
    with served_hub(monkeypatch):
        yield {
            **groups,
            **known,
            "prompts": prompts,
            "batch": batch,
            "tokenizer": tokenizer,
            "loader": hf.PromptLoader("train.jsonl", batch_size=4, steps=2),
        }
    cluster.parts.clear()
    cluster.iterations.done_before = 0


@pytest.mark.parametrize("title", BLOCKS)
def test_a_block_runs_as_printed(title, names):
    before = set(names)
    exec(compile(BLOCKS[title], f"{PAGE}: {title}", "exec"), names)
    for name, group in names.items():
        if name not in before and isinstance(group, hf.WorkerGroup):
            group.close()


def test_there_are_forty_short_blocks():
    assert len(BLOCKS) >= 40
    assert PAGE.read_text().count("```python how") == PAGE.read_text().count("\n### ") == len(BLOCKS)
    assert {title: len(source.splitlines()) for title, source in BLOCKS.items() if len(source.splitlines()) > 10} == {}


ALGORITHMS = sorted(page for page in (ROOT / "docs/algorithms").glob("*.md") if page.name != "README.md")
ALGORITHMS += sorted((ROOT / "docs").glob("coming_from_*.md"))
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
def models(cluster, settle) -> Any:
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


@pytest.mark.parametrize("page", ALGORITHMS, ids=lambda page: page.stem)
def test_the_loop_of_a_page_runs(page: Path, models: Any):
    tracker, task = Tracked(), models.task
    scope = models.groups | {
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


@pytest.mark.parametrize("page", ALGORITHMS, ids=lambda page: page.stem)
def test_the_loop_is_short(page: Path):
    (body,) = [node.body for node in ast.walk(ast.parse(loop(page))) if isinstance(node, ast.For)]
    lines = sum(statement.end_lineno - statement.lineno + 1 for statement in body)
    assert lines <= (15 if page.stem == "safe_rlhf" else 10)


def test_every_estimator_and_loss_has_a_page():
    text = "".join(page.read_text() for page in ALGORITHMS)
    missing = [name for name in (*ESTIMATORS, *POLICY_LOSSES) if f'"{name}"' not in text and f"`{name}`" not in text]
    used_by_default = {"ppo"}
    assert set(missing) <= used_by_default

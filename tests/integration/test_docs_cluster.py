"""Blocks of the documentation that need a cluster run as printed: those of a page in a program, after those that need
none; those of docs/how_do_i.md in one session, in at most ten lines.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import hybridflow as hf
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

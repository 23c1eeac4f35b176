"""Prompts: what is read, what is refused and where, and an order that can be resumed at any point."""

from __future__ import annotations

import json

import pytest
import torch

from hybridflow.data.prompts import PromptSource, read_prompts
from hybridflow.errors import ConfigError, PromptError

MESSAGES = [{"role": "user", "content": "hello"}]


def prompts(n: int) -> list[dict]:
    return [{"prompt": f"p{i}", "answer": str(i), "weight": 0.1 * i} for i in range(n)]


def drawn(source: PromptSource) -> list[list[str]]:
    return [batch["prompt"] for batch in source]


def test_prompts_from_a_file_keep_their_columns(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": "é=", "answer": 3, "tags": ["a"]}, {"prompt": MESSAGES, "answer": None, "tags": []}]
    path.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n\n", encoding="utf-8")
    assert read_prompts(path) == records
    assert read_prompts(str(path)) == read_prompts(records)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"', r"bad\.jsonl, line 2 is not JSON: .* at character"),
        ('{"prompt": "a"}\n\n[1]', r"line 3 is a list"),
        ("", r"bad\.jsonl has no prompts"),
        ("\n \n", r"has no prompts"),
        ('{"text": "a"}', r"line 1 has no column 'prompt'; it has \['text'\]"),
        ('{"prompt": null}', r"line 1: column 'prompt' is null"),
        ('{"prompt": "a"}\n{"prompt": ""}', r"line 2: column 'prompt' is empty"),
        ('{"prompt": 3}', r"column 'prompt' is a int"),
        ('{"prompt": []}', r"list of messages"),
        ('{"prompt": [{"role": "user"}]}', r"'role' and 'content'"),
        ('{"prompt": "a", "x": 1}\n{"prompt": "b"}', r"line 2: only .*line 1 has the column 'x'"),
        ('{"prompt": "a"}\n{"prompt": "b", "x": 1}', r"line 2: only .*line 2 has the column 'x'"),
        ('{"prompt": "a", "row_id": 1}', r"column 'row_id' is written by hybridflow"),
        ('{"prompt": "a", "rewards": 1}', r"column 'rewards' is written by hybridflow. Rename it"),
    ],
)
def test_bad_files_are_refused_with_line_and_column(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines)
    with pytest.raises(PromptError, match=message):
        PromptSource(path, batch_size=1)


def test_bad_sources_are_refused(tmp_path):
    with pytest.raises(PromptError, match="there is no prompt file"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(PromptError, match="not a JSONL text file"):
        read_prompts(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(PromptError, match="not a JSONL text file"):
        read_prompts(tmp_path / "binary")
    with pytest.raises(PromptError, match="record 1 has no column 'prompt'"):
        read_prompts([{"prompt": "a"}, {"promt": "b"}])
    with pytest.raises(PromptError, match="the list of prompts has no prompts"):
        read_prompts([])
    for bad in ({"batch_size": 0}, {"batch_size": 2, "steps": 0}, {"batch_size": 2.0}):
        with pytest.raises(ConfigError, match="whole number of at least 1"):
            PromptSource(prompts(3), **bad)


def test_batches_have_running_row_ids_and_exact_objects():
    batches = list(PromptSource(prompts(5), batch_size=3, steps=4, seed=1))
    assert [len(batch) for batch in batches] == [3] * 4
    assert torch.cat([batch["row_id"] for batch in batches]).tolist() == list(range(12))
    for batch in batches:
        for row in batch.to_dicts():
            i = int(row["answer"])
            assert row["prompt"] == f"p{i}"
            assert row["weight"] == 0.1 * i


def test_every_epoch_is_another_permutation_and_drops_nothing():
    flat = [p for batch in drawn(PromptSource(prompts(10), batch_size=4, steps=10, seed=3)) for p in batch]
    epochs = [flat[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == sorted(f"p{i}" for i in range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    ordered = drawn(PromptSource(prompts(3), batch_size=2, steps=3, shuffle=False))
    assert ordered == [["p0", "p1"], ["p2", "p0"], ["p1", "p2"]]


def test_a_batch_may_be_larger_than_an_epoch():
    (batch,) = drawn(PromptSource(prompts(3), batch_size=8, steps=1))
    assert len(batch) == 8
    assert set(batch) == {"p0", "p1", "p2"}


def test_the_seed_decides_the_order():
    def order(seed: int) -> list[list[str]]:
        return drawn(PromptSource(prompts(20), batch_size=5, steps=6, seed=seed))

    before = torch.random.get_rng_state()
    assert order(0) == order(0)
    assert order(0) != order(1)
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7])
def test_a_state_in_the_middle_of_an_epoch_continues_exactly(at):
    whole = drawn(PromptSource(prompts(10), batch_size=4, steps=9, seed=5))
    source = PromptSource(prompts(10), batch_size=4, steps=9, seed=5)
    batches = iter(source)
    for _ in range(at):
        next(batches)
    state = json.loads(json.dumps(source.state()))
    resumed = PromptSource(prompts(10), batch_size=4, steps=9, seed=5)
    resumed.load_state(state)
    rest = list(resumed)
    assert [batch["prompt"] for batch in rest] == whole[at:]
    assert int(rest[0]["row_id"][0]) == 4 * at
    assert drawn(source) == whole[at:]


def test_a_state_of_another_run_is_refused():
    state = PromptSource(prompts(10), batch_size=4, seed=5).state()
    for other in (
        PromptSource(prompts(9), batch_size=4, seed=5),
        PromptSource(prompts(10), batch_size=5, seed=5),
        PromptSource(prompts(10), batch_size=4, seed=6),
    ):
        with pytest.raises(ConfigError, match="the saved state has"):
            other.load_state(state)
    with pytest.raises(ConfigError, match="drawn=None"):
        PromptSource(prompts(10), batch_size=4, seed=5).load_state({})


def test_length_is_the_number_of_batches():
    assert len(PromptSource(prompts(3), batch_size=2, steps=7)) == 7
    with pytest.raises(TypeError, match="no length"):
        len(PromptSource(prompts(3), batch_size=2))


def test_prompt_ids_come_from_the_tokenizer_of_a_directory(tmp_path):
    from recipes.small_model import SmallModel

    SmallModel(characters="0123456789+=").tokenizer().save_pretrained(tmp_path)
    records = [{"prompt": "1+2="}, {"prompt": "10+23="}]
    (batch,) = PromptSource(records, batch_size=2, steps=1, shuffle=False, tokenizer=tmp_path)
    assert batch["prompt_ids"].lengths.tolist() == [4, 6]
    assert batch["prompt_ids"].dtype == torch.int64
    decoded = PromptSource(records, batch_size=2, tokenizer=tmp_path)._tokenizer.decode(batch["prompt_ids"].tolist())
    assert decoded == batch["prompt"]

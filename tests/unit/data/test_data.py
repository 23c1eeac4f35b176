"""Prompts: what is read, what is refused and where, and an order that can be resumed at any point."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import normalizers

from hybridflow.data.prompts import Prompts, PromptSource
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import ConfigError, PromptError
from hybridflow.loader import PromptLoader
from recipes.small_model import SmallModel

MESSAGES = [{"role": "user", "content": "hello"}]
KEPT = ["p2", "p5", "p4", "p0", "p3", "p1", "p3", "p1", "p5", "p2", "p4", "p0"]  # six prompts, seed 3


def records_of(source: Any, **options: Any) -> list[dict]:
    return list(Prompts(source, **options))


def prompts(n: int) -> list[dict]:
    return [{"prompt": f"p{i}", "answer": str(i), "weight": 0.1 * i} for i in range(n)]


def drawn(source: PromptSource) -> list[list[str]]:
    return [batch["prompt"] for batch in source]


def test_prompts_from_a_file_keep_their_columns(tmp_path):
    path = tmp_path / "prompts.jsonl"
    records = [{"prompt": "é=", "answer": 3, "tags": ["a"]}, {"prompt": MESSAGES, "answer": None, "tags": []}]
    path.write_text("\n\n".join(json.dumps(r, ensure_ascii=False) for r in records) + "\n\n", encoding="utf-8")
    assert records_of(path) == records
    assert records_of(str(path)) == records_of(records)


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
        ('{"prompt": "a\\ud800"}', r"line 1: column 'prompt' has half of a surrogate pair at character 1"),
        (
            '{"prompt": "a", "x": 1}\n{"prompt": "b"}',
            r"line 2 has no column 'x', .*line 1 has one; every record",
        ),
        (
            '{"prompt": "a"}\n{"prompt": "b", "x": 1}',
            r"line 2 has a column 'x', .*line 1 has none; every record",
        ),
        ('{"prompt": "a", "x": 1}\n' * 2 + '{"prompt": "c"}', r"line 3 has no column 'x', .*line 1 has one"),
        ('{"prompt": "a"}\n{"prompt": "b", "x": ' + "9" * 5000 + "}", r"line 2 has a number that cannot be .*\(4300"),
        ('{"prompt": "a", "row_id": 1}', r"column 'row_id' is written by hybridflow"),
        ('{"prompt": "a", "rewards": 1}', r"column 'rewards' is written by hybridflow. Rename it"),
        ('{"prompt": "a", "lagrange": 1}', r"column 'lagrange' is written by hybridflow"),
        ('{"prompt": "a", "costs/length": 1}', r"column 'costs/length' is written by hybridflow"),
    ],
)
def test_bad_files_are_refused_with_line_and_column(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines)
    with pytest.raises(PromptError, match=message):
        PromptSource(path, batch_size=1)


def test_bad_sources_are_refused(tmp_path):
    with pytest.raises(PromptError, match="there is no prompt file"):
        records_of(tmp_path / "none.jsonl")
    with pytest.raises(PromptError, match=r"is a directory without \.parquet or \.jsonl files"):
        records_of(tmp_path)
    for number, bad in ((1, b"\xff\xfe\x00\x80"), (3, b'\xef\xbb\xbf{"prompt": "a"}\n\n{"prompt": "\xe9"}\n')):
        (tmp_path / "binary").write_bytes(bad)
        with pytest.raises(
            PromptError, match=rf"binary, line {number} is not UTF-8 text: 0x(ff at byte 1|e9 at byte 13)"
        ):
            records_of(tmp_path / "binary")
    (tmp_path / "marked").write_bytes(b'\xef\xbb\xbf{"prompt": "\xe2\x80\xa8"}\r\n\xc2\xa0\n')
    assert records_of(tmp_path / "marked") == [{"prompt": "\u2028"}]
    with pytest.raises(PromptError, match="record 1 has no column 'prompt'"):
        records_of([{"prompt": "a"}, {"promt": "b"}])
    with pytest.raises(PromptError, match="the list of prompts has no prompts"):
        records_of([])
    for odd in (None, 3, {"prompt": "a"}):
        with pytest.raises(PromptError, match="give a JSONL or Parquet file, a dataset, or a list of mappings"):
            records_of(odd)
    for bad in ({}, {"steps": 0}, {"batch_size": 2.0}, {"batch_size": None}, {"max_prompt_tokens": 0}):
        with pytest.raises(ConfigError, match="whole number of at least 1"):
            PromptSource(prompts(3), **({"batch_size": 2 if bad else 0} | bad))
    for odd in (-1, 1.0, None):
        with pytest.raises(ConfigError, match=f"workers={odd} must be a whole number of at least 0"):
            PromptSource(prompts(3), batch_size=1, workers=odd)
    with pytest.raises(ConfigError, match="seed=None must be a whole number"):
        PromptSource(prompts(3), batch_size=1, seed=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_prompt_tokens=4 counts tokens: give tokenizer="):
        PromptSource(prompts(3), batch_size=1, max_prompt_tokens=4)


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


def test_the_order_of_a_seed_never_changes():
    """What an epoch is made of, by the definition; and one order as it has always been."""
    for seed, rows in ((0, 5), (7, 23)):
        source = PromptSource(prompts(rows), batch_size=4, steps=2 * rows, seed=seed)
        flat = [p for batch in drawn(source) for p in batch]
        for epoch in range(8):
            generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
            expected = [f"p{i}" for i in torch.randperm(rows, generator=generator).tolist()]
            assert flat[epoch * rows : (epoch + 1) * rows] == expected
    assert [p for batch in drawn(PromptSource(prompts(6), batch_size=4, steps=3, seed=3)) for p in batch] == KEPT


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
    tokenizer, sizes = load_tokenizer(tmp_path), {"batch_size": 2, "steps": 1}
    assert tokenizer.decode(batch["prompt_ids"].tolist()) == batch["prompt"]
    (same,) = PromptSource(records, batch_size=2, steps=1, shuffle=False, tokenizer=tokenizer)
    assert same.equal(batch)
    tokenizer.raw.backend_tokenizer.normalizer = normalizers.Strip()
    for limit in (None, 3):
        with pytest.raises(PromptError, match="record 1: column 'prompt' has a prompt without any token"):
            list(PromptSource([{"prompt": p} for p in "1 "], **sizes, tokenizer=tokenizer, max_prompt_tokens=limit))


def test_a_tokenizer_is_given_in_any_form(tmp_path):
    from recipes.small_model import SmallModel

    raw = SmallModel(characters="0123456789+=").tokenizer()
    raw.save_pretrained(tmp_path)
    kind: dict[str, Any] = {"batch_size": 2, "steps": 1, "shuffle": False}
    forms = (raw, Tokenizer(raw), tmp_path, str(tmp_path))
    texts = [{"prompt": "1+2="}, {"prompt": "10+23="}]
    found = [next(iter(PromptSource(texts, tokenizer=form, **kind)))["prompt_ids"].tolist() for form in forms]
    assert (
        found == [[[SmallModel(characters="0123456789+=").vocabulary[c] for c in one["prompt"]] for one in texts]] * 4
    )
    for odd in (3, raw.backend_tokenizer, SmallModel):
        with pytest.raises(ConfigError, match=f"tokenizer= is a {type(odd).__name__}: give a checkpoint directory"):
            PromptSource(texts, tokenizer=odd, **kind)  # type: ignore[arg-type]


def test_another_column_holds_the_prompts():
    records = [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}]
    assert records_of(records, prompt="question")[1] == {"prompt": "r", "answer": "b"}
    assert records[0] == {"question": "q", "answer": "a"}
    with pytest.raises(
        PromptError, match=r"record 0 has no column 'prompt'; .* Name the one with the prompts by prompt="
    ):
        records_of(records)
    with pytest.raises(PromptError, match=r"record 0 has no column 'qestion'; .* Did you mean 'question'"):
        records_of(records, prompt="qestion")
    with pytest.raises(PromptError, match="prompt='question' becomes the column 'prompt', and there is one already"):
        records_of([{"question": "q", "prompt": "p"}], prompt="question")
    with pytest.raises(PromptError, match="record 1: column 'question' is null"):
        records_of([{"question": "q"}, {"question": None}], prompt="question")


def test_records_are_mapped_and_checked_before_the_run():
    def final(record):
        return {"prompt": record["q"], "answer": record["a"].split("#### ")[1]}

    records = [{"q": "one", "a": "1 #### 1", "row_id": 3}, {"q": "two", "a": "2"}]
    calls = []
    drawn = PromptSource(records, batch_size=2, map=lambda r: calls.append(r["q"]) or {"prompt": r["q"]})
    assert calls == ["one", "two"]
    next(iter(drawn))
    assert sorted(calls) == ["one", "one", "two", "two"]
    assert records_of(records[:1], map=final) == [{"prompt": "one", "answer": "1"}]
    with pytest.raises(PromptError, match="record 1: map=final raised IndexError: list index out of range"):
        PromptSource(records, batch_size=1, map=final)
    for bad, message in (
        (lambda record: None, "record 0: map= returned a NoneType; it must return a record"),
        (
            lambda record: {"prompt": record["q"], record["q"]: 1},
            "record 1 has no column 'one', record 0 has one",
        ),
        (lambda record: {"prompt": "a", "values": 1}, "record 0: column 'values' is written by hybridflow"),
        (lambda record: {"prompt": "a", 3: 1}, "record 0: column 3 is a int; names are texts"),
    ):
        with pytest.raises(PromptError, match=message):
            PromptSource(records, batch_size=1, map=bad)


@pytest.mark.parametrize("kept", [1, 40, 1500])
def test_over_long_prompts_are_left_out_and_counted(tmp_path, caplog, kept):
    from recipes.small_model import SmallModel

    SmallModel(characters="0123456789+=").tokenizer().save_pretrained(tmp_path)
    texts = ["1" * 5, *("1" * (4 if i < kept - 1 else 6 + i % 3) for i in range(1599))]
    with caplog.at_level(logging.WARNING):
        source = PromptSource(
            [{"prompt": text} for text in texts], batch_size=7, steps=500, tokenizer=tmp_path, max_prompt_tokens=5
        )
    assert source.filtered == 1600 - kept
    assert f"{1600 - kept} of 1600 prompts are left out, which have more than max_prompt_tokens=5" in caplog.text
    seen = [text for batch in source for text in batch["prompt"]]
    assert {len(text) for text in seen} == ({4, 5} if kept > 1 else {5})
    assert sum(len(text) == 5 for text in seen[: 2 * kept]) == 2
    assert source.state()["prompts"] == kept


def test_no_prompt_is_short_enough(tmp_path):
    from recipes.small_model import SmallModel

    SmallModel(characters="0123456789+=").tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        PromptError, match="all 2 prompts have more than max_prompt_tokens=2 tokens; the shortest has 3"
    ):
        PromptSource([{"prompt": "123"}, {"prompt": "1234"}], batch_size=1, tokenizer=tmp_path, max_prompt_tokens=2)


GSM8K = Path(__file__).resolve().parents[4] / "shared/data/gsm8k/test.jsonl"


@pytest.mark.skipif(not GSM8K.is_file(), reason="the data set is not here")
def test_every_row_of_gsm8k():
    source = PromptSource(GSM8K, prompt="question", batch_size=1319, steps=2)
    first, second = source
    assert len(set(first["prompt"])) == 1319
    assert sorted(first["prompt"]) == sorted(second["prompt"])
    assert first["prompt"] != second["prompt"]
    assert all("#### " in answer for answer in first["answer"])


VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(4)
]


@pytest.mark.parametrize("kind", ["list", "jsonl", "parquet"])
def test_rows_in_verls_shape_need_no_arguments(tmp_path, kind):
    path = tmp_path / f"train.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in VERL))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(VERL), path)
    (batch,) = PromptSource(VERL if kind == "list" else path, batch_size=4, steps=1, shuffle=False)
    assert batch["prompt"] == [row["prompt"] for row in VERL]
    assert batch["ground_truth"] == batch["answer"] == ["1", "2", "3", "4"]
    assert batch["extra_info"][2] == VERL[2]["extra_info"]


def test_verls_ground_truth_keeps_columns_of_the_file(tmp_path):
    (batch,) = PromptSource([row | {"answer": "own"} for row in VERL], batch_size=2, steps=1, shuffle=False)
    assert (batch["answer"], batch["ground_truth"]) == (["own"] * 2, ["1", "2"])
    (batch,) = PromptSource([{"prompt": "a", "reward_model": "DIR"}], batch_size=1, steps=1)
    assert set(batch.columns) == {"row_id", "prompt", "reward_model"}
    path = tmp_path / "some.parquet"
    pq.write_table(pa.Table.from_pylist([VERL[0] | {"reward_model": None}, VERL[1]]), path)
    (batch,) = PromptSource(path, batch_size=2, steps=1, shuffle=False)
    assert batch["ground_truth"] == [None, "2"]
    source = PromptSource(VERL, batch_size=1)
    source.load_state(json.loads(json.dumps(source.state())))


def test_synthetic_prompts_have_their_lengths_and_no_special_tokens(tmp_path):
    SmallModel(steps=0).write(tmp_path / "model", lambda rng: ("1+1=", "2"))
    known = load_tokenizer(tmp_path / "model").raw
    for given, lengths in ((5, {5}), ((2, 6), {2, 3, 4, 5, 6})):
        loader = PromptLoader.synthetic(10, given, tmp_path / "model", batch_size=10, steps=2, seed=3)
        again = PromptLoader.synthetic(10, given, tmp_path / "model", batch_size=10, steps=2, seed=3)
        for batch, same in zip(loader.drawn(), again.drawn(), strict=True):
            ids = batch["prompt_ids"]
            assert set(ids.lengths.tolist()) == lengths
            assert not set(ids.values.tolist()) & {*known.all_special_ids}
            assert ids.values.equal(same["prompt_ids"].values)
    for rows, tokens in ((0, 4), (2, 0), (2, (4, 3))):
        with pytest.raises(ConfigError):
            PromptLoader.synthetic(rows, tokens, tmp_path / "model", batch_size=1)

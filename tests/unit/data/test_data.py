"""Prompts: what is read, what is refused and where, and an order that can be resumed at any point."""

from __future__ import annotations

import json
import logging
import os
import signal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from hybridflow.data.prompts import Prompts, PromptSource
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import ConfigError, PromptError, WorkerError
from hybridflow.loader import PromptLoader
from recipes.small_model import SmallModel

KEPT = ["p2", "p5", "p4", "p0", "p3", "p1", "p3", "p1", "p5", "p2", "p4", "p0"]  # six prompts, seed 3


SMALL = SmallModel(characters="0123456789+=")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A checkpoint with a tokenizer."""
    made = tmp_path_factory.mktemp("tokenizer")
    SMALL.tokenizer().save_pretrained(made)
    return made


def records_of(source: Any, **options: Any) -> list[dict]:
    return list(Prompts(source, **options))


def prompts(n: int) -> list[dict]:
    return [{"prompt": f"p{i}", "answer": str(i), "weight": 0.1 * i} for i in range(n)]


def drawn(source: PromptSource) -> list[list[str]]:
    return [batch["prompt"] for batch in source]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": "b"', r"bad\.jsonl, line 2 is not JSON: .* at character"),
        ('{"prompt": "a"}\n\n[1]', r"line 3 is a list"),
        ("", r"bad\.jsonl has no prompts"),
        ('{"text": "a"}', r"line 1 has no column 'prompt'; it has \['text'\]"),
        ('{"prompt": null}', r"line 1: column 'prompt' is null"),
        ('{"prompt": "a"}\n{"prompt": ""}', r"line 2: column 'prompt' is empty"),
        ('{"prompt": 3}', r"column 'prompt' is a int"),
        ('{"prompt": "a\\ud800"}', r"line 1: column 'prompt' has half of a surrogate pair at character 1"),
        (
            '{"prompt": "a", "x": 1}\n' * 2 + '{"prompt": "b"}',
            r"line 3 has no column 'x', .*line 1 has one; every record",
        ),
        ('{"prompt": "a"}\n{"prompt": "b", "x": 1}', r"line 2 has a column 'x', .*line 1 has none; every record"),
        ('{"prompt": "a"}\n{"prompt": "b", "x": ' + "9" * 5000 + "}", r"line 2 has a number that cannot be .*\(4300"),
        ('{"prompt": "a", "row_id": 1}', r"column 'row_id' is written by hybridflow"),
        ('{"prompt": "a", "rewards": 1}', r"column 'rewards' is written by hybridflow. Rename it"),
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
        with pytest.raises(PromptError, match=rf"binary, line {number} is not UTF-8 text: 0x(ff|e9) at byte (1|13)"):
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


def test_the_order_of_a_seed_never_changes():
    """What an epoch is made of, by the definition; and one order as it has always been. The draws are its own."""
    before = torch.random.get_rng_state()
    for seed, rows, batch_size in ((0, 5, 4), (7, 23, 4), (1, 3, 8)):
        source = PromptSource(prompts(rows), batch_size=batch_size, steps=2 * rows, seed=seed)
        flat = [p for batch in drawn(source) for p in batch]
        for epoch in range(8):
            generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
            expected = [f"p{i}" for i in torch.randperm(rows, generator=generator).tolist()]
            assert flat[epoch * rows : (epoch + 1) * rows] == expected
    rows = [row for batch in PromptSource(prompts(6), batch_size=4, steps=3, seed=3) for row in batch.to_dicts()]
    assert [row["prompt"] for row in rows] == KEPT
    assert [row["row_id"] for row in rows] == list(range(12))
    assert all((row["prompt"], row["weight"]) == (f"p{row['answer']}", 0.1 * int(row["answer"])) for row in rows)
    assert torch.equal(before, torch.random.get_rng_state())
    ordered = drawn(PromptSource(prompts(3), batch_size=2, steps=3, shuffle=False))
    assert ordered == [["p0", "p1"], ["p2", "p0"], ["p1", "p2"]]


def test_length_is_the_number_of_batches():
    assert len(PromptSource(prompts(3), batch_size=2, steps=7)) == 7
    with pytest.raises(TypeError, match="no length"):
        len(PromptSource(prompts(3), batch_size=2))


def test_prompt_ids_come_from_a_tokenizer_in_any_form(directory):
    raw = SMALL.tokenizer()
    kind: dict[str, Any] = {"batch_size": 2, "steps": 1, "shuffle": False}
    texts = [{"prompt": "1+2="}, {"prompt": "10+23="}]
    for form in (raw, Tokenizer(raw), directory, str(directory)):
        (batch,) = PromptSource(texts, tokenizer=form, **kind)
        assert batch["prompt_ids"].tolist() == [[SMALL.vocabulary[c] for c in one["prompt"]] for one in texts]
        assert batch["prompt_ids"].dtype == torch.int64
    for odd in (3, raw.backend_tokenizer, SmallModel):
        with pytest.raises(ConfigError, match=f"tokenizer= is a {type(odd).__name__}: give a checkpoint directory"):
            PromptSource(texts, tokenizer=odd, **kind)  # type: ignore[arg-type]
    raw.backend_tokenizer.normalizer = normalizers.Strip()
    for limit in (None, 3):
        with pytest.raises(PromptError, match="record 1: column 'prompt' has a prompt without any token"):
            list(PromptSource([{"prompt": p} for p in "1 "], tokenizer=raw, max_prompt_tokens=limit, **kind))


def test_another_column_holds_the_prompts():
    records = [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}]
    assert records_of(records, prompt="question")[1] == {"prompt": "r", "answer": "b"}
    assert records[0] == {"question": "q", "answer": "a"}
    with pytest.raises(PromptError, match=r"record 0 has no column 'prompt'; .* by prompt="):
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
        (lambda record: {"prompt": record["q"], record["q"]: 1}, "record 1 has no column 'one', record 0 has one"),
        (lambda record: {"prompt": "a", "values": 1}, "record 0: column 'values' is written by hybridflow"),
        (lambda record: {"prompt": "a", 3: 1}, "record 0: column 3 is a int; names are texts"),
    ):
        with pytest.raises(PromptError, match=message):
            PromptSource(records, batch_size=1, map=bad)


@pytest.mark.parametrize("kept", [1, 40, 1500])
def test_over_long_prompts_are_left_out_and_counted(directory, caplog, kept):
    texts = ["1" * 5, *("1" * (4 if i < kept - 1 else 6 + i % 3) for i in range(1599))]
    with caplog.at_level(logging.WARNING):
        source = PromptSource(
            [{"prompt": text} for text in texts], batch_size=7, steps=500, tokenizer=directory, max_prompt_tokens=5
        )
    assert source.filtered == 1600 - kept
    assert f"{1600 - kept} of 1600 prompts are left out, which have more than max_prompt_tokens=5" in caplog.text
    seen = [text for batch in source for text in batch["prompt"]]
    assert {len(text) for text in seen} == ({4, 5} if kept > 1 else {5})
    assert sum(len(text) == 5 for text in seen[: 2 * kept]) == 2
    assert source.state()["prompts"] == kept


def test_no_prompt_is_short_enough(directory):
    with pytest.raises(PromptError, match=r"all 2 prompts have more than max_prompt_tokens=2 .* shortest has 3"):
        PromptSource([{"prompt": "123"}, {"prompt": "1234"}], batch_size=1, tokenizer=directory, max_prompt_tokens=2)


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
    for tokens, lengths in ((5, {5}), ((2, 6), {2, 3, 4, 5, 6})):
        loader = PromptLoader.synthetic(10, tokens, tmp_path / "model", batch_size=10, steps=2, seed=3)
        again = PromptLoader.synthetic(10, tokens, tmp_path / "model", batch_size=10, steps=2, seed=3)
        for batch, same in zip(loader.drawn(), again.drawn(), strict=True):
            ids = batch["prompt_ids"]
            assert set(ids.lengths.tolist()) == lengths
            assert not set(ids.values.tolist()) & {*known.all_special_ids}
            assert ids.values.equal(same["prompt_ids"].values)
    for rows, tokens in ((0, 4), (2, 0), (2, (4, 3))):
        with pytest.raises(ConfigError):
            PromptLoader.synthetic(rows, tokens, tmp_path / "model", batch_size=1)


def sums(n: int) -> list[dict]:
    return [{"prompt": f"{i}+{i}=", "answer": str(i)} for i in range(n)]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    batch_size=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    steps=st.integers(1, 9),
    data=st.data(),
)
def test_every_state_continues_exactly(rows, batch_size, seed, shuffle, steps, data):
    kind: dict[str, Any] = {"batch_size": batch_size, "steps": steps, "seed": seed, "shuffle": shuffle}
    whole = list(PromptSource(sums(rows), **kind))
    assert len(whole) == steps
    at = data.draw(st.integers(0, steps))
    source = PromptSource(sums(rows), **kind)
    batches = iter(source)
    for _ in range(at):
        next(batches)
    state = json.loads(json.dumps(source.state()))
    resumed = PromptSource(sums(rows), **kind)
    resumed.load_state(state)
    for rest in (list(resumed), list(source)):
        assert len(rest) == steps - at
        assert all(one.equal(other) for one, other in zip(rest, whole[at:], strict=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_batches_from_any_point(directory, workers, left_behind):
    def source(workers: int) -> PromptSource:
        kind: dict[str, Any] = {"batch_size": 4, "steps": 9, "seed": 5, "tokenizer": directory, "workers": workers}
        return PromptSource(sums(10), map=lambda record: record | {"length": len(record["prompt"])}, **kind)

    whole = list(source(0))
    assert all(a.equal(b) for a, b in zip(whole, source(workers), strict=True))
    for at in (1, 2, 4, 9):
        first = source(workers)
        for number, batch in enumerate(first, start=1):
            assert batch.equal(whole[number - 1])
            if number >= at:
                break
        drawn = first.state()["drawn"]
        resumed = source(workers if at % 2 else 0)  # a state does not depend on the number of workers
        resumed.load_state(json.loads(json.dumps(first.state())))
        for rest in (resumed, first):
            assert all(a.equal(b) for a, b in zip(whole[drawn:], rest, strict=True))
    assert not left_behind()


def test_a_state_takes_effect_while_batches_are_drawn():
    source = PromptSource(sums(10), batch_size=3, steps=9, seed=1)
    batches = iter(source)
    first = [next(batches), next(batches), next(batches)]
    source.load_state(source.state() | {"drawn": 1})
    assert next(batches).equal(first[1])
    other = iter(source)  # two iterations share one position
    assert [int(next(it)["row_id"][0]) for it in (other, batches, other)] == [6, 9, 12]


def test_workers_leave_the_driver_as_it_was():
    before, environment = torch.random.get_rng_state(), dict(os.environ)
    for workers in (0, 1):
        list(PromptSource(sums(5), batch_size=2, steps=3, workers=workers))
    assert torch.equal(before, torch.random.get_rng_state())
    assert dict(os.environ) == environment


def test_errors_of_workers_are_those_of_the_driver(left_behind):
    calls = {"left": 3}

    def runs_out(record: dict) -> dict:
        calls["left"] -= 1
        if calls["left"] < 0:
            raise KeyError("gone")
        return record

    source = PromptSource(sums(3), batch_size=2, workers=1, map=runs_out)
    with pytest.raises(PromptError, match=r"^record \d: map=runs_out raised KeyError: 'gone'\.$"):
        next(iter(source))
    assert source.state()["drawn"] == 0
    assert not left_behind()


def test_a_worker_that_dies_is_reported(left_behind):
    here = os.getpid()

    def dies(record: dict) -> dict:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return record

    with pytest.raises(WorkerError, match=r"a process of the loader \(workers=2\) failed.*(exited|killed)"):
        next(iter(PromptSource(sums(3), batch_size=2, workers=2, map=dies)))
    assert not left_behind()


def test_a_state_of_another_run_is_refused(directory):
    state = PromptSource(sums(10), batch_size=4, seed=5).state()
    others = [{**one, "prompt": "x"} if i == 9 else one for i, one in enumerate(sums(10))]
    for name, other in (
        ("prompts", PromptSource(sums(9), batch_size=4, seed=5)),
        ("batch_size", PromptSource(sums(10), batch_size=5, seed=5)),
        ("seed", PromptSource(sums(10), batch_size=4, seed=6)),
        ("shuffle", PromptSource(sums(10), batch_size=4, seed=5, shuffle=False)),
        ("fingerprint", PromptSource(others, batch_size=4, seed=5)),
        ("fingerprint", PromptSource(sums(10)[::-1], batch_size=4, seed=5)),
    ):
        with pytest.raises(ConfigError, match=f"the saved state has {name}="):
            other.load_state(state)
        assert other.state()["drawn"] == 0
    more = [one | {"level": 1} for one in sums(10)]
    with pytest.raises(ConfigError, match=r"has columns=\['answer', 'prompt'\], this loader has .*'level'"):
        PromptSource(more, batch_size=4, seed=5).load_state(state)
    same = PromptSource(sums(10), batch_size=4, seed=5, tokenizer=directory, max_prompt_tokens=4)
    same.load_state(state)
    corrected = [{"question": one["prompt"], "answer": "?"} for one in sums(10)]
    PromptSource(corrected, prompt="question", batch_size=4, seed=5).load_state(state)
    for odd in (None, [], "state", 3):
        with pytest.raises(ConfigError, match=f"the saved state is a {type(odd).__name__}: give what state"):
            same.load_state(odd)  # type: ignore[arg-type]
    for drawn in (None, -1, "3", True):
        with pytest.raises(ConfigError, match=f"the saved state has drawn={drawn!r}"):
            same.load_state(state | {"drawn": drawn})
    with pytest.raises(ConfigError, match="drawn=None"):
        same.load_state({})

"""Where prompts come from: JSONL, Parquet, Hugging Face datasets and the hub's cache give the same records."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from hybridflow.data.prompts import Prompts, PromptSource
from hybridflow.data.records import open_records
from hybridflow.errors import ConfigError, PromptError

RECORDS: list[dict[str, Any]] = [
    {"prompt": f"p{i}", "answer": i / 8, "extra": {"index": i, "tags": [str(i)] * (i % 3)}, "note": "x" * i or None}
    for i in range(11)
]
CHATS = [{"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": str(i)}]} for i in range(5)]


def records_of(source: Any, **options: Any) -> list[dict]:
    return list(Prompts(source, **options))


def write_parquet(path: Path, records: list[dict], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path, **options)
    return path


def write_jsonl(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.fixture
def sources(tmp_path) -> dict[str, tuple[Any, dict]]:
    write_parquet(tmp_path / "two" / "0.parquet", RECORDS[:4], row_group_size=3)
    write_parquet(tmp_path / "two" / "1.parquet", RECORDS[4:])
    write_jsonl(tmp_path / "lines" / "a.jsonl", RECORDS[:7])
    write_jsonl(tmp_path / "lines" / "b.jsonl", RECORDS[7:])
    dataset = datasets.Dataset.from_list(RECORDS)
    dataset.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(str(tmp_path / "splits"))
    return {
        "jsonl": (write_jsonl(tmp_path / "all.jsonl", RECORDS), {}),
        "jsonl directory": (tmp_path / "lines", {}),
        "files": ([tmp_path / "lines/a.jsonl", str(tmp_path / "lines/b.jsonl")], {}),
        "parquet": (str(write_parquet(tmp_path / "key=value" / "all.parquet", RECORDS)), {}),
        "parquet without a name": (write_parquet(tmp_path / "nameless", RECORDS), {}),
        "parquet directory": (tmp_path / "two", {}),
        "parquet pattern": (str(tmp_path / "two" / "*.parquet"), {}),
        "dataset": (dataset.with_format("numpy"), {}),
        "chosen rows": (datasets.Dataset.from_list([*RECORDS, *RECORDS]).select(range(11, 22)), {}),
        "saved dataset": (str(tmp_path / "saved"), {}),
        "saved splits": (tmp_path / "splits", {"split": "train"}),
        "splits": (datasets.DatasetDict(train=dataset), {}),
        "list": (tuple(RECORDS), {}),
    }


def test_every_source_gives_the_same_batches(sources):
    expected = [batch.to_dicts() for batch in PromptSource(RECORDS, batch_size=4, steps=8, seed=2)]
    fingerprints = set()
    for name, (source, options) in sources.items():
        assert records_of(source, **options) == RECORDS, name
        drawn = PromptSource(source, batch_size=4, steps=8, seed=2, **options)
        assert [batch.to_dicts() for batch in drawn] == expected, name
        fingerprints.add(drawn.state()["fingerprint"])
    assert len(fingerprints) == 1


def test_tables_keep_messages_and_pass_through_map(tmp_path):
    for source in (write_parquet(tmp_path / "chats.parquet", CHATS), datasets.Dataset.from_list(CHATS)):
        assert records_of(source) == CHATS
        mapped = records_of(source, map=lambda record: {"prompt": record["prompt"][1]["content"]})
        assert mapped == [{"prompt": str(i)} for i in range(5)]


def test_a_table_is_not_copied_to_python(tmp_path):
    """Only the prompts are looked at, and one row at a time is made when it is drawn."""
    path = write_parquet(tmp_path / "wide.parquet", [{"prompt": "a", "blob": b"x" * 100}] * 3000)
    prompts = Prompts(path)
    seen = []
    scan = prompts.records.scan
    prompts.records.scan = lambda columns: (seen.append((columns, len(chunk))) or chunk for chunk in scan(columns))  # type: ignore[method-assign]
    prompts._look_through(None)
    assert {tuple(columns) for columns, _ in seen} == {("prompt",)}
    assert max(rows for _, rows in seen) < 3000 == sum(rows for _, rows in seen)
    assert prompts[2999] == {"prompt": "a", "blob": b"x" * 100}


def test_rows_that_cannot_be_used_are_named(tmp_path):
    bad = [*RECORDS[:2], {**RECORDS[2], "prompt": None}]
    two = tmp_path / "two"
    write_parquet(two / "a.parquet", RECORDS[:5])
    write_parquet(two / "b.parquet", bad)
    dataset = datasets.Dataset.from_list(bad)
    dataset.save_to_disk(str(tmp_path / "saved"))
    chats = datasets.Dataset.from_list([*CHATS, {"prompt": [{"role": "human", "content": "?"}]}])
    numbers = pyarrow.Table.from_pylist([{"prompt": 1}])
    pyarrow.parquet.write_table(numbers, tmp_path / "numbers.parquet")
    for source, message in (
        (two, r"two/b\.parquet, row 2: column 'prompt' is null"),
        (tmp_path / "saved", r"saved, row 2: column 'prompt' is null"),
        (dataset, "the dataset of prompts, row 2: column 'prompt' is null"),
        (chats, "row 5: column 'prompt', message 0 has the unknown role 'human'"),
        (tmp_path / "numbers.parquet", r"numbers\.parquet, row 0: column 'prompt' is a int"),
        (dataset.rename_column("prompt", "text"), r"dataset of prompts has no column 'prompt'; it has .*'text'"),
        (dataset.rename_column("answer", "rewards"), "column 'rewards' is written by hybridflow"),
        (dataset.select([]), "the dataset of prompts has no prompts"),
    ):
        with pytest.raises(PromptError, match=message):
            PromptSource(source, batch_size=1)


def test_files_that_do_not_fit_together(tmp_path):
    write_parquet(tmp_path / "columns" / "a.parquet", [{"prompt": "a"}])
    write_parquet(tmp_path / "columns" / "b.parquet", [{"prompt": "a", "x": 1}])
    for name in "abc":
        write_parquet(tmp_path / "lacking" / f"{name}.parquet", [{"prompt": "a"} | ({} if name == "c" else {"x": 1})])
    twice = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["prompt", "x", "x"])
    pyarrow.parquet.write_table(twice, tmp_path / "twice.parquet")
    write_parquet(tmp_path / "types" / "a.parquet", [{"prompt": "a", "x": "1"}])
    write_parquet(tmp_path / "types" / "b.parquet", [{"prompt": "a", "x": 1}])
    write_parquet(tmp_path / "kinds" / "a.parquet", [{"prompt": "a"}])
    write_jsonl(tmp_path / "kinds" / "a.jsonl", [{"prompt": "a"}])
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    for source, message in (
        ("columns", r"b\.parquet has a column 'x', .*a\.parquet has none; all files need the same"),
        ("lacking", r"c\.parquet has no column 'x', .*a\.parquet has one; all files need the same"),
        ("twice.parquet", r"twice\.parquet has more than one column 'x'; each needs a name of its own"),
        ("types", "types: the files have columns of different types"),
        ("kinds", r"kinds has files of several kinds \(\.jsonl, \.parquet\)"),
        ("broken.parquet", r"broken\.parquet is not a Parquet file that can be read"),
        ("*.json", r"no file matches .*\*\.json"),
    ):
        with pytest.raises(PromptError, match=message):
            records_of(str(tmp_path / source))
    with pytest.raises(PromptError, match="there is no prompt file"):
        records_of([tmp_path / "kinds" / "a.jsonl", tmp_path / "kinds" / "b.jsonl"])


def test_splits_that_are_not_there(tmp_path):
    dataset = datasets.Dataset.from_list(RECORDS)
    both = datasets.DatasetDict(train=dataset, test=dataset)
    with pytest.raises(PromptError, match="has the splits test, train: choose one with split="):
        records_of(both)
    with pytest.raises(PromptError, match=r"has no split 'tain'\. Did you mean 'train'"):
        records_of(both, split="tain")
    with pytest.raises(PromptError, match="streaming dataset"):
        records_of(dataset.to_iterable_dataset())
    with pytest.raises(PromptError, match="has a transform"):
        records_of(dataset.with_transform(lambda rows: rows))
    path = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    for source, options in ((path, {"split": "train"}), (RECORDS, {"split": "train"}), (dataset, {"name": "main"})):
        with pytest.raises(ConfigError, match=r"of Hugging Face datasets|of the Hugging Face Hub"):
            records_of(source, **options)


def test_names_of_the_hub_come_from_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    home = tmp_path / "gsm8k"
    for split, rows in (("train", RECORDS), ("test", RECORDS[:3])):
        write_jsonl(home / "main" / f"{split}.jsonl", [{"question": r["prompt"], "answer": r["answer"]} for r in rows])
    files = "".join(f"\n  - split: {split}\n    path: main/{split}*" for split in ("train", "test"))
    (home / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:{files}\n---\n")
    asked = {"name": "main", "prompt": "question"}
    assert len(records_of(home, split="test", **asked)) == 3
    (tmp_path / "cache" / "gsm8k").rename(tmp_path / "cache" / "openai___gsm8k")
    assert [r["prompt"] for r in records_of("openai/gsm8k", split="train", **asked)] == [f"p{i}" for i in range(11)]
    assert len(records_of("openai/gsm8k", split="train[2:7]", **asked)) == 5
    with pytest.raises(PromptError, match="openai/gsm8k has the splits test, train"):
        records_of("openai/gsm8k", **asked)
    with pytest.raises(PromptError, match=r"gsm8k, name='main', split='dev': .*cannot be loaded: Unknown split"):
        records_of("openai/gsm8k", split="dev", **asked)
    with pytest.raises(PromptError, match="nobody/nothing: there is no such file or directory, and as a dataset"):
        records_of("nobody/nothing")
    with pytest.raises(PromptError, match=r"there is no prompt file data/none\.jsonl"):
        records_of("data/none.jsonl")


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.parquet"])
@pytest.mark.parametrize("how", ["file", "list", "directory", "device"])
def test_a_pipe_or_device_is_refused_instead_of_waited_for(tmp_path, name, how):
    path = tmp_path / name
    os.mkfifo(path)
    source = {"file": path, "list": [path], "directory": tmp_path, "device": "/dev/zero"}[how]
    with pytest.raises(PromptError, match=r"is a (pipe|device), not a regular file|there is no prompt file"):
        open_records(source)

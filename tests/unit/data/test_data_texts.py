"""Texts for the pretraining loss: what is learned of each, and that every token is, over the epochs."""

from __future__ import annotations

import hashlib
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from hybridflow.data.lm_dataset import TextSource
from hybridflow.data.prompts import PromptSource
from hybridflow.data.tokenizer import MOST_CHARACTERS, Tokenizer, end_token_ids, load_tokenizer, other_token
from hybridflow.errors import CheckpointError, ConfigError, PromptError
from hybridflow.loader import text_batch
from hybridflow.rewards.answer_extraction import own_words
from recipes.small_model import SmallModel
from tests.example_templates import TEMPLATES, tokenizer_of

SMALL = SmallModel(characters="0123456789+=abcdefghijklmnopqrstuvwxyz <>")
END = 1


def make(begin: bool = False, end: bool = True, chat: bool = False) -> Tokenizer:
    raw = SMALL.tokenizer()
    if begin:
        raw.add_special_tokens({"bos_token": "<s>"})
    if not end:
        raw.eos_token = None
    if chat:
        raw.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    return Tokenizer(raw)


def rows(source: TextSource, batches: int = 1) -> list[tuple[list[int], list[int]]]:
    found = []
    for _, batch in zip(range(batches), source, strict=False):
        found += zip(batch["prompt_ids"].tolist(), batch["response_ids"].tolist(), strict=True)
    return found


def ids(text: str) -> list[int]:
    return [SMALL.vocabulary[c] for c in text]


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("end", [False, True])
def test_of_a_text_everything_but_the_first_token_is_learned(begin, end):
    tokenizer = make(begin, end)
    first = [tokenizer.raw.bos_token_id] if begin else []
    source = TextSource([{"text": "abc"}], tokenizer=tokenizer, batch_size=1, max_tokens=9)
    whole = [*first, *ids("abc"), *([END] if end else [])]
    assert rows(source) == [(whole[:1], whole[1:])]


def test_columns_of_a_batch():
    texts = [{"text": "abc", "url": 1}, {"text": "de"}]
    batch = next(iter(TextSource(texts, tokenizer=make(), batch_size=3, max_tokens=9)))
    assert batch["row_id"].tolist() == [0, 1, 2]
    assert batch["response_ids"].dtype == batch["prompt_ids"].dtype == batch["num_tokens"].dtype == torch.int64
    assert batch["response_mask"].dtype == torch.bool
    assert batch["response_mask"].values.all()
    assert batch["response_mask"].lengths.equal(batch["response_ids"].lengths)
    assert batch["num_tokens"].equal(batch["prompt_ids"].lengths + batch["response_ids"].lengths)


@settings(max_examples=50, deadline=None)
@given(length=st.integers(1, 40), max_tokens=st.integers(2, 12))
def test_over_the_epochs_every_token_of_a_long_text_is_learned_once(length, max_tokens):
    text = "".join("abcdefghij"[i % 10] for i in range(length))
    whole = [*ids(text), END]
    pieces = -(-length // (max_tokens - 1))
    source = TextSource([{"text": text}], tokenizer=make(), batch_size=1, max_tokens=max_tokens)
    found = rows(source, 2 * pieces)
    assert all(len(prompt) == 1 and 1 <= len(response) < max_tokens for prompt, response in found)
    assert [token for _, response in found[:pieces] for token in response] == whole[1:]
    at = 0
    for prompt, response in found[:pieces]:
        assert prompt == [whole[at]]
        at += len(response)
    assert found[pieces:] == found[:pieces]


def test_of_pairs_the_completion_and_the_end_are_learned():
    records = [{"q": "1+2=", "a": "3"}, {"q": "10+20=", "a": "30"}]
    kind: dict[str, Any] = {"prompt": "q", "completion": "a", "batch_size": 2, "shuffle": False}
    found = rows(TextSource(records, tokenizer=make(), max_tokens=30, **kind))
    assert found == [(ids("1+2="), [*ids("3"), END]), (ids("10+20="), [*ids("30"), END])]
    cut = rows(TextSource(records, tokenizer=make(), max_tokens=8, **kind))
    assert cut[1] == (ids("10+20="), ids("30"))
    source = TextSource(records, tokenizer=make(), max_tokens=6, **kind)
    assert source.filtered == 1
    assert rows(source) == [found[0], found[0]]


def test_both_completions_of_a_preference_share_one_pass(monkeypatch, caplog):
    asked: list[str] = []
    lengths = Tokenizer.lengths

    def counted(self: Tokenizer, prompts: list[Any], *where: Any) -> Any:
        asked.extend(prompts)
        return lengths(self, prompts, *where)

    monkeypatch.setattr(Tokenizer, "lengths", counted)
    records = [{"q": "1+2=", "a": "3", "b": "4"}, {"q": "10+20=", "a": "30", "b": "31"}]
    kind: dict[str, Any] = {"prompt": "q", "batch_size": 1, "max_tokens": 6, "tokenizer": make()}
    source = TextSource(records, completion=("a", "b"), **kind)
    assert asked == ["1+2=", "10+20="]
    assert caplog.text.count("are left out") == 1
    assert rows(source) == [(ids("1+2="), [*ids("3"), END]), (ids("1+2="), [*ids("4"), END])]
    sides = [TextSource(records, completion=one, **kind).state()["fingerprint"] for one in "ab"]
    joined = hashlib.blake2b("".join(sides).encode(), digest_size=16)
    assert source.state()["fingerprint"] == joined.hexdigest()


def test_pairs_may_be_messages():
    record = {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "yes"}]}
    kind: dict[str, Any] = {"prompt": "prompt", "completion": "completion", "batch_size": 1, "max_tokens": 20}
    assert rows(TextSource([record], tokenizer=make(chat=True), **kind)) == [(ids("<hi>"), [*ids("yes>"), END])]
    record["prompt"].append({"role": "assistant", "content": "oh "})
    raw = make(chat=True).raw
    assert rows(TextSource([record], tokenizer=raw, **kind)) == [(ids("<hi><oh "), [*ids("yes>"), END])]


ASKED, ANSWERED = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([("1+2=", "3"), ["2=", "2"]], [(ids("1+2="), [*ids("3"), END]), (ids("2="), [*ids("2"), END])]),
        ([{"prompt": "1+2=", "completion": "3", "more": 1}], [(ids("1+2="), [*ids("3"), END])]),
        ([[ASKED, ANSWERED], {"messages": [ASKED, ANSWERED]}], [(ids("<hi>"), [*ids("yes>"), END])] * 2),
        ([([ASKED], "yes")], [(ids("<hi>"), [*ids("yes>"), END])]),
        (["ab", "c"], [(ids("a"), [*ids("b"), END]), (ids("c"), [END])]),
    ],
)
def test_own_texts_are_a_batch(texts, expected):
    batch = text_batch(texts, make(chat=True).raw)
    assert list(zip(batch["prompt_ids"].tolist(), batch["response_ids"].tolist(), strict=True)) == expected
    assert batch["row_id"].tolist() == list(range(len(texts)))
    cut = text_batch(texts * 2, make(chat=True), max_tokens=5)
    assert len(cut) == 2 * len(texts)
    assert int(cut["num_tokens"].max()) <= 5


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "give a list of texts"),
        ("1+1=2", "give a list of texts"),
        ([("a", "b"), ("c", None)], "record 1: column 'completion' is null"),
        (["a", ("b", "c")], "record 0 has no column 'prompt'"),
        ([("a", "b"), ("", "c")], "record 1: column 'prompt' is empty"),
        ([("a", "b"), 3], "record 1 is a int"),
        ([("abcdefgh", "b"), ("a", "b")], "have max_tokens=4 tokens or more"),
    ],
)
def test_own_texts_that_cannot_be_used(texts, message):
    with pytest.raises(PromptError, match=message):
        text_batch(texts, make(), max_tokens=4)


@pytest.mark.parametrize("workers", [0, 1])
def test_texts_continue_exactly(workers):
    texts = [{"text": "abcdefgh"[: i + 1] * 3} for i in range(7)]
    kind: dict[str, Any] = {"tokenizer": make(), "batch_size": 3, "max_tokens": 6, "seed": 4}
    whole = rows(TextSource(texts, **kind), 12)
    first = TextSource(texts, workers=workers, **kind)
    assert rows(first, 4) == whole[:12]
    resumed = TextSource(texts, **kind)
    resumed.load_state(json.loads(json.dumps(first.state())))
    resumed_rows = rows(resumed, 12 - first.state()["drawn"])
    assert resumed_rows == whole[3 * first.state()["drawn"] :]
    with pytest.raises(ConfigError, match="the saved state has max_tokens=6"):
        TextSource(texts, **(kind | {"max_tokens": 7})).load_state(first.state())


def test_texts_that_cannot_be_used(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a"}\n{"text": null}\n')
    kind: dict[str, Any] = {"tokenizer": make(), "batch_size": 1, "max_tokens": 4}
    pair = {"prompt": "q", "completion": "a"}
    for texts, options, message in (
        (path, {}, r"texts\.jsonl, line 2: column 'text' is null; it must be text"),
        ([{"text": "a"}, {"txt": "b"}], {}, r"record 1 has no column 'text'; it has \['txt'\]"),
        ([{"text": ""}], {}, "record 0: column 'text' is empty"),
        ([{"text": [{"role": "user", "content": "a"}]}], {}, "record 0: column 'text' is a list"),
        ([3], {}, "record 0 is a int; every record must be an object"),
        ([], {}, "the list of texts has no texts"),
        (tmp_path / "none.jsonl", {}, "there is no text file"),
        ([{"q": "1", "a": 3}], pair, "record 0: column 'a' is a int; it must be text"),
        ([{"q": None, "a": "3"}], pair, "record 0: column 'q' is null"),
        ([{"q": "11111", "a": "3"}], pair, "every prompt has max_tokens=4 tokens or more"),
    ):
        with pytest.raises(PromptError, match=message):
            TextSource(texts, **kind, **options)
    with pytest.raises(PromptError, match="record 0: column 'text' has 1 tokens; none is left to predict"):
        next(iter(TextSource([{"text": "a"}], **(kind | {"tokenizer": make(end=False)}))))
    for bad, message in (
        ({"max_tokens": 1}, "max_tokens=1 must be a whole number of at least 2"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number of at least 1"),
        ({"prompt": "q"}, "name one column with text=, or two"),
        ({**pair, "text": "t"}, "name one column with text=, or two"),
        ({"workers": -1}, "workers=-1 must be a whole number of at least 0"),
        ({"tokenizer": None}, "tokenizer= is a NoneType: give a checkpoint directory"),
    ):
        with pytest.raises(ConfigError, match=message):
            TextSource([{"text": "a"}], **(kind | bad))


LONG = 50_000_000  # characters of one line


@pytest.fixture(scope="module")
def long_line(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("long") / "texts.jsonl"
    with path.open("w") as file:
        file.write(json.dumps({"text": "ab cd"}) + "\n" + json.dumps({"text": "ab cd ef " * (LONG // 9)}) + "\n")
    return path


@contextmanager
def bounded() -> Iterator[None]:
    """A few times the line in memory, and seconds of computing: to tokenise all of it takes 18 GB and minutes."""
    memory, seconds = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) * 1024 < 8 * LONG
    assert time.process_time() - seconds < 60


def test_a_line_of_50_mb_is_read_in_pieces(long_line: Path):
    with bounded():
        source = TextSource(long_line, tokenizer=make(), batch_size=2, max_tokens=64, shuffle=False)
        batches = [batch for batch, _ in zip(source, range(4), strict=False)]
    assert [batch["num_tokens"].tolist() for batch in batches] == [[6, 64]] * 4
    pieces = [batch["response_ids"].tolist()[1] for batch in batches]
    assert len(set(map(tuple, pieces))) > 1  # of other sections


def test_prompts_of_50_mb_are_left_out_or_refused(long_line: Path):
    with bounded():
        source = PromptSource(long_line, prompt="text", batch_size=1, tokenizer=make(), max_prompt_tokens=10)
        assert (source.filtered, len(source.prompts)) == (1, 1)
        pairs = TextSource(long_line, prompt="text", completion="text", tokenizer=make(), batch_size=1, max_tokens=10)
        assert pairs.filtered == 1
        for tokenizer in (None, make()):
            with pytest.raises(PromptError, match=r"texts\.jsonl, line 2: column 'text' has 49999995 characters"):
                PromptSource(long_line, prompt="text", batch_size=1, tokenizer=tokenizer)
        chat = [{"role": "user", "content": "a" * MOST_CHARACTERS}, {"role": "user", "content": "b"}]
        with pytest.raises(PromptError, match="has 4194305 characters"):
            PromptSource([{"prompt": chat}], batch_size=1)
        with pytest.raises(PromptError, match="prompt 0 has 4194305 characters"):
            make().encode(["a" * (MOST_CHARACTERS + 1)])


def test_a_long_completion_is_cut_and_never_tokenised_as_a_whole():
    records = [{"prompt": "ab", "completion": "cd " * (LONG // 3)}, {"prompt": "ab", "completion": "cd"}]
    with bounded():
        kind: dict[str, Any] = {"prompt": "prompt", "completion": "completion", "batch_size": 2, "shuffle": False}
        source = TextSource(records, tokenizer=make(), max_tokens=20, **kind)
        long, short = next(iter(source))["response_ids"].tolist()
    assert len(long) == 18
    assert short[-1] == make().raw.eos_token_id != long[-1]


@pytest.mark.parametrize("spaces", [True, False])
def test_sections_of_a_long_text_are_its_whole_tokens(spaces: bool):
    text = ("abc defgh " if spaces else "abcdefghij") * 20_000
    source = TextSource([{"text": text}], tokenizer=make(), batch_size=1, max_tokens=1_000_000, shuffle=False)
    source._rows._section = 1 << 16  # type: ignore[union-attr]
    rows = [next(iter(source)) for _ in range(4)]
    ids = [token for row in rows for column in ("prompt_ids", "response_ids") for token in row[column].tolist()[0]]
    assert ids == [*make().continuations([text])[0], make().raw.eos_token_id]


@pytest.mark.parametrize("template", TEMPLATES)
def test_chat_rows_end_as_the_template_ends_them_and_once(template):
    tokenizer, _ = tokenizer_of(template)
    end = TEMPLATES[template][1]
    for answer in ("yes", f"yes{end}"):
        batch = text_batch([([ASKED], answer), ("text", answer)], tokenizer)
        assert [tokenizer.raw.decode(row) for row in batch["response_ids"].tolist()] == [f"yes{end}"] * 2


def test_a_template_that_ends_turns_with_another_token_than_the_tokenizer_says():
    tokenizer, _ = tokenizer_of("qwen3")
    tokenizer.raw.add_special_tokens({"eos_token": "<|endoftext|>"})
    responses = text_batch([([ASKED], "yes"), ("text", "yes")], tokenizer)["response_ids"].tolist()
    assert [tokenizer.raw.decode(row) for row in responses] == ["yes<|im_end|>", "yes<|endoftext|>"]


def test_a_text_that_begins_with_the_begin_token_has_it_once():
    raw = make(begin=True).raw
    begin = raw.bos_token_id
    raw.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", begin)]
    )
    tokenizer = Tokenizer(raw)
    assert tokenizer.encode(["<s>ab", "ab"]) == [[begin, *ids("ab")]] * 2
    batch = text_batch([("<s>ab", "c"), ("ab", "c")], tokenizer)
    assert batch["prompt_ids"].tolist() == [[begin, *ids("ab")]] * 2
    source = TextSource([{"text": "<s>ab"}], tokenizer=tokenizer, batch_size=1, max_tokens=9)
    assert rows(source) == [([begin], [*ids("ab"), END])]


def test_decoded_responses_keep_the_marks_of_thoughts():
    tokenizer, end = tokenizer_of("qwen3")
    text = "<think>18</think>17"
    assert tokenizer.decode([[*tokenizer.continuations([text])[0], end]]) == [text]
    tokenizer.raw.add_tokens([AddedToken(mark, special=True) for mark in ("[THINK]", "[/THINK]")])
    text = "[THINK]18[/THINK]17"
    row = [*Tokenizer(tokenizer.raw).continuations([text])[0], end]
    assert Tokenizer(tokenizer.raw).decode([row]) == [text]
    assert Tokenizer(tokenizer.raw).decode([row], special=True) == [f"{text}<|im_end|>"]
    assert own_words(text) == "17"


def test_the_end_tokens_of_a_directory_are_those_of_tokenizer_and_both_configs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert end_token_ids(tmp_path) == (5, 6, 7)
    SMALL.tokenizer().save_pretrained(tmp_path)
    assert end_token_ids(tmp_path) == (END, 5, 6, 7)
    batch = text_batch([("ab", "cd")], load_tokenizer(tmp_path))
    assert batch["response_ids"].tolist() == [[*ids("cd"), END]]
    raw = SMALL.tokenizer()
    raw.eos_token = None
    raw.save_pretrained(tmp_path)
    assert end_token_ids(tmp_path) == (5, 6, 7)
    assert load_tokenizer(tmp_path).end_id == 5


@pytest.mark.parametrize(
    ("file", "key", "value", "said"),
    [
        ("config.json", "eos_token_id", "</s>", "has eos_token_id='</s>'"),
        ("config.json", "eos_token_id", [1, "x"], r"has eos_token_id=\[1, 'x'\]"),
        ("config.json", "bos_token_id", "<s>", "cannot be read: .*'bos_token_id' with value '<s>'"),
        ("config.json", "hidden_size", "64", "cannot be read: .*'hidden_size' expected int, got str"),
        ("generation_config.json", "eos_token_id", {"a": 1}, "has eos_token_id={'a': 1}"),
        ("tokenizer_config.json", "eos_token", 1, "has eos_token=1. Give the text"),
        ("tokenizer_config.json", "pad_token", {"a": 1}, "has pad_token={'a': 1}"),
        ("tokenizer_config.json", "added_tokens_decoder", "x", "^the tokenizer of .* cannot be read"),
        ("special_tokens_map.json", "bos_token", [1], r"has bos_token=\[1\]"),
        ("tokenizer_config.json", None, [], "holds a list, not the settings"),
        ("generation_config.json", None, None, "holds a NoneType, not the settings"),
        ("special_tokens_map.json", None, 3, "holds a int, not the settings"),
        ("tokenizer.json", None, None, "^the tokenizer of .* cannot be read"),
    ],
)
def test_settings_of_another_type_are_refused_with_their_file(tmp_path, file, key, value, said):
    SMALL.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 7}))
    path = tmp_path / file
    found = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(value if key is None else {**found, key: value}))
    where = "" if said.startswith("^") else f"{file} "
    with pytest.raises(CheckpointError, match=where + said):
        load_tokenizer(tmp_path)


def write_tokens(directory: Path, vocab: Any, **added: int) -> Path:
    directory.mkdir()
    tokens = [{"id": at, "content": name} for name, at in added.items()]
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}))
    return directory


LETTERS = {"a": 0, "b": 1}


@pytest.mark.parametrize(
    ("here", "there", "odd"),
    [
        ((LETTERS, {}), ({"a": 1, "b": 0}, {}), "'a' is token 1 there and 0 here"),
        ((LETTERS, {"<start>": 2, "<end>": 3}), (LETTERS, {"<end>": 2, "<start>": 3}), "'<end>' is token 2 there"),
        ((LETTERS, {"<think>": 2}), (LETTERS, {"<pad>": 2}), "'<think>' is token None there and 2 here"),
        (([["a", -1.0], ["b", -2.0]], {}), ([["b", -1.0], ["a", -2.0]], {}), "'a' is token 1 there and 0 here"),
        (([["a", -1.0], ["b", -2.0]], {}), (LETTERS, {}), None),
        ((LETTERS, {}), (LETTERS, {"<pad>": 2}), None),
    ],
)
def test_tokens_of_other_meaning_are_found(tmp_path, here, there, odd):
    found = other_token(*(write_tokens(tmp_path / n, v, **a) for n, (v, a) in (("one", here), ("other", there))))
    assert (found is None) if odd is None else (found or "").startswith(odd)

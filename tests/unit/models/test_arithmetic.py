"""The small task: the same files every time, a tokenizer that loses nothing, and wrong answers as often as asked."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
import torch

from hybridflow.data.prompts import Prompts
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.models.spec import ModelSpec
from recipes.arithmetic import Arithmetic, exact_match, make
from recipes.small_model import EOS, PAD, UNKNOWN, SmallModel

TINY = Arithmetic(numbers=6, held_out=8, model=SmallModel(hidden=32, layers=1, steps=3, batch=4))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make(tmp_path_factory.mktemp("small"), TINY)


def test_it_is_made_once_and_the_same_again(files, tmp_path):
    changed = files.train.stat().st_mtime_ns
    assert make(files.model.parents[1], TINY) == files
    assert files.train.stat().st_mtime_ns == changed
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    again = make(tmp_path, TINY)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads
    weights = [(f.model / "model.safetensors").read_bytes() for f in (files, again)]
    assert weights[0] == weights[1]
    other = make(tmp_path, Arithmetic(numbers=6, held_out=8, seed=1, model=TINY.model))
    assert other.model != again.model
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_held_out_problems_are_in_no_training(files):
    train, held_out = list(Prompts(files.train)), list(Prompts(files.held_out))
    assert len(held_out) == 8
    assert len({r["prompt"] for r in train + held_out}) == 36
    for record in train + held_out:
        a, b = record["prompt"].removesuffix("=").split("+")
        assert record["answer"] == str(int(a) + int(b))
        assert exact_match([record["answer"], record["answer"] + "0"], [record["answer"]] * 2) == [1.0, 0.0]
    rng, (pairs, _) = random.Random(0), TINY.problems()
    asked = {TINY.worksheet(pairs, rng)[0] for _ in range(500)}
    assert asked == {r["prompt"] for r in train}


def test_answers_on_worksheets_are_wrong_as_often_as_asked():
    task, rng = Arithmetic(right=0.2, slip=0.75), random.Random(0)
    pairs, _ = task.problems()
    misses = Counter()
    for _ in range(4000):
        prompt, answer = task.worksheet(pairs, rng)
        a, b = prompt.removesuffix("=").split("+")
        misses[int(answer) - int(a) - int(b)] += 1
    assert misses[0] / 4000 == pytest.approx(0.2, abs=0.03)
    assert misses[1] / 4000 == pytest.approx(0.75, abs=0.03)


def test_the_checkpoint_loads_as_any_other(files):
    from transformers import AutoModelForCausalLM

    spec = ModelSpec.from_checkpoint(files.model)
    spec.check_parallel(p=1, t=2)
    assert spec.head_dim == 32
    tokenizer = load_tokenizer(files.model)
    ids = tokenizer.encode(["3+14=", "17", "x"])
    assert tokenizer.decode(ids) == ["3+14=", "17", ""]
    assert ids[2] == [TINY.model.vocabulary[UNKNOWN]]
    raw = tokenizer.raw
    assert (raw.pad_token, raw.eos_token, raw.bos_token) == (PAD, EOS, None)
    model = AutoModelForCausalLM.from_pretrained(files.model)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (raw.eos_token_id, raw.pad_token_id)
    assert model(torch.tensor([ids[0]])).logits.shape == (1, 5, len(raw))


def test_prompts_hold_their_answers_only(files):
    assert set(json.loads(files.train.read_text().splitlines()[0])) == {"prompt", "answer"}

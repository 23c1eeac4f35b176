"""A run that is resumed goes on with exactly the batch that came next, also with worker processes."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.data.prompts import PromptSource
from hybridflow.errors import ConfigError, PromptError, WorkerError
from recipes.small_model import SmallModel


def prompts(n: int) -> list[dict]:
    return [{"prompt": f"{i}+{i}=", "answer": str(i)} for i in range(n)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    SmallModel(characters="0123456789+=").tokenizer().save_pretrained(directory)
    return directory


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
    whole = list(PromptSource(prompts(rows), **kind))
    assert len(whole) == steps
    at = data.draw(st.integers(0, steps))
    source = PromptSource(prompts(rows), **kind)
    batches = iter(source)
    for _ in range(at):
        next(batches)
    state = json.loads(json.dumps(source.state()))
    resumed = PromptSource(prompts(rows), **kind)
    resumed.load_state(state)
    for rest in (list(resumed), list(source)):
        assert len(rest) == steps - at
        assert all(one.equal(other) for one, other in zip(rest, whole[at:], strict=True))


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_batches_from_any_point(tokenizer, workers, left_behind):
    def source(workers: int) -> PromptSource:
        kind: dict[str, Any] = {"batch_size": 4, "steps": 9, "seed": 5, "tokenizer": tokenizer, "workers": workers}
        return PromptSource(prompts(10), map=lambda record: record | {"length": len(record["prompt"])}, **kind)

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
    source = PromptSource(prompts(10), batch_size=3, steps=9, seed=1)
    batches = iter(source)
    first = [next(batches), next(batches), next(batches)]
    source.load_state(source.state() | {"drawn": 1})
    assert next(batches).equal(first[1])
    other = iter(source)  # two iterations share one position
    assert [int(next(it)["row_id"][0]) for it in (other, batches, other)] == [6, 9, 12]


def test_workers_leave_the_driver_as_it_was():
    before, environment = torch.random.get_rng_state(), dict(os.environ)
    for workers in (0, 1):
        list(PromptSource(prompts(5), batch_size=2, steps=3, workers=workers))
    assert torch.equal(before, torch.random.get_rng_state())
    assert dict(os.environ) == environment


def test_errors_of_workers_are_those_of_the_driver(left_behind):
    calls = {"left": 3}

    def runs_out(record: dict) -> dict:
        calls["left"] -= 1
        if calls["left"] < 0:
            raise KeyError("gone")
        return record

    source = PromptSource(prompts(3), batch_size=2, workers=1, map=runs_out)
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
        next(iter(PromptSource(prompts(3), batch_size=2, workers=2, map=dies)))
    assert not left_behind()


def test_a_state_of_another_run_is_refused(tokenizer):
    state = PromptSource(prompts(10), batch_size=4, seed=5).state()
    others = [{**one, "prompt": "x"} if i == 9 else one for i, one in enumerate(prompts(10))]
    for name, other in (
        ("prompts", PromptSource(prompts(9), batch_size=4, seed=5)),
        ("batch_size", PromptSource(prompts(10), batch_size=5, seed=5)),
        ("seed", PromptSource(prompts(10), batch_size=4, seed=6)),
        ("shuffle", PromptSource(prompts(10), batch_size=4, seed=5, shuffle=False)),
        ("fingerprint", PromptSource(others, batch_size=4, seed=5)),
        ("fingerprint", PromptSource(prompts(10)[::-1], batch_size=4, seed=5)),
    ):
        with pytest.raises(ConfigError, match=f"the saved state has {name}="):
            other.load_state(state)
        assert other.state()["drawn"] == 0
    more = [one | {"level": 1} for one in prompts(10)]
    with pytest.raises(ConfigError, match=r"has columns=\['answer', 'prompt'\], this loader has .*'level'"):
        PromptSource(more, batch_size=4, seed=5).load_state(state)
    same = PromptSource(prompts(10), batch_size=4, seed=5, tokenizer=tokenizer, max_prompt_tokens=4)
    same.load_state(state)
    corrected = [{"question": one["prompt"], "answer": "?"} for one in prompts(10)]
    PromptSource(corrected, prompt="question", batch_size=4, seed=5).load_state(state)
    for odd in (None, [], "state", 3):
        with pytest.raises(ConfigError, match=f"the saved state is a {type(odd).__name__}: give what state"):
            same.load_state(odd)  # type: ignore[arg-type]
    for drawn in (None, -1, "3", True):
        with pytest.raises(ConfigError, match=f"the saved state has drawn={drawn!r}"):
            same.load_state(state | {"drawn": drawn})
    with pytest.raises(ConfigError, match="drawn=None"):
        same.load_state({})

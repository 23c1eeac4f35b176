"""A mixture has exact shares, continues exactly from any state, and never fills or drops a column silently."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.algorithms.metrics import batch_metrics
from hybridflow.batch.batch import Batch
from hybridflow.data.mixture import MixtureSource, Turns
from hybridflow.data.prompts import PromptSource
from hybridflow.errors import ConfigError, PromptError, RewardError
from hybridflow.rewards import Functions, per_row
from recipes.small_model import SmallModel

SIZES = {"math": 101, "code": 37, "chat": 11}


def loader(name: str, rows: int = 0, **options: Any) -> PromptSource:
    records = [{"prompt": f"{name} {i}", "answer": str(i)} for i in range(rows or SIZES[name])]
    return PromptSource(records, **{"batch_size": 8, "seed": len(name)} | options)


def mixture(weights: Any = None, seed: int = 0, names: Any = SIZES, **options: Any) -> MixtureSource:
    return MixtureSource({name: loader(name, **options) for name in names}, weights=weights, seed=seed)


def test_shares_are_exact_over_10000_rows():
    weights = {"math": 0.61, "code": 0.29, "chat": 0.1}
    found = Counter[str]()
    for seed, batch in enumerate(itertools.islice(mixture(weights), 1250)):
        found.update(batch["source"])
        rows = (seed + 1) * 8
        assert all(abs(found[name] - share * rows) <= len(weights) for name, share in weights.items()), rows
    assert found.total() == 10_000
    assert all(abs(found[name] / 10_000 - share) < 0.001 for name, share in weights.items())


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.floats(0.001, 100), min_size=1, max_size=8), seed=st.integers(0, 2**40))
def test_no_source_is_ever_far_from_its_share(shares, seed):
    weights = {f"s{i}": share for i, share in enumerate(shares)}
    turns, total = Turns(sorted(weights), seed), sum(shares)
    for rows in range(1, 400):
        name, number = turns.next(weights)
        assert number == turns.taken[name] - 1
        assert all(abs(turns.taken[n] - rows * weights[n] / total) <= len(shares) for n in weights)


def curriculum(step: int) -> dict[str, float]:
    return {"math": 1.0, "code": step / 10, "chat": 3.0 if step > 20 else 0.0}


def test_twenty_interruptions_continue_exactly():
    whole = list(mixture(curriculum, seed=4, steps=64))
    rng, got, state = random.Random(7), list[Batch](), None
    stops = sorted(rng.sample(range(1, 64), 20))
    for stop in [*stops, 64]:
        source = mixture(curriculum, seed=4, steps=64, workers=int(stop % 3 == 0))
        if state is not None:
            source.load_state(json.loads(json.dumps(state)))
        for batch in source:
            got.append(batch)
            if len(got) == stop:
                break
        state = source.state()
    assert len(got) == len(whole) == 64
    assert all(one.equal(other) for one, other in zip(got, whole, strict=True))


def test_rows_are_those_of_the_loaders_in_their_order_with_ids_of_their_own():
    batches = list(mixture({"math": 2, "code": 1, "chat": 1}, steps=40))
    for name in SIZES:
        own = itertools.chain.from_iterable(batch["prompt"] for batch in itertools.islice(loader(name), 60))
        drawn = [p for b in batches for p, source in zip(b["prompt"], b["source"], strict=True) if source == name]
        assert drawn == list(itertools.islice(own, len(drawn)))
    assert [row for batch in batches for row in batch["row_id"].tolist()] == list(range(320))


def test_a_curriculum_changes_the_shares():
    drawn = mixture(lambda step: {"math": int(step < 10), "code": int(step >= 10)}, names=("math", "code"), steps=20)
    assert [set(batch["source"]) for batch in drawn] == [{"math"}] * 10 + [{"code"}] * 10


def test_weights_may_change_when_a_run_continues():
    first = mixture({"math": 1, "code": 1, "chat": 0}, steps=20)
    next(batches := iter(first))
    second = mixture({"math": 0, "code": 0, "chat": 1}, steps=20)
    second.load_state(first.state())
    assert all(set(batch["source"]) == {"chat"} for batch in second)
    assert second.taken == {**first.taken, "chat": 19 * 8}
    batches.close()


def test_token_ids_are_in_the_order_of_the_rows(tmp_path):
    SmallModel(characters="mathcode 0123456789").tokenizer().save_pretrained(tmp_path)
    source = mixture(names=("math", "code"), steps=3, tokenizer=str(tmp_path))
    for batch in source:
        assert [len(ids) for ids in batch["prompt_ids"].rows()] == [len(prompt) for prompt in batch["prompt"]]
        assert len(set(batch["source"])) == 2


def test_columns_that_differ_are_refused_or_filled_as_asked():
    tests = PromptSource([{"prompt": "p", "answer": "a", "tests": ["t"]}], batch_size=8, steps=1)
    sources = {"math": loader("math", steps=1), "code": tests}
    with pytest.raises(PromptError, match=r"'math' has no column 'tests', which 'code'.*defaults=\{'tests': None\}"):
        MixtureSource(sources)
    (batch,) = MixtureSource(sources, defaults={"tests": None})
    kinds = dict(zip(batch["source"], batch["tests"], strict=True))
    assert kinds == {"math": None, "code": ["t"]}
    with pytest.raises(ConfigError, match="no source has a column 'test'"):
        MixtureSource(sources, defaults={"tests": None, "test": None})
    own = PromptSource([{"prompt": "p", "source": "x"}], batch_size=8)
    with pytest.raises(PromptError, match="'own' has a column 'source', which Mixture writes"):
        MixtureSource({"own": own})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MixtureSource({}), "give loaders by name"),
        (lambda: MixtureSource({"a": [1]}), "source 'a' is a list. Give PromptLoaders by name"),
        (lambda: MixtureSource(dict.fromkeys("ab", loader("math"))), "share a loader; give each"),
        (lambda: MixtureSource({"a": mixture()}), "source 'a' is a MixtureSource"),
        (lambda: MixtureSource({"a": loader("math"), "b": loader("code", batch_size=4)}), r"batch_size.*: \{'a'"),
        (lambda: MixtureSource({"a": loader("math"), "b": loader("code", steps=4)}), "steps of the loaders differs"),
        (lambda: mixture({"math": 1}), "'chat' is not in both"),
        (lambda: mixture({"math": 0, "code": 0, "chat": 0}), "give numbers of at least 0, and one above"),
        (lambda: mixture({"math": -1, "code": 1, "chat": 0}), "give numbers of at least 0"),
        (lambda: mixture(lambda step: 0.5), "the weights of step 0 are 0.5: give numbers by name"),
        (lambda: MixtureSource({"a": loader("math")}, wieghts={"a": 1}), "Did you mean 'weights'"),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_state_of_other_data_is_refused_by_the_name_of_its_source():
    state = mixture(names=("math", "code")).state()
    other = MixtureSource({"math": loader("math"), "code": loader("code", rows=5)})
    with pytest.raises(ConfigError, match="Mixture, source 'code': the saved state has prompts=37"):
        other.load_state(state)
    with pytest.raises(ConfigError, match="names=") as caught:
        mixture().load_state(state)
    assert "allow_changed" not in str(caught.value)
    with pytest.raises(ConfigError, match="is a NoneType"):
        mixture(names=("math", "code")).load_state({k: v for k, v in state.items() if k != "sources"})


@pytest.mark.parametrize(
    "damage",
    [
        lambda sources: None,
        lambda sources: [sources],
        lambda sources: sources | {"math": None},
        lambda sources: sources | {"math": {k: v for k, v in sources["math"].items() if k != "rows"}},
        lambda sources: sources | {"math": sources["math"] | {"credit": "x"}},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(damage):
    used, fresh = mixture(names=("code", "math")), mixture(names=("code", "math"))
    batches = iter(used)
    next(batches)
    before, saved = fresh.state(), used.state()
    with pytest.raises(ConfigError, match=r"Mixture, source '(code|math)': the saved state"):
        fresh.load_state(saved | {"sources": damage(saved["sources"])})
    assert fresh.state() == before
    fresh.load_state(saved)
    assert next(iter(fresh)).equal(next(batches))


def right(completions: list[str], answer: list[str]) -> list[float]:
    return [float(a == b) for a, b in zip(completions, answer, strict=True)]


@per_row
def runs(prompt: str, response: str, tests: list[str]) -> float:
    return float(len(tests))


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_judge_the_rows_of_their_source(workers):
    functions = Functions({"math": right, "code": runs}, by="source", workers=workers, weights={"code": 0.5})
    columns = {"answer": ["1", None, "3"], "tests": [None, [*"abc"], None], "source": ["math", "code", "math"]}
    try:
        assert set(functions.reads or ()) == {"answer", "tests", "source"}
        found = functions(["p"] * 3, ["1", "x", "x"], columns, [4, 5, 6])
        assert found.rewards.tolist() == [1.0, 1.5, 0.0]
        math, code = (found.components[f"rewards/{name}"].tolist() for name in ("math", "code"))
        assert (math[0], math[2], code[1]) == (1.0, 0.0, 3.0)
        assert math[1] != math[1]  # NaN: it does not apply
        assert code[0] != code[0]
        with pytest.raises(RewardError, match="row 6 has source='chat', for which there is no"):
            functions(["p"] * 3, ["1", "x", "x"], columns | {"source": ["math", "code", "chat"]}, [4, 5, 6])
    finally:
        functions.close()
    with pytest.raises(ConfigError, match="by='source' chooses a function by its name"):
        Functions([right], by="source")


def test_metrics_by_source():
    columns = {"rewards": [1.0, 3.0, 0.0, 0.5], "response_ids": [[1], [1, 2], [3, 4, 5], [5, 6]]}
    batch = Batch({"source": ["math", "code", "math", "math"], **columns})
    found = batch_metrics(batch)
    by = {name: value for name, value in found.items() if name.startswith("source/")}
    assert by == {
        "source/math/share": 0.75,
        "source/math/reward_mean": 0.5,
        "source/math/length_mean": 2.0,
        "source/code/share": 0.25,
        "source/code/reward_mean": 3.0,
        "source/code/length_mean": 2.0,
    }
    addresses = batch.with_columns(source=["a", "b", 3, None])
    assert not [name for name in batch_metrics(addresses) if name.startswith("source/")]

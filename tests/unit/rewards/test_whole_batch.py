"""whole_batch: a reward function that gets all rows of a call at once."""

from __future__ import annotations

import time

import pytest

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import Functions, per_row, whole_batch


@whole_batch
def rank(completions: list[str], group_id: list[int]) -> list[float]:
    """The place of a response in its group by its length, the longest 0."""
    return [
        float(sum(len(other) > len(text) for other, there in zip(completions, group_id) if there == group))
        for text, group in zip(completions, group_id)
    ]


@whole_batch
def count(completions: list[str]) -> list[float]:
    return [float(len(completions))] * len(completions)


@whole_batch
def fails(completions: list[str]) -> list[float]:
    raise ValueError(f"of {len(completions)} rows")


@whole_batch
def sleeps(completions: list[str]) -> list[float]:
    time.sleep(30)
    return [0.0] * len(completions)


ROWS = (["p"] * 6, ["a", "abc", "ab", "x", "xyz", "xy"], {"group_id": [4, 4, 4, 9, 9, 9]})


@pytest.mark.parametrize("workers", [0, 3])
def test_it_gets_all_rows_in_one_call(workers):
    judge = Functions([rank, count], workers=workers)
    scores = judge(*ROWS)
    judge.close()
    assert scores.components["rewards/rank"].tolist() == [2, 0, 1, 2, 0, 1]
    assert scores.components["rewards/count"].tolist() == [6] * 6


def test_with_a_column_of_names_it_gets_the_rows_of_its_name():
    judge = Functions({"math": count, "code": rank}, by="source")
    columns = {"group_id": [4, 4, 4, 9, 9, 9], "source": ["math", "math", "code", "code", "math", "math"]}
    assert judge(ROWS[0], ROWS[1], columns).rewards.tolist() == [4, 4, 0, 0, 4, 4]


@pytest.mark.parametrize(("function", "says"), [(fails, "of 6 rows"), (sleeps, "0.2 s")])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_call_that_fails_fails_for_all_rows(function, says, workers):
    judge = Functions(function, workers=workers, timeout=0.2 if function is sleeps else 20.0, on_failure="zero")
    scores = judge(*ROWS)
    judge.close()
    assert scores.rewards.tolist() == [0.0] * 6
    assert all(failure is not None and says in failure for failure in scores.failures)
    judge = Functions(function, workers=workers, timeout=0.2 if function is sleeps else 20.0)
    with pytest.raises(RewardError, match=r"for rows 0\.\.5"):
        judge(*ROWS)
    judge.close()


@pytest.mark.parametrize(
    ("answer", "says"),
    [([1.0], "returned 1 rewards for 6 rows"), ([float("nan")] * 6, "must be finite"), (1.0, "list of 6 numbers")],
)
def test_what_it_returns_is_checked(answer, says):
    with pytest.raises(RewardError, match=says):
        Functions(whole_batch(lambda completions: answer))(*ROWS)


def test_other_signatures_are_refused():
    with pytest.raises(ConfigError, match="give the function itself"):
        whole_batch(per_row(lambda prompt, response: 1.0))
    with pytest.raises(ConfigError, match=r"must take \(prompts, completions"):
        whole_batch(lambda prompt, response: 1.0)
    with pytest.raises(RewardError, match="needs the column 'group_id'"):
        Functions(rank)(["p"], ["r"], {})

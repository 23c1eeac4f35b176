"""Reward functions: both conventions, and an error with function and row instead of a made-up number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hybridflow.errors import ConfigError, RewardError
from hybridflow.ragged import Ragged
from hybridflow.rewards.function import FunctionReward

PROMPTS, RESPONSES = ["1+1=", "1+2=", "2+2="], ["2", "4", "4"]
COLUMNS = {"answer": ["2", "3", "4"], "level": torch.tensor([1, 2, 3]), "ids": Ragged.from_rows([[1], [2, 3], []])}


def per_row(prompt, response, answer):
    return float(response == answer)


def for_all(prompts, completions, *, answer):
    return [float(c == a) for c, a in zip(completions, answer)]


def test_both_conventions():
    assert FunctionReward(per_row)(PROMPTS, RESPONSES, COLUMNS) == [1.0, 0.0, 1.0]
    assert FunctionReward(for_all)(PROMPTS, RESPONSES, COLUMNS) == [1.0, 0.0, 1.0]
    assert FunctionReward(per_row).per_row
    assert not FunctionReward(for_all).per_row
    assert FunctionReward(for_all)([], [], {"answer": []}) == []


def test_a_function_gets_the_columns_it_names_as_plain_values():
    seen = {}

    def some(prompts, completions, level, ids, other=None):
        seen.update(level=level, ids=ids, other=other)
        return level

    reward = FunctionReward(some)
    assert reward.reads == ("level", "ids", "other?")
    assert reward(PROMPTS, RESPONSES, COLUMNS) == [1.0, 2.0, 3.0]
    assert seen == {"level": [1, 2, 3], "ids": [[1], [2, 3], []], "other": None}
    assert all(type(value) is int for value in seen["level"])

    def everything(prompt, response, **columns):
        return len(columns)

    assert FunctionReward(everything).reads is None
    assert FunctionReward(everything)(PROMPTS, RESPONSES, COLUMNS | {"prompt": PROMPTS}) == [3.0] * 3


def test_a_missing_column_is_named():
    with pytest.raises(RewardError, match=r"per_row needs the column 'answer'; there are \['level'\]"):
        FunctionReward(per_row)(PROMPTS, RESPONSES, {"level": [1, 2, 3]})


@pytest.mark.parametrize(
    "answer",
    [
        [True, False, 1],
        (1, 0, 1.0),
        np.array([1, 0, 1]),
        torch.tensor([1.0, 0.0, 1.0]),
        [torch.tensor(1.0), np.float32(0), np.int64(1)],
    ],
)
def test_numbers_of_every_kind(answer):
    assert FunctionReward(lambda prompts, completions: answer)(PROMPTS, RESPONSES) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([1.0, 0.0], r"returned 2 rewards for 3 rows \(70\.\.72\)"),
        ([1.0] * 4, "returned 4 rewards for 3 rows"),
        (None, "returned None .* for 3 rows"),
        (1.0, "it must return a list of 3 numbers. .* once per row .* name its first parameter `prompt`"),
        ("abc", "it must return a list of 3 numbers"),
        ({"a": 1}, "it must return a list of 3 numbers"),
        (torch.tensor(1.0), "it must return a list of 3 numbers"),
        ([1.0, None, 1.0], "returned None .* at row 71"),
        ([1.0, 0.0, math.nan], "returned nan at row 72"),
        ([math.inf, 0.0, 0.0], "returned inf at row 70"),
        (["1", 0.0, 0.0], "returned '1' .* at row 70"),
        ([[1.0], 0.0, 0.0], r"returned \[1.0\] .* at row 70"),
        (torch.ones(3, 2), "at row 70"),
        ([1j, 0.0, 0.0], "at row 70"),
    ],
)
def test_bad_answers_name_the_function_and_the_row(answer, message):
    def my_reward(prompts, completions):
        return answer

    with pytest.raises(RewardError, match=f"(?s)my_reward returned .*{message.removeprefix('returned ')}"):
        FunctionReward(my_reward)(PROMPTS, RESPONSES, row_ids=torch.tensor([70, 71, 72]))


def test_an_exception_is_passed_on_with_its_place():
    def broken(prompt, response):
        return 1.0 / (len(response) - 2) if prompt == "1+2=" else 0.0

    with pytest.raises(RewardError, match="broken raised ZeroDivisionError at row 8") as caught:
        FunctionReward(broken)(PROMPTS, ["2", "42", "4"], row_ids=[7, 8, 9])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def broken_for_all(prompts, completions):
        raise KeyError("x")

    with pytest.raises(RewardError, match=r"broken_for_all raised KeyError for rows 0\.\.2"):
        FunctionReward(broken_for_all)(PROMPTS, RESPONSES)


@pytest.mark.parametrize("answer", [None, math.nan, -math.inf, "0.5", [1.0]])
def test_bad_answers_row_by_row(answer):
    def my_reward(prompt, response):
        return answer if response == "4" else 1.0

    with pytest.raises(RewardError, match=r"my_reward returned .* at row 1"):
        FunctionReward(my_reward)(PROMPTS, RESPONSES)


def test_functions_that_cannot_be_called_are_refused_at_once():
    with pytest.raises(ConfigError, match=r"must take \(prompts, completions"):
        FunctionReward(lambda texts: [0.0])
    with pytest.raises(ConfigError, match="must take"):
        FunctionReward(lambda **columns: [0.0])


class Grader:
    def __call__(self, prompts, completions):
        return [len(c) for c in completions]


def test_callables_with_state_and_variable_arguments():
    assert FunctionReward(Grader())(PROMPTS, RESPONSES) == [1.0, 1.0, 1.0]
    assert FunctionReward(Grader()).name == "Grader"
    assert FunctionReward(lambda *texts: [0.5] * len(texts[0]))(PROMPTS, RESPONSES) == [0.5] * 3

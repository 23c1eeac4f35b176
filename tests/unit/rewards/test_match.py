"""Exact, Regex and Numeric: what they accept, what they refuse, and rows without a reference."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import RowFailure
from hybridflow.rewards.match import Exact, Numeric, Regex
from tests.called_rewards import CalledReward as FunctionReward


def scores(verifier: Any, completions: list[Any], references: list[Any]) -> list[Any]:
    return verifier([""] * len(completions), completions, answer=references)


def test_exact_is_the_answer_and_nothing_else():
    completions = ["Paris", " Paris\n", "paris", "Paris.", "It is Paris", ""]
    assert scores(Exact(), completions, ["Paris"] * 6) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert scores(Exact(ignore_case=True), completions, ["PARIS"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_exact_takes_numbers_and_several_references():
    assert scores(Exact(), ["12", "12.0", "b"], [12, 12, ("a", "b")]) == [1.0, 0.0, 1.0]


def test_exact_reads_chat_completions_and_another_column():
    verifier = Exact("truth")
    assert verifier.reads == ("truth",)
    said = [{"role": "assistant", "content": "Paris"}]
    assert verifier([""], [said], truth=["Paris"]) == [1.0]
    with pytest.raises(RewardError, match="int; it must be a text or a list of chat messages"):
        verifier([""], [3], truth=["Paris"])


def test_regex_rewards_a_form():
    verifier = Regex(r"<think>.*</think>\s*<answer>.*</answer>", full=True)
    assert verifier.reads == ()
    completions = [
        "<think>a\nb</think>\n<answer>c</answer>\n",
        "<answer>c</answer>",
        "x <think></think><answer></answer>",
    ]
    assert verifier([""] * 3, completions) == [1.0, 0.0, 0.0]
    assert Regex("B+", ignore_case=True)([""] * 2, ["abba", "a"]) == [1.0, 0.0]


def test_regex_compares_the_last_match_with_the_reference():
    verifier = Regex(r"<answer>(.*?)</answer>", answer="answer")
    completions = ["<answer>a</answer><answer> b </answer>", "<answer>b</answer><answer>a</answer>", "b"]
    assert scores(verifier, completions, ["b"] * 3) == [1.0, 0.0, 0.0]
    assert scores(Regex(r"\d+", answer="answer"), ["1 and 22"], [22]) == [1.0]
    thoughts = ["<think>1 or 22", "22 <think>or 1?", "<think>1</think> 22", "<think>a 22</think>"]
    assert scores(Regex(r"\d+", answer="answer"), thoughts, [22] * 4) == [0.0, 1.0, 1.0, 1.0]
    assert scores(Regex(r"([A-D])\b", answer="answer", ignore_case=True), ["it is b"], ["B"]) == [1.0]
    assert scores(Regex(r"x|(y)", answer="answer"), ["x"], ["y"]) == [0.0]


def test_numeric_compares_values():
    said = ["18.", "$18.00", "9*2 = 18", "18.01", "19", "none"]
    completions = [f"The answer is {answer}" for answer in said]
    assert scores(Numeric(), completions, [18] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert scores(Numeric(absolute=0.01), completions, ["18"] * 6) == [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert scores(Numeric(relative=0.1), completions, ["18"] * 6) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert scores(Numeric(relative=0.1), ["-1.05", "1.05", "0"], [-1, -1, 0]) == [1.0, 0.0, 1.0]
    assert scores(Numeric(), ["#### 18", "0.5"], ["9*2\n#### 18", ("1/3", "1/2")]) == [1.0, 1.0]


@pytest.mark.parametrize("verifier", [Exact(), Numeric(), Regex("(.*)", answer="answer")])
def test_rows_without_a_reference_fail(verifier: Any):
    answers = scores(verifier, ["1"] * 6, [None, "", "1", [], ["1", None], float("nan")])
    assert [isinstance(answer, RowFailure) for answer in answers] == [True, True, False, True, True, True]
    assert "column 'answer'" in answers[0].reason


def test_numeric_refuses_references_that_are_no_numbers():
    (answer,) = scores(Numeric(), ["1"], ["one apple or two"])
    assert isinstance(answer, RowFailure)
    assert "is no number" in answer.reason


@pytest.mark.parametrize(
    "make",
    [
        lambda: Exact(""),
        lambda: Numeric(answer=3),  # pyright: ignore[reportArgumentType]
        lambda: Regex("("),
        lambda: Regex(None),  # pyright: ignore[reportArgumentType]
        lambda: Regex("a", answer=""),
        lambda: Numeric(absolute=-1),
        lambda: Numeric(relative=float("nan")),
        lambda: Numeric(relative="much"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_wrong_settings_are_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("verifier", [Exact(), Numeric(), Regex("(.*)", answer="answer")])
def test_they_are_called_as_verifiers_and_survive_pickling(verifier: Any):
    reward = FunctionReward(pickle.loads(pickle.dumps(verifier)))
    assert reward.reads == ("answer",)
    assert reward(["", ""], ["1", "2"], {"answer": ["1", "1"], "more": [0, 0]})[0] == 1.0


def test_a_tolerance_holds_for_percent_and_irrational_references():
    completions, references = (
        ["#### 25.1%", "#### 0.3", "\\boxed{3.14}", "\\boxed{3.2}"],
        ["0.25", "0.25", "\\pi", "\\pi"],
    )
    assert scores(Numeric(absolute=0.01), completions, references) == [1.0, 0.0, 1.0, 0.0]
    assert scores(Numeric(), ["\\boxed{2\\pi}", "\\boxed{6.28}"], ["\\pi\\cdot 2"] * 2) == [1.0, 0.0]

"""Exact, Regex, Numeric and Math: settings, rows without a reference, texts made to stop them, and time that is up."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards import RowFailure
from hybridflow.rewards.answer_extraction import own_words
from hybridflow.rewards.match import Exact, Math, Numeric, Regex, same_answer
from tests.called_rewards import CalledReward as FunctionReward
from tests.example_answers import judge


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


VERIFIERS = [Exact(), Numeric(), Regex("(.*)", answer="answer"), Math()]


@pytest.mark.parametrize("verifier", VERIFIERS)
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
        lambda: Math(answer=""),
        lambda: Math(seconds=0),
        lambda: Math(batch_seconds=float("nan")),
        lambda: Math(batch_seconds="1"),  # pyright: ignore[reportArgumentType]
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


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_they_are_called_as_verifiers_and_survive_pickling(verifier: Any):
    reward = FunctionReward(pickle.loads(pickle.dumps(verifier)))
    assert reward.reads == ("answer",)
    assert reward(["", ""], ["1", "2"], {"answer": ["1", "1"], "more": [0, 0]})[0] == 1.0


def test_a_tolerance_holds_for_percent_and_irrational_references():
    completions = ["#### 25.1%", "#### 0.3", "\\boxed{3.14}", "\\boxed{3.2}"]
    references = ["0.25", "0.25", "\\pi", "\\pi"]
    assert scores(Numeric(absolute=0.01), completions, references) == [1.0, 0.0, 1.0, 0.0]
    assert scores(Numeric(), ["\\boxed{2\\pi}", "\\boxed{6.28}"], ["\\pi\\cdot 2"] * 2) == [1.0, 0.0]


BRACKETS = [
    *("(", "[", "{", "<", "\\left(", "\\boxed{", "$", "`", "**", "<<", "####", "<answer>", "<think>", "\\(", "\\["),
    *("\n", "1,", "\\boxed{1}", "####\n", "#### 1\n", "answer is ", "Answer:\n", "1", "1 ", "= 1 ", "**1** ", "Q:\n"),
    *("<<1=1>>",),
    *("\\frac{1}{", "one-", "so 1 ", "wait #### 1\n? ", "answer (", "1-", "#### Answer\n", "</think>", "verify\n"),
    *("#### a\n",),
    *("100 000 ", "to a 1 ", "for 1 and ", "。1"),
    *(")", "]", "}", ">", "\\right)", ">>", "</answer>", "</think>", "()", "{}", "\\boxed{}", "({[<", "\\"),
]
LARGE = [
    *("9^{9^{9^9}}", "9**9**9**9", "9^9^9^9", "2^{2^{2^{2^{2^2}}}}", "10^{10^{10}}", "100000!", "((9!)!)!", "9!!!"),
    *("\\binom{10^9}{10^8}", "\\sum_{i=1}^{10^9} i", "\\prod_{i=1}^{10^9} (i+1)", "(x+y+z)^{500}", "(1+x)^{10^6}"),
    *("\\frac{1}{9^{9^{9^9}}}", "e^{e^{e^{e^{e^e}}}}", "\\sqrt{-9^{9^9}}", "\\log_2(9^{9^9})", "9^{9^9} \\mod 7"),
    *("\\left(9^{9}\\right)^{9^{9}}", "\\Gamma(10^9)", "(10^{9})!", "1+x+10^{-10^{10}}", "0.1^{10^9}", "x^{9^{9^9}}"),
    *("(" * 900, "(" * 400 + "x" + ")" * 400, "x^" * 400 + "x", ")" * 5 + "9^{9^{9}}"),
]


@pytest.mark.parametrize("formula", LARGE, ids=lambda text: text[:20])
def test_what_is_too_large_is_wrong_and_takes_no_time(formula: str):
    began = time.thread_time()
    for reference in ("x^2+1", "\\sqrt{2}", "\\sin x", "18"):
        assert not same_answer(formula, reference)
    assert time.thread_time() - began < 1.0


@pytest.mark.parametrize("bracket", BRACKETS)
def test_brackets_without_end(bracket: str):
    began = time.thread_time()
    assert not judge(bracket * (1_000_000 // len(bracket)), "18")
    assert time.thread_time() - began < 2.0
    assert not judge(f"x = 1 {bracket * 20_000}z", "x^2")


REPEATED = """
import resource, sys, time
from hybridflow.rewards.answer_extraction import final_answer
from hybridflow.rewards.answer_grammar import read
from hybridflow.rewards.code import extract_program, same_output
from hybridflow.rewards.match import same_answer

def said(text):
    return final_answer("\\n".join([text] * (20_000 // len(text))), unmarked=True)

def judged(text):
    return same_answer(text, "x@@ y")

def printed(text):
    return same_output(text, "1.0")

resource.setrlimit(resource.RLIMIT_CPU, (30, 30))  # a regular expression may hold the interpreter for ever
KINDS = ["a", "ab ", "a-", "1",
         "1,", "1 000 ", " ", ", ", ".", "{", "(", "(A) ", "*", "`", "~", "-", "+", "√", "§a", "\\\\"]
HEADS = ["", "1", "Answer: 18", "Answer: cannot be determined from information ", "```", "```python\\n1"]
for kind in KINDS:
    for head in HEADS:
        for end in ("x", "1^"):
            for length in (1000, 20_000):
                text = head + (kind * length)[: length - len(head) - len(end)] + end
                for read_by in (read, said, extract_program, judged, printed):
                    print(repr(head), repr(kind), repr(end), length, flush=True)
                    began = time.process_time()
                    read_by(text)
                    if time.process_time() - began > 1.0:
                        sys.exit("took more than a second")
"""


def test_text_that_repeats_itself_is_read_in_a_moment():
    """In a process with a limit of processor time, so that a busy machine changes nothing."""
    done = subprocess.run([sys.executable, "-c", REPEATED], capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.returncode, done.stderr[-500:])


DEEP = [
    *("*".join(["2"] * 400), "/".join(["2"] * 400), "5!" * 300, "|x|" * 300, "x" * 900, "\\cup".join(["[1,2]"] * 120)),
    *("√" * 900 + "2", "5" + "%" * 900, "(x" * 25 + "*x" * 90 + ")*x*x*x" * 25, "-" * 900 + "5", "x" + "^x" * 490),
]


@pytest.mark.parametrize("formula", DEEP, ids=lambda text: text[:20])
def test_a_formula_that_is_too_deep_is_wrong(formula: str):
    rows = [f"\\boxed{{{formula}}}", "#### 18"]
    for reference in ("y*z", "7", "\\sqrt{3}"):
        assert Math()([""] * 2, rows, answer=[reference, "18"]) == [0.0, 1.0]
    assert Numeric()([""] * 2, rows, answer=["7", "18"]) == [0.0, 1.0]
    assert Numeric(absolute=0.1)([""] * 2, rows, answer=["7", "18"]) == [0.0, 1.0]


@pytest.mark.parametrize("function", [Math(), Numeric()])
def test_within_deep_calls_a_formula_is_not_understood(function):
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    try:
        found = function([""] * 2, [f"\\boxed{{{'+1*'.join(['2*3'] * 9)}{'*2' * 80}}}", "#### 18"], answer=["7", "18"])
    finally:
        sys.setrecursionlimit(limit)
    assert found == [0.0, 1.0]


def test_a_batch_of_rational_functions_is_right():
    solutions = [f"\\boxed{{\\frac{{1}}{{x+{k}}}-\\frac{{1}}{{x+{k + 3}}}}}" for k in range(2, 130)]
    references = [f"\\frac{{3}}{{(x+{k})(x+{k + 3})}}" for k in range(2, 130)]
    assert Math()([""] * 128, solutions, answer=references) == [1.0] * 128


def roots(number: int, terms: int) -> tuple[str, str]:
    """A solution and its reference, whose comparison takes 0.05 to 0.3 s for 12 to 20 terms."""
    found = [rf"\sqrt{{x^{power}+{number}}}" for power in range(2, 2 + terms)]
    return f"\\boxed{{{'+'.join(found)}}}", "+".join(reversed(found))


@pytest.mark.parametrize("count", [12, pytest.param(128, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_rows_that_take_long_are_right_on_a_machine_that_is_busy(count: int):
    """Three other threads take turns with the comparisons, which have a quarter of a processor."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            sum(range(1000))

    others = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    solutions, references = zip(*(roots(number, 12 + number % 8) for number in range(3, 3 + count)), strict=True)
    for other in others:
        other.start()
    try:
        answers = [*references[:-4], *(f"{reference}+1" for reference in references[-4:])]
        found = Math()([""] * count, solutions, answer=answers)
    finally:
        done.set()
        for other in others:
            other.join()
    assert found == [1.0] * (count - 4) + [0.0] * 4


def test_a_row_that_is_not_judged_in_time_is_a_failure_that_says_so():
    solutions, references = zip(*(roots(number, 12) for number in range(1003, 1006)), strict=True)
    found = Math(seconds=1e-9)([""] * 4, [*solutions, "#### 18"], answer=[*references, "18"])
    assert [type(score) for score in found[:3]] == [RowFailure] * 3
    assert found[3] == 1.0
    assert "was not judged in time" in found[0].reason
    assert "1e-09 s" in found[0].reason


def test_every_row_has_its_own_time_when_that_of_the_batch_is_used_up():
    slow = "+".join(rf"\ln(x^2+{number})\arctan({number}x)" for number in range(1, 21))
    solution, reference = roots(2003, 12)
    found = Math(batch_seconds=0.01)(
        [""] * 3, [f"\\boxed{{{slow}+0}}", solution, f"\\boxed{{0+{slow}}}"], answer=[slow, reference, slow]
    )
    assert [type(score) for score in found] == [RowFailure, float, RowFailure]
    assert found[1] == 1.0


def test_of_a_very_long_text_beginning_and_end_are_read():
    assert len(own_words("x" * 10**6)) < 25_000
    for text in (f"The final answer {'_' * 10**5}z", f"answer {'*' * 10**5}z", "\\" * 10**6):
        assert judge(text, "18") is False
    for text in ("#### 18\n" + "(" * 10**6, "(" * 10**6 + "\n#### 18", "<think>" + "4 " * 10**6 + "</think> 18"):
        assert Math()([""], [text], answer=["18"]) == [1.0]


def test_nothing_is_compared_by_sympy():
    code = (
        "import sys; from hybridflow.rewards.match import Math; texts = ['#### 18', '\\boxed{x+1}', '\\boxed{5 km}']\n"
        "print(Math()([''] * 3, texts, answer=['18', '1+x', '5000 m']), 'sympy' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[1.0, 1.0, 1.0] False\n"

"""What the math verifier does with texts and formulas that are made to stop it, and with time that is up."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import time

import pytest

from hybridflow.errors import ConfigError
from hybridflow.rewards import Numeric, RowFailure
from hybridflow.rewards.answer_extraction import own_words
from hybridflow.rewards.match import Math, same_answer
from tests.example_answers import judge

BRACKETS = [
    *("(", "[", "{", "<", "\\left(", "\\boxed{", "$", "`", "**", "<<", "####", "<answer>", "<think>", "\\(", "\\["),
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


def slow_rows(count: int) -> list[tuple[str, str]]:
    return [
        (f"\\boxed{{\\frac{{1}}{{x+{k}}}-\\frac{{1}}{{x+{k + 3}}}}}", f"\\frac{{3}}{{(x+{k})(x+{k + 3})}}")
        for k in range(2, 2 + count)
    ]


@pytest.mark.parametrize("count", [4, 16, 128])
def test_a_batch_of_rational_functions_is_right(count: int):
    solutions, references = zip(*slow_rows(count), strict=True)
    assert Math()([""] * count, solutions, answer=references) == [1.0] * count


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


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "1", None])
def test_the_time_of_a_batch_is_a_number_above_0(value):
    with pytest.raises(ConfigError, match="batch_seconds"):
        Math(batch_seconds=value)


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

"""What the math verifier does with texts and formulas that are made to stop it: time, memory, and the rows beside."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hybridflow.errors import ConfigError
from hybridflow.rewards.answer_extraction import own_words
from hybridflow.rewards.math import Math, judge, too_large

HONEST = [
    ("x^2+2x+1", "(x+1)^2", 1.0),
    ("x^2+2x+1", "(x-1)^2", 0.0),
    ("\\begin{pmatrix} 1 & 2\\\\3 & 4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&\\frac{8}{2}\\end{pmatrix}", 1.0),
    ("[0,1)", "[0, 1.0)", 1.0),
    ("\\frac{x^2-1}{x-1}", "x+1", 1.0),
    ("9*2", "18", 1.0),
]
# Judges everything in a process of its own, since a limit on its memory must not become ours.
_BATCH = """
import json, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
from hybridflow.rewards.math import Math, judge

def peak():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

math = Math(batch_seconds=3.0)
assert math([""], [r"\\boxed{x+1}"], answer=["1+x"]) == [1.0]
towers = [
    "9^{9^{9^%d}}", r"9^{%d\\cdot 9^9}", "9**9**9**%d", "2^{2^{2^{2^{2^%d}}}}", "10^{10^{%d0}}", "100%03d!",
    "((%d9!)!)!",
    r"\\binom{10^9}{10^8+%d}", r"\\sum_{i=1}^{10^9} i^%d", r"\\prod_{i=1}^{10^9} (i+%d)", "(x+y+z)^{50%d}",
    "(1+%dx)^{10^6}", r"\\frac{1}{9^{9^{9^%d}}}", "e^{e^{e^{e^{e^%d}}}}", r"\\sqrt{" * 40 + "%d" + "}" * 40,
    r"\\frac{1}{1+" * 40 + "%d" + "}" * 40, r"\\int \\sqrt{\\sin(x)+x^%d} e^{x^2} dx",
]
rows = [("\\\\boxed{%s}" % (towers[i % 17] % (i + 3)), "x^2+1", 0.0) for i in range(128)]
rows += [(r"\\boxed{" * 100_000 + "18" + end * 100_000, "19", 0.0) for end in ("}", "")]
rows += [(mark * (1_000_000 // len(mark)), "18", 0.0) for mark in json.loads(sys.argv[2])]
rows += [("(" * 1_000_000 + "\\n#### 18", "18", 1.0), ("\\n" * 1_000_000 + r"\\boxed{18}", "18", 1.0)]
rows += [("The answer is 18.", "18", 1.0), ("\\\\boxed{17}", "18", 0.0)]
honest = [(r"\\boxed{%s}" % answer, reference, score) for answer, reference, score in json.loads(sys.argv[1])]
rows = rows[:60] + honest[:3] + rows[60:] + honest[3:]
before, began, used = peak(), time.monotonic(), time.process_time()
scores = math([""] * len(rows), [row[0] for row in rows], answer=[row[1] for row in rows])
elapsed, used, grown = time.monotonic() - began, time.process_time() - used, peak() - before
math.close()
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
wrong = [(row[0][:80], score) for row, score in zip(rows, scores, strict=True) if score != row[2]]
print(json.dumps({"wrong": wrong, "cpu": used, "elapsed": elapsed, "mib": grown + children}))
"""
BRACKETS = [
    *("(", "[", "{", "<", "\\left(", "\\boxed{", "$", "`", "**", "<<", "####", "<answer>", "<think>", "\\(", "\\["),
    *(")", "]", "}", ">", "\\right)", ">>", "</answer>", "</think>", "()", "{}", "\\boxed{}", "({[<", "\\"),
]


def test_one_batch_of_everything_that_is_made_to_stop_it():
    argv = [sys.executable, "-c", _BATCH, json.dumps(HONEST), json.dumps(BRACKETS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["mib"] < 200, found
    assert found["cpu"] < 10, found  # of which 3 s for the comparisons
    assert found["elapsed"] < 40, found  # 2 s


@pytest.fixture(scope="module")
def hurried() -> Iterator[Math]:
    math = Math(batch_seconds=4.0)
    yield math
    math.close()


@pytest.mark.parametrize("place", [0, 24, 12])
def test_what_takes_too_long_takes_no_time_from_the_rows_beside_it(
    hurried: Math, place: int, caplog: pytest.LogCaptureFixture
):
    awful = [(f"\\int \\sqrt{{\\sin(x)+x^{{{power}}}}} e^{{x^2}} dx", "x^2+1", 0.0) for power in range(5, 29)]
    rows = awful[:place] + HONEST + awful[place:]
    answers = [f"\\boxed{{{row[0]}}}" for row in rows]
    with caplog.at_level(logging.WARNING, "hybridflow.rewards.math"):
        assert hurried([""] * len(rows), answers, answer=[row[1] for row in rows]) == [row[2] for row in rows]
    (record,) = caplog.records
    assert record.args[0] == len(awful)
    assert record.args[4] >= len(awful) - 20  # no more than 4 s were spent, 0.2 s or more on each


def test_a_lone_comparison_may_use_the_time_of_the_batch():
    slow, reference = ["\\boxed{\\int_0^\\pi x\\sin(x) dx}"], ["\\pi"]
    patient, hurried = Math(batch_seconds=20.0, seconds=30.0), Math(batch_seconds=0.2)
    try:
        assert patient([""], slow, answer=reference) == [1.0]
        assert hurried([""], slow, answer=reference) == [0.0]
    finally:
        patient.close()
        hurried.close()


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "1", None])
def test_the_time_of_a_batch_is_a_number_above_0(value):
    with pytest.raises(ConfigError, match="batch_seconds"):
        Math(batch_seconds=value)


LARGE = [
    *("9^{9^{9^9}}", "9**9**9**9", "9^9^9^9", "2^{2^{2^{2^{2^2}}}}", "10^{10^{10}}", "100000!", "((9!)!)!", "9!!!"),
    *("\\binom{10^9}{10^8}", "\\sum_{i=1}^{10^9} i", "\\prod_{i=1}^{10^9} (i+1)", "(x+y+z)^{500}", "(1+x)^{10^6}"),
    *("\\frac{1}{9^{9^{9^9}}}", "e^{e^{e^{e^{e^e}}}}", "\\sqrt{-9^{9^9}}", "\\log_2(9^{9^9})", "9^{9^9} \\mod 7"),
    *("\\left(9^{9}\\right)^{9^{9}}", "\\Gamma(10^9)", "(10^{9})!", "1+x+10^{-10^{10}}", "0.1^{10^9}", "x^{9^{9^9}}"),
    *("(" * 900, "(" * 400 + "x" + ")" * 400, "x^" * 400 + "x", ")" * 5 + "9^{9^{9}}"),
]
SMALL = [
    *(
        "2^{2025}-1",
        "2^{2^{10}}",
        "3^{3^{3}}",
        "2025!",
        "\\frac{2024!}{2023!}",
        "5!!",
        "\\binom{2024}{1012}",
        "10^{100}",
    ),
    *(
        "10^{-30}",
        "(1+x)^{20}(1-x)^{20}",
        "(1+x)^{\\frac{1}{2}}",
        "(a+b)^{n}",
    ),
    *(
        "(x+1)(x+2)(x+3)(x+4)(x+5)",
        "\\sum_{k=1}^{n} k^2",
        "\\sum_{k=1}^{100} k",
        "\\frac{1}{1+\\frac{1}{1+\\frac{1}{2}}}",
    ),
    *(
        "x \\in (-\\infty,-1)\\cup(1,\\infty)",
        "6.02\\times 10^{23}",
        "[0, 1)",
        "",
        ")",
        "\\",
        "^",
        "!",
        "{}",
        "_",
        "x^",
    ),
    *("1,000,000", "e^{x^2}", "\\left(\\frac{1}{2}\\right)^{100}", "7" * 900, "0.0001", "\\frac{n(n+1)(2n+1)}{6}"),
]


@pytest.mark.parametrize("formula", LARGE, ids=lambda text: text[:20])
def test_what_is_too_large_to_be_worked_out(formula: str):
    assert too_large(formula)


@pytest.mark.parametrize("formula", SMALL, ids=lambda text: text[:20])
def test_what_is_not_too_large(formula: str):
    assert not too_large(formula)


def test_of_a_very_long_text_beginning_and_end_are_read():
    assert len(own_words("x" * 10**6)) < 25_000
    for text in (f"The final answer {'_' * 10**5}z", f"answer {'*' * 10**5}z", "\\" * 10**6):
        assert judge(text, "18") is False
    for text in ("#### 18\n" + "(" * 10**6, "(" * 10**6 + "\n#### 18", "<think>" + "4 " * 10**6 + "</think> 18"):
        assert Math()([""], [text], answer=["18"]) == [1.0]

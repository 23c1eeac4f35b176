"""The math verifier: where solutions put their answers, and which answers are the same, in cases right and wrong."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.rewards import RowFailure
from hybridflow.rewards.answer_extraction import final_answer, reference_answer
from hybridflow.rewards.match import Exact, Math, Numeric, same_answer
from tests import example_endings as endings
from tests import example_solutions as cases
from tests.example_answers import judge

GSM8K = Path(__file__).resolve().parents[4] / "shared/data/gsm8k"
RIGHT = [*cases.HASHES_RIGHT, *cases.BOXED_RIGHT, *cases.STATED_RIGHT, *cases.LAST_RIGHT, *endings.RIGHT]
MARKED = [*cases.HASHES_RIGHT, *cases.BOXED_RIGHT, *cases.STATED_RIGHT]
WRONG = [*cases.HASHES_WRONG, *cases.BOXED_WRONG, *cases.STATED_WRONG, *cases.LAST_WRONG, *endings.WRONG]


@pytest.fixture(scope="module")
def math() -> Math:
    return Math()


@pytest.mark.parametrize(("solution", "reference"), RIGHT, ids=lambda text: repr(text)[-40:])
def test_right_numbers_are_right(solution: str, reference: str):
    assert judge(solution, reference_answer(reference), unmarked=True)


@pytest.mark.parametrize(("solution", "reference"), MARKED, ids=lambda text: repr(text)[-40:])
def test_right_marked_numbers_are_right(solution: str, reference: str):
    assert judge(solution, reference_answer(reference))


@pytest.mark.parametrize(("solution", "reference"), WRONG, ids=lambda text: repr(text)[-40:])
def test_wrong_numbers_are_wrong(math: Math, solution: str, reference: str):
    assert math([""], [solution], answer=[reference]) == [0.0]
    assert not judge(solution, reference_answer(reference), unmarked=True)


FORMULAS = [
    ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
    ("\\boxed{(x-1)^2}", "x^2+2x+1", 0.0),
    ("#### 9*2", "18", 1.0),
    ("The answer is $2^{10}$.", "1024", 1.0),
    ("The answer is \\(2 \\times 512\\).", "1024", 1.0),
    ("The answer is $2^{11}$.", "1024", 0.0),
    ("\\boxed{x = 5}", "5", 1.0),
    ("\\boxed{5}", "x = 5", 1.0),
    ("$x = \\boxed{3}$ or $x = \\boxed{5}$", "3, 5", 1.0),
    ("\\boxed{x<1 \\text{ or } x>2}", "x<1", 0.0),
    ("\\boxed{x = 0 \\text{ or } y = 0}", "x = 0", 0.0),
    ("\\boxed{x<1 \\text{ or } x>2}", "x<1 \\text{ or } x>2", 1.0),
    ("The final answer is $x<1$ or $x>2$", "x<1", 0.0),
    ("\\boxed{p \\lor q}", "p", 0.0),
    ("\\boxed{\\text{true or false}}", "true or false", 1.0),
    ("The answer is Friday or Saturday.", "\\text{Friday or Saturday}", 1.0),
    ("Therefore, the answer is \\(\\frac{x}{2}\\).", "x/2", 1.0),
    ("<answer>$x/2$</answer>", "\\frac{x}{2}", 1.0),
    ("The answer is monday.", "Monday", 1.0),
    ("The answer is (C).", "C", 1.0),
    ("The correct answer is C) 18", "(C)", 1.0),
    ("Answer: D", "C", 0.0),
    ("A train is what it is.", "A", 0.0),
    ("#### x^2+1", "#### 1 + x^2", 1.0),
    ("\\boxed{x^2+1}", "We get $\\boxed{1+x^{2}}$.", 1.0),
    ("\\boxed{\\frac{1}{0}}", "x", 0.0),
    ("\\boxed{\\frac{}", "x", 0.0),
]


@pytest.mark.parametrize(("solution", "reference", "score"), FORMULAS, ids=lambda text: repr(text)[-40:])
def test_formulas(math: Math, solution: str, reference: str, score: float):
    assert math([""], [solution], answer=[reference]) == [score]


ALTERNATIVES = [
    *("\\boxed{%s} or \\boxed{%s}", "$\\boxed{%s}$ or $\\boxed{%s}$.", "\\boxed{%s} \\text{ or } \\boxed{%s}"),
    *("\\boxed{%s} (or maybe \\boxed{%s})", "\\boxed{%s or %s}", "\\boxed{%s \\text{ or } %s}", "#### %s or %s"),
    *("#### \\boxed{%s} or \\boxed{%s}", "<answer>%s or %s</answer>", "<answer>\\boxed{%s} or \\boxed{%s}</answer>"),
    *("The answer is $%s$ or $%s$.", "The answer is %s or %s."),
]
EQUATIONS = [
    *("$x = \\boxed{%s}$ or $x = \\boxed{%s}$", "\\boxed{x = %s or x = %s}", "#### x = %s or x = %s"),
    *("<answer>x = %s or x = %s</answer>", "The answer is x = %s or x = %s."),
]


@pytest.mark.parametrize(
    ("form", "first", "second"),
    [(form, "3", "4") for form in ALTERNATIVES + EQUATIONS] + [(form, "t+1", "t-1") for form in ALTERNATIVES],
)
def test_of_alternatives_the_first_counts(math: Math, form: str, first: str, second: str):
    assert math([""] * 2, [form % (first, second)] * 2, answer=[first, second]) == [1.0, 0.0]


MARKS = [
    ("The answer is $6 \\cdot", "6", False),
    ("\\boxed{5", "5", False),
    ("The answer isn't 18.", "18", False),
    ("First \\boxed{3}. Wait, no: \\boxed{4}", "4", True),
    ("First \\boxed{3}. Wait, no: \\boxed{4}", "3", False),
    ("\\boxed{3}<think>\\boxed{4}</think>", "3", True),
    ("<think>\\boxed{4}</think> done", "4", False),
    ("<think>\\boxed{4}", "4", False),
    ("The answer is \\boxed{\\frac{1}{2}}.", "0.5", True),
    ("$\\boxed{\\text{(B)}}$", "B", True),
    ("Answer: 18 apples", "18", True),
    ("The final answer is: $\\boxed{18}$", "18", True),
    ("#### 18\n#### 19", "19", True),
    ("#### 18\n#### 19", "18", False),
    ("\\boxed{3}, \\boxed{4}", "3, 4", True),
    ("\\boxed{3} and \\boxed{4}", "3", False),
    ("The answer is 5. The answer is 6.", "6", True),
    ("\\boxed{5 \\text{ or } 6}", "5,6", True),
    ("<answer>18", "18", False),
    ("<answer>\\boxed{18}</answer>", "18", True),
    ("The answer is 18 or 17", "18", True),
    ("The answer is 18 or 17", "17", False),
    ("I think the answer is 5 but it could be 6. \\boxed{7}", "7", True),
    ("\\boxed{5}}", "5", True),
    ("\\boxed{{5}}", "5", True),
    ("so $$x=5$$", "5", False),
    ("5", "5", True),
    ("Therefore 5", "5", False),
    ("\\boxed{5\\n6}", "5", False),
    ("The answer is $\\frac{3}{4}$ of a cup", "3/4", True),
    ("The answer is less than 18.", "18", False),
    ("The answer is 18 if x>0 and 17 otherwise", "18", False),
    ("The answer is between 17 and 18.", "18", False),
    ("The answer is 18 or more", "18", False),
    ("The answer is either 17 or 18", "18", False),
    ("The answer is 18?", "18", False),
    ("The answer is \\boxed{5} \\boxed{6}", "5", False),
    ("The answer is 1/2.", "0.5", True),
    ("The answer is 3.5.", "3.5", True),
    ("Answer: B. Because", "B", True),
    ("Answer: (B) 18", "18", True),
    ("The answer is $18", "18", True),
    ("It is 18.", "18", False),
    ("So 9*2 = 18", "18", False),
    ("9*2\n18", "18", False),
    ("abc18", "18", False),
    ("$18", "18", True),
    (" 18 dollars\n", "18", True),
    ("<think>17?</think> 18", "18", True),
    ("#### 17\nNo: \\boxed{18}", "18", True),
    ("\\boxed{17}\nSo the answer is 18.", "18", True),
    ("\\boxed{18}\nSo the answer is 17.", "18", False),
    ("\\boxed{18}, or \\boxed{17", "18", True),
]


@pytest.mark.parametrize(("solution", "reference", "right"), MARKS)
def test_which_answer_counts(solution: str, reference: str, right: bool):
    assert judge(solution, reference) is right


@pytest.mark.parametrize(
    "named",
    [
        *("\\boxed{3} and \\boxed{4}", "\\boxed{3}, \\boxed{4}", "$x=\\boxed{3}$ and $x=\\boxed{4}$"),
        *("\\boxed{3 and 4}",),
        *("\\boxed{x=3, x=4}", "<answer>3 and 4</answer>", "<answer>3, 4</answer>", "#### 3 and 4"),
    ],
)
def test_who_names_several_answers_has_none_of_them_right(math: Math, named: str):
    assert math([""] * 2, [named] * 2, answer=["3", "4"]) == [0.0, 0.0]


def test_lists_are_answers_where_lists_are_asked_for_and_repetitions_are_none(math: Math):
    lists = ["\\boxed{3} and \\boxed{4}", "\\boxed{4} or \\boxed{3}", "\\boxed{3 or 4}", "\\boxed{3}, \\boxed{4}"]
    assert math([""] * 4, lists, answer=["3, 4"] * 4) == [1.0] * 4
    again = ["\\boxed{18}, \\boxed{18}", "\\boxed{17}\n\n\\boxed{18}", "\\boxed{\\boxed{18}}", "\\boxed{18} \\boxed{}"]
    assert math([""] * 4, again, answer=["18"] * 4) == [1.0] * 4
    choices = ["\\boxed{A} or \\boxed{B}", "\\boxed{(A), (B)}", "(A) and (B)", "The answer is B or A."]
    assert math([""] * 4, choices, answer=["A"] * 4) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("tag", ["think", "THINK", "thinking", "thought", "Reasoning", "think "])
@pytest.mark.parametrize(
    ("solution", "score"),
    [
        *(("<T>4. \\boxed{4}", 0.0), ("<T>\n#### 4", 0.0), ("<T>The answer is 4.", 0.0)),
        *(("<T><answer>4</answer>", 0.0),),
        *(("<T>2+2=4", 0.0), ("<T>5</T> So <T> \\boxed{4}", 0.0), ("\\boxed{4} <T> or \\boxed{5}?", 1.0)),
        *(("<T>5</T> The answer is 4. <T> or 5?", 1.0), ("<T>5</T> \\boxed{4}", 1.0)),
        *(("\\boxed{5}</T> The answer is 4.", 1.0),),
        *(("\\boxed{4}</T> The answer is 5.", 0.0), ("<T>a<T>\\boxed{5}</T> 4", 1.0), ("<T>The answer is 4.</T>", 1.0)),
    ],
)
def test_thoughts_are_no_answers(solution: str, score: float, tag: str):
    text = solution.replace("<T>", f"<{tag}>").replace("</T>", f"</{tag}>")
    assert judge(text, "4") is bool(score)
    assert Numeric()([""], [text], answer=[4]) == [score]


def test_references_may_be_numbers_solutions_or_several(math: Math):
    references = [18, 18.0, ["17", "18"], ("18",), "16 + 2 = 18\n#### 18", "\\boxed{18}"]
    references += [np.int64(18), np.array(["17", "18"]), Decimal("18.0"), Fraction(36, 2), torch.tensor(18)]
    assert math([""] * 11, ["#### 18"] * 11, answer=references) == [1.0] * 11


@pytest.mark.parametrize(
    "reference",
    [float("nan"), float("inf"), Decimal("NaN"), True, b"18", {"a": 18}, ["18", None], [["18"]], {"18"}, 9**999],
)
def test_a_reference_that_is_no_text_and_no_number_fails_its_row(math: Math, reference: Any):
    for verifier in (math, Numeric(), Exact()):
        answer, right = verifier([""] * 2, ["18", "18"], answer=[reference, "18"])
        assert isinstance(answer, RowFailure)
        assert "neither a text nor a finite number" in answer.reason
        assert right == 1.0


def test_chat_completions_are_read(math: Math):
    said = [{"role": "user", "content": "9*2?"}, {"role": "assistant", "content": "The answer is 18."}]
    assert math([said[:1]], [said[1:]], answer=["18"]) == [1.0]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs the GSM8K files beside the repository")
def test_gsm8k_references_are_right_and_changed_ones_wrong(math: Math):
    records = [json.loads(line) for line in (GSM8K / "test.jsonl").read_text().splitlines()]
    rows, asked = [record["answer"] for record in records], [records[at - 1]["question"] for at in range(len(records))]
    changed = [
        f"{steps}####{_changed(number, row)}"
        for row, (steps, _, number) in enumerate(r.partition("####") for r in rows)
    ]
    cut_short = [row.partition("\n####")[0] for row in rows if "<<" in row]
    run_on = [
        f"{row}\n\n{question}\n{rows[at - 1]}" for at, (row, question) in enumerate(zip(rows, asked, strict=True))
    ]
    assert len(rows) == 1319
    assert math([""] * 1319, rows, answer=rows) == [1.0] * 1319
    assert math([""] * 1319, rows, answer=[reference_answer(row) for row in rows]) == [1.0] * 1319
    assert sum(math([""] * 1319, run_on, answer=rows)) >= 1312
    assert math([""] * 1319, changed, answer=rows) == [0.0] * 1319
    assert [final_answer(text) for text in cut_short] == [None] * len(cut_short)


def _changed(number: str, row: int) -> str:
    value = int(number.replace(",", ""))
    return f" {[value + 1, value - 1, value * 10 + 1, -value or 1, value + 0.5][row % 5]}"


STYLES = [
    *("{}", "${}", "{}$", "\\${}", "€{}", "**{}**", "$\\boxed{{{}}}$", "\\({}\\)", "$${}$$", "\\text{{{}}}", "`{}`"),
    *("{}kg",),
    *("{} dollars", "{}\\text{{ dollars}}", "{} km/h", "{} cm^2", "{}\\ \\text{{cm}}^2", "{} apples per day", "{}%"),
    *("{}\\%",),
    *("about {}", "≈ {}", "{}.", " {} ", "{},", "USD {}", "{}^\\circ", "<b>{}</b>", "({})", "{{{}}}"),
]


@given(st.integers(-(10**12), 10**12), st.sampled_from(range(31)), st.sampled_from(["{}", "{:,}", "{}.00", "{:,}.0"]))
def test_integers_are_read_in_every_style(value: int, style: int, form: str):
    written = form.format(value)
    styles = [one.format(written) for one in STYLES if one[0] not in "({" or "," not in written]
    text = styles[style % len(styles)]
    assert same_answer(text, str(value)), text
    assert not same_answer(text, str(value + 1)), text
    for sentence in (f"#### {text}", f"So\n#### {text}\n", f"\\boxed{{{text}}}", f"The answer is {text}"):
        assert judge(sentence, str(value)), sentence
        assert not judge(sentence, str(value + 1)), sentence


PIECES = [
    *("#### ", "18", "-", "\\boxed{", "}", "{", "The answer is ", "Answer:", "\n", "=", "$", "**", "<<9*2=18>>", " "),
    *("?", "/"),
    *("<answer>", "</answer>", "Question:", "wait", "1,000", ".", "%", "\\frac{", "x", "(", ")", "</think>", "so "),
    *("^", "½"),
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(PIECES)).map("".join) | st.text(max_size=60))
def test_any_text_has_an_answer_or_none(text: str):
    for reference in ("18", "x^2", "(A)"):
        assert judge(text, reference) in (True, False)
        assert judge(text, reference, unmarked=True) in (True, False)

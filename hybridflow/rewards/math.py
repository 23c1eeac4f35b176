"""Math: a mathematical answer against its reference, numbers at once, everything else by math-verify in a child."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from hybridflow.rewards.children import Children
from hybridflow.rewards.completion import completion_text
from hybridflow.rewards.final_answer import final_answer, reference_answer
from hybridflow.rewards.match import accepted, checked_column, missing
from hybridflow.rewards.number import parse_number, same_number

_log = logging.getLogger(__name__)
_LONGEST = 1000  # characters of an answer that is compared as a formula
_CHILD_MB = 2048
_FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|sqrt|frac|log|exp|lim|max|min|gcd|lcm|mod"
_WORD = re.compile(rf"(?!(?:{_FUNCTIONS}))[^\W\d_]{{3,}}")
_CHOICE = re.compile(r"\(?([A-J])\)?[.:]?")
_CHOSEN = re.compile(r"[\s*{]*(?:option\s+|choice\s+)?(?:\(([A-J])\)|([A-J])(?:[).:]|\s*$))", re.IGNORECASE)


class Math:
    """1.0 where the final answer of the completion equals the reference in column `answer`, else 0.0.

    The reference is a value (`18`, `1/2`, `\\frac{1}{2}`, `x^2+1`, `(A)`; text or number), a solution that ends in
    `#### 18`, or LaTeX with `\\boxed{18}`; several in a list or tuple are each accepted. Where the answer of a
    completion is looked for: see `final_answer`. How it is compared:

    - Two numbers: exactly, currency and units left out; see `same_number` for percent and rounded decimals.
    - Words and choices: without regard to case, spaces, punctuation and LaTeX's `\\text`.
    - Formulas, sets, intervals, matrices: by math-verify (sympy), in one of `children` processes. What takes longer
      than `seconds`, or needs more than 2 GiB, counts as a wrong answer: a model must not be able to stop its judge.

    A completion without a final answer scores 0.0; a row whose reference is missing, or neither a text nor a finite
    number, is a RowFailure. Needs math-verify only for formulas. Errors: ConfigError for settings out of range.
    """

    def __init__(self, answer: str = "answer", *, seconds: float = 5.0, children: int = 1) -> None:
        self.answer = checked_column("Math", answer)
        self.reads = (answer,)
        self._children = Children(_Equivalence(), children, seconds=seconds, memory_mb=_CHILD_MB)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[Any]:
        """One float (or RowFailure) per completion; `columns` must hold the column of the references."""
        scores: list[Any] = []
        formulas: list[tuple[int, tuple[str, str]]] = []
        for row, (completion, references) in enumerate(zip(completions, columns[self.answer], strict=True)):
            texts = [reference_answer(text) for text in accepted(references)]
            if not texts or not all(texts):
                scores.append(missing(self.answer, references))
                continue
            verdicts = [judge(completion_text(completion), text) for text in texts]
            scores.append(float(True in verdicts))
            if True not in verdicts:
                formulas += [(row, verdict) for verdict in verdicts if isinstance(verdict, tuple)]
        outcomes = self._children.map([(pair, {}) for _, pair in formulas]) if formulas else []
        for (row, pair), outcome in zip(formulas, outcomes, strict=True):
            if outcome.failure is not None:
                _log.info("the answer %.200r counts as wrong: its comparison %s", pair[0], outcome.failure)
            elif outcome.value:
                scores[row] = 1.0
        return scores

    def close(self) -> None:
        """Stop the child processes, if any were started."""
        self._children.close()


def judge(solution: str, reference: str) -> bool | tuple[str, str]:
    """Whether `solution` answers `reference`, or the two formulas (answer, reference) that decide it."""
    number = parse_number(reference)
    answer = final_answer(solution, numeric=number is not None)
    if answer is None:
        return False
    if number is not None and answer.number is not None:
        return same_number(answer.number, number)
    if number is not None and ":" in answer.text:  # a time of day or a ratio, which math-verify would divide
        return False
    if chosen := _CHOICE.fullmatch(_bare(reference)):
        found = _CHOSEN.match(_without_text(answer.text))
        return bool(found) and (found[1] or found[2]).upper() == chosen[1].upper()
    if _bare(answer.text) == _bare(reference):
        return True
    if any(_prose(text) or not _bare(text) or len(text) > _LONGEST for text in (answer.text, reference)):
        return False
    return answer.text, reference


def _prose(text: str) -> bool:
    """Words and nothing else: sympy would take `east` for a product of four variables, equal to `seat`."""
    words = _without_text(text)
    return bool(_WORD.search(words)) and not re.search(r"[\d\\=+*/^<>|]", words)


def _without_text(formula: str) -> str:
    return re.sub(r"\\(?:text\w*|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}", r"\1", formula)


def _bare(formula: str) -> str:
    """The formula without spaces, LaTeX's spacing, dollar signs and final punctuation; words in small letters."""
    text = _without_text(formula)
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,;:! ()\[\]]|[$*\s]", "", text).rstrip(".,;")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    return text.lower() if _WORD.search(re.sub(r"\\[a-zA-Z]+", "", text)) else text


class _Equivalence:
    """Whether math-verify takes two formulas for the same; it is imported where a copy is unpickled: in the child."""

    def __call__(self, answer: str, reference: str) -> bool:
        from math_verify import parse, verify

        def formula(text: str) -> list[Any]:
            return parse(f"${text.replace('$', '')}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]

        return bool(verify(formula(reference), formula(answer), timeout_seconds=None))

    def __reduce__(self):
        return _loaded_equivalence, ()


def _loaded_equivalence() -> _Equivalence:
    import math_verify  # noqa: F401  seconds on a busy machine, which are not the first answer's

    # it warns that limits are off: the child's limit holds
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return _Equivalence()

"""Math: compares a mathematical answer with its reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, ClassVar

from hybridflow.rewards.answer_extraction import final_answer, reference_answer
from hybridflow.rewards.answer_grammar import Tree, read
from hybridflow.rewards.answer_layout import layout
from hybridflow.rewards.equivalence import equivalent
from hybridflow.rewards.formula import OutOfTime, limited
from hybridflow.rewards.function_adapters import RowFailure
from hybridflow.rewards.match import Comparison, completion_text
from hybridflow.settings import Positive

_OWN_SECONDS = 0.5  # processor seconds that every row may take; most need 0.0005


@dataclass(eq=False)
class Math(Comparison):
    """1.0 where the final answer of the completion equals the reference in column `answer`, else 0.0.

    The reference is a value (`18`, `1/2`, `\\frac{1}{2}`, `x^2+1`, `(A)`; text or number), a solution that ends in
    `#### 18`, or LaTeX with `\\boxed{18}`; several in a list or tuple are each accepted. `final_answer` finds the
    answer of a completion: only a marked one, unless `unmarked`. It is read as a whole (see `answer_grammar`); what is
    not understood scores 0.0. It is compared as follows:

    - Two numbers: exactly; see `same_number` for percent and rounded decimals. A unit or currency that only one of both
      has is left out; two units must measure the same.
    - Formulas, sets, intervals, matrices, equations, inequalities: exactly (see `formula`).
    - Words and choices: without regard to case, spaces, punctuation and LaTeX's `\\text`.

    Comparisons are bounded by the size of their numbers: `9^{9^{9^9}}` is not worked out, and scores 0.0. A row may
    take half a second, or up to `seconds` until the rows that were not judged in time have used up `batch_seconds`
    (proportionally more above 128 rows). One that takes longer is a RowFailure. This is processor time of the thread,
    so a busy machine changes no verdict.

    A completion without a final answer scores 0.0; a row whose reference is missing, or neither a text nor a finite
    number, is a RowFailure. Errors: ConfigError for settings out of range.
    """

    limits_itself: ClassVar = True
    _: KW_ONLY
    seconds: Positive = 5.0
    batch_seconds: Positive = 0.8
    unmarked: bool = False

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[Any]:
        """One float (or RowFailure) per completion; `columns` must hold the column of the references."""
        found, left = list[Any](), self.batch_seconds * max(1.0, len(completions) / 128)
        for completion, reference in zip(completions, columns[self.answer], strict=True):
            allowed = min(self.seconds, max(_OWN_SECONDS, left))
            try:
                with limited(allowed):
                    found.append(self._compared(completion_text(completion), reference))
            except OutOfTime:
                left -= allowed
                found.append(
                    RowFailure(
                        f"was not judged in time: comparing its answer with {reference!r:.80} took longer than "
                        f"{allowed:g} s (Math(seconds={self.seconds:g}, batch_seconds={self.batch_seconds:g}))"
                    )
                )
        return found

    def score(self, completion: str, references: list[str]) -> float | RowFailure:
        """Errors: OutOfTime within `limited`."""
        texts = [reference_answer(text) for text in references]
        if not all(texts):
            return RowFailure(f"the reference in column {self.answer!r} is {references!r:.200}, which has no answer")
        answer = final_answer(completion, unmarked=self.unmarked)
        return float(answer is not None and any(same_answer(answer, text) for text in texts))


@lru_cache(4096)
def same_answer(answer: str, reference: str) -> bool:
    """Whether two written answers are equivalent; one that cannot be read equals only its own text."""
    a, b = read(answer), read(reference)
    if a is None or b is None:
        return a is b and _bare(answer) == _bare(reference) != ""
    try:
        if equivalent(a, b):
            return True
        # letters are units only beside a unit: `5 m` is 5 \text{ m}, but not 5
        x, y = read(answer, letters=True), read(reference, letters=True)
        first = x is not None and x != a and (_has_unit(b) or x.kind == "*") and equivalent(x, b)
        return first or (y is not None and y != b and (_has_unit(a) or y.kind == "*") and equivalent(a, y))
    except RecursionError:  # within calls that are deep already: not understood
        return False


def _has_unit(node: Tree) -> bool:
    return node.kind == "quantity" and node.parts[1] is not None


def _bare(text: str) -> str:
    return " ".join(layout(text).replace("§", "").lower().split())

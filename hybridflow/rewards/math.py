"""Math: compares a mathematical answer with its reference."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.answer_extraction import final_answer, reference_answer
from hybridflow.rewards.answer_grammar import layout, read
from hybridflow.rewards.equivalence import equivalent
from hybridflow.rewards.formula import OutOfTime, limited
from hybridflow.rewards.function_adapters import RowFailure
from hybridflow.rewards.match import Comparison
from hybridflow.settings import is_number, is_whole

_SLICE = 0.1  # processor seconds that a comparison may take before those that take longer; most need 0.001


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

    Comparisons are bounded by the size of their numbers: `9^{9^{9^9}}` is not worked out, and scores 0.0. One that takes
    longer than `seconds` is a RowFailure; so are those left when the comparisons without a verdict have used up
    `batch_seconds` (proportionally more above 128 rows). Both count processor time of this thread, so that a busy machine
    changes no verdict. `workers` has no effect any more: comparisons need no processes.

    A completion without a final answer scores 0.0; a row whose reference is missing, or neither a text nor a finite
    number, is a RowFailure. Errors: ConfigError for settings out of range.
    """

    limits_itself = True

    def __init__(
        self,
        answer: str = "answer",
        *,
        seconds: float = 5.0,
        batch_seconds: float = 0.8,
        workers: int = 1,
        unmarked: bool = False,
    ) -> None:
        super().__init__(answer)
        for name, value in (("seconds", seconds), ("batch_seconds", batch_seconds)):
            if not is_number(value) or not value > 0:
                raise ConfigError(f"Math({name}={value!r}): give a number above 0.")
        if not is_whole(workers) or workers < 1:
            raise ConfigError(f"Math(workers={workers!r}): give a whole number of at least 1.")
        self.seconds, self.batch_seconds, self.workers, self.unmarked = seconds, batch_seconds, workers, unmarked

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[Any]:
        """One float (or RowFailure) per completion; `columns` must hold the column of the references."""
        found = super().__call__(prompts, completions, **columns)
        late = [row for row, score in enumerate(found) if isinstance(score, tuple)]
        left = self.batch_seconds * max(1.0, len(found) / 128) - _SLICE * len(late)
        for row in late:
            allowed, pair = min(self.seconds, left), found[row]
            found[row] = self._timed(pair[0], pair[1], allowed) if allowed > min(_SLICE, self.seconds) else pair
            if isinstance(found[row], tuple):
                left -= max(0.0, allowed)
                limit = (
                    f"{self.seconds:g} s" if allowed == self.seconds else f"the {self.batch_seconds:g} s of the batch"
                )
                found[row] = RowFailure(
                    f"was not judged in time: the comparison of {pair[0]!r:.80} with {pair[1]!r:.80} took longer than "
                    f"{limit} (Math(seconds=..., batch_seconds=...))"
                )
        return found

    def score(self, completion: str, references: list[str]) -> float | RowFailure | tuple[str, list[str]]:
        """A score, or answer and references whose comparison takes longer than a moment."""
        texts = [reference_answer(text) for text in references]
        if not all(texts):
            return RowFailure(f"the reference in column {self.answer!r} is {references!r:.200}, which has no answer")
        answer = final_answer(completion, unmarked=self.unmarked)
        return 0.0 if answer is None else self._timed(answer, texts, min(_SLICE, self.seconds))

    def _timed(self, answer: str, references: list[str], seconds: float) -> float | tuple[str, list[str]]:
        late = False
        for reference in references:
            try:
                with limited(seconds):
                    if same_answer(answer, reference):
                        return 1.0
            except OutOfTime:
                late = True
        return (answer, references) if late else 0.0

    def close(self) -> None:
        """Nothing to stop: comparisons run in this thread."""


def judge(solution: str, reference: str, *, unmarked: bool = False) -> bool:
    """Whether the final answer of `solution` is `reference`."""
    answer = final_answer(solution, unmarked=unmarked)
    return answer is not None and same_answer(answer, reference)


def same_answer(answer: str, reference: str) -> bool:
    """Whether two written answers are equivalent; one that cannot be read equals only its own text."""
    a, b = read(answer), read(reference)
    if a is None or b is None:
        return b is None and _bare(answer) == _bare(reference) != ""
    if equivalent(a, b):
        return True
    # letters are units only beside a unit: `5 m` is 5 \text{ m}, but not 5
    pairs = (read(answer, letters=True), b), (a, read(reference, letters=True))
    return any(
        x
        and y
        and (x, y) != (a, b)
        and ("quantity" in (a.kind, b.kind) or "quantity" not in (x.kind, y.kind))
        and equivalent(x, y)
        for x, y in pairs
    )


def _bare(text: str) -> str:
    return re.sub(r"[\s§]", "", layout(text)).lower()

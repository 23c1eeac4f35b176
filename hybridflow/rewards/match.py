"""Exact, Regex, Numeric, Math and Overlong: rewards by comparison with a reference or a limit."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from numbers import Real
from typing import Annotated, Any, ClassVar

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.answer_extraction import final_answer, reference_answer, thoughts
from hybridflow.rewards.answer_grammar import Tree, read
from hybridflow.rewards.answer_layout import layout
from hybridflow.rewards.equivalence import equivalent, number_pairs
from hybridflow.rewards.formula import OutOfTime, limited
from hybridflow.rewards.function_adapters import RowFailure
from hybridflow.settings import Check, NonNegative, Positive, check_fields, is_whole, require

_OWN_SECONDS = 0.5  # processor seconds that every row may take; most need 0.0005


@dataclass(eq=False)
class Comparison:
    """A verifier that scores each completion alone, against the references in column `answer` of its row.

    A reference is a text or a finite number; a list or tuple holds several that are each accepted. A row whose
    reference is missing, or none of these, is a RowFailure. Errors: ConfigError for what names no column.
    """

    answer: str = "answer"

    def __post_init__(self) -> None:
        good = isinstance(self.answer, str) and self.answer != ""
        require(good, f"{type(self).__name__}(answer={self.answer!r}): name the column that holds the reference.")
        check_fields(self)

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.answer,)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[Any]:
        """One float (or RowFailure) per completion; `columns` must hold the column of the references."""
        rows = zip(completions, columns[self.answer], strict=True)
        return [self._compared(completion_text(completion), reference) for completion, reference in rows]

    def _compared(self, completion: str, reference: Any) -> Any:
        references = self.references(reference)
        return references if isinstance(references, RowFailure) else self.score(completion, references)

    def references(self, reference: Any) -> list[str] | RowFailure:
        """The references of one row as texts."""
        if isinstance(reference, str) and reference and not reference.isspace():  # by far the most frequent
            return [reference]
        given = getattr(reference, "tolist", lambda: reference)()  # an array or a tensor
        several = given if isinstance(given, list | tuple) else [given]
        texts = [one if isinstance(one, str) else str(one) if _finite(one) else "" for one in several]
        if texts and all(text.strip() for text in texts):
            return texts
        empty = given is None or (isinstance(given, str | list | tuple) and not given)
        holds = "holds what is" if isinstance(given, list | tuple) else "is"
        said = "" if empty else f", which {holds} neither a text nor a finite number"
        return RowFailure(f"the reference in column {self.answer!r} is {given!r:.200}{said}")

    def score(self, completion: str, references: list[str]) -> float | RowFailure | list[Any]:
        raise NotImplementedError


@dataclass(eq=False)
class Exact(Comparison):
    """1.0 where the completion is the reference in column `answer` and nothing else, else 0.0.

    White space around either is left out, and with `ignore_case` the case of letters. References are those of a
    Comparison.
    """

    ignore_case: bool = field(default=False, kw_only=True)

    def score(self, completion: str, references: list[str]) -> float:
        return _among(completion, references, self.ignore_case)


class Regex(Comparison):
    """1.0 where `pattern` is found in the completion, else 0.0; with `answer`, where what it finds is the reference.

    Without `answer` it rewards a form: `Regex(r"<think>.*</think>\\s*<answer>.*</answer>", full=True)`. With the name
    of a column, the last match counts: its first group (the whole match where the pattern has none) must equal the
    reference, as in Exact; thoughts (`<think>`) that never end are not
    searched. `.` matches line ends too; `full` asks for the whole completion, without white space
    around it. A pattern can take exponentially long on a long text: give such a one a time limit (the worker's
    `timeout`). Errors: ConfigError for a pattern that does not compile.
    """

    def __init__(
        self, pattern: str, *, answer: str | None = None, full: bool = False, ignore_case: bool = False
    ) -> None:
        try:
            self.pattern = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
        except (re.error, TypeError) as error:
            raise ConfigError(f"Regex({pattern!r}) is no regular expression: {error}.") from error
        super().__init__("none" if answer is None else answer)
        self.compares, self.full, self.ignore_case = answer is not None, full, ignore_case

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.answer,) if self.compares else ()

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[Any]:
        """One float (or RowFailure) per completion; `columns` must hold the column of the references if named."""
        if self.compares:
            return super().__call__(prompts, completions, **columns)
        return [float(self._found(completion_text(completion)) is not None) for completion in completions]

    def _found(self, completion: str) -> re.Match[str] | None:
        if self.full:
            return self.pattern.fullmatch(completion.strip())
        if not self.compares:
            return self.pattern.search(completion)
        last = None
        for match in self.pattern.finditer(completion):
            if match[0] or last is None:  # `(.*)` matches once more, nothing, at the end of the text
                last = match
        return last

    def score(self, completion: str, references: list[str]) -> float:
        match = self._found(completion[: thoughts(completion)[2]])
        if match is None:
            return 0.0
        return _among((match[1] if self.pattern.groups else match[0]) or "", references, self.ignore_case)


@dataclass(eq=False)
class Numeric(Comparison):
    """1.0 where the number that the completion gives as its answer is the reference in column `answer`, else 0.0.

    Equal means `|a - b| <= max(absolute, relative * |b|)`, b being the reference; with both 0 (the default) the same
    number as `same_number` says: 18.00 is 18, 25% is 25 or 0.25. Where the number of a completion is looked for: see
    `final_answer`, also for `unmarked`. A row whose reference is no number is a RowFailure.
    Errors: ConfigError for a negative tolerance.
    """

    _: KW_ONLY
    absolute: NonNegative = 0.0
    relative: NonNegative = 0.0
    unmarked: bool = False

    def score(self, completion: str, references: list[str]) -> float | RowFailure:
        right = [read(reference_answer(text)) for text in references]
        if not all(node and number_pairs(node, node) for node in right):
            return RowFailure(f"the reference in column {self.answer!r} is {references!r}, which is no number")
        answer = read(final_answer(completion, unmarked=self.unmarked) or "")
        return float(answer is not None and any(self._equal(answer, node) for node in right if node))

    def _equal(self, answer: Tree, reference: Tree) -> bool:
        absolute, relative = Fraction(self.absolute), Fraction(self.relative)
        try:
            pairs = number_pairs(answer, reference)
            same = bool(pairs) and equivalent(answer, reference)
        except RecursionError:  # within calls that are deep already: not understood
            return False
        return same or any(
            abs(a.number - b.number) <= max(absolute, relative * abs(b.number))
            for a, b in pairs
            if absolute or relative
        )


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


_Tokens = Annotated[int, Check("a whole number of at least 1", lambda value: is_whole(value) and value >= 1)]


@dataclass(eq=False)
class Overlong:
    """0 up to max_tokens - cache response tokens, then linearly down to -1 at `max_tokens` and beyond.

        ((max_tokens - cache) - length) / cache        clipped to [-1, 0]

    Meant to be added to another reward: `function=[rewards.Math(), rewards.Overlong(1024, 256)]`.
    Errors: ConfigError unless 0 < cache <= max_tokens. Yu et al., "DAPO" (2025), section 3.4, equation 13.
    """

    max_tokens: _Tokens
    cache: _Tokens

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.cache <= self.max_tokens,
            f"Overlong(max_tokens={self.max_tokens}, cache={self.cache}): the penalty grows over the last `cache` of "
            f"max_tokens, which are fewer.",
        )

    def __call__(self, completion_ids: Sequence[Sequence[int]]) -> list[float]:
        free = self.max_tokens - self.cache
        return [min(0.0, max(-1.0, (free - len(ids)) / self.cache)) for ids in completion_ids]


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The completion, or the content (a text, or parts with texts) of the last message that has one.

    Errors: RewardError for anything else.
    """
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, Mapping) for message in completion):
        contents = [message["content"] for message in completion if isinstance(message.get("content"), str | list)]
        content = contents[-1] if contents else ""
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    raise RewardError(f"a completion is {type(completion).__name__}; it must be a text or a list of chat messages.")


def _among(said: str, references: Sequence[str], ignore_case: bool) -> float:
    texts = [text.strip() for text in (said, *references)]
    said, *right = [text.casefold() for text in texts] if ignore_case else texts
    return float(said in right)


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        return False
    try:
        return math.isfinite(value)
    except (OverflowError, ValueError):  # integers beyond float64, signalling NaN
        return False

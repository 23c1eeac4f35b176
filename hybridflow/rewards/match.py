"""Exact, Regex and Numeric: rewards by comparison with a reference, without any judgement."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.answer_extraction import final_answer, reference_answer
from hybridflow.rewards.number import Number, parse_number, same_number
from hybridflow.rewards.outcome import RowFailure


class Exact:
    """1.0 where the completion is the reference in column `answer` and nothing else, else 0.0.

    White space around either is left out, and with `ignore_case` the case of letters. A reference may be a number, and
    a list or tuple holds several that are each accepted. A row whose reference is missing, or neither text nor a finite
    number, is a RowFailure.
    """

    def __init__(self, answer: str = "answer", *, ignore_case: bool = False) -> None:
        self.answer = checked_column("Exact", answer)
        self.reads = (answer,)
        self.ignore_case = ignore_case

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[Any]:
        """One float (or RowFailure) per completion; `columns` must hold the column of the references."""
        return [
            self._score(completion_text(completion), reference)
            for completion, reference in zip(completions, columns[self.answer], strict=True)
        ]

    def _score(self, completion: str, reference: Any) -> float | RowFailure:
        references = accepted(reference)
        if not references:
            return missing(self.answer, reference)
        return float(self._folded(completion) in map(self._folded, references))

    def _folded(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


class Regex:
    """1.0 where `pattern` is found in the completion, else 0.0; with `answer`, where what it finds is the reference.

    Without `answer` it rewards a form: `Regex(r"<think>.*</think>\\s*<answer>.*</answer>", full=True)`. With the name
    of a column, the last match counts: its first group (the whole match where the pattern has none) must equal the
    reference, as in Exact. `.` matches line ends too; `full` asks for the whole completion, without white space
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
        self.answer = None if answer is None else checked_column("Regex", answer)
        self.reads = () if answer is None else (answer,)
        self.full = full
        self.ignore_case = ignore_case

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[Any]:
        """One float (or RowFailure) per completion; `columns` must hold the column of the references if named."""
        found = [self._found(completion_text(completion)) for completion in completions]
        if self.answer is None:
            return [float(match is not None) for match in found]
        return [self._score(match, reference) for match, reference in zip(found, columns[self.answer], strict=True)]

    def _found(self, completion: str) -> re.Match[str] | None:
        if self.full:
            return self.pattern.fullmatch(completion.strip())
        if self.answer is None:
            return self.pattern.search(completion)
        last = None
        for match in self.pattern.finditer(completion):
            if match[0] or last is None:  # `(.*)` matches once more, nothing, at the end of the text
                last = match
        return last

    def _score(self, match: re.Match[str] | None, reference: Any) -> float | RowFailure:
        references = accepted(reference)
        if not references:
            return missing(self.answer, reference)
        if match is None:
            return 0.0
        said = (match[1] if self.pattern.groups else match[0]) or ""
        if self.ignore_case:
            return float(said.strip().casefold() in (text.strip().casefold() for text in references))
        return float(said.strip() in (text.strip() for text in references))


class Numeric:
    """1.0 where the number that the completion gives as its answer is the reference in column `answer`, else 0.0.

    Equal means `|a - b| <= max(absolute, relative * |b|)`, b being the reference; with both 0 (the default) the same
    number as `same_number` says: 18.00 is 18, 25% is 25 or 0.25. Where the number of a completion is looked for: see
    `final_answer`. A row whose reference is no number is a RowFailure. Errors: ConfigError for a negative tolerance.
    """

    def __init__(self, answer: str = "answer", *, absolute: float = 0.0, relative: float = 0.0) -> None:
        self.answer = checked_column("Numeric", answer)
        self.reads = (answer,)
        for name, value in (("absolute", absolute), ("relative", relative)):
            if not isinstance(value, Real) or not 0 <= value < float("inf"):
                raise ConfigError(f"Numeric({name}={value!r}): give a number of at least 0.")
        self.absolute, self.relative = absolute, relative

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[Any]:
        """One float (or RowFailure) per completion; `columns` must hold the column of the references."""
        return [
            self._score(completion_text(completion), reference)
            for completion, reference in zip(completions, columns[self.answer], strict=True)
        ]

    def _score(self, completion: str, reference: Any) -> float | RowFailure:
        texts = accepted(reference)
        if not texts:
            return missing(self.answer, reference)
        numbers = [parse_number(reference_answer(text)) for text in texts]
        right = [number for number in numbers if number is not None]
        if len(right) < len(numbers):
            return RowFailure(f"the reference in column {self.answer!r} is {reference!r}, which is no number")
        answer = final_answer(completion, numeric=True)
        if answer is None or answer.number is None:
            return 0.0
        return float(any(self._equal(answer.number, number) for number in right))

    def _equal(self, answer: Number, reference: Number) -> bool:
        within = max(Fraction(self.absolute), Fraction(self.relative) * abs(reference.value))
        return same_number(answer, reference) or abs(answer.amount - reference.amount) <= within


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The completion, or the content of the last message that has one. Errors: RewardError for anything else."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, Mapping) for message in completion):
        contents = [message["content"] for message in completion if isinstance(message.get("content"), str)]
        return contents[-1] if contents else ""
    raise RewardError(f"a completion is {type(completion).__name__}; it must be a text or a list of chat messages.")


def accepted(reference: Any) -> list[str]:
    """The references of one row as texts; none where one is missing, empty, or neither a text nor a finite number."""
    if hasattr(reference, "tolist"):  # an array or a tensor
        reference = reference.tolist()
    several = reference if isinstance(reference, list | tuple) else [reference]
    texts = [one if isinstance(one, str) else str(one) if _finite(one) else "" for one in several]
    return texts if all(text.strip() for text in texts) else []


def _finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, Real | Decimal):
        return False
    try:
        return math.isfinite(value)
    except (OverflowError, ValueError):  # integers beyond float64, signalling NaN
        return False


def missing(column: str | None, reference: Any) -> RowFailure:
    """The failure of a row whose reference is missing or is neither a text nor a finite number."""
    empty = reference is None or (isinstance(reference, str | list | tuple) and not reference)
    said = "" if empty else ", which is neither a text nor a finite number"
    if isinstance(reference, list | tuple) and reference:
        said = ", which holds what is neither a text nor a finite number"
    return RowFailure(f"the reference in column {column!r} is {reference!r:.200}{said}")


def checked_column(verifier: str, name: Any) -> str:
    """`name`. Errors: ConfigError when it cannot name a column."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{verifier}(answer={name!r}): name the column that holds the reference.")
    return name

"""Math: compares a mathematical answer with its reference; numbers directly, formulas by math-verify in a worker."""

from __future__ import annotations

import logging
import math
import re
import signal
import zlib
from collections.abc import Sequence
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.answer_extraction import final_answer, reference_answer
from hybridflow.rewards.function_adapters import RowFailure
from hybridflow.rewards.match import Comparison
from hybridflow.rewards.number import parse_number, same_number
from hybridflow.rewards.process_pool import NOT_BEGUN, ProcessPool
from hybridflow.settings import is_number

_log = logging.getLogger(__name__)
_LONGEST = 1000  # characters of an answer that is compared as a formula
_WORKER_MB = 128
_MOMENT = 0.1  # first slice of processor seconds for a comparison; most need 0.02 to 0.1
_OUT_OF_TIME = "SIGPROF"  # the kernel's signal for a worker that has used up its slice
_DEPTH, _POWERS = 15, 2  # levels of brackets, and of exponents in exponents, of a formula that is worked out
_DIGITS = 5  # of an exponent, of what a factorial is of, of how far a sum goes
_MEASURED = re.compile(r"\\(?:left|right|[,;:! ])|(?<=\d)(?:,|\{,\})(?=\d{3})|[$\s]")
_NUMBER = r"[({]*-?\d"
_LARGE = re.compile(
    rf"\d{{{_DIGITS + 1},}}[)}}]*!|![)}}]*!.*!|![)}}]+!|\^[^!]*[)}}]!"  # 100000!, 9!!!, (9!)!, (10^9)!
    rf"|\^{_NUMBER}{{{_DIGITS + 1},}}(?!\d*\.)|[(][^()]*[-+][^()]*[)]\^{_NUMBER}\d\d"  # 2^{100000}, (x+y)^{500}
    rf"|\\(?:[dt]?binom|Gamma)[({{]*(?:\d{{{_DIGITS},}}|\d+\^)"
    rf"|\\(?:sum|prod)(?:_(?:{{[^{{}}]*}}|.))?\^{{?(?:\d{{{_DIGITS + 1},}}|\d+\^)"
)
_SLOW = re.compile(r"\\(?:i*int|sum|prod|lim|Gamma|zeta)(?![a-z])|!")
_FUNCTIONS = r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|sqrt|frac|log|exp|lim|max|min|gcd|lcm|mod"
_WORD = re.compile(rf"(?!(?:{_FUNCTIONS}))[^\W\d_]{{3,}}")
_BRACKETS = re.compile(r"[(\[][^()\[\]]*[)\]]")
_SEVERAL = re.compile(r"[,;]|\\pm|\\\{|\b(?:and|or)\b", re.IGNORECASE)
_CHOICE = re.compile(r"\(?([A-J])\)?[.:]?")
_CHOSEN = re.compile(
    r"[\s*{]*(?:option\s+|choice\s+)?(?:\(([A-J])\)|([A-J])(?:[).:]|\s*$))(?!\s*(?:,|;|/|&|\+|and\b)\s*\(?[A-J]\b)",
    re.IGNORECASE,
)


class Math(Comparison):
    """1.0 where the final answer of the completion equals the reference in column `answer`, else 0.0.

    The reference is a value (`18`, `1/2`, `\\frac{1}{2}`, `x^2+1`, `(A)`; text or number), a solution that ends in
    `#### 18`, or LaTeX with `\\boxed{18}`; several in a list or tuple are each accepted. `final_answer` finds the
    answer of a completion. It is compared as follows:

    - Two numbers: exactly, currency and units left out; see `same_number` for percent and rounded decimals.
    - Words and choices: without regard to case, spaces, punctuation and LaTeX's `\\text`.
    - Formulas, sets, intervals, matrices: by math-verify (sympy), in one of `workers` processes.

    A model must not be able to stop its judge. So these count as wrong answers, and the log counts them: formulas that
    are too large (see `too_large`); comparisons over `seconds` or 128 MiB; and comparisons left when the batch's time
    is used up. Comparisons without a verdict may take `batch_seconds` of processor time per batch (proportionally more
    above 128 comparisons): each gets a short slice first, and slower ones share the rest. Comparisons with a verdict do
    not use up this time.

    A completion without a final answer scores 0.0; a row whose reference is missing, or neither a text nor a finite
    number, is a RowFailure. Needs math-verify only for formulas. Errors: ConfigError for settings out of range.
    """

    limits_itself = True

    def __init__(
        self, answer: str = "answer", *, seconds: float = 5.0, batch_seconds: float = 0.8, workers: int = 1
    ) -> None:
        super().__init__(answer)
        if not is_number(batch_seconds) or not batch_seconds > 0:
            raise ConfigError(f"Math(batch_seconds={batch_seconds!r}): give a number above 0.")
        self.seconds, self.batch_seconds = seconds, batch_seconds
        self._pool = ProcessPool(_Equivalence(), workers, seconds=seconds, memory_mb=_WORKER_MB)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]) -> list[Any]:
        """One float (or RowFailure) per completion; `columns` must hold the column of the references."""
        found = super().__call__(prompts, completions, **columns)
        equal = self._equal({pair for pairs in found if isinstance(pairs, list) for pair in pairs})
        return [float(not equal.isdisjoint(one)) if isinstance(one, list) else one for one in found]

    def score(self, completion: str, references: list[str]) -> float | RowFailure | list[tuple[str, str]]:
        """A score, or pairs of formulas one of which has to be equal."""
        texts = [reference_answer(text) for text in references]
        if not all(texts):
            return RowFailure(f"the reference in column {self.answer!r} is {references!r:.200}, which has no answer")
        verdicts = [judge(completion, text) for text in texts]
        return 1.0 if True in verdicts else [pair for pair in verdicts if isinstance(pair, tuple)] or 0.0

    def _equal(self, pairs: set[tuple[str, str]]) -> set[tuple[str, str]]:
        """The pairs of formulas found equal in time."""
        waiting = sorted((pair for pair in pairs if not any(map(too_large, pair))), key=_expense)
        immense, late, found = len(pairs) - len(waiting), 0, set[tuple[str, str]]()
        left, moment = self.batch_seconds * max(1.0, len(waiting) / 128), _MOMENT
        while waiting and left > 0:
            moment = min(moment, left, self.seconds)
            calls = [((*pair, moment), {}) for pair in waiting]
            outcomes = self._pool.map(calls, failures=math.ceil(left / moment))
            failures = [(pair, o.failure) for pair, o in zip(waiting, outcomes, strict=True) if o.failure is not None]
            found |= {pair for pair, outcome in zip(waiting, outcomes, strict=True) if outcome.value}
            waiting = [
                pair for pair, why in failures if why == NOT_BEGUN or (_OUT_OF_TIME in why and moment < self.seconds)
            ]
            late += len(failures) - len(waiting)
            left -= moment * sum(why != NOT_BEGUN for _, why in failures)
            moment = max(2 * moment, left / max(1, len(waiting)))
        if lost := immense + late + len(waiting):
            _log.warning(
                "%d of %d comparisons of formulas count as wrong: %d are too large to be worked out, %d took too long "
                "or too much memory, and for %d the %g s of the batch were up (Math(seconds=..., batch_seconds=...))",
                *(lost, len(pairs), immense, late, len(waiting), self.batch_seconds),
            )
        return found

    def close(self) -> None:
        """Stop the worker processes, if any were started."""
        self._pool.close()


def too_large(formula: str) -> bool:
    """Whether `formula` (LaTeX, or as in programs) is a tower of exponents, a factorial or an expansion beyond use.

    The cost has no known upper bound: the time limits stop slow formulas that pass here.
    """
    text = _MEASURED.sub("", formula).replace("**", "^")
    opened, depth, powers, before = list[bool](), 0, 0, ""
    for sign in re.findall(r"\\[{}]|\\[A-Za-z]+|[\w.]+|\S", text):
        if sign[-1] in "([{":
            opened.append(before == "^")
            depth, powers = max(depth, len(opened)), max(powers, sum(opened))
        elif sign[-1] in ")]}" and opened:
            _ = opened.pop()
        elif sign == "^" and sum(opened) >= _POWERS:
            return True
        before = sign
    if depth > _DEPTH or powers > _POWERS or _LARGE.search(text) or re.search(r"\^[\w.]+\^[\w.]+\^", text):
        return True
    return any(
        int(base) > 1 and int(power[:9]) * math.log10(int(base)) > _DIGITS
        for base, power in re.findall(r"\^[({]*-?(?:\d+\\(?:cdot|times))?(\d+)[)}]*\^[({]*-?(\d+)", text)
    )


def _expense(pair: tuple[str, str]) -> tuple[bool, int]:
    """Sort key: comparisons likely to be slow come last; answers cannot influence the order of the others."""
    return any(map(_SLOW.search, pair)), zlib.crc32(repr(pair).encode())


def judge(solution: str, reference: str) -> bool | tuple[str, str]:
    """Whether `solution` answers `reference`, or the two formulas (answer, reference) that decide it."""
    number = parse_number(reference)
    several = _SEVERAL.search(_BRACKETS.sub("", reference)) is not None
    answer = final_answer(solution, numeric=number is not None, several=several)
    if answer is None:
        return False
    if number is not None and answer.number is not None:
        return same_number(answer.number, number)
    if number is not None and ":" in answer.text:  # a time of day or a ratio, which math-verify would divide
        return False
    if chosen := _CHOICE.fullmatch(_bare(reference)):
        found = _CHOSEN.match(_without_text(answer.text))
        return bool(found) and (found[1] or found[2]).upper() == chosen[1].upper()
    if _bare(reference) in (_bare(answer.text), _bare(answer.whole or "")):
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
    """Whether math-verify finds two formulas equal; imported in the template process, by unpickling."""

    def __call__(self, answer: str, reference: str, moment: float) -> bool:
        from math_verify import parse, verify

        def formula(text: str) -> list[Any]:
            return parse(f"${text.replace('$', '')}$", parsing_timeout=None)  # pyright: ignore[reportArgumentType]

        signal.setitimer(signal.ITIMER_PROF, moment)  # of this process alone, whatever else the machine does
        try:
            return bool(verify(formula(reference), formula(answer), timeout_seconds=None))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def __reduce__(self):
        return _loaded_equivalence, ()


def _loaded_equivalence() -> _Equivalence:
    import math_verify  # noqa: F401  seconds on a busy machine, which are not the first answer's

    # it warns that limits are off: the worker's limit holds
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    equivalence = _Equivalence()
    for formulas in (("(x+1)^2", "x^2+2x+1"), (r"\left[0, \frac{\sqrt{3}}{2}\right)", r"[0, \frac12\sqrt{3})")):
        _ = equivalence(*formulas, 60.0)  # what it sets up when it is first used, workers then have
    return equivalence

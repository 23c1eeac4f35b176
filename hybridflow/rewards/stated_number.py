"""Which of the numbers in a line of text the line states: `So she makes **$18** from 9 eggs.` states 18. Pure."""

from __future__ import annotations

import re

from hybridflow.rewards.number import Number, find_numbers, parse_number, plain, spelt_numbers

# "= 15.36 minutes, which rounds down to 15" goes on to a further form of the result
_EQUALS = re.compile(
    r"[=≈]+>?|\b(?:round(?:s|ed)(?: up| down| off)? to|which (?:is|equals)|or simply)(?=\W+\d)", re.IGNORECASE
)
_ASIDE = re.compile(r"\([^()]*\)|(?<=[\w,])\s(?:because|since)\b.*")
_FILLER = re.compile(
    r"(?:[\s*_:>=≈~\"'(]+|(?:about|approximately|approx\.|around|roughly|exactly|only|just|simply|thus|therefore|that"
    r"|a total of|equal to|USD|Rs\.?|[xyn]\s*=|(?:option\s+)?\(?[A-E][).:](?=\s*[\d$\\-]))\s*)+",
    re.IGNORECASE,
)
_OPERATOR = re.compile(r"\s*(?:[-+*×/÷·^–]|x(?=\s*\d)|to\s+(?=\d))\s*[\d(√\\]|!?\s*[\\^√π(]\S")
_SO = re.compile(r"(?:,|;|\.)?\s(?:so|thus|therefore|hence|meaning|which means|that means|that is)\b", re.IGNORECASE)
_MODIFIER = re.compile(r"(?:st|nd|rd|th)\b|-[a-z]", re.IGNORECASE)
_CALCULATIONS = 20  # that are read, from the last
_BOLD = re.compile(r"\*\*([^*\n]+?)\*\*(?!\s*:)")


def number_in(words: str) -> Number | None:
    """The number of a line that gives an answer: see `marked`, else the one it begins with, else its only one."""
    return marked(words) or leading(words) or _only(words)


def stated_in(words: str, result: Number | None) -> Number | None:
    """The number of a sentence that ends a solution: see `marked`, else its `result`, else its last one.

    `result` is what the solution computed last, where the sentence names it: `He needs 5 boxes for 20 toys` after
    `20/4 = 5`. What is in parentheses, or a reason ("because 50 < 52"), or no number of its own ("the 3rd day", "a
    200-page book") counts only when there is nothing else.
    """
    if (number := marked(words)) is not None:
        *_, last = _EQUALS.split(words)
        clause = _SO.search(last)
        return (stated_in(last[clause.end() :], number) if clause else None) or number
    text = plain(words)
    outside = _ASIDE.sub(" ", text)
    text = outside if find_numbers(outside) else text
    found = find_numbers(text)
    values = [written.number for written in found if not _MODIFIER.match(text, written.end)]
    values = values or [written.number for written in found]
    if result is not None and any(number.value == result.value for number in values):
        return result
    return values[-1] if values else None


def marked(words: str) -> Number | None:
    """The number that the whole line is, else what stands in bold, else what stands behind the last "="."""
    if (number := parse_number(words)) is not None:
        return number
    signs = list(_EQUALS.finditer(words))
    for bold in reversed(list(_BOLD.finditer(words))):
        label = bold[1].rstrip().endswith(":")
        number = None if label else parse_number(bold[1]) or _only(bold[1])
        if number is not None and not (signs and signs[-1].start() >= bold.end()):
            return number
    return leading(words[signs[-1].end() :]) if signs else None


def leading(words: str) -> Number | None:
    """The number at the beginning, but for "about" and currency, unless it is the first of an expression."""
    text = plain(words)
    filler = _FILLER.match(text)
    text = re.sub(r"^([-+])\s+(?=[\d.])", r"\1", text[filler.end() if filler else 0 :])
    found = find_numbers(text[:200])
    if not found or found[0].start != 0 or _OPERATOR.match(text[found[0].end :]):
        return None
    return found[0].number


def computed(text: str) -> Number | None:
    """The result of the last calculation in a text: the number behind the last "=" that one follows."""
    for sign in list(_EQUALS.finditer(text))[: -_CALCULATIONS - 1 : -1]:
        if (number := leading(text[sign.end() : sign.end() + 200].partition("\n")[0])) is not None:
            return number
    return None


def spelt(words: str) -> Number | None:
    """The last number that is written in words."""
    found = [written.number for written in spelt_numbers(words)]
    return found[-1] if found else None


def _only(words: str) -> Number | None:
    found = find_numbers(plain(words))
    return found[0].number if len(found) == 1 else None

"""Which of the numbers in a line of text the line states: `So she makes **$18** from 9 eggs.` states 18. Pure."""

from __future__ import annotations

import re

from hybridflow.rewards.number import Number, Written, find_numbers, parse_number, plain, spelt_numbers

# "= 15.36 minutes, which rounds down to 15" goes on to a further form of the result
_EQUALS = re.compile(
    r"[=≈]+>?|\b(?:round(?:s|ed)(?: up| down| off)? to|which (?:is|equals)|or simply)(?=\W+\d)", re.IGNORECASE
)
# "17.6, but since half a bus is none, she needs 18" goes on behind the reason; "18, since 9 * 2 is 18" does not
_ASIDE = re.compile(
    r"\([^()]*\)|(?<=[\w,])(?<!\bbut)(?<!\band)(?<!\byet)(?<!\bso)(?<!however,)(?<!,\sbut,)\s(?:because|since)\b.*",
    re.I,
)
_FILLER = re.compile(
    r"(?:[\s*_:>=≈~\"'(]+|(?:about|approximately|approx\.|around|roughly|exactly|only|just|simply|thus|therefore|that"
    r"|a total of|equal to|USD|Rs\.?|[xyn]\s*=|(?:option\s+)?\(?[A-E][).:](?=\s*[\d$\\-]))\s*)+",
    re.IGNORECASE,
)
_OPERATOR = re.compile(r"\s*(?:[-+*×/÷·^–]|x(?=\s*\d)|to\s+(?=\d))\s*[\d(√\\]|!?(?:\s*[\\^√π]|\()\S|\s+\(\s*[\d√\\]")
_SO = re.compile(r"(?:,|;|\.)?\s(?:so|thus|therefore|hence|meaning|which means|that means|that is)\b", re.IGNORECASE)
# what stands before a circumstance: "36 minutes to walk 18 blocks", "$36 for 18 eggs", "18 of the 100 pages"
_CIRCUMSTANCE = re.compile(
    r"(?:(?<!,\s)\b(?:for|in|from|at|on|after|than|per|among|between|by\s+[a-z]+ing)(?:\s+(?!total|all)[a-z]+)?"
    r"|[\d%]\s+(?:out\s+)?of(?:\s+(?:the|all|his|her|their|its))*"
    r"|(?<!need)(?<!needs)(?<!needed)(?<!has)(?<!have)(?<!had)(?<!going)(?<!able)(?<!wants)(?<!want)\s+to"
    r"\s+(?!a\b|get|find|be\b|equal|give|obtain|reach|have|arrive|yield|total|become|make)[a-z]+"
    r"(?:\s+(?:the|all|these|his|her|their))*|\b(?:after|for|from|by|on)\b[^,;]*\d[^,;]*\b(?:and|at|on))\s*$",
    re.IGNORECASE,
)
# what stands behind a number that is no circumstance all the same: "for 18 dollars", "for 23 in total"
_AMOUNT = re.compile(
    r"\s*(?:dollars|cents|euros|pounds|usd)\b|[^,;.\d]{0,25}\b(?:total|altogether|in all|overall)\b", re.I
)
_SHARE = re.compile(r"\s+of\s+(?:the\s+)?\d")
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
    200-page book"), or a circumstance ("for 20 toys") counts only when there is nothing else.
    """
    if (number := marked(words)) is not None:
        *_, last = _EQUALS.split(words)
        clause = _SO.search(last)
        return (stated_in(last[clause.end() :], number) if clause else None) or number
    text = plain(words)
    outside = _ASIDE.sub(" ", text)
    text = outside if find_numbers(outside) else text
    found = find_numbers(text)
    found = [written for written in found if not _MODIFIER.match(text, written.end)] or found
    if result is not None and any(written.number.value == result.value for written in found):
        return result
    found = [written for written in found[-_CALCULATIONS:] if not _circumstance(text, written)] or found
    return found[-1].number if found else None


def _circumstance(text: str, written: Written) -> bool:
    """Whether a number in `plain` text is only what the stated one is related to; "for $18" is what something costs."""
    before, behind = text[max(0, written.start - 60) : written.start], text[written.end : written.end + 40]
    if (written.number.percent or "/" in text[written.start : written.end]) and _SHARE.match(behind):
        return True
    paid = re.search(r"\bfor\s{2,}$", before) or (re.search(r"\bfor\s+$", before) and _AMOUNT.match(behind))
    return not paid and _CIRCUMSTANCE.search(before) is not None


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


def rounded(words: str, number: Number | None) -> Number | None:
    """What the `number` that the words begin with is rounded to: 18 for "17.6, so about 18 people", else itself."""
    if number is None or number.value.denominator == 1:
        return number
    *_, last = _EQUALS.split(words)
    clause = _SO.search(last)
    whole = stated_in(last[clause.end() :], None) if clause else leading(last)
    near = whole is not None and whole.value.denominator == 1 and abs(whole.value - number.value) < 1
    return whole if near else number


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

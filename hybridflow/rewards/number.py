"""Numbers as people and models write them: `$1,234.50`, `2 1/2`, `\\frac{3}{4}`, `18\\%`, `1.5 million`, `-3`. Pure."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_DIGITS = 300  # of one written number, and of an exponent's value: more are noise, and would only cost time
_LONGEST = 1000  # characters of a text that is one number
_SCALES = {"hundred": 100, "thousand": 1_000, "k": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_UNITS = (
    "[kmµu]?gs?|kgms?|gms?|mcg|lbs?|ozs?|[kcmn]?ms?|kms|cms|mms|ft|sq|sqft|sqm|cu|in|mi|yds?|mph|k[mp]h|kmph|fps|rpm|bpm"
    "|h|hrs?|mins?|s|secs?|[mn]secs?|days?|wks?|mos|yrs?|am|pm|l|[mckd]ls?|ltrs?|gals?|qts?|pts?|tsps?|tbsps?"
    "|usd|eur|gbp|cad|aud|nzd|inr|jpy|cny|rmb|chf|rs|[kmgt]b|[kmg]bps|px|db|[kmg]?hz|[kmg]w|[kmg]?wh|k?cals?|k?pa|psi"
    "|pcs?|nos|doz|qty|ppl|ppm|deg"
)
# Words that make an expression of the number before them, so that they are no unit.
_NOT_UNITS = (
    "pi|sqrt|sin|cos|tan|cot|sec(?=\\s*[^\\s.])|csc|log|ln|exp|mod|times|plus|minus|over|infinity|infty|choose|factorial|squared|cubed"
    "|and|or|dozen|half|halves|thirds?|fourths?|quarters?|fifths?|tenths?|hundredths?|remainder|divided|multiplied|through"
)

_UNSIGNED = r"(?:[1-9]\d{0,2}(?:[,\u00a0\u2009\u202f]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_TEN = r"10\s*\^\s*(?:\{\s*[-+]?\d{1,4}\s*\}|[-+]?\d{1,4})"
_BODY = (
    rf"(?:(?P<whole>\d+)\s+(?:and\s+)?(?P<part>\d+)\s?/\s?(?P<of>\d+)"
    rf"|(?P<over>{_UNSIGNED})\s?/\s?(?P<under>-?{_UNSIGNED})"
    rf"|(?P<ten>{_TEN})|(?P<decimal>{_UNSIGNED})(?P<power>e[-+]?\d{{1,4}}(?![\w.])|\s*(?:[x×*·]\s*){_TEN})?)"
)
_TAIL = (
    r"(?:\s*(?P<percent>%|percent\b|per\s?cent\b)"
    r"|\s*(?P<scale>hundred|thousand|million|billion|trillion)s?\b|(?P<k>k)\b)?"
)
# not inside a word, a decimal, a list, a time of day, a ratio or an expression
# of alphabets: after Chinese or Japanese words a number follows without a blank; × and ÷ are no letters
_LETTER = "A-Za-z0-9_ªµº²³¹À-ÖØ-öø-\u052f"
_BEFORE = rf"(?<![{_LETTER}.^\\√/])(?<!\d[,:])(?<!\d\s/)"
_AFTER = (
    rf"(?![\d^_\\√π(]|[.,:/]\d|\s?/\s?\d)(?:(?=[^A-Za-z]|$)|(?=(?:st|nd|rd|th)\b)|(?=(?:{_UNITS})\b)|(?=[A-Za-z]{{4}}))"
)
_NUMBER = re.compile(
    rf"{_BEFORE}(?P<sign>(?<![{_LETTER})\]%}}])(?<![\d)\]%}}]\s)[-+])?{_BODY}{_TAIL}{_AFTER}", re.IGNORECASE
)
_LEAD = re.compile(
    r"(?:about|approximately|approx\.?|around|roughly|exactly|only|just|a|total|of|usd|rs\.?|us|[~≈=:])\s*", re.I
)
_SUFFIX = re.compile(
    rf"(?:[\s,/.-]*(?!(?:{_NOT_UNITS})\b)(?:(?:{_UNITS}|[a-z'’]{{3,}}|of|per|a|an|at|by|on|to|is|[°º]\s?[cfk]?)(?:\s?\^?\s?\{{?[23²³]\}}?)?(?![\w^\\])))*",
    re.I,
)

# What `plain` writes plainly, in this order: LaTeX, Markdown and typography of numbers.
_PLAINLY = [
    (re.compile(pattern), written)
    for pattern, written in (
        (r"</?(?:b|strong|i|em|u|br|p|span|code)\b[^<>]*>|~~[^~\n]+~~", " "),
        (r"[\u200b-\u200d\u2060\ufeff]", ""),
        (r"[−﹣－]|(?<![\w)])[–‒‐‑](?=\s?[\d$])|\\-", "-"),
        (r"(\b(?:is|was|be|to|of|at|equals) |[=≈] ?)[-–] (?=[\d.$])", r"\1-"),  # but not "the total – 5 apples"
        (r"(?<=\d)(?:\{,\}|,?\\[,!]|\\ |~)+(?=\d{3})", ","),
        (r"\\[()\[\]]|\\(?:left|right|displaystyle|big|Big)(?![a-zA-Z])|\\[,;:! ]|~(?=\\)", " "),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boldsymbol|boxed|fbox|emph)\s*\{([^{}]*)\}", r" \1 "),
        (r"(?<=\d)\s*\\[dtc]?frac", r" \\frac"),
        (r"\\[dtc]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*(-?[\d.,]+)\s*\}", r"\1/\2"),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\1/\2"),
        (r"\\(?:times|cdot)(?![a-zA-Z])", "×"),
        (r"\\(?:approx|simeq)(?![a-zA-Z])", "≈"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\\degree", "°"),
        (r"\\([%$#&])", r"\1"),
        (r"([-+])\s?[$€£¥₹₱₩]", r"\1"),
        (r"[$€£¥₹₱₩¢`]|(?<!\d)\*\*|\*\*(?!\d)|(?<![\w}])_+|_+(?![\w{])", " "),
    )
]
_FULL_WIDTH = str.maketrans("：，％＝＋０１２３４５６７８９", ":,%=+0123456789")
# "$118 000", "1 080 000", "10 000", but not "2 100 gram packs": several groups, or one that no number begins with
_BLANK_GROUPS = re.compile(
    r"[$€£]\s?\d{1,3}(?: \d{3})+(?!\d)|(?<![\w.,/^-])(?<!\d )[1-9]\d{0,2}(?:(?: \d{3}){2,}| 0\d\d)(?![\d,/]| \d)"
)


@dataclass(frozen=True, slots=True)
class Number:
    """A written number: `value`, its `places` after the point (None for fractions), and what stood behind it.

    `value` is what the digits say: `percent` and `scale` ("million") are kept apart, because a reference may leave
    them out.
    """

    value: Fraction
    places: int | None = 0
    percent: bool = False
    scale: int = 1

    @property
    def amount(self) -> Fraction:
        """The value in ones: 1,500,000 for `1.5 million`."""
        return self.value * self.scale


@dataclass(frozen=True, slots=True)
class Written:
    """A `number` and where it stands in the text."""

    number: Number
    start: int
    end: int


def plain(text: str) -> str:
    """The text with LaTeX, Markdown and typography of numbers written plainly; currency signs become blanks."""
    text = re.sub(r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("⁄", "/"), text)
    text = _BLANK_GROUPS.sub(lambda found: found[0].replace(" ", ""), text.translate(_FULL_WIDTH))
    for pattern, written in _PLAINLY:
        text = pattern.sub(written, text)
    return text


def parse_number(text: str) -> Number | None:
    """The number that the whole text is, leaving out currency, units and "about"; None for anything else.

    `18 dollars`, `$18.00`, `-3`, `3/4`, `2\\frac{1}{2}`, `18\\%`, `1e3`, `10^{6}` are numbers; `2x`, `3-4`, `10:30`,
    `5!`, `3, 5`, `2\\sqrt{3}` and `eighteen` are not.
    """
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    text = plain(text).strip().strip("*").strip()
    while len(text) > 2 and text[0] + text[-1] in {"()", "{}", "[]", '""'} and "," not in text:
        text = text[1:-1].strip()
    bare = text.rstrip(" .,;:。")
    while lead := _LEAD.match(bare):
        bare = bare[lead.end() :]
    bare = re.sub(r"^([-+])\s+(?=[\d.])", r"\1", bare)
    for written in find_numbers(bare)[:1]:
        rest = re.sub(r"^-?(?:st|nd|rd|th)\b", "", bare[written.end :])
        rest = re.sub(r"\s*\([^()\d]*\)", "", rest)
        if not bare[: written.start].strip() and len(rest) < 200 and _SUFFIX.fullmatch(rest.rstrip(" .")):
            return written.number
    return None


def find_numbers(text: str) -> list[Written]:
    """The numbers in running text that is already `plain`; those inside words, times and ratios are left out."""
    found = [(match, _read(match)) for match in _NUMBER.finditer(text)]
    return [Written(number, match.start(), match.end()) for match, number in found if number is not None]


def same_number(answer: Number, reference: Number) -> bool:
    """True when both are the same value.

    - Exact: `18.00` is 18 and `0.75` is 3/4; what only looks close is another number.
    - A percent sign or a "million" that only one of them has may be meant either way: `25%` is 25 and 0.25.
    - A decimal with at least two places and two significant digits equals the fraction, or the decimal with two or
      more further places, that it rounds or cuts off: `0.33` is 1/3 and 0.3333.
    - 1e-9 relative where a decimal has six places or more (floating point noise).
    """
    return any(_close(a, b) for a in _meanings(answer, reference) for b in _meanings(reference, answer))


def _meanings(number: Number, other: Number) -> list[tuple[Fraction, int | None]]:
    """Value and places of the number: without its sign or scale too where the other one has none."""
    values = [(number.value, number.places)]
    if number.scale != 1:
        scaled = (number.amount, None if number.places else number.places)
        values = [scaled] if other.scale != 1 else [scaled, *values]
    if number.percent and not other.percent:
        values += [(value / 100, None if places is None else places + 2) for value, places in values]
    return values


def _close(a: tuple[Fraction, int | None], b: tuple[Fraction, int | None]) -> bool:
    if a[0] == b[0]:
        return True
    noise = max(a[1] or 0, b[1] or 0) >= 6 and abs(a[0] - b[0]) <= abs(b[0]) / 10**9
    return noise or _shortened(*a, *b) or _shortened(*b, *a)


def _shortened(short: Fraction, places: int | None, full: Fraction, full_places: int | None) -> bool:
    """True when `short` is `full` rounded (halves away from 0) or cut off to its places."""
    if places is None or places < 2 or abs(short) * 10**places < 10:
        return False
    longer = 10**_DIGITS % full.denominator != 0 if full_places is None else full_places >= places + 2
    digits, wanted = abs(full) * 10**places, short * 10**places * (-1 if full < 0 else 1)
    return longer and wanted in (math.floor(digits + Fraction(1, 2)), math.floor(digits))


def _read(match: re.Match[str]) -> Number | None:
    """The number that was matched; None where it is no proper fraction, or too long."""
    said = match.groupdict()
    exponent = int(re.sub(r"[^\d+-]", "", re.split(r"\^|e", said["ten"] or said["power"] or "0", flags=re.I)[-1]))
    if len(match[0]) > _DIGITS or abs(exponent) > _DIGITS:
        return None
    whole, over, under = said["whole"], said["part"] or said["over"], said["of"] or said["under"]
    places: int | None = None
    if over:
        parts = _decimal(over), _decimal(under)
        if not parts[1] or (whole and not 0 < parts[0] < parts[1]):
            return None
        value = parts[0] / parts[1] + int(whole or 0)
    else:
        value = _decimal(said["decimal"] or "1") * Fraction(10) ** exponent
        places = max(0, len((said["decimal"] or "").partition(".")[2]) - exponent)
    sign = -1 if said["sign"] == "-" else 1
    scale = _SCALES[(said["scale"] or said["k"]).lower()] if said["scale"] or said["k"] else 1
    return Number(sign * value, places, bool(said["percent"]), scale)


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", text))

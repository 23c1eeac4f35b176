"""Numbers as people and models write them: `$1,234.50`, `2 1/2`, `\\frac{3}{4}`, `18\\%`, `1.5 million`, `-3`. Pure."""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

_DIGITS = 300  # of one written number: more are noise, and would only cost time
_EXPONENT = 300
_LONGEST = 1000  # characters of a text that is one number
_SCALES = {
    "one": 1,
    "hundred": 100,
    "thousand": 1_000,
    "million": 1_000_000,
    "billion": 1_000_000_000,
    "trillion": 1_000_000_000_000,
    "dozen": 12,
    "k": 1_000,
}
_UNITS = (
    "[kmµu]?gs?|kgms?|gms?|mcg|lbs?|ozs?|[kcmn]?ms?|kms|cms|mms|ft|sq|sqft|sqm|cu|in|mi|yds?|mph|k[mp]h|kmph|fps|rpm|bpm"
    "|h|hrs?|mins?|s|secs?|[mn]secs?|days?|wks?|mos|yrs?|am|pm|l|[mckd]ls?|ltrs?|gals?|qts?|pts?|tsps?|tbsps?"
    "|usd|eur|gbp|cad|aud|nzd|inr|jpy|cny|rmb|chf|rs|[kmgt]b|[kmg]bps|px|db|[kmg]?hz|[kmg]w|[kmg]?wh|k?cals?|k?pa|psi"
    "|pcs?|nos|doz|qty|ppl|ppm|deg"
)
# Words that make an expression of the number before them, so that they are no unit.
_NOT_UNITS = (
    "pi|sqrt|sin|cos|tan|cot|sec(?=\\s*[^\\s.])|csc|log|ln|exp|mod|times|plus|minus|over|infinity|infty|choose|factorial|squared|cubed"
    "|and|or|half|halves|thirds?|fourths?|quarters?|fifths?|tenths?|hundredths?|remainder|divided|multiplied|through"
)
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORDS = {word: value for value, word in enumerate(_ONES)} | {
    word: 10 * value for value, word in enumerate(_TENS, start=2)
}

_UNSIGNED = r"(?:[1-9]\d{0,2}(?:[,\u00a0\u2009\u202f]\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
_POWER = r"(?:e[-+]?\d{1,4}(?![\w.])|\s*(?:[x×*·]\s*)10\s*\^\s*(?:\{\s*[-+]?\d{1,4}\s*\}|[-+]?\d{1,4}))"
_BODY = (
    rf"(?:(?P<whole>\d+)\s+(?:and\s+)?(?P<part>\d+)\s?/\s?(?P<of>\d+)"
    rf"|(?P<over>{_UNSIGNED})\s?/\s?(?P<under>-?{_UNSIGNED})"
    rf"|(?P<decimal>{_UNSIGNED})(?P<power>{_POWER})?|(?P<ten>10\s*\^\s*(?:\{{\s*[-+]?\d{{1,4}}\s*\}}|[-+]?\d{{1,4}})))"
)
_TAIL = (
    r"(?:\s*(?P<percent>%|percent\b|per\s?cent\b)"
    r"|\s*(?P<scale>hundred|thousand|million|billion|trillion|dozen)s?\b|(?P<k>k)\b)?"
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
_SPELT = re.compile(
    rf"(?<![\w-])(?:{'|'.join(_WORDS)})(?:[\s-]+(?:and\s+)?(?:{'|'.join(_WORDS)}|hundred|thousand|million)\b)*\b", re.I
)
_LEAD = re.compile(
    r"(?:about|approximately|approx\.?|around|roughly|exactly|only|just|a|total|of|usd|rs\.?|us|[~≈=:])\s*", re.I
)
_SUFFIX = re.compile(
    rf"(?:[\s,/.-]*(?!(?:{_NOT_UNITS})\b)(?:(?:{_UNITS}|[a-z'’]{{3,}}|of|per|a|an|at|by|on|to|is|[°º]\s?[cfk]?)(?:\s?\^?\s?\{{?[23²³]\}}?)?(?![\w^\\])))*",
    re.I,
)


_FULL_WIDTH = str.maketrans("：，％＝＋０１２３４５６７８９", ":,%=+0123456789")
# "1 080 000" and "10 000", but not "2 100 gram packs": more than one group, or one that no number begins with
_BLANK_GROUPS = re.compile(r"(?<![\w.,/^-])(?<!\d )[1-9]\d{0,2}(?:(?: \d{3}){2,}| 0\d\d)(?![\d,/]| \d)")


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
    text = re.sub(
        r"[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞]", lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("⁄", "/"), text
    )
    text = re.sub(r"</?(?:b|strong|i|em|u|br|p|span|code)\b[^<>]*>|~~[^~\n]+~~", " ", text)
    text = re.sub(r"[\u200b-\u200d\u2060\ufeff]", "", text)
    text = re.sub(r"[−﹣－]|(?<![\w)])[–‒‐‑](?=\s?[\d$])|\\-", "-", text)
    text = text.translate(_FULL_WIDTH)
    # "it is – 5" but not "the total – 5 apples"
    text = re.sub(r"(\b(?:is|was|be|to|of|at|equals) |[=≈] ?)[-–] (?=[\d.$])", r"\1-", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|,?\\[,!]|\\ |~)+(?=\d{3})", ",", text)
    text = re.sub(r"[$€£]\s?\d{1,3}(?: \d{3})+(?!\d)", lambda found: found[0].replace(" ", ""), text)
    text = _BLANK_GROUPS.sub(lambda found: found[0].replace(" ", ","), text)
    text = re.sub(r"\\[()\[\]]|\\(?:left|right|displaystyle|big|Big)(?![a-zA-Z])|\\[,;:! ]|~(?=\\)", " ", text)
    text = re.sub(
        r"\\(?:text|textbf|textit|mathrm|mathbf|mbox|boldsymbol|boxed|fbox|emph)\s*\{([^{}]*)\}", r" \1 ", text
    )
    text = re.sub(r"(?<=\d)\s*\\[dtc]?frac", r" \\frac", text)
    text = re.sub(r"\\[dtc]?frac\s*\{\s*(-?[\d.,]+)\s*\}\s*\{\s*(-?[\d.,]+)\s*\}", r"\1/\2", text)
    text = re.sub(r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\1/\2", text)
    text = re.sub(r"\\(?:times|cdot)(?![a-zA-Z])", "×", text)
    text = re.sub(r"\\(?:approx|simeq)(?![a-zA-Z])", "≈", text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\\degree", "°", text)
    text = re.sub(r"\\([%$#&])", r"\1", text)
    text = re.sub(r"([-+])\s?[$€£¥₹₱₩]", r"\1", text)
    return re.sub(r"[$€£¥₹₱₩¢`]|(?<!\d)\*\*|\*\*(?!\d)|(?<![\w}])_+|_+(?![\w{])", " ", text)


def parse_number(text: str) -> Number | None:
    """The number that the whole text is, leaving out currency, units and "about"; None for anything else.

    `18 dollars`, `$18.00`, `-3`, `3/4`, `2\\frac{1}{2}`, `18\\%`, `1e3`, `10^{6}`, `eighteen` are numbers; `2x`, `3-4`,
    `10:30`, `5!`, `3, 5` and `2\\sqrt{3}` are not.
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
    for written in (*find_numbers(bare)[:1], *spelt_numbers(bare)[:1]):
        rest = re.sub(r"^-?(?:st|nd|rd|th)\b", "", bare[written.end :])
        rest = re.sub(r"\s*\([^()\d]*\)", "", rest)
        if not bare[: written.start].strip() and len(rest) < 200 and _SUFFIX.fullmatch(rest.rstrip(" .")):
            return written.number
    return None


def find_numbers(text: str) -> list[Written]:
    """The numbers in running text that is already `plain`; those inside words, times and ratios are left out."""
    found = []
    for match in _NUMBER.finditer(text):
        if (number := _read(match)) is not None:
            found.append(Written(number, match.start(), match.end()))
    return found


def spelt_numbers(text: str) -> list[Written]:
    """The numbers in words: `eighteen`, `twenty-five`, `two hundred and six`."""
    return [Written(Number(Fraction(_spelt(m[0]))), m.start(), m.end()) for m in _SPELT.finditer(text)]


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
        scaled = (number.value * number.scale, None if number.places else number.places)
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
    """True when `short` is `full` rounded or cut off to its places."""
    if places is None or places < 2 or abs(short) * 10**places < 10:
        return False
    longer = _endless(full) if full_places is None else full_places >= places + 2
    step = 10**places
    return longer and short * step in (_half_up(full * step), math.trunc(full * step))


def _endless(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest != 1


def _half_up(value: Fraction) -> int:
    rounded = math.floor(abs(value) + Fraction(1, 2))
    return rounded if value >= 0 else -rounded


def _read(match: re.Match[str]) -> Number | None:
    groups = match.groupdict()
    if len(match[0]) > _DIGITS:
        return None
    sign = -1 if groups["sign"] == "-" else 1
    percent, scale = (
        bool(groups["percent"]),
        _SCALES[(groups["scale"] or groups["k"]).lower()] if groups["scale"] or groups["k"] else 1,
    )
    places: int | None = None
    if groups["whole"]:
        under = int(groups["of"])
        if not 0 < int(groups["part"]) < under:
            return None
        value = int(groups["whole"]) + Fraction(int(groups["part"]), under)
    elif groups["over"]:
        under = _decimal(groups["under"])
        if not under:
            return None
        value = _decimal(groups["over"]) / under
    elif groups["ten"]:
        exponent = int(re.sub(r"[^\d+-]", "", groups["ten"].partition("^")[2]))
        if abs(exponent) > _EXPONENT:
            return None
        value, places = Fraction(10) ** exponent, max(0, -exponent)
    else:
        value, places = _decimal(groups["decimal"]), len(groups["decimal"].partition(".")[2])
        if groups["power"]:
            exponent = int(re.sub(r"[^\d+-]", "", re.split(r"\^|^e", groups["power"], flags=re.IGNORECASE)[-1]))
            if abs(exponent) > _EXPONENT:
                return None
            value, places = value * Fraction(10) ** exponent, max(0, places - exponent)
    return Number(sign * value, places, percent, scale)


def _decimal(text: str) -> Fraction:
    return Fraction(re.sub(r"[,\s]", "", text))


def _spelt(text: str) -> int:
    total = current = 0
    for word in re.findall(r"[a-z]+", text.lower()):
        if word in _WORDS:
            current += _WORDS[word]
        elif word == "hundred":
            current = max(current, 1) * 100
        elif word in _SCALES:
            total, current = total + max(current, 1) * _SCALES[word], 0
    return total + current

"""The layout of answers: removes what has no meaning (sizes, spaces, styles), and writes signs in one way. Pure."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

_SCRIPTS = ((re.compile("[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+"), "^"), (re.compile("[₀₁₂₃₄₅₆₇₈₉]+"), "_"))
_WRITTEN = (
    r"− - – - ‒ - ‐ - ÷ / · \cdot ⋅ \cdot ∙ \cdot ∗ \cdot × \cdot ✕ \cdot √ sqrt ∞ \infty ≤ \le ⩽ \le ≥ \ge ⩾ \ge"
)
_WRITTEN += r" ≠ \ne ∈ \in ∪ \cup ∅ \emptyset … \ldots ° ^\circ ± \pm ≈ \approx ℝ \reals"
_SIGNS = {ord(sign): f"{text} " if text[-1].isalpha() else text for sign, text in zip(*[iter(_WRITTEN.split())] * 2)}
_SIGNS |= dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"), "")
_SIGNS |= {ord(sign): f" {unicodedata.normalize('NFKC', sign).replace('⁄', '/')}" for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}


# Layout without meaning, in this order; `§` marks an upright word, `\x03` is a dollar.
_STYLE = r"\\(?:(?:math|text)(?:bf|it|sf|tt)|boldsymbol|bm|emph|boxed|fbox)\s*\{([^{}]*)\}"
_SIZE = r"\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]ig{1,2}[lrm]?|displaystyle|limits)(?![a-zA-Z])"
_RING = r"\\(?:(?:circ|degree)(?![a-zA-Z])|(?:text|mathrm)\{o\})"
_DEGREE = rf"\^\s*\{{\s*{_RING}\s*\}}|\^\s*{_RING}|\\(?:circ|degree)(?![a-zA-Z])"
_LAYOUT: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), written)
    for pattern, written in (
        (r"</?(?:b|strong|i|em|u|br|p|span|code)(?:\s[a-z]+=\"[^\"<>]*\")*\s?/?>|~~[^~\n]+~~|`", " "),
        (r"(?<![\w)}\]*])\*\*(?!\s)([^*\n]+?)\*\*(?!\w)", r" \1 "),
        (r"(?<=\d)(?:\{,\}|,?\\[,!]|\\ |~)+(?=\d{3}(?!\d))", ""),
        (rf"{_SIZE}|(?<!\\)\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (_STYLE, r" \1 "),
        (_DEGREE, r"\\degree "),
        (r"\\degree\s*(?:\\(?:text|mathrm)\{)?([CF])\}?(?![A-Za-z])", r" §deg\1"),
        (
            r"\\(?:text(?:rm|normal)?|mathrm|mbox|operatorname\*?)\s*\{((?:[^{}]|\{[^{}]*\})*)\}",
            lambda found: re.sub("§?([A-Za-z]+)", r"§\1", f" {found[1]} "),
        ),
        (r"\\mathbb\s*(?:\{\s*R\s*\}|R)", r"\\reals "),
        (r"\\[dtc](frac|binom)(?![a-zA-Z])", r"\\\1"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\(frac|sqrt)\s*(\d)", r"\\\1{\2}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\*\*", "^"),
        (r"\\%|(?<=\d)\s+per\s?cent\b", "%"),
        (r"\\\$", "\x03"),
        (r"\bRs\.|\bUS(?=\x03)", "Rs "),
        (r"([$\x03€£]\s?\d[\d.,]*)k$", r"\1 thousand"),
    )
]
# "$118 000", "1 080 000", "10 000", but not "2 100 gram packs": several groups, or one that no number begins with
_BLANK_GROUPS = re.compile(
    r"[$\x03€£]\s?\d{1,3}(?: \d{3})+(?!\d)|(?<![\w.,/^-])(?<!\d )[1-9]\d{0,2}(?:(?: \d{3}){2,}| 0\d\d)(?![\d,/]| \d)"
)
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")


def layout(text: str) -> str:
    """The text without layout that has no meaning."""
    text = text.strip()
    if not text.isascii():
        for script, sign in _SCRIPTS:
            text = script.sub(lambda found, sign=sign: f"{sign}{{{unicodedata.normalize('NFKC', found[0])}}}", text)
        text = unicodedata.normalize("NFKC", text.translate(_SIGNS))
    text = _BLANK_GROUPS.sub(lambda found: found[0].replace(" ", ""), text)
    if re.search(r"[\\*$~`<{R]|per", text):
        for pattern, written in _LAYOUT:
            text = pattern.sub(written, text)
        for opened, closed in (("\\(", "\\)"), ("\\[", "\\]")):
            if text.count(opened) == text.count(closed):
                text = text.replace(opened, " ").replace(closed, " ")
        if text.count("$") % 2:
            text = re.sub(r"\$(?=\s?[-\d.])|(?<=\d)\$$", "\x03", text, count=1)
        text = text.replace("$", " ") if text.count("$") % 2 == 0 else text
    if not re.search(r"[(\[]|\\\{", text):  # in brackets commas separate
        text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    text = re.sub(r"(?<=\d)(?:st|nd|rd|th)\b", " ", text)
    return re.sub(r"(?:(?<![\\.,;:。\s])|(?<=\\[,;:。\s]))[.,;:。\s]++$", "", text).strip()

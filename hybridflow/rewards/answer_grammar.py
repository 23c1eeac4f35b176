"""The grammar of answers: a text becomes one tree that accounts for every character, or is not understood. Pure.

    listing   item ((',' | ';' | 'and' | 'or') item)*         4, 3       x = 3 or x = 5
    item      union (('=' | '<' | '\\in' | ...) union)*        m \\ge \\sqrt3      9 \\cdot 2 = 18
    union     quantity (('\\cup' | '\\setminus') quantity)*     (-1, 2] \\cup \\{5\\}
    quantity  [currency] sum ['million'] [unit | words]       1.5 million dollars per day
    sum       [sign] product (sign product)*                  1 + \\sqrt 2
    product   power ((['\\cdot'] | '/') power)*                3x(y+1)/2
    power     atom ('!' | '%' | '\\degree' | '^' power)*       30^\\circ
    atom      number, letter, function, fraction, root, matrix, or anything in brackets

A bare letter is a variable, never a unit: `12h` is 12 times h. Words may stand before and behind one value; a word that
changes it ("not", "half", "than") is not understood.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from hybridflow.rewards.measurement import CHANGING, CURRENCIES, known_unit, unit

_LONGEST, _DEPTH, _EXPONENT = 1000, 30, 2000  # characters; brackets in brackets; of a decimal (`1e300`)
SCALES = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_FUNCTIONS = set(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh sqrt exp ln log max min gcd lcm frac binom".split()
)
_GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega ell"
)
_NAMES = {name: name for name in f"{_GREEK} Gamma Delta Theta Lambda Sigma Phi Psi Omega pi infty R".split()}
_NAMES |= {"infinity": "infty", "oo": "infty", "reals": "R", "emptyset": "empty", "varnothing": "empty"}
_SAME: dict[str, str] = dict(
    (pair.split()[0], pair.split()[1])
    for pair in r"""\cdot *,\times *,\ast *,\div /,\leq \le,\leqslant \le,\geq \ge,\geqslant \ge,\neq \ne,< \lt,> \gt
    ,\simeq \approx,\vee \lor,\land and,\wedge and,& and,; and,\lvert |,\rvert |,\vert |,\mid |,\backslash \setminus
    ,\lbrace \{,\rbrace \},\lbrack [,\rbrack ],\langle (,\rangle )""".split(",")
)
_RELATIONS = ("=", "\\lt", "\\gt", "\\le", "\\ge", "\\ne", "\\in", "\\approx", ":")
_CLOSED_BY = {"(": ")]", "[": "])", "\\{": "\\}", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_OPAQUE = {"f", "g", "F", "G", "P"}  # `f(x)` is a function of x, not a product
_SMALL = set("of per an a at by on in is for the all are was has day her his its it he she we from each".split())
_HEAD = re.compile(r"(?:§?(?:[A-Za-z][a-z'’-]*[a-z'’]|[aI])(?:[\s,]+|(?=[\x03$€£])))*(?:§?[A-Za-z]{3,}\s*[:=]\s*)?")
_CHOICE = re.compile(
    r"(?:§?(?:option|choice)\s+)?(?:\(§?([A-J])\)|§?([A-J])(?:[).]|:(?=\s)|$))(?:[\s.:]+(.*)|$)", re.I | re.S
)
_WORDS = re.compile(r"(?:§?[^\W\d_]+[\s.,'’!?-]*)+")
_DOUBT = re.compile(r"\b(?:\w+n['’]t|not?|never|wrong|incorrect|or|maybe|perhaps)\b", re.IGNORECASE)
_REMARK = re.compile(r"(?<=[\w.%])\s+\((?=[^()]*[A-Za-z]{3})[^()\\]*\)|(?<=[a-z])\s(?:for|from)\s\d+\s[a-z]{3,}$")
_SIGNS = str.maketrans(
    dict.fromkeys("−﹣－–‒‐‑", "-") | dict.fromkeys("·⋅∙×✕", "\\cdot ") | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff")
    | dict(zip("÷√，：％＝＋（）\u00a0\u2009\u202f０１２３４５６７８９", ["/", "sqrt ", *",:%=+()   0123456789"], strict=True))
    | dict(zip("∞≤⩽≥⩾≠∈∪∅…°±≈ℝ", r"\infty ,\le ,\le ,\ge ,\ge ,\ne ,\in ,\cup ,\emptyset ,\ldots ,^\circ ,\pm ,\approx ,\reals ".split(",")))
    | {sign: f"^{{{unicodedata.normalize('NFKC', sign)}}}" for sign in "⁰¹²³⁴⁵⁶⁷⁸⁹"}
    | {sign: " " + unicodedata.normalize("NFKC", sign).replace("⁄", "/") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
)  # fmt: skip
# Layout without meaning, in this order; `§` marks an upright word, `\x03` is a dollar.
_LAYOUT: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), written)
    for pattern, written in (
        (r"</?(?:b|strong|i|em|u|br|p|span|code)\b[^<>]*>|~~[^~\n]+~~|`", " "),
        (r"(?<![\w)}\]*])\*\*(?!\s)([^*\n]+?)\*\*(?!\w)", r" \1 "),
        (r"(?<=\d)(?:\{,\}|,?\\[,!]|\\ |~)+(?=\d{3}(?!\d))", ""),
        (r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]ig{1,2}[lrm]?|displaystyle|limits)(?![a-zA-Z])", " "),
        (r"(?<!\\)\\[,;:!> ]|\\q?quad(?![a-zA-Z])|~", " "),
        (
            r"\\(?:math|text)(?:bf|it|sf|tt)\s*\{([^{}]*)\}|\\(?:boldsymbol|bm|emph|boxed|fbox)\s*\{([^{}]*)\}",
            r" \1\2 ",
        ),
        (
            r"(?:\^\s*)?(?:\{\s*)?\\(?:circ|degree)(?![a-zA-Z])(?:\s*\})?|\^\s*\{?\s*\\(?:text|mathrm)\{o\}\s*\}?",
            r"\\degree ",
        ),
        (r"\\degree\s*(?:\\(?:text|mathrm)\{)?([CF])\}?(?![A-Za-z])", r" §deg\1"),
        (
            r"\\(?:text(?:rm|normal)?|mathrm|mbox|operatorname\*?)\s*\{([^{}]*)\}",
            lambda found: f" {re.sub('§?([A-Za-z]+)', lambda word: f'§{word[1]}', found[1])} ",
        ),
        (r"\\mathbb\s*\{?\s*R\s*\}?", r"\\reals "),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\(frac|sqrt)\s*(\d)", r"\\\1{\2}"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\*\*", "^"),
        (r"\\%|(?<=\d)\s+per\s?cent\b", "%"),
        (r"\\\$", "\x03"),
        (r"\bRs\.|\bUS(?=\x03)", "Rs "),
    )
]
# "$118 000", "1 080 000", "10 000", but not "2 100 gram packs": several groups, or one that no number begins with
_BLANK_GROUPS = re.compile(
    r"[$\x03€£]\s?\d{1,3}(?: \d{3})+(?!\d)|(?<![\w.,/^-])(?<!\d )[1-9]\d{0,2}(?:(?: \d{3}){2,}| 0\d\d)(?![\d,/]| \d)"
)
_THOUSANDS = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!,?\d)")
_RATE = (
    r"(?:[kcm]?m|mi|ft|k?g|m?L)\s?/\s?(?:h(?:r|our)?|s(?:ec)?|min|day|[km]?L|[kc]?m|kg)(?:\^\{?[23]\}?)?(?![A-Za-z])"
)
_TOKEN = re.compile(
    r"(?P<gap>\s*)(?:(?P<mixed>(?P<ones>\d+)\s+(?:and\s+)?(?P<over>\d+)\s?/\s?(?P<under>\d+)(?![\d/.]))"
    r"|(?P<based>(?P<digits>\d[\dA-F]*)_(?:(?P<b>\d)|\{\s*§?(?P<base>\d+|two|three|eight|ten)\s*\}))"
    r"|(?P<number>(?=\.?\d)(?P<whole>\d+)?(?:\.(?P<part>\d*)(?=\d|(?<=\d)|\s*\\overline|\s*\\bar))?"
    r"(?:(?<=[\d.])\s*\\(?:overline|bar)\s*\{?\s*(?P<cycle>\d+)\s*\}?|(?<=\d)\s*(?P<dots>\\[lc]?dots(?![a-z])|\.\.\.))?"
    r"(?:(?<=\d)[eE](?P<power>[-+]?\d{1,4})(?![\w.]))?)"
    rf"|(?P<matrix>\\begin\{{[bpvB]?matrix\}}|\\begin\{{array\}}\{{[^{{}}]*\}})|(?P<end>\\end\{{[a-zB]+\}})"
    rf"|(?P<rate>(?<=[\d\s§]){_RATE})"
    rf"|(?P<name>(?:[A-Za-z](?![A-Za-z'])|\\(?:{'|'.join(_NAMES)})(?![A-Za-z]))_(?:\w|\{{\s*§?[A-Za-z0-9+-]+\s*\}}))"
    r"|(?P<word>§?(?:[^\W\d_]{3,}-[a-z]{3,}|[^\W\d_]+(?:['’][a-z]+)?))|(?P<sign>\\[A-Za-z]+|\\.|[^\w\s§]|_))"
)


class Tree(NamedTuple):
    """A part of an answer: its `kind`, and its parts (nodes, or plain values)."""

    kind: str
    parts: tuple[Any, ...]


class _Token(NamedTuple):
    kind: str  # number, name, function, word, sign, matrix; end
    text: str
    gap: bool = False
    node: Tree | None = None


class Unread(Exception):  # noqa: N818  a text is not in the grammar, which is no error
    pass


def number(value: Fraction | int, places: int | None = 0) -> Tree:
    """A number, and how many `places` it has after the point (None: a fraction)."""
    return Tree("number", (Fraction(value), places))


def product(left: Tree | int | Fraction, right: Tree) -> Tree:
    return Tree("*", (left if isinstance(left, Tree) else number(left), right))


@lru_cache(4096)
def read(text: str, letters: bool = False) -> Tree | None:
    """The tree of a whole answer; None where a character of it is left over. `letters`: `5 m` is five metres."""
    if text.isascii() and text.isdigit() and len(text) < _LONGEST:  # by far the most frequent
        return number(int(text))
    if len(text) > _LONGEST or not (plain := layout(text)):
        return None
    if (chosen := _CHOICE.fullmatch(plain)) and (not chosen[3] or read(chosen[3], letters)):
        return Tree("choice", ((chosen[1] or chosen[2]).upper(), read(chosen[3], letters) if chosen[3] else None))
    words = re.findall(r"[^\W_]+", plain)
    if _WORDS.fullmatch(plain) and any(len(word) > 2 and word not in _FUNCTIONS | _NAMES.keys() for word in words):
        return Tree("text", tuple(word.lower() for word in words))
    if letters:
        plain = re.sub(
            r"(?<=[\d\s})])([A-Za-z])(?=(?:\^\{?\d\}?)?$)", r" §\1", re.sub(r"(?<=\d)\s*k$", r"*1000", plain)
        )
    if "\\pm" in plain or "\\mp" in plain:
        both = [
            read(re.sub(r"\\([pm])[pm]", lambda found: "+-"[(found[1] == "p") == minus], plain))
            for minus in (False, True)
        ]
        return Tree("list", tuple(part for part in both if part)) if None not in both else None
    for head in (0, len(_HEAD.match(plain)[0])):  # pyright: ignore[reportOptionalSubscript]
        if not CHANGING.search(plain[:head]) and not any(map(_DOUBT.search, _REMARK.findall(plain[head:]))):
            try:
                return _Parser(_tokens(_REMARK.sub(" ", plain[head:]).strip())).whole()
            except (Unread, ZeroDivisionError, RecursionError):
                continue
    return None


def layout(text: str) -> str:
    """The text without layout that has no meaning."""
    text = text.strip().translate(_SIGNS)
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
    return re.sub(
        r"(?<![\\.])[.,;:。\s]+$", "", re.sub(r"(?<=\d)(?:(?:st|nd|rd|th)\b|-(?=[a-z]{3}))", " ", text)
    ).strip()


def _tokens(text: str) -> list[_Token]:
    found, at = list[_Token](), 0
    while at < len(text):
        matched = _TOKEN.match(text, at)
        if matched is None:
            raise Unread
        kind, said, gap = matched.lastgroup or "", matched[0].strip(), bool(matched["gap"])
        if matched["number"] or matched["mixed"] or matched["based"]:
            value = _mixed(matched) if matched["mixed"] else _based(matched) if matched["based"] else _decimal(matched)
            found.append(_Token("number", said, gap, value))
        elif kind in ("rate", "name", "matrix", "end"):
            found.append(_Token({"rate": "word"}.get(kind, kind), re.sub(r"[\s{}§]", "", said), gap))
        elif kind == "word":
            found += _letters(said.lstrip("§"), gap, said[0] == "§", found[-1].kind if found else "")
        elif said.lstrip("\\") in _FUNCTIONS | _NAMES.keys() and said[0] == "\\":
            name = said[1:]
            found.append(_Token("name" if name in _NAMES else "function", _NAMES.get(name, name), gap))
        else:
            said = _SAME.get(said, said)
            found.append(_Token("word" if said in CURRENCIES else "sign", said, gap))
        at = matched.end()
    return found


def _letters(said: str, gap: bool, upright: bool, before: str) -> list[_Token]:
    """A run of letters: a separator, a function, a word or unit, or variables of a letter each."""
    if said.lower() in ("and", "or"):
        return [_Token("sign", said.lower(), gap)]
    if said in _NAMES and len(said) > 1:
        return [_Token("name", _NAMES[said], gap)]
    if said in _FUNCTIONS and (said not in ("min", "sec") or before != "number"):
        return [_Token("function", said, gap)]
    if len(said) == 1 and unicodedata.name(said, "").startswith("GREEK"):
        return [_Token("name", unicodedata.name(said).split()[-1].lower(), gap)]
    counted = before == "number" and len(said) == 3 and gap  # `18 men`, but `2xyz`
    small = said.lower() in _SMALL and (len(said) > 1 or (gap and before in ("word", "number")))
    if upright or len(said) > 3 or not said.isascii() or counted or small or (len(said) > 1 and known_unit(said)):
        return [_Token("word", said, gap)]
    return [_Token("name", letter, gap and not at) for at, letter in enumerate(said)]


def _mixed(found: re.Match[str]) -> Tree:
    """`2 1/2`."""
    whole, over, under = (int(found[part]) for part in ("ones", "over", "under"))
    if not 0 < over < under:
        raise Unread
    return number(whole + Fraction(over, under), None)


def _based(found: re.Match[str]) -> Tree:
    """`1011_2`: a number and its base."""
    base = int({"two": "2", "three": "3", "eight": "8", "ten": "10"}.get(found["base"], found["b"] or found["base"]))
    if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in found["digits"]):
        raise Unread
    return number(int(found["digits"])) if base == 10 else Tree("based", (int(found["digits"], base), base))


def _decimal(found: re.Match[str]) -> Tree:
    """`1.50`, `1e3`, `0.1\\overline{6}`, `0.666\\ldots`; digits without a cycle in front of dots are cut off."""
    whole, part, cycle, exponent = found["whole"] or "0", found["part"] or "", found["cycle"], int(found["power"] or 0)
    if (found["part"] is None and (cycle or found["dots"])) or abs(exponent) > _EXPONENT:
        raise Unread
    if found["dots"] and (again := re.fullmatch(r"(\d*?)(\d+?)\2+", part)):
        part, cycle = again[1], again[2]
    value = Fraction(int(whole + part), 10 ** len(part))
    if cycle:
        return number(value + Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(part)), None)
    return number(value * Fraction(10) ** exponent, max(0, len(part) - exponent))


class _Parser:
    """One method for each rule of the grammar."""

    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens, self.at, self.bars, self.depth = tokens, 0, 0, 0

    def token(self, ahead: int = 0) -> _Token:
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else _Token("", "")

    def sign(self, *texts: str) -> str:
        """The next sign if it is one of `texts`, which is taken; else ""."""
        if (token := self.token()).kind != "sign" or token.text not in texts:
            return ""
        self.at += 1
        return token.text

    def whole(self) -> Tree:
        found = self.listing()
        if self.token().kind:
            raise Unread
        return found

    def listing(self) -> Tree:
        items, signs = [self.item()], set[str]()
        while sign := self.sign(",", "and", "or", "\\lor"):
            signs.add((self.sign("and", "or") or sign) if sign == "," else sign)  # `1, 2, and 3`
            items.append(self.item())
        return (
            items[0]
            if len(items) == 1
            else Tree(
                "either" if "\\lor" in signs else "or" if "or" in signs and "and" not in signs else "list", tuple(items)
            )
        )

    def item(self) -> Tree:
        _ = self.sign("\\approx", "=")
        words = list[str]()
        while self.token().kind == "word" and self.token().text not in CURRENCIES:
            words.append(self.token().text.lower())
            self.at += 1
        if words and self.token().text not in ("=", ":"):
            return Tree("text", tuple(words))  # `read` accepts words before a value
        parts: list[Any] = [Tree("text", tuple(words)) if words else self.union()]
        while sign := self.sign(*_RELATIONS[: -1 if self.depth else None]):
            parts += [sign, self.union()]
            if sign == ":" and parts[0].kind == "quantity":
                raise Unread
        return parts[0] if len(parts) == 1 else Tree("relation", tuple(parts))

    def union(self) -> Tree:
        found = self.quantity()
        while sign := self.sign("\\cup", "\\setminus"):
            found = Tree("union" if sign == "\\cup" else "setminus", (found, self.quantity()))
        return found

    def quantity(self) -> Tree:
        """A sum with what stands around it: a currency, a scale, a percent sign, a unit, words."""
        minus = self.token().text == "-" and self.token(1).text in CURRENCIES and bool(self.sign("-"))  # `-$3`
        words, scale, value = self.words(CURRENCIES), 1, self.sum()
        value = _signed("-", value) if minus else value
        if (named := self.token().text.lower().removesuffix("s")) in SCALES:
            scale, self.at = SCALES[named], self.at + 1
        words += ["degree"] if value.kind == "degree" else []
        words += self.words()
        if not words and value.kind != "percent" and scale == 1:
            return value
        inner = value.parts[0] if value.kind in ("percent", "degree") else value
        return Tree("quantity", (inner, unit(words), value.kind == "percent", scale))

    def words(self, among: Any = None) -> list[str]:
        """The unit or words here (`among`: these only), up to the next separator."""
        words = list[str]()
        while True:
            token, ahead = self.token(), self.token(1)
            if token.kind == "word" and (among is None or token.text in among):
                words.append(CURRENCIES.get(token.text, token.text))
            elif among is None and token.text in ("/", "-", "*") and ahead.kind == "word" and not token.gap:
                words += [token.text] if token.text == "/" else []
            elif words and token.text == "^":
                power = re.match(r"\^(\{?)(-?[123])", "".join(self.token(ahead).text for ahead in range(4)))
                if power is None:
                    raise Unread
                words.append(f"^{power[2]}")
                self.at += len(power[2]) + 2 * len(power[1])
            else:
                break
            self.at += 1
        if CHANGING.search(" ".join(words)):
            raise Unread
        return words

    def sum(self) -> Tree:
        terms = [_signed(self.sign("-", "+"), self.product())]
        while sign := self.sign("+", "-"):
            terms.append(_signed(sign, self.product()))
        return terms[0] if len(terms) == 1 else Tree("+", tuple(terms))

    def product(self, argument: bool = False) -> Tree:
        """`argument`: of a function, only factors without a sign between them, up to the next function."""
        found, divided = self.power(), False
        while True:
            if not argument and (sign := self.sign("*", "/")):
                found, divided = _product(sign, found, _signed(self.sign("-", "+"), self.power())), sign == "/"
            elif self.juxtaposed() and not (
                argument and self.token().kind == "function" and self.token().text != "sqrt"
            ):
                if divided and not self.token().gap:  # `1/2x` could be read in two ways
                    raise Unread
                found, divided = _product("", found, self.power()), False
            else:
                return found

    def juxtaposed(self) -> bool:
        """Whether the next token begins a factor without a sign before it."""
        kind, text = self.token()[:2]
        bracket = text in ("(", "{", "\\lfloor", "\\lceil") or (text == "|" and not self.bars)
        return kind in ("name", "function") or (kind == "sign" and bracket)

    def power(self) -> Tree:
        found = self.atom()
        while sign := self.sign("!", "%", "^", "\\degree"):
            if sign != "^":
                if sign == "!" and (found.kind in ("^", "factorial") or self.token().text == "!"):
                    raise Unread
                found = Tree({"!": "factorial", "%": "percent"}.get(sign, "degree"), (found,))
            else:
                minus, self.depth = self.sign("-", "+"), self.depth + 1
                if self.depth > _DEPTH:
                    raise Unread
                found = Tree("^", (found, _signed(minus, self.atom() if self.token().text == "{" else self.power())))
                self.depth -= 1
        return found

    def atom(self) -> Tree:
        kind, text, _, node = self.token()
        self.at += 1
        if kind == "number" and node is not None:
            return node
        if kind == "name":
            opaque = text in _OPAQUE and self.token().text == "(" and not self.token().gap
            return Tree("function", (text, self.atom())) if opaque else Tree("name", (text,))
        if kind == "function":
            return self.function(text)
        if kind == "matrix":
            return self.matrix()
        if text not in _CLOSED_BY or self.depth > _DEPTH:
            raise Unread
        return self.bracket(text)

    def bracket(self, opened: str) -> Tree:
        bars, self.bars, self.depth = self.bars, int(opened in ("|", "\\{")), self.depth + 1
        empty = opened == "\\{" and self.token().text == "\\}"
        found = Tree("name", ("empty",)) if empty else self.listing()
        if opened == "\\{" and self.sign("|", ":"):
            found = Tree("such", (found, self.listing()))
        closed = self.sign(*(_CLOSED_BY[opened] if opened in "([" else [_CLOSED_BY[opened]]))
        self.bars, self.depth = bars, self.depth - 1
        items = found.parts if found.kind == "list" else (found,)
        if not closed or found.kind in ("or", "either"):
            raise Unread
        if opened in ("|", "\\lfloor", "\\lceil"):
            return Tree("call", ({"|": "abs"}.get(opened, opened[2:]), found))
        if opened == "\\{" or (opened == "{" and len(items) > 1):
            return found if empty or found.kind == "such" else Tree("set", items)
        if len(items) > 1:
            return Tree("tuple", (opened + closed, *items))
        if opened + closed not in ("()", "{}", "[]"):
            raise Unread
        return found

    def matrix(self) -> Tree:
        rows, row = list[Tree](), [self.item()]
        while self.token().kind != "end":
            if self.sign("and"):
                row.append(self.item())
            elif not self.sign("\\\\"):
                raise Unread
            elif self.token().kind != "end":
                rows, row = [*rows, Tree("row", tuple(row))], [self.item()]
        self.at += 1
        return Tree("matrix", (*rows, Tree("row", tuple(row))))

    def function(self, name: str) -> Tree:
        if name in ("frac", "binom"):
            parts = self.argument(), self.argument()
            return Tree("/", parts) if name == "frac" else Tree("call", (name, *parts))
        if name == "sqrt":
            index = self.atom() if self.token().text == "[" else number(2)
            return Tree("call", ("root", self.atom(), index))
        base, power = (), None
        while sign := self.sign("_", "^"):
            if sign == "_" and name == "log":
                base = (self.atom(),)
            elif sign == "^" and power is None:
                power = _signed(self.sign("-"), self.atom())
            else:
                raise Unread
        name, power = (f"arc{name}", None) if power == number(-1) else (name, power)
        closed = self.token().text in ("(", "{", "|")
        inside = self.atom() if closed else self.product(argument=True)
        several = inside.parts[inside.kind == "tuple" :] if inside.kind in ("tuple", "set") else (inside,)
        if (closed and self.token().text in ("^", "!")) or (len(several) > 1) != (name in ("max", "min", "gcd", "lcm")):
            raise Unread  # `\sin(x)^2` could be read in two ways
        found = Tree("call", (name, *several, *base))
        return Tree("^", (found, power)) if power else found

    def argument(self) -> Tree:
        """An argument in braces, or one letter."""
        if self.token().text != "{" and self.token().kind not in ("name", "function"):
            raise Unread
        return self.atom()


def _signed(sign: str, term: Tree) -> Tree:
    if sign != "-":
        return term
    if term.kind == "number":
        return number(-term.parts[0], term.parts[1])
    return Tree(term.kind, (_signed(sign, term.parts[0]),)) if term.kind in ("percent", "degree") else product(-1, term)


def _product(sign: str, left: Tree, right: Tree) -> Tree:
    """Also `2\\frac{1}{2}`, and `6.02 \\times 10^{23}`, a decimal whose places are those of its digits."""
    if (
        left.kind == "number"
        and left.parts[1] is not None
        and all(getattr(part, "kind", "") == "number" for part in right.parts)
    ):
        (value, places), (over, under) = left.parts, (part.parts[0] for part in (*right.parts, number(0))[:2])
        if not sign and right.kind == "/" and places == 0 and 0 < over < under:
            return number(value + (over / under) * (-1 if value < 0 else 1), None)
        if sign == "*" and right.kind == "^" and over == 10 and under.denominator == 1 and abs(under) <= _EXPONENT:
            return number(value * 10 ** int(under), max(0, places - int(under)))
    return Tree(sign or "*", (left, right))

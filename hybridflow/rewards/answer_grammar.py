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
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from hybridflow.rewards.answer_layout import layout
from hybridflow.rewards.measurement import CHANGING, CURRENCIES, known_unit, unit

_LONGEST, _SHORT, _DEPTH, _EXPONENT = 1000, 40, 30, 2000  # characters; brackets in brackets; of a decimal (`1e300`)
_DEEPEST = 100  # parts in parts of a tree, which is worked out by recursion
_FRACTION = r"(?P<brace>\\[dt]?frac\{)?(?P<over>\d+)(?(brace)\}\{|/)(?P<under>0*[1-9]\d*)(?(brace)\})"
_PLAIN = re.compile(rf"(?P<sign>-?)(?:(?P<whole>\d+)(?:\.(?P<part>\d+))?|{_FRACTION})", re.ASCII)
SCALES = {"hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_CALLED = "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh sqrt exp ln log max min gcd lcm frac binom"
_FUNCTIONS = frozenset(_CALLED.split())
_GREEK = "alpha beta gamma delta epsilon zeta eta theta kappa lambda mu nu xi rho sigma tau phi varphi chi psi omega"
_NAMES = {name: name for name in f"{_GREEK} ell Gamma Delta Theta Lambda Sigma Phi Psi Omega pi infty reals".split()}
_NAMES |= {"infinity": "infty", "oo": "infty", "emptyset": "empty", "varnothing": "empty"}
# The first of each is read for the others.
_ALIASES = (
    r"* \cdot \times \ast  / \div  \le \leq \leqslant  \ge \geq \geqslant  \ne \neq  \lt <  \gt >  \approx \simeq"
)
_ALIASES += (
    r"  \lor \vee  and \land \wedge & ;  | \lvert \rvert \vert \mid  \setminus \backslash  \{ \lbrace  \} \rbrace"
)
_ALIASES += r"  [ \lbrack  ] \rbrack  ( \langle  ) \rangle"
_SAME = {sign: group.split()[0] for group in _ALIASES.split("  ") for sign in group.split()}
_NO_WORDS = {*_FUNCTIONS, *_NAMES, "and"}
_RELATIONS = ("=", "\\lt", "\\gt", "\\le", "\\ge", "\\ne", "\\in", "\\approx", ":")
_CLOSED_BY = {"(": ")]", "[": "])", "\\{": "\\}", "{": "}", "|": "|", "\\lfloor": "\\rfloor", "\\lceil": "\\rceil"}
_OPAQUE = {"f", "g", "F", "G", "P"}  # `f(x)` is a function of x, not a product
_OFTEN = "of per an a at by on in is for the all are was has day her his its it he she we from each"
_SMALL = frozenset(_OFTEN.split())
_HEAD = re.compile(r"(?:§?(?:[A-Za-z][a-z'’-]*[a-z'’]|[aI])(?:[\s,]+|(?=[\x03$€£])))*(?:§?[A-Za-z]{3,}\s*[:=]\s*)?")
_CHOICE = r"(?:§?(?:option|choice)\s+)?(?:\(§?([A-J])\)|§?([A-J])(?:[).]|:(?=\s)|$))(?:[\s.:]+(.*)|$)"
_WORDS = re.compile(r"(?:§?[^\W\d_]++[\s.,'’!?-]*+)++")
_DOUBT = re.compile(r"\b(?:\w+n['’]t|not?|never|wrong|incorrect|or|maybe|perhaps)\b", re.IGNORECASE)
_REMARK = re.compile(r"(?<=[\w.%])\s+\((?=[^()]*[A-Za-z]{3})[^()\\]*\)|(?<=[a-z])\s(?:for|from)\s\d+\s[a-z]{3,}$")
_RATE = r"(?:[kcm]?m|mi|ft|k?g|m?L)\s?/\s?(?:h(?:r|our)?|s(?:ec)?|min|day|[km]?L|[kc]?m|kg)(?:\^\{?[23]\}?)?"
_TOKEN = re.compile(
    rf"""(?P<gap>\s*)(?:
    (?P<mixed>(?P<ones>\d+)\s+(?:and\s+)?(?P<over>\d+)\s?/\s?(?P<under>\d+)(?![\d/.]))
    |(?P<based>(?P<digits>\d[\dA-F]*)_(?:(?P<b>\d)|\{{\s*§?(?P<base>\d+|two|three|eight|ten)\s*\}}))
    |(?P<number>(?=\.?\d)(?P<whole>\d+)?(?:\.(?P<part>\d*)(?=\d|(?<=\d)|\s*\\overline|\s*\\bar))?
      (?:(?<=[\d.])\s*\\(?:overline|bar)\s*(?:\{{\s*(?P<cycle>\d+)\s*\}}|(?P<digit>\d))|(?<=\d)\s*(?P<dots>\\[lc]?dots(?![a-z])|\.\.\.))?
      (?:(?<=\d)[eE](?P<power>[-+]?\d{{1,4}})(?![\w.]))?)
    |(?P<matrix>\\begin\{{[bpvB]?matrix\}}|\\begin\{{array\}}\{{[^{{}}]*\}})|(?P<end>\\end\{{(?:[bpvB]?matrix|array)\}})
    |(?P<rate>(?<=[\d\s§]){_RATE}(?![A-Za-z]))
    |(?P<name>(?:[A-Za-z](?![A-Za-z'])|\\(?:{"|".join(_NAMES)})(?![A-Za-z]))_(?:\w|\{{\s*§?[A-Za-z0-9+-]+\s*\}}))
    |(?P<word>§?(?:[^\W\d_]{{3,}}-[a-z]{{3,}}|[^\W\d_]+(?:['’][a-z]+)?))|(?P<sign>\\[A-Za-z]+|\\.|[^\w\s§]|_))""",
    re.VERBOSE,
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
    return right if left == 1 else Tree("*", (left if isinstance(left, Tree) else number(left), right))


@lru_cache(4096)
def read(text: str, letters: bool = False) -> Tree | None:
    """The tree of a whole answer; None where a character of it is left over. `letters`: `5 m` is five metres."""
    if len(text) < _SHORT and (plain := _PLAIN.fullmatch(text)):  # by far the most frequent
        value = Fraction(int(plain["over"] or plain["whole"] + (plain["part"] or "")), int(plain["under"] or 1))
        places = len(plain["part"] or "") if plain["over"] is None else None
        return number(value / 10 ** (places or 0) * (-1 if plain["sign"] else 1), places)
    if len(text) > _LONGEST or not (plain := layout(text)):
        return None
    if chosen := re.fullmatch(_CHOICE, plain, re.IGNORECASE | re.DOTALL):
        if chosen[3] and re.fullmatch(_CHOICE, chosen[3], re.IGNORECASE | re.DOTALL):  # `(A) (B) 18`
            return None
        behind = read(chosen[3], letters) if chosen[3] else None
        if behind or not chosen[3]:
            return Tree("choice", ((chosen[1] or chosen[2]).upper(), behind))
    words = re.findall(r"[^\W_]+", plain)
    if _WORDS.fullmatch(plain) and any(len(word) > 2 and word.lower() not in _NO_WORDS for word in words):
        return Tree("text", tuple(word.lower() for word in words))
    if letters:
        plain = re.sub(r"(?<=\d)\s*k$", r"*1000", plain)
        plain = re.sub(r"(?<=[\d\s})])([A-Za-z])(?=(?:\^\{?\d\}?)?$)", r" §\1", plain)
    if "\\pm" in plain or "\\mp" in plain:
        written = [plain.replace("\\pm", plus).replace("\\mp", minus) for plus, minus in ("+-", "-+")]
        both = [part for part in map(read, written) if part]
        return Tree("list", tuple(both)) if len(both) == 2 else None
    for head in ("", (_HEAD.match(plain) or [""])[0]):
        rest = plain[len(head) :]
        if not CHANGING.search(head) and not any(map(_DOUBT.search, _REMARK.findall(rest))):
            with suppress(Unread, ZeroDivisionError, RecursionError):
                parser = _Parser(_tokens(_REMARK.sub(" ", rest).strip()))
                found = parser.listing()
                if not parser.token().kind and _depth(found) <= _DEEPEST:
                    return found
    return None


def _depth(tree: Tree) -> int:
    return 1 + max((_depth(part) for part in tree.parts if isinstance(part, Tree)), default=0)


def _tokens(text: str) -> list[_Token]:
    found, at = list[_Token](), 0
    while at < len(text):
        matched = _TOKEN.match(text, at)
        if matched is None:
            raise Unread
        kind, said, gap = matched.lastgroup or "", matched[0].strip(), bool(matched["gap"])
        if value := _number(matched):
            found.append(_Token("number", said, gap, value))
        elif kind in ("rate", "name", "matrix", "end"):
            found.append(_Token({"rate": "word"}.get(kind, kind), re.sub(r"[\s{}§]", "", said), gap))
        elif kind == "word":
            found += _letters(said.lstrip("§"), gap, said[0] == "§", found[-1].kind if found else "")
        elif (name := said[1:]) in _FUNCTIONS | _NAMES.keys() and said[0] == "\\":
            found.append(_Token("name" if name in _NAMES else "function", _NAMES.get(name, name), gap))
        else:
            found.append(_Token("word" if said in CURRENCIES else "sign", _SAME.get(said, said), gap))
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


def _number(found: re.Match[str]) -> Tree | None:
    """`2 1/2`, `1011_2`, `1.50`, `1e3`, `0.1\\overline{6}`, `0.666\\ldots`; None for a token that is no number.

    Digits without a cycle in front of dots are cut off.
    """
    if found["mixed"]:
        whole, over, under = (int(found[part]) for part in ("ones", "over", "under"))
        if not 0 < over < under:
            raise Unread
        return number(whole + Fraction(over, under), None)
    if found["based"]:
        base = int({"two": 2, "three": 3, "eight": 8, "ten": 10}.get(found["base"], found["b"] or found["base"]))
        if not 2 <= base <= 16 or any(int(digit, 16) >= base for digit in found["digits"]):
            raise Unread
        return number(int(found["digits"])) if base == 10 else Tree("based", (int(found["digits"], base), base))
    if not found["number"]:
        return None
    part, cycle, exponent = found["part"] or "", found["cycle"] or found["digit"], int(found["power"] or 0)
    if (found["part"] is None and (cycle or found["dots"])) or abs(exponent) > _EXPONENT:
        raise Unread
    if found["dots"] and (again := re.fullmatch(r"(\d*?)(\d+?)\2+", part)):
        part, cycle = again[1], again[2]
    value = Fraction(int((found["whole"] or "0") + part), 10 ** len(part))
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

    def listing(self) -> Tree:
        items, signs = [self.item()], set[str]()
        while sign := self.sign(",", "and", "or", "\\lor"):
            signs.add((self.sign("and", "or") or sign) if sign == "," else sign)  # `1, 2, and 3`
            items.append(self.item())
        kind = "either" if "\\lor" in signs else "or" if "or" in signs and "and" not in signs else "list"
        return Tree(kind, tuple(items)) if signs else items[0]

    def item(self) -> Tree:
        _ = self.at == 0 and self.sign("\\approx", "=")
        words = [word.lower() for word in self.words(lambda word: word not in CURRENCIES)]
        if words and self.token().text not in ("=", ":"):
            choice = len(words) == 1 == len(words[0])  # `\\text{A} and \\text{C}`
            return Tree("name", (words[0].upper(),)) if choice else Tree("text", tuple(words))
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
        minus = self.token().text == "-" and self.token(1).text in CURRENCIES and self.sign("-")  # `-$3`
        before, value = self.words(CURRENCIES.__contains__), _signed(minus or "", self.sum())
        scale = SCALES.get(self.token().text.lower().removesuffix("s"), 1)
        self.at += scale > 1
        words = [*before, *(["degree"] if value.kind == "degree" else []), *self.unit()]
        if not words and value.kind != "percent" and scale == 1:
            return value
        inner = value.parts[0] if value.kind in ("percent", "degree") else value
        return Tree("quantity", (inner, unit(words), value.kind == "percent", scale))

    def words(self, wanted: Callable[[str], bool]) -> list[str]:
        """The `wanted` words here, up to the first other."""
        start = self.at
        while self.token().kind == "word" and wanted(self.token().text):
            self.at += 1
        return [CURRENCIES.get(token.text, token.text) for token in self.tokens[start : self.at]]

    def unit(self) -> list[str]:
        """The unit or words here, up to the next separator."""
        words = self.words(bool)
        while True:
            if self.token(1).kind == "word" and not self.token().gap and (sign := self.sign("/", "-", "*")):
                words += [*(["/"] if sign == "/" else []), *self.words(bool)]
            elif words and self.sign("^"):
                braces = self.sign("{")
                minus, power = braces and self.sign("-"), self.token().text
                self.at += 1
                if power not in ("1", "2", "3") or (braces and not self.sign("}")):
                    raise Unread
                words += [f"^{minus}{power}", *self.words(bool)]
            elif CHANGING.search(" ".join(words)):
                raise Unread
            else:
                return words

    def sum(self) -> Tree:
        terms = [_signed(self.sign("-", "+"), self.product())]
        while self.token(1).kind != "word" and (sign := self.sign("+", "-")):  # `18-inch`
            terms.append(_signed(sign, self.product()))
        return terms[0] if len(terms) == 1 else Tree("+", tuple(terms))

    def product(self, argument: bool = False) -> Tree:
        """`argument`: of a function, only factors without a sign between them, up to the next function."""
        found, divided = self.power(), False
        while True:
            if not argument and (sign := self.sign("*", "/")):
                found, divided = _product(sign, found, _signed(self.sign("-", "+"), self.power())), sign == "/"
            elif self.juxtaposed(argument):
                if divided and not self.token().gap:  # `1/2x` could be read in two ways
                    raise Unread
                sign = "" if self.token().text == "frac" else "*"
                found, divided = _product(sign, found, self.power(), juxtaposed=True), False
            else:
                return found

    def juxtaposed(self, argument: bool) -> bool:
        """Whether the next token begins a factor without a sign before it."""
        kind, text = self.token()[:2]
        if kind == "function":
            return not argument or text == "sqrt"
        if kind == "number":  # `5!5!`
            return not argument and self.token(-1).text == "!"
        bracket = text in ("(", "{", "\\lfloor", "\\lceil") or (text == "|" and not self.bars)
        return kind == "name" or (kind == "sign" and bracket)

    def power(self) -> Tree:
        found = self.atom()
        while sign := self.sign("!", "%", "^", "\\degree"):
            if sign == "^":
                minus, self.depth = self.sign("-", "+"), self.depth + 1
                if self.depth > _DEPTH:
                    raise Unread
                found = Tree("^", (found, _signed(minus, self.atom() if self.token().text == "{" else self.power())))
                self.depth -= 1
            elif sign == "!":
                if found.kind == "^" or found.parts[0] == "factorial" or self.token().text == "!":
                    raise Unread
                found = Tree("call", ("factorial", found))
            else:
                found = Tree("percent" if sign == "%" else "degree", (found,))
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
        rows = [self.listing()]
        while self.sign("\\\\") and self.token().kind != "end":
            rows.append(self.listing())
        if self.token().kind != "end" or any(row.kind in ("or", "either") for row in rows):
            raise Unread
        self.at += 1
        return Tree("matrix", tuple(Tree("row", row.parts if row.kind == "list" else (row,)) for row in rows))

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


def _product(sign: str, left: Tree, right: Tree, juxtaposed: bool = False) -> Tree:
    """Also `2\\frac{1}{2}`, and `6.02 \\times 10^{23}`, a decimal whose places are those of its digits."""
    if not sign and right.kind in ("percent", "degree"):  # `14\\frac{2}{7}\\%`
        return Tree(right.kind, (_product(sign, left, right.parts[0]),))
    parts = [part.parts for part in (left, *right.parts) if isinstance(part, Tree) and part.kind == "number"]
    if len(parts) == 3 == 1 + len(right.parts) and parts[0][1] is not None:
        (value, places), (over, _), (under, _) = parts
        if not sign and right.kind == "/" and places == 0 and 0 < over < under:
            return number(value + (over / under) * (-1 if value < 0 else 1), None)
        if (
            sign == "*"
            and not juxtaposed
            and right.kind == "^"
            and over == 10
            and under.denominator == 1
            and abs(under) <= _EXPONENT
        ):
            return number(value * Fraction(10) ** int(under), max(0, places - int(under)))
    return Tree(sign or "*", (left, right))

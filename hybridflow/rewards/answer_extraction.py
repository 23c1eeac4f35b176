"""Answer extraction: the final answer of a worked solution, found by its mark without the reference.

Pure. The first kind of mark found counts, and its last occurrence: `#### 18` (GSM8K), `<answer>18</answer>`,
`\\boxed{18}` and "the answer is 18" (or "Answer: 18"). Without a mark, a number is the last one of the text, anything
else its last line. Of alternatives ("18 or 17") the first counts, unless several answers are asked for; "18 and 17" is
a list, not a number. Thoughts (`<think>`) and text behind the end of the answer are left out: see `own_words`. A
solution with GSM8K's calculator annotations (`<<9*2=18>>`) but no mark was cut short, and has no answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridflow.data.tokenizer import THOUGHTS
from hybridflow.rewards.number import Number, find_numbers, parse_number, plain

_HEAD, _TAIL = 4_000, 16_000  # characters of a longer text that are read
# Text that repeats itself must not take long: this many occurrences of a mark are read, and characters of a line.
_OCCURRENCES, _LINE = 20, 2000

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_END = re.compile(
    r"(?<=\S)\s*(?:<\|(?:endoftext|im_end|eot_id|end_of_text|end|eom_id|im_start)\|>|</s>|<end_of_turn>|<eos>|\[INST\]"
    r"|<｜end▁of▁sentence｜>)"
)
_NEXT_PROBLEM = re.compile(
    r"(?<=\d)[^\d\n]*\n[\s#*]*(?:question|problem|exercise|instruction|q|user|human)\b(?:[ \d*]*:|[ *\d]*$)",
    re.IGNORECASE | re.MULTILINE,
)

_HASHES = re.compile(r"#{4,}[ \t]*([^\n#]*)")
_HEADING = re.compile(r"[\s*_]*(?:step|part)?\s*\d{1,2}[.):]\s*\**[^\W\d]", re.IGNORECASE)
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.IGNORECASE | re.DOTALL)
_BOX = re.compile(r"(?:(?:(?<!\\)\\+b|\x08)oxed|(?<!\\)\\+fbox)[ \t]*(?=\{)")
_BARE_BOX = re.compile(r"(?<!\\)\\+boxed[ \t]*(\d+)")
_BRACE = re.compile(r"(?<!\\)[{}]")
_GAP = r"[\s*_`\">]{0,9}"
_STATED = re.compile(
    rf"\b(?:answer|final (?:result|value))\b[^.\n:=\d]{{0,60}}?(?P<certain>\b(?:is|are|was|equals)\b){_GAP}:?"
    rf"|(?P<final>\b(?:final|correct) )?\b(?:answer|ans|a|result)\b{_GAP}(?:[:：=]|(?<=[*_r])$)|答案(?:是|为|：|:)",
    re.IGNORECASE | re.MULTILINE,
)
_LABEL = re.compile(rf"{_GAP}(?:the )?(?:final )?(?:answer|ans)\b(?: is\b)?{_GAP}:?{_GAP}", re.IGNORECASE)

_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_GLUE = r"(?:[\s$.,;(){}*~]|\\[()\[\],;: ]|\\q?quad|\\text(?=\{))*"
_OR = re.compile(rf"{_GLUE}(?:\\lor|or)\b[^\n.!?]{{0,30}}", re.IGNORECASE)
_AND = re.compile(rf"{_GLUE}(?:and\b|&)?{_GLUE}(?:[a-z](?:_?\d|')?\s*=\s*)?{_GLUE}", re.IGNORECASE)
_ALTERNATIVE = re.compile(r"\\text\s?\{\s?,?\s?or\s?\}|(?<![\w\\])or(?!\w)", re.IGNORECASE)
_RELATION = re.compile(r"[<>≤≥≠]|\\(?:[lg]eq?|neq?|in|subset)(?![a-z])", re.IGNORECASE)
_SOLVED = re.compile(r"[\s$({]*([a-z])\s*=[^=]*", re.IGNORECASE)
_LISTED = re.compile(r"\d[\s$*]*(?:[;&]|,\s|\band\b)[\s$*]*(?:[a-z]\s*=\s*)?-?\d", re.IGNORECASE)
_EXPRESSION = re.compile(r"[\\^_√π{}<>|!+*×/=]|\d\s*[-(]|\(\s*[^\s\w]?\d")
_BOLD = re.compile(r"\*\*([^*\n]+?)(?<!:)\*\*(?!\s*:)")
_FILLER = re.compile(
    r"(?:[\s*_:>=≈~\"'(]+|(?:about|approximately|around|roughly|exactly|only|just|USD|Rs\.?|[xyn]\s*="
    r"|(?:option\s+)?\(?[A-E][).:](?=\s*[\d$\\-]))\s*)+",
    re.IGNORECASE,
)
_OPERATOR = re.compile(r"\s*(?:[-+*×/÷·^–]|x(?=\s*\d)|to\s+(?=\d))\s*[\d(√\\]|!?(?:\s*[\\^√π]|\()\S|\s+\(\s*[\d√\\]")


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The answer of a solution: its `text`, and the `number` that it is or states (None: an expression, words).

    `whole` is the text with the alternatives that were left out, where there are any.
    """

    text: str
    number: Number | None
    whole: str | None = None


def reference_answer(text: str) -> str:
    """The answer of a reference: behind its last `####`, in its last `\\boxed{}`, or the text as it stands."""
    text = _clipped(text)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxes = _boxes(text)
    return boxes[-1].content if boxes else text


def final_answer(solution: str, *, numeric: bool, several: bool = False) -> FinalAnswer | None:
    """The final answer of `solution`, or None; `numeric`: a number is asked for, `several`: a list.

    It does not depend on the right answer, so nothing is gained by naming several.
    """
    text = own_words(solution)
    stated = _hashes(text, numeric) or _tagged(text, numeric) or _boxed(text, numeric) or _statement(text, numeric)
    if stated is None and not (_ANNOTATION.search(text) or THOUGHTS.search(text) or text.rstrip().endswith("####")):
        stated = _unmarked(text, numeric)
    if stated is None or numeric or not (others := _alternatives(stated.text)[1:]):
        return stated
    first = _alternatives(stated.text)[0]
    said = ", ".join([first, *others]) if several else first
    return FinalAnswer(said, parse_number(said), stated.text)


def own_words(text: str) -> str:
    """The answer alone: of a long text its beginning and its end.

    Closed thoughts are left out, unless they are all there is, and so is everything behind open ones. The answer ends
    at an end token, at "Question:" or another such label, and at a `#### 18` behind which a question or an annotated
    calculation follows.
    """
    text = text.replace("\x0crac", "\\frac").replace("\r\n", "\n").replace("\r", "\n")
    closed, before, opened = thoughts(text)
    said = text[closed:opened]
    text = _clipped(said if opened is not None or not closed or said.strip() else text[:before])
    for end in (_END.search(text), _NEXT_PROBLEM.search(text)):
        text = text if end is None else text[: end.start()]
    last = max(text.rfind("?"), text.rfind("<<"))
    ended = (found.end() for found in _HASHES.finditer(text) if found.end() < last and parse_number(found[1]))
    return text[: next(ended, len(text))]


def _clipped(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n{text[-_TAIL:]}"


def thoughts(text: str) -> tuple[int, int, int | None]:
    """Where the last closed thoughts end, where their closing tag begins, and where thoughts begin that never end."""
    closed, before, opened = 0, 0, None
    for tag in THOUGHTS.finditer(text):
        if tag["end"] or tag["over"]:
            closed, before, opened = tag.end(), tag.start(), None
        elif opened is None:
            opened = tag.start()
    return closed, before, opened


def _last(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """The last occurrences of a mark, the very last one first."""
    return list(pattern.finditer(text))[: -_OCCURRENCES - 1 : -1]


def _hashes(text: str, numeric: bool) -> FinalAnswer | None:
    """The text behind `####`; a line followed by other text counts only if it begins with an answer."""
    for found in _last(_HASHES, text):
        line, rest = found[1].strip()[:_LINE], text[found.end() :].strip()
        if rest and _HEADING.match(line):
            continue
        if not (said := _LABEL.sub("", line, count=1)):
            said, _, rest = rest.partition("\n")
        said = _ANNOTATION.sub("", said)
        if (box := _boxed(said, numeric)) and (box.number or not numeric):
            return box
        if not numeric:
            if said and not rest:
                return FinalAnswer(_mathematics(said), parse_number(said))
            continue
        number = _leading(said) if rest else _number_in(said)
        if number is not None and not _LISTED.search(said):
            return FinalAnswer(said, number)
        if re.search(r"\d", said) and not re.search(r"[A-Za-z]{4}", plain(said)):
            return FinalAnswer(said, None)
    return None


def _tagged(text: str, numeric: bool) -> FinalAnswer | None:
    for found in _last(_TAG, text):
        if content := found[1].strip()[-_LINE:]:
            number = _number_in(content) if numeric else parse_number(content)
            inner = _boxed(content, numeric) or _statement(content, numeric)
            return inner or FinalAnswer(_mathematics(content), number)
    return None


@dataclass(frozen=True, slots=True)
class _Box:
    """A `\\boxed{}` in `text`; its content is copied when it is asked for, since boxes may stand in each other."""

    start: int
    end: int
    text: str
    inside: slice

    @property
    def content(self) -> str:
        return self.text[self.inside].strip()


def _boxes(text: str) -> list[_Box]:
    """Every complete `\\boxed{}`, braces within it matched, in order of their starts."""
    found = [_Box(box.start(), box.end(), text, slice(*box.span(1))) for box in _BARE_BOX.finditer(text)]
    starts = {box.end(): box.start() for box in _BOX.finditer(text)}
    opened: list[int] = []
    for brace in _BRACE.finditer(text) if starts else ():
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (inside := opened.pop()) in starts:
            found.append(_Box(starts[inside], brace.end(), text, slice(inside + 1, brace.start())))
    return sorted(found, key=lambda box: box.start)


def _boxed(text: str, numeric: bool) -> FinalAnswer | None:
    """The last box, with those that are joined to it by "or", "and" or a comma."""
    boxes = _boxes(text)
    while boxes and not boxes[-1].content:
        _ = boxes.pop()
    if not boxes:
        return None
    right = boxes.pop()
    said = right.content[:_LINE]
    for left in boxes[: -_OCCURRENCES - 1 : -1]:
        between = text[left.end : right.start] if 0 <= right.start - left.end <= 60 else "none"
        joined = " or " if _OR.fullmatch(between) else ", " if "\n\n" not in between and _AND.fullmatch(between) else ""
        if not joined:
            break
        if joined == " or " or left.content[:_LINE] != said:
            said = f"{left.content[:_LINE]}{joined}{said}"
        right = left
    return FinalAnswer(said, _boxed_number(said) if numeric else parse_number(said))


def _boxed_number(content: str) -> Number | None:
    """The number of a box: all of it, behind its "=", or the only one in its words; an expression or list has none."""
    content = _alternatives(content)[0]
    if (number := parse_number(content)) is None and not _LISTED.search(content):
        *before, result = re.split("[=≈]", content)
        words = plain(content)
        if before:
            number = parse_number(result)
        if number is None and re.search(r"[A-Za-z]{3}", words) and not _EXPRESSION.search(words):
            number = _only(words)
    return number


def _statement(text: str, numeric: bool) -> FinalAnswer | None:
    """The last "the answer is ..." or "Answer: ..." that says one; "Answer:" may also stand before a whole solution."""
    text = _ANNOTATION.sub("", text)
    for found in _last(_STATED, text):
        said = re.sub(r"^(?:[\s*_`:：>\"]|\\\[|\$\$(?=\s))+", "", text[found.end() : found.end() + 5 * _LINE])
        line, _, rest = said.partition("\n")
        first, *others = re.split(r"(?<=[.!?。])[*_]*(?:\s+(?=[\"'(*_]*[A-Z\d$\\])|(?<=。))", line[:_LINE])
        if not (first := first.strip()):
            continue
        certain = found["certain"] or found["final"] or not re.search(r"\d", "".join(others) + rest)
        certain = certain or re.match(r"\s*explanation", rest, re.IGNORECASE)
        if not numeric:
            if certain or not rest.strip():
                return FinalAnswer(_mathematics(first), parse_number(first))
            continue
        number = parse_number(first)
        if number is None and certain:
            if (formula := _FORMULA.match(first)) and _leading(first) is None:
                content = (formula[1] or formula[2] or formula[3]).strip()
                return FinalAnswer(content, _boxed_number(content))
            number = _number_in(first)
        if number is not None:
            return FinalAnswer(first, number)
    return None


def _unmarked(text: str, numeric: bool) -> FinalAnswer | None:
    lines = [line[-_LINE:] for line in text.split("\n") if line.strip(" \t*_`$#\\[]().-=~")]
    if not numeric:
        return FinalAnswer(_mathematics(lines[-1]), parse_number(lines[-1])) if lines else None
    for line in reversed(lines[-_OCCURRENCES:]):
        if found := find_numbers(plain(line)):
            return FinalAnswer(line, parse_number(line) or _bold(line) or found[-1].number)
    return None


def _alternatives(words: str) -> list[str]:
    """The parts between "or": `3` and `4` of `3 or 4`, `x = 3` and `x = 4` of `x = 3 or x = 4`.

    A disjunction, such as `x < 1 or x > 2` and `x = 0 or y = 0`, is one part.
    """
    parts = [part.strip(" ,") for part in _ALTERNATIVE.split(words)]
    parts = [part for part in parts if part]
    if len(parts) < 2 or any(_RELATION.search(part) or part.count("{") != part.count("}") for part in parts):
        return [words]
    solved = [_SOLVED.fullmatch(part) for part in parts]
    of_one = len({found[1] if found else "" for found in solved}) == 1
    return parts if of_one or not any("=" in part for part in parts[1:]) else [words]


def _number_in(words: str) -> Number | None:
    """The number of a line that gives an answer: all of it, behind "=", at its beginning, or its only one."""
    words, *others = _alternatives(words)
    words = words.rpartition("=")[2] if others else words
    if (number := parse_number(words)) is not None or _LISTED.search(words):
        return number
    sign = max(words.rfind("="), words.rfind("≈"))
    result = _leading(words[sign + 1 :]) if sign >= 0 else None
    return _bold(words[sign + 1 :]) or result or _leading(words) or _only(words)


def _bold(words: str) -> Number | None:
    """The last part in bold, where it is a number."""
    bold = _BOLD.findall(words)
    return parse_number(bold[-1]) if bold else None


def _leading(words: str) -> Number | None:
    """The number at the beginning, behind "about" and currency, unless it is the first of an expression."""
    text = plain(words)
    filler = _FILLER.match(text)
    text = re.sub(r"^([-+])\s+(?=[\d.])", r"\1", text[filler.end() if filler else 0 :])
    found = find_numbers(text[:200])
    if not found or found[0].start != 0 or _OPERATOR.match(text[found[0].end :]):
        return None
    return found[0].number


def _only(words: str) -> Number | None:
    found = find_numbers(re.sub(r"\s\([^()]*\)", "", plain(words)))
    return found[0].number if len({written.number for written in found}) == 1 else None


def _mathematics(text: str) -> str:
    """The formula in a line of text where it has one, else the line without punctuation at its end."""
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return text.strip().strip("*`").rstrip(" .,;").strip("*`").strip()
    told = [formulas.pop()]
    while formulas and _OR.fullmatch(text, formulas[-1].end(), told[0].start()):
        told.insert(0, formulas.pop())
    return " or ".join((formula[1] or formula[2] or formula[3]).strip() for formula in told)

"""The final answer of a worked solution: behind its mark, whatever the right answer is. Pure.

The first mark that is found counts, and of its occurrences the last: `#### 18` (GSM8K), `<answer>18</answer>`,
`\\boxed{18}` and "the answer is 18" (or "Answer: 18"). Without a mark, a number is the last one of the text, anything
else its last line. Of alternatives ("18 or 17") the first counts, unless several answers are asked for; "18 and 17" is
a list, not a number. Thoughts (`<think>`) and text behind the end of the answer are left out: see `own_words`. A
solution with GSM8K's calculator annotations (`<<9*2=18>>`) but no mark was cut short, and has no answer.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from hybridflow.rewards.number import Number, find_numbers, parse_number, plain, spelt_numbers

_HEAD, _TAIL = 4_000, 16_000  # characters of a longer text that are read
# Text that repeats itself must not take long: this many occurrences of a mark are read, and characters of a line.
_OCCURRENCES, _LINE = 20, 2000

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_THOUGHTS = re.compile(
    r"<(?P<end>/?)(?:think(?:ing)?|thoughts?|reasoning)\s{0,9}>|<\|(?:begin|(?P<over>end))_of_thought\|>", re.IGNORECASE
)
_END_TOKEN = re.compile(
    r"<\|(?:endoftext|im_end|eot_id|end_of_text|end|eom_id|im_start)\|>|</s>|<end_of_turn>|<eos>|\[EOS\]|\[INST\]"
    r"|<｜end▁of▁sentence｜>"
)
_NEXT_PROBLEM = re.compile(
    r"^[ \t#*]*(?:(?:new |next )?(?:question|problem|exercise|instruction|input|user|human)\b(?:[ \t]*\d+)?|Q)"
    r"[ \t]*\**:|^#{1,6}[ \t]*(?:question|problem|exercise|instruction)(?:[ \t]*\d+)?[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_SECOND_THOUGHTS = re.compile(
    r"\W*(?:(?:but|however|no|oh|so)\b\W*)*(?:wait\b|actually\b|correction\b|sorry\b|hmm|oops|let me\b|let[’']?s\b)"
    r"|.{0,60}\b(?:re-?comput|let me check|(?:i|is|made)\b.{0,12}\b(?:mistake|error)\b"
    r"|(?:answer|result|above|that|it)\b.{0,20}\b(?:wrong|incorrect)\b)",
    re.IGNORECASE,
)
_BULLET = re.compile(r"\s*(?:[-*•+]\s+|\(?\d{1,2}[.)]\s+)?(?:[*_#\s]*step\s+\d+\b)?", re.IGNORECASE)

_HASHES = re.compile(r"#{4,}[ \t]*([^\n#]*)")
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.IGNORECASE | re.DOTALL)
_BOX = re.compile(r"(?:(?:(?<!\\)\\+b|\x08)oxed|(?<!\\)\\+fbox)[ \t]*(?=\{)")
_BARE_BOX = re.compile(r"(?<!\\)\\+boxed[ \t]*(\d+)")
_BRACE = re.compile(r"(?<!\\)[{}]")
_MARKS = r"[\s*_`\"]{0,9}"
_ASIDE = rf"(?:\([^)\n]{{0,60}}\){_MARKS})?"
_IS = re.compile(
    rf"\b(?:answer|final (?:result|value)s?)\b(?:\s+(?:to|for|of)\b[^.\n:=]{{0,100}}?)?{_MARKS}{_ASIDE}"
    rf"(?:\b(?:is|are|was|equals?|(?:would|should|will|must) be)\b|=|→){_MARKS}:?"
    rf"|\b(?:final|correct) (?:answer|result){_MARKS}{_ASIDE}(?::|：|$)|答案\s*(?:是|为|:|：){_MARKS}[:：]?",
    re.IGNORECASE | re.MULTILINE,
)
_LABEL = re.compile(
    rf"(?:^[ \t>#*_-]*|(?<=[\s*(\"]))(?:answer|ans){_MARKS}{_ASIDE}(?::|：|(?<=[a-z*_])[*_]{{0,9}}\s{{0,9}}$)"
    rf"|^[ \t*_]{{0,9}}A{_MARKS}:",
    re.IGNORECASE | re.MULTILINE,
)
_LABEL_OF_LINE = re.compile(
    r"[*_\s]*(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|[*_\s]*:|[*_\s]*$)[*_\s:]*", re.IGNORECASE
)
_CONCLUSION = re.compile(
    r"[\s*_]*(?:(?:the|my|our|final|overall)\s+)*"
    r"(?:answers?|results?|conclusion|total is|therefore|thus|so|hence|finally|in (?:total|all))\b",
    re.IGNORECASE,
)
_NUMBERED_HEADING = re.compile(r"[\s*_]*(?:step|part)?\s*\d{1,2}[.):]\s*\**[^\W\d]", re.IGNORECASE)

_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_GLUE = r"(?:[\s$.,;(){}*~]|\\[()\[\],;: ]|\\q?quad|\\text(?=\{))*"
_OR = re.compile(rf"{_GLUE}(?:\\lor|or)\b[^\n.!?]{{0,30}}", re.IGNORECASE)
_AND = re.compile(
    rf"(?=.*?(?:,|;|&|\band\b)){_GLUE}(?:and\b|&)?{_GLUE}(?:[a-z](?:_?\d|')?\s*=\s*)?{_GLUE}", re.I | re.S
)
_BETWEEN_BOXES = re.compile(r"[\s$.,;()]*(?:\\[()\[\]]|and|or|\$|,|\\text\{\s*(?:and|or)\s*\})*[^\n]{0,12}")
_ALTERNATIVE = re.compile(r"\\text\s?\{\s?,?\s?or\s?\}|(?<![\w\\])or(?!\w)", re.IGNORECASE)
_RELATION = re.compile(r"[<>≤≥≠]|\\(?:[lg]eq?|neq?|in|subset)(?![a-z])", re.IGNORECASE)
_SOLVED = re.compile(r"[\s$({]*([a-z])\s*=[^=]*", re.IGNORECASE)
_LIST = re.compile(r"[\s$*]*-?\d+(?:\.\d+)?[\s$*]*(?:(?:,|;|&|,?\s?and)[\s$*]+-?\d+(?:\.\d+)?[\s$*.]*)+", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*\n]+?)(?<!:)\*\*(?!\s*:)")
_FILLER = re.compile(
    r"(?:[\s*_:>=≈~\"'(]+|(?:about|approximately|approx\.|around|roughly|exactly|only|just|thus|therefore|a total of"
    r"|USD|Rs\.?|[xyn]\s*=|(?:option\s+)?\(?[A-E][).:](?=\s*[\d$\\-]))\s*)+",
    re.IGNORECASE,
)
_OPERATOR = re.compile(r"\s*(?:[-+*×/÷·^–]|x(?=\s*\d)|to\s+(?=\d))\s*[\d(√\\]|!?(?:\s*[\\^√π]|\()\S|\s+\(\s*[\d√\\]")
_ROUNDED = re.compile(r"(?:\bso\b|\bround\w*(?: up| down| off)? to|≈|\babout)[^\d.]*(\d[\d,]*)(?![\d,]|\.\d)")


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
    return boxes[-1].content.strip() if boxes else text


def final_answer(solution: str, *, numeric: bool, several: bool = False) -> FinalAnswer | None:
    """The final answer of `solution`, or None; `numeric`: a number is asked for, `several`: a list.

    It does not depend on the right answer, so nothing is gained by naming several.
    """
    text = own_words(solution)
    stated = _hashes(text, numeric) or _tagged(text, numeric) or _boxed(text, numeric) or _statement(text, numeric)
    if stated is None and not (_ANNOTATION.search(text) or _THOUGHTS.search(text) or text.rstrip().endswith("####")):
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
    calculation follows, unless it is followed by second thoughts ("Wait, ...").
    """
    text = text.replace("\x0crac", "\\frac").replace("\r\n", "\n").replace("\r", "\n")
    text = _clipped(_without_thoughts(text))
    for end in _END_TOKEN.finditer(text):
        if text[: end.start()].strip():
            text = text[: end.start()]
            break
    bullet = _BULLET.match(text)
    begun = re.compile(r"\d").search(text, bullet.end() if bullet else 0)
    for start in _NEXT_PROBLEM.finditer(text):
        if begun is not None and start.start() > begun.start():
            text = text[: start.start()]
            break
    last = max(text.rfind("?"), text.rfind("<<"))
    for found, following in itertools.pairwise([*_HASHES.finditer(text), None]):
        if found is None or found.end() > last:
            break
        end = min(len(text) if following is None else following.start(), found.end() + 400)
        behind = [part for part in re.split(r"(?<=[.!?:])\s+|\n+", text[found.end() : end]) if part.strip()][:2]
        if parse_number(found[1]) is not None and not any(map(_SECOND_THOUGHTS.match, behind)):
            return text[: found.end()]
    return text


def _clipped(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n{text[-_TAIL:]}"


def _without_thoughts(text: str) -> str:
    """The text behind the last closed thoughts and in front of open ones."""
    closed, before, opened = 0, 0, -1
    for tag in _THOUGHTS.finditer(text):
        if tag["end"] or tag["over"]:
            closed, before, opened = tag.end(), tag.start(), -1
        elif opened < 0:
            opened = tag.start()
    if opened >= 0:
        return text[closed:opened]
    return text[closed:] if not closed or text[closed:].strip() else text[:before]


def _hashes(text: str, numeric: bool) -> FinalAnswer | None:
    annotated = _ANNOTATION.search(text)
    for found in list(_HASHES.finditer(text))[: -_OCCURRENCES - 1 : -1]:
        line, rest = found[1].strip()[:_LINE], text[found.end() :].strip()
        if rest and _NUMBERED_HEADING.match(line):
            continue
        if not _LABEL_OF_LINE.sub("", line, count=1):
            line, _, rest = rest.partition("\n")
        line = _ANNOTATION.sub("", _LABEL_OF_LINE.sub("", line, count=1))
        if not annotated and rest and _is_heading(line):
            continue
        if (box := _boxed(line, numeric)) and (box.number or not numeric):
            return box
        if not numeric:
            if line and not rest:
                return FinalAnswer(_mathematics(line), parse_number(line))
        elif (number := _number_in(re.sub(r"(?<=\d),\s?(?=\d)", "", line))) is not None:
            return FinalAnswer(line, number)
        elif re.search(r"\d", line) and not re.search(r"[A-Za-z]{4}", plain(line)):
            return FinalAnswer(line, None)
    return None


def _is_heading(line: str) -> bool:
    """Whether a line is the heading of the text below it: `#### Eggs sold: 9`, not `#### about 18`."""
    if not re.match(r"[\s*_]*[^\W\d_]{2,}", line) or _boxes(line) or _CONCLUSION.match(line):
        return False
    return _leading(line) is None and parse_number(line) is None


def _tagged(text: str, numeric: bool) -> FinalAnswer | None:
    for found in list(_TAG.finditer(text))[: -_OCCURRENCES - 1 : -1]:
        if content := found[1].strip()[-_LINE:]:
            inner = _boxed(content, numeric) or _statement(content, numeric)
            return inner or FinalAnswer(
                _mathematics(content), _number_in(content) if numeric else parse_number(content)
            )
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
        return self.text[self.inside]


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
    while boxes and not boxes[-1].content.strip():
        _ = boxes.pop()
    if not boxes:
        return None
    right = boxes.pop()
    groups = [[right.content.strip()[:_LINE]]]
    for left in boxes[: -_OCCURRENCES - 1 : -1]:
        between = text[left.end : right.start] if 0 <= right.start - left.end <= 60 else "none"
        if _OR.fullmatch(between):
            groups.insert(0, [])
        elif not (_AND if numeric else _BETWEEN_BOXES).fullmatch(between):
            break
        groups[0].insert(0, left.content.strip()[:_LINE])
        right = left
    if numeric:
        numbers = {_boxed_number(content) for content in groups[0]}
        return FinalAnswer(", ".join(groups[0]), numbers.pop() if len(numbers) == 1 else None)
    content = " or ".join(map(", ".join, groups))
    return FinalAnswer(content, parse_number(content))


def _boxed_number(content: str) -> Number | None:
    """The number of a box: all of it, behind its "=", or the only one in its words; an expression or list has none."""
    content = _alternatives(content)[0]
    number = parse_number(content)
    if number is None and (sides := re.split("[=≈]", content))[1:]:
        listed = any(re.search(r"[,;]\s*[a-z\\]|\band\b", side, re.IGNORECASE) for side in sides[1:-1])
        number = None if listed else parse_number(sides[-1])
    words = plain(content)
    if number is None and not re.search(r"[\\^_√π{}<>|!+*×/=]|\d\s*[-(]|\(\s*[^\s\w]?\d", words):
        found = find_numbers(words)
        number = found[0].number if len(found) == 1 and re.search(r"[A-Za-z]{3}", words) else None
    return number


def _statement(text: str, numeric: bool) -> FinalAnswer | None:
    """The last "the answer is ..." or "Answer: ..." that says one; "Answer:" may also stand before a whole solution."""
    text = _ANNOTATION.sub("", text)
    found = [(match.end(), True) for match in _IS.finditer(text)]
    found += [(match.end(), False) for match in _LABEL.finditer(text)]
    for end, certain in sorted(found, reverse=True)[:_OCCURRENCES]:
        said = re.sub(r"^(?:[\s*_`:>]|\\\[|\$\$(?=\s))+", "", text[end : end + 5 * _LINE])
        line, _, rest = said.partition("\n")
        first, *others = _sentences(line)
        first = first[:_LINE].strip()
        certain = certain or not re.search(r"\d", "".join(others) + rest) or re.match(r"\s*explanation", rest, re.I)
        if not first:
            continue
        if not numeric:
            if certain or not rest.strip():
                return FinalAnswer(_mathematics(first), parse_number(first))
            continue
        number = parse_number(first)
        if number is None and certain:
            number = _rounded(first, _leading(first))
            if number is None and (formula := _FORMULA.match(first)):
                content = (formula[1] or formula[2] or formula[3]).strip()
                return FinalAnswer(content, _boxed_number(content))
            number = number or _number_in(first)
        if number is not None:
            return FinalAnswer(first, number)
    return None


def _unmarked(text: str, numeric: bool) -> FinalAnswer | None:
    lines = [line for line in text.split("\n") if line.strip(" \t*_`$#\\[]().-=~")]
    if not numeric:
        last = lines[-1][-_LINE:] if lines else ""
        return FinalAnswer(_mathematics(last), parse_number(last)) if lines else None
    for line in reversed(lines[-_OCCURRENCES:]):
        words = plain(_BULLET.sub("", line[-_LINE:], count=1))
        if found := find_numbers(words) or spelt_numbers(words):
            return FinalAnswer(line[-_LINE:], parse_number(line) or _bold(line) or found[-1].number)
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
    """The number of a line that gives an answer: all of it, in bold, behind "=", at its beginning, or its only one."""
    if _LIST.fullmatch(words):
        return None
    first, *others = _alternatives(words)
    if others and (number := parse_number(first.rpartition("=")[2])) is not None:
        return number
    if (number := parse_number(words)) is not None:
        return number
    sign = max(words.rfind("="), words.rfind("≈"))
    result = _leading(words[sign + 1 :]) if sign >= 0 else None
    return _bold(words, sign) or result or _leading(words) or _only(words)


def _bold(words: str, sign: int = -1) -> Number | None:
    """The last number in bold, unless an "=" at `sign` follows it."""
    for bold in reversed(list(_BOLD.finditer(words))):
        if sign < bold.end() and (number := parse_number(bold[1]) or _only(bold[1])) is not None:
            return number
    return None


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
    text = re.sub(r"\s\([^()]*\)", "", plain(words))
    found = find_numbers(text) or spelt_numbers(text)
    return found[0].number if len({written.number for written in found}) == 1 else None


def _rounded(words: str, number: Number | None) -> Number | None:
    """The whole number that `number` is rounded to: 18 for "17.6, so about 18 people", else itself."""
    if number is not None and number.value.denominator != 1:
        for found in _ROUNDED.finditer(words):
            whole = parse_number(found[1])
            if whole is not None and abs(whole.value - number.value) < 1:
                return whole
    return number


def _sentences(line: str) -> list[str]:
    return re.split(
        r"(?<=[.!?。])(?<!\bi\.e\.)(?<!\be\.g\.)(?<!\bRs\.)[*_]*\s+(?=[\"'(*_]*[A-Z\d$\\])|(?<=。)(?=.)", line
    )


def _mathematics(text: str) -> str:
    """The formula in a line of text where it has one, else the line without punctuation at its end."""
    formulas = list(_FORMULA.finditer(text))
    if not formulas:
        return text.strip().strip("*`").rstrip(" .,;").strip("*`").strip()
    told = [formulas.pop()]
    while formulas and _OR.fullmatch(text, formulas[-1].end(), told[0].start()):
        told.insert(0, formulas.pop())
    return " or ".join((formula[1] or formula[2] or formula[3]).strip() for formula in told)

"""The final answer of a worked solution: where models put it, in the order in which a reader would look for it. Pure.

1. `#### 18`, as GSM8K ends its solutions; the last one that reads as an answer and not as a heading.
2. `<answer>18</answer>`, the last one.
3. `\\boxed{18}`, the last one (several that stand together, where the answer is no number).
4. A statement: "the answer is 18", "Final answer: 18", the last one; "Answer:" in front of a whole solution is none.
5. The last line that has a number, but for a check of the result: what stands in bold, else behind the last "=", else
   the one that was computed last, else the last one.

Of alternatives ("the answer is 18 or 17") the first counts, of a number and what it is rounded to ("17.6, so about
18") the second. What comes after the answer because the model did not stop is cut off first, and so is what was thought
before `</think>` (see `own_words`). A solution with GSM8K's calculator annotations (`<<9*2=18>>`) that ends without any
of 1 to 4 was cut short, and so were thoughts that are still open, and what ends in `####`, in the middle of a
calculation (`9 * 2 =`) or where a further step is announced ("Then she"): they have no final answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hybridflow.rewards.number import Number, find_numbers, parse_number, plain
from hybridflow.rewards.own_words import ANNOTATION, HASHES, own_words
from hybridflow.rewards.stated_number import computed, leading, number_in, rounded, spelt, stated_in


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """What the solution answers: the `text`, and the `number` that it is or states (None: an expression, words)."""

    text: str
    number: Number | None


_HEADING = re.compile(
    r"[\s*_]*(?:step|part|phase|stage|question|problem|example|case|exercise|method|solution|section|given|option)\b",
    re.I,
)
_NUMBERED_HEADING = re.compile(r"[\s*_]*\d{1,2}[.):]\s*[^\W\d]|[\s*_]*\d{1,2}[.)]\s*\**[^\W\d]")
_BEGINS_WITH_A_WORD = re.compile(r"[\s*_]*[^\W\d_]{2,}")
_ANSWERS = re.compile(
    r"[\s*_]*(?:(?:the|my|our|final|correct|overall)\s+)*"
    r"(?:answers?|results?|conclusion|therefore|thus|so|hence|finally|in (?:total|all|conclusion)|altogether)\b",
    re.I,
)
_TAG = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.IGNORECASE | re.DOTALL)
_BOX = re.compile(r"(?:(?:\\+b|\x08)oxed|\\+fbox)[ \t]*(?=\{)")
_BARE_BOX = re.compile(r"\\+boxed[ \t]*(\d+)")
_BRACE = re.compile(r"(?<!\\)[{}]")
# What repeats itself without end must not take long: so many marks are read, from the last, and so much of each line.
_STATEMENTS, _LINE = 20, 2000
_BETWEEN_BOXES = re.compile(r"[\s$.,;()]*(?:\\[()\[\]]|and|or|\$|,|\\text\{\s*(?:and|or)\s*\})*[^\n]{0,12}")

_MARKS = r"[\s*_`\"]*"
_ASIDE = rf"(?:\([^)\n]{{0,60}}\){_MARKS})?"
_IS = re.compile(
    r"\b(?:answer|final results?|final values?)\b(?:\s+(?:to|for|of|in|from|we|you|i|here|then|now|thus|therefore)\b"
    r"[^.\n:=]{0,100}?)?"
    rf"{_MARKS}{_ASIDE}(?:\b(?:is|are|was|equals?|(?:would|should|will|must) be|comes (?:out )?to)"
    rf"\b|=|->|→){_MARKS}:?|答案\s*(?:是|为){_MARKS}[:：]?",
    re.IGNORECASE,
)
_LABEL = re.compile(
    r"(?:^[ \t>#*_-]*|(?<=[\s*(\"]))"
    r"(?:(?:the\s+)?(?:final|correct|numerical)\s+(?:numerical\s+)?(?:answer|result)|(?:the\s+)?answer|ans)"
    rf"{_MARKS}{_ASIDE}(?::|：|(?<=[a-z*_])[*_]*\s*$)|^[ \t*_]*A{_MARKS}:|答案{_MARKS}[:：]",
    re.IGNORECASE | re.MULTILINE,
)
_EXPLAINS = re.compile(
    r"[\s*_#>-]*(?:explanation|reason|because|solution|steps?\b|here|to |we |let|justification|working|calculation"
    r"|since|first|note|how|this )",
    re.I,
)
_CONCLUDES = re.compile(
    r"[\s*_]*(?:therefore|thus|so|hence|in total|in conclusion|altogether|finally|overall|in all)\b", re.I
)
_FORMULA = re.compile(r"\$\$?([^$]+)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_POSTSCRIPT = re.compile(
    r"[\s*_(>-]*(?:note\b|please\b|disclaimer|remember|i hope|let me know|feel free|is there anything|would you like)",
    re.I,
)
_CHECK = re.compile(
    r"[\s*_(>#-]*(?:verif|double[- ]check|checking\b|check\s*[:*]|check (?:the|our|my|your|this|that|it)\b"
    r"|to (?:check|verify)\b|(?:let[’']?s|let us|let me|we can|we)\s+(?:(?:now|also|just|quickly)\s+)*"
    r"(?:verify|double[- ]check|confirm|check\s*(?:$|[:.]|(?:the|our|my|this|that|it|if|whether)\b)))",
    re.I,
)
_UNFINISHED = re.compile(r"(?:[=≈×÷(<]|\s[-+*/]|\\times|\\div|\\frac\{?)[ \t]*\\?\$?$")
_FURTHER = re.compile(r"(?:so|then|therefore|thus|hence|now|next|finally)\b[^.!?:\d]*[A-Za-z,]$", re.I)
_BULLET = re.compile(
    r"^\s*(?:[-*•+]\s+(?=\S)|\d{1,2}[.)]\s+(?=\S)|\(\d{1,2}\)\s+(?=\S))?(?:[*_#\s]*step\s+\d+\b)?", re.I
)


def reference_answer(text: str) -> str:
    """The answer of a reference: behind its last `####`, in its last `\\boxed{}`, or the text as it stands."""
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxes = _boxes(text)
    return boxes[-1][2].strip() if boxes else text.strip()


def final_answer(solution: str, *, numeric: bool) -> FinalAnswer | None:
    """What `solution` gives as its final answer, or None; `numeric`: a number is asked for.

    It does not depend on the right answer, so nothing is gained by naming several.
    """
    text = own_words(solution)
    if not text.strip():
        return None
    stated = _hashes(text, numeric) or _tagged(text, numeric) or _boxed(text, numeric) or _statement(text, numeric)
    if stated is not None or ANNOTATION.search(text) or "<think>" in text or _cut_short(text, numeric):
        return stated
    return _last_line(text, numeric)


def _hashes(text: str, numeric: bool) -> FinalAnswer | None:
    annotated = ANNOTATION.search(text)
    for found in list(HASHES.finditer(text))[: -_STATEMENTS - 1 : -1]:
        line, rest = found[1].strip()[:_LINE], text[found.end() :]
        if _HEADING.match(line) or (rest.strip() and _NUMBERED_HEADING.match(line)):
            continue
        if not line or re.fullmatch(r"[*_\s]*(?:the\s+)?(?:final\s+)?(?:answer|result)[*_\s:]*", line, re.IGNORECASE):
            line, _, rest = rest.strip().partition("\n")
        line = re.sub(
            r"^[*_\s]*(?:the\s+)?(?:final\s+)?answer(?:\s+is|[*_\s]*:)[*_\s:]*", "", line, flags=re.IGNORECASE
        )
        line = ANNOTATION.sub("", line)
        if not annotated and rest.strip() and _heads(line):
            continue
        if boxes := _boxes(line):
            line = boxes[-1][2]
        if not numeric:
            if line and not rest.strip():
                return FinalAnswer(_mathematics(line), parse_number(line))
            continue
        number = number_in(re.sub(r"(?<=\d),\s?(?=\d)", "", line))
        if number is not None:
            return FinalAnswer(line, number)
        if re.search(r"\d", line) and not re.search(r"[A-Za-z]{4}", plain(line)):
            return FinalAnswer(line, None)
    return None


def _heads(line: str) -> bool:
    """Whether a line is the heading of what follows: `#### Eggs sold: 9` or `#### Conclusion`, not `#### about 18`."""
    if not _BEGINS_WITH_A_WORD.match(line) or _boxes(line):
        return False
    return not _ANSWERS.match(line) and leading(line) is None and parse_number(line) is None


def _tagged(text: str, numeric: bool) -> FinalAnswer | None:
    for found in list(_TAG.finditer(text))[: -_STATEMENTS - 1 : -1]:
        if content := found[1].strip()[-_LINE:]:
            inner = _boxed(content, numeric) or _statement(content, numeric)
            return inner or FinalAnswer(_mathematics(content), number_in(content) if numeric else parse_number(content))
    return None


def _boxed(text: str, numeric: bool) -> FinalAnswer | None:
    boxes = [box for box in _boxes(text) if box[2].strip()]
    if not boxes:
        return None
    content = boxes[-1][2].strip()[:_LINE]
    if numeric:
        return FinalAnswer(content, _boxed_number(content))
    together = [content]
    for left, right in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if right[0] - left[1] > 60 or not _BETWEEN_BOXES.fullmatch(text[left[1] : right[0]]):
            break
        together.insert(0, left[2].strip())
    content = ", ".join(together)
    return FinalAnswer(content, parse_number(content))


def _boxed_number(content: str) -> Number | None:
    """The number of a box: all of it, behind its "=", or the only one in its words; an expression has none."""
    number = parse_number(content)
    if number is None and (sides := re.split("[=≈]", content))[1:]:
        number = parse_number(sides[-1])
    words = plain(content)
    if number is None and not re.search(r"[\\^_√π{}<>|!+*×/=]|\d\s*[-(]|\(\s*[^\s\w]?\d", words):
        found = find_numbers(words)
        number = found[0].number if len(found) == 1 and re.search(r"[A-Za-z]{3}", words) else None
    return number


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Start, end and content of every complete `\\boxed{}`, braces within it matched, in order of their starts."""
    found = [(box.start(), box.end(), box[1]) for box in _BARE_BOX.finditer(text)]
    starts = {box.end(): box.start() for box in _BOX.finditer(text)}
    opened: list[int] = []
    for brace in _BRACE.finditer(text) if starts else ():
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (inside := opened.pop()) in starts:
            found.append((starts[inside], brace.end(), text[inside + 1 : brace.start()]))
    return sorted(found)


def _statement(text: str, numeric: bool) -> FinalAnswer | None:
    """The last "the answer is ..." or "Answer: ..." that says one."""
    text = ANNOTATION.sub("", text)
    found = [(match.end(), True) for match in _IS.finditer(text)]
    for match in _LABEL.finditer(text):
        found.append((match.end(), bool(re.search("final|correct|numerical|答案", match[0], re.IGNORECASE))))
    for end, certain in sorted(found, reverse=True)[:_STATEMENTS]:
        said = _stated(text, end, certain, numeric)
        if said is not None:
            return said
    return None


def _stated(text: str, start: int, certain: bool, numeric: bool) -> FinalAnswer | None:
    region = re.sub(r"^(?:[\s*_`:>]|\\\[|\$\$(?=\s))+", "", text[start : start + 5 * _LINE])
    line, _, rest = region.partition("\n")
    first, *others = _sentences(line)
    if not first.strip():
        return None
    last = not re.search(r"\d", "".join(others) + rest)
    first = first[:_LINE]
    if not numeric:
        sure = certain or last or not rest.strip() or _EXPLAINS.match(rest.lstrip())
        return FinalAnswer(_mathematics(first), parse_number(first)) if sure else None
    number = parse_number(first)
    if number is None and certain:
        number = rounded(first, leading(first))
    if number is None and certain and (formula := _FORMULA.match(first)):
        content = (formula[1] or formula[2] or formula[3]).strip()
        return FinalAnswer(content, _boxed_number(content))
    if number is None and (last or (certain and "=" in first) or _EXPLAINS.match(rest.lstrip())):
        number = stated_in(first, computed(text[:start])) or spelt(first)
    return None if number is None else FinalAnswer(first, number)


def _cut_short(text: str, numeric: bool) -> bool:
    text = text.rstrip()
    *_, last = _sentences(text[text.rfind("\n") + 1 :][-_LINE:])
    announced = numeric and _FURTHER.match(last) is not None and spelt(last) is None
    return announced or text.endswith("####") or _UNFINISHED.search(last) is not None


def _last_line(text: str, numeric: bool) -> FinalAnswer | None:
    lines = [line for line in text.split("\n") if line.strip(" \t*_`$#\\[]().-=~")]
    if not lines:
        return None
    if not numeric:
        last = lines[-1][-_LINE:]
        return FinalAnswer(_mathematics(last), parse_number(last))
    told = _unchecked([line for line in lines if not _POSTSCRIPT.match(line)])
    lines = told if any(re.search(r"\d", line) for line in told) else lines
    for at in range(len(lines) - 1, -1, -1):
        line = _BULLET.sub("", lines[at])[-_LINE:]
        if not re.search(r"[\d½¼¾⅓⅔]", line):
            continue
        sentences = [sentence for sentence in _sentences(line) if find_numbers(plain(sentence))]
        if not sentences:
            continue
        told = [sentence for sentence in sentences if not sentence.endswith("?") and not _POSTSCRIPT.match(sentence)]
        sentences = _unchecked(told) or sentences
        concluding = [sentence for sentence in sentences if _CONCLUDES.match(sentence)]
        sentence = (concluding or sentences)[-1]
        earlier = "\n".join(lines[:at]) + "\n" + line[: line.find(sentence)]
        return FinalAnswer(sentence, stated_in(sentence, computed(earlier)))
    number = spelt(lines[-1][-_LINE:])
    return None if number is None else FinalAnswer(lines[-1], number)


def _unchecked(parts: list[str]) -> list[str]:
    """The lines or sentences of a solution up to the check of its result, if that concludes nothing else."""
    found = False
    for at, part in enumerate(parts):
        if found and _CHECK.match(part):
            concludes = any(_CONCLUDES.match(later) and re.search(r"\d", later) for later in parts[at + 1 :])
            return parts if concludes else parts[:at]
        found = found or re.search(r"\d", part) is not None
    return parts


def _sentences(line: str) -> list[str]:
    return re.split(
        r"(?<=[.!?。])(?<!\bi\.e\.)(?<!\be\.g\.)(?<!\bRs\.)[*_]*\s+(?=[\"'(*_]*[A-Z\d$\\])|(?<=。)(?=.)", line
    )


def _mathematics(text: str) -> str:
    """The formula in a line of text where it has one, else the line without punctuation at its end."""
    formulas = _FORMULA.findall(text)
    if formulas:
        return next(part for part in formulas[-1] if part).strip()
    return text.strip().strip("*`").rstrip(" .,;").strip("*`").strip()

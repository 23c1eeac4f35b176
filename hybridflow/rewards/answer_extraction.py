"""Answer extraction: the final answer of a worked solution, found by its mark without the reference.

Pure. Marks are `#### 18` (GSM8K), `<answer>18</answer>`, `\\boxed{18}` and "the answer is 18" (or "Answer: 18"); the
last one counts, and one that is not closed does not. A response of one line without a mark is an answer as a whole.
Thoughts (`<think>`) and text behind the end of the answer are left out: see `own_words`. A solution with GSM8K's
calculator annotations (`<<9*2=18>>`) but no mark was cut short, and has no answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hybridflow.data.tokenizer import THOUGHTS
from hybridflow.rewards.answer_grammar import read
from hybridflow.rewards.answer_layout import layout

_HEAD, _TAIL = 4_000, 16_000  # characters of a longer text that are read
# Text that repeats itself must not take long: this many occurrences of a mark are read, and characters of a line.
_OCCURRENCES, _LINE = 20, 2000

_ANNOTATION = re.compile(r"<<[^<>\n]*>>")
_TOKENS = "endoftext|im_end|eot_id|end_of_text|end|eom_id|im_start"
_END = re.compile(rf"(?P<before>\S)\s*(?:<\|(?:{_TOKENS})\|>|</s>|<end_of_turn>|<eos>|\[INST\]|<｜end▁of▁sentence｜>)")
_LABELS = r"(?:question|problem|exercise|instruction|q|user|human)\b(?:[ \d*]*:|[ *\d]*$)"
_NEXT_PROBLEM = re.compile(rf"(?<=\d)(?P<before>[^\d\n]*)\n[\s#*]*{_LABELS}", re.IGNORECASE | re.MULTILINE)

_HASHES = re.compile(r"#{4,}[ \t]*([^\n#]*)")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_BOX = re.compile(r"(?:(?:(?<!\\)\\+b|\x08)oxed|(?<!\\)\\+fbox)[ \t]*(?=\{)")
_BARE_BOX = re.compile(r"(?<!\\)\\+boxed[ \t]*(\d+)")
_BRACE = re.compile(r"(?<!\\)[{}]")
_GAP = r"[\s*_`\">]{0,9}"
_IS = rf"(?P<certain>\b(?:is|are|was|equals|be)\b(?!n['’]t)){_GAP}:?"
_STATED = re.compile(
    rf"\b(?:answer|final (?:result|value))\b[^.\n:=\d]{{0,60}}?{_IS}|答案(?:是|为|：|:)"
    rf"|(?P<final>\b(?:final|correct) )?(?:\b(?:answer|ans|result)|^[ *_]*a)\b{_GAP}(?:[:：=]|(?<=[*_r])$)",
    re.IGNORECASE | re.MULTILINE,
)
_LABEL = re.compile(rf"{_GAP}(?:the )?(?:final )?(?:answer|ans|result)\b(?: is\b)?{_GAP}:?{_GAP}", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[.!?。])(?<!Rs\.)[*_]*(?:\s+(?=[\"'(*_]*[A-Z\d$\\])|(?<=。))")
_CLAUSE = re.compile(r",\s+(?:so|not|because|since|as|which|where|when)\s.*", re.DOTALL)
_JOINED = r"(?:[\s$.,;(){}*~]|\\[()\[\],;: ]|\\q?quad|\\text(?=\{))*"
_OR = re.compile(rf"{_JOINED}(?:\\lor|or)\b[^\n.!?]{{0,30}}", re.IGNORECASE)
_AND = re.compile(rf"{_JOINED}(?:and\b|&)?{_JOINED}(?:[a-z](?:_?\d|')?\s*=\s*)?{_JOINED}", re.IGNORECASE)
_BOLD = re.compile(r"\*\*([^*\n]+?)(?<!:)\*\*(?!\s*:)")
_LAST = re.compile(
    r"(?<![A-Za-z0-9_\u00c0-\u052f.^\\√/,:])[-+]?(?:\\?[$€£])?\s?(?:\d+ (?=\d+/))?"
    r"(?:\d++(?:,++\d++)*+(?:\.\d++)?+|\.\d++)(?:/\d++)?(?:\s?\\?%)?(?![\d.:/^(]\d|\^|\d)"
)


def reference_answer(text: str) -> str:
    """The answer of a reference: behind its last `####`, in its last `\\boxed{}`, or the text as it stands."""
    text = _clipped(text)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxes = _boxes(text)
    return text[slice(*boxes[-1][2:])].strip() if boxes else text


def final_answer(solution: str, *, unmarked: bool = False) -> str | None:
    """The final answer of `solution`, or None; `unmarked`: without a mark, the last number or line counts.

    It does not depend on the right answer, so nothing is gained by naming several.
    """
    text = own_words(solution)
    marks = [mark for find in (_hashes, _tags, _boxed, _statements) for mark in find(text)]
    if marks:
        return max(marks)[1]
    text = text.strip()
    if _ANNOTATION.search(text) or THOUGHTS.search(text) or text.endswith("####") or not text:
        return None
    if "\n" not in text and ((_is_value(text) and "=" not in text) or not re.search(r"\d", text)):
        return text
    lines = [line[-_LINE:] for line in text.split("\n") if line.strip(" \t*_`$#\\[]().-=~")] if unmarked else []
    for line in reversed(lines[-_OCCURRENCES:]):
        if found := _LAST.findall(layout(line)):
            bold = [said for said in _BOLD.findall(line) if _is_value(said)]
            return line if _is_value(line) else (bold or found)[-1]
    return lines[-1] if lines else None


def own_words(text: str) -> str:
    """The answer alone: of a long text its beginning and its end.

    Closed thoughts are left out, unless they are all there is, and so is everything behind open ones. The answer ends
    at an end token, at "Question:" or another such label, and at a `#### 18` behind which a question or an annotated
    calculation follows.
    """
    text = text.replace("\x0crac", "\\frac").replace("\r\n", "\n").replace("\r", "\n")
    _, before, opened = thoughts(text)
    text = _clipped(text[outside_thoughts(text)].strip() or ("" if opened is not None else text[: before or None]))
    for end in (_END.search(text), _NEXT_PROBLEM.search(text)):
        text = text if end is None else text[: end.end("before")]
    last = max(text.rfind("?"), text.rfind("<<"))
    ended = (found.end() for found in _HASHES.finditer(text) if found.end() < last and _is_value(found[1]))
    return text[: next(ended, len(text))]


def _clipped(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _HEAD + _TAIL else f"{text[:_HEAD]}\n{text[-_TAIL:]}"


def outside_thoughts(text: str) -> slice:
    """What stands behind the last closed thoughts and before open ones; before the first, if nothing is behind."""
    closed, _, opened = thoughts(text)
    first = THOUGHTS.search(text)
    behind = not closed or opened is not None or text[closed:].strip()
    return slice(closed, opened) if behind or first is None else slice(0, first.start())


def thoughts(text: str) -> tuple[int, int, int | None]:
    """Where the last closed thoughts end, where their closing tag begins, and where thoughts begin that never end."""
    closed, before, opened = 0, 0, None
    for tag in THOUGHTS.finditer(text):
        if tag["end"] or tag["over"]:
            closed, before, opened = tag.end(), tag.start(), None
        elif opened is None:
            opened = tag.start()
    return closed, before, opened


def _hashes(text: str) -> Iterator[tuple[int, str]]:
    """The text behind `####`; a line followed by other text counts only if it begins with an answer."""
    for found in list(_HASHES.finditer(text))[-_OCCURRENCES:]:
        rest = text[found.end() :].strip()
        said = _LABEL.sub("", found[1].strip()[:_LINE], count=1)
        if not said:
            said, _, rest = rest.partition("\n")
        said = _ANNOTATION.sub("", said).strip(" *_")
        if said and (not rest or _is_value(said)):
            yield found.start(), said


def _tags(text: str) -> Iterator[tuple[int, str]]:
    for found in list(_TAG.finditer(text))[-_OCCURRENCES:]:
        if said := found[1].strip()[-_LINE:]:
            yield found.start(), said


def _boxes(text: str) -> list[tuple[int, int, int, int]]:
    """Every complete `\\boxed{}`, braces within it matched: where it starts and ends, and where its content does."""
    found = [(*box.span(), *box.span(1)) for box in _BARE_BOX.finditer(text)]
    starts = {box.end(): box.start() for box in _BOX.finditer(text)}
    opened: list[int] = []
    for brace in _BRACE.finditer(text) if starts else ():
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened and (inside := opened.pop()) in starts:
            found.append((starts[inside], brace.end(), inside + 1, brace.start()))
    return sorted(found)


def _boxed(text: str) -> Iterator[tuple[int, str]]:
    """The last box, with those that are joined to it by "or", "and" or a comma."""
    boxes = [box for box in _boxes(text)[-_OCCURRENCES:] if text[slice(*box[2:])].strip()]
    if not boxes:
        return
    right = last = boxes.pop()
    said = text[slice(*right[2:])].strip()[:_LINE]
    for left in reversed(boxes):
        between = text[left[1] : right[0]] if 0 <= right[0] - left[1] <= 60 else "none"
        joined = " or " if _OR.fullmatch(between) else ", " if "\n\n" not in between and _AND.fullmatch(between) else ""
        if not joined:
            break
        content = text[slice(*left[2:])].strip()[:_LINE]
        said = said if joined == ", " and content == said else f"{content}{joined}{said}"
        right = left
    yield last[0], said


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """What "the answer is ..." and "Answer: ..." say; "Answer:" may also stand before a whole solution."""
    for found in list(_STATED.finditer(text))[-_OCCURRENCES:]:
        said = re.sub(r"^[\s*_`:：>\"]+", "", text[found.end() : found.end() + 5 * _LINE])
        if (formula := re.match(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]", said, re.DOTALL)) is not None:
            yield found.start(), (formula[1] or formula[2]).strip()
            continue
        line, _, rest = said.partition("\n")
        first, *others = _SENTENCE.split(line[:_LINE].partition("</")[0])
        first = _ANNOTATION.sub("", _CLAUSE.sub("", first)).strip(' *_`"')
        first = re.sub(r"(?<![*_`\"\s])[*_`\"\s]*+[.!]?[*_`\"\s]*+$", "", first)
        first = first.rstrip('}" ') if first.count("{") < first.count("}") else first
        certain = found["certain"] or found["final"] or not re.search(r"\d", "".join(others) + rest)
        certain = certain or re.match(r"\s*explanation", rest, re.IGNORECASE)
        if first and (certain or _is_value(first)):
            yield found.start(), first


def _is_value(said: str) -> bool:
    """Whether it begins with a value that can be read."""
    leading = re.match(r"[^A-Za-z]|\\|[A-Za-z]\b|(?:about|approximately|exactly|around|roughly|USD|Rs)\b", said)
    return leading is not None and read(said) is not None

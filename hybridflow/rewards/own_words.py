"""A model's own answer in what it wrote: without the thoughts before it and without what ran on behind it. Pure."""

from __future__ import annotations

import itertools
import re

from hybridflow.rewards.number import parse_number

ANNOTATION = re.compile(r"<<[^<>\n]*>>")
HASHES = re.compile(r"#{4,}[ \t]*([^\n#]*)")

_END = re.compile(
    r"<\|(?:endoftext|im_end|eot_id|end_of_text|end|eom_id|im_start)\|>|</s>|<end_of_turn>|<eos>|\[EOS\]|\[INST\]"
    r"|<｜end▁of▁sentence｜>"
)
_NEXT_PROBLEM = re.compile(
    r"^[ \t#*]*(?:(?:new |next )?(?:question|problem|exercise|instruction|input|user|human)\b(?:[ \t]*\d+)?|Q)"
    r"[ \t]*\**:|^#{1,6}[ \t]*(?:question|problem|exercise|instruction)(?:[ \t]*\d+)?[ \t]*$",
    re.IGNORECASE | re.MULTILINE,
)
_SECOND_THOUGHTS = re.compile(
    r"[\s*_(\"'>-]*(?:(?:but|however|no|oh|ok(?:ay)?|so|and|now|well|hold on|i think)\b[\s,.!]*){0,3}"
    r"(?:wait\b|actually\b|correct(?:ion|ed)\b|sorry\b|apolog|let me\b|let[’']?s\b|oops|hmm|revise|on second thought)"
    r"|.*\b(?:double[- ]check|re-?(?:check|do|comput|calculat)|(?:there|made|i|is)\b.{0,12}\b(?:mistake|error)\b"
    r"|(?:answer|solution|calculation|result|above|that|this|it|i)\b.{0,20}\b(?:wrong|incorrect)\b)",
    re.I,
)
_SENTENCE = re.compile(r"(?<=[.!?:])\s+|\n+")
_AFTER = 400  # characters behind a `#### 18` in which second thoughts begin
_BULLET = re.compile(
    r"\s*(?:[-*•+]\s+(?=\S)|\d{1,2}[.)]\s+(?=\S)|\(\d{1,2}\)\s+(?=\S))?(?:[*_#\s]*step\s+\d+\b)?", re.I
)


def own_words(text: str) -> str:
    """The answer alone.

    It ends at an end token, at "Question:" or another such label, and at a `#### 18` behind which a question or a
    calculation follows, unless what follows begins with second thoughts ("Wait, ...", "Let me check") on the same one.
    """
    text = text.replace("\x0crac", "\\frac").replace("\r\n", "\n").replace("\r", "\n")
    before, closed, after = text.rpartition("</think>")
    if closed:
        text = after if after.strip(" \n") else before
    text = text.lstrip()
    for end in _END.finditer(text):
        if text[: end.start()].strip():
            text = text[: end.start()]
            break
    bullet = _BULLET.match(text)
    begun = re.compile(r"\d").search(text, bullet.end() if bullet else 0)
    for start in _NEXT_PROBLEM.finditer(text):
        if begun is not None and start.start() > begun.start():
            text = text[: start.start()]
            break
    return _before_another_problem(text)


def _before_another_problem(text: str) -> str:
    last = max(text.rfind("?"), text.rfind("<<"))
    for found, following in itertools.pairwise([*HASHES.finditer(text), None]):
        if found is None or found.end() > last:
            break
        end = min(len(text) if following is None else following.start(), found.end() + _AFTER)
        if parse_number(found[1]) is not None and not _thinks_again(text[found.end() : end]):
            return text[: found.end()]
    return text


def _thinks_again(following: str) -> bool:
    first = [sentence for sentence in _SENTENCE.split(following) if sentence.strip()][:2]
    return any(_SECOND_THOUGHTS.match(sentence) for sentence in first)

"""Prompts and token ids: checks of texts and chat messages, and the tokenizer of a checkpoint directory."""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import random
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hybridflow.errors import CheckpointError, ConfigError, PromptError, nearest
from hybridflow.models.spec import check_no_code, read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
TokenizerLike: TypeAlias = "str | os.PathLike[str] | Tokenizer | PreTrainedTokenizerBase"
"""What `as_tokenizer` takes."""
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_TOKEN_FILES = ("tokenizer_config.json", "special_tokens_map.json")
_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
MOST_CHARACTERS = 1 << 22
"""Of one prompt: about a million tokens. Tokenizers take hundreds of bytes for each character."""
_AT_ONCE = 1 << 20
THOUGHTS = re.compile(
    r"[<\[](?P<end>/?)(?:think(?:ing)?|thoughts?|reasoning)\s{0,9}[>\]]|<\|(?:begin|(?P<over>end))_of_thought\|>",
    re.IGNORECASE,
)
"""What begins and ends a model's thoughts in its text."""
TEMPLATE_SECONDS = 30.0
_SAID = "qzsaid"
_ADDED, _TEMPLATE = 16, 1024  # tokens around a text or message; a template's own, such as a system message
ROLES = ("system", "developer", "user", "assistant", "tool")
_MAY_SAY_NOTHING = ("assistant", "tool")  # tool calls, and some tool answers, have no text


def grouped(characters: Sequence[int]) -> Iterator[range]:
    """Groups of neighbouring texts, by their lengths, of up to `_AT_ONCE` characters; a longer text is one alone."""
    start, total = 0, 0
    for at, length in enumerate(characters):
        if total + length > _AT_ONCE and at > start:
            yield range(start, at)
            start, total = at, 0
        total += length
    if start < len(characters):
        yield range(start, len(characters))


def too_long(place: str, characters: int) -> PromptError:
    return PromptError(
        f"{place} has {characters} characters, and a prompt may have {MOST_CHARACTERS}. Shorten or split it, or give "
        f"PromptLoader(max_prompt_tokens=...), which leaves such prompts out."
    )


def has_tokenizer(directory: str | os.PathLike[str]) -> bool:
    return any((Path(directory) / name).is_file() for name in _FILES)


class _EndlessTemplateError(Exception):
    def __str__(self) -> str:
        return f"it did not end within {TEMPLATE_SECONDS:g} s: look for a loop in it"


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raises inside, in this thread, when the block has run for `seconds`. Python code only: templates are."""
    thread, lock, inside = threading.get_ident(), threading.Lock(), True

    def stop() -> None:
        with lock:
            if inside:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread), ctypes.py_object(_EndlessTemplateError)
                )

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            inside = False
        timer.cancel()


class Tokenizer:
    """A Hugging Face tokenizer for lists of texts. `raw` is the tokenizer itself.

    `end_ids`: each of these tokens ends a text or a response. Of a checkpoint directory they are those of
    `end_token_ids`. `template`: further arguments of the chat template for prompts. `images`: parts of messages may be
    images.
    """

    def __init__(
        self, raw: Any, end_ids: Iterable[int] = (), template: Mapping[str, Any] | None = None, images: bool = False
    ) -> None:
        self.raw, self.template, self.images = raw, dict(template or {}), images
        own = getattr(raw, "eos_token_id", None)
        self.end_ids = frozenset(end_ids if own is None else (*end_ids, own))

    @property
    def end_id(self) -> int | None:
        """The token that ends a text: the tokenizer's own, if it has one."""
        own = getattr(self.raw, "eos_token_id", None)
        return min(self.end_ids, default=None) if own is None else own

    def encode(
        self, prompts: Sequence[Any], places: Sequence[str] | None = None, column: str | None = None
    ) -> list[list[int]]:
        """Token ids of texts (with the tokenizer's own special tokens) or of chat messages (by its chat template).

        The template opens the assistant's turn; a last message of the assistant is left open, to be continued. `places`
        name the prompts in errors. Errors: PromptError for anything else,
        for messages without a chat template, for messages that the template refuses or nothing can follow, and with
        the name of their `column` for prompts without any token.
        """
        names = places or [f"prompt {row}" for row in range(len(prompts))]
        with _deadline(TEMPLATE_SECONDS + 0.1 * len(prompts)):
            texts = [self._text(name, prompt) for name, prompt in zip(names, prompts, strict=True)]
        for name, text in zip(names, texts, strict=True):
            if len(text) > MOST_CHARACTERS:
                raise too_long(name, len(text))
        special = [isinstance(prompt, str) for prompt in prompts]
        if all(special) or not any(special):
            found = self.ids(texts, all(special))
        else:
            found = [ids for text, own in zip(texts, special, strict=True) for ids in self.ids([text], own)]
        if column is not None and [] in found:
            raise PromptError(f"{names[found.index([])]}: column {column!r} has a prompt without any token.")
        return found

    def lengths(self, prompts: Sequence[Any], places: Sequence[str], column: str) -> list[float]:
        """Tokens of each prompt; infinite, without tokenising, for prompts that are too long to tokenise."""
        sizes = [characters(prompt) for prompt in prompts]
        short = [i for i, size in enumerate(sizes) if size <= MOST_CHARACTERS]
        lengths = [math.inf] * len(prompts)
        for group in grouped([sizes[i] for i in short]):
            own = [short[i] for i in group]
            found = self.encode([prompts[i] for i in own], [places[i] for i in own], column)
            for i, ids in zip(own, found, strict=True):
                lengths[i] = len(ids)
        return lengths

    def ids(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        """Token ids of each text, with `special` and the tokenizer's own special tokens. A text that begins with the
        begin token (a prompt that was rendered before) does not get another.

        A bounded number of characters at a time: the tokenizer's other outputs take much more memory.
        """
        groups = grouped([len(text) for text in texts])
        found = (self.raw([texts[i] for i in group], add_special_tokens=special)["input_ids"] for group in groups)
        twice = [self.raw.bos_token_id] * 2
        return [list(ids[1:] if special and ids[:2] == twice else ids) for group in found for ids in group]

    def render(self, messages: list[Any], **options: Any) -> str:
        """The text of messages by the chat template, which is the checkpoint's program: it may raise anything, and is
        stopped where it does not end."""
        with _deadline(TEMPLATE_SECONDS):
            return self._rendered(messages, **options)

    def _rendered(self, messages: list[Any], **options: Any) -> str:
        return self.raw.apply_chat_template(plain_messages(messages), tokenize=False, **options)

    @cached_property
    def turn_end(self) -> str:
        """What the chat template writes behind the last turn of an assistant; "" without a template."""
        if self.raw.chat_template is None:
            return ""
        said = [{"role": "user", "content": _SAID}, {"role": "assistant", "content": _SAID}]
        try:
            return self.render(said).rpartition(_SAID)[2]
        except Exception as error:  # as above
            logger.info("the chat template refuses a turn of a user and one of an assistant: %s", error)
            return ""

    def closing_ids(self, chat: bool) -> list[int]:
        """The tokens after a response in training texts: with `chat` the template's own, then the end token, unless the
        template ends with a special token."""
        own = [] if (end := self.end_id) is None else [end]
        found = self.continuations([self.turn_end.rstrip()])[0] if chat else []
        return found if found and found[-1] in self._special else [*found, *own]

    @cached_property
    def _special(self) -> dict[int, str]:
        named = zip(self.raw.all_special_ids, self.raw.all_special_tokens, strict=True)
        added = self.raw.added_tokens_decoder.items()
        return {number: token.content for number, token in added if token.special} | dict(named)

    def _text(self, place: str, prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        if not isinstance(prompt, list):
            raise PromptError(f"{place} is {type(prompt).__name__}: give text or a list of chat messages.")
        if self.raw.chat_template is None:
            raise PromptError(f"{place} is a list of messages and the tokenizer has no chat template.")
        check_messages(place, "prompt", prompt, self.images)
        begun = prompt[-1]["role"] == "assistant"
        if begun and prompt[-1].get("tool_calls"):
            raise PromptError(f"{place} ends with a call of a tool, which only the tool can answer. Add its message.")
        try:
            options = {"add_generation_prompt": not begun, "continue_final_message": begun}
            return self._rendered(prompt, **self.template | options)
        except Exception as error:  # the template is the checkpoint's program and may raise anything
            raise PromptError(f"{place}: the tokenizer's chat template refuses the messages: {error}.") from error

    @cached_property
    def size(self) -> int:
        """The largest token id plus one."""
        return max(self.raw.get_vocab().values()) + 1

    def continuations(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of texts that follow a prompt: no special tokens are added."""
        return self.ids(texts, False)

    @cached_property
    def _structure(self) -> frozenset[int]:
        """The special tokens except those that mark thoughts; empty where no special token does."""
        found = frozenset(number for number, token in self._special.items() if THOUGHTS.fullmatch(token) is None)
        return found if len(found) < len(self._special) else frozenset()

    def decode(self, rows: Sequence[Sequence[int]], special: bool = False) -> list[str]:
        """Texts without special tokens, except those that mark thoughts; with all of them if `special`."""
        if not special and self._structure:  # what scores an answer must tell it from thoughts
            rows, special = [[number for number in row if number not in self._structure] for row in rows], True
        return self.raw.batch_decode(rows, skip_special_tokens=not special) if len(rows) else []


class RandomTokens(Tokenizer):
    """Encodes a text as as many tokens of a model's vocabulary as it has characters, drawn by the text and `seed`:
    none of its special tokens. Errors: those of `load_tokenizer`."""

    def __init__(self, model: str | os.PathLike[str], seed: int = 0) -> None:
        known = load_tokenizer(model)
        super().__init__(known.raw, known.end_ids)
        special = {*known.raw.all_special_ids, *known.end_ids}
        self.seed, self._ids = seed, [one for one in sorted(known.raw.get_vocab().values()) if one not in special]

    def ids(self, texts: Sequence[str], special: bool) -> list[list[int]]:
        return [random.Random(f"{self.seed}/{text}").choices(self._ids, k=len(text)) for text in texts]


def as_tokenizer(given: TokenizerLike) -> Tokenizer:
    """The tokenizer of a directory or hub name, or a given tokenizer of transformers or `Tokenizer`.

    Errors: ConfigError for anything else, CheckpointError as `load_tokenizer`.
    """
    if isinstance(given, Tokenizer):
        return given
    if isinstance(given, str | os.PathLike):
        return load_tokenizer(given)
    library = sys.modules.get("transformers")  # imported, if `given` is one of its tokenizers
    if library is not None and isinstance(given, library.PreTrainedTokenizerBase):
        return Tokenizer(given)
    raise ConfigError(
        f"tokenizer= is a {type(given).__name__}: give a checkpoint directory, a name on the Hugging Face Hub, or a "
        f"tokenizer of transformers."
    )


def prompt_tokenizer(given: TokenizerLike | None, chat_template_kwargs: Mapping[str, Any] | None) -> Tokenizer | None:
    """`as_tokenizer` of a loader, whose prompts are rendered with these arguments of the chat template.

    Errors: ConfigError for arguments without a tokenizer, or that are not named.
    """
    found = None if given is None else as_tokenizer(given)
    if not chat_template_kwargs:
        return found
    options = chat_template_kwargs if isinstance(chat_template_kwargs, Mapping) else {}
    if found is None or found.raw.chat_template is None:
        what = "no tokenizer= is given, and the actor tokenises without them" if found is None else "it has none"
        raise ConfigError(
            f"chat_template_kwargs={chat_template_kwargs!r} are of the tokenizer's chat template; {what}."
        )
    fixed = {"add_generation_prompt", "continue_final_message", "tokenize"}
    if not options or (wrong := [name for name in options if not isinstance(name, str) or name in fixed]):
        named = f"; {wrong[0]!r} follows from the prompt" if options else ""
        raise ConfigError(f"chat_template_kwargs={chat_template_kwargs!r}: give {{'enable_thinking': False}}{named}.")
    return Tokenizer(found.raw, found.end_ids, options)


def load_tokenizer(directory: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a directory or of a name on the Hugging Face Hub.

    Errors: CheckpointError when the directory has no tokenizer or asks for code of its authors, and for a name that the
    hub does not give here.
    """
    from huggingface_hub.errors import StrictDataclassError

    name, path = os.fspath(directory), Path(directory)
    named = not path.exists() and not path.is_absolute() and not name.startswith(".") and name.count("/") == 1
    if not named and not has_tokenizer(directory):
        raise CheckpointError(f"{directory} has no tokenizer: none of {', '.join(_FILES)} is there.")
    check_no_code(directory)
    files = () if named else (one.stat() for one in sorted(path.iterdir()) if one.is_file())
    _check_special_tokens(path)
    ends = _configured_ends(path)
    try:
        return _loaded(name, tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in files), frozenset(ends))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, StrictDataclassError) as error:
        if not named:
            read = path / "config.json" if isinstance(error, StrictDataclassError) else f"the tokenizer of {directory}"
            raise CheckpointError(f"{read} cannot be read: {' '.join(str(error).split())}.") from error
        raise CheckpointError(
            f"{name} is neither a directory nor a model whose tokenizer the hub gives here without "
            f"running code of its authors: {type(error).__name__}."
        ) from error


@lru_cache(maxsize=2)
def _loaded(name: str, versions: tuple[tuple[int, int, int], ...], ends: frozenset[int]) -> Tokenizer:
    """Shared by the parts of a process, as long as the directory's files have these `versions`."""
    from transformers import AutoTokenizer

    del versions
    return Tokenizer(AutoTokenizer.from_pretrained(name, trust_remote_code=False), ends)


def _check_special_tokens(directory: Path) -> None:
    """Errors: CheckpointError for a special token that is no text."""
    for path in (directory / name for name in _TOKEN_FILES):
        found = read_settings(path) if path.is_file() else {}
        for key in [key for key in found if key in _TOKENS]:
            token = found[key]["content"] if isinstance(found[key], dict) and "content" in found[key] else found[key]
            if not isinstance(token, str | None):
                raise CheckpointError(f"{path} has {key}={found[key]!r}. Give the text of a token.")


def end_token_ids(directory: str | os.PathLike[str]) -> tuple[int, ...]:
    """The token ids that end a response of this model, ascending: those of its tokenizer, `generation_config.json` and
    `config.json` together.

    Errors: CheckpointError for ids that are not whole numbers, and those of `load_tokenizer`.
    """
    found = load_tokenizer(directory).end_ids if has_tokenizer(directory) else _configured_ends(Path(directory))
    return tuple(sorted(found))


def _configured_ends(directory: Path) -> set[int]:
    ends = set[int]()
    for name in ("generation_config.json", "config.json"):
        found = read_settings(path).get("eos_token_id") if (path := directory / name).is_file() else None
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if not all(type(one) is int and one >= 0 for one in ids):
            raise CheckpointError(f"{path} has eos_token_id={found!r}. Give the id of a token, or a list of them.")
        ends |= set(ids)
    return ends


# Prompts


def other_token(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> str | None:
    """A token with another id in the tokenizer of `other`, in words; None where both are equal as far as their
    `tokenizer.json` say it."""
    files = [Path(directory) / "tokenizer.json" for directory in (one, other)]
    if files[0].resolve() == files[1].resolve():
        return None
    try:
        texts = [file.read_bytes() for file in files]
        if texts[0] == texts[1]:
            return None
        (own, added), (theirs, also) = map(_ids, texts)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # a token that only one of them adds, such as one for padding, has no other meaning in the other
    here, there = (own | added, theirs | also)
    odd = {token for token in own.keys() | theirs.keys() if here.get(token) != there.get(token)}
    odd |= {token for token, at in added.items() if there.get(token, at) != at}
    if not odd:
        by_id = {at: token for token, at in there.items()}
        odd = {token for token, at in added.items() if by_id.get(at, token) != token}
    if not odd:
        return None
    token = min(odd)
    return f"{token!r} is token {there.get(token)} there and {here.get(token)} here"


def _ids(text: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """The ids of a model's tokens, and those of tokens added to it."""
    found = json.loads(text)
    vocab = found["model"]["vocab"]
    ids = vocab if isinstance(vocab, dict) else {token: at for at, (token, _) in enumerate(vocab)}
    return ids, {one["content"]: one["id"] for one in found.get("added_tokens") or ()}


def check_prompt(place: str, column: str, prompt: Any, chat: bool = True, images: bool = False) -> None:
    """Refuse a prompt other than text or, with `chat`, messages (with `images`). Errors: PromptError naming place,
    column, message."""
    if chat and isinstance(prompt, list):
        check_messages(place, column, prompt, images)
    elif not isinstance(prompt, str) or not prompt:
        shown = "empty" if prompt == "" else "null" if prompt is None else f"a {type(prompt).__name__}"
        asked = "text or a list of chat messages" if chat else "text"
        raise PromptError(f"{place}: column {column!r} is {shown}; it must be {asked}.")
    else:
        check_text(f"{place}: column {column!r}", prompt)


def check_text(where: str, text: str) -> None:
    """Refuse text that no tokenizer takes. Errors: PromptError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"{where} has half of a surrogate pair at character {error.start}, which is no text."
        ) from None


def check_messages(place: str, column: str, messages: list[Any], images: bool = False) -> None:
    """Refuse messages without a known `role` and a `content` of text or parts of text, and of `images`."""
    if not messages:
        raise PromptError(f"{place}: column {column!r} is an empty list; it must be text or a list of messages.")
    for number, message in enumerate(messages):
        where = f"{place}: column {column!r}, message {number}"
        if not isinstance(message, Mapping):
            raise PromptError(f"{where} is a {type(message).__name__}; it needs 'role' and 'content'.")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise PromptError(f"{where} has no 'role'; it needs 'role' and 'content'.")
        if role not in ROLES:
            raise PromptError(f"{where} has the unknown role {role!r}.{nearest(role, ROLES)}")
        if content is None and not message.get("tool_calls"):
            raise PromptError(f"{where} ({role}) has no content; it needs 'role' and 'content'.")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else [] if content is None else content
        if not isinstance(parts, list):
            raise PromptError(f"{where} ({role}) has content that is a {type(content).__name__}; it must be text.")
        texts = [part for part in parts if not (images and is_image(part))]
        for part in texts:
            if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise PromptError(f"{where} ({role}) has content with a part of type {kind!r}; {_read(kind, images)}.")
            check_text(f"{where} ({role})", part["text"])
        if not text_of(content) and len(texts) == len(parts) and role not in _MAY_SAY_NOTHING:
            raise PromptError(f"{where} ({role}) has empty content.")


def _read(kind: Any, images: bool) -> str:
    """What is read instead of a part of this type."""
    if images:
        return "text is read, and {'type': 'image'}, whose image is in the column 'images'"
    return "only text is read" + ("; images with PromptLoader(processor=)" if kind == "image" else "")


def is_image(part: Any) -> bool:
    """Whether a part of a message's content stands for an image, which it does not hold itself."""
    own = {name for name, value in part.items() if value is not None} if isinstance(part, Mapping) else set()
    return own == {"type"} and part["type"] == "image"


def text_of(content: str | list[Any] | None) -> str:
    """The text of a message's content, its parts joined."""
    return "".join(part.get("text") or "" for part in content) if isinstance(content, list) else content or ""


def characters(prompt: str | list[Any]) -> int:
    """Number of characters of a text, or of the contents of messages."""
    return len(prompt) if isinstance(prompt, str) else sum(len(text_of(message.get("content"))) for message in prompt)


def most_tokens(prompt: str | list[Any]) -> int:
    """An upper bound of a prompt's tokens, without tokenising it: its bytes, and what a chat template adds."""
    if isinstance(prompt, str):
        return (len(prompt) if prompt.isascii() else 4 * len(prompt)) + _ADDED
    return _TEMPLATE + sum(most_tokens(text_of(message.get("content"))) for message in prompt)


def plain_messages(messages: list[Any]) -> list[dict[str, Any]]:
    """Messages for templates: text in one piece unless there are images between, no fields without a value.

    In tables every message has the fields of all messages; a template would read a null as a value.
    """
    return [
        {key: value for key, value in message.items() if value is not None}
        | {"content": _plain_content(message.get("content"))}
        for message in messages
    ]


def _plain_content(content: str | list[Any] | None) -> str | list[dict[str, Any]]:
    if isinstance(content, list) and any(map(is_image, content)):
        return [{key: value for key, value in part.items() if value is not None} for part in content]
    return text_of(content)

"""Prompts: a checked source of prompts, and endless batches of them."""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import Objects
from hybridflow.batch.ragged import Ragged
from hybridflow.data.encoded_image import MOST_PIXELS
from hybridflow.data.image_processor import ImageProcessor, Patches, image_processor
from hybridflow.data.records import Record, differing_column, open_records
from hybridflow.data.resumable_sampler import Dataset, Draw, ResumableSampler, check_sizes
from hybridflow.data.tokenizer import (
    MOST_CHARACTERS,
    Tokenizer,
    TokenizerLike,
    characters,
    check_prompt,
    most_tokens,
    prompt_tokenizer,
    too_long,
)
from hybridflow.errors import ConfigError, PromptError, nearest
from hybridflow.models.images import GRIDS, PIXELS, VISION_FAMILIES, ImageTokens
from hybridflow.settings import by_name

logger = logging.getLogger(__name__)

RESERVED = frozenset(
    {
        *("row_id", "group_id", "prompt_ids", "response", "response_ids", "response_mask"),
        *("num_tokens", "finished", "temperature", "log_probs", "old_log_probs", "ref_log_probs", "values", "rewards"),
        *("advantages", "returns", "kl", "kl_coef", "costs", "cost_values", "cost_returns", "cost_advantages"),
        *("lagrange", "reward_failure", "cost_failure", "reward_norm_mean", "reward_norm_std"),
        *("policy_version", "response_index", "spans", "recomputed_tokens", "response_tokens", "routed_experts"),
        *(PIXELS, GRIDS),
    }
)
RESERVED_PREFIXES = ("rewards/", "costs/")
"""Columns that hybridflow writes; prompts must not have them."""

Map = Callable[[Record], Mapping[str, Any]]
_VERL, _TRUTHS = "reward_model", ("ground_truth", "answer")
_IMAGES, _SCANNED = "images", 16  # rows of files that are in memory at a time


class PromptRows(NamedTuple):
    """Rows that were read: their records, token ids with a tokenizer, and patches with a processor."""

    records: list[Record]
    ids: list[list[int]] | None = None
    patches: Patches | None = None


class Prompts(Dataset):
    """The prompts of a source: `prompts[i]` is a record with `prompt` (text, or a list of chat messages).

    Arguments are those of `PromptLoader`. All records are scanned once and not kept: `map` runs again for each drawn
    record. `filtered` counts the records left out for more than `max_prompt_tokens` tokens. `fingerprint` is a hash of
    the other prompts in order, with their images (not of further columns: reading a whole table would take long, and a
    corrected answer changes no order). `columns` are the names in every drawn record.
    Errors: PromptError naming file, row and column.
    """

    def __init__(
        self,
        source: Any,
        *,
        prompt: str = "prompt",
        split: str | None = None,
        name: str | None = None,
        map: Map | None = None,
        tokenizer: Tokenizer | None = None,
        max_prompt_tokens: int | None = None,
        processor: ImageProcessor | None = None,
    ) -> None:
        if max_prompt_tokens is not None:
            check_sizes(max_prompt_tokens=max_prompt_tokens)
            if tokenizer is None:
                raise ConfigError(f"max_prompt_tokens={max_prompt_tokens} counts tokens: give tokenizer= as well.")
        self.prompt, self.map, self.processor = prompt, map, processor
        self._tokenizer = tokenizer if processor is None else processor.tokenizer
        self.records = open_records(source, split=split, name=name)
        if processor is not None:
            self.records = self.records.encoded()
            self.records.at_once = _SCANNED
        # a table's rows have the same columns, so only the prompts are checked one by one
        self._uniform = map is None and self.records.columns is not None
        self._columns: frozenset[str] | None = None  # of every record, known from the first one
        if self._uniform:
            self._check_columns(self.records.where, self.records.columns or ())
            self._columns = frozenset(self.records.columns or ())
            if _VERL in self._columns and len(self.records):
                self._columns = frozenset(_with_truth(self.records[0]))
        self._look_through(max_prompt_tokens)

    def __len__(self) -> int:
        return len(self.records) if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> Record:
        at = self._at(index)
        return self._prepared(at, self.records[at])

    @property
    def columns(self) -> list[str]:
        return sorted("prompt" if column == self.prompt else column for column in self._columns or ())

    @property
    def tokenizes(self) -> bool:
        """Whether batches have `prompt_ids`."""
        return self._tokenizer is not None

    def place(self, index: int) -> str:
        """The place of prompt `index`: file and line, or row."""
        return self.records.place(self._at(index))

    def _at(self, index: int) -> int:
        at = range(len(self))[index]
        return at if self._kept is None else int(self._kept[at])

    def _look_through(self, limit: int | None) -> None:
        digest, kept, shortest, longest = hashlib.blake2b(digest_size=16), [], None, 0
        bounds, added, bad, self._seen = list[int](), list[int](), list[PromptError](), 0
        columns = [self.prompt, *({_IMAGES} & {*(self.records.columns or ())} if self.processor else ())]
        for chunk in self.records.scan(columns if self._uniform else None):
            places, records = [row for row, _ in chunk], [self._prepared(row, raw) for row, raw in chunk]
            prompts = [record["prompt"] for record in records]
            found = [self._image_tokens(row, record, bad) for row, record in zip(places, records, strict=True)]
            if limit is None or self._tokenizer is None:
                for place, prompt in zip(places, prompts, strict=True):
                    if (length := characters(prompt)) > MOST_CHARACTERS:
                        raise too_long(f"{self.records.place(place)}: column {self.prompt!r}", length)
            else:
                names = [self.records.place(place) for place in places]
                lengths = self._tokenizer.lengths(prompts, names, self.prompt)
                lengths = [length + more for length, (more, _) in zip(lengths, found, strict=True)]
                shortest, longest = min([*lengths, shortest or lengths[0]]), max(longest, *lengths)
                fitting = [i for i, length in enumerate(lengths) if length <= limit]
                kept += [places[i] for i in fitting]
                prompts, found = [prompts[i] for i in fitting], [found[i] for i in fitting]
            for one, (more, images) in zip(prompts, found, strict=True):
                bounds.append(most_tokens(one) + more)
                added.append(more)
                self._seen += bool(images)
                digest.update(repr((one, images) if self.processor else one).encode())
        if bad:
            raise PromptError(f"{len(bad)} of {len(self.records)} prompts have images as follows: {bad[0]}")
        self.filtered = 0 if limit is None else len(self.records) - len(kept)
        self._kept = torch.tensor(kept) if self.filtered else None
        self._bounds, self._added, self.fingerprint = torch.tensor(bounds), added, digest.hexdigest()
        if self.filtered == len(self.records):
            raise PromptError(
                f"{self.records.where}: all {self.filtered} prompts have more than max_prompt_tokens={limit} tokens; "
                f"the shortest has {_shown(shortest)}."
            )
        if self.filtered:
            logger.warning(
                "%s: %d of %d prompts are left out, which have more than max_prompt_tokens=%d tokens (the longest %s).",
                *(self.records.where, self.filtered, len(self.records), limit, _shown(longest)),
            )

    def _image_tokens(self, row: int, record: Record, bad: list[PromptError]) -> tuple[int, list[Any]]:
        """Tokens that the images of a record add to its prompt, and what is known of them; `bad` takes an error."""
        if self.processor is not None:
            try:
                return self.processor.check(self.records.place(row), record["prompt"], record.get(_IMAGES))
            except PromptError as error:
                bad.append(error)
        return 0, []

    def check_fit(self, tokens: int, tokenizer: Callable[[], Tokenizer], where: str) -> None:
        """Tokenises only prompts that may be too long. Errors: PromptError for prompts of more than `tokens` tokens,
        the limit of `where`."""
        if not (may := (self._bounds > tokens).nonzero().flatten().tolist()):
            return
        known = self._tokenizer or tokenizer()
        lengths = known.lengths([self[i]["prompt"] for i in may], [self.place(i) for i in may], self.prompt)
        lengths = [length + self._added[i] for length, i in zip(lengths, may, strict=True)]
        if long := [(length, i) for i, length in zip(may, lengths, strict=True) if length > tokens]:
            length, at = max(long)
            raise PromptError(
                f"{len(long)} of {len(self)} prompts are too long for {where}, which takes {tokens} tokens and a "
                f"response: the longest, {self.place(at)}, has {_shown(length)}. PromptLoader(tokenizer=..., "
                f"max_prompt_tokens={tokens}) leaves them out; check_context=False does not look, where an agent cuts "
                f"them."
            )

    def check_images(self, tokens: ImageTokens | None, model: str, generates: bool) -> None:
        """Errors: PromptError for images that the model, which has these `tokens` for them, does not read. One that
        does not generate takes rows that have none."""
        if self.processor is not None and tokens is None and (self._seen or generates):
            raise PromptError(
                f"{self._seen} of {len(self)} prompts have images, and {model} reads text only. Use a model that reads "
                f"images ({', '.join(VISION_FAMILIES)}), or give PromptLoader(tokenizer=) in place of processor=."
            )
        if self.processor is not None and tokens is not None:
            self.processor.check_model(tokens, model)

    def read(self, draws: list[Draw]) -> PromptRows:
        """Errors: PromptError for a prompt without any token, and for images that cannot be read."""
        rows = [self._at(draw.index) for draw in draws]
        records = [self._prepared(row, self.records[row]) for row in rows]
        if self._tokenizer is None:
            return PromptRows(records)
        places = [self.records.place(row) for row in rows]
        ids = self._tokenizer.encode([record["prompt"] for record in records], places, self.prompt)
        if (processor := self.processor) is None:
            return PromptRows(records, ids)
        images = [processor.read(place, one.get(_IMAGES)) for place, one in zip(places, records, strict=True)]
        patches = processor.patches(places, images)
        ids = [processor.expanded(*row) for row in zip(places, ids, patches.grids.rows(), strict=True)]
        records = [one | {_IMAGES: own} if _IMAGES in one else one for one, own in zip(records, images, strict=True)]
        return PromptRows(records, ids, patches)

    def batch(self, numbers: range, rows: PromptRows) -> Batch:
        """`row_id` [B] int64, the columns of the records as Python objects, and `prompt_ids` (ragged int64)."""
        columns: dict[str, Any] = {"row_id": torch.arange(numbers.start, numbers.stop)}
        # objects as they are in the file: a reward function gets the exact values
        columns |= {column: Objects(record[column] for record in rows.records) for column in rows.records[0]}
        if rows.ids is not None:
            columns["prompt_ids"] = Ragged.from_rows(rows.ids, dtype=torch.int64)
        if rows.patches is not None:
            columns |= {PIXELS: rows.patches.pixels, GRIDS: rows.patches.grids}
        return Batch(columns)

    def _prepared(self, row: int, raw: Any) -> Record:
        """The drawn record, with its prompt in the column `prompt`. Errors: PromptError."""
        record = _with_truth(dict(raw) if self._uniform else self._mapped(row, raw))
        if self._columns is None:
            self._columns = frozenset(record)
        if not self._uniform and record.keys() != self._columns:
            raise PromptError(
                f"{differing_column(self.records.place(row), record, self.records.place(0), self._columns)}; every "
                f"record needs the same columns."
            )
        images = self.processor is not None
        check_prompt(self.records.place(row), self.prompt, record[self.prompt], images=images)
        if self.prompt != "prompt":
            record["prompt"] = record.pop(self.prompt)
        return record

    def _mapped(self, row: int, raw: Any) -> Record:
        place = self.records.place(row)
        if not isinstance(raw, Mapping):
            raise PromptError(f"{place} is a {type(raw).__name__}; every record must be an object.")
        made: Any = dict(raw)
        if self.map is not None:
            try:
                made = self.map(made)
            except Exception as error:  # a user's function may raise anything; the message names the row
                name = getattr(self.map, "__name__", type(self.map).__name__)
                raise PromptError(f"{place}: map={name} raised {type(error).__name__}: {error}.") from error
            if not isinstance(made, Mapping):
                raise PromptError(f"{place}: map= returned a {type(made).__name__}; it must return a record.")
        self._check_columns(place, tuple(made))
        return dict(made)

    def _check_columns(self, place: str, columns: Sequence[str]) -> None:
        if self.prompt not in columns:
            found = sorted(map(str, columns))
            text = nearest(self.prompt, found)  # the message lists all of them already
            hint = text if "Did you mean" in text else " Name the one with the prompts by prompt=."
            raise PromptError(f"{place} has no column {self.prompt!r}; it has {found}.{hint}")
        if self.prompt != "prompt" and "prompt" in columns:
            raise PromptError(
                f"{place}: prompt={self.prompt!r} becomes the column 'prompt', and there is one already. Drop or "
                f"rename one of them by map=."
            )
        for column in columns:
            if not isinstance(column, str):
                raise PromptError(f"{place}: column {column!r} is a {type(column).__name__}; names are texts.")
            if column != self.prompt and (column in RESERVED or column.startswith(RESERVED_PREFIXES)):
                raise PromptError(f"{place}: column {column!r} is written by hybridflow. Rename it.")


class PromptSource(ResumableSampler):
    """The batches of a `PromptLoader`, with its arguments, on this process alone: it yields `Batch`es, and never waits.

    An epoch is a permutation of all prompts; a batch may take the end of one epoch and the beginning of the next, so no
    prompt is dropped, and has exactly `batch_size` rows. `row_id` is a running number, unique over the whole run.
    """

    @by_name
    def __init__(
        self,
        prompts: Any,
        *,
        batch_size: int,
        steps: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tokenizer: TokenizerLike | None = None,
        prompt: str = "prompt",
        split: str | None = None,
        name: str | None = None,
        map: Map | None = None,
        max_prompt_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_image_pixels: int = MOST_PIXELS,
        workers: int = 0,
        in_flight: int = 2,
        allow_changed: bool = False,
        check_context: bool = True,
    ) -> None:
        check_sizes(batch_size=batch_size, in_flight=in_flight, max_image_pixels=max_image_pixels)
        if processor is not None and tokenizer is None:
            tokenizer = processor if isinstance(processor, str | os.PathLike) else getattr(processor, "tokenizer", None)
        known, most = prompt_tokenizer(tokenizer, chat_template_kwargs), max_prompt_tokens
        reads = None if processor is None else image_processor(processor, known, max_image_pixels, _folder(prompts))
        how: dict[str, Any] = {"tokenizer": known, "max_prompt_tokens": most, "processor": reads}
        self.prompts = found = Prompts(prompts, prompt=prompt, split=split, name=name, map=map, **how)
        self.in_flight, self.check_context = in_flight, check_context
        identity = {"prompts": len(found), "fingerprint": found.fingerprint, "columns": found.columns}
        identity |= {"chat_template_kwargs": dict(chat_template_kwargs)} if chat_template_kwargs else {}
        identity |= {} if reads is None else {"processor": reads.settings}
        super().__init__(found, identity, batch_size, steps, seed, shuffle, workers, allow_changed)

    def __len__(self) -> int:
        """Batches in all. Errors: TypeError when there is no end."""
        if self.steps is None:
            raise TypeError(f"a {type(self).__name__} without steps= has no length")
        return self.steps


def _folder(source: Any) -> Path:
    """Where relative paths of images begin: beside the file of prompts, in their directory, or here."""
    path = Path(source).expanduser() if isinstance(source, str | os.PathLike) else Path()
    return path if path.is_dir() else path.parent if path.is_file() else Path()


def _with_truth(record: Record) -> Record:
    """A row in verl's shape, {"reward_model": {"ground_truth": ...}, ...}, also has its ground truth as the columns
    that verl's scoring functions (`ground_truth`) and verifiers (`answer`) read, unless it has them."""
    if _VERL not in record or not isinstance(found := record[_VERL], Mapping | None):
        return record
    return dict.fromkeys(_TRUTHS, (found or {}).get("ground_truth")) | record


def _shown(tokens: float | None) -> str:
    return f"of more than {MOST_CHARACTERS} characters" if tokens == math.inf else f"{tokens}"


class DrawnPrompts:
    """Prompts `first`, `first` + 1, ... of a loader, for loops with an order of their own; kept until `forget`.

    `drawn` is the number of the next one; the `row_id` of a prompt is its number + `offset`.
    """

    def __init__(self, loader: PromptSource, first: int = 0) -> None:
        self.loader, self.drawn, self.offset = loader, first, 0
        self._batches = deque[tuple[int, Mapping[str, Any], Batch]]()  # first number, loader's state before, prompts

    def draw(self, source: Iterator[Batch], count: int) -> None:
        """Draw from the loader's iterator until `count` prompts have been drawn, or it ends."""
        while self.drawn < count:
            before = self.loader.state()
            if (prompts := next(source, None)) is None:
                return
            self.offset = int(prompts["row_id"][0]) - self.drawn
            self._batches.append((self.drawn, before, prompts))
            self.drawn += prompts.rows

    def rows(self, numbers: Sequence[int]) -> Batch:
        """The prompts with these numbers, in their order."""
        parts = []
        for first, _, prompts in self._batches:
            if places := [number - first for number in numbers if 0 <= number - first < prompts.rows]:
                parts.append(prompts[places])
        return Batch.concat(parts)

    def forget(self, below: int) -> None:
        """Prompts with smaller numbers are done with."""
        while self._batches and self._batches[0][0] + self._batches[0][2].rows <= below:
            self._batches.popleft()

    def state(self, oldest: int) -> dict[str, Any]:
        """The loader's state from which prompt `oldest` and all after it are drawn again, and its first number."""
        for first, before, prompts in self._batches:
            if first + prompts.rows > oldest:
                return {"loader": dict(before), "first": first}
        return {"loader": dict(self.loader.state()), "first": self.drawn}

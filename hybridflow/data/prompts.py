"""Prompts: read from JSONL or a list, checked when they are read, and drawn in batches without end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hybridflow.batch import Batch
from hybridflow.columns import Objects
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer
from hybridflow.errors import ConfigError, PromptError
from hybridflow.ragged import Ragged

Record = dict[str, Any]
RESERVED = (
    *("row_id", "group_id", "prompt_ids", "response", "response_ids", "response_mask"),
    *("num_tokens", "finished", "temperature", "log_probs", "old_log_probs", "ref_log_probs", "values", "rewards"),
    *("advantages", "returns", "kl", "kl_coef"),
)
"""Columns that hybridflow writes; a prompt file must not have them."""


def read_prompts(source: str | os.PathLike[str] | Sequence[Mapping[str, Any]]) -> list[Record]:
    """Records with `prompt` (text, or a list of chat messages) and the same further columns in each.

    `source` is a JSONL file (blank lines are skipped) or a list of mappings. Errors: PromptError naming file, line and
    column: no such file, nothing in it, a line that is not a JSON object, a prompt that is missing, null or empty, a
    column that not every record has.
    """
    if isinstance(source, str | os.PathLike):
        placed = list(_read_lines(Path(source)))
        where = str(source)
    else:
        placed = [(f"record {i}", record) for i, record in enumerate(source)]
        where = "the list of prompts"
    if not placed:
        raise PromptError(f"{where} has no prompts: give at least one record with a column 'prompt'.")
    columns = set(placed[0][1]) if isinstance(placed[0][1], Mapping) else set()
    for place, record in placed:
        _check_record(place, record, columns, placed[0][0])
    return [dict(record) for _, record in placed]


class PromptSource:
    """Batches of prompts in an order that the seed decides, epoch after epoch, exactly resumable.

    Yields `Batch`es of exactly `batch_size` rows: `row_id` [B] int64 (a running number, unique over the whole run),
    the columns of the records as Python objects, and `prompt_ids` (ragged int64) when a `tokenizer` (a checkpoint
    directory, or one that is loaded) is given. An epoch is a permutation of all prompts; a batch may take the end of
    one epoch and the beginning of the next, so no prompt is dropped. `steps` batches are drawn (None: without end).

    `state()` after any batch, given to `load_state` of a source over the same prompts, continues with the next one.
    Errors: PromptError (see `read_prompts`), ConfigError for sizes below one, CheckpointError without tokenizer.
    """

    def __init__(
        self,
        prompts: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
        *,
        batch_size: int,
        steps: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("steps", steps)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
        self.records = read_prompts(prompts)
        self.batch_size, self.steps, self.seed, self.shuffle = batch_size, steps, seed, shuffle
        self._tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | os.PathLike) else tokenizer
        self._drawn = 0  # batches so far: with the seed, the whole state
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        """Batches in all. Errors: TypeError when there is no end."""
        if self.steps is None:
            raise TypeError("a PromptSource without steps= has no length")
        return self.steps

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left: iterating goes on where the last iteration, or `load_state`, stopped."""
        while self.steps is None or self._drawn < self.steps:
            first = self._drawn * self.batch_size
            self._drawn += 1
            yield self._batch(range(first, first + self.batch_size))

    def state(self) -> dict[str, int]:
        """Plain numbers to be saved with a checkpoint."""
        return {"drawn": self._drawn, "batch_size": self.batch_size, "seed": self.seed, "prompts": len(self.records)}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Errors: ConfigError when the state is of other prompts, another batch size or seed."""
        for name, own in self.state().items():
            if name not in state or (name != "drawn" and state[name] != own):
                raise ConfigError(
                    f"the saved state has {name}={state.get(name)!r}, this source has {own}: continue with the "
                    f"prompts, batch_size and seed of the saved run."
                )
        self._drawn = int(state["drawn"])

    def _batch(self, numbers: range) -> Batch:
        records = [self.records[self._pick(number)] for number in numbers]
        columns: dict[str, Any] = {"row_id": torch.arange(numbers.start, numbers.stop)}
        # objects as they are in the file: a reward function gets the exact values
        columns |= {name: Objects(record[name] for record in records) for name in records[0]}
        if self._tokenizer is not None:
            columns["prompt_ids"] = Ragged.from_rows(self._tokenizer.encode(columns["prompt"]), dtype=torch.int64)
        return Batch(columns)

    def _pick(self, number: int) -> int:
        """Index of the prompt that is drawn as `number` in the whole run."""
        epoch, at = divmod(number, len(self.records))
        if not self.shuffle:
            return at
        if epoch != self._epoch:
            # a generator per epoch, so that any point of the run is found without drawing what came before it
            generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
            self._epoch, self._order = epoch, torch.randperm(len(self.records), generator=generator)
        return int(self._order[at])


def _read_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise PromptError(f"there is no prompt file {path}.") from None
    except (IsADirectoryError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} is not a JSONL text file: {error}.") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield place, json.loads(line)
            except json.JSONDecodeError as error:
                raise PromptError(f"{place} is not JSON: {error.msg} at character {error.colno}.") from None


def _check_record(place: str, record: Any, columns: set[str], first: str) -> None:
    if not isinstance(record, Mapping):
        raise PromptError(f"{place} is a {type(record).__name__}; every record must be an object with a 'prompt'.")
    prompt = record.get("prompt")
    if "prompt" not in record:
        raise PromptError(f"{place} has no column 'prompt'; it has {sorted(map(str, record))}.")
    if isinstance(prompt, list):
        _check_messages(place, prompt)
    elif not isinstance(prompt, str) or not prompt:
        shown = "empty" if prompt == "" else "null" if prompt is None else f"a {type(prompt).__name__}"
        raise PromptError(f"{place}: column 'prompt' is {shown}; it must be text or a list of chat messages.")
    if reserved := sorted(set(record) & set(RESERVED)):
        raise PromptError(f"{place}: column {reserved[0]!r} is written by hybridflow. Rename it.")
    if differing := sorted(map(str, set(record) ^ columns)):
        owner = place if differing[0] in record else first
        raise PromptError(
            f"{place}: only {owner} has the column {differing[0]!r}; every record needs the same columns."
        )


def _check_messages(place: str, messages: list[Any]) -> None:
    good = all(isinstance(m, Mapping) and isinstance(m.get("role"), str) and m.get("content") for m in messages)
    if not messages or not good:
        raise PromptError(f"{place}: column 'prompt' must be text or a list of messages with 'role' and 'content'.")

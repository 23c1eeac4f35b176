"""Micro-batches by token budget: rows of prompt + response, padded on the right and only here. Pure.

Shapes: B rows, b rows of one micro-batch, S positions, N selected positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridflow.errors import BatchError
from hybridflow.ragged import Ragged


@dataclass(frozen=True)
class MicroBatch:
    """Rows `rows` [b] of a batch as `ids` [b, S] int64 and what is read of the model's output.

    `index` [N] int64 are positions in [S * b] (position-major, Megatron's order), `targets` [N] the tokens that they
    predict, `lengths` [b] how many of them belong to each row. A micro-batch without any position still asks for one,
    which `selected` = 0 says to drop: every stage must run.
    """

    rows: Tensor
    ids: Tensor
    index: Tensor
    targets: Tensor
    lengths: Tensor

    @property
    def selected(self) -> int:
        return len(self.targets)

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        ids, index, targets = (x.to(device, non_blocking=True) for x in (self.ids, self.index, self.targets))
        return MicroBatch(self.rows, ids, index, targets, self.lengths)


@dataclass(frozen=True)
class Split:
    """How rows become micro-batches: at most `budget` tokens each, S a multiple of `multiple`, at least `count`
    micro-batches where there are as many rows (a pipeline with one would stand still). Token ids are below `vocab`."""

    budget: int
    multiple: int = 1
    count: int = 1
    vocab: int | None = None

    def rows(self, lengths: Tensor) -> list[Tensor]:
        """Row indices of each micro-batch: longest rows first, or in order when all fit into one."""
        rows = len(lengths)
        if not rows:
            return []
        count = min(self.count, rows)
        if count == 1 and self._padded(int(lengths.max())) * rows <= self.budget:
            return [torch.arange(rows)]
        order = lengths.argsort(descending=True, stable=True)
        out, start = [], 0
        while start < rows:
            fit = max(1, self.budget // self._padded(int(lengths[order[start]])))
            share = -(-(rows - start) // max(1, count - len(out)))  # leaves a row for each that is still to come
            out.append(order[start : start + min(fit, share)])
            start += len(out[-1])
        return out

    def _padded(self, length: int) -> int:
        return max(1, -(-length // self.multiple)) * self.multiple

    def responses(self, prompts: Ragged, responses: Ragged, own: bool = False) -> list[MicroBatch]:
        """Micro-batches that read the positions which predict the response tokens, or with `own` their own positions.

        Errors: BatchError of `check`.
        """
        self.check(prompts, responses)
        return [self._response_batch(rows, prompts, responses, own) for rows in self._split(prompts, responses)]

    def last_tokens(self, prompts: Ragged, responses: Ragged) -> list[MicroBatch]:
        """Micro-batches that read the last position of every row. Errors: BatchError of `check`."""
        self.check(prompts, responses)
        out = []
        for rows in self._split(prompts, responses):
            prompt, response = prompts.index(rows), responses.index(rows)
            last = prompt.lengths + response.lengths - 1
            index = last * len(rows) + torch.arange(len(rows))
            ids = self._ids(prompt, response)
            out.append(MicroBatch(rows, ids, _some(index), torch.zeros_like(index), torch.ones_like(last)))
        return out

    def _split(self, prompts: Ragged, responses: Ragged) -> Sequence[Tensor]:
        return self.rows(prompts.lengths + responses.lengths) or [torch.arange(0)]

    def _response_batch(self, rows: Tensor, prompts: Ragged, responses: Ragged, own: bool) -> MicroBatch:
        prompt, response = prompts.index(rows), responses.index(rows)
        ids = self._ids(prompt, response)
        row = response.row_index()
        position = _positions(response, row) + (prompt.lengths if own else prompt.lengths - 1)[row]
        index = position * len(ids) + row
        return MicroBatch(rows, ids, _some(index), response.values.to(torch.int64), response.lengths)

    def _ids(self, prompt: Ragged, response: Ragged) -> Tensor:
        """[b, S] int64, zero where padded; one row of zeros when there are no rows."""
        lengths = prompt.lengths + response.lengths
        width = self._padded(int(lengths.max()) if len(lengths) else 1)
        ids = torch.zeros(max(1, len(lengths)), width, dtype=torch.int64)
        row = prompt.row_index()
        ids[row, _positions(prompt, row)] = prompt.values.to(torch.int64)
        row = response.row_index()
        ids[row, _positions(response, row) + prompt.lengths[row]] = response.values.to(torch.int64)
        return ids

    def check(self, prompts: Ragged, responses: Ragged) -> None:
        """Errors: BatchError for a row without a prompt (nothing predicts its first response token), or with a token
        id that is not in the vocabulary (a rank of a split vocabulary would take it for another rank's)."""
        if len(prompts) != len(responses):
            raise BatchError(f"there are {len(prompts)} prompts and {len(responses)} responses: give one each.")
        if len(prompts) and int(prompts.lengths.min()) < 1:
            row = int(prompts.lengths.argmin())
            raise BatchError(f"row {row} has an empty prompt: its first response token has nothing to follow.")
        for name, ids in (("prompt_ids", prompts), ("response_ids", responses)):
            self._check_ids(name, ids)

    def _check_ids(self, name: str, ids: Ragged) -> None:
        if self.vocab is None or not len(ids.values):
            return
        smallest, largest = (int(end) for end in ids.values.aminmax())
        if smallest < 0 or largest >= self.vocab:
            wrong = smallest if smallest < 0 else largest
            row = int(ids.row_index()[(ids.values == wrong).nonzero()[0, 0]])
            raise BatchError(
                f"row {row} of {len(ids)} has the token id {wrong} in {name}, the model's vocabulary is "
                f"0..{self.vocab - 1}. Was it made with another tokenizer?"
            )


def _positions(ragged: Ragged, row: Tensor) -> Tensor:
    """[values]: each value's position in its row."""
    return torch.arange(len(row)) - ragged.offsets[:-1][row]


def _some(index: Tensor) -> Tensor:
    """`index`, or position 0 when it is empty."""
    return index if len(index) else torch.zeros(1, dtype=torch.int64)

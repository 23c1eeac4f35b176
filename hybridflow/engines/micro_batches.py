"""Micro-batches by token budget: rows of prompt + response, packed into one row or padded on the right. Pure.

Packed, a micro-batch is one row [1, S] of sequences without padding between them; padded, every row is as long as the
longest among them. Padding exists only here.

Shapes: B sequences, R rows of a micro-batch, b and S rows and positions of the model's input, N
positions that are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hybridflow.batch.batch import Batch
from hybridflow.batch.pinned import to_device
from hybridflow.batch.ragged import Ragged
from hybridflow.errors import BatchError, ModelError, of_row
from hybridflow.models.images import ImageTokens
from hybridflow.models.spec import Cost

Positions = Literal["before", "own", "last"]
"""Positions read in a row: before each response token (which predict it), at each of them, or only the last token."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """The sequences of a packed row [1, S], one after the other: `lengths` (on the host) add up to S.

    `offsets` [B + 1] int32 say where each begins and end with S; `positions` [S] int64 count from 0 in each sequence.
    Both are on the device that computes. With `share` (a ContextParallel) this rank has a slice of the row's tokens.
    """

    lengths: tuple[int, ...]
    offsets: Tensor
    positions: Tensor
    share: Any = None

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Sequences:
        """On the CPU. Errors: BatchError without a sequence, or for one without a token."""
        if not len(lengths) or min(lengths) < 1:
            raise BatchError(f"sequences of a packed row have at least one token each, got {list(lengths)[:20]}.")
        sizes = torch.as_tensor(lengths, dtype=torch.int64)
        offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        positions = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], sizes)
        return cls(tuple(sizes.tolist()), offsets.to(torch.int32), positions)

    @property
    def tokens(self) -> int:
        return len(self.positions)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """(how many, length) of neighbouring sequences of equal length: they are rows of one dense tensor."""
        return tuple((len(list(equal)), length) for length, equal in itertools.groupby(self.lengths))

    def to(self, device: torch.device) -> Sequences:
        if self.positions.device == device:
            return self
        offsets, positions = to_device([self.offsets, self.positions], device)
        return replace(self, offsets=offsets, positions=positions)

    @cached_property
    def whole(self) -> Sequences:
        """The same without `share`."""
        return replace(self, share=None)


@dataclass(frozen=True)
class Images:
    """The different images of a micro-batch: `patches` [n, P] float32, `grids` [k, 3] int64, which of them stand one
    behind the other in its tokens, `order`, and by them the places of all tokens in time, height and width, `positions`
    [3, b, S] int64."""

    patches: Tensor
    grids: Tensor
    positions: Tensor
    order: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Rows `rows` [R] of a batch as `ids` [b, S] int64 and what is read of the model's output.

    `index` [N] int64 are positions in the flattened `ids`, `targets` [N] the tokens that they predict, `lengths` [R]
    how many of them belong to each row. A micro-batch without positions still reads one, which `selected` = 0 drops:
    every stage must run. Packed, `sequences` says where the rows lie in ids [1, S] (the last of them may be padding up
    to a multiple); padded it is None, and causal attention never looks at what stands behind a row. `columns` are what
    a loss reads of the rows, `routing` [b, S, layers, k] int16 the experts that each token goes to (-1: not said). Of a
    micro-batch that ranks share, `place` [n] int64 are the positions of this rank among the `read` ones of all.
    `images` are those of its rows, if any has some.
    """

    rows: Tensor
    ids: Tensor
    index: Tensor
    targets: Tensor
    lengths: Tensor
    sequences: Sequences | None = None
    columns: Batch | None = None
    routing: Tensor | None = None
    place: Tensor | None = None
    read: int = 0
    images: Images | None = None

    @property
    def selected(self) -> int:
        return len(self.targets)

    @property
    def positions(self) -> Tensor:
        """[b, S] int64 on the device of `ids`: each token's place in its row."""
        if self.sequences is not None:
            whole, share = self.sequences.positions, self.sequences.share
            return (whole if share is None else share.part(whole))[None]
        return torch.arange(self.ids.shape[1], device=self.ids.device).expand(self.ids.shape)

    @property
    def position_major(self) -> Tensor:
        """`index` as positions in the flattened [S, b], Megatron's order; the same for one packed row."""
        rows, width = self.ids.shape
        return self.index if rows == 1 else self.index % width * rows + self.index // width

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        ids, index, targets = to_device([self.ids, self.index, self.targets], device)
        sequences, columns = (part if part is None else part.to(device) for part in (self.sequences, self.columns))
        moved = {"ids": ids, "index": index, "targets": targets, "sequences": sequences, "columns": columns}
        place = self.place if self.place is None else to_device([self.place], device)[0]
        if self.images is not None:
            given = self.images
            patches, grids, positions = to_device([given.patches, given.grids, given.positions], device)
            moved["images"] = Images(patches, grids, positions, given.order)
        return replace(self, **moved, routing=self.routing_on(device), place=place)

    def routing_on(self, device: torch.device) -> Tensor | None:
        return self.routing if self.routing is None else to_device([self.routing], device)[0]


@dataclass(frozen=True)
class Split:
    """How rows become micro-batches: at most `budget` tokens each, S a multiple of `multiple`, at least `count`
    micro-batches where there are as many rows (a pipeline with one would stand still). Token ids are below `vocab`.

    Packed micro-batches are alike in `cost` (by default in tokens); padded ones have rows of similar length. With
    `single` every row is a micro-batch: for models that would see other rows of a packed one. `images`: how the model
    reads them.
    """

    budget: int
    multiple: int = 1
    count: int = 1
    vocab: int | None = None
    packed: bool = True
    cost: Cost | None = None
    single: bool = False
    images: ImageTokens | None = None

    def rows(self, lengths: Tensor, units: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Row indices of each micro-batch; in order when all fit into one.

        `units` are the rows [each] int64 that stay together, in their order, and count as one row: a unit above the
        budget is a micro-batch. Errors: ModelError for units of several rows with `single`.
        """
        if units is not None:
            return self._whole(lengths, units)
        if self.single:
            return list(torch.arange(len(lengths)).split(1)) if len(lengths) else []
        cost = self.cost and self.cost(lengths.double())
        return self._bins(lengths, cost) if self.packed else self._similar(lengths, torch.ones_like(lengths))

    def check_whole(self) -> None:
        """Errors: ModelError where no rows can stay together."""
        if self.single:
            raise ModelError(
                "this model computes each row alone, and the loss reads whole trajectories of several rows. Use "
                "aggregation='token-mean' and no ratio per sequence."
            )

    def _whole(self, lengths: Tensor, units: Sequence[Tensor]) -> list[Tensor]:
        self.check_whole()
        sizes = torch.tensor([len(unit) for unit in units])
        by_unit = Ragged.from_lengths(lengths[torch.cat([*units])], sizes)
        if self.packed:
            cost = self.cost and by_unit.with_values(self.cost(by_unit.values.double())).row_sum()
            found = self._bins(by_unit.row_sum(), cost)
        else:
            found = self._similar(torch.stack([row.max() for row in by_unit.rows()]), sizes)
        return [torch.cat([units[at] for at in each.tolist()]) for each in found]

    def _bins(self, tokens: Tensor, cost: Tensor | None) -> list[Tensor]:
        return pack(tokens, max(1, self.budget // self.multiple) * self.multiple, self.count, cost)

    def _similar(self, lengths: Tensor, sizes: Tensor) -> list[Tensor]:
        """Units of `sizes` rows, padded to `lengths`, by falling length."""
        units = len(lengths)
        if not units:
            return []
        count = min(self.count, units)
        if count == 1 and self._padded(int(lengths.max())) * int(sizes.sum()) <= self.budget:
            return [torch.arange(units)]
        order = lengths.argsort(descending=True, stable=True)
        out, start = [], 0
        while start < units:
            fit = self.budget // self._padded(int(lengths[order[start]]))
            share = -(-(units - start) // max(1, count - len(out)))  # leaves a unit for each that is still to come
            next_ones = order[start : start + share]
            out.append(next_ones[: max(1, int((sizes[next_ones].cumsum(0) <= fit).sum()))])
            start += len(out[-1])
        return out

    def _padded(self, length: int) -> int:
        return max(1, -(-length // self.multiple)) * self.multiple

    def micro_batches(
        self,
        prompts: Ragged,
        responses: Ragged,
        at: Positions = "before",
        units: Sequence[Tensor] | None = None,
        routing: Ragged | None = None,
        images: tuple[Ragged, Ragged] | None = None,
    ) -> list[MicroBatch]:
        """The rows as micro-batches that say which positions are read; `routing` are the experts of each row's first
        tokens, `images` the patches and grids of its images. Errors: BatchError of `check`, those of `rows`."""
        self.check(prompts, responses)
        split = self.rows(prompts.lengths + responses.lengths, units) or [torch.arange(0)]
        return [self._micro_batch(rows, prompts, responses, at, routing, images) for rows in split]

    def empty(self) -> MicroBatch:
        """A micro-batch without rows, for a rank that takes part in the collectives of others' micro-batches."""
        nothing = Ragged.from_rows([], torch.int64)
        return self._micro_batch(torch.arange(0), nothing, nothing, "before")

    def _micro_batch(
        self,
        rows: Tensor,
        prompts: Ragged,
        responses: Ragged,
        at: Positions,
        routing: Ragged | None = None,
        images: tuple[Ragged, Ragged] | None = None,
    ) -> MicroBatch:
        prompt, response = prompts.index(rows), responses.index(rows)
        ids, starts, sequences = self._laid_out(prompt, response)
        if at == "last":
            index = starts + prompt.lengths + response.lengths - 1
            targets, lengths = torch.zeros_like(index), torch.ones_like(index)
        else:
            row = response.row_index()
            index = (starts + prompt.lengths - int(at == "before"))[row] + _positions(response, row)
            targets, lengths = response.values.to(torch.int64), response.lengths
        experts = None
        if routing is not None:
            said = routing.index(rows)
            experts = torch.full((ids.numel(), *said.values.shape[1:]), -1, dtype=torch.int16)
            row = said.row_index()
            experts[starts[row] + _positions(said, row)] = said.values.to(torch.int16)
            experts = experts.view(*ids.shape, *experts.shape[1:])
        found = None if images is None else self._images(images, rows, ids, starts, prompt.lengths + response.lengths)
        return MicroBatch(rows, ids, some(index), targets, lengths, sequences, routing=experts, images=found)

    def _images(
        self, images: tuple[Ragged, Ragged], rows: Tensor, ids: Tensor, starts: Tensor, lengths: Tensor
    ) -> Images | None:
        """Those of `rows`, which begin at `starts` of the flattened `ids` [b, S]; None without any."""
        assert self.images is not None
        width, order, known = ids.shape[1], list[int](), dict[tuple[int, ...], list[int]]()
        places = torch.arange(width).repeat(3, ids.shape[0])  # of padding any
        parts, shapes = list[Tensor](), list[tuple[int, ...]]()
        for at in starts.argsort(stable=True).tolist():
            patches, grids = (column.row(int(rows[at])) for column in images)
            own = slice(start := int(starts[at]), start + int(lengths[at]))
            places[:, own] = self.images.positions(ids.view(-1)[own], grids)
            for part, shape in zip(patches.split(grids.prod(-1).tolist()), map(tuple, grids.tolist()), strict=True):
                alike = known.setdefault(shape, [])
                if (number := next((i for i in alike if parts[i].equal(part)), None)) is None:
                    alike.append(number := len(parts))
                    parts.append(part)
                    shapes.append(shape)
                order.append(number)
        if not parts:
            return None
        return Images(torch.cat(parts), torch.tensor(shapes), places.view(3, *ids.shape), tuple(order))

    def _laid_out(self, prompt: Ragged, response: Ragged) -> tuple[Tensor, Tensor, Sequences | None]:
        """ids [b, S] int64 (zero where padded), where each row begins in the flattened ids [R], and the sequences."""
        lengths = prompt.lengths + response.lengths
        if self.packed and not self.single:
            shape, starts, sequences = self._packed(lengths)
        else:
            shape = max(1, len(lengths)), self._padded(int(lengths.max()) if len(lengths) else 1)
            starts, sequences = torch.arange(len(lengths)) * shape[1], None
        ids = torch.zeros(shape, dtype=torch.int64)
        for part, first in ((prompt, starts), (response, starts + prompt.lengths)):
            row = part.row_index()
            ids.view(-1)[first[row] + _positions(part, row)] = part.values.to(torch.int64)
        return ids, starts, sequences

    def _packed(self, lengths: Tensor) -> tuple[tuple[int, int], Tensor, Sequences]:
        """Rows of equal length lie side by side, so that one call attends for all of them."""
        order = lengths.argsort(stable=True)
        laid = lengths[order]
        starts = torch.empty_like(lengths)
        starts[order] = laid.cumsum(0) - laid
        tokens = int(lengths.sum())
        width = self._padded(tokens)
        filler = [width - tokens] if width > tokens else []
        return (1, width), starts, Sequences.of([*laid.tolist(), *filler])

    def check(self, prompts: Ragged, responses: Ragged) -> None:
        """Errors: BatchError for a row without a prompt (nothing predicts its first response token), or with a token
        id that is not in the vocabulary (a rank of a split vocabulary would take it for another rank's)."""
        if len(prompts) != len(responses):
            raise BatchError(f"there are {len(prompts)} prompts and {len(responses)} responses: give one each.")
        if len(prompts) and int(prompts.lengths.min()) < 1:
            row = int(prompts.lengths.argmin())
            raise of_row(row, "has an empty prompt: its first response token has nothing to follow.")
        for name, ids in (("prompt_ids", prompts), ("response_ids", responses)):
            self._check_ids(name, ids)

    def _check_ids(self, name: str, ids: Ragged) -> None:
        if self.vocab is None or not len(ids.values):
            return
        if ids.dtype.is_floating_point:
            raise BatchError(f"{name} are {str(ids.dtype).removeprefix('torch.')}: token ids are whole numbers.")
        smallest, largest = (int(end) for end in ids.values.aminmax())
        if smallest < 0 or largest >= self.vocab:
            wrong = smallest if smallest < 0 else largest
            row = int(ids.row_index()[(ids.values == wrong).nonzero()[0, 0]])
            raise of_row(
                row,
                f"has the token id {wrong} in {name}, the model's vocabulary is 0..{self.vocab - 1}. Was it made with "
                f"another tokenizer?",
            )


def in_order(micro_batches: Sequence[MicroBatch], parts: Sequence[Tensor]) -> Ragged:
    """Outputs of each micro-batch ([selected] each, on the CPU) as the batch's rows in order."""
    order = torch.cat([micro.rows for micro in micro_batches]).argsort()
    lengths = torch.cat([micro.lengths for micro in micro_batches])
    return Ragged.from_lengths(torch.cat([*parts]), lengths).index(order)


def _positions(ragged: Ragged, row: Tensor) -> Tensor:
    """[values]: each value's position in its row."""
    return torch.arange(len(row)) - ragged.offsets[:-1][row]


def some(index: Tensor) -> Tensor:
    """`index`, or position 0 when it is empty."""
    return index if len(index) else torch.zeros(1, dtype=torch.int64)


def pack(tokens: Tensor, budget: int, count: int = 1, costs: Tensor | None = None) -> list[Tensor]:
    """Rows of `tokens` [rows] int64 each -> row indices of every bin, int64 and ascending; no bin is empty.

    A bin has at most `budget` tokens, or one longer row. There are as few bins as first-fit decreasing finds (at most
    11/9 of the fewest that exist, and two thirds of one; Dósa, 2007), but at least `count` where there are as many
    rows; they are as alike in `costs` [rows] (default: the tokens) as the largest-first rule makes them.

    Errors: BatchError for a budget or a count below one.
    """
    if budget < 1 or count < 1:
        raise BatchError(f"pack(budget={budget}, count={count}): both must be at least 1.")
    rows = len(tokens)
    sizes = np.minimum(tokens.numpy(), budget)  # a longer row fills a bin of its own
    if not rows:
        return []
    if count == 1 and int(sizes.sum()) <= budget:
        return [torch.arange(rows)]
    loads = sizes.astype(np.float64) if costs is None else costs.double().numpy()
    bins = _first_fit(sizes, budget)
    wanted = max(len(bins), min(count, rows))
    found = _even(sizes, loads, budget, wanted) or _halved(bins, loads, wanted)
    return [torch.from_numpy(np.sort(np.array(members, dtype=np.int64))) for members in found]


def _first_fit(sizes: np.ndarray, budget: int) -> list[list[int]]:
    """First-fit decreasing: each row, longest first, into the first bin with room for it."""
    room, bins = np.full(len(sizes), budget), []
    for row in np.argsort(-sizes, kind="stable").tolist():
        at = int(np.argmax(room >= sizes[row]))  # a bin that was not opened has room for everything
        if at == len(bins):
            bins.append([])
        bins[at].append(row)
        room[at] -= sizes[row]
    return bins


def _even(sizes: np.ndarray, loads: np.ndarray, budget: int, count: int) -> list[list[int]]:
    """Each row, costliest first, into the cheapest of `count` bins that has room; [] when some row finds none."""
    room, spent = np.full(count, budget), np.zeros(count)
    bins: list[list[int]] = [[] for _ in range(count)]
    for row in np.argsort(-loads, kind="stable").tolist():
        at = int(np.argmin(np.where(room >= sizes[row], spent, np.inf)))
        if room[at] < sizes[row]:
            return []
        bins[at].append(row)
        room[at] -= sizes[row]
        spent[at] += loads[row]
    return bins if all(bins) else []


def _halved(bins: list[list[int]], loads: np.ndarray, count: int) -> list[list[int]]:
    """The costliest bins of several rows cut in two until there are `count`."""
    bins = list(bins)
    while len(bins) < count:
        at = max((i for i, rows in enumerate(bins) if len(rows) > 1), key=lambda i: loads[bins[i]].sum())
        rows = bins.pop(at)
        bins += [rows[::2], rows[1::2]]
    return bins

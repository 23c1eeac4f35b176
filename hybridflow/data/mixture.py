"""Mixture of prompt sources: whose turn each row is, and the rows of several sources as one batch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.data.image_processor import Patches
from hybridflow.data.prompts import PromptRows, Prompts, PromptSource
from hybridflow.data.records import Record
from hybridflow.data.resumable_sampler import Dataset, Draw, ResumableSampler, State
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import ConfigError, PromptError, nearest
from hybridflow.models.images import ImageTokens
from hybridflow.settings import by_name, is_number, require

Weights = Mapping[str, float]
COLUMN = "source"
_SHARED = ("batch_size", "steps", "in_flight", "workers")


MixedDraw = tuple[str, Draw]
"""A draw of the source with this name."""


class Turns:
    """Whose turn is next, by weights: each row adds every source's share to its credit, and the largest pays for it.

    After any number of rows each source has had its share to within a few rows, also if weights change. `taken` counts
    the rows of each source; `seed` decides where the pattern begins.
    """

    def __init__(self, names: Sequence[str], seed: int) -> None:
        rng = random.Random(seed)
        first = {name: rng.random() for name in names}
        self.taken = dict.fromkeys(names, 0)
        self.credit = {name: value - sum(first.values()) / len(first) for name, value in first.items()}

    def next(self, weights: Weights) -> tuple[str, int]:
        """The source of the next row, and the number of that row among the source's."""
        total, able = sum(weights.values()), [name for name in self.taken if weights[name] > 0]
        for name in able:
            self.credit[name] += weights[name] / total
        name = max(able, key=self.credit.__getitem__)
        self.credit[name] -= 1.0
        self.taken[name] += 1
        return name, self.taken[name] - 1


class MixedPrompts(Dataset):
    """The prompts of several sources, of `MixedDraw`s; `defaults` fill columns that a source lacks."""

    def __init__(self, parts: Mapping[str, Prompts], defaults: Record) -> None:
        self.parts, self.defaults = dict(parts), dict(defaults)
        self.processor = next((part.processor for part in parts.values() if part.processor is not None), None)
        self.filtered = sum(part.filtered for part in parts.values())
        found = {name: set(part.columns) for name, part in parts.items()}
        every = set().union(*found.values())
        for name, columns in found.items():
            if COLUMN in columns:
                raise PromptError(
                    f"Mixture: {name!r} has a column {COLUMN!r}, which Mixture writes. Rename it by the loader's map=."
                )
            if missing := sorted(every - columns - self.defaults.keys()):
                owner = next(other for other, others in found.items() if missing[0] in others)
                raise PromptError(
                    f"Mixture: {name!r} has no column {missing[0]!r}, which {owner!r} has. Give a value for "
                    f"rows without it, defaults={{{missing[0]!r}: None}}, or drop it by map=."
                )
        if unused := sorted(self.defaults.keys() - every):
            hint = nearest(unused[0], sorted(every))
            raise ConfigError(f"Mixture(defaults=): no source has a column {unused[0]!r}.{hint}")

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    @property
    def columns(self) -> list[str]:
        return sorted({COLUMN}.union(*(part.columns for part in self.parts.values())))

    def check_fit(self, tokens: int, tokenizer: Callable[[], Tokenizer], where: str) -> None:
        """As `Prompts.check_fit`."""
        for part in self.parts.values():
            part.check_fit(tokens, tokenizer, where)

    def check_images(self, tokens: ImageTokens | None, model: str, generates: bool) -> None:
        """As `Prompts.check_images`."""
        for part in self.parts.values():
            part.check_images(tokens, model, generates)

    def read(self, draws: Sequence[MixedDraw]) -> PromptRows:
        """The rows in the order of `draws`. Errors: as `Prompts.read`."""
        records, ids, order = dict[int, Record](), dict[int, list[int]](), list[int]()
        patches = list[Patches]()
        for name, part in self.parts.items():
            at = [i for i, (source, _) in enumerate(draws) if source == name]
            found = part.read([draws[i][1] for i in at]) if at else PromptRows([])
            records |= {i: self.defaults | one | {COLUMN: name} for i, one in zip(at, found.records, strict=True)}
            ids |= dict(zip(at, found.ids, strict=True)) if found.ids is not None else {}
            order += at
            if self.processor is not None:
                none: list[list[EncodedImage]] = [[] for _ in at]
                patches.append(found.patches or self.processor.patches([""] * len(at), none))
        rows, back = range(len(draws)), torch.tensor(order).argsort()
        seen = [Ragged.concat(parts).index(back) for parts in zip(*patches, strict=True)]
        found_ids = [ids[i] for i in rows] if ids else None
        return PromptRows([records[i] for i in rows], found_ids, Patches(*seen) if seen else None)

    def batch(self, numbers: range, rows: PromptRows) -> Batch:
        """As `Prompts.batch`, with the column `source`."""
        return next(iter(self.parts.values())).batch(numbers, rows)

    def all_draws(self) -> Sequence[MixedDraw]:
        """Source by source."""
        return [(name, draw) for name, part in self.parts.items() for draw in part.all_draws()]


class MixtureSource(PromptSource):
    """The batches of a `Mixture`, with its arguments, on this process alone: it yields `Batch`es, and never waits."""

    @by_name
    def __init__(
        self,
        sources: Mapping[str, PromptSource],
        *,
        weights: Weights | Callable[[int], Weights] | None = None,
        seed: int = 0,
        defaults: Record | None = None,
    ) -> None:
        require(isinstance(sources, Mapping) and len(sources) > 0, "Mixture: give loaders by name, {'math': loader}.")
        for name, one in sources.items():
            good = isinstance(name, str) and isinstance(one, PromptSource) and not isinstance(one, MixtureSource)
            require(good, f"Mixture: source {name!r} is a {type(one).__name__}. Give PromptLoaders by name.")
        good = len({id(one) for one in sources.values()}) == len(sources)
        require(good, f"Mixture: the sources {sorted(sources)} share a loader; give each a PromptLoader of its own.")
        same: dict[str, Any] = {}
        for setting in _SHARED:
            values = {name: getattr(one, setting) for name, one in sources.items()}
            require(len(set(values.values())) == 1, f"Mixture: {setting} of the loaders differs: {values}. Give one.")
            same[setting] = next(iter(values.values()))
        if len({one.prompts.tokenizes for one in sources.values()}) > 1:
            raise ConfigError("Mixture: some loaders have a tokenizer= and others not. Give it to all, or to none.")
        self.sources = dict(sources)
        self.in_flight, self.check_context = same.pop("in_flight"), any(one.check_context for one in sources.values())
        mixed: Any = MixedPrompts({name: one.prompts for name, one in sources.items()}, defaults or {})
        self.prompts = mixed
        self._weights = dict.fromkeys(sources, 1.0) if weights is None else weights
        # the order of rows is that of the sources, which have seeds of their own
        ResumableSampler.__init__(self, mixed, {"names": sorted(sources)}, seed=seed, shuffle=False, **same)
        self._turns, self._ahead = Turns(sorted(sources), seed), deque[Turns]()
        self.weights(0)

    @property
    def taken(self) -> dict[str, int]:
        """Rows drawn so far, by source."""
        return dict(self._turns.taken)

    def weights(self, step: int) -> dict[str, float]:
        """The weights of batch `step`, counted from 0. Errors: ConfigError unless each source has a number."""
        found = self._weights(step) if callable(self._weights) else self._weights
        where = f"Mixture: the weights of step {step} are {found!r}"
        require(isinstance(found, Mapping), f"{where}: give numbers by name, such as {{'math': 0.7, 'code': 0.3}}.")
        if differing := sorted(map(str, found.keys() ^ self.sources.keys())):
            raise ConfigError(f"{where}: {differing[0]!r} is not in both; sources are {sorted(self.sources)}.")
        good = all(is_number(value) and value >= 0 for value in found.values()) and any(found.values())
        require(good, f"{where}: give numbers of at least 0, and one above.")
        return {name: float(value) for name, value in found.items()}

    def drawn(self) -> Iterator[Batch]:
        """The remaining batches. Errors: as a PromptLoader's, and ConfigError for the weights of a step."""
        for batch in super().drawn():
            self._turns = self._ahead.popleft()  # now that the batch counts as drawn
            yield batch

    def state(self) -> State:
        """State for `load_state` to continue with the next batch: plain data, for JSON."""
        turns = self._turns
        rows = {n: {"rows": turns.taken[n], "credit": turns.credit[n]} for n in self.sources}
        return super().state() | {"sources": {n: one.state() | rows[n] for n, one in self.sources.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Weights may differ from those of the saved run. Errors: as a PromptLoader's, naming the source; then nothing
        is loaded."""
        names, own = state.get("names") if isinstance(state, Mapping) else None, sorted(self.sources)
        if names is not None and names != own:
            raise ConfigError(f"the saved state is of a Mixture of names={names}, this one has {own}: give the same.")
        before, turns = {name: one.state() for name, one in self.sources.items()}, deepcopy(self._turns)
        try:
            for name, one in self.sources.items():
                turns.taken[name], turns.credit[name] = self._load_source(name, one, state)
            super().load_state(state)
        except ConfigError:
            for name, one in self.sources.items():
                one.load_state(before[name])
            raise
        self._turns = turns

    @staticmethod
    def _load_source(name: str, source: PromptSource, state: Mapping[str, Any]) -> tuple[int, float]:
        """Rows drawn and credit of the source; it checks that the data are the same, and itself draws no batch."""
        found = state.get("sources") if isinstance(state, Mapping) else None
        saved: Any = found.get(name) if isinstance(found, Mapping) else None
        try:
            source.load_state(saved)  # refuses what is not a mapping
            rows, credit = saved.get("rows"), saved.get("credit")
            good = type(rows) is int and rows >= 0 and is_number(credit)
            require(good, f"the saved state has rows={rows!r}, credit={credit!r}: give what state() has given.")
        except ConfigError as error:
            raise ConfigError(f"Mixture, source {name!r}: {error}") from error
        return rows, credit

    def _draws(self, batch: int) -> Iterator[list[Any]]:
        turns = deepcopy(self._turns)
        self._ahead.clear()
        while self.steps is None or batch < self.steps:
            weights = self.weights(batch)
            whose = [turns.next(weights) for _ in range(self.batch_size)]
            self._ahead.append(deepcopy(turns))
            yield [(name, self.sources[name].draw(number)) for name, number in whose]
            batch += 1

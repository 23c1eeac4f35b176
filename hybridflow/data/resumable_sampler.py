"""ResumableSampler: batches of shuffled rows by torch's DataLoader, resumable at any point."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader

from hybridflow.batch.batch import Batch
from hybridflow.errors import ConfigError, PromptError, WorkerError

logger = logging.getLogger(__name__)

State = dict[str, Any]
SECONDS = 600.0  # limit for a worker process to deliver a batch
_THREADS = "TOKENIZERS_PARALLELISM"  # they do not survive a fork


class Draw(NamedTuple):
    """Row `index` of the data, drawn in epoch `epoch`."""

    epoch: int
    index: int


class Dataset(Protocol):
    """The data to sample from. `read` may run in another process; its result is pickled, and `batch` completes it."""

    filtered: int
    """Number of records left out because they are too long."""

    def __len__(self) -> int: ...

    def read(self, draws: list[Any]) -> Any: ...

    def batch(self, numbers: range, rows: Any) -> Batch:
        """The batch of what was read; `numbers` are the running numbers of its rows."""
        ...

    def all_draws(self) -> Sequence[Any]:
        """Of all rows, each once and in their order."""
        return [Draw(0, index) for index in range(len(self))]

    def in_parts(self, rows: int) -> Iterator[Batch]:
        """All rows, each once and in their order, `rows` at a time."""
        draws = self.all_draws()
        for start in range(0, len(draws), rows):
            part = draws[start : start + rows]
            yield self.batch(range(start, start + len(part)), self.read(list(part)))

    def whole(self) -> Batch:
        """All rows, each once and in their order."""
        return next(self.in_parts(len(self)))


class ResumableSampler:
    """Base of batch sources: `dataset.read` of `batch_size` draws at a time, `steps` batches, or without end.

    Each epoch is a permutation of all rows that the seed decides (their own order if not `shuffle`). `workers`
    processes read ahead, two batches each; with 0 each batch is read when it is asked for. They are forks: they see the
    data without a copy and need no importable functions, and they end with the iteration.

    `state()` is plain data for JSON and independent of `workers`; it includes `identity`, which identifies the data.
    Errors: ConfigError for a seed that is not a whole number; when iterating, the PromptError of `read`, and
    WorkerError when a worker process ended or took longer than `SECONDS`.
    """

    def __init__(
        self,
        dataset: Dataset,
        identity: Mapping[str, Any],
        batch_size: int,
        steps: int | None,
        seed: int,
        shuffle: bool,
        workers: int,
        allow_changed: bool = False,
    ) -> None:
        if type(seed) is not int:
            raise ConfigError(f"seed={seed!r} must be a whole number.")
        check_sizes(batch_size=batch_size, **({} if steps is None else {"steps": steps}))
        check_sizes(0, workers=workers)
        self._dataset, self.batch_size, self.steps, self.workers = dataset, batch_size, steps, workers
        self._same = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle, **identity}
        self._identity, self._may_change = identity.keys(), identity.keys() if allow_changed else ()
        self._drawn = 0  # batches so far: the only changing state
        self._shuffled, self._order = -1, torch.empty(0, dtype=torch.int64)  # the epoch of this permutation

    def __iter__(self) -> Iterator[Any]:
        return self.drawn()

    def drawn(self) -> Iterator[Batch]:
        """The remaining batches, after those of the last iteration or the loaded state."""
        batches: Iterator[Any] = iter(())
        at = -1
        while self.steps is None or self._drawn < self.steps:
            if at != self._drawn:  # the beginning; or a state was loaded, or another iteration advanced meanwhile
                at = self._drawn
                batches = self._open(at)
            try:
                found = next(batches)
            except RuntimeError as error:
                batches = iter(())
                if not self.workers:
                    raise
                traceback.clear_frames(error.__traceback__)  # they hold what ends the other workers when it is let go
                raise WorkerError(
                    f"a process of the loader (workers={self.workers}) failed, or had no batch ready within "
                    f"{SECONDS:.0f} s: {error}"
                ) from error
            if isinstance(found, PromptError):
                batches = iter(())  # an error that is kept would keep this frame, and with it the workers
                raise found
            at = self._drawn = at + 1
            yield self._dataset.batch(range((at - 1) * self.batch_size, at * self.batch_size), found)

    @property
    def filtered(self) -> int:
        """Number of records left out: prompts with too many tokens, or without room for a completion."""
        return self._dataset.filtered

    def state(self) -> State:
        """State for `load_state` to continue with the next batch: plain data, for JSON."""
        return {"drawn": self._drawn, **self._same}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Errors: ConfigError when it is not a state, or one of another batch size, seed or order, or of other data,
        unless these may change: then the same number of rows has been drawn from the present data."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"the saved state is a {type(state).__name__}: give what state() has given.")
        drawn = state.get("drawn")
        if type(drawn) is not int or drawn < 0:
            raise ConfigError(f"the saved state has drawn={drawn!r}, which is not a number of batches.")
        for name, own in self._same.items():
            if state.get(name) == own:
                continue
            differs = f"the saved state has {name}={state.get(name)!r}, this loader has {own!r}"
            if name not in self._may_change:
                hint = "" if name not in self._identity else ", or let the data change: allow_changed=True"
                raise ConfigError(f"{differs}: continue with the data and the settings of the saved run{hint}.")
            logger.warning("%s: the order of rows from here on is that of the present data.", differs)
        self._drawn = drawn

    def _open(self, first: int) -> Iterator[Any]:
        several = {"timeout": SECONDS, "multiprocessing_context": "fork"} if self.workers else {}
        loader = DataLoader(
            _Draws(),  # type: ignore[arg-type]  a dataset by what it can do
            batch_sampler=self._draws(first),  # type: ignore[arg-type]  iterated once
            collate_fn=self._read,
            num_workers=self.workers,
            generator=torch.Generator(),  # else it would draw from the caller's
            **several,
        )
        if changed := self.workers > 0 and _THREADS not in os.environ:
            os.environ[_THREADS] = "false"
        try:
            return iter(loader)
        finally:
            if changed:
                del os.environ[_THREADS]

    def _read(self, draws: list[Draw]) -> Any:
        try:
            return self._dataset.read(draws)
        except PromptError as error:
            return PromptError(*error.args)  # as a value: raised in a worker it would come with another message

    def draw(self, number: int) -> Draw:
        """Row `number` of the run."""
        epoch, index = divmod(number, len(self._dataset))
        if not self._same["shuffle"]:
            return Draw(epoch, index)
        if epoch != self._shuffled:
            # a generator per epoch, so that any point of the run is found without drawing what came before
            generator = torch.Generator().manual_seed((self._same["seed"] * 1_000_003 + epoch) % 2**63)
            self._shuffled, self._order = epoch, torch.randperm(len(self._dataset), generator=generator)
        return Draw(epoch, int(self._order[index]))

    def _draws(self, batch: int) -> Iterator[list[Any]]:
        """The draws of each batch from number `batch` on."""
        while self.steps is None or batch < self.steps:
            yield [self.draw(number) for number in range(batch * self.batch_size, (batch + 1) * self.batch_size)]
            batch += 1


class _Draws:
    """The map-style data set that torch's loader asks for: draws, which `collate_fn` reads."""

    def __getitem__(self, draw: Draw) -> Draw:
        return draw


def check_sizes(least: int = 1, /, **sizes: int) -> None:
    """Errors: ConfigError for a size other than a whole number of at least `least`."""
    for name, value in sizes.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")

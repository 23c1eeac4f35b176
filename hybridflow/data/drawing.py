"""Drawing: batches of drawn rows by torchdata's StatefulDataLoader, resumable at any point."""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch

from hybridflow.data.order import Draw, Order
from hybridflow.errors import ConfigError, PromptError, WorkerError

State = dict[str, Any]
SECONDS = 600.0  # in which a worker process must have a batch ready
_FORK_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false"}  # its threads do not survive a fork


class Rows(Protocol):
    """What is drawn from. `read` may run in another process; what it returns is pickled."""

    def __len__(self) -> int: ...

    def read(self, draws: list[Draw]) -> Any: ...


class Drawing:
    """What `rows.read` gives for batch after batch of `batch_size` draws; `steps` of them, or without end.

    `workers` processes read ahead, two batches each; with 0 each batch is read when it is asked for. They are forks:
    they see the rows without a copy and need no importable functions, and they end with the iteration.

    `state()` is plain data that JSON can hold and independent of `workers`. `of` says what is drawn from and goes
    into the state. Errors: ConfigError for sizes below one; when iterating, the PromptError of `read`, and WorkerError
    when a worker process ended or took longer than `SECONDS`.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        batch_size: int,
        steps: int | None,
        seed: int,
        shuffle: bool,
        workers: int,
        of: Mapping[str, Any],
    ) -> None:
        if type(seed) is not int:
            raise ConfigError(f"seed={seed!r} must be a whole number.")
        self.batch_size, self.steps, self.workers = batch_size, steps, workers
        self._rows, self._order = rows, Order(len(rows), seed, shuffle)
        self._same = {"batch_size": batch_size, "seed": seed, "shuffle": shuffle, **of}
        self._drawn = 0  # batches so far: all that changes while rows are drawn

    def __iter__(self) -> Iterator[tuple[range, Any]]:
        """The numbers of the draws of each batch that is left, and what was read for them."""
        batches: Iterator[Any] = iter(())
        at = -1
        while self.steps is None or self._drawn < self.steps:
            if at != self._drawn:  # the beginning; or a state was loaded, or another iteration went on meanwhile
                at = self._drawn
                batches = self._open(at)
            try:
                found = next(batches)
            except RuntimeError as error:
                batches = iter(())
                if self.workers:
                    raise self._explained(error) from error
                raise
            if isinstance(found, PromptError):
                batches = iter(())  # an error that is kept would keep this frame, and with it the workers
                raise found
            at = self._drawn = at + 1
            yield range((at - 1) * self.batch_size, at * self.batch_size), found

    def state(self) -> State:
        return {"drawn": self._drawn, **self._same}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Errors: ConfigError when the state is no state, or one of other rows, another batch size, seed or order."""
        if not isinstance(state, Mapping):
            raise ConfigError(f"the saved state is a {type(state).__name__}: give what state() has given.")
        drawn = state.get("drawn")
        if type(drawn) is not int or drawn < 0:
            raise ConfigError(f"the saved state has drawn={drawn!r}, which is no number of batches.")
        for name, own in self._same.items():
            if state.get(name) != own:
                raise ConfigError(
                    f"the saved state has {name}={state.get(name)!r}, this loader has {own!r}: continue with the data "
                    f"and the settings of the saved run."
                )
        self._drawn = drawn

    def _open(self, first: int) -> Iterator[Any]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        several = {"timeout": SECONDS, "multiprocessing_context": "fork"} if self.workers else {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata calls what torch gave up
            loader: Any = StatefulDataLoader(
                _Reads(self._rows),  # type: ignore[arg-type]  a dataset by what it can do
                batch_sampler=_Draws(self._order, self.batch_size, first, self.steps),
                collate_fn=_as_it_is,
                num_workers=self.workers,
                generator=torch.Generator(),  # else it would draw from the caller's
                **several,
            )
        with _environment(_FORK_ENVIRONMENT) if self.workers else contextlib.nullcontext():
            return iter(loader)

    def _explained(self, error: RuntimeError) -> WorkerError:
        traceback.clear_frames(error.__traceback__)  # they hold what ends the other workers when it is let go
        return WorkerError(
            f"a process of the loader (workers={self.workers}) failed, or had no batch ready within {SECONDS:.0f} s: "
            f"{error}"
        )


class _Draws:
    """The draws of each batch, from batch `first` on: the batch sampler of the loader, itself stateful."""

    def __init__(self, order: Order, batch_size: int, first: int, steps: int | None) -> None:
        self._order, self._batch_size, self._next, self._steps = order, batch_size, first, steps

    def __iter__(self) -> Iterator[list[Draw]]:
        return self

    def __next__(self) -> list[Draw]:
        if self._steps is not None and self._next >= self._steps:
            raise StopIteration
        start = self._next * self._batch_size
        self._next += 1
        return [self._order.draw(number) for number in range(start, start + self._batch_size)]

    def state_dict(self) -> dict[str, int]:
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._next = state["next"]


class _Reads:
    """The data set of the loader: a batch of draws to what is read for it."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, draws: list[Draw]) -> Any:
        try:
            return self._rows.read(draws)
        except PromptError as error:
            return PromptError(*error.args)  # as a value: raised in a worker it would come with another message


def _as_it_is(found: Any) -> Any:
    return found


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """These environment variables within, unless they are set already."""
    new = {name: value for name, value in changes.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


def check_sizes(least: int = 1, /, **sizes: int) -> None:
    """Errors: ConfigError for one that is no whole number of at least `least`."""
    for name, value in sizes.items():
        if type(value) is not int or value < least:
            raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")

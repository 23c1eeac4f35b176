"""Dynamic sampling: batches of groups whose rewards differ, drawn until there are enough of them (DAPO)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hybridflow.algorithms.spread import Spread
from hybridflow.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.session import Session
from hybridflow.errors import BatchError, ConfigError, MissingColumnError
from hybridflow.loader import PromptLoader

logger = logging.getLogger(__name__)


def dynamic_sampling(
    loader: PromptLoader,
    sample: Callable[[BatchRef], BatchRef],
    *,
    rows: int,
    steps: int | None = None,
    max_rounds: int = 10,
    by: str = "rewards",
) -> DynamicSampling:
    """Iterates over batches of exactly `rows` rows, made of groups of responses whose scores differ.

    Groups with equal scores have no advantage: with them a batch holds less than it seems to. So
    `sample(prompts) -> batch` (generation and rewards, with `group_id`) is called with further prompts of `loader`
    until there are `rows` rows of groups that do; what is over is dropped. Scores are the column `by`, per row or per
    token: a component `rewards/<name>` where other rewards would always differ.

    After `max_rounds` draws the rest is filled with groups of equal scores, and a warning is logged. `steps` batches
    come, or as many as `loader` has prompts for: its own `steps` count draws. Its `state()` continues the run with the
    next batch. Each batch is one iteration, which waits for its rewards; `metrics()` tells how it came about.

    Yu et al., "DAPO" (2025), section 3.2, equation 11. Errors: ConfigError; BatchError for groups of different sizes,
    or of a size that does not divide `rows`; those of `sample`.
    """
    if not isinstance(loader, PromptLoader):
        raise ConfigError(f"dynamic_sampling takes a PromptLoader, got {type(loader).__name__}.")
    if not callable(sample):
        raise ConfigError(f"dynamic_sampling: sample={sample!r} must be a function of a batch of prompts.")
    for name, value in (("rows", rows), ("steps", steps), ("max_rounds", max_rounds)):
        if (value is not None or name != "steps") and (type(value) is not int or value < 1):
            raise ConfigError(f"dynamic_sampling: {name}={value!r} must be a whole number of at least 1.")
    return DynamicSampling(loader, sample, rows, steps, max_rounds, by)


@dataclass
class _Drawn:
    """What the rounds of one batch have brought so far."""

    kept: list[BatchRef] = field(default_factory=list)
    flat: list[BatchRef] = field(default_factory=list)
    rounds: int = 0
    groups: int = 0
    kept_groups: int = 0
    total: float = 0.0
    scored: int = 0

    def add(self, batch: BatchRef, spread: Spread) -> None:
        for parts, groups in ((self.kept, spread.kept), (self.flat, spread.flat)):
            if groups:
                parts.append(batch.take([row for group in groups for row in group]))
        self.rounds += 1
        self.groups += len(spread.kept) + len(spread.flat)
        self.kept_groups += len(spread.kept)
        self.total, self.scored = self.total + spread.total, self.scored + spread.rows

    @property
    def kept_rows(self) -> int:
        return sum(len(part) for part in self.kept)

    @property
    def drawn_rows(self) -> int:
        return self.kept_rows + sum(len(part) for part in self.flat)

    def figures(self, rows: int) -> dict[str, float]:
        out = {
            "sampling/rounds": float(self.rounds),
            "sampling/kept": self.kept_groups / max(self.groups, 1),
            "sampling/filled": max(0, rows - self.kept_rows) / rows,
        }
        return out | ({"sampling/reward": self.total / self.scored} if self.scored else {})


class DynamicSampling:
    """The batches of `dynamic_sampling`, and the figures of the last one."""

    def __init__(
        self,
        loader: PromptLoader,
        sample: Callable[[BatchRef], BatchRef],
        rows: int,
        steps: int | None,
        max_rounds: int,
        by: str,
    ) -> None:
        self.loader, self.sample, self.rows, self.steps = loader, sample, rows, steps
        self.max_rounds, self.by = max_rounds, by
        self._figures: dict[str, float] = {}

    def metrics(self) -> dict[str, float]:
        """How the last batch came about.

        `sampling/rounds` draws; of all groups drawn `sampling/kept`, a share, had different scores; a share
        `sampling/filled` of the batch's rows are of groups that do not. `sampling/reward` is the mean score of all rows
        drawn: that of the policy, where the mean over the batch is that of selected groups.
        """
        return dict(self._figures)

    def __iter__(self) -> Iterator[BatchRef]:
        session = Session.current()
        source, done = iter(self.loader.source), 0
        while self.steps is None or done < self.steps:
            session.next_iteration(self.loader.in_flight)
            drawn = self._draw(source, session)
            if drawn.drawn_rows < self.rows:
                self._explain(drawn, done)
                break
            self._figures, done = drawn.figures(self.rows), done + 1
            yield BatchRef.concat([*drawn.kept, *drawn.flat])[: self.rows]
        session.drain()

    def _draw(self, source: Iterator[Batch], session: Session) -> _Drawn:
        drawn = _Drawn()
        while drawn.kept_rows < self.rows and drawn.rounds < self.max_rounds:
            prompts = next(source, None)
            if prompts is None:
                break
            batch = self.sample(BatchRef.from_batch(prompts, session))
            self._check(batch)
            spread = session.helper.group_spread(batch, self.by).get()
            self._check_sizes(spread)
            drawn.add(batch, spread)
        if drawn.kept_rows < self.rows <= drawn.drawn_rows:
            logger.warning(
                "dynamic sampling: after %d rounds %d of %d rows are in groups whose %s differ; the others are filled "
                "with groups of equal scores, from which nothing is learned.",
                *(drawn.rounds, drawn.kept_rows, self.rows, self.by),
            )
        return drawn

    def _explain(self, drawn: _Drawn, done: int) -> None:
        """Too few rows: the prompts have ended, or `rows` is out of reach. Errors: BatchError."""
        if drawn.rounds == self.max_rounds:
            raise BatchError(
                f"dynamic_sampling(rows={self.rows}): {drawn.rounds} rounds gave {drawn.drawn_rows} rows in all. "
                f"Raise the loader's batch_size or max_rounds."
            )
        if drawn.rounds:
            logger.warning(
                "dynamic sampling: the prompts ended after %d batches; %d rows that fill none are left out.",
                *(done, drawn.drawn_rows),
            )

    def _check(self, batch: object) -> None:
        if not isinstance(batch, BatchRef):
            raise ConfigError(
                f"dynamic_sampling: sample() must return the batch with its rewards, got {type(batch).__name__}."
            )
        for name in (self.by, "group_id"):
            if name not in batch:
                hint = "generate n >= 2 responses per prompt" if name == "group_id" else "sample() must compute it"
                raise MissingColumnError(f"dynamic_sampling reads {name!r}; no call has written it: {hint}.")

    def _check_sizes(self, spread: Spread) -> None:
        sizes = {len(group) for group in (*spread.kept, *spread.flat)}
        if len(sizes) > 1:
            raise BatchError(f"dynamic_sampling needs groups of one size, got sizes {sorted(sizes)}.")
        if sizes and self.rows % (size := sizes.pop()):
            raise BatchError(f"dynamic_sampling(rows={self.rows}): groups have {size} rows, which does not divide it.")

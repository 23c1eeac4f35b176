"""Dynamic sampling (DAPO): prompts are drawn until a batch has enough groups with different rewards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hybridflow.algorithms.advantages.prompt_groups import GroupFilter
from hybridflow.batch.batch import Batch
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
) -> DynamicSampler:
    """Iterates over batches of exactly `rows` rows, made of groups of responses whose scores differ.

    Groups with equal scores have zero advantage. So `sample(prompts) -> batch` (generation and rewards, with
    `group_id`) is called with further prompts of `loader` until `rows` rows are in groups with different scores;
    surplus rows are dropped. Scores are the column `by`, per row or per token: use a component `rewards/<name>` where
    other rewards would always differ.

    After `max_rounds` draws the batch is filled with groups of equal scores, and a warning is logged. The sampler
    yields `steps` batches, or as many as `loader` has prompts for: the loader's own `steps` count draws. `state()`
    continues the run with the next batch. Each batch is one iteration, which waits for its rewards; `metrics()`
    describes it.

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
    return DynamicSampler(loader, sample, rows, steps, max_rounds, by)


@dataclass
class _Sampled:
    """Groups collected so far for one batch."""

    informative: list[BatchRef] = field(default_factory=list)
    degenerate: list[BatchRef] = field(default_factory=list)
    rounds: int = 0
    groups: int = 0
    informative_groups: int = 0
    total: float = 0.0
    scored: int = 0

    def add(self, batch: BatchRef, found: GroupFilter) -> None:
        for parts, groups in ((self.informative, found.informative), (self.degenerate, found.degenerate)):
            if groups:
                parts.append(batch.take([row for group in groups for row in group]))
        self.rounds += 1
        self.groups += len(found.informative) + len(found.degenerate)
        self.informative_groups += len(found.informative)
        self.total, self.scored = self.total + found.total, self.scored + found.rows

    @property
    def informative_rows(self) -> int:
        return sum(len(part) for part in self.informative)

    @property
    def rows(self) -> int:
        return self.informative_rows + sum(len(part) for part in self.degenerate)

    def metrics(self, rows: int) -> dict[str, float]:
        out = {
            "sampling/rounds": float(self.rounds),
            "sampling/kept": self.informative_groups / max(self.groups, 1),
            "sampling/filled": max(0, rows - self.informative_rows) / rows,
        }
        return out | ({"sampling/reward": self.total / self.scored} if self.scored else {})


@dataclass
class DynamicSampler:
    """The batches of `dynamic_sampling`, and the metrics of the last one."""

    loader: PromptLoader
    sample: Callable[[BatchRef], BatchRef]
    rows: int
    steps: int | None
    max_rounds: int
    by: str
    _metrics: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def metrics(self) -> dict[str, float]:
        """Metrics of the last batch.

        `sampling/rounds`: draws. `sampling/kept`: share of the drawn groups with different scores. `sampling/filled`:
        share of the batch's rows in groups with equal scores. `sampling/reward`: mean score of all drawn rows, which is
        the policy's; the batch's mean covers selected groups only.
        """
        return dict(self._metrics)

    def __iter__(self) -> Iterator[BatchRef]:
        session = Session.current()
        source, done = self.loader.drawn(), 0
        while self.steps is None or done < self.steps:
            session.next_iteration(self.loader.in_flight)
            found = self._sampled(source, session)
            if found.rows < self.rows:
                self._explain(found, done)
                break
            self._metrics, done = found.metrics(self.rows), done + 1
            yield BatchRef.concat([*found.informative, *found.degenerate])[: self.rows]
        session.drain()

    def _sampled(self, source: Iterator[Batch], session: Session) -> _Sampled:
        out = _Sampled()
        while out.informative_rows < self.rows and out.rounds < self.max_rounds:
            prompts = next(source, None)
            if prompts is None:
                break
            batch = self.sample(BatchRef.from_batch(prompts))
            self._check(batch)
            found = session.controller.filter_groups(batch, self.by).get()
            self._check_sizes(found)
            out.add(batch, found)
        if out.informative_rows < self.rows <= out.rows:
            logger.warning(
                "dynamic sampling: after %d rounds %d of %d rows are in groups whose %s differ; the others are filled "
                "with groups of equal scores, from which nothing is learned.",
                *(out.rounds, out.informative_rows, self.rows, self.by),
            )
        return out

    def _explain(self, found: _Sampled, done: int) -> None:
        """Errors: BatchError: the prompts have ended, or `rows` is out of reach."""
        if found.rounds == self.max_rounds:
            raise BatchError(
                f"dynamic_sampling(rows={self.rows}): {found.rounds} rounds gave {found.rows} rows in all. "
                f"Raise the loader's batch_size or max_rounds."
            )
        if found.rounds:
            logger.warning(
                "dynamic sampling: the prompts ended after %d batches; %d rows do not fill another and are left out.",
                *(done, found.rows),
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

    def _check_sizes(self, found: GroupFilter) -> None:
        sizes = {len(group) for group in (*found.informative, *found.degenerate)}
        if len(sizes) > 1:
            raise BatchError(f"dynamic_sampling needs groups of one size, got sizes {sorted(sizes)}.")
        if sizes and self.rows % (size := sizes.pop()):
            raise BatchError(f"dynamic_sampling(rows={self.rows}): groups have {size} rows, which does not divide it.")

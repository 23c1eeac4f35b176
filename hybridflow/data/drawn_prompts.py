"""Prompts that a loop works on in an order of its own: numbered as they were drawn, kept until they are done with."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from hybridflow.batch.batch import Batch
from hybridflow.data.prompts import PromptSource


class _Drawn(NamedTuple):
    """A batch of the loader whose first prompt has number `first`; `before` is the loader's state before it."""

    first: int
    before: Mapping[str, Any]
    prompts: Batch


class DrawnPrompts:
    """Prompts `first`, `first` + 1, ... of a loader, drawn in its batches.

    `drawn` is the number of the next one; the `row_id` of a prompt is its number + `offset`.
    """

    def __init__(self, loader: PromptSource, first: int = 0) -> None:
        self.loader, self.drawn, self.offset = loader, first, 0
        self._batches: deque[_Drawn] = deque()

    def draw(self, source: Iterator[Batch], count: int) -> None:
        """Draw from the loader's iterator until `count` prompts have been drawn, or it ends."""
        while self.drawn < count:
            before = self.loader.state()
            if (prompts := next(source, None)) is None:
                return
            self.offset = int(prompts["row_id"][0]) - self.drawn
            self._batches.append(_Drawn(self.drawn, before, prompts))
            self.drawn += prompts.rows

    def rows(self, numbers: Sequence[int]) -> Batch:
        """The prompts with these numbers, in their order."""
        parts = []
        for batch in self._batches:
            places = [number - batch.first for number in numbers if 0 <= number - batch.first < batch.prompts.rows]
            if places:
                parts.append(batch.prompts[places])
        return Batch.concat(parts)

    def forget(self, below: int) -> None:
        """Prompts with smaller numbers are done with."""
        while self._batches and self._batches[0].first + self._batches[0].prompts.rows <= below:
            self._batches.popleft()

    def state(self, oldest: int) -> dict[str, Any]:
        """The loader's state from which prompt `oldest` and all after it are drawn again, and its first number."""
        for batch in self._batches:
            if batch.first + batch.prompts.rows > oldest:
                return {"loader": dict(batch.before), "first": batch.first}
        return {"loader": dict(self.loader.state()), "first": self.drawn}

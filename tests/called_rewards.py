"""CalledReward: one reward function that is called directly, as `Functions` calls it, and answers with a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.rewards.functions import FunctionReward, Functions


class CalledReward(FunctionReward):
    def __call__(
        self,
        prompts: Sequence[Any],
        responses: Sequence[str],
        columns: Mapping[str, Any] | None = None,
        row_ids: Sequence[int] | None = None,
    ) -> list[Any]:
        whole = Functions(self.function, level=self.level, column=self.column)
        return whole(prompts, responses, columns or {}, row_ids).rewards.tolist()

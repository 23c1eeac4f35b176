"""The text of a completion, in either form in which a reward function may get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.errors import RewardError


def completion_text(completion: str | Sequence[Mapping[str, Any]]) -> str:
    """The completion, or the content of the last message that has one. Errors: RewardError for anything else."""
    if isinstance(completion, str):
        return completion
    if isinstance(completion, Sequence) and all(isinstance(message, Mapping) for message in completion):
        contents = [message["content"] for message in completion if isinstance(message.get("content"), str)]
        return contents[-1] if contents else ""
    raise RewardError(f"a completion is {type(completion).__name__}; it must be a text or a list of chat messages.")

"""Starts of elastic iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.planner.elastic.simulation import ElasticRun, start_of
from hybridflow.planner.elastic.state import State


def static_state(
    *, prompts: Sequence[int], lengths: Sequence[int] = (), switches: Sequence[float] = (), **given: Any
) -> State:
    """Of an `ElasticRun` with these settings: the tokens of each prompt, lengths seen, seconds of switches."""
    return start_of(ElasticRun(prompts=len(prompts), lengths=[1], **given), lengths, switches, prompts)

"""Agents in their real processes, with a script in the model's place."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from hybridflow.config import Sampling
from hybridflow.environments.session_process import SessionProcess
from hybridflow.environments.sessions import EndedTrajectory, Sessions
from tests.example_templates import tokenizer_of

if TYPE_CHECKING:  # it imports torch
    from hybridflow.environments.turn_images import TurnImages


def call(name: str, /, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def run(
    act,
    checkpoint: str,
    rows,
    says,
    seconds: float = 20.0,
    workers: int = 1,
    concurrency: int = 100,
    sampling=None,
    images: TurnImages | None = None,
):
    """`says(row, turn, heard)` is what the model says in a turn; the ends of all rows, in order. The turns' own
    sampling is added to the list `sampling`."""
    from hybridflow.engines.contract import Row  # not in the processes: it imports torch

    tokenizer, stop = tokenizer_of("qwen3")
    process = SessionProcess(act, checkpoint, (stop,), seconds, {}, 0 if images is None else images.most_pixels)
    sessions = Sessions(process, workers, concurrency, images)
    found: dict[int, EndedTrajectory] = {}
    turns = dict.fromkeys(range(len(rows)), 0)
    try:
        for key, row in enumerate(rows):
            sessions.start(key, row, seed=key)
        due = time.monotonic() + 100
        while sessions.under_way:
            assert time.monotonic() < due
            for asked in sessions.poll(0.1):
                heard = tokenizer.raw.decode(asked.ids)
                text = says(rows[asked.key], turns[asked.key], heard)
                turns[asked.key] += 1
                if sampling is not None:
                    sampling.append(asked.sampling)
                ids = [*tokenizer.raw.encode(text), stop]
                said = ids, [-0.5] * len(ids), [7] * len(ids), "stop"
                sessions.answer(asked, Row(0, 0, asked.ids, Sampling(), 0, *said))
            found |= sessions.take()
    finally:
        sessions.close()
    return [found[key] for key in range(len(rows))]

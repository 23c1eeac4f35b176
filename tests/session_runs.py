"""Agents in their real processes, with a script in the model's place."""

from __future__ import annotations

import json
import time
from itertools import count
from typing import TYPE_CHECKING

from hybridflow.config import Sampling
from hybridflow.environments.session_process import SessionProcess
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
    # not in the processes: these import torch
    from hybridflow.engines.contract import Row
    from hybridflow.environments.sessions import RecentProcesses, Sessions

    tokenizer, stop = tokenizer_of("qwen3")
    given = SessionProcess(act, checkpoint, (stop,), seconds, {}, 0 if images is None else images.most_pixels)
    processes, found = RecentProcesses(1), []
    begin = lambda: (given, *processes.of(given, images, workers))  # noqa: E731
    sessions = Sessions(begin, count(), workers=workers, concurrency=concurrency)
    turns = dict.fromkeys(range(len(rows)), 0)
    try:
        sessions.start([Row(key, 0, [], Sampling(), key) for key in turns], rows)
        due = time.monotonic() + 100
        while sessions.under_way:
            assert time.monotonic() < due
            for asked in sessions.poll(0.1) or ():
                heard, key = tokenizer.raw.decode(asked.prompt_ids), -1 - asked.row_id
                text = says(rows[key], turns[key], heard)
                turns[key] += 1
                if sampling is not None:
                    sampling.append(asked.sampling)
                asked.token_ids = [*tokenizer.raw.encode(text), stop]
                asked.log_probs = [-0.5] * len(asked.token_ids)
                asked.policy_version, asked.end = [7] * len(asked.token_ids), "stop"
                sessions.finished(asked)
            found += sessions.take()
    finally:
        processes.close()
    return sorted(found, key=lambda one: one.begun.row_id)

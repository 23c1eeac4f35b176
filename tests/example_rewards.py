"""Reward functions, good and bad, for the answers "2", "3", "4" and "6". Imports little: workers load this file."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from hybridflow.rewards import RowFailure


def correct(prompts, completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]


def short(prompt, response):
    return 1.0 / len(response)


def only_sums_to_four(completions, **kwargs):
    return [0.5 if completion == "4" else None for completion in completions]


def broken_at_three(prompts, completions, answer):
    if "3" in answer:
        raise LookupError("no three")
    return [1.0] * len(prompts)


def unjudged(prompt, response, answer):
    return RowFailure("was not judged: too odd") if answer == "3" else 1.0


def hangs_on_three(prompts, completions, answer):
    if "3" in answer:
        time.sleep(60)
    return [1.0] * len(prompts)


def dies_on_three(prompt, response, answer):
    if answer == "3":
        os._exit(9)
    return 1.0


async def waits_on_three(prompt, response, answer):
    await asyncio.sleep(60 if answer == "3" else 0)
    return 1.0


async def blocks_on_three(prompts, completions, answer):
    await asyncio.sleep(0)
    return hangs_on_three(prompts, completions, answer)


async def freezes_on_three(prompt, response, answer):
    await asyncio.sleep(0)
    time.sleep(60 if answer == "3" else 0)
    return 1.0


def kills_the_template_on_three(prompt, response, answer):
    if answer == "3":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return 1.0


def kills_the_template_on_three_of_all(prompts, completions, answer):
    return [kills_the_template_on_three(*row) for row in zip(prompts, completions, answer)]


def rank(completions, group_id):
    """The place of a response in its group by its length, the longest 0."""
    rows = [*zip(completions, group_id)]
    return [float(sum(len(other) > len(text) for other, there in rows if there == group)) for text, group in rows]


def count(completions):
    return [float(len(completions))] * len(completions)


def fails(completions):
    raise ValueError(f"of {len(completions)} rows")


def sleeps(completions):
    time.sleep(30)
    return [0.0] * len(completions)

"""Many trajectories at once, whose tools take 1 ms to 2 s: rows per second against an event loop that only sleeps.

Each trajectory makes `--turns` calls of a tool that waits for a drawn time. The agents run in their real process. In
place of the model, a script answers each turn at once, so what is measured is sessions, templates and messages.
`memory_kb` is what the process of the agents has grown by for each trajectory, `threads` its most. Prints one line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from hybridflow.config import Sampling
from hybridflow.engines.contract import Row
from hybridflow.environments.acting import ToolLoop
from hybridflow.environments.session_process import SessionProcess
from hybridflow.environments.sessions import RecentProcesses, Sessions
from recipes.small_model import EOS, SmallModel

SHORTEST, LONGEST = 0.001, 2.0
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</call>{% endfor %}{% if m.role == 'assistant' %}" + EOS + "{% endif %}"
    "{% endfor %}"
)


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"


def drawn(sessions: int, turns: int) -> list[list[float]]:
    """Seconds of each call of each trajectory."""
    rng = random.Random(0)
    return [[rng.uniform(SHORTEST, LONGEST) for _ in range(turns)] for _ in range(sessions)]


def ideal(seconds: Sequence[Sequence[float]]) -> float:
    """Seconds that an event loop takes which does nothing else than to sleep."""

    async def one(several: Sequence[float]) -> None:
        for each in several:
            await asyncio.sleep(each)

    async def every() -> None:
        await asyncio.gather(*(one(several) for several in seconds))

    began = time.perf_counter()
    asyncio.run(every())
    return time.perf_counter() - began


def status(process: int) -> tuple[int, int]:
    """Resident kB and threads."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return int(found["VmRSS"].split()[0]), int(found["Threads"])


def measure(checkpoint: str, stop: int, encode: Any, seconds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Run all trajectories at once."""
    given = SessionProcess(ToolLoop((wait,), len(seconds[0]) + 1), checkpoint, (stop,), 60.0)
    processes, numbers = RecentProcesses(1), count()
    sessions = Sessions(lambda: (given, *processes.of(given, None, 1)), numbers, concurrency=len(seconds))

    def start(rows: int) -> None:
        sessions.start([Row(row, 0, [], Sampling(), row) for row in range(rows)], [{"prompt": "Go."}] * rows)

    def serve(says: Callable[[int], str]) -> int:
        """Answer each trajectory with what it says; how many have failed."""
        for asked in sessions.poll(0.1) or ():
            asked.token_ids = [*encode(says(-1 - asked.row_id)), stop]
            asked.log_probs, asked.policy_version = [-0.5] * len(asked.token_ids), [0] * len(asked.token_ids)
            asked.end = "stop"
            sessions.finished(asked)
        return sum(one.failure is not None for one in sessions.take())

    turns = dict.fromkeys(range(1, len(seconds) + 1), 0)

    def says(key: int) -> str:
        turn = turns[key]
        turns[key] += 1
        if turn == len(seconds[key - 1]):
            return "done"
        return f"<call>{json.dumps({'name': 'wait', 'arguments': {'seconds': seconds[key - 1][turn]}})}</call>"

    try:
        start(1)  # loads what is loaded once
        while sessions.under_way:
            _ = serve(lambda _: "done")
        (worker,) = [one.worker for one in sessions._processes]
        before, threads = status(worker.pid)
        most, began, failed = before, time.perf_counter(), 0
        start(len(seconds))
        while sessions.under_way:
            failed += serve(says)
            resident, running = status(worker.pid)
            most, threads = max(most, resident), max(threads, running)
        taken = time.perf_counter() - began
    finally:
        processes.close()
    return {"seconds": taken, "failed": failed, "memory_kb": (most - before) / len(seconds), "threads": threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    characters = "".join(chr(code) for code in range(32, 127))
    tokenizer = SmallModel(characters=characters, chat_template=TEMPLATE).tokenizer()
    seconds = drawn(options.sessions, options.turns)
    with tempfile.TemporaryDirectory() as checkpoint:
        tokenizer.save_pretrained(checkpoint)
        found = measure(
            checkpoint,
            tokenizer.eos_token_id,
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            seconds,
        )
    alone = ideal(seconds)
    rows = {"rows_per_s": options.sessions / found["seconds"], "ideal_rows_per_s": options.sessions / alone}
    print(
        json.dumps(
            {
                "benchmark": "environments",
                "sessions": options.sessions,
                "turns": options.turns,
                **rows,
                "ideal_seconds": alone,
                **found,
            }
        )
    )


if __name__ == "__main__":
    main()

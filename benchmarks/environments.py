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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.config import Sampling
from hybridflow.engines.contract import Row
from hybridflow.environments.acting import ToolLoop
from hybridflow.environments.session_process import SessionProcess
from hybridflow.environments.sessions import Sessions
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
    process = SessionProcess(ToolLoop((wait,), len(seconds[0]) + 1), checkpoint, (stop,), 60.0)
    sessions = Sessions(process, workers=1, concurrency=len(seconds))
    said = dict.fromkeys(range(len(seconds)), 0)
    try:
        sessions.start(0, {"prompt": "Go."}, 0)  # loads what is loaded once
        while sessions.under_way:
            for asked in sessions.poll(0.1):
                sessions.answer(asked, Row(0, 0, asked.ids, Sampling(), 0, [*encode("done"), stop], [], [], "stop"))
        _ = sessions.take()
        (worker,) = [one.worker for one in sessions._processes]
        before, threads = status(worker.pid)
        most, began, failed = before, time.perf_counter(), 0
        for key in said:
            sessions.start(key, {"prompt": "Go."}, key)
        while sessions.under_way:
            for asked in sessions.poll(0.1):
                turn = said[asked.key]
                said[asked.key] += 1
                text = "done"
                if turn < len(seconds[asked.key]):
                    call = {"name": "wait", "arguments": {"seconds": seconds[asked.key][turn]}}
                    text = f"<call>{json.dumps(call)}</call>"
                ids = [*encode(text), stop]
                given = ids, [-0.5] * len(ids), [0] * len(ids), "stop"
                sessions.answer(asked, Row(0, 0, asked.ids, Sampling(), 0, *given))
            resident, running = status(worker.pid)
            most, threads = max(most, resident), max(threads, running)
            failed += sum(one.failure is not None for one in sessions.take().values())
        taken = time.perf_counter() - began
    finally:
        sessions.close()
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

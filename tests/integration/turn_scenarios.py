"""Turns of conversations on the engines of vllm_scenarios.py, whose KV cache stays for the next one, or does not."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from hybridflow.config import Sampling
from hybridflow.engines.contract import Row
from hybridflow.engines.vllm.engine import VLLMEngine

TURNS = 3
SAMPLING = Sampling(max_tokens=6, temperature=0.7, top_k=40)


class Turns:
    """A RowSource of `number` conversations; every fourth says something else in place of its second turn. Further
    turns come with one of the next 1 + `late` polls; None: once all conversations have had theirs."""

    def __init__(self, number: int, sampling: Sampling, kept: bool, late: int | None) -> None:
        self.found: list[list[dict[str, Any]]] = [[] for _ in range(number)]
        self._sampling, self._kept = sampling, kept
        self._next = [(0, self._row(key, [2 + key % 60, *range(3, 7)])) for key in range(number)]
        self._polls, self._late = 0, late
        self._open, self._done = number, list[str]()

    def _row(self, key: int, ids: list[int]) -> Row:
        return Row(-1 - key, 0, ids, self._sampling, 100 * key + len(self.found[key]), kept=self._kept)

    def poll(self, seconds: float) -> list[Row] | None:
        self._polls += self._late is not None or len(self._next) == self._open
        found = [row for due, row in self._next if due <= self._polls]
        self._next = [one for one in self._next if one[0] > self._polls]
        return found if self._open else None

    def finished(self, row: Row) -> None:
        key, turns = -1 - row.row_id, self.found[-1 - row.row_id]
        cached = (
            len(turns[-1]["ids"]) - 1 if turns and row.prompt_ids[: len(turns[-1]["ids"])] == turns[-1]["ids"] else 0
        )
        ids = row.prompt_ids + row.token_ids
        turns.append({"ids": ids, "tokens": row.token_ids, "log_probs": row.log_probs, "end": row.end})
        turns[-1] |= {"prefilled": row.prefilled, "new": len(row.prompt_ids) - cached}
        if len(turns) < TURNS:
            chance = random.Random(100 * key + len(turns))
            heard = [chance.randint(2, 69) for _ in range(chance.randint(1, 4))]
            row = self._row(key, heard if key % 4 == 3 and len(turns) == 1 else ids + heard)
            self._next.append((self._polls + 1 + key % (1 + (self._late or 0)), row))
        else:
            self._open -= 1
            self._done.append(row.name)

    @property
    def under_way(self) -> int:
        return self._open

    def refused(self, row: Row, why: str, full: bool) -> None:
        raise AssertionError(why)

    def done(self) -> list[str]:
        found, self._done = self._done, []
        return found


def turns(
    engine: VLLMEngine,
    kept: bool,
    number: int = 9,
    sampling: Sampling = SAMPLING,
    free: int | None = None,
    late: int | None = 0,
) -> dict[str, Any]:
    """The turns on the replica's first rank, the tokens that vLLM's scheduler planned, and what is left there.

    `free`: blocks of the cache, of which others have the rest.
    """
    engine.weights_changed()  # nothing is cached
    core: Any = engine._alive()
    source, planned, schedule = Turns(number, sampling, kept, late), [0], core.scheduler.schedule

    def counted(*args: Any) -> Any:
        plan = schedule(*args)
        planned[0] += plan.total_num_scheduled_tokens
        return plan

    core.scheduler.schedule = counted
    pool = core.scheduler.kv_cache_manager.block_pool
    taken = [] if free is None else pool.get_new_blocks(pool.get_num_free_blocks() - free)
    try:
        engine.serve(source if engine.is_first else None)
    finally:
        core.scheduler.schedule = schedule
        pool.free_blocks(taken)
    return {
        "turns": source.found if engine.is_first else None,
        "planned": planned[0],
        "left": (len(core.scheduler.requests), core.scheduler.num_waiting_for_streaming_input),
        "possible": engine._loop._held.possible,
    }


def both(engine: VLLMEngine) -> dict[str, Any]:
    return {"kept": turns(engine, True), "not kept": turns(engine, False)}


def crowded(engine: VLLMEngine) -> dict[str, Any]:
    """More conversations than places (16), few blocks, and blocks that only held caches have."""
    core: Any = engine._alive()
    blocks, held = core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks, engine._loop._held
    out = {"places": turns(engine, True, 24, late=3), "half": turns(engine, True, free=blocks // 2 + 2, late=3)}
    held.make_room = lambda: None  # or it would free them before
    out["few"] = turns(engine, True, free=3, late=None)
    del held.make_room
    return out


def check(kept: dict[str, Any], other: dict[str, Any] | None = None, exact: bool = True) -> None:
    """Turns with `kept` caches compute their new tokens only, if `exact`, and say what those of `other` do."""
    for found in (kept, other or kept):
        rows = [row for each in found["turns"] for row in each]
        assert len(rows) == TURNS * len(found["turns"])
        assert found["planned"] == sum(row["prefilled"] + len(row["tokens"]) - 1 for row in rows)
    rows = [row for each in kept["turns"] for row in each]
    if exact:
        assert [row["prefilled"] for row in rows] == [row["new"] for row in rows]
    for row, same in zip(rows, [row for each in (other or kept)["turns"] for row in each], strict=True):
        assert (row["ids"], row["end"]) == (same["ids"], same["end"])
        assert all(abs(a - b) < 1e-5 for a, b in zip(row["log_probs"], same["log_probs"], strict=True))


def with_stop_strings(engine: VLLMEngine) -> dict[str, Any]:
    text = replace(SAMPLING, max_tokens=12, temperature=3.0, top_k=0, stop=("w7", "w8 w"), ignore_eos=True)
    return {name: turns(engine, kept, sampling=text) for name, kept in {"kept": True, "not kept": False}.items()}

"""Sessions of the engines of vllm_scenarios.py: rows that are interrupted, moved and continued."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from hybridflow.config import KV, Sampling, Until
from hybridflow.engines.contract import Row
from hybridflow.engines.vllm import cache_image
from hybridflow.engines.vllm import engine as vllm_engine
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.errors import HybridFlowError
from hybridflow.planner.cost.cache_places import CachedRow, CachePrices

PROMPTS = [[5, 9, 33, 69], [12, 7], [60]]
SEEDS = [11, 12, 14]
SAMPLED = Sampling(max_tokens=10, temperature=0.7, n=2, top_k=40)
GREEDY = Sampling(max_tokens=12, greedy=True, ignore_eos=True, seed=1)
MOVED_AFTER = (0, 1, 4, 9)  # steps


def new_rows(engine: VLLMEngine) -> list[Row]:
    rows = engine.new_rows(PROMPTS, SAMPLED, SEEDS)
    return rows + engine.new_rows(PROMPTS, GREEDY, row_ids=[10, 11, 12])


def plain(rows: list[Row]) -> list[dict[str, Any]]:
    """As they would be in a file."""
    return json.loads(json.dumps([asdict(row) for row in sorted(rows, key=lambda row: (row.row_id, row.index))]))


def stepped(engine: VLLMEngine, rows: list[Row], between: Callable[[], object]) -> list[dict[str, Any]]:
    """All rows, finished, with `between` after every step."""
    engine.submit(rows)
    out = []
    while engine.unfinished:
        engine.advance(Until(steps=1))
        out += engine.take()
        between()
    return plain(out)


def moved_out(engine: VLLMEngine, steps: int) -> list[dict[str, Any]]:
    """All rows after some steps."""
    engine.submit(new_rows(engine))
    if steps:
        engine.advance(Until(steps=steps))
    return plain(engine.take() + engine.withdraw())


def continued(engine: VLLMEngine, state: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [Row(**row) for row in state]
    engine.submit([row for row in rows if not row.end])
    engine.advance(Until(seconds=1000.0))
    return plain([row for row in rows if row.end] + engine.take())


class ByLength:
    """Rows of more than 8 tokens are cheaper to copy than to compute."""

    prices = CachePrices(offload=1.0, keep=2.0)

    def rows(self, tokens: Collection[int], nbytes: Iterable[int]) -> list[CachedRow]:
        return [CachedRow(size, 2.0 * size * (count > 8)) for count, size in zip(tokens, nbytes, strict=True)]


def asleep(engine: VLLMEngine) -> dict[str, Any]:
    """All rows with a sleep after every step, by where their keys and values wait; and with none."""
    out: dict[str, Any] = {"awake": stepped(engine, new_rows(engine), lambda: None)}

    def rest(kv: KV) -> None:
        engine.sleep(kv)
        engine.wake()

    engine._image._pricing = ByLength()  # type: ignore[assignment]
    kinds: tuple[KV, ...] = ("keep", "offload", "recompute", "auto")
    for kv in kinds:
        before = engine.copied_bytes()
        out[kv] = stepped(engine, new_rows(engine), partial(rest, kv))
        out[f"{kv} copied"] = [now - then for now, then in zip(engine.copied_bytes(), before, strict=True)]
    engine.submit(new_rows(engine))
    engine.advance(Until(steps=3))
    engine.sleep("keep")
    out["waits"] = engine.cache_bytes
    rows = engine.withdraw()
    out["left"] = engine.cache_bytes
    engine.wake()
    return out | {"moved": continued(engine, plain(rows))}


class ByBytes:
    """Copying a row of two layers takes longer than computing it, copying one of one layer does not."""

    prices = CachePrices(offload=1.0, keep=2.0)

    def __init__(self, layer_bytes: int) -> None:
        self._layer_bytes = layer_bytes

    def rows(self, tokens: Collection[int], nbytes: Iterable[int]) -> list[CachedRow]:
        return [CachedRow(size, 1.5 * self._layer_bytes) for _, size in zip(tokens, nbytes, strict=True)]


def lacking(engine: VLLMEngine) -> dict[str, Any]:
    """All rows with a sleep after every step, where the last rank of the replica lacks memory for what waits; and a
    wake that fails there. Rows of a pipeline's ranks have unequal sizes."""
    image, groups, out = engine._image, engine._groups, dict[str, Any]()
    last = groups.rank == len(groups.members) - 1

    def fails(module: ModuleType, name: str) -> Any:
        error = torch.OutOfMemoryError("CUDA out of memory")
        return patch.object(module, name, side_effect=error) if last else nullcontext()

    def rest(kv: KV, falls: str) -> None:
        with fails(cache_image, "to_device") if falls == "sleep" else nullcontext():
            engine.sleep(kv)
        with fails(cache_image, "to_device") if falls == "wake" else nullcontext():
            engine.wake()

    kinds: tuple[KV, ...] = ("keep", "offload")
    for kv in kinds:
        for falls in ("sleep", "wake"):
            out[f"{kv} {falls}"] = stepped(engine, new_rows(engine), partial(rest, kv, falls))
    row = len(image._views) * image._views[0][0].nbytes
    with patch.object(image, "_room", lambda kv: 2.5 * row if last else 100.0 * row):
        out["room"] = stepped(engine, new_rows(engine), partial(rest, "keep", ""))
    image._pricing = ByBytes(image._views[0][0].nbytes)  # type: ignore[assignment]
    out["unequal"] = stepped(engine, new_rows(engine), partial(rest, "auto", ""))
    engine.submit(new_rows(engine))
    engine.advance(Until(steps=3))
    engine.sleep("offload")
    with fails(vllm_engine, "zero_pages"):
        try:
            engine.wake()
        except RuntimeError as error:
            out["error"] = type(error).__name__
    out["asleep"] = engine.asleep
    engine.wake()
    engine.advance()
    return out | {"rescued": plain(engine.take())}


def several_ranks(engine: VLLMEngine, path: Path) -> dict[str, Any]:
    """What needs ranks that agree; rows of the engine in `single` arrive in a file."""
    state = json.loads(path.read_text())
    out = {"moved": [continued(engine, each) for each in state]}
    engine.submit(new_rows(engine))
    calls = 0
    while engine.unfinished and calls < 10_000:
        engine.advance(Until(seconds=0.002))
        calls += 1
    return out | {"timed": plain(engine.take()), "calls": calls}


def single(engine: VLLMEngine, path: Path, write: Callable[[float], None]) -> dict[str, Any]:
    """`write(scale)` writes the scaled weights."""

    def again() -> None:
        engine.submit([Row(**row) for row in plain(engine.withdraw())])

    def rest() -> None:
        engine.sleep()
        engine.wake()

    out: dict[str, Any] = {"whole": continued(engine, plain(new_rows(engine)))}
    out["paused"] = stepped(engine, new_rows(engine), lambda: None)
    out["generated"] = [row.token_ids for each in engine.generate(PROMPTS, SAMPLED, SEEDS) for row in each]
    for name, between in {"again": again, "new weights": engine.weights_changed, "asleep": rest}.items():
        out[name] = stepped(engine, new_rows(engine), between)
    state = [moved_out(engine, steps) for steps in MOVED_AFTER]
    path.write_text(json.dumps(state))
    out["moved"] = [continued(engine, each) for each in state]
    out["versions"] = _versions(engine, write)
    out["limits"] = _limits(engine)
    out["errors"] = _errors(engine)
    return out


def _versions(engine: VLLMEngine, write: Callable[[float], None]) -> dict[str, Any]:
    """Weights that change after three steps, and after five more."""
    engine.policy_version = 7
    engine.submit(engine.new_rows(PROMPTS, GREEDY))
    for scale, steps in ((0.8, 3), (1.2, 5)):
        engine.advance(Until(steps=steps))
        write(scale)
    engine.advance()
    out = {"rows": plain(engine.take()), "last": engine.policy_version}
    write(1.0)
    return out


def _limits(engine: VLLMEngine) -> dict[str, Any]:
    out = {}
    for name, until in {"rows": Until(rows=2), "groups": Until(groups=1), "steps": Until(steps=5)}.items():
        engine.submit(engine.new_rows(PROMPTS, SAMPLED, SEEDS))
        engine.advance(until)
        taken = engine.take()
        out[name] = (plain(taken), plain(engine.withdraw()))
    engine.submit([])
    engine.advance(Until(steps=1))
    return out | {"empty": (engine.take(), engine.withdraw(), engine.unfinished)}


def _errors(engine: VLLMEngine) -> dict[str, Any]:
    first, second = engine.new_rows(PROMPTS[:1], SAMPLED, SEEDS[:1])

    def error(*rows: Row) -> str:
        try:
            engine.submit(rows)
        except HybridFlowError as raised:
            return f"{type(raised).__name__}: {raised}"
        return "no error"

    out = {"twice": error(first, second, first), "left": len(engine.unfinished)}
    engine.submit([first])
    out["held"] = error(second, first)
    engine.advance()
    out["waiting"] = error(first)
    [done] = engine.take()
    out["finished"] = error(done)
    out["prompt"] = error(Row(0, 0, [], SAMPLED, 1))
    core: Any = engine._core
    engine.submit(new_rows(engine))
    engine.advance(Until(steps=2))
    whole, core.step_fn = core.step_fn, _fail
    for call in (engine.advance, lambda: engine.generate(PROMPTS, GREEDY)):
        try:
            call()
        except RuntimeError as raised:
            out["raised"] = str(raised)
    out["scheduled"] = len(core.scheduler.requests)
    core.step_fn = whole
    out["unfinished"] = len(engine.unfinished)
    out["rescued"] = continued(engine, plain(engine.withdraw()))
    return out


def _fail() -> Any:
    raise RuntimeError("a step failed")


def with_stop_strings(engine: VLLMEngine) -> dict[str, Any]:
    """A stop string of two tokens, between which rows are interrupted."""
    text = Sampling(max_tokens=30, temperature=3.0, stop=("w7", "w8 w"), ignore_eos=True, n=4)

    def again() -> None:
        engine.submit([Row(**row) for row in plain(engine.withdraw())])

    whole = stepped(engine, engine.new_rows(PROMPTS, text, SEEDS), lambda: None)
    return {"whole": whole, "again": stepped(engine, engine.new_rows(PROMPTS, text, SEEDS), again)}

"""How often the host waits for the device in one call: the table is exact, so a wait more or less is noticed.

An update is one mini-batch of `forward_backward` and a `step`. It waits for what was found not to be finite, for the
metrics and for the norm of the gradients; with stage 1 and `offload` for the gradients, which travel in the step. (With
others they have travelled in the backward pass, and the host has waited for that before.) No call waits for a
micro-batch."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import FSDP, Adam, LoRA, Megatron, ZeRO
from hybridflow.engines.contract import TrainState
from tests.contracts import engine_tasks as tasks
from tests.contracts.example_models import loss_of, make_batch, make_model
from tests.gpu.conftest import OneRank


@dataclass(slots=True)
class HostSyncs:
    """What a block of code made the host wait for."""

    by_place: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, place) -> number. Place: "hybridflow/file.py:line < its caller", or "elsewhere" (no Python frame)."""
    counted: bool = False
    """Whether the device counts."""

    @property
    def total(self) -> int:
        """Waits: synchronisations, blocking copies, copies to pageable memory, operators with sizes of data.

        A copy from pageable memory ("pageable copy") waits only where a "synchronize" beside it says so.
        """
        return sum(number for (kind, _), number in self.by_place.items() if kind != "pageable copy")

    def __str__(self) -> str:
        lines = (f"{number:4d}  {kind:25s} {place}" for (kind, place), number in self.by_place.most_common())
        return "\n".join(lines) or "none"


@contextlib.contextmanager
def host_syncs() -> Iterator[HostSyncs]:
    """`with host_syncs() as found:` fills `found` when the block ends; all threads of this process count."""
    syncs = HostSyncs()
    emulation = sys.modules.get("tests.emulated_cuda.findings")
    if emulation is None:
        yield syncs
        return
    before = Counter(emulation.found)
    yield syncs
    syncs.counted = True
    for (kind, _, place), number in (Counter(emulation.found) - before).items():
        if kind in emulation.WAITS:
            syncs.by_place[kind, place] += number


pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"micro_tokens": 48, "dtype": "bfloat16"}
STRATEGIES: dict[str, Any] = {
    "fsdp": FSDP(**SMALL),
    "fsdp-offload": FSDP(offload=True, **SMALL),
    "zero-1": ZeRO(stage=1, **SMALL),
    "zero-1-offload": ZeRO(stage=1, offload=True, **SMALL),
    "zero-2": ZeRO(stage=2, **SMALL),
    "zero-2-offload": ZeRO(stage=2, offload=True, **SMALL),
    "zero-3": ZeRO(stage=3, **SMALL),
    "megatron": Megatron(**SMALL),
    "lora": FSDP(lora=LoRA(rank=4), **SMALL),
    "megatron-lora": Megatron(lora=LoRA(rank=4), **SMALL),
}
CALLS = ("update", "forward", "score", "offload", "reload")
ALLOWED: dict[str, tuple[int, ...]] = {
    "fsdp": (3, 1, 1, 0, 0),
    "fsdp-offload": (3, 1, 1, 0, 0),
    "zero-1": (3, 1, 1, 0, 0),
    "zero-1-offload": (4, 1, 1, 0, 0),
    "zero-2": (3, 1, 1, 0, 0),
    "zero-2-offload": (3, 1, 1, 0, 0),
    "zero-3": (3, 1, 1, 0, 0),
    "megatron": (3, 1, 1, 0, 0),
    "lora": (3, 1, 1, 0, 0),
    "megatron-lora": (3, 1, 1, 0, 0),
}
STATE = get_args(TrainState)
CASES = [(name, "lm") for name in STRATEGIES] + [(name, "value") for name in ("fsdp", "zero-2-offload", "megatron")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {head: make_model("qwen2", directory, head) for head in ("lm", "value")}


def calls(engine: Any, batch: Batch, head: str) -> dict[str, Callable[[], object]]:
    """What to count, by name, in an order in which each can run."""
    loss = loss_of(head)
    names = ("values",) if head == "value" else ("log_probs", "entropy")
    return {
        "update": lambda: (engine.forward_backward(batch, loss, loss.outputs), engine.step()),
        "forward": lambda: engine.forward(batch, names),
        **({"score": lambda: engine.score(batch)} if head == "value" else {}),
        "offload": lambda: engine.offload(STATE),
        "reload": lambda: engine.reload(STATE),
    }


@pytest.mark.parametrize(("name", "head"), CASES, ids=map("-".join, CASES))
def test_a_call_waits_as_often_as_the_table_says(world: OneRank, models: dict[str, Path], name: str, head: str):
    """However many micro-batches there are."""
    strategy = STRATEGIES[name]
    engine = tasks.build(world, f"syncs-{name}-{head}", strategy, 1, models[head], head, Adam(lr=1e-3))
    for number, rows in enumerate((7, 7, 19)):
        batch, found = make_batch(rows), dict[str, HostSyncs]()
        assert len(engine.tokens.micro_batches(batch)) >= rows // 7 + 1
        for call, run in calls(engine, batch, head).items():
            with host_syncs() as found[call]:
                run()
        for call, allowed in zip(CALLS, ALLOWED[name], strict=True):
            if number and call in found and found[call].counted:  # the first round makes what is made once
                assert found[call].total == allowed, f"{call} of {rows} rows:\n{found[call]}"
                pageable = [place for kind, place in found[call].by_place if kind == "pageable copy"]
                assert not pageable, f"{call} copies from memory that is not pinned: {pageable}"


def test_a_loss_combines_lengths_with_values(world: OneRank, models: dict[str, Path]):
    """As it does on the CPU: without a wait, and without a word about devices."""
    seen: list[torch.device] = []

    def loss(outputs: Any, rows: Batch, totals: Any) -> Any:
        scores: Ragged = outputs["log_probs"]
        means = scores.row_sum() / rows["response_ids"].lengths.clamp(min=1)
        shares = scores.expand(1.0 / scores.lengths) * scores.values
        seen.append(means.device)
        return means.sum() / totals.rows + 0 * shares.sum(), {"longest": rows["response_ids"].lengths.max().float()}

    loss.metrics = {"longest": "max"}  # type: ignore[attr-defined]
    engine, batch = tasks.build(world, "lengths", FSDP(**SMALL), 1, models["lm"], "lm", Adam(lr=1e-3)), make_batch()
    for _ in range(2):
        with host_syncs() as found:
            metrics = engine.forward_backward(batch, loss, ("log_probs",))
    assert metrics["longest"] == float(batch["response_ids"].lengths.max())
    assert {device.type for device in seen} == {engine.device.type}
    assert not found.counted or found.total == 2, str(found)


def test_batches_and_ragged_columns_move_without_a_wait(world: OneRank):
    batch = make_batch().with_columns(text=["row"] * 7, flags=Ragged.from_lengths(torch.ones(7, 3) > 0, [1] * 7))
    with host_syncs() as found:
        moved = batch.to(world.device)
        ragged: Ragged = moved["old_log_probs"]
        ragged.index([3, 1]), ragged.pad(), ragged.row_sum(), ragged.expand(ragged.lengths), ragged.row_index()
    assert not found.by_place, str(found)
    for name in batch.columns:
        if name != "text":
            assert batch.select(name).equal(moved.select(name).to("cpu"))
    for got, want in (
        (ragged.index([3, 1]).values, batch["old_log_probs"].index([3, 1]).values),
        (ragged.pad(-1), batch["old_log_probs"].pad(-1)),
        (ragged.row_sum(), batch["old_log_probs"].row_sum()),
        (ragged.row_index(), batch["old_log_probs"].row_index()),
    ):
        assert torch.equal(got.cpu(), want)


def test_only_groups_of_several_ranks_have_a_communicator(world: OneRank, models: dict[str, Path]):
    """And each set of members one."""
    engine = tasks.build(world, "groups", Megatron(**SMALL), 1, models["lm"], "lm", Adam(lr=1e-3), kept=False)
    batch, loss = make_batch(), loss_of("lm")
    engine.forward_backward(batch, loss, loss.outputs)
    engine.step()
    groups = engine.context.groups
    assert groups.of([0]) is groups.everyone() is engine.tokens.group
    backend: Any = groups.everyone()._get_backend(world.device)
    assert not backend._is_initialized() if hasattr(backend, "_is_initialized") else True

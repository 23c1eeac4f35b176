"""An operation of an engine that fails: afterwards the engine is as it was, bit for bit, or it refuses further ones."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron, ZeRO
from tests.contracts import failure_tasks as tasks
from tests.contracts.train_contract import Sizes, count

SMALL: dict[str, Any] = {"micro_tokens": 24}  # several micro-batches on every rank
DROPS = LoRA(rank=3, alpha=5, targets=["q_proj", "v_proj"], dropout=0.3)
CASES: dict[str, tuple[Any, Sizes]] = {
    "fsdp-1": (FSDP(**SMALL), (1, 1, 1)),
    "fsdp-2": (FSDP(**SMALL), (1, 1, 2)),
    "fsdp-4": (FSDP(**SMALL), (1, 1, 4)),
    "fsdp-bfloat16": (FSDP(dtype="bfloat16", **SMALL), (1, 1, 2)),
    "fsdp-recompute": (FSDP(recompute=True, reduce_often=True, **SMALL), (1, 1, 2)),
    "fsdp-offload": (FSDP(offload=True, **SMALL), (1, 1, 2)),
    "fsdp-2-tp-2": (FSDP(tp=2, **SMALL), (1, 2, 2)),
    "hsdp-2x2": (FSDP(replicate=2, **SMALL), (1, 1, 4)),
    "lora-1": (FSDP(lora=DROPS, **SMALL), (1, 1, 1)),
    "lora-2": (FSDP(lora=DROPS, **SMALL), (1, 1, 2)),
    "zero-1": (ZeRO(stage=1, **SMALL), (1, 1, 2)),
    "zero-2": (ZeRO(stage=2, **SMALL), (1, 1, 2)),
    "zero-2-offload": (ZeRO(stage=2, offload=True, **SMALL), (1, 1, 2)),
    "zero-3": (ZeRO(stage=3, **SMALL), (1, 1, 2)),
    "megatron-1": (Megatron(**SMALL), (1, 1, 1)),
    "megatron-tp-dp": (Megatron(tp=2, dp=2, **SMALL), (1, 2, 2)),
    "megatron-pp-dp": (Megatron(pp=2, dp=2, **SMALL), (2, 1, 2)),
    "megatron-pp-tp": (Megatron(pp=2, tp=2, **SMALL), (2, 2, 1)),
    "megatron-lora-1": (Megatron(lora=DROPS, recompute=True, **SMALL), (1, 1, 1)),
    "megatron-lora-pp-dp": (Megatron(pp=2, dp=2, lora=DROPS, **SMALL), (2, 1, 2)),
}
FEW = ["fsdp-2", "zero-2", "megatron-tp-dp"]
ADAM, MOMENTUM = Adam(lr=0.02, eps=1e-3, clip_grad=0.7), SGD(lr=0.05, momentum=0.5, clip_grad=0.7)
HEAD = ("outputs", "loss")
"""Places behind the collectives of FSDP's layers."""


SAID = {place: f"out of memory at {place}" for place in ("forward", "backward", "outputs")}
SAID |= {"loss": "the reward of this row is gone", "loss backward": "the gradient of this loss"}


def run(processes: Any, case: str, task: Any, path: Any, *more: Any, optimizer: Any = ADAM) -> list[Any]:
    strategy, sizes = CASES[case]
    size = count(sizes)
    return processes.run(size, task, processes.name(), strategy, size, path, optimizer, *more)


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in FEW else pytest.mark.slow) for c in CASES])
def test_a_pass_that_fails_on_all_ranks_leaves_nothing(processes, models, case):
    """The update after it is that of an engine on which nothing failed: metrics, norm, parameters, moments."""
    for rank in run(processes, case, tasks.survives, models["llama", "lm"], tasks.PASSES, None):
        assert rank["differs"] == []
        assert {place: text for place, text in SAID.items() if text not in rank["errors"][place]} == {}, rank["errors"]


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("case", "places", "ranks"),
    [
        *[(case, tasks.PASSES, (1,)) for case in ("zero-1", "zero-2", "zero-2-offload")],
        *[(case, tasks.PASSES, (3,)) for case in ("megatron-pp-dp", "megatron-lora-pp-dp")],  # of the last stage
        *[(case, HEAD, (3,)) for case in ("fsdp-4", "hsdp-2x2")],
        *[(case, HEAD, (1,)) for case in ("lora-2", "zero-3")],
        *[(case, ("loss",), (0, 1)) for case in ("fsdp-2-tp-2", "megatron-tp-dp")],  # all tensor parallel ranks
    ],
    ids=str,
)
def test_a_pass_that_fails_on_one_replica_fails_on_all_where_it_can_be_ended(processes, models, case, places, ranks):
    for rank in run(processes, case, tasks.survives, models["llama", "lm"], places, ranks):
        assert rank["differs"] == []
        assert {place: SAID[place] for place in places if SAID[place] not in rank["errors"][place]} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "place"),
    [("fsdp-2", "forward"), ("fsdp-2", "backward"), ("fsdp-2-tp-2", "outputs"), ("megatron-tp-dp", "forward")],
)
def test_where_peers_are_left_inside_a_pass_every_rank_refuses_further_calls(processes, models, case, place):
    found = run(processes, case, tasks.breaks, models["llama", "lm"], place, (1,))
    assert f"out of memory at {place}" in found[1][0]
    for first, *refused in found:
        assert first
        assert all(error.startswith("BrokenGroupError: actor cannot be used any more: ") for error in refused)
        assert all("forward_backward failed" in error and "checkpoint" in error for error in refused)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "read"])
@pytest.mark.parametrize("case", ["fsdp-1", *FEW, "fsdp-2-tp-2", "megatron-pp-tp"])
def test_outputs_that_fail_leave_the_gradients_of_a_step_alone(processes, models, case, place):
    for rank in run(processes, case, tasks.keeps_gradients, models["llama", "lm"], place):
        assert f"out of memory at {place}" in rank["error"]
        assert rank["results"][0] == rank["results"][1]
        assert rank["differs"] == []
        one, other = rank["outputs"]
        assert one is other is None or one.equal(other)


@pytest.mark.parametrize("place", ["norm", "gradients"])
@pytest.mark.parametrize("case", FEW)
def test_a_step_that_fails_before_it_changes_anything_has_lost_its_gradients_only(processes, models, case, place):
    for rank in run(processes, case, tasks.stepping, models["llama", "lm"], place, range(4)):
        assert f"Injected: {place}" in rank["error"]
        assert all("lost the gradients" in error and "zero_grad()" in error for error in rank["refused"])
        assert rank["same"]
        assert rank["differs"] == []


@pytest.mark.parametrize("case", FEW)
def test_a_step_that_fails_half_way_on_one_rank_ends_the_group(processes, models, case):
    for rank in run(processes, case, tasks.stepping, models["llama", "lm"], "update", (0,)):
        assert rank["error"]
        assert all(error.startswith("BrokenGroupError: actor cannot be used any more: ") for error in rank["refused"])


@pytest.mark.parametrize("case", FEW)
def test_a_step_of_which_a_pass_failed_begins_anew(processes, models, case):
    for rank in run(processes, case, tasks.accumulating, models["llama", "lm"]):
        assert "the reward of this row is gone" in rank["error"]
        assert all("lost the gradients" in error for error in rank["refused"])
        assert rank["same"]
        assert rank["differs"] == []


@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM], ids=["adam", "sgd"])
@pytest.mark.parametrize("case", [*FEW, "lora-2", "megatron-lora-pp-dp", "zero-2-offload"])
def test_no_step_takes_memory_for_moments(processes, models, case, optimizer):
    for rank in run(processes, case, tasks.first_step_without_memory, models["llama", "lm"], optimizer=optimizer):
        assert (rank["error"], rank["next"]) == ("", "")
        assert rank["bytes"][0] == rank["bytes"][1] > 0


@pytest.mark.parametrize("case", ["fsdp-2", "zero-1", "zero-2", "megatron-tp-dp", "megatron-lora-pp-dp"])
def test_memory_that_does_not_come_changes_nothing(processes, models, case):
    for rank in run(processes, case, tasks.memory_that_does_not_come, models["llama", "lm"]):
        assert "no memory" in rank["offload"]
        assert "no memory" in rank["reload"]
        assert rank["same"]

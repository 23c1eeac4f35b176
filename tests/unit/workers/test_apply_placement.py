"""What becomes of a driver's settings where a placement decides on the sizes."""

from __future__ import annotations

import logging

import pytest

import hybridflow as hf
from hybridflow.placement import GroupPlacement
from hybridflow.topology import RankGrid
from hybridflow.workers.placing import apply_placement

WHERE = GroupPlacement((0, 1, 2, 3), (8,), hf.Megatron(tp=2, pp=1, dp=2), (1, 4))


def test_sizes_are_the_placements_and_all_else_the_drivers():
    train = hf.Megatron(tp=8, pp=2, dp=1, recompute=True, micro_tokens=99, stage_layers=(3, 1))
    given = {"model": "m", "train": train, "generate": hf.VLLM(tp=8, sampling=hf.Sampling(max_tokens=3)), "optim": None}
    assert apply_placement(WHERE, given) == {
        "model": "m",
        "train": hf.Megatron(tp=2, dp=2, recompute=True, micro_tokens=99),
        "generate": hf.VLLM(tp=4, sampling=hf.Sampling(max_tokens=3)),
        "optim": None,
    }
    assert given["train"] is train


def test_ranks_that_share_rows_and_experts_are_the_placements():
    found = hf.Megatron(tp=2, dp=2, cp=2, ep=4)
    where = GroupPlacement(tuple(range(8)), (8,), found, offload=True)
    own = apply_placement(where, {"train": hf.Megatron(ep=2, etp=1), "offload": False})
    assert own == {"train": hf.Megatron(tp=2, dp=2, cp=2, ep=4, etp=1), "offload": True}
    assert own["train"].grid(8) == RankGrid(t=2, d=4, ep=4, etp=1)
    assert apply_placement(where, {"train": hf.FSDP()})["train"] == hf.FSDP(tp=2)
    assert apply_placement(where, {"offload": ("optimizer",)}) == {"offload": ("optimizer",)}


def test_what_a_price_rests_on_is_the_placements_unless_the_driver_chose():
    found = hf.Megatron(tp=2, dp=2, micro_tokens=4096, recompute=True, sequence_parallel=True)
    where = GroupPlacement((0, 1, 2, 3), (8,), found)
    assert apply_placement(where, {"train": hf.Megatron()})["train"] == found
    assert apply_placement(where, {"train": hf.Megatron(micro_tokens=512)})["train"].micro_tokens == 512


def test_generation_has_the_memory_that_it_was_priced_with():
    where = GroupPlacement((0,), (1,), hf.Megatron(), (1, 1), memory_fraction=0.73)
    assert apply_placement(where, {"generate": hf.VLLM()})["generate"].memory_fraction == 0.73
    assert apply_placement(where, {"generate": hf.VLLM(memory_fraction=0.3)})["generate"].memory_fraction == 0.3
    without = GroupPlacement((0,), (1,), hf.Megatron(), (1, 1))
    assert apply_placement(without, {"generate": hf.VLLM()})["generate"] == hf.VLLM()


@pytest.mark.parametrize(("given", "rows"), [({}, 1024), ({"max_sequences": 100}, 100)])
def test_stages_of_generation_have_as_many_rows_each_as_one_engine(given, rows):
    """vLLM's bound is for all micro-batches."""
    where = GroupPlacement((0, 1, 2, 3), (4,), hf.Megatron(), (4, 1))
    assert apply_placement(where, {"generate": hf.VLLM(**given)})["generate"].max_sequences == rows


def test_stages_that_are_as_many_stay():
    where = GroupPlacement((0, 1), (2,), hf.Megatron(pp=2, dp=1))
    assert apply_placement(where, {"train": hf.Megatron(pp=2, stage_layers=(3, 1))})["train"].stage_layers == (3, 1)


def test_sharded_strategies_get_their_sizes_and_prices(caplog: pytest.LogCaptureFixture):
    def at(found: hf.FSDP | hf.ZeRO) -> GroupPlacement:
        return GroupPlacement((0, 1, 2, 3), (8,), found)

    with caplog.at_level(logging.WARNING):
        found = apply_placement(at(hf.FSDP(tp=2, dp=2, micro_tokens=99)), {"train": hf.FSDP(dp=8, offload=True)})
        assert found == {"train": hf.FSDP(tp=2, offload=True, micro_tokens=99)}
        found = apply_placement(
            at(hf.ZeRO(stage=2, dp=4, recompute=True)), {"train": hf.ZeRO(stage=2, dp=8, micro_tokens=7)}
        )
        assert found == {"train": hf.ZeRO(stage=2, recompute=True, micro_tokens=7)}
        assert not caplog.records
        adapted = hf.FSDP(lora=hf.LoRA())
        assert apply_placement(WHERE, {"train": adapted}) == {"train": adapted}
        assert apply_placement(WHERE, {"train": hf.ZeRO(stage=1)}) == {"train": hf.ZeRO(stage=1)}
        assert apply_placement(at(hf.FSDP(tp=2, dp=2)), {"train": hf.Megatron()})["train"].tp == 2
    assert len(caplog.records) == 3, "their times were those of another strategy"


def test_functions_and_what_does_not_generate():
    settings = {"function": len, "train": hf.Megatron(), "generate": None}
    assert apply_placement(GroupPlacement((0,), (2,)), settings) == settings

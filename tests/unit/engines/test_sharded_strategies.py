"""hf.FSDP and hf.ZeRO as values: sizes, what they refuse, and which rank holds what under them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.engines.fsdp.engine import bytes_kept, require_host_memory
from hybridflow.engines.fsdp.layout import fsdp_layout
from hybridflow.engines.host_memory import available
from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.engines.train_backends import backend
from hybridflow.errors import ConfigError, PlacementError
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

SPEC = ModelSpec(family="llama", hidden=32, intermediate=64, layers=2, heads=4, kv_heads=4, head_dim=8, vocab=61)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_data_parallel_size_follows_from_the_pool(tp, shard, replicate):
    grid = hf.FSDP(tp=tp, replicate=replicate).grid(tp * shard * replicate)
    assert grid == RankGrid(p=1, t=tp, d=shard * replicate)
    assert hf.ZeRO(stage=2).grid(shard) == RankGrid(d=shard)


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3))
def test_ranks_of_the_grid_are_those_of_the_layout(tp, shard, replicate):
    """rank = (r * shard + s) * tp + t: the data parallel group of a rank holds its tensor parallel part together."""
    strategy = hf.FSDP(tp=tp, replicate=replicate)
    grid = strategy.grid(tp * shard * replicate)
    layout, expected = (
        backend(strategy, "layout").weights_layout(strategy, SPEC, grid),
        fsdp_layout(SPEC, shard, replicate=replicate, tp=tp),
    )
    for rank in range(grid.size):
        assert list(layout.regions(rank)) == list(expected.regions(rank))
        copies = grid.group(rank, "d")[grid.coords(rank).d % shard :: shard]
        assert all(layout.regions(other) == layout.regions(rank) for other in copies)


def test_zero_keeps_parameters_whole_until_stage_3():
    grid = RankGrid(d=4)
    held = {}
    for stage in (1, 2, 3):
        strategy = hf.ZeRO(stage=stage)
        layouts = backend(strategy, "layout")
        for state, of in ((False, layouts.weights_layout), (True, layouts.state_layout)):
            layout = of(strategy, SPEC, grid)
            held[stage, state] = sum(region.box.numel for region in layout.regions(0))
    whole = SPEC.num_parameters
    assert held[1, False] == held[2, False] == whole
    assert held[3, False] == held[3, True] < 0.3 * whole
    assert held[1, True] == held[2, True] < 0.3 * whole


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: hf.FSDP(tp=0), ConfigError, r"FSDP\(tp=0\): must be a whole number of at least 1"),
        (lambda: hf.FSDP(replicas=2), ConfigError, "FSDP has no setting 'replicas'"),
        (lambda: hf.FSDP(pp=2), ConfigError, r"no setting 'pp'\..*hf\.Megatron\(pp=...\) has pipeline stages"),
        (lambda: hf.FSDP(stage=2), ConfigError, r"no setting 'stage'\..*hf\.ZeRO\(stage=...\)"),
        (lambda: hf.ZeRO(stage=2, tp=2), ConfigError, r"no setting 'tp'\..*hf\.FSDP\(tp=...\)"),
        (lambda: hf.ZeRO(stage=2, lora=None), ConfigError, r"no setting 'lora'\. hf\.FSDP\(lora=...\)"),
        (lambda: hf.ZeRO(stages=2), ConfigError, "no setting 'stages'. Did you mean 'stage'"),
        (lambda: hf.FSDP(offload="all"), ConfigError, r"FSDP\(offload='all'\): give True or False"),
        (lambda: hf.FSDP(dtype="bf16"), ConfigError, r"FSDP\(dtype='bf16'\) is unknown"),
        (lambda: hf.FSDP(dp=4, replicate=3), PlacementError, r"replicate=3\).*dp=4.*Use replicate in \[1, 2, 4\]"),
        (lambda: hf.FSDP(replicate=3).grid(4), PlacementError, r"Use replicate in \[1, 2, 4\]"),
        (
            lambda: hf.FSDP(tp=3).grid(4),
            PlacementError,
            r"FSDP\(tp=3\) needs p\*t\*d = 1\*3\*1 = 3 devices, the pool has 4",
        ),
        (lambda: hf.FSDP(dp=3).grid(4), PlacementError, r"Use FSDP\(tp=1, dp=4\)"),
        (lambda: hf.FSDP(dp=2, replicate=2).grid(4), PlacementError, r"Use FSDP\(tp=1, replicate=2, dp=4\)"),
        (lambda: hf.FSDP(dp=2, replicate=2).grid(5), PlacementError, r"FSDP\(tp=1, replicate=2\) on 4 devices"),
        (
            lambda: hf.ZeRO(dp=3, stage=1).grid(4),
            PlacementError,
            r"ZeRO\(stage=1, dp=3\) needs .* Use ZeRO\(stage=1, dp=4\)",
        ),
        (lambda: hf.ZeRO(stage=4), ConfigError, r"ZeRO\(stage=4\): must be 1 \(optimizer state\), 2 .* or 3"),
        (lambda: hf.ZeRO(stage=True), ConfigError, "stage=True"),
        (lambda: hf.ZeRO(), ConfigError, "ZeRO needs stage="),
    ],
)
def test_bad_settings_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_offloading_needs_host_memory():
    """Parameters, gradients and two moments in float32, of both ranks of the second node."""
    grid, strategy, adam = RankGrid(d=4), hf.FSDP(offload=True), hf.Adam(lr=1e-3)
    layout = backend(strategy, "layout").weights_layout(strategy, SPEC, grid)
    needed = 2 * 16 * sum(region.box.numel for region in layout.regions(1))
    groups = ProcessGroups(dist.HashStore(), "critic", range(4), 1, torch.device("cpu"))
    context = RankContext("critic", 1, grid, groups.device, groups, nodes=(7, 3, 3, 7))
    require_host_memory(context, strategy, layout, torch.bfloat16, adam, free=needed)
    with pytest.raises(ConfigError, match=r"critic: offload=True keeps .* GiB of 2 ranks.*has .* GiB free"):
        require_host_memory(context, strategy, layout, torch.bfloat16, adam, free=needed - 1)
    require_host_memory(context, hf.FSDP(), layout, torch.bfloat16, adam, free=0)
    require_host_memory(context, strategy, layout, torch.bfloat16, None, free=needed // 8)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "expected"),
    [
        (hf.FSDP(), hf.Adam(lr=1), 16),
        (hf.FSDP(), hf.SGD(lr=1, momentum=0.5), 12),
        (hf.FSDP(), hf.SGD(lr=1), 8),
        (hf.FSDP(), None, 2),
        (hf.ZeRO(stage=1), hf.Adam(lr=1), 12 / 4),
        (hf.ZeRO(stage=2), hf.Adam(lr=1), 16 / 4),
        (hf.ZeRO(stage=2), None, 0),
        (hf.ZeRO(stage=3), hf.Adam(lr=1), 16),
    ],
    ids=str,
)
def test_bytes_in_host_memory(strategy, optimizer, expected):
    assert bytes_kept(strategy, torch.bfloat16, optimizer, ranks=4) == expected


def test_a_container_has_what_its_limit_leaves(tmp_path):
    machine, group = tmp_path / "meminfo", tmp_path / "group"
    assert available(machine, group) is None
    machine.write_text("MemTotal: 900 kB\nMemAvailable:  800 kB\n")
    assert available(machine, group) == 800 * 1024
    group.mkdir()
    for name, text in (("max", "max\n"), ("current", "300000\n"), ("stat", "anon 5\ninactive_file 50000\n")):
        (group / f"memory.{name}").write_text(text)
    assert available(machine, group) == 800 * 1024
    (group / "memory.max").write_text("500000\n")
    assert available(machine, group) == 500000 - 300000 + 50000
    (group / "memory.max").write_text("200000\n")
    assert available(machine, group) == 0

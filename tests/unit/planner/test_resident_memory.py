"""Memory of groups that share devices: a driver is refused where it cannot run, and the README's sizes fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hybridflow as hf
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.resident_memory import PlacedGroup, check_resident

ROOT = Path(__file__).resolve().parents[3]
GIB = 1 << 30
DEVICE = 79.6 * GIB  # of an H100 with 80 GB
QWEN3_8B = ModelSpec(
    family="qwen3", hidden=4096, intermediate=12288, layers=36, heads=32, kv_heads=8, head_dim=128, vocab=151936
)
CRITIC = replace(QWEN3_8B, head="value")
TRAINED = {"train": hf.Megatron(tp=4), "optim": hf.Adam(lr=1e-6)}


def group(name: str, devices: int, model: ModelSpec = QWEN3_8B, **settings: Any) -> PlacedGroup:
    found = PlacedGroup.of(name, model, settings, settings["train"].grid(devices))
    assert found is not None
    return found


def driver(fraction: float, devices: int = 8, **actor: Any) -> list[PlacedGroup]:
    generate = hf.VLLM(tp=2, memory_fraction=fraction)
    return [
        group("actor", devices, **(TRAINED | {"generate": generate, "offload": ()} | actor)),
        group("critic", devices, CRITIC, train=hf.Megatron(tp=2, pp=2), optim=hf.Adam(lr=5e-6), offload=False),
        group("reference", devices, train=hf.Megatron(tp=4), offload=False),
    ]


def test_a_second_iteration_that_cannot_run_is_refused():
    """Adam's moments are made in the first step."""
    said = check_resident(driver(0.5), DEVICE)
    assert "while actor generates, a device of 79.6 GiB would have 85.6 GiB, activations not counted" in said
    for part in ("actor optimizer 11.4", "actor VLLM(memory_fraction=0.5) 39.8", "critic gradients 7.6"):
        assert f"{part} GiB" in said
    assert "Change one of: VLLM(memory_fraction=0.42); offload= of these groups; larger tp or pp" in said
    assert check_resident(driver(0.42), DEVICE) == ""
    assert check_resident(driver(0.5, devices=16), DEVICE) == ""


@pytest.mark.parametrize(
    ("offload", "fits"), [(("optimizer",), True), (["gradients"], True), (("generation",), False), ((), False)]
)
def test_offloaded_state_is_not_counted(offload: Any, fits: bool):
    assert (check_resident(driver(0.5, offload=offload), DEVICE) == "") == fits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_moving_average_is_float32_and_in_the_plan(dtype: Any):
    train = hf.ZeRO(stage=1, dtype=dtype)
    plain, averaged = (group("reference", 4, train=train, ema_decay=decay) for decay in (None, 0.99))
    own = averaged.resident("computes", DEVICE)
    assert own["average"] == own["weights"] * (2 if dtype == "bfloat16" else 1)
    assert averaged.still.static == plain.still.static + own["average"]
    assert "average" not in group("reference", 4, train=train, ema_decay=0.99, offload=True).resident("x", DEVICE)


def test_an_idle_model_counts_in_its_own_calls_only():
    settings: dict[str, Any] = {"train": hf.Megatron(), "offload": True}
    idle = [group(name, 1, **settings) for name in ("first", "second", "third")]
    assert check_resident(idle, 16 * GIB) == ""
    assert "while first computes, a device of 15.0 GiB would have 15.3 GiB" in check_resident(idle, 15 * GIB)
    there = [replace(one, settings=settings | {"offload": False}) for one in idle]
    assert "would have 45.8 GiB" in check_resident(there, 16 * GIB)


@pytest.mark.parametrize(
    ("train", "optim", "updates", "generates"),
    [
        (hf.FSDP(), hf.Adam(lr=1), 15.3, 11.4 + 0.5),  # float32 shards stay, their gradients do not
        (hf.FSDP(offload=True), hf.Adam(lr=1), 0.0, 0.5),
        (hf.ZeRO(stage=2), hf.Adam(lr=1), 30.5, 15.3 + 0.5),
        (hf.Megatron(tp=8), hf.SGD(lr=1), 5.7, 3.8 + 0.5),  # its state is not certain
        (hf.FSDP(), None, 1.9, 1.9 + 0.5),
    ],
)
def test_only_what_is_certain_counts(train: Any, optim: Any, updates: float, generates: float):
    actor = group("actor", 8, train=train, optim=optim, offload=(), generate=hf.VLLM(memory_fraction=0.5))
    found = [sum(actor.resident(phase, GIB).values()) / GIB for phase in actor.phases]
    assert found == pytest.approx([updates, generates], abs=0.06)


def test_models_that_the_planner_does_not_know_are_left_out():
    grid = hf.FSDP().grid(2)
    unknown = SimpleNamespace(head="lm")
    assert PlacedGroup.of("actor", unknown, {"train": hf.FSDP()}, grid) is None  # type: ignore[arg-type]
    own = SimpleNamespace(grid=lambda devices: grid)
    assert PlacedGroup.of("actor", QWEN3_8B, {"train": own}, grid) is None
    assert check_resident([], DEVICE) == ""


def readme(devices: int) -> list[PlacedGroup]:
    """The groups that the README's block places."""
    placed: list[PlacedGroup] = []

    def worker(name: str, model: ModelSpec) -> Any:
        defaults = {"offload": () if name == "actor" else False}
        on = lambda pool, **own: placed.append(group(name, devices, **{**defaults, **own, "model": model}))  # noqa: E731
        return SimpleNamespace(on=on)

    block = re.search(r"^pool +=.*?(?=^reward)", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    stand_ins = {"ActorWorker": ("actor", QWEN3_8B), "CriticWorker": ("critic", CRITIC)}
    stand_ins["ReferenceWorker"] = ("reference", QWEN3_8B)
    names = {name: getattr(hf, name) for name in ("Megatron", "Adam", "VLLM", "Sampling")}
    workers = {name: worker(*made) for name, made in stand_ins.items()}
    exec(block.group(), {"hf": SimpleNamespace(ResourcePool=list, **names, **workers)})
    return placed


@pytest.mark.parametrize(("devices", "heading"), [(8, "`[8]`"), (16, "`[8, 8]`")])
def test_the_readme_fits_as_the_docs_account(devices: int, heading: str):
    """With four GiB to spare for what the account leaves out."""
    placed = readme(devices)
    assert [one.name for one in placed] == ["actor", "critic", "reference"]
    assert check_resident(placed, DEVICE - 4 * GIB) == ""
    lines = (ROOT / "docs" / "gpus.md").read_text().splitlines()
    header = next(line for line in lines if heading in line and line.startswith("|"))
    column = [cell.strip() for cell in header.split("|")].index(heading)
    table = {line.split("|")[1].strip(): line.split("|")[column].strip() for line in lines if line.startswith("| ")}
    for phase in ("updates", "generates"):
        found = {one.name: one.resident(phase * (one.name == "actor"), DEVICE) for one in placed}
        for name, own in found.items():
            for kind, size in own.items():
                assert table[f"{name}: {kind}"] == f"{size / GIB:.1f}"
        total = sum(sum(own.values()) for own in found.values())
        assert table[f"all, while actor {phase}"] == f"{total / GIB:.1f}"

"""Memory of groups that share devices: a driver is refused where it cannot run, and the README's sizes fit."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hybridflow as hf
from benchmarks.dataflows import ppo
from hybridflow.config import FSDP, VLLM, Adam, Megatron
from hybridflow.errors import PlacementError
from hybridflow.models.spec import ModelSpec
from hybridflow.placement import Placement
from hybridflow.planner import ClusterSpec, Coefficients, Parallel, Pin, Workload, plan
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.resident_memory import PlacedGroup, check_resident
from hybridflow.planner.describe.cluster_spec import DeviceSpec, NodeSpec
from hybridflow.planner.describe.mesh import CallPlan, Mesh
from hybridflow.planner.search.auto_mapping import AutoMapping
from hybridflow.planner.search.planning import offloaded
from hybridflow.workers.placing import apply_placement
from tests.example_plans import LARGE, LLAMA_13B, LLAMA_34B, SMALL, ppo_of, value
from tests.unit.planner.test_planner_mapping import by_force

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


WAITS = ("critic", "reference", "reward")
LOOP = replace(ppo(LLAMA_13B, value(LLAMA_13B), LLAMA_34B, value(LLAMA_34B)), offload=dict.fromkeys(WAITS, False))
WORK = Workload(rows=256, prompt=1024, response=1024, minibatches=4, recompute=True)
NODE = "a100:1x8"


def test_a_model_that_waits_leaves_its_memory_to_others():
    here = Costs(ClusterSpec.of(NODE), LOOP, WORK)
    away = here.offloading(["critic", "reference"])
    at = CallPlan(Mesh.of(0, 8), Parallel(1, 8, 1))
    host = here.cluster.node.device.host
    for group, calls in {"reference": ["compute_ref_log_prob"], "critic": ["compute_values", "update_critic"]}.items():
        kept = here.still(group, at)
        assert away.static(group, at) == 0
        for name in calls:
            call, trains = f"{group}.{name}", name.startswith("update")
            needed = kept.static if trains else kept.parameters
            assert away.added(call, at, at).active == here.added(call, at, at).active + needed
            more = (2 * (kept.parameters + kept.optimizer) if trains else kept.parameters) / host
            assert away.cost(call, at).seconds == pytest.approx(here.cost(call, at).seconds + more)
            assert away.cost(call, at).parts["offload"] == pytest.approx(more)
    plans = {call.name: at for call in here.calls}
    assert away.kept(plans)[0] == pytest.approx(here.static("actor", at) + here.static("reward", at))
    assert away.timeline(plans).per_iteration < here.timeline(plans).per_iteration  # generation has a larger KV cache


def test_updates_share_no_stages_where_one_of_the_models_waits():
    graph, shared = ppo_of(LLAMA_13B, LLAMA_13B), replace(WORK, time_sharing=True)
    graph, at = replace(graph, offload={"critic": False}), CallPlan(Mesh.of(0, 8), Parallel(8, 1, 1))
    here = Costs(ClusterSpec.of(NODE), graph, shared)
    (first, second), plans = here.updates[0], {call.name: at for call in here.calls}
    together = here.seconds(plans)
    assert together[first] + together[second] < here.cost(first, at).seconds + here.cost(second, at).seconds
    away = here.offloading(["critic"])  # which has the answers of `here`
    alone = away.seconds(plans)
    assert alone[first] == pytest.approx(away.cost(first, at).seconds)
    assert alone[second] == pytest.approx(away.cost(second, at).seconds)


def test_a_plan_that_does_not_fit_sends_models_to_the_host():
    with pytest.raises(PlacementError, match=r"1\.5 GiB a device are missing"):
        plan(replace(LOOP, offload={}), NODE, WORK, budget_s=1, share_rows=False)
    found = plan(LOOP, NODE, WORK, budget_s=4)
    waits = [group for group in WAITS if found[group].offload]
    assert waits
    assert found["actor"].offload is None
    for group in WAITS:
        assert (f"{group} offloaded: +" in str(found)) == (group in waits)
    assert "s per iteration, " in found.shape
    assert "Plain placement (all groups on all 8 devices, tp=8): does not fit" in str(found)
    assert found.explain().count("GiB per device") == len(waits)
    assert Placement.__reduce__(found)[0](*found.__reduce__()[1])["critic"].offload == found["critic"].offload


def test_pins_force_and_forbid_it():
    forced = plan(LOOP, "a100:2x8", WORK, [Pin("reward", offload=True)], budget_s=2)
    assert forced["reward"].offload
    stays = [Pin("critic", offload=False)]
    found = plan(LOOP, NODE, WORK, stays, budget_s=4)
    assert [found[group].offload for group in WAITS] == [False, True, True]
    with pytest.raises(PlacementError, match=r"all groups fit there without (it|them)"):
        plan(LOOP, NODE, WORK, [*stays, Pin("reward", offload=False)], budget_s=1)
    with pytest.raises(PlacementError, match=r"Pin\(actor, offload=True\) cannot be: only critic, reference, reward"):
        plan(LOOP, NODE, WORK, [Pin("actor", offload=True)])


def test_what_the_driver_says_is_priced():
    said = replace(LOOP, offload={"critic": True, "reference": True, "reward": False})
    costs = Costs(ClusterSpec.of(NODE), said, WORK)
    assert costs.away == {"critic", "reference"}
    assert costs.may_wait == ("reward",)
    assert costs.keeping(Pin("critic", offload=False)).away == {"reference"}
    assert AutoMapping(costs).first is not None


def small_case(seed: int) -> Costs:
    """An actor, a critic and a reference, small, on a node whose memory is about what they need."""
    draw = random.Random(seed)
    device = DeviceSpec("small", 1e12, {"bfloat16": 1e12}, 1e11, host=draw.choice([1e9, 5e9, 2e10]))
    count, work = draw.choice([1, 2, 3]), Workload(rows=draw.choice([32, 256]), prompt=256, response=256)
    graph = ppo_of(*draw.choices([SMALL, LARGE], k=2))
    calls = tuple(call for call in graph.calls if call.group != "reward")
    edges = tuple(edge for edge in graph.edges if "reward.compute_reward" not in (edge.source, edge.target))
    models = {group: model for group, model in graph.models.items() if group != "reward"}
    groups = draw.sample(WAITS[:2], k=draw.choice([1, 2]))
    graph = replace(graph, calls=calls, edges=edges, models=models, offload=dict.fromkeys(groups, False))
    large = Costs(ClusterSpec((NodeSpec(device, count, 1e10),), 1e9), graph, work)
    all_here = CallPlan(Mesh.of(0, count), Parallel(d=count))
    needed = sum(large.static(group, all_here) for group in graph.groups)
    device = replace(device, memory=draw.uniform(0.6, 2.7) * needed)
    return large.on(ClusterSpec((NodeSpec(device, count, 1e10),), 1e9))


def test_the_best_groups_are_sent_away():
    """50 small cases against all sets of groups, and all placements of each."""
    kinds = Counter[str]()
    for seed in range(50):
        costs, best = small_case(seed), {}
        for names in (n for count in range(3) for n in combinations(costs.may_wait, count)):
            each = costs.offloading(names)
            each.cost = cache(each.cost)  # type: ignore[method-assign]
            best[names] = by_force(each)
        found = [one.seconds for each in offloaded(costs) if (one := AutoMapping(each).best) is not None]
        least, stay = min(best.values()), best[()]
        assert min(found, default=math.inf) == pytest.approx(least, rel=1e-9), seed
        fits = "nowhere" if least == math.inf else "away only" if stay == math.inf else "here"
        kinds[f"{fits}, better away" if least < stay < math.inf else fits] += 1
    assert len(kinds) == 4, kinds
    assert min(kinds.values()) >= 2, kinds


def test_a_further_group_must_be_worth_it():
    for margin, ways in ((0.0, 2), (10.0, 1)):
        assert len(offloaded(Costs(ClusterSpec.of("a100:2x8"), LOOP, WORK, Coefficients(), margin=margin))) == ways


def test_the_group_is_placed_as_it_was_planned():
    found = plan(LOOP, NODE, WORK, [Pin("reference", offload=True), Pin("reward", offload=False)], budget_s=3)
    own = {"train": Megatron(), "offload": False}
    assert apply_placement(found["reference"], own)["offload"] is True
    assert apply_placement(found["reward"], {**own, "offload": True})["offload"] is False
    actor = {"train": FSDP(), "optim": Adam(lr=1.0), "generate": VLLM(), "offload": ("optimizer",)}
    assert apply_placement(found["actor"], actor)["offload"] == ("optimizer",)

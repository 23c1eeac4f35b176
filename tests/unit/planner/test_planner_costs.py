"""Specs and simulators of the planner: what they refuse, and the laws that their arithmetic keeps."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dataflows import grpo, ppo
from hybridflow.engine3d.plan import plan as weight_plan
from hybridflow.engines.megatron.layout import megatron_layout
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.errors import ConfigError, ModelError, PlacementError
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost import calibration
from hybridflow.planner.cost.calibration import Observation, calibrate
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients, Curve, LayerProfile, Seconds, architecture
from hybridflow.planner.cost.pipeline_cost import layer_pass
from hybridflow.planner.cost.reallocation_cost import LayoutChange, volume
from hybridflow.planner.describe.cluster_spec import DEVICES, ClusterSpec, DeviceSpec, NodeSpec, device
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.planner.describe.workload import Lengths, Workload
from hybridflow.topology import RankGrid
from tests.example_plans import LLAMA_7B as MODEL

SMALL = ModelSpec(family="llama", hidden=64, intermediate=96, layers=4, heads=4, kv_heads=4, head_dim=16, vocab=64)
VALUE = replace(MODEL, head="value")
GRAPH = ppo(MODEL, VALUE, MODEL, VALUE)
WORK = Workload(rows=512, prompt=1024, response=1024, minibatches=4)
A100S = ClusterSpec.of("a100:4x8")
GENERATE, INFER, TRAIN = "actor.generate_sequences", "actor.compute_log_prob", "actor.update_actor"
KINDS = (GENERATE, INFER, TRAIN)


def simulator(work: Workload = WORK, cluster: ClusterSpec = A100S, **how) -> Costs:
    return Costs(cluster, GRAPH, work, **how)


def at(p: int, t: int, d: int, start: int = 0) -> CallPlan:
    return CallPlan(Mesh.of(start, p * t * d), Parallel(p, t, d))


SIZES = st.sampled_from([(p, t, d) for p in (1, 2, 4, 8) for t in (1, 2, 4, 8) for d in (1, 2, 4) if p * t * d <= 32])


# Devices, clusters and workloads


def test_devices_of_a_data_sheet():
    assert device("A100") is DEVICES["a100"] is device("a100-80gb")
    assert device("h100").peak("bfloat16") == 989.4e12
    assert device("h200").memory > device("h100").memory == 80 * 2**30
    for spec in DEVICES.values():
        assert pickle.loads(pickle.dumps(spec)) == spec
        assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))


def test_clusters_count_their_devices_through():
    cluster = ClusterSpec.of("a100:3x8")
    assert (cluster.size, len(cluster.nodes)) == (24, 3)
    assert [cluster.node_of(i) for i in (0, 7, 8, 15, 16, 23)] == [0, 0, 1, 1, 2, 2]
    assert list(cluster.devices_of(2)) == [*range(16, 24)]
    assert str(cluster) == "a100:3x8"
    assert ClusterSpec.of(str(cluster)) == cluster
    assert cluster.bandwidth == 25e9
    assert ClusterSpec.of("a100:2x8@400Gbps").bandwidth == 50e9
    assert ClusterSpec.of("here").size >= 1
    assert ClusterSpec.this_machine(4).size == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a101:2x8", "Did you mean 'a100'"),
        ("a100:0x8", "must be >= 1"),
        ("a100:2x-8", "must be >= 1"),
        ("a100:2x1000000", "2,000,000 devices are more than"),
        ("a100", "a100:16x8"),
        ("a100:2x8@1.2.3gbps", "not of the form"),
        ("", "a100:16x8"),
        ("a100:2x8,h100:1x4", "give one kind and size"),
        (16, "is not a description"),
    ],
)
def test_clusters_that_are_refused(text, says):
    with pytest.raises(ConfigError, match=says):
        ClusterSpec.of(text)


def test_sizes_that_are_refused():
    spec = device("a100")
    for wrong in (0, -1.0, float("nan"), True, "80"):
        with pytest.raises(ConfigError, match="above 0"):
            DeviceSpec("mine", wrong, {"bfloat16": 1e12}, 1e12)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="above 0"):
            ClusterSpec((NodeSpec(spec, 8, 1e9),), wrong)  # type: ignore[arg-type]
    for count in (0, -8, 1.5):
        with pytest.raises(ConfigError, match="at least 1"):
            NodeSpec(spec, count, 1e9)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one dtype"):
        DeviceSpec("mine", 1e9, {}, 1e12)
    with pytest.raises(ConfigError, match="does not compute in float16"):
        DeviceSpec("mine", 1e9, {"float32": 1e12}, 1e12).peak("float16")
    with pytest.raises(ConfigError, match="no dtype 'int8'"):
        DeviceSpec("mine", 1e9, {"int8": 1e12}, 1e12)  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="is not a NodeSpec"):
        ClusterSpec(("a100:1x8",), 1e9)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must ascend"):
        NodeSpec(spec, 8, 1e9, slowdown=((4, 2), (2, 1)))
    with pytest.raises(ConfigError, match="at least one node"):
        ClusterSpec((), 1e9)
    with pytest.raises(ConfigError, match="its nodes are alike, got count=8 and 4"):
        ClusterSpec((NodeSpec(spec, 8, 1e9), NodeSpec(spec, 4, 1e9)), 1e9)
    for index in (-1, 32):
        with pytest.raises(PlacementError, match="0 to 31"):
            A100S.node_of(index)
    with pytest.raises(PlacementError, match="0 to 31"):
        simulator().cost(TRAIN, at(2, 2, 8, start=8))


def test_lengths_and_workloads():
    assert Lengths.of(10) == Lengths(10, 10, 100)
    assert Lengths.of([1, 2, 3]) == Lengths(2, 3, 14 / 3)
    assert Lengths.of((10, 40)).max == 40
    assert Lengths.of((10, 40)).square_mean > 100
    assert WORK.tokens == WORK.longest == 2048
    assert WORK.square == 2048**2
    for wrong in (0, -5, [], [1, 0], "12", (40, 10)):
        with pytest.raises(ConfigError):
            Workload(rows=8, prompt=wrong, response=8)  # type: ignore[arg-type]
    for wrong in ({"rows": 0}, {"minibatches": 0}, {"epochs": -1}, {"rows": 6, "responses_per_prompt": 4}):
        with pytest.raises(ConfigError):
            Workload(**({"rows": 8, "prompt": 8, "response": 8} | wrong))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Did you mean 'minibatches'"):
        Workload(rows=8, prompt=8, response=8, minibatch=2)  # type: ignore[call-arg]


# The laws of the simulators


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(KINDS), st.sampled_from([64, 256, 512]))
def test_parts_add_up_and_more_rows_take_longer(sizes, call, rows):
    here = at(*sizes)
    cost = simulator(replace(WORK, rows=rows)).cost(call, here)
    assert cost.seconds > 0
    assert sum(cost.parts.values()) == pytest.approx(cost.seconds)
    assert all(seconds >= 0 for seconds in cost.parts.values())
    assert "%" in cost.limit
    assert simulator(replace(WORK, rows=2 * rows)).cost(call, here).seconds >= cost.seconds
    assert simulator(replace(WORK, rows=rows, response=2048)).cost(call, here).seconds > cost.seconds


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from((INFER, TRAIN)))
def test_no_call_beats_the_peak(sizes, call):
    p, t, d = sizes
    work = WORK.rows * WORK.tokens
    passes = 3 if call == TRAIN else 1
    least = passes * 2 * (replace(MODEL, tied=True).num_parameters - MODEL.vocab * MODEL.hidden) * work
    assert simulator().cost(call, at(p, t, d)).seconds > least / (p * t * d * 312e12)


@settings(max_examples=40, deadline=None)
@given(SIZES)
def test_training_takes_longer_than_inference_and_more_with_recomputation(sizes):
    here, again = at(*sizes), simulator(replace(WORK, recompute=True))
    assert simulator().cost(TRAIN, here).seconds > 2 * simulator().cost(INFER, here).seconds
    assert again.cost(TRAIN, here).seconds > simulator().cost(TRAIN, here).seconds
    assert again.cost(INFER, here).seconds == simulator().cost(INFER, here).seconds
    assert again.added(TRAIN, here).active < simulator().added(TRAIN, here).active


@settings(max_examples=40, deadline=None)
@given(SIZES, st.sampled_from(KINDS))
def test_better_devices_and_links_are_not_slower(sizes, call):
    here = at(*sizes)
    slow, fast = ClusterSpec.of("a100:4x8@40Gbps"), ClusterSpec.of("h100:4x8")
    assert simulator(cluster=slow).cost(call, here).seconds >= simulator().cost(call, here).seconds
    assert simulator(cluster=fast).cost(call, here).seconds < simulator().cost(call, here).seconds


@settings(max_examples=60, deadline=None)
@given(SIZES)
def test_static_memory_of_all_devices_holds_the_model(sizes):
    p, t, d = sizes
    bytes_all = simulator().static("actor", at(p, t, d)) * p * t
    state = MODEL.num_parameters * (2 + 4 + 12 / d)
    assert state <= bytes_all * (1 + 1e-9)
    assert bytes_all < 1.6 * state  # unlike stages: the first and the last have embeddings too
    reference = simulator().static("reference", at(p, t, d))
    assert reference * p * t >= 2 * MODEL.num_parameters
    alone, beside = (simulator().added(INFER, at(p, t, d), home).active for home in (None, at(1, 1, 1, 31)))
    assert beside > alone + 2 * MODEL.num_parameters / (p * t) * 0.99


def test_memory_while_a_call_runs():
    still, added = simulator().still("actor", at(1, 4, 2)), simulator().added(TRAIN, at(1, 4, 2))
    assert (still.static, still.active) == (still.parameters + still.gradients + still.optimizer, 0)
    assert (added.static, added.active) == (0, added.activations + added.logits)
    assert still.optimizer == 12 / 2 * still.parameters / 2
    here = at(1, 2, 4)
    generating = simulator().added(GENERATE, here, kv_budget=simulator().kv_budget(GENERATE, here))
    tokens, each = 512 / 4 * 2048, 2 * 32 * 4 * 128 * 2  # all rows at once; keys and values of 4 of the 8 kv-heads
    assert generating.kv_cache == tokens * each


def test_generation_in_waves():
    """Half the room for the cache: twice as many waves, each over half the rows."""
    here, rows = at(1, 1, 8), 512 / 8
    full = rows * 2048 * 2 * 32 * 8 * 128 * 2
    one, two = (simulator().cost(GENERATE, here, room) for room in (full, full / 2))
    assert one.seconds < two.seconds < 2 * one.seconds
    assert simulator().cost(GENERATE, here, 10 * full).seconds == one.seconds
    assert one.parts["prefill"] == two.parts["prefill"]
    long_tail = simulator(replace(WORK, response=Lengths.of((512, 1024))))
    assert long_tail.cost(GENERATE, here, full).seconds < one.seconds
    shared = simulator(replace(WORK, responses_per_prompt=8)).cost(GENERATE, here, full)
    assert shared.parts["prefill"] < one.parts["prefill"] / 4


def test_micro_batches_fill_the_pipeline():
    alone, deep = simulator().cost(INFER, at(1, 1, 4)), simulator().cost(INFER, at(4, 1, 1))
    assert "pipeline" not in alone.parts
    assert deep.parts["pipeline"] > 0
    refilled = simulator(replace(WORK, micro_batches=16)).cost(INFER, at(4, 1, 1))
    assert refilled.parts["pipeline"] > deep.parts["pipeline"]  # every given part fills the pipeline anew
    assert refilled.parts["compute"] == pytest.approx(deep.parts["compute"], rel=1e-6)


def test_updates_that_share_their_stages_save_their_bubbles():
    """Of two alike models with as many micro-batches, all but one of the serial bubbles, one for each step."""
    alike = Costs(A100S, ppo(MODEL, MODEL, MODEL, MODEL), replace(WORK, rows=64))
    here, updates = at(4, 2, 1), (TRAIN, "critic.update_critic")
    serial = [alike.cost(name, here) for name in updates]
    together = alike.cost_together(*updates, here)
    bubbles = [cost.parts["pipeline"] for cost in serial]
    assert 0.7 * sum(bubbles) < sum(cost.seconds for cost in serial) - together
    flat = at(1, 4, 2)
    assert alike.cost_together(*updates, flat) == sum(alike.cost(name, flat).seconds for name in updates)
    for p in (2, 4, 8):  # unlike models
        plan = at(p, 1, 2)
        assert simulator().cost_together(*updates, plan) <= sum(
            simulator().cost(name, plan).seconds for name in updates
        )
    with pytest.raises(ConfigError, match="does not train"):
        alike.cost_together(TRAIN, INFER, here)


def test_minibatches_and_epochs_are_those_of_the_call_or_of_the_workload():
    once = ppo(MODEL, VALUE, MODEL, VALUE)
    own = ppo(MODEL, VALUE, MODEL, VALUE, minibatches=4, epochs=2)
    here = at(1, 4, 4)
    by_work = Costs(A100S, once, replace(WORK, minibatches=4, epochs=2)).cost(TRAIN, here)
    by_call = Costs(A100S, own, replace(WORK, minibatches=1)).cost(TRAIN, here)
    assert by_work.seconds == by_call.seconds
    fewer = Costs(A100S, once, replace(WORK, minibatches=1, epochs=2)).cost(TRAIN, here)
    assert fewer.parts["data_parallel"] == pytest.approx(by_work.parts["data_parallel"] / 4)


def test_what_the_simulator_refuses():
    with pytest.raises(ConfigError, match="no call of the loop"):
        simulator().cost("actor.generate", at(1, 1, 1))
    with pytest.raises(ConfigError, match="no group of the loop"):
        simulator().static("actors", at(1, 1, 1))
    with pytest.raises(ModelError, match="t=3: it has 32 layers, 32 heads"):
        simulator().cost(TRAIN, at(1, 3, 1))
    with pytest.raises(ModelError, match="p=64"):
        simulator(cluster=ClusterSpec.of("a100:8x8")).cost(TRAIN, at(64, 1, 1))


def test_rewards_by_function_cost_next_to_nothing():
    graph = grpo(MODEL, MODEL)
    found = Costs(A100S, graph, WORK)
    assert found.cost("reward.compute_reward", at(1, 1, 1)).seconds < 1
    assert found.static("reward", at(1, 1, 1)) == found.added("reward.compute_reward", at(1, 1, 1)).active == 0
    assert found.reallocation("reward", at(1, 1, 1), at(1, 1, 2)) == 0


# Reallocation


@pytest.mark.parametrize(("train", "generate"), [((1, 8, 2), (1, 2)), ((4, 2, 2), (2, 1)), ((2, 4, 2), (1, 4))])
def test_reallocation_moves_the_bytes_of_the_engines_own_plan(train, generate):
    """Against the plan between Megatron's layout and vLLM's, tensor by tensor."""
    model = replace(SMALL, layers=8, heads=8, kv_heads=8, head_dim=8, vocab=128)
    grid = RankGrid(*train)
    made = weight_plan(megatron_layout(model, grid), vllm_layout(model, grid.generation(*generate)))
    most = max(traffic.received_bytes for traffic in made.traffic(itemsize=2))
    p, t = generate
    here, there = at(*train), at(p, t, grid.size // (p * t))
    found = volume(LayoutChange.of(Sizes.of(model), ClusterSpec.of("a100:1x16"), here, there), 2)
    assert found.inside == pytest.approx(most, rel=0.06)  # norms are whole on every rank there, and shared here
    assert found.between == 0


@settings(max_examples=30, deadline=None)
@given(SIZES, SIZES)
def test_reallocation_on_any_two_meshes(first, second):
    here, there = at(*first), at(*second)
    found = simulator().reallocation("actor", here, there)
    assert found >= 0
    assert simulator().reallocation("actor", here, here) == 0
    if first[0] * first[1] == 1 and there.mesh.size <= here.mesh.size:
        moved = volume(LayoutChange.of(Sizes.of(MODEL), A100S, here, there), 2)
        assert moved.inside == moved.between == 0  # everybody holds everything already
        assert (found == 0) == there.within(here)  # others have it in host memory, from where it comes
    apart = simulator().reallocation("actor", at(1, 1, 1, 31), at(1, 1, 1))
    assert apart >= 2 * MODEL.num_parameters / 25e9


def test_equal_blocks_of_a_large_mesh_are_planned_once():
    big = ClusterSpec.of("a100:128x8")
    one = LayoutChange.of(Sizes.of(MODEL), big, at(1, 8, 128), at(1, 2, 512))
    assert len(one.nodes) == 8
    few = LayoutChange.of(Sizes.of(MODEL), ClusterSpec.of("a100:2x8"), at(1, 8, 2), at(1, 2, 8))
    assert volume(one, 2) == volume(few, 2)
    table_2 = (1 / 2 - 1 / 8) * 2 * (MODEL.num_parameters - MODEL.hidden)
    assert volume(one, 2).inside == pytest.approx(table_2, rel=0.001)


# Links and launches

SLOWER = st.floats(1.0, 100.0)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.sampled_from(KINDS), SLOWER, SLOWER, SLOWER)
def test_slower_links_never_shorten_a_call(sizes, call, link, network, latency):
    node = A100S.nodes[0]
    other = replace(node, bandwidth=node.bandwidth / link, latency=node.latency * latency)
    slow = ClusterSpec((other,) * 4, A100S.bandwidth / network, A100S.latency * latency)
    k = replace(DEFAULT, latency=DEFAULT.latency * latency)
    here, room = at(*sizes), 20e9
    before = simulator().cost(call, here, room).seconds
    assert simulator(cluster=slow, coefficients=k).cost(call, here, room).seconds >= before * (1 - 1e-9)
    moved = [one.reallocation("actor", here, at(1, 2, 4)) for one in (simulator(), simulator(cluster=slow))]
    assert moved[1] >= moved[0]


@given(st.integers(1, 4096), st.floats(1, 64))
def test_slower_links_never_shorten_a_small_backward_pass(tokens, slower):
    """Launches hide messages, and none of them hides more than itself."""
    seconds = []
    for reached in (DEFAULT.reduce, DEFAULT.reduce / slower):
        context = simulator(coefficients=replace(DEFAULT, reduce=reached)).context("actor", at(1, 8, 1))
        assert context is not None
        seconds.append(layer_pass(context, tokens, 0.0, True).total)
    assert seconds[1] >= seconds[0] * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(SIZES, st.integers(1, 4096))
def test_cuda_graphs_never_slow_decoding_and_concern_nothing_else(sizes, rows):
    work = replace(WORK, rows=rows)
    with_them, without = simulator(work), simulator(replace(work, cuda_graphs=False))
    for call in KINDS:
        seconds = [one.cost(call, at(*sizes), 20e9).seconds for one in (with_them, without)]
        assert seconds[1] >= seconds[0] * (1 - 1e-9) if call == GENERATE else seconds[1] == seconds[0]


@settings(max_examples=30, deadline=None)
@given(SIZES, st.floats(1, 1e9))
def test_without_latency_a_collective_takes_what_its_bytes_take(sizes, nbytes):
    """The ring's 2 (t-1)/t of the bytes, and (d-1)/d of them, however many buffers they are in."""
    p, t, d = sizes
    nodes = (replace(A100S.nodes[0], latency=1e-30),) * 4
    found = simulator(cluster=ClusterSpec(nodes, A100S.bandwidth, 1e-30), coefficients=replace(DEFAULT, latency=0.0))
    context = found.context("actor", at(*sizes))
    assert context is not None
    links = context.links
    assert links.tensor_all_reduce(nbytes) == pytest.approx(2 * (t - 1) / t * nbytes / links.reduce)
    once, often = (links.collective(nbytes, links.d, links.p * links.t, buffers) for buffers in (1, 40))
    assert once == pytest.approx(often)
    if p * t * d <= 8:
        assert once == pytest.approx((d - 1) / d * nbytes / links.link)


@given(st.lists(st.floats(0, 1), min_size=3, max_size=3), st.floats(0, 3))
def test_launches_overlap_with_the_device(parts, launches):
    device = Seconds(*parts)
    assert device.launched(launches).total == pytest.approx(max(device.total, launches))


@pytest.mark.parametrize("prompt", [64, 2048])
def test_caches_are_read_while_kernels_of_a_decode_step_are_launched(prompt: int):
    """A layer whose launches take a second hides all of its memory traffic."""
    k = replace(DEFAULT, decode_layer_seconds=1.0, latency=0.0, step_seconds=0.0, row_seconds=0.0, call_seconds=0.0)
    work = Workload(rows=256, prompt=prompt, response=100)
    found = simulator(work, coefficients=k).cost(GENERATE, at(1, 8, 1)).parts
    steps = sum(found.values()) - found["prefill"]
    assert steps == pytest.approx(100 * MODEL.layers, rel=1e-3)


@pytest.mark.parametrize(("rows", "cluster"), [(1024, "a100:4x8"), (4096, "a100:4x8"), (256, "a100-pcie:4x8")])
def test_pipelines_decode_a_small_model_faster_than_tensor_groups_over_a_node(rows, cluster):
    """Without NVLink with fewer rows, too: there all-reduces take most of a step."""
    costs = simulator(replace(WORK, rows=rows), ClusterSpec.of(cluster))
    seconds = [costs.cost(GENERATE, at(*sizes), 40e9).seconds for sizes in ((8, 1, 1), (1, 8, 1))]
    assert seconds[0] < seconds[1]


# Coefficients and profiles


def test_coefficients_are_saved_and_loaded(tmp_path):
    fitted = Coefficients(device="a100", compute=0.5, step_seconds=1e-3)
    fitted.save(tmp_path / "fitted.yaml")
    assert Coefficients.load(tmp_path / "fitted.yaml") == fitted
    with pytest.raises(ConfigError, match="no calibration file"):
        Coefficients.load(tmp_path / "none.yaml")
    (tmp_path / "wrong.yaml").write_text("compute: 0.5\nspeed: 3\n")
    with pytest.raises(ConfigError, match="no setting 'speed'"):
        Coefficients.load(tmp_path / "wrong.yaml")
    with pytest.raises(ConfigError, match=r"in \(0, 1\]"):
        Coefficients(compute=1.5)


def test_calibration_finds_what_made_the_observations():
    """Calls priced with other coefficients: from many of them, predictions of unseen calls follow."""
    truth = replace(DEFAULT, compute=0.45, reduce=0.4, latency=1e-4, step_seconds=1e-2, micro_seconds=8e-3)
    kinds = {"generation": GENERATE, "inference": INFER, "training": TRAIN}
    seen = [
        Observation(A100S, MODEL, kind, Parallel(p, t, d), WORK, 1.0)  # type: ignore[arg-type]
        for kind in kinds
        for p, t, d in ((1, 8, 1), (1, 1, 8), (2, 4, 2), (4, 2, 4), (1, 2, 8))
    ]
    seen = [replace(each, seconds=each.predicted(truth)) for each in seen]
    fitted = calibrate(seen)
    assert fitted.device == "a100"
    for kind in kinds:
        unseen = Observation(A100S, MODEL, kind, Parallel(2, 2, 8), WORK, 1.0)  # type: ignore[arg-type]
        assert unseen.predicted(fitted) == pytest.approx(unseen.predicted(truth), rel=0.1)
    before = Observation(A100S, MODEL, "training", Parallel(2, 2, 8), WORK, 1.0)
    assert before.predicted(DEFAULT) != pytest.approx(before.predicted(truth), rel=0.2)


def test_more_fitted_coefficients_match_observations_no_worse(monkeypatch):
    kinds, sizes = ("training", "inference", "generation"), ((1, 8, 1), (4, 2, 1), (1, 2, 4))
    seen = [Observation(A100S, MODEL, kind, Parallel(*cut), WORK, 30.0) for kind in kinds for cut in sizes]  # type: ignore[arg-type]

    def misfit(names: tuple[str, ...]) -> float:
        spread = {name: calibration.SPREAD[name] for name in names}
        monkeypatch.setattr(calibration, "SPREAD", spread)
        fitted = calibrate(seen)
        monkeypatch.undo()
        errors = [math.log(one.predicted(fitted) / one.seconds) / calibration.NOISE for one in seen]
        moved = [math.log(getattr(fitted, name) / getattr(DEFAULT, name)) / spread[name] for name in names]
        return sum(x * x for x in (*errors, *moved))

    names = tuple(calibration.SPREAD)
    found = [misfit(names[: count + 1]) for count in range(len(names))]
    assert all(b <= a * (1 + 1e-6) for a, b in pairwise(found)), found


def test_observations_that_are_refused():
    with pytest.raises(ConfigError, match="at least one observation"):
        calibrate([])
    with pytest.raises(ConfigError, match="above 0"):
        Observation(A100S, MODEL, "training", Parallel(), WORK, 0.0)
    with pytest.raises(ConfigError, match="above 0"):
        Observation(A100S, MODEL, "training", Parallel(), WORK, True)
    with pytest.raises(ConfigError, match="says nothing"):
        Observation(A100S, MODEL, "function", Parallel(), WORK, 1.0)
    with pytest.raises(PlacementError, match="cluster of 32"):
        Observation(A100S, MODEL, "training", Parallel(d=64), WORK, 1.0)
    mixed = [Observation(c, MODEL, "training", Parallel(), WORK, 1.0) for c in (A100S, ClusterSpec.of("h100:1x8"))]
    with pytest.raises(ConfigError, match="a100, h100"):
        calibrate(mixed)


def test_a_profile_takes_the_place_of_the_roofline(tmp_path):
    name = architecture(MODEL)
    curves = [Curve(name, "forward", 1, ((1024, 1.0), (4096, 4.0))), Curve(name, "decode", 1, ((1, 0.5), (64, 0.5)))]
    profile = LayerProfile("a100", tuple(curves))
    profile.save(tmp_path / "profile.yaml")
    assert LayerProfile.load(tmp_path / "profile.yaml") == profile
    assert [curves[0].at(n) for n in (1, 1024, 2048, 4096, 8192)] == [1.0, 1.0, 2.0, 4.0, 8.0]
    measured = simulator(profile=profile)
    here = at(1, 1, 8)
    layers = 512 / 8 * 2048 / 1024 * 32  # seconds of all layers over the tokens of a rank
    assert measured.cost(INFER, here).seconds == pytest.approx(layers, rel=0.01)
    assert measured.cost(GENERATE, here).parts["decode"] == pytest.approx(1024 * 32 * 0.5, rel=0.01)
    assert measured.cost(INFER, at(1, 2, 4)).seconds == simulator().cost(INFER, at(1, 2, 4)).seconds  # not measured
    for wrong in ((), ((2, 1.0), (1, 1.0)), ((1, 0.0),)):
        with pytest.raises(ConfigError, match="ascending, positive"):
            Curve(name, "forward", 1, wrong)
    with pytest.raises(ConfigError, match="no profile"):
        LayerProfile.load(tmp_path / "none.yaml")

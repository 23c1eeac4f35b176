"""Devices that slow each other down: what a timeline, a simulator and a profile say of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.dataflows import ppo
from hybridflow.errors import ConfigError
from hybridflow.planner.cost.call_cost import CallCost
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients, Curve, LayerProfile, Seconds, architecture
from hybridflow.planner.cost.timeline import Contention, simulate
from hybridflow.planner.describe.cluster_spec import ClusterSpec, NodeSpec
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.planning import plan
from tests.example_plans import LARGE, SMALL, ppo_of

GRAPH = ppo_of(SMALL, LARGE)
HALVES = ((2.0, 1.0), (4.0, 2.0))  # four devices on two cores
CORES = ClusterSpec((replace(ClusterSpec.this_machine(4, memory=64e9).nodes[0], slowdown=HALVES),), 1e9)
WORK = Workload(rows=64, prompt=16, response=48, dtype="float32", minibatches=2)
SIZES = (1, 2, 4)


def on(start: int, size: int) -> CallPlan:
    return CallPlan(Mesh.of(start, size), Parallel(d=size))


def test_devices_of_a_host_share_its_cores():
    node = CORES.nodes[0]
    assert [node.slow(n) for n in range(9)] == [1, 1, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    assert [ClusterSpec.of("a100:1x8").nodes[0].slow(n) for n in (1, 8)] == [1, 1]
    assert ClusterSpec.of("here:4").size == 4
    with pytest.raises(ConfigError, match="slowdown"):
        NodeSpec(node.device, 4, 1e9, slowdown=((2.0, 0.0),))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_shares_nothing_runs_as_ever(data: st.DataObject):
    """A timeline of devices whose slowdown is 1 is that of devices that share nothing, if every call takes time."""
    starts = {call.name: data.draw(st.sampled_from([(0, 4), (0, 2), (2, 2), (0, 1), (3, 1)])) for call in GRAPH.calls}
    seconds = {name: data.draw(st.integers(1, 20)) / 2 for name in starts}
    layouts = {call.name: on(*starts[call.name]) for call in GRAPH.calls if call.group in GRAPH.groups}
    alone = Contention.of(ClusterSpec((replace(CORES.nodes[0], slowdown=((4.0, 1.0),)),), 1e9))
    assert alone is not None
    expected = simulate(GRAPH, layouts, seconds)
    found = simulate(GRAPH, layouts, seconds, sharing=alone)
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.per_iteration == pytest.approx(expected.per_iteration)
    for mine, theirs in zip(found.spans, expected.spans, strict=True):
        assert (mine.start, mine.stop) == (pytest.approx(theirs.start), pytest.approx(theirs.stop))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sharing_takes_no_work_away(data: st.DataObject):
    """Two cores do the work of all devices in no less than its time on two cores, and a call in no less than alone."""
    starts = {call.name: data.draw(st.sampled_from([(0, 4), (0, 2), (2, 2), (0, 1), (3, 1)])) for call in GRAPH.calls}
    seconds = {name: data.draw(st.integers(1, 20)) / 2 for name in starts}
    layouts = {call.name: on(*starts[call.name]) for call in GRAPH.calls if call.group in GRAPH.groups}
    found = simulate(GRAPH, layouts, seconds, sharing=Contention.of(CORES))
    work = 0.0
    for span in found.spans:
        assert span.seconds >= seconds[span.call] * (1 - 1e-9)
        if span.mesh is not None:
            work += seconds[span.call] * min(2, span.mesh.size)
    assert found.seconds >= work / 2 * (1 - 1e-6)
    shared = sorted((s for s in found.spans if s.mesh), key=lambda s: s.start)
    for i, one in enumerate(shared):
        for other in shared[i + 1 :]:
            if one.mesh is not None and other.mesh is not None and one.mesh.overlaps(other.mesh):
                assert other.start >= one.stop * (1 - 1e-9)


def test_calls_on_other_devices_slow_each_other_down():
    """Values, reference and reward wait for the responses; critic on 0-1 (3 s) beside reference on 2-3 (2 s)."""
    names = [call.name for call in GRAPH.calls if call.group in GRAPH.groups]
    layouts = {name: on(0, 2) if name.startswith(("actor", "critic")) else on(2, 2) for name in names}
    seconds = dict.fromkeys(names, 0.0) | {"critic.compute_values": 3.0, "reference.compute_ref_log_prob": 2.0}
    found = simulate(GRAPH, layouts, seconds, iterations=1, sharing=Contention.of(CORES))
    stops = {span.call: span.stop for span in found.spans if span.seconds}
    assert stops["reference.compute_ref_log_prob"] == pytest.approx(4.0)  # both at half speed
    assert stops["critic.compute_values"] == pytest.approx(5.0)  # and the last second alone
    assert simulate(GRAPH, layouts, seconds, iterations=1).seconds == pytest.approx(3.0)


def test_a_call_takes_longer_on_devices_that_share():
    simulator = Costs(CORES, GRAPH, WORK)
    free = Costs(ClusterSpec((replace(CORES.nodes[0], slowdown=()),), 1e9), GRAPH, WORK)
    for name in ("actor.generate_sequences", "critic.compute_values", "actor.update_actor"):
        for size in SIZES:
            cost, alone = simulator.cost(name, on(0, size)), free.cost(name, on(0, size))
            assert cost.seconds == pytest.approx(CORES.nodes[0].slow(size * alone.busy) * alone.seconds)
            assert (cost.seconds > alone.seconds) == (size == 4)
            assert sum(cost.parts.values()) == pytest.approx(cost.seconds)
    moved = [s.reallocation("actor", on(0, 1), on(0, 4)) for s in (simulator, free)]
    assert moved[1] < moved[0] <= 2 * moved[1]  # not all of them receive


def test_devices_that_wait_leave_their_part_to_others():
    """Two pairs of devices on two cores: their calls take as long as alone if each waits half of the time."""
    layouts = {call.name: on(0, 2) for call in GRAPH.calls if call.group in GRAPH.groups}
    layouts |= {name: on(2, 2) for name in ("critic.compute_values", "critic.update_critic")}
    seconds = dict.fromkeys(layouts, 0.0) | {"critic.compute_values": 3.0, "actor.compute_log_prob": 3.0}
    how = {"iterations": 1, "sharing": Contention.of(CORES)}
    took = {
        busy: simulate(GRAPH, layouts, seconds, busy=dict.fromkeys(layouts, busy), **how).seconds
        for busy in (0.5, 0.75, 1.0)
    }
    assert took == {0.5: pytest.approx(3.0), 0.75: pytest.approx(4.5), 1.0: pytest.approx(6.0)}


def test_prompts_are_read_with_waits_of_their_own():
    free = replace(CORES.nodes[0], slowdown=())
    simulator = Costs(ClusterSpec((free,), 1e9), GRAPH, Workload(rows=64, prompt=4096, response=1))
    plans = [CallPlan(Mesh.of(0, 4), Parallel(*sizes)) for sizes in ((1, 1, 4), (1, 4, 1), (4, 1, 1))]
    alone, tensors, stages = (simulator.cost("actor.generate_sequences", at) for at in plans)
    assert alone.busy == 1.0
    decode = simulator.cost("actor.generate_sequences", plans[0]).parts["decode"]
    assert decode < 0.01 * alone.seconds, "nearly all is prompts"
    assert tensors.busy == pytest.approx(1 - tensors.parts["tensor_parallel"] / tensors.seconds)
    assert stages.busy == pytest.approx(1 - stages.parts["pipeline"] / stages.seconds)
    assert max(tensors.busy, stages.busy) < 0.95


def test_functions_share_cores_too():
    graph = ppo(SMALL, LARGE, SMALL, None)
    found = {}
    for pairs in (HALVES, ()):
        cluster = ClusterSpec((replace(CORES.nodes[0], slowdown=pairs),), 1e9)
        found[pairs] = Costs(cluster, graph, WORK).cost("reward.compute_reward", on(0, 4)).seconds
    assert found[HALVES] == pytest.approx(2 * found[()])


def test_what_a_device_does_not_do_itself_is_waiting():
    whole = CallCost.of(compute=2.0, memory=1.0, tensor_parallel=0.5, pipeline=0.25, data_parallel=0.25)
    assert whole.busy == pytest.approx(0.75)
    assert whole.times(3.0).busy == pytest.approx(0.75)
    assert CallCost.of().busy == 1.0
    profile = LayerProfile("host", (Curve(architecture(SMALL), "forward", 2, ((64, 1.0),), busy=0.6),))
    found = profile.layer(SMALL, "forward", 2, 64, Seconds(compute=3.0, memory=1.0, tensor_parallel=9.0))
    assert (found.compute, found.memory, found.tensor_parallel) == pytest.approx((0.45, 0.15, 0.4))
    with pytest.raises(ConfigError, match="busy=0"):
        Curve("m", "forward", 2, ((64, 1.0),), busy=0.0)


def measured(**changes) -> LayerProfile:
    lm, value = architecture(SMALL), architecture(LARGE) + "x"
    size = Sizes.of(SMALL)
    curves = (
        Curve(lm, "forward", 1, ((64, 0.002), (4096, 0.1))),
        Curve(lm, "update", 1, ((size.total / 2, 1.0), (size.total * 2, 4.0)), 2),
        Curve(lm, "decode", 1, ((1, 0.001), (128, 0.001))),
        Curve(lm, "step", 1, ((1, 0.5), (128, 0.5))),
        Curve(value, "output", 2, ((1, 0.5),)),
    )
    own = {"slowdown": HALVES, "latency": 1e-3, "bandwidth": 5e8, "call_seconds": 0.25, "host": 3e9}
    return LayerProfile("host", curves, **(own | changes))


def test_a_profile_describes_its_cluster(tmp_path):
    found = measured()
    found.save(tmp_path / "profile.yaml")
    assert LayerProfile.load(tmp_path / "profile.yaml") == found
    node = found.measured(ClusterSpec.this_machine(4)).nodes[0]
    assert (node.slowdown, node.latency, node.bandwidth, node.device.host) == (HALVES, 1e-3, 5e8, 3e9)
    assert found.coefficients(DEFAULT) == replace(DEFAULT, call_seconds=0.25, link=1.0, reduce=1.0)
    between = measured(network=3e9, network_latency=1e-4)
    cluster = between.measured(CORES)
    assert (cluster.bandwidth, cluster.latency) == (3e9, 1e-4)
    assert between.coefficients(DEFAULT).network == 1.0 > found.coefficients(DEFAULT).network == DEFAULT.network
    assert (found.measured(CORES).bandwidth, found.measured(CORES).latency) == (CORES.bandwidth, CORES.latency)
    unmeasured = measured(slowdown=(), latency=None, bandwidth=None, call_seconds=None, host=None)
    assert unmeasured.measured(CORES) == CORES
    assert unmeasured.coefficients(DEFAULT) == DEFAULT
    with pytest.raises(ConfigError, match="measured on 'host', the cluster has a100"):
        plan(GRAPH, "a100:1x4", WORK, profile=found)
    assert "2 at once 1x, 4 at once 2x" in str(found)
    (tmp_path / "other.yaml").write_text("device: host\ncurves: []\nspeed: 3\n")
    with pytest.raises(ConfigError, match="is not a profile"):
        LayerProfile.load(tmp_path / "other.yaml")


def test_a_measured_latency_is_that_of_messages_only():
    """Kernels of passes that were not measured are launched as before, and messages have no further launch."""
    node = replace(CORES.nodes[0], slowdown=())
    slow = Coefficients(latency=0.1)
    found = []
    for profile in (None, LayerProfile("host", latency=1e-3)):
        cluster = replace(CORES, nodes=(replace(node, latency=1e-3),))
        simulator = Costs(cluster, GRAPH, WORK, slow, profile)
        plans = [CallPlan(Mesh.of(0, t), Parallel(t=t)) for t in (1, 2)]
        found.append([simulator.cost("reference.compute_ref_log_prob", plan).parts for plan in plans])
    (alone, cut), (alone_measured, cut_measured) = found
    assert alone == alone_measured
    assert alone["fixed"] > 1
    assert cut["tensor_parallel"] - cut_measured["tensor_parallel"] > 0.1


def test_steps_are_priced_as_measured():
    profile = measured(slowdown=())
    quiet = Coefficients(call_seconds=0.0)
    simulator = Costs(replace(CORES, nodes=(replace(CORES.nodes[0], slowdown=()),)), GRAPH, WORK, quiet, profile)
    update = simulator.cost("actor.update_actor", on(0, 2)).parts
    assert update["optimizer"] == pytest.approx(WORK.minibatches * 2)  # 1 at half of the model, 4 at twice of it
    assert "data_parallel" not in update  # measured with it
    assert simulator.cost("actor.update_actor", on(0, 4)).parts["data_parallel"] > 0
    generation = simulator.cost("actor.generate_sequences", on(0, 1))
    steps = 48 * (SMALL.layers * 0.001 + 0.5)
    assert generation.seconds == pytest.approx(steps, rel=0.05)

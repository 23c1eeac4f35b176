"""Bytes of a reallocation against its weight plan."""

from __future__ import annotations

from example_plans import LLAMA_7B
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.planner.cluster_spec import ClusterSpec
from hybridflow.planner.layer_costs import Sizes
from hybridflow.planner.plans import CallPlan
from hybridflow.planner.reallocation import Exchange, planned_volume, volume
from hybridflow.planner.space import meshes, strategies

SPEC, SIZE = ClusterSpec.of("a100:3x4"), Sizes.of(LLAMA_7B)
PLANS = [CallPlan(mesh, p) for mesh in meshes(SPEC) for p in strategies(LLAMA_7B, mesh.size, min(4, mesh.size))]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PLANS), st.sampled_from(PLANS))
def test_volumes_are_those_of_the_weight_plan(source: CallPlan, target: CallPlan):
    """What the network carries is equal, and what a device gets is never more than the plan's busiest device moves: of
    a few large pieces the plan gives one rank to relay what in a real model many ranks share."""
    exchange = Exchange.of(SIZE, SPEC, source, target)
    planned, counted = planned_volume(exchange, 2), volume(exchange, 2)
    assert counted.messages == planned.messages
    assert counted.between <= planned.between * 1.001
    assert counted.between >= planned.between / 2
    assert counted.inside <= planned.inside * 1.001
    if not planned.between:
        assert counted.inside >= planned.inside / 2

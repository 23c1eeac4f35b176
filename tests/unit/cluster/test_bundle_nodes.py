"""Nodes of a pool that die between its placement and the start of its hosts."""

from __future__ import annotations

import pytest

from hybridflow.cluster.reservation import bundle_nodes
from hybridflow.errors import PlacementError

TABLE = {"bundles_to_node_id": {0: "a", 1: "b"}}
ALIVE = {"NodeID": "a", "Alive": True, "Resources": {"GPU": 8.0}}
DEAD = {"NodeID": "b", "Alive": False, "Resources": {}}


def test_each_bundle_has_its_node():
    other = {**ALIVE, "NodeID": "b"}
    assert bundle_nodes(TABLE, [other, ALIVE], 2) == [ALIVE, other]


@pytest.mark.parametrize(
    ("table", "nodes"),
    [
        (TABLE, [ALIVE, DEAD]),
        (TABLE, [ALIVE]),
        ({"bundles_to_node_id": {0: "a"}}, [ALIVE]),  # Ray looks for another node
        ({"bundles_to_node_id": {0: "a", 1: ""}}, [ALIVE]),
        ({}, [ALIVE]),
    ],
)
def test_a_dead_node_is_named(table, nodes):
    with pytest.raises(PlacementError, match=r"machines of nodes \[1\]|machines of nodes \[0, 1\]"):
        bundle_nodes(table, nodes, 2)

"""Which machines a pool gets: those that answer, those that are named, in the order of their addresses."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest

import hybridflow.cluster.reservation as reservation
from hybridflow.cluster.reservation import bundle_nodes
from hybridflow.errors import PlacementError


def machine(number: int, cpus: int = 2, port: int = 0, **labels: str) -> dict[str, Any]:
    return {
        "NodeID": f"id{number}",
        "Alive": True,
        "NodeManagerHostname": f"node{number}",
        "NodeManagerAddress": f"127.0.0.{number}",
        "NodeManagerPort": port,
        "Resources": {"CPU": float(cpus)},
        "Labels": labels,
    }


@pytest.fixture
def cluster(monkeypatch):
    """Gives `reserve` these machines, of which those in `silent` do not answer; returns what Ray was asked for."""
    asked: list[dict[str, Any]] = []

    def give(*machines: dict[str, Any], silent: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        monkeypatch.setattr(reservation.ray, "nodes", lambda: list(machines))
        cpus = sum(one["Resources"]["CPU"] for one in machines)
        monkeypatch.setattr(reservation.ray, "available_resources", lambda: {"CPU": cpus})
        gone = [f"id{number}" for number in silent]
        monkeypatch.setattr(reservation, "_silent", lambda machines: [one for one in machines if one["NodeID"] in gone])
        return asked

    def placement_group(bundles: Any, **more: Any) -> Any:
        asked.append({"bundles": bundles, **more})
        return SimpleNamespace(wait=lambda timeout_seconds: True)

    monkeypatch.setattr(reservation, "placement_group", placement_group)
    return give


def reserve(*per_node: int, nodes: tuple[str, ...] = (), wait: float = 0.0) -> None:
    reservation.reserve("CPU", per_node, nodes, False, wait, 60.0)


def test_machines_that_do_not_answer_are_left_out(cluster):
    asked = cluster(machine(1), machine(2), machine(3), silent=(2,))
    reserve(2, 2)
    assert asked[0]["bundle_label_selector"] == [{"ray.io/node-id": "!in(id2)"}] * 2
    with pytest.raises(PlacementError, match=r"has 4 \(1 of its machines do not answer\)"):
        reserve(2, 2, 2)


def test_machines_by_name_address_and_label(cluster):
    asked = cluster(machine(1), machine(2, kind="big"), machine(3))
    reserve(1, 1, 1, nodes=("node3", "127.0.0.1", "kind=big"))
    assert asked[0]["bundle_label_selector"] == [{"ray.io/node-id": "id3"}, {"ray.io/node-id": "id1"}, {"kind": "big"}]
    for name in ("node4", "127.0.0.9", "kind=small"):
        with pytest.raises(
            PlacementError, match=rf"no machine is '{name}'. The cluster has node1 \(127.0.0.1\), node2"
        ):
            reserve(1, nodes=(name,))


def test_a_name_of_two_machines_is_refused(cluster):
    cluster(machine(1), machine(2) | {"NodeManagerHostname": "node1"})
    with pytest.raises(PlacementError, match="2 machines are 'node1'"):
        reserve(1, nodes=("node1",))


def test_named_machines_are_compared_with_what_they_have(cluster):
    cluster(machine(1), machine(2, cpus=4))
    with pytest.raises(PlacementError, match="of these 3 on 'node1', which has 2"):
        reserve(3, nodes=("node1",))
    with pytest.raises(PlacementError, match="two of its names are one machine's"):
        reserve(1, 1, nodes=("node1", "127.0.0.1"))


def test_devices_that_come_later_are_waited_for(cluster, monkeypatch):
    asked = cluster(machine(1))
    monkeypatch.setattr(reservation.time, "sleep", lambda seconds: cluster(machine(1), machine(2)))
    with pytest.raises(PlacementError, match="the cluster has 2"):
        reserve(2, 2)
    reserve(2, 2, wait=60.0)
    assert len(asked) == 1


def test_nodes_of_one_size_are_in_the_order_of_their_addresses(monkeypatch):
    machines = [machine(number, cpus) for number, cpus in ((9, 2), (3, 4), (10, 2), (1, 2))]
    table = {"bundles_to_node_id": {i: one["NodeID"] for i, one in enumerate(machines)}}
    monkeypatch.setattr(reservation.ray, "nodes", lambda: machines)
    monkeypatch.setattr(reservation, "placement_group_table", lambda placement: table)
    placement: Any = None
    found = reservation.reserved_machines(placement, [2, 4, 2, 2], named=False)
    assert [(bundle, node["NodeID"]) for bundle, node in found] == [(3, "id1"), (1, "id3"), (0, "id9"), (2, "id10")]
    found = reservation.reserved_machines(placement, [2, 4, 2, 2], named=True)
    assert [bundle for bundle, _ in found] == [0, 1, 2, 3]


def test_who_listens_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        there, gone = machine(1, port=server.getsockname()[1]), machine(1, port=1)
        assert reservation._silent([there, gone]) == [gone]


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

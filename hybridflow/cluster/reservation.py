"""Reservation: the machines of a pool, as a placement group of Ray with one bundle for each."""

from __future__ import annotations

import ipaddress
import logging
import socket
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from hybridflow.cluster.liveness import ANSWER_SECONDS, NOTICE_SECONDS
from hybridflow.errors import PlacementError

logger = logging.getLogger(__name__)
_PLACE_SECONDS = 60.0
_RETURN_SECONDS = 4.0
_AT_ONCE = 64
_ID = "ray.io/node-id"


def reserve(
    kind: str, per_node: Sequence[int], nodes: Sequence[str], local: bool, wait: float, limit: float
) -> PlacementGroup:
    """A placement group with one bundle of `kind` devices ("GPU", "CPU") per node, on machines that answer; on those of
    `nodes`, if given. On a `local` cluster CPUs are logical. Waits `wait` seconds for devices that the cluster lacks,
    and at most `limit` for its answer.

    Errors: PlacementError when it cannot be placed."""
    asked = f"ResourcePool({list(per_node)}{f', nodes={list(nodes)}' if nodes else ''})"
    asked += f" asks for {sum(per_node)} devices ({kind}s)"
    end, said = time.monotonic() + wait, False
    while True:
        try:
            return _placed(kind, per_node, nodes, asked, local, min(_PLACE_SECONDS, limit))
        except PlacementError as error:
            if time.monotonic() >= end:
                raise
            if not said:
                logger.warning("%s Waiting for them for up to %g s.", error, wait)
            said = True
            time.sleep(1.0)


def _placed(
    kind: str, per_node: Sequence[int], nodes: Sequence[str], asked: str, local: bool, limit: float
) -> PlacementGroup:
    """Errors: PlacementError when it cannot be placed now."""
    logical = local and kind == "CPU"
    selectors = _selectors(kind, per_node, nodes, asked, local, logical)
    bundles = [{kind: float(count)} for count in per_node]
    strategy = "PACK" if logical or len(per_node) == 1 else "STRICT_SPREAD"
    placement = placement_group(bundles, strategy=strategy, bundle_label_selector=selectors)
    try:
        there = placement.wait(timeout_seconds=min(NOTICE_SECONDS, limit))
        if not there and limit > NOTICE_SECONDS:
            logger.warning("%s: the cluster has not placed them in %g s", asked, NOTICE_SECONDS)
            there = placement.wait(timeout_seconds=limit - NOTICE_SECONDS)
    except BaseException:  # Ctrl-C
        remove_placement_group(placement)
        raise
    if not there:
        remove_placement_group(placement)
        raise PlacementError(f"{asked}; the cluster did not place them within {limit:g} s.")
    return placement


def _selectors(
    kind: str, per_node: Sequence[int], nodes: Sequence[str], asked: str, local: bool, logical: bool
) -> list[dict[str, str]]:
    """Ray's labels of each bundle's machine. Errors: PlacementError for devices that are not there."""
    wanted, machines = sum(per_node), [node for node in ray.nodes() if node["Alive"]]
    silent = [] if local else _silent(machines)
    machines = [node for node in machines if node not in silent]
    there = sorted((int(node["Resources"].get(kind, 0)) for node in machines), reverse=True)
    if wanted > sum(there):
        larger = f", or open the session with hybridflow.init(devices={wanted})."
        more = larger if logical else " or add nodes to the cluster."
        gone = f" ({len(silent)} of its machines do not answer)" if silent else ""
        raise PlacementError(f"{asked}, the cluster has {sum(there)}{gone}. Make the pool smaller{more}")
    if (free := _free(kind, wanted)) < wanted:
        raise PlacementError(f"{asked}, {free} of the cluster's {sum(there)} are free. Close a pool or share this one.")
    largest = zip(there, sorted(per_node, reverse=True), strict=False)
    if not logical and (len(there) < len(per_node) or any(has < asks for has, asks in largest)):
        raise PlacementError(f"{asked} on {len(per_node)} nodes, the cluster's nodes have {there}.")
    without = {_ID: f"!in({','.join(node['NodeID'] for node in silent)})"} if silent else {}
    if not nodes:
        return [without] * len(per_node)
    labels = [_label(node, count, kind, machines, asked) for node, count in zip(nodes, per_node, strict=True)]
    ids = [label[_ID] for label in labels if _ID in label]
    if len(set(ids)) < len(ids):
        raise PlacementError(f"{asked}: two of its names are one machine's.")
    return [without | label for label in labels]


def _label(name: str, count: int, kind: str, machines: Sequence[Mapping[str, Any]], asked: str) -> dict[str, str]:
    """Of the machine with this host name or address, or of those with the label `key=value`, for `count` devices."""
    key, equals, value = name.partition("=")
    if equals:
        found = [node for node in machines if node.get("Labels", {}).get(key) == value]
    else:
        found = [node for node in machines if name in (node["NodeManagerHostname"], node["NodeManagerAddress"])]
    if not found or (len(found) > 1 and not equals):
        known = ", ".join(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in machines)
        many = f"{len(found)} machines are" if found else "no machine is"
        raise PlacementError(f"{asked}: {many} {name!r}. The cluster has {known}.")
    if (most := max(int(node["Resources"].get(kind, 0)) for node in found)) < count:
        raise PlacementError(f"{asked}, of these {count} on {name!r}, which has {most}.")
    return {key: value} if equals else {_ID: found[0]["NodeID"]}


def _silent(machines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that do not answer: Ray counts a machine that vanished as alive for up to a minute."""

    def answers(node: Mapping[str, Any]) -> bool:
        try:
            socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_SECONDS).close()
        except OSError:
            return False
        return True

    with ThreadPoolExecutor(min(_AT_ONCE, len(machines)), "machines") as threads:
        return [node for node, there in zip(machines, threads.map(answers, machines), strict=True) if not there]


def _free(kind: str, wanted: int) -> int:
    """Number of free devices; those of a just closed pool return after a moment."""
    end = time.monotonic() + _RETURN_SECONDS
    while (free := int(ray.available_resources().get(kind, 0))) < wanted and time.monotonic() < end:
        time.sleep(0.05)
    return free


def reserved_machines(
    placement: PlacementGroup, per_node: Sequence[int], named: bool
) -> list[tuple[int, Mapping[str, Any]]]:
    """Bundle and machine of each node of a pool: where they are not `named`, nodes of one size in the order of their
    addresses. Errors: PlacementError, as `bundle_nodes`."""
    found = bundle_nodes(placement_group_table(placement), ray.nodes(), len(per_node))
    bundles = list(range(len(per_node)))
    if not named:
        of_size: dict[int, list[int]] = defaultdict(list)
        for bundle in sorted(bundles, key=lambda bundle: _address(found[bundle])):
            of_size[per_node[bundle]].append(bundle)
        bundles = [of_size[count].pop(0) for count in per_node]
    return [(bundle, found[bundle]) for bundle in bundles]


def _address(node: Mapping[str, Any]) -> tuple[int, int]:
    address = ipaddress.ip_address(node["NodeManagerAddress"])
    return address.version, int(address)


def bundle_nodes(table: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]], bundles: int) -> list[Mapping[str, Any]]:
    """The node of each bundle of a placement group, from Ray's two tables. Errors: PlacementError when one died since
    the group was placed: it is in neither table, or without resources."""
    alive, placed = {node["NodeID"]: node for node in nodes if node["Alive"]}, table.get("bundles_to_node_id", {})
    if lost := [bundle for bundle in range(bundles) if placed.get(bundle) not in alive]:
        raise PlacementError(
            f"the machines of nodes {lost} of a pool of {bundles} died while its host processes were being started: "
            f"make the pool again."
        )
    return [alive[placed[bundle]] for bundle in range(bundles)]

"""Groups on pools and slices: grids, protocols, names, and placements that do not fit."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.errors import (
    ConfigError,
    PlacementError,
)
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import (
    ONE_TO_ALL,
    SKIP,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_AS_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Protocol,
    join,
)
from hybridflow.topology import RankGrid

ROWS = 10


class Base:
    """Answers who it is; takes no settings."""

    role = "base"

    @register(ONE_TO_ALL)
    def where(self):
        return self.context.rank, os.getpid()

    @register(ONE_TO_ALL)
    def nodes(self):
        return self.context.nodes


class Open(Base):
    """Takes one setting by name and any others."""

    def __init__(self, factor: int = 1, **extras: Any) -> None: ...


class Shadowing:
    @register(ONE_TO_ALL)
    def members(self): ...


class Strict(Base):
    def __init__(self, folder: str) -> None: ...


@pytest.fixture(scope="module")
def batch(cluster) -> BatchRef:
    return BatchRef.from_batch(hf.Batch({"x": torch.arange(ROWS)}))


class Grid:
    """Answers with its coordinates."""

    @register(THREE_D_PROTO, reads=("x",), writes=("y",))
    def three_d(self, batch):
        return None if self.context.coords.p == 0 else hf.Batch({"y": batch["x"]})

    @register(THREE_D_ALL_MICRO_DP, reads=("x",), writes=("y",))
    def micro(self, batch):
        return hf.Batch({"y": batch["x"]})

    @register(THREE_D_PP_AS_DP, reads=("x",), writes=("y",))
    def stages_as_replicas(self, batch):
        return hf.Batch({"y": batch["x"]})

    @register(THREE_D_PP_ONLY)
    def stages(self):
        return tuple(self.context.coords)

    @register(THREE_D_PROTO, reads=("x",))
    def figures(self, batch):
        return {"rows": float(batch.rows)} if self.context.coords.p == 1 else {}


def test_protocols_of_three_dimensions(pool, place, batch):
    """(p, t, d) = (2, 1, 2) and (2, 2, 1), generation replicas of one device."""
    for grid in (RankGrid(2, 1, 2, p_g=1, t_g=1), RankGrid(2, 2, 1, p_g=1, t_g=1)):
        group = place(Grid, pool, grid=grid)
        for call in (group.three_d, group.micro, group.stages_as_replicas):
            assert call(batch)["y"].get().tolist() == list(range(ROWS))
        assert group.stages().get() == [(0, 0, 0), (1, 0, 0)]
        assert group.figures(batch).get() == {"rows": ROWS / grid.d}


def test_a_protocol_of_ones_own_on_real_hosts(pool, place, batch):
    every_other = Protocol(
        "EVERY_OTHER",
        lambda grid, rows: [
            part if part is SKIP else rows.split(grid.size // 2)[i // 2]
            for i, part in enumerate([None, SKIP] * (grid.size // 2))
        ],
        lambda grid, outputs: join(outputs[::2]),
    )

    class Even:
        @register(every_other, reads=("x",), writes=("y", "rank"))
        def copy(self, batch):
            return hf.Batch({"y": batch["x"], "rank": torch.full((batch.rows,), self.context.rank)})

    got = place(Even, pool).copy(batch).get()
    assert got["y"].tolist() == list(range(ROWS))
    assert got["rank"].tolist() == [0] * 5 + [2] * 5


def test_names_are_unique_and_free_again_after_close(pool, place):
    first = place(Base, pool[0:1])
    second = place(Base, pool[0:1])
    assert [first.name, second.name] == ["base", "base_2"]
    with pytest.raises(ConfigError, match="a group named 'base' exists already"):
        place(Base, pool[0:1], name="base")
    first.close()
    first.close()
    with pytest.raises(PlacementError, match="base is closed"):
        first.where()
    again = place(Base, pool[0:1], name="base")
    assert again.where().get()[0][0] == 0


def test_a_class_with_extra_settings_takes_any(pool, place):
    assert place(Open, pool[0:1], fctor=2).settings == {"factor": 1, "fctor": 2}


def test_slices_share_hosts(pool, place):
    whole = dict(place(Base, pool, name="whole").where().get())
    part = pool[1:3]
    assert len(part) == 2
    assert [pid for _, pid in place(Base, part, name="part").where().get()] == [whole[1], whole[2]]
    assert place(Base, part, name="near").nodes().get() == [(0, 0)] * 2  # one machine
    assert [pid for _, pid in place(Base, part[1], name="one").where().get()] == [whole[2]]
    assert repr(part) == "ResourcePool([2])"
    with pytest.raises(PlacementError, match="is empty"):
        pool[4:]


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda pool: hf.place(Grid, pool, grid=RankGrid(2, 2, 2)), PlacementError, r"2\*2\*2 = 8 .*pool has 4"),
        (lambda pool: hf.place(Strict, pool, foldr="x"), ConfigError, "no setting 'foldr'. Did you mean 'folder'"),
        (lambda pool: hf.place(Strict, pool), ConfigError, "missing a required argument: 'folder'"),
        (lambda pool: hf.place(Shadowing, pool), ConfigError, "an operation 'members', which every group already has"),
        (lambda pool: hf.place(Base, pool, x=1), ConfigError, r"Base takes no settings, got \['x'\]"),
        (lambda pool: hf.place(dict, pool), ConfigError, "dict has no operations: mark methods with @register"),
        (lambda pool: hf.place(Base, [4]), PlacementError, "is placed on a ResourcePool, got list"),
    ],
)
def test_placements_that_do_not_fit(pool, wrong, kind, message):
    with pytest.raises(kind, match=message):
        wrong(pool)


@pytest.mark.parametrize("devices", [[], [0], [-1], [1.5], ["8"], 0])
def test_pools_of_no_sensible_size(cluster, devices):
    with pytest.raises(PlacementError, match=r"give devices per node, like ResourcePool\(\[8, 8\]\)"):
        hf.ResourcePool(devices)


def test_a_pool_larger_than_the_cluster_is_refused_at_once(cluster, pool):
    start = time.monotonic()
    with pytest.raises(PlacementError, match=r"\[8, 9\]\) asks for 17 devices \(CPUs\), the cluster has 16.*init\(dev"):
        hf.ResourcePool([8, 9])
    assert time.monotonic() - start < 5
    start = time.monotonic()
    with pytest.raises(PlacementError, match="8 of the cluster's 16 are free"):
        hf.ResourcePool([9])
    assert time.monotonic() - start < 5


def test_a_second_session_is_refused(cluster):
    with pytest.raises(ConfigError, match=r"a session is open already: call hybridflow.shutdown\(\) first"):
        hf.init(devices=4)

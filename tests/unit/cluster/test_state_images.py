"""Images of the state of ranks: which of them are of one step, and who has what a lost rank held. No cluster."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridflow.cluster import state_images
from hybridflow.cluster.backend import HostProcess, RankCall
from hybridflow.cluster.host import Host
from hybridflow.cluster.member import Member
from hybridflow.cluster.state_images import GroupImages, ImageHead, KeptImage, redundant
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.errors import CheckpointError
from hybridflow.workers import worker
from hybridflow.workers.worker import Worker

SHARDED, REPLICATED, HYBRID = (0, 1, 2, 3), (0, 0, 0, 0), (0, 1, 0, 1)


def layout(shards: tuple[int, ...]) -> Layout:
    """Rank i holds shard `shards[i]` of a tensor."""
    size = 12 // len(set(shards))

    def regions(rank: int) -> list[Region]:
        start = shards[rank] * size
        return [Region(Box("w", (start, 0), (start + size, 2)), "w", (0, 0))]

    return Layout({"w": (12, 2)}, len(shards), regions)


def ranks(machines: str) -> Any:
    return SimpleNamespace(name="actor", hosts=[HostProcess(None, i, machine=m) for i, m in enumerate(machines)])


@pytest.mark.parametrize(
    ("shards", "machines", "needs_no_copies"),
    [
        (SHARDED, "aabb", False),
        (REPLICATED, "aabb", True),
        (REPLICATED, "aaaa", False),
        (HYBRID, "aabb", True),
        (HYBRID, "abab", False),
        (HYBRID, "abcd", True),
    ],
)
def test_copies_are_kept_unless_other_machines_have_replicas(shards, machines, needs_no_copies):
    assert redundant(ranks(machines), layout(shards)) == needs_no_copies


def parts(shards: tuple[int, ...], rank: int, left: str) -> tuple[list[Any], Any]:
    found = [KeptImage(None, i, i) if here == "x" else None for i, here in enumerate(left)]  # type: ignore[arg-type]
    images, parts = state_images._parts("actor", layout(shards), rank, found)
    return [image.content for image in images], parts


def test_a_rank_reads_its_own_image_or_that_of_a_replica():
    assert parts(HYBRID, 1, "xxxx") == ([1], None)
    images, ((box, whole, regions, number),) = parts(HYBRID, 1, "x-xx")
    assert (images, number) == ([3], 0)
    assert box == whole == regions[0].box == Box("w", (6, 0), (12, 2))


@pytest.mark.parametrize(("shards", "left"), [(SHARDED, "x-xx"), (HYBRID, "x-x-")])
def test_what_no_rank_holds_is_named(shards, left):
    with pytest.raises(CheckpointError, match="rank 1 was lost, with state that no other rank holds"):
        parts(shards, 1, left)


def images(*heads: Any, calls: dict[str, int]) -> GroupImages:
    kept = [[KeptImage(HostProcess(None, i), i, head)] for i, head in enumerate(heads)]
    return GroupImages(SimpleNamespace(name="actor"), None, kept, calls)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ImageHead(5, {"steps": 3}, {"update": 2}), "not of one completed step"),
        (ImageHead(5, {"steps": 4}, {"update": 1}), "not of one completed step"),
        ("ActorDiedError", "rank 1 of actor has no image: ActorDiedError"),
    ],
)
def test_images_of_different_steps_are_refused(monkeypatch, other, message):
    monkeypatch.setattr(state_images, "_head", lambda image: image.head)
    good = ImageHead(5, {"steps": 4}, {"update": 2, "generate": 7})
    assert images(good, good, calls={"update": 2}).agreed() == [good, good]
    with pytest.raises(CheckpointError, match=message):
        images(good, other, calls={"update": 2}).agreed()
    with pytest.raises(CheckpointError, match="not of one completed step"):
        images(good, good, calls={"update": 3}).agreed()


@pytest.mark.parametrize(
    ("lives", "read"),
    [
        ({"a": True, "b": True}, ["own0", "own1"]),
        ({"a": False, "b": False}, ["own0", "own1"]),  # processes were killed, or one of the machines started anew
        ({"a": False, "b": True}, ["copy0", "own1"]),  # killed, or started anew
        ({"a": True, "b": None}, ["own0", "copy1"]),
    ],
)
def test_an_image_is_read_where_a_process_lives_or_else_its_copy(monkeypatch, lives, read):
    hosts = [HostProcess(None, machine=machine) for machine in "ab"]
    head = ImageHead(5, None)
    kept = [[KeptImage(hosts[i], f"own{i}", head), KeptImage(hosts[1 - i], f"copy{i}", head)] for i in range(2)]
    one = GroupImages(SimpleNamespace(name="actor"), None, kept, {}, layout(SHARDED))  # type: ignore[arg-type]
    monkeypatch.setattr(state_images, "_head", lambda image: image.head)
    monkeypatch.setattr(state_images, "_lives", lambda those: lives[those[0].machine])
    assert [images[0].content for _, images, _ in one.readings()] == read
    if lives["b"] is None:
        kept[1].pop()
        with pytest.raises(CheckpointError, match="rank 1 was lost, with state that no other rank holds"):
            one.readings()


def test_a_lost_rank_without_tensors_needs_its_head_only(monkeypatch):
    monkeypatch.setattr(state_images, "_head", lambda image: image.head)
    monkeypatch.setattr(state_images, "_lives", lambda those: None)
    head = ImageHead(0, None, random={"torch": "state"}, values=({"seen": 3},))
    assert images(head, calls={}).readings() == [(head, [], [])]


class Trained:
    """A rank whose call may raise."""

    def update(self, fails: bool) -> None:
        if fails:
            raise ValueError("mini-batch 3 of 4")

    def image(self, settings: Any, tensors: bool) -> tuple[str, ImageHead]:
        return "image", ImageHead(1, None)


@pytest.mark.parametrize(("phase", "kept"), [("training", False), ("inference", True)])
def test_after_an_update_that_failed_a_rank_gives_no_image(phase, kept):
    groups = SimpleNamespace(check=lambda: None)
    member = Member("actor", 0, SimpleNamespace(groups=groups, step=3), worker=Trained())  # type: ignore[arg-type]
    host: Any = object.__new__(Host)
    host._members, host._node, host.reader = {"g": member}, "node1", SimpleNamespace(row_number=int)
    host._liveness = SimpleNamespace(during=lambda what: nullcontext())
    host._run(member, RankCall(1, "g", "update", {}, (), step=2, phase=phase), {"fails": False})
    assert host.image("g", None, True) == ("image", ImageHead(1, None, {"update": 1}))
    for fails in (True, False):  # the update after it does not make up for it
        host._run(member, RankCall(1, "g", "update", {}, (), step=3, phase=phase), {"fails": fails})
    image, head = host.image("g", None, True)
    assert (image is not None) == kept
    if not kept:
        assert "update of iteration 3 failed, perhaps halfway: mini-batch 3 of 4" in str(head.error)


class Counting(Worker):
    """A rank without tensors, with a state of its own."""

    def __init__(self) -> None:
        self.context, self.seen = SimpleNamespace(role="judge"), 0  # type: ignore[assignment]

    def state(self) -> Any:
        return self.seen

    def load_state(self, state: Any) -> None:
        self.seen = state


def test_the_state_of_a_subclass_and_random_generators_are_in_the_head(monkeypatch):
    monkeypatch.setattr(worker, "agree", lambda context, check, what: check())
    rank, other = Counting(), Counting()
    rank.seen = 3
    image, head = rank.image(None, False)
    drawn = torch.rand(2)
    rank.seen = 4
    other.take_image(None, False, head, [])  # its machine is gone
    assert (image.arrays, head.bytes, other.seen) == ({}, 0, 3)
    assert torch.equal(torch.rand(2), drawn)
    with pytest.raises(CheckpointError, match="an image of judge was lost"):
        other.take_image(None, True, head, None, "lost")

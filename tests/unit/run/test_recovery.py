"""Rebuilding hosts and groups of a session, where a step of it fails. No cluster: hosts are only counted."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

import hybridflow as hf
from hybridflow.cluster import iterations
from hybridflow.cluster.backend import Deadlines, HostProcess, RankGroup, SessionBackend
from hybridflow.cluster.iterations import Iterations
from hybridflow.cluster.session import CONTROLLER, Session
from hybridflow.engines.checkpoint.rank_state import random_state
from hybridflow.errors import CheckpointError, HostLostError, PlacementError, WorkerError
from hybridflow.protocols.operation import operations, register
from hybridflow.protocols.protocol import ONE_TO_ALL
from hybridflow.run import recovery, run_state
from hybridflow.run.recovery import rebuild, recall, replace_lost
from hybridflow.run.run_state import Moment, RunParts
from hybridflow.workers.worker import Worker


class Plain:
    @register(ONE_TO_ALL)
    def work(self) -> None: ...


class CountedHosts(SessionBackend):
    """A backend whose hosts are numbers. The step number `fails` of starting hosts and building groups raises."""

    has_cuda, deadlines, name = False, Deadlines(), "counted"

    def __init__(self) -> None:
        self.iterations, self.numbers = Iterations(10.0), itertools.count()
        self.channels = SimpleNamespace(close=lambda key: None)
        self.steps, self.fails, self.gone = 0, 0, set[Any]()
        self.stopped, self.built = set[Any](), dict[str, RankGroup]()

    def _step(self) -> None:
        self.steps += 1
        if self.steps == self.fails:
            raise HostLostError("a machine is gone")

    def start_hosts(
        self, pool: str, per_node: Sequence[int], nodes: Sequence[str] = ()
    ) -> tuple[tuple[HostProcess, ...], None]:
        self._step()
        return tuple(HostProcess(None, next(self.numbers)) for _ in range(sum(per_node) or 1)), None

    def stop_hosts(self, hosts: Sequence[HostProcess], reserved: Any) -> None:
        self.stopped |= {host.address for host in hosts}

    def lost(self, hosts: Sequence[HostProcess]) -> list[HostProcess]:
        return [host for host in hosts if host.address in self.gone]

    def operations(self, worker_class: type, settings: Any) -> Any:
        return operations(worker_class)

    def build(self, ranks: RankGroup, uninitialized: bool = False) -> None:
        self._step()
        self.built[ranks.name] = ranks

    def drop(self, ranks: RankGroup, wait: float) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(Session, "_current", None)
    Session._current = session = Session(CountedHosts())  # type: ignore[arg-type]
    yield session
    session.shutdown()


def placed(session: Session) -> CountedHosts:
    """Two groups on one pool, one on another."""
    first, second = hf.ResourcePool([2]), hf.ResourcePool([1])
    for name, pool in (("a", first), ("b", first[0:1]), ("c", second)):
        hf.place(Plain, pool, name=name)
    return session.backend


STEPS = 3 + 4  # hosts of two pools and the controller, and their groups with the controller's


@pytest.mark.parametrize("fails", range(1, STEPS + 1))
def test_a_rebuild_that_failed_can_be_done_again(session, fails):
    backend = placed(session)
    pools = [pool.name for pool in session.pools]
    backend.steps, backend.fails = 0, fails
    with pytest.raises(HostLostError):
        rebuild(session)
    rebuild(session)
    assert [pool.name for pool in session.pools] == pools
    assert not session.unbuilt
    hosts = {host.address for pool in [*session.pools, session.controller_pool] for host in pool.hosts}
    assert not hosts & backend.stopped
    assert set(backend.built) == {"a", "b", "c", CONTROLLER}
    for name, ranks in backend.built.items():
        assert session.groups[name].ranks is ranks
        assert {host.address for host in ranks.hosts} <= hosts
    backend.steps, backend.fails = 0, STEPS + 1
    rebuild(session)
    assert backend.steps == STEPS


def test_pools_that_are_half_rebuilt_are_replaced_too(session, monkeypatch):
    """Also where their new hosts live: their groups are not built."""
    backend = placed(session)
    moment = SimpleNamespace(sources=dict.fromkeys("abc", "d"), step=3)
    for name, found in (("_keep_state", False), ("_at", True), ("_step_back", None), ("follow", None)):
        monkeypatch.setattr(recovery, name, lambda *_, found=found: found)
    first, second = session.pools
    backend.gone = {second.hosts[0].address}
    backend.steps, backend.fails = 0, 2
    with pytest.raises(HostLostError):
        replace_lost(session, [moment])
    assert backend.built["c"].hosts != second.hosts
    assert session.unbuilt == {second.name}
    before = first.hosts
    assert replace_lost(session, [moment]) is moment
    assert backend.built["c"].hosts == second.hosts
    assert first.hosts == before
    assert not session.unbuilt


def test_without_devices_the_pools_stay_known(session):
    backend = placed(session)
    starts = backend.start_hosts

    def full(*given: Any) -> Any:
        raise PlacementError("no devices")

    backend.start_hosts = full
    with pytest.raises(PlacementError, match="no devices"):
        rebuild(session)
    backend.start_hosts = starts
    rebuild(session)
    assert set(backend.built) == {"a", "b", "c", CONTROLLER}
    assert not session.unbuilt


class Images:
    """Images of one group at one moment: of one step, or not."""

    layout = "layout"

    def __init__(self, session: Session, name: str, good: bool = True, there: bool = True) -> None:
        self.ranks, self.good, self.there, self.given = session.groups[name].ranks, good, there, list[Any]()

    def readings(self) -> str:
        if not self.good:
            raise CheckpointError("not of one completed step")
        return "readings"

    def give(self, backend: Any, ranks: RankGroup, readings: Any) -> str:
        self.given.append((ranks, readings))
        if not self.there:
            raise CheckpointError("an image of a was lost with its machine")
        return f"{ranks.name}: 5 bytes from memory of node2"


def moment_of(step: int, **images: Images) -> Any:
    calls, sources = {name: Counter[str]() for name in ("a", "b", "c", CONTROLLER)}, dict.fromkeys("abc")
    state: dict[str, Any] = {"calls": calls, "sources": sources, "states": {}, "values": {}, "random": random_state()}
    return SimpleNamespace(step=step, images=images, **state)


def test_the_newest_moment_with_images_of_one_step_is_recalled(session):
    backend = placed(session)
    session.iterations.listen()
    old, good, bad = (Images(session, "a") for _ in range(3))
    unequal = Images(session, "b", good=False)
    moments = [moment_of(5), moment_of(4, a=bad, b=unequal), moment_of(3, a=good), moment_of(2, a=old)]
    before = set(backend.built["a"].hosts)
    assert recall(session, moments) is moments[2]
    assert good.given == [(session.groups["a"].ranks, "readings")]
    assert not before & set(backend.built["a"].hosts)  # all hosts are new before anything is given
    assert bad.given == old.given == []
    assert session.groups["a"].weights_version == 1
    said = [event.what for _, event in session.iterations.events]
    assert "a: 5 bytes from memory of node2" in said


def test_without_images_nothing_is_replaced(session):
    backend = placed(session)
    before = dict(backend.built)
    moved = Images(session, "c")
    moved.ranks = replace(moved.ranks, settings={"other": 1})
    closed = moment_of(3, a=Images(session, "a"))
    closed.calls["d"] = Counter()
    moments = [moment_of(5), moment_of(4, a=Images(session, "a", good=False)), moment_of(4, c=moved), closed]
    assert recall(session, moments) is None
    assert backend.built == before


def test_where_a_moment_cannot_be_read_an_older_one_is(session, caplog):
    """A host of a plain class that does not answer is known before anything is replaced, lost images only after."""
    backend = placed(session)

    def silent(seconds: float) -> list[Any]:
        raise HostLostError("b does not answer")

    unheard, unread, good = Images(session, "a"), Images(session, "a", there=False), Images(session, "a")
    moments = [moment_of(5, a=unheard), moment_of(4, a=unread), moment_of(3, a=good)]
    moments[0].values = {"b": silent}
    backend.steps = 0
    assert recall(session, moments) is moments[2]
    assert backend.steps == STEPS  # hosts were replaced once
    assert unheard.given == []
    assert unread.given == good.given
    assert "after 5 iterations: b does not answer" in caplog.text
    assert "after 4 iterations: an image of a was lost" in caplog.text


class Kept(Worker):
    @register(ONE_TO_ALL)
    def work(self) -> None: ...


def test_a_moment_without_the_images_of_one_group_is_refused(session, caplog):
    backend = placed(session)
    hf.place(Kept, hf.ResourcePool([1]), name="d")
    moment = moment_of(3, a=Images(session, "a"))
    moment.calls["d"], before = Counter[str](), dict(backend.built)
    assert recall(session, [moment]) is None
    assert backend.built == before
    assert "d: without images of iteration 3" in caplog.text
    moment.images["d"] = Images(session, "d")
    assert recall(session, [moment]) is moment


def test_a_lost_host_leaves_a_moment_without_any_image(session, monkeypatch):
    placed(session)
    for name in "de":
        hf.place(Kept, hf.ResourcePool([1]), name=name)
    taken: Any = SimpleNamespace(take=lambda ranks, *_: Images(session, ranks.name))
    monkeypatch.setattr(run_state, "GroupImages", taken)
    monkeypatch.setattr(CountedHosts, "ask", lambda *_: [None], raising=False)
    parts = RunParts.of(session)
    moment = Moment.now(session, replace(parts, groups=parts.workers), 3)
    (host,) = session.groups["e"].ranks.hosts
    session.iterations.incidents.lost[host.address] = SimpleNamespace()
    monkeypatch.setattr(iterations, "host_lost", lambda *_: WorkerError("e is lost"))
    with pytest.raises(WorkerError, match="e is lost"):
        moment.take_images(session, parts, {})
    assert moment.images == {}
    session.iterations.incidents.lost.clear()
    moment.take_images(session, parts, {})
    assert {*moment.images} == {"d", "e"}


def test_what_is_not_kept_is_a_warning_once_per_reason(tmp_path, session, caplog):
    said = ["iteration 1 is not kept in memory: a 1", "iteration 2 is not kept in memory: b"]
    for asked, warnings in ((True, said), (False, [])):
        checkpoints = hf.Checkpoints(tmp_path / f"{asked}", in_memory=asked)
        caplog.clear()
        for step, reason in ((1, "a 1"), (2, "a 2"), (2, "b"), (3, "a 3")):
            checkpoints._not_kept(step, CheckpointError(reason))
        assert [one.getMessage() for one in caplog.records if one.levelname == "WARNING"] == warnings

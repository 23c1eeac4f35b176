"""Recovery: replaces host processes of a session after some were lost, and builds their groups again.

a host of a group that trains is lost: all hosts are replaced, and the run continues from its checkpoint
only others are lost: their pools' hosts are replaced; weights come from the groups that they follow, and the iteration
that was under way is done again, with the weights and optimizer states that the other hosts have
images are kept: all hosts are replaced, and the run continues from the last iteration of which all ranks have images
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.session import Session
from hybridflow.engines.checkpoint.rank_state import set_random_state
from hybridflow.errors import BrokenGroupError, CheckpointError, HostLostError, HybridFlowError, WaitTimeoutError
from hybridflow.run.run_state import Moment, RunParts, follow, give_values
from hybridflow.tracking.tracker import Tracker

logger = logging.getLogger(__name__)
_VALUES_SECONDS = 5.0  # they are there, or their hosts have failed


def rebuild(session: Session, pools: Sequence[ResourcePool] | None = None) -> None:
    """Start new hosts for `pools` (default: all, since peers of a lost host may be in a collective) and build their
    groups as they were placed; their weights are those of their model directories again. After an error it can be
    called again.

    Errors: PlacementError when the cluster no longer has the devices, WorkerError when a rank cannot be built.
    """
    start = time.time()
    pools = [*session.pools, session.controller_pool] if pools is None else pools
    by_name, groups = {pool.name: pool for pool in pools}, _groups_on(session, pools)
    session.unbuilt |= by_name.keys()
    session.iterations.reset()
    if session.recorded is not None:
        session.recorded.forget()
    for ranks in [ranks for group in groups for ranks in group.all_ranks]:
        session.backend.channels.close(ranks.key)
    for pool in pools:
        pool.rebuild()
    for group in groups:
        group.rebuild(by_name)
    session.unbuilt -= by_name.keys()
    session.iterations.note("restart", f"new hosts of {', '.join(group.name for group in groups)}", start)


def needs_moments(session: Session) -> bool:
    """Whether there is a pool whose hosts `replace_lost` could replace."""
    return any((on := _groups_on(session, [pool])) and not _keep_state(session, on) for pool in session.pools)


def replace_lost(session: Session, moments: Iterable[Moment]) -> Moment | None:
    """Replace only the pools that have lost hosts. Returns the moment (of these, the newest first) from which the run
    continues, or None when it has to continue from a checkpoint.

    Errors: those of a host that does not answer or cannot be built.
    """
    everywhere = [*session.pools, session.controller_pool]
    lost = {id(host) for host in session.backend.lost([host for pool in everywhere for host in pool.hosts])}
    pools = [p for p in everywhere if p.name in session.unbuilt or not lost.isdisjoint(map(id, p.hosts))]
    if not pools or session.controller_pool in pools:
        return None
    gone = _groups_on(session, pools)
    if _keep_state(session, gone):
        return None
    moment = next((one for one in moments if _at(session, one, gone)), None)
    if moment is None:
        return None
    session.iterations.reset()  # a finished iteration may have a failed call: a stream's
    _step_back(session, moment)
    rebuild(session, pools)
    follow(session, {group.name: moment.sources[group.name] for group in gone})
    logger.warning("%s: placed on new hosts; %d iterations are done", ", ".join(g.name for g in gone), moment.step)
    return moment


def recall(session: Session, moments: Iterable[Moment]) -> Moment | None:
    """Replace all hosts and give them the state that machines have in memory. Returns the moment (of these, the newest
    first) from which the run continues, or None where no images are complete.

    Errors: those of a host that cannot be built, or is lost meanwhile.
    """
    rebuilt = False
    for moment in (one for one in moments if one.images):
        try:
            _check_groups(session, moment)
            readings = {name: images.readings() for name, images in moment.images.items()}
            values = {name: wait(_VALUES_SECONDS) for name, wait in moment.values.items()}
        except HybridFlowError as error:
            _refuse(moment, error)
            continue
        if not rebuilt:
            rebuild(session)
            rebuilt = True
        start, origins = time.time(), []
        try:
            for name, images in moment.images.items():
                origins.append(images.give(session.backend, session.groups[name].ranks, readings[name]))
        except (BrokenGroupError, HostLostError, WaitTimeoutError):
            raise
        except HybridFlowError as error:  # of images that were lost meanwhile
            _refuse(moment, error)
            continue
        own = {name for name, images in moment.images.items() if images.layout is not None}
        for name in own:
            session.groups[name].weights_changed()
        _restore_driver(session, moment, values)
        follow(session, {name: source for name, source in moment.sources.items() if name not in own})
        session.iterations.note("restart", "; ".join(origins), start)
        said = "continuing after %d iterations, from memory in %.1f s (%s)"
        logger.warning(said, moment.step, time.time() - start, "; ".join(origins))
        return moment
    return None


def _refuse(moment: Moment, error: HybridFlowError) -> None:
    said = "the run cannot continue from memory after %d iterations: %s"
    logger.warning(said, moment.step, str(error).splitlines()[0])


def _check_groups(session: Session, moment: Moment) -> None:
    """Errors: CheckpointError when groups were placed, closed or moved since, or one has no images."""

    def place(ranks: RankGroup) -> tuple[Any, ...]:
        return ranks.pool_name, ranks.members, ranks.grid, dict(ranks.settings)

    now = {name for name, group in session.groups.items() if group.training or name in moment.calls}
    moved = [
        name
        for name in moment.images
        if name in now and place(session.groups[name].ranks) != place(moment.images[name].ranks)
    ]
    if changed := sorted({*moved, *(now ^ set(moment.calls))}):
        raise CheckpointError(f"{', '.join(changed)}: placed, closed or moved after iteration {moment.step}")
    if missing := sorted((RunParts.of(session).workers.keys() & moment.calls.keys()) - moment.images.keys()):
        raise CheckpointError(f"{', '.join(missing)}: without images of iteration {moment.step}")


def _groups_on(session: Session, pools: Sequence[ResourcePool]) -> list[WorkerGroup]:
    """The groups with ranks, or ranks of a replica, on these pools."""
    names = {pool.name for pool in pools}
    return [group for group in session.groups.values() if any(r.pool_name in names for r in group.all_ranks)]


def _keep_state(session: Session, groups: Sequence[WorkerGroup]) -> bool:
    valued = RunParts.of(session).valued
    return any(group.training or group.name in valued for group in groups)


def _at(session: Session, moment: Moment, gone: Sequence[WorkerGroup]) -> bool:
    """Whether all other groups have the weights of this moment, and those of the lost groups are known.

    Calls of an iteration that a loss interrupted never run where their inputs are lost, or train nothing.
    """
    names = {group.name for group in gone}
    if any(moment.sources.get(name) is None or moment.sources[name] in names for name in names):
        return False
    for group in [group for name, group in session.groups.items() if name not in names]:
        issued, known = moment.calls.get(group.name, Counter()), group.training
        written = group.weights_version - moment.versions.get(group.name, 0)
        written -= sum(group.calls_issued[call] - issued[call] for call in known)
        if written and not moment.sources.get(group.name):  # by a transfer since
            return False
        ran = session.backend.calls(group.ranks) if known else ()  # waits for all earlier calls
        if any(rank.get(call, 0) != issued[call] for rank in ran for call in known):
            return False
    return True


def _step_back(session: Session, moment: Moment) -> None:
    """Give the driver's objects and the groups that stay what they had then."""
    _restore_driver(session, moment, {name: wait() for name, wait in moment.values.items()})
    for name, calls in moment.calls.items():
        if (group := session.groups.get(name)) is not None:
            group.calls_issued = calls.copy()
            if source := moment.sources[name]:
                group.weights_changed(session.groups[source])


def _restore_driver(session: Session, moment: Moment, values: Mapping[str, Sequence[Any]]) -> None:
    """Give the driver's objects, and groups of other classes than Worker, what they had then."""
    for name, part in session.parts.items():
        if isinstance(part, Tracker):
            part.load_state(part.state(moment.step))
        elif name in moment.states:
            part.load_state(copy.deepcopy(moment.states[name]))
    for wait in [wait for name, value in values.items() for wait in give_values(session, session.groups[name], value)]:
        wait()
    set_random_state(moment.random)

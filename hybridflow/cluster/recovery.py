"""Recovery: replaces the host processes of a session after one was lost, and builds its groups again."""

from __future__ import annotations

from hybridflow.cluster.session import Session


def rebuild(session: Session) -> None:
    """Start new hosts for every pool and build all groups as they were placed; their weights are those of their model
    directories again. Peers of a lost host may be in a collective, so no host is kept.

    Errors: PlacementError when the cluster no longer has the devices, WorkerError when a rank cannot be built.
    """
    pools = {pool.name: pool for pool in [*session.pools, session.controller_pool]}
    session.iterations.reset()
    session.backend.channels.reset()
    for pool in pools.values():
        pool.rebuild()
    for group in list(session.groups.values()):
        group.rebuild(pools)

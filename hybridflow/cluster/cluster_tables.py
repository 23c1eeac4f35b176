"""Tables of groups and pools for notebooks: what the driver knows, without asking a process."""

from __future__ import annotations

from typing import Any

from hybridflow import markup


def group_table(group: Any) -> str:
    """A `WorkerGroup`: devices, model and strategies, and the calls that its ranks were given."""
    shown = {name: group.settings.get(name) for name in ("model", "train", "generate")}
    closed = f", closed{group.closed}" if group.closed else ""
    rows = [("devices", f"{list(group.members)} of pool {group.pool_name}{closed}")]
    rows += [(name, markup.shown(value)) for name, value in shown.items() if value is not None]
    rows += [(f".{name}(...)", f"{group.calls_issued[name]} calls") for name in group.operations]
    return markup.table(repr(group)[1:-1], (), rows)


def pool_table(pool: Any) -> str:
    """A `ResourcePool`: node and groups of each device."""
    groups, rows = list(pool.session.groups.values()), []
    for device in pool.members:
        host, here = pool.hosts[device], list[str]()
        for group in groups:
            if any(ranks.pool_name == pool.name and device in ranks.members for ranks in group.all_ranks):
                here.append(group.name)
        rows.append((str(device), host.node_name or str(host.node), ", ".join(here) or "-"))
    return markup.table(repr(pool), ("device", "node", "groups"), rows)

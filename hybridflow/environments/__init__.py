"""Agents that act over several turns, and what they say as rows to train on; environments of servers.

Read in this order: `tool_calls` and `rendering` (messages to token ids and back, never rendering sampled tokens again),
`conversation` (the model as an agent sees it), `acting` (the loops of tools, environments and programs), `trajectory`
(turns to rows), `session_process` and `sessions` (where agents run, and the host that answers them), `servers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.lazy_names import LazyNames

if TYPE_CHECKING:
    from hybridflow.environments.servers import mcp, openenv  # noqa: F401

_names = LazyNames(__name__)
__getattr__, __dir__, __all__ = _names.load, _names.listed, [*_names.modules]

"""Agents that act over several turns, and what they say as rows to train on; environments of other packages.

Read in this order: `tool_calls` and `rendering` (messages to token ids and back, never rendering sampled tokens again),
`trajectory` (turns to rows), `conversation` (the model as an agent sees it), `acting` (the loops of tools, environments
and programs), `session_process` and `sessions` (where they run, and the host that answers them), `interpreter`
(environments in another interpreter), `packages` and `mcp_tools` (those of other libraries). Public
names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.lazy_names import LazyNames

if TYPE_CHECKING:
    from hybridflow.environments.interpreter import process  # noqa: F401
    from hybridflow.environments.mcp_tools import mcp  # noqa: F401
    from hybridflow.environments.packages import gymnasium, openenv, reasoning_gym, skyrl_gym, textarena  # noqa: F401

_names = LazyNames(__name__)
__getattr__, __dir__, __all__ = _names.load, _names.listed, [*_names.modules]

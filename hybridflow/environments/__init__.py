"""Agents that act over several turns, and what they say as rows to train on; environments of other packages.

Read in this order: `tool_calls` and `rendering` (messages to token ids and back, never rendering sampled tokens again),
`trajectory` (turns to rows), `conversation` (the model as an agent sees it), `acting` (the loops of tools, environments
and programs), `session_process` and `sessions` (where they run, and the host that answers them), `interpreter`
(environments in another interpreter), `packages` and `mcp_tools` (those of other libraries). Public
names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.environments.interpreter import process  # noqa: F401
    from hybridflow.environments.mcp_tools import mcp  # noqa: F401
    from hybridflow.environments.packages import gymnasium, openenv, reasoning_gym, skyrl_gym, textarena  # noqa: F401

_WHERE = {
    "interpreter": ("process",),
    "mcp_tools": ("mcp",),
    "packages": ("gymnasium", "openenv", "reasoning_gym", "skyrl_gym", "textarena"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hybridflow.environments' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hybridflow.environments.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

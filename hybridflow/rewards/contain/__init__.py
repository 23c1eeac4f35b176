"""Contained execution of programs that nobody has read: namespaces, or Landlock and seccomp, and limits in both.

Names are loaded when they are first used: the process that programs are forked from imports only what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.rewards.contain.limits import ContainedResult as ContainedResult
    from hybridflow.rewards.contain.limits import Judgement as Judgement
    from hybridflow.rewards.contain.limits import Limits as Limits
    from hybridflow.rewards.contain.sandbox import Sandbox as Sandbox
    from hybridflow.rewards.contain.sandbox import containment as containment
    from hybridflow.rewards.contain.sandbox import run_contained as run_contained

_MODULE_OF = {
    **dict.fromkeys(("ContainedResult", "Judgement", "Limits"), "limits"),
    **dict.fromkeys(("Sandbox", "containment", "run_contained"), "sandbox"),
}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hybridflow.rewards.contain' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hybridflow.rewards.contain.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value

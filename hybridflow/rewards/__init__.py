"""Rewards from Python functions: conventions, weights, limits, and verifiers that check an answer.

Names are loaded when they are first used: a worker process that runs one function imports only what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.rewards.code import PRELUDE, Code  # noqa: F401
    from hybridflow.rewards.function_adapters import (  # noqa: F401
        RowFailure,
        from_compute_score,
        per_row,
        whole_batch,
    )
    from hybridflow.rewards.functions import Functions, Scores  # noqa: F401
    from hybridflow.rewards.match import Exact, Numeric, Overlong, Regex  # noqa: F401
    from hybridflow.rewards.math import Math  # noqa: F401
    from hybridflow.rewards.process_pool import Outcome, ProcessPool  # noqa: F401

_WHERE = {
    "function_adapters": ("RowFailure", "from_compute_score", "per_row", "whole_batch"),
    "code": ("PRELUDE", "Code"),
    "functions": ("Functions", "Scores"),
    "match": ("Exact", "Numeric", "Overlong", "Regex"),
    "math": ("Math",),
    "process_pool": ("Outcome", "ProcessPool"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hybridflow.rewards' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hybridflow.rewards.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

"""Rewards from Python functions: conventions, weights, limits, and verifiers that check an answer.

Names are loaded when they are first used: a worker process that runs one function imports only what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.rewards.code import Code as Code
    from hybridflow.rewards.function_adapters import RowFailure as RowFailure
    from hybridflow.rewards.function_adapters import from_compute_score as from_compute_score
    from hybridflow.rewards.function_adapters import per_row as per_row
    from hybridflow.rewards.functions import Functions as Functions
    from hybridflow.rewards.functions import Scores as Scores
    from hybridflow.rewards.match import Exact as Exact
    from hybridflow.rewards.match import Numeric as Numeric
    from hybridflow.rewards.match import Overlong as Overlong
    from hybridflow.rewards.match import Regex as Regex
    from hybridflow.rewards.math import Math as Math
    from hybridflow.rewards.process_pool import Outcome as Outcome
    from hybridflow.rewards.process_pool import ProcessPool as ProcessPool

_WHERE = {
    "function_adapters": ("RowFailure", "from_compute_score", "per_row"),
    "code": ("Code",),
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

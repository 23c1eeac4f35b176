"""Rewards from Python functions: conventions, weights, limits, and verifiers that check an answer.

Names are loaded when they are first used: a worker process that runs one function imports only what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridflow.lazy_names import LazyNames

if TYPE_CHECKING:
    from hybridflow.rewards.code import PRELUDE, Code  # noqa: F401
    from hybridflow.rewards.function_adapters import (  # noqa: F401
        RowFailure,
        from_compute_score,
        per_row,
        whole_batch,
    )
    from hybridflow.rewards.functions import Functions, Scores  # noqa: F401
    from hybridflow.rewards.match import Exact, Math, Numeric, Overlong, Regex  # noqa: F401

_names = LazyNames(__name__)
__getattr__, __dir__, __all__ = _names.load, _names.listed, [*_names.modules]

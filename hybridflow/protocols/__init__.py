"""Transfer protocols: pure values that split inputs over ranks and join outputs (paper, table 3)."""

from hybridflow.protocols.operation import Operation, OperationKind, kind_of, operations, register
from hybridflow.protocols.protocol import (
    ALL_TO_ALL,
    DP_PROTO,
    ONE_TO_ALL,
    ONE_TO_ONE,
    SKIP,
    THREE_D_ALL_MICRO_DP,
    THREE_D_PP_AS_DP,
    THREE_D_PP_ONLY,
    THREE_D_PROTO,
    Protocol,
    Rows,
    join,
)

__all__ = [
    "ALL_TO_ALL",
    "DP_PROTO",
    "ONE_TO_ALL",
    "ONE_TO_ONE",
    "SKIP",
    "THREE_D_ALL_MICRO_DP",
    "THREE_D_PP_AS_DP",
    "THREE_D_PP_ONLY",
    "THREE_D_PROTO",
    "Operation",
    "OperationKind",
    "Protocol",
    "Rows",
    "join",
    "kind_of",
    "operations",
    "register",
]

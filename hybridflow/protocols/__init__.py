"""Transfer protocols: the value and the eight of the paper's table 3 (`protocol.py`), and the declaration of
operations, `@register` (`operation.py`)."""

from hybridflow.protocols.operation import Operation as Operation
from hybridflow.protocols.operation import register as register
from hybridflow.protocols.protocol import ALL_TO_ALL as ALL_TO_ALL
from hybridflow.protocols.protocol import DP_PROTO as DP_PROTO
from hybridflow.protocols.protocol import ONE_TO_ALL as ONE_TO_ALL
from hybridflow.protocols.protocol import ONE_TO_ONE as ONE_TO_ONE
from hybridflow.protocols.protocol import SKIP as SKIP
from hybridflow.protocols.protocol import THREE_D_ALL_MICRO_DP as THREE_D_ALL_MICRO_DP
from hybridflow.protocols.protocol import THREE_D_PP_AS_DP as THREE_D_PP_AS_DP
from hybridflow.protocols.protocol import THREE_D_PP_ONLY as THREE_D_PP_ONLY
from hybridflow.protocols.protocol import THREE_D_PROTO as THREE_D_PROTO
from hybridflow.protocols.protocol import Protocol as Protocol
from hybridflow.protocols.protocol import Rows as Rows
from hybridflow.protocols.protocol import join as join

"""From a dataflow graph to the best placement. Pure arithmetic: nothing here starts a process or touches a device.

Read in this order:

1. `describe/`: what is planned. `cluster_spec`, `workload`, `graph` (the calls of an iteration), `mesh` (where they
   run) and the user's `constraints`.
2. `cost/`: seconds and bytes. `simulator` prices one call; `call_cost` and `device_memory` have its formulas, over
   `pipeline_cost`, `layer_costs` and `hardware`; `reallocation_cost` prices weights that move, `timeline` when each
   call runs. `calibration` and `layer_profile` fit all of it to a machine.
3. `search/`: the search `problem`; `auto_mapping` (HybridFlow) places groups, `exact` and `mcmc` (ReaL) place calls,
   `similarity` (PUZZLE) cuts groups that share all devices. `planning` is the one entry.
4. `explain`: why nothing fits, and which layout came second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridflow.planner.cost.calibration import Observation as Observation
    from hybridflow.planner.cost.calibration import calibrate as calibrate
    from hybridflow.planner.cost.hardware import Coefficients as Coefficients
    from hybridflow.planner.cost.layer_profile import LayerProfile as LayerProfile
    from hybridflow.planner.describe.cluster_spec import ClusterSpec as ClusterSpec
    from hybridflow.planner.describe.cluster_spec import DeviceSpec as DeviceSpec
    from hybridflow.planner.describe.cluster_spec import NodeSpec as NodeSpec
    from hybridflow.planner.describe.constraints import Apart as Apart
    from hybridflow.planner.describe.constraints import Cap as Cap
    from hybridflow.planner.describe.constraints import OneLayout as OneLayout
    from hybridflow.planner.describe.constraints import Pin as Pin
    from hybridflow.planner.describe.constraints import Together as Together
    from hybridflow.planner.describe.mesh import Parallel as Parallel
    from hybridflow.planner.describe.workload import Workload as Workload
    from hybridflow.planner.search.planning import plan as plan

_WHERE = {
    "cost.calibration": ("Observation", "calibrate"),
    "cost.hardware": ("Coefficients",),
    "cost.layer_profile": ("LayerProfile",),
    "describe.cluster_spec": ("ClusterSpec", "DeviceSpec", "NodeSpec"),
    "describe.constraints": ("Apart", "Cap", "OneLayout", "Pin", "Together"),
    "describe.mesh": ("Parallel",),
    "describe.workload": ("Workload",),
    "search.planning": ("plan",),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = list(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'hybridflow.planner' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hybridflow.planner.{_MODULE_OF[name]}"), name)

"""From a dataflow graph to the best placement. Pure arithmetic: nothing here starts a process or touches a device.

`describe` has the inputs: cluster, workload, the calls of an iteration, sizes of models, meshes, the user's
constraints. `cost` prices them in seconds and bytes: read `costs` first, then `call_cost`, `device_memory`,
`reallocation_cost` and `timeline`. `search` finds the placement: `planning` is the entry, and says what does not fit;
`auto_mapping` (HybridFlow) places groups by the cost of `stages`, `call_search` (ReaL) places calls, `all_devices`
(PUZZLE, and symmetric plans) cuts groups that share all devices. `loops` prices the workload as other loops. On their
own: `stream_simulation`, loops whose generation runs ahead of training by the rules of `admission`; `elastic`, devices
that move between both; `pipeline`, schedules; `checkpoint_interval`."""

from __future__ import annotations

from hybridflow.planner.checkpoint_interval import (
    PUBLISHED,
    CheckpointCosts,
    FailureModel,
    checkpoint_every,
    checkpoint_interval,
    effective_share,
)
from hybridflow.planner.cost.calibration import Observation, calibrate
from hybridflow.planner.cost.hardware import Coefficients, LayerProfile
from hybridflow.planner.describe.cluster_spec import ClusterSpec, DeviceSpec, NodeSpec
from hybridflow.planner.describe.constraints import Apart, Cap, OneLayout, Pin, Together
from hybridflow.planner.describe.mesh import Parallel
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.elastic.policies import gain, lend, rlinf, static, valid_sizes
from hybridflow.planner.elastic.simulation import ElasticRun, SimulatedIterations, best_static, simulate_elastic
from hybridflow.planner.elastic.state import (
    Allocate,
    Component,
    Finalize,
    Migrate,
    Release,
    RunningGroup,
    Speeds,
    State,
    Wait,
)
from hybridflow.planner.loops import ElasticPlan, plan_elastic
from hybridflow.planner.search.planning import plan
from hybridflow.planner.stream_simulation import (
    DecodingSpeed,
    ResponseLengths,
    SimulatedStream,
    StreamRun,
    simulate_stream,
)

__all__ = [
    "PUBLISHED", "Allocate", "Apart", "Cap", "CheckpointCosts", "ClusterSpec", "Coefficients", "Component",
    "DecodingSpeed", "DeviceSpec", "ElasticPlan", "ElasticRun", "FailureModel", "Finalize", "LayerProfile",
    "Migrate", "NodeSpec", "Observation", "OneLayout", "Parallel", "Pin", "Release", "ResponseLengths",
    "RunningGroup", "SimulatedIterations", "SimulatedStream", "Speeds", "State", "StreamRun",
    "Together", "Wait", "Workload", "best_static", "calibrate", "checkpoint_every", "checkpoint_interval",
    "effective_share", "gain", "lend", "plan", "plan_elastic", "rlinf", "simulate_elastic",
    "simulate_stream", "static", "valid_sizes",
]  # fmt: skip

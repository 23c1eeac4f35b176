"""Estimate: what the calls of a driver take on each device, by running its engines on tensors without memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hybridflow.config import VLLM, DType
from hybridflow.engines.call_estimate import CallEstimate, CallRows, estimate_rank
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.engines.worker_spec import spec_of
from hybridflow.errors import PlacementError
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.spec import ModelSpec
from hybridflow.placement import GIB, Placement
from hybridflow.planner.cost.backends import Backend
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.device_memory import DeviceMemory
from hybridflow.planner.cost.hardware import BYTES
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Call
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.planner.describe.workload import Lengths, Workload
from hybridflow.topology import RankGrid, even_bounds
from hybridflow.tracing.auto import Given, workload_of
from hybridflow.tracing.trace import ModelSource, Trace, trace_driver
from hybridflow.workers.placing import apply_placement


@dataclass(frozen=True)
class EstimatedCall:
    """`found` is that of the fullest of the group's ranks; `predicted` are the planner's bytes."""

    name: str
    layout: str
    rank: int
    found: CallEstimate
    predicted: DeviceMemory

    def __str__(self) -> str:
        found, planned = self.found, self.predicted
        held = ", ".join(f"{owner} {size / GIB:.2f}" for owner, size in found.held.items() if size)
        sent = ", ".join(
            f"{count:.0f} x {kind} {size / GIB:.3g} GiB" for kind, (count, size) in found.collectives.items()
        )
        return (
            f"{self.name} ({self.layout}, rank {self.rank}): {found.peak / GIB:.2f} GiB (planner: "
            f"{(planned.static + planned.active) / GIB:.2f}): {held}, activations and buffers {found.active / GIB:.2f} "
            f"(planner: {planned.active / GIB:.2f}); {found.flops:.3g} FLOP; {sent or 'no collectives'}"
        )


@dataclass(frozen=True)
class _Layout:
    """A model on a number of devices, and the calls that it runs there."""

    group: str
    strategy: Any
    devices: int
    trains: bool

    @property
    def grid(self) -> RankGrid:
        return self.strategy.grid(self.devices)

    def ranks(self, layers: int) -> list[int]:
        """One for each number of layers of a pipeline's first, middle and last stages; the first of alike ones keeps
        most activations."""
        grid, split = self.grid, getattr(self.strategy, "stage_layers", None)
        bounds = even_bounds(layers, grid.p)
        count = split or [bounds[p + 1] - bounds[p] for p in range(grid.p)]
        shapes = dict[tuple[int, bool, bool], int]()
        for p in range(grid.p):
            shapes.setdefault((count[p], p == 0, p == grid.p - 1), grid.rank(p, 0, 0))
        return list(shapes.values())


def estimate_driver(
    driver: Callable[..., Any],
    *arguments: Any,
    cluster: ClusterSpec | str,
    workload: Given = None,
    models: Mapping[str, ModelSource] | None = None,
    placement: Placement | None = None,
) -> list[EstimatedCall | str]:
    """Each call of the loop of `driver(*arguments)` that trains or computes on a model, in the layout of `placement`,
    without one as the driver asks for, on all devices of the cluster; of other calls, and of images, a sentence.

    The driver is traced (`tracing.trace_driver`, also for `models`), and its engines are run on a `FakeDevice`: nothing
    is started, no weight is read, and no memory taken. Errors: ConfigError, those of the trace and of the engines,
    PlacementError for a placement of other groups or sizes that do not divide the devices.
    """
    spec = ClusterSpec.of(cluster)
    found = trace_driver(driver, *arguments, models=models)
    work = workload_of(found, workload, spec)
    layouts = dict[_Layout, list[Call]]()
    out = dict[str, EstimatedCall | str]()
    for call in found.graph.calls:
        if found.graph.models.get(call.group) is None or call.kind == "function":
            out[call.name] = f"{call.name}: a function, without a model on the devices"
        elif call.kind == "generation":
            given = found.groups[call.group].settings
            settings = given if placement is None else apply_placement(placement.groups[call.group], given)
            how, model = settings.get("generate"), found.graph.models[call.group]
            out[call.name] = f"{call.name}: generation is not run{_generating(how, model, work)}"
        else:
            out[call.name] = ""
            layouts.setdefault(_layout(found, call, spec, placement, work), []).append(call)
    for layout, calls in layouts.items():
        out |= {one.name: one for one in _estimated(found, layout, calls, spec, work)}
    if seeing := sorted({one.group for one in layouts if getattr(found.graph.models[one.group], "images", None)}):
        out["images"] = f"images are not counted: rows are text, and encoding images takes more of {', '.join(seeing)}"
    return list(out.values())


def _generating(how: Any, model: Decoder | None, work: Workload) -> str:
    if not isinstance(how, VLLM):
        return ""
    share = f", within VLLM(memory_fraction={how.memory_fraction:g}) of the device"
    if not isinstance(model, ModelSpec):
        return share
    weights, cache = generation_bytes(how, model, work.dtype)
    return (
        f"; its weights take {weights / GIB:.3g} GiB, and keys and values {1024 * cache / GIB:.3g} GiB of each 1,024 "
        f"tokens{share}"
    )


def generation_bytes(how: VLLM, model: ModelSpec, dtype: DType) -> tuple[int, int]:
    """Of weights on the rank with most, and of a token's keys and values."""
    size, layout = BYTES[how.dtype or dtype], vllm_layout(model, RankGrid(how.pp, how.tp).generation(how.pp, how.tp))
    weights = max(sum(region.box.numel for region in layout.regions(rank)) for rank in range(layout.ranks))
    return size * weights, 2 * size * -(-model.layers // how.pp) * round(Sizes.of(model).keys_on(how.tp))


def _layout(found: Trace, call: Call, spec: ClusterSpec, placement: Placement | None, work: Workload) -> _Layout:
    given, devices = found.groups[call.group], spec.size
    settings, trains = dict(given.settings), call.group in found.graph.trained
    if placement is not None:
        if (where := placement.groups.get(call.group)) is None:
            raise PlacementError(f"the placement has no group {call.group!r}; it has {', '.join(placement.groups)}.")
        settings, devices = apply_placement(where, settings), len(where.devices)
        apart = [one for one in where.elsewhere if one.method == call.method and one.devices != where.devices]
        if apart and call.kind != "training":
            own = Backend.of(settings["train"]).sized(Parallel.read(apart[0].sizes))
            settings, devices, trains = {**settings, "train": own}, len(apart[0].devices), False
    strategy = settings["train"]
    spec_of(given.worker_class, {**given.settings, "train": strategy}).grid(devices)  # refuses sizes
    return _Layout(call.group, replace(strategy, dtype=strategy.dtype or work.dtype), devices, trains)


def _estimated(
    found: Trace, layout: _Layout, calls: list[Call], spec: ClusterSpec, given: Workload
) -> Iterator[EstimatedCall]:
    strategy, grid, model = layout.strategy, layout.grid, found.graph.models[layout.group]
    assert model is not None
    work = replace(
        given,
        **{name: getattr(strategy, name) for name in ("micro_tokens", "recompute", "dtype")},
        sequence_parallel=getattr(strategy, "sequence_parallel", False),
    )
    costs = Costs(spec, replace(found.graph, strategies={layout.group: strategy}), work)
    sizes = [getattr(strategy, name, 1) for name in ("cp", "ep")]
    parallel = costs.backends[layout.group].parallel(grid.p, grid.t, grid.d, *sizes)
    assert parallel is not None, "the strategy has checked its sizes"
    plan, asked = CallPlan(Mesh.of(0, layout.devices), parallel), dict[str, CallRows]()
    for call in calls:
        minibatches, epochs = costs.minibatches(call) if call.kind == "training" else (1, 1)
        count = max(1, math.ceil(work.rows * call.rows / minibatches / grid.d))
        kind = "training" if call.kind == "training" else "inference"
        asked[call.name] = CallRows(
            kind, list(zip(*(spread(n, count) for n in (work.prompt, work.response)))), minibatches * epochs
        )
    optimizer = found.groups[layout.group].settings.get("optim") if layout.trains else None
    ranks = layout.ranks(model.layers)
    each = [estimate_rank(layout.group, rank, grid, strategy, model, optimizer, asked) for rank in ranks]
    for call in calls:
        rank, most = max(zip(ranks, each, strict=True), key=lambda one: one[1][call.name].peak)
        still = costs.resting(layout.group, plan)
        still = still if layout.trains else DeviceMemory(parameters=still.parameters)
        added = costs.added(call.name, plan)
        predicted = replace(added, **{name: getattr(still, name) for name in ("parameters", "gradients", "optimizer")})
        yield EstimatedCall(call.name, str(plan), rank, most[call.name], replace(predicted, visiting=0.0))


def spread(lengths: Lengths, count: int) -> list[int]:
    """`count` whole lengths as evenly around the mean as the maximum lets them be, one of them the maximum."""
    wide = min(lengths.max - lengths.mean, lengths.mean - 1)
    steps = [2 * i / (count - 1) - 1 for i in range(count)] if count > 1 else [0.0]
    found = [max(1, round(lengths.mean + wide * step)) for step in steps]
    return [*found[:-1], max(1, round(lengths.max))]

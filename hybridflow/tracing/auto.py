"""`hf.auto`: traces a driver, plans its placement, and runs it there."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hybridflow.cluster.session import Session
from hybridflow.config import IMAGE_TOKENS, Megatron
from hybridflow.errors import ConfigError, PlacementError, nearest
from hybridflow.placement import Placement
from hybridflow.planner.cost.hardware import DEFAULT, Coefficients, LayerProfile
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.constraints import Apart, Constraint, OneLayout
from hybridflow.planner.describe.workload import Lengths, Workload
from hybridflow.planner.loops import ElasticPlan, plan_elastic
from hybridflow.planner.search.deadline import Deadline
from hybridflow.planner.search.planning import LEAST, Search, plan
from hybridflow.tracing.trace import ModelSource, Trace, trace_driver
from hybridflow.workers.placing import PRICED, can_replicate, chosen

T = TypeVar("T")
logger = logging.getLogger(__name__)
_PROMPT, _RESPONSE = 512, 512  # tokens, where the driver says nothing
Given = Workload | Mapping[str, Any] | int | None
"""The workload of an iteration: complete, some fields by name, or its rows; the trace gives the rest."""


def plan_driver(
    driver: Callable[..., Any],
    *arguments: Any,
    cluster: ClusterSpec | str = "here",
    workload: Given = None,
    constraints: Sequence[Constraint] = (),
    models: Mapping[str, ModelSource] | None = None,
    coefficients: Coefficients = DEFAULT,
    profile: LayerProfile | None = None,
    budget_s: float | Deadline = 10.0,
    seed: int = 0,
    per_call: bool = True,
    search: Search = "auto",
    staleness: int | None = None,
) -> Placement:
    """The placement of the groups of `driver(*arguments)` that takes the least time per iteration, as predicted.

    The driver is traced (see `tracing.trace_driver`, also for `models`), and placements are searched (`search` and
    `staleness` as for `planner.plan`), in `budget_s` seconds for both; after a trace that took them all, in one.

    With `per_call=False` all calls of a group have one layout, with generation sizes inside it; groups that train
    adapters or have no `Worker.replica` always do. If the models do not fit otherwise and the driver does not set it,
    activations are recomputed (`recompute`).

    Errors: ConfigError, those of the trace, PlacementError when the cluster is too small.
    """
    deadline, spec = Deadline.of(budget_s), ClusterSpec.of(cluster)
    found = trace_driver(driver, *arguments, models=models)
    deadline = deadline.at_least(LEAST)
    work = workload_of(found, workload, spec)
    rules = [*constraints, *(OneLayout(name) for name in whole(found)), *alone(found)]

    def planned(work: Workload, last: bool) -> Placement:
        how: dict[str, Any] = {"coefficients": coefficients, "profile": profile, "budget_s": deadline, "seed": seed}
        how |= {"share_rows": last, "staleness": staleness}
        return as_priced(plan(found.graph, spec, work, rules, per_call=per_call, search=search, **how), work)

    placed = _fitting(found, workload, work, planned)
    hint = "devices move in iterations of hf.Elastic: plan_elastic(...) of the driver prices that, not this placement"
    return replace(placed, shape=hint, loops=None) if found.elastic else placed


def _fitting(found: Trace, given: Given, work: Workload, planned: Callable[[Workload, bool], T]) -> T:
    """`planned(work, last)`, with recomputation where that alone makes the models fit and the driver does not set it;
    `last`: there is no other way."""
    said = isinstance(given, Workload) or (isinstance(given, Mapping) and "recompute" in given)
    if work.recompute or said or not found.graph.trained:
        return planned(work, True)
    try:
        return planned(work, False)
    except PlacementError as error:
        logger.info("%s Activations are computed again instead.", error)
    return planned(replace(work, recompute=True), True)


def whole(found: Trace) -> list[str]:
    """Groups of models that cannot have replicas in other layouts; a stream generates in the group's own processes."""
    placed = {name: found.groups[name] for name in found.graph.groups if found.graph.models[name] is not None}
    streams = {call.group for call in found.graph.calls if call.continuous}
    one = {name for name, group in placed.items() if not can_replicate(group.worker_class, group.settings)}
    return [name for name in placed if name in streams or name in one]


def alone(found: Trace) -> list[Apart]:
    """Keeps generating groups on disjoint devices: a host can hold one vLLM engine."""
    generating = [name for name in found.graph.groups if found.groups[name].settings.get("generate") is not None]
    return [Apart(*pair) for pair in itertools.combinations(generating, 2)]


def as_priced(placement: Placement, work: Workload) -> Placement:
    """The placement with the settings in `PRICED` that its prices assume."""
    groups = dict(placement.groups)
    for name, group in groups.items():
        if (train := group.train) is not None:
            own: dict[str, Any] = {"micro_tokens": work.micro_tokens, "recompute": work.recompute}
            if isinstance(train, Megatron):
                own["sequence_parallel"] = work.sequence_parallel and train.tp > 1
            groups[name] = replace(group, train=replace(train, **own))
    return replace(placement, groups=groups)


def workload_of(found: Trace, given: Given, cluster: ClusterSpec) -> Workload:
    """The workload of a traced driver; fields that are not `given` come from the trace: rows, prompts of its batches,
    patches of their images, responses of maximum length. Errors: ConfigError for an unknown field."""
    if isinstance(given, Workload):
        return given
    own = {"rows": given} if isinstance(given, int) else dict(given or {})
    if unknown := [name for name in own if name not in Workload.__dataclass_fields__]:
        raise ConfigError(f"workload has no {unknown[0]!r}.{nearest(unknown[0], Workload.__dataclass_fields__)}")
    drawn = found.sampled
    engines = (group.settings.get("generate") for group in found.groups.values())
    streams = [found.groups[call.group].settings["generate"] for call in found.graph.calls if call.continuous]
    trains = [group.settings["train"] for group in found.groups.values() if group.settings.get("optim") is not None]
    # processors have no fast 16-bit arithmetic, and the engines compute in float32 there
    generating = [engine for engine in engines if engine is not None]
    fields: dict[str, Any] = {
        "rows": found.rows,
        "responses_per_prompt": drawn.factor if drawn else 1,
        "prompt": Lengths.of(list(drawn.prompt_tokens)) if drawn and drawn.prompt_tokens else Lengths.of(_PROMPT),
        "response": Lengths.of((drawn and drawn.max_tokens) or _RESPONSE),
        "dtype": "float32" if cluster.node.device.name == "host" else "bfloat16",
        "patches": drawn.patches if drawn else 0,
        "image_tokens": max((engine.image_tokens for engine in generating), default=IMAGE_TOKENS),
        "cuda_graphs": not any(engine.eager for engine in generating),
        "kv": streams[0].kv if streams else "recompute",
    }
    if trains:  # the driver's own choice: the first group's, for all groups
        fields |= {name: value for name in PRICED if (value := chosen(trains[0], name)) is not None}
    if "rows" in own and "responses_per_prompt" not in own and own["rows"] % fields["responses_per_prompt"]:
        raise ConfigError(
            f"workload={own['rows']}: these are responses, and the driver draws {fields['responses_per_prompt']} for "
            f"each prompt. Give a multiple of that."
        )
    fields |= own
    return Workload(**fields)


_OPTIONS, _ELASTIC = (
    tuple(p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY)
    for function in (plan_driver, plan_elastic)
)


class AutoDriver:
    """A driver that is placed automatically: calling it plans and runs it, `plan(...)` only plans."""

    def __init__(self, driver: Callable[..., Any], placement: Placement | None, options: Mapping[str, Any]) -> None:
        functools.update_wrapper(self, driver)
        self.driver, self.placement, self.options = driver, placement, dict(options)

    def __get__(self, instance: Any, owner: type | None = None) -> AutoDriver:
        """Binds a method to its object."""
        if instance is None:
            return self
        return AutoDriver(self.driver.__get__(instance, owner), self.placement, self.options)

    def plan(self, *arguments: Any, **named: Any) -> Placement:
        """The placement of a call with these arguments. Keyword arguments of `plan_driver` override the decorator's."""
        changes = {name: named.pop(name) for name in list(named) if name in _OPTIONS}
        return plan_driver(functools.partial(self.driver, *arguments, **named), **(self.options | changes))

    def plan_elastic(self, *arguments: Any, **named: Any) -> ElasticPlan:
        """How to split the devices between rollouts and the actor, and whether devices that move pay (`hf.Elastic`):
        for the loop of a call with these arguments. Keyword arguments of `hf.planner.plan_elastic` are its options;
        `cluster`, `workload` and `models` override the decorator's."""
        options = {name: named.pop(name) for name in list(named) if name in _ELASTIC}
        given = self.options | {name: named.pop(name) for name in list(named) if name in _OPTIONS}
        options = {name: given[name] for name in ("coefficients", "profile") if name in given} | options
        spec, workload = ClusterSpec.of(given["cluster"]), given["workload"]
        driver = functools.partial(self.driver, *arguments, **named)
        found = trace_driver(driver, models=given.get("models"))
        own = workload_of(found, workload, spec)
        return _fitting(found, workload, own, lambda work, _: plan_elastic(found.graph, spec, work, **options))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        driver = functools.partial(self.driver, *arguments, **named)
        if (session := Session.existing()) is not None and session.traces:  # an outer trace plans for it
            return driver()
        if Session.assignment is not None:  # and an outer placement holds for it
            if self.placement is not None:
                logger.warning("%s has a placement of its own, which gives way to the outer one", self.driver)
            return driver()
        placement = self.placement or plan_driver(driver, **self.options)
        logger.info("%s runs as planned:\n%s", getattr(self.driver, "__name__", self.driver), placement)
        before = Session.existing()
        try:
            with Session.assigning(placement):
                result = driver()
                if (session := Session.existing()) is not None:
                    session.check_assignment()
                return result
        except PlacementError as error:
            opened = Session.existing()
            if opened is None or opened is before or opened.pools:
                raise
            opened.shutdown()  # its cluster is too small for the placement
            where = placement.cluster or list(placement.nodes)
            raise PlacementError(
                f'this was planned for {where}, which is not here: {error} Plan with cluster="here" for what is here.'
            ) from None


def auto(
    driver: Callable[..., Any] | None = None,
    *,
    cluster: ClusterSpec | str = "here",
    workload: Given = None,
    placement: Placement | str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Decorates a driver function: each call finds the best placement of its groups, and runs it with that.

    `cluster` is planned for and used ("a100:16x8", "here", a `ClusterSpec`); `workload` overrides the traced one (rows,
    a `Workload`, or some fields: `{"response": (300, 1024)}`). Further options are those of `plan_driver`. A
    `placement` (or its file) replaces the search.

    The driver needs no changes. It runs twice: traced for a few iterations, then for real. Its pools become one over
    the whole cluster; each group gets the devices and the sizes in `train=` and `generate=` that were found. The
    planner's settings (`PRICED`, `memory_fraction`) replace defaults only; all other settings are the driver's own.
    """
    if placement is not None and (workload is not None or options):
        raise ConfigError("auto(placement=...) searches nothing: leave out workload and the options of the search.")
    if unknown := [name for name in options if name not in _OPTIONS]:
        raise ConfigError(f"auto has no option {unknown[0]!r}.{nearest(unknown[0], _OPTIONS)}")
    known = placement if isinstance(placement, Placement) or placement is None else Placement.load(Path(placement))
    settings = {"cluster": cluster, "workload": workload, **options}
    if driver is None:
        return functools.partial(AutoDriver, placement=known, options=settings)
    return AutoDriver(driver, known, settings)

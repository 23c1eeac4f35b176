"""Trace: runs a loop without processes, devices or weights, and records its dataflow graph (`hf.trace`)."""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hybridflow.algorithms.losses.distillation import TEACHER
from hybridflow.batch.batch import Batch
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config import TrainStrategy
from hybridflow.engines.worker_spec import spec_of
from hybridflow.errors import CheckpointError, ConfigError, HybridFlowError, nearest
from hybridflow.models.hf_spec import Decoder, spec_of_config
from hybridflow.models.spec import PUBLISHED, Head, ModelSpec
from hybridflow.placement import Placement
from hybridflow.planner.describe.graph import Graph, Width, keeps_average
from hybridflow.settings import require
from hybridflow.tracing.trace_backend import NoProcessError, SampledRows, TraceBackend, placeholder_columns
from hybridflow.workers.model_worker import find_checkpoint
from hybridflow.workers.placing import place

logger = logging.getLogger(__name__)

ModelSource = str | os.PathLike[str] | ModelSpec
"""A checkpoint's directory, a `config.json`, a name of the hub, a published model such as "llama3-70b", or a spec."""


@dataclass(frozen=True)
class TraceSpec:
    """A group of a trace."""

    worker_class: type
    settings: Mapping[str, Any]
    """`model` may be any `ModelSource`."""


def trace_spec(worker_class: type, **settings: Any) -> TraceSpec:
    """A group for `hf.trace`, written as if it were placed: `hf.trace_spec(hf.ActorWorker, model=..., optim=...)`."""
    return TraceSpec(worker_class, settings)


@dataclass(frozen=True)
class Trace:
    """A traced driver: the `graph` of its loop, its groups, the `rows` of an iteration, and their sampling."""

    graph: Graph
    groups: Mapping[str, TraceSpec]
    rows: int
    sampled: SampledRows | None = field(repr=False)
    elastic: bool = False
    """The loop's devices move (`hf.Elastic`)."""


Groups = Mapping[str, TraceSpec | WorkerGroup]


def trace(step: Callable[..., Any], groups: Groups, *, prompts: Batch | Mapping[str, Any] | None = None) -> Graph:
    """The dataflow graph of a loop with the body `step`: its calls and their dependencies.

    Parameters of `step` named like groups receive these; one named `groups` receives all of them, and the remaining one
    the prompts: a batch of 8 rows with `prompt` (text) and `prompt_ids`, or `prompts`. The step's return value is
    dropped.

    `groups` are `hf.trace_spec(...)`, or placed groups, which are not called. The step runs three times, or until every
    group with an optimizer has trained. No process starts, and no weight is read: models are given by a checkpoint, a
    `config.json`, a `ModelSpec`. Data that the step reads on the driver is made up: texts are empty, numbers 0.

    Errors: MissingColumnError for a column that is read before it is written, and the calls' own errors on the driver;
    ConfigError for a parameter of `step` that names no group.
    """
    backend = TraceBackend()
    with backend.within():
        pool = ResourcePool(1)
        for name, given in groups.items():
            known = isinstance(given, WorkerGroup | TraceSpec)
            found = f"trace: the group {name!r} is {given!r:.80}"
            require(known, f"{found}. Give hf.trace_spec(hf.ActorWorker, model=..., ...).")
        placed = {name: place(one.worker_class, pool, name=name, **one.settings) for name, one in groups.items()}
        while not backend.seen_enough():
            backend.begin_iteration()
            given = placeholder_columns(("prompt", "prompt_ids"), 8) if prompts is None else prompts
            batch = given if isinstance(given, Batch) else Batch(given)
            step(**_arguments(step, placed, BatchRef.from_batch(batch)))
    return _finished(backend, {}).graph


def trace_driver(driver: Callable[..., Any], *arguments: Any, models: Mapping[str, ModelSource] | None = None) -> Trace:
    """Trace the loop of `driver(*arguments)`, an unchanged program such as a recipe's `main`.

    The driver runs until the fourth batch of its loader (without a loader: the fourth `tracker.log`), with groups
    without processes; a tracker writes no files. All other side effects of the driver happen. `models` replace those
    that the driver names; a group that shares a replaced group's checkpoint follows it.

    Errors: ConfigError for a driver without a loop, MissingColumnError as `trace`.
    """
    backend = TraceBackend()
    with backend.within():
        driver(*arguments)
    if not backend.program.iteration:
        raise ConfigError(
            "the driver came to its end without a loop: none over a PromptLoader, and no tracker.log at the end of "
            "each iteration. Trace the loop's body with hf.trace(step, groups)."
        )
    return _finished(backend, models or {})


def check_driver(driver: Callable[..., Any], *arguments: Any, placement: Placement | None = None) -> None:
    """Run the first iteration of `driver(*arguments)` without processes, up to the second batch of its loader: groups
    and calls are checked before Ray starts, with settings, columns and row counts.

    Side effects are as in `trace_driver`. A driver that cannot run so is not checked further, nor is one that has read
    results of its calls: they are made up, and what it does with them, such as choosing rows, is unknown. Errors: those
    of the driver's groups and calls that need no process, SystemExit of a driver that refuses its arguments, and
    PlacementError for a group of the `placement` that it is to get and does not place.
    """
    backend = TraceBackend(checks=True)
    try:
        with backend.within():
            driver(*arguments)
        if placement is not None and not backend.guessed:
            placement.check_placed(backend.described)
    except NoProcessError:
        logger.debug("the driver asks a process: it is checked up to there", exc_info=True)
    except SystemExit as end:
        if end.code not in (None, 0) and not backend.guessed:
            raise
    except Exception as error:
        if isinstance(error, HybridFlowError) and not backend.guessed:
            raise
        logger.debug("the driver is not checked before it starts", exc_info=True)


def _finished(backend: TraceBackend, instead: Mapping[str, ModelSource]) -> Trace:
    groups, program = {name: TraceSpec(*described) for name, described in backend.described.items()}, backend.program
    program.models |= _models(groups, instead)
    trains = {name: group.settings.get("train") for name, group in groups.items()}
    program.strategies |= {name: how for name, how in trains.items() if isinstance(how, TrainStrategy)}
    waits = {name: spec_of(group.worker_class, group.settings).waits for name, group in groups.items()}
    program.offload |= {name: asked for name, asked in waits.items() if asked is not None}
    program.averaged = frozenset(name for name, group in groups.items() if keeps_average(group.settings))
    graph = program.graph()
    for edge in graph.edges:
        if TEACHER in edge.columns and (model := graph.models[graph.call(edge.source).group]) is not None:
            program.widths[TEACHER] = Width(response=2 * model.hidden)  # in bfloat16
    return Trace(graph, groups, round(program.rows), backend.sampled, backend.elastic)


def _models(groups: Mapping[str, TraceSpec], instead: Mapping[str, ModelSource]) -> dict[str, Decoder | None]:
    if unknown := [name for name in instead if name not in groups]:
        raise ConfigError(f"{unknown[0]}.model: the driver has no group {unknown[0]!r}.{nearest(unknown[0], groups)}")
    heads: dict[str, Head] = {name: getattr(group.worker_class, "head", "lm") for name, group in groups.items()}
    follow: dict[tuple[str, Head | None], ModelSource] = {}
    for name, group in groups.items():
        if name in instead:  # a reference follows the actor, another critic the critic, in any order of names
            for head in (heads[name], None):
                follow.setdefault((str(group.settings.get("model")), head), instead[name])
    found: dict[str, Decoder | None] = {}
    for name, group in groups.items():
        head, own, source = heads[name], group.settings.get("model"), instead.get(name)
        if source is None and own is not None:
            source = follow.get((str(own), head), follow.get((str(own), None), own))
        found[name] = None if source is None else model_spec(source, head)
    return found


def model_spec(source: ModelSource, head: Head = "lm") -> Decoder:
    """The sizes of a model, from its configuration alone. Errors: CheckpointError without one, ModelError."""
    if isinstance(source, ModelSpec):
        return replace(source, head=head)
    known = PUBLISHED.get(str(source).lower())
    return spec_of_config(configuration(source), head) if known is None else replace(known, head=head)


def configuration(source: str | os.PathLike[str]) -> Any:
    """The `config.json` of a directory, of a file or of the hub. Errors: CheckpointError."""
    path = Path(source)
    try:
        path = path if path.is_file() else find_checkpoint(source, ("config.json",)) / "config.json"
        return json.loads(path.read_text())
    except CheckpointError as error:
        raise CheckpointError(f"{error} Known models: {', '.join(PUBLISHED)}.") from None
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no configuration of a model: {error}.") from None


def _arguments(step: Callable[..., Any], groups: Mapping[str, WorkerGroup], batch: BatchRef) -> dict[str, Any]:
    """By the names of the step's parameters."""
    parameters = inspect.signature(step).parameters.values()
    out: dict[str, Any] = {p.name: groups[p.name] for p in parameters if p.name in groups}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        out |= groups
    if any(p.name == "groups" for p in parameters):
        out.setdefault("groups", SimpleNamespace(**groups))
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    left = [p.name for p in named if p.name not in out and p.default is p.empty]
    if len(left) > 1:
        raise ConfigError(
            f"trace: of the parameters {', '.join(map(repr, left))} of the step one may be the prompts; the others "
            f"name no group.{nearest(left[-1], groups)}"
        )
    return out | dict.fromkeys(left, batch)

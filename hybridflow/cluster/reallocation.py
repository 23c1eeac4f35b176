"""Reallocation: moves a group to another layout or other devices (ReaL's parameter reallocation).

    build the new ranks, without weights  ->  optimizer state (or weights) travels, kind by kind  ->
    what exists once per process is closed there and opened here  ->  the group is the new ranks, the old ones are freed

Until the last step nothing is taken from the old ranks, so a failure anywhere leaves the group as it was. The price is
memory: weights and optimizer state exist twice on devices that are in both layouts, as long as it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.session import Session
from hybridflow.cluster.weight_transfer import WEIGHTS
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.contract import TrainState
from hybridflow.errors import HybridFlowError, LayoutError

_GONE_SECONDS = 60.0


@dataclass(frozen=True)
class TrainingState:
    """What an optimizer holds besides the weights: tensors of each of `kinds` in `layout`, and `counters`."""

    layout: Layout
    kinds: tuple[str, ...]
    counters: dict[str, Any]


def reallocate(group: WorkerGroup, new: RankGroup) -> None:
    """Move `group` to the ranks `new`, which are not built yet. Blocks.

    Errors: those of the step that failed, after which the group is what it was; LayoutError when the states of the two
    layouts do not fit.
    """
    old, backend = group.ranks, group.session.backend
    try:
        backend.build(new, uninitialized=True)
        _move(group, old, new)
        _hand_over(backend, old, new)
    except BaseException as error:
        backend.drop(new, wait=1.0)  # peers of the rank that failed may still be waiting for it
        _note(error, f"{group.name} was not moved: it is still at {old}, with its state.")
        raise
    group.ranks = new
    backend.drop(old, wait=_GONE_SECONDS)


def _move(group: WorkerGroup, old: RankGroup, new: RankGroup) -> None:
    """Bring optimizer state, and with it the weights, to the new ranks; without an optimizer the weights."""
    backend = group.session.backend
    state, there = (backend.ask(ranks, optimizer_state)[0] for ranks in (old, new))
    if state is None:
        layouts = tuple(weights_layout(group.session, ranks) for ranks in (old, new))
        backend.channels.send(old, new, WEIGHTS, lambda: layouts, "reallocate").get()
        return
    check_same_model(state.layout, there.layout, group.name, f"{group.name} (new layout)")
    if set(state.kinds) != set(there.kinds):
        raise LayoutError(f"{group.name} keeps {sorted(state.kinds)}; the new layout would keep {sorted(there.kinds)}.")
    for kind in state.kinds:
        backend.channels.send(old, new, kind, lambda: (state.layout, there.layout), "reallocate").get()
    backend.ask(new, optimizer_arrived, state.counters)


def _hand_over(backend: Any, old: RankGroup, new: RankGroup) -> None:
    """Close what a process can hold once in the old ranks and open it in the new ones, or open it again."""
    try:
        backend.ask(old, step_aside)
        backend.ask(new, open_generation)
    except BaseException as error:
        backend.drop(new, wait=_GONE_SECONDS)  # frees the process for the old ranks
        try:
            backend.ask(old, step_back)
        except HybridFlowError:
            _note(error, f"{old.name} cannot generate any more: its engine could not be started again.")
        raise


def _note(error: BaseException, outcome: str) -> None:
    """Say in an error of ours what it means for the group."""
    if isinstance(error, HybridFlowError):
        error.args = (f"{error.args[0]}\n{outcome}", *error.args[1:])


def weights_layout(session: Session, ranks: RankGroup, built: bool = True) -> Layout:
    """The layout of the weights of ranks; of ranks that are not `built` yet, it may be good for its tensors only.

    Errors: ConfigError when its class has none; WorkerError of a rank that is asked for its layout.
    """
    worker_class: Any = ranks.worker_class
    layout = worker_class.weights_layout(ranks.settings, ranks.grid)
    found = built and worker_class.finds_layout(ranks.settings)
    return session.backend.ask(ranks, found_layout)[0] if found else layout


def check_same_model(source: Layout, destination: Layout, name: str, other: str) -> None:
    """Errors: LayoutError naming the first tensor that is not the same on both sides."""
    here, there = dict(source.tensors), dict(destination.tensors)
    if here == there:
        return
    differing = [tensor for tensor in {**here, **there} if here.get(tensor) != there.get(tensor)]
    found = [
        f"{tuple(at[differing[0]])} in {who}" if differing[0] in at else f"none in {who}"
        for at, who in ((here, name), (there, other))
    ]
    raise LayoutError(
        f"{name} and {other} are different models: {len(differing)} of {len({**here, **there})} tensors differ, the "
        f"first is {differing[0]}, {' and '.join(found)}. Weights move between groups of one model only."
    )


# What runs on every rank, given its worker


def optimizer_state(worker: Any) -> TrainingState | None:
    """Of rank 0, since it is the same on all of them; None without an optimizer."""
    with worker.at_work():
        engine = worker.optimizing_engine()
        if engine is None or worker.context.rank:
            return None
        return TrainingState(engine.optimizer_layout(), tuple(engine.optimizer_storage()), engine.optimizer_counters())


def optimizer_arrived(worker: Any, counters: dict[str, Any]) -> None:
    """The state was written: take the counters over, and the weights from it."""
    with worker.at_work():
        worker.optimizing_engine().optimizer_moved(counters)


def step_aside(worker: Any) -> None:
    """Free what a process can hold only once; on a GPU training state waits in host memory."""
    worker.close_generation()
    if worker.context.device.type == "cuda":
        with worker.at_work():
            engine = worker.optimizing_engine()
        if engine is not None:
            engine.offload(get_args(TrainState))


def step_back(worker: Any) -> None:
    """Undo `step_aside`, however far it came."""
    worker.close_generation()
    if worker.context.device.type == "cuda":
        with worker.at_work():  # whose end leaves an idle model on the host
            if (engine := worker.optimizing_engine()) is not None:
                engine.reload(get_args(TrainState))
    worker.open_generation()


def found_layout(worker: Any) -> Layout:
    return worker.found_layout()


def open_generation(worker: Any) -> None:
    worker.open_generation()

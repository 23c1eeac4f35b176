"""Reallocation: moves a group to another layout or other devices (ReaL's parameter reallocation).

    build the new ranks, without weights  ->  optimizer state (or weights) travels, kind by kind  ->
    what exists once per process is closed there and opened here  ->  the group is the new ranks, the old ones are freed

Until the last step nothing is taken from the old ranks, so a failure anywhere leaves the group as it was. The price is
memory: weights and optimizer state exist twice on devices that are in both layouts, as long as it takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hybridflow.cluster.backend import RankGroup
from hybridflow.cluster.group import WorkerGroup, weights_layout
from hybridflow.cluster.weight_channels import WEIGHTS
from hybridflow.engine3d.layout import Layout
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
    state, there = (backend.ask(ranks, "training_state")[0] for ranks in (old, new))
    if state is None:
        layouts = tuple(weights_layout(group.session, ranks) for ranks in (old, new))
        backend.channels.send(old, new, WEIGHTS, lambda: layouts, "reallocate").get()
        return
    check_same_model(state.layout, there.layout, group.name, f"{group.name} (new layout)")
    if set(state.kinds) != set(there.kinds):
        raise LayoutError(f"{group.name} keeps {sorted(state.kinds)}; the new layout would keep {sorted(there.kinds)}.")
    for kind in state.kinds:
        backend.channels.send(old, new, kind, lambda: (state.layout, there.layout), "reallocate").get()
    backend.ask(new, "training_state_arrived", state.counters)


def _hand_over(backend: Any, old: RankGroup, new: RankGroup) -> None:
    """Close what a process can hold once in the old ranks and open it in the new ones, or open it again."""
    try:
        backend.ask(old, "step_aside")
        backend.ask(new, "open_generation")
    except BaseException as error:
        backend.drop(new, wait=_GONE_SECONDS)  # frees the process for the old ranks
        try:
            backend.ask(old, "step_back")
        except HybridFlowError:
            _note(error, f"{old.name} cannot generate any more: its engine could not be started again.")
        raise


def _note(error: BaseException, outcome: str) -> None:
    """Say in an error of ours what it means for the group."""
    if isinstance(error, HybridFlowError):
        error.args = (f"{error.args[0]}\n{outcome}", *error.args[1:])


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

"""Reallocation: moves a group to another layout or other devices (ReaL's parameter reallocation).

    build the new ranks, without weights  ->  optimizer state (or weights) travels, kind by kind  ->
    what exists once per process is closed there and opened here  ->  the group is the new ranks, the old ones are freed

The old ranks stay complete until the last step, so a failure leaves the group unchanged. The price is memory: in the
meantime, devices in both layouts hold weights and optimizer state twice.
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
    """An optimizer's state: tensors of each of `kinds` in `layout`, and `counters`."""

    layout: Layout
    kinds: tuple[str, ...]
    counters: dict[str, Any]


def reallocate(group: WorkerGroup, new: RankGroup) -> None:
    """Move `group` to the ranks `new`, which are not built yet. Blocks.

    Errors: those of the failed step, with the group unchanged; LayoutError when the states of the two layouts do not
    match.
    """
    old, backend = group.ranks, group.session.backend
    try:
        backend.build(new, uninitialized=True)
        _move(group, old, new)
        _hand_over(backend, old, new)
    except BaseException as error:
        backend.drop(new, wait=1.0)  # peers of the failed rank may still wait for it
        _note(error, f"{group.name} was not moved: it is still at {old}, with its state.")
        raise
    group.ranks = new
    backend.drop(old, wait=_GONE_SECONDS)


def _move(group: WorkerGroup, old: RankGroup, new: RankGroup) -> None:
    """Move the optimizer state (with the weights in it) to the new ranks; without an optimizer, the weights."""
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
    """Close the generation engines of the old ranks and open the new ranks'; on failure reopen the old ones."""
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
    """Add the group's state after the failure to an error of ours."""
    if isinstance(error, HybridFlowError):
        error.args = (f"{error.args[0]}\n{outcome}", *error.args[1:])


def check_same_model(source: Layout, destination: Layout, name: str, other: str) -> None:
    """Errors: LayoutError naming the first tensor that differs."""
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

"""Driver functions: open and close a session, compute advantages, move weights between groups."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hybridflow.algorithms.advantages.estimator import Estimator
from hybridflow.algorithms.advantages.token_rewards import RunningNorm
from hybridflow.algorithms.kl import AdaptiveKL
from hybridflow.batch.batch import Batch
from hybridflow.cluster.backend import Deadlines, RankGroup
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.future import Future
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.held_calls import why_apart
from hybridflow.cluster.interactive import current_cell, replaced
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.session import Session
from hybridflow.cluster.weight_channels import WEIGHTS
from hybridflow.config import VLLM, TrainStrategy, is_strategy
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.worker_spec import spec_of
from hybridflow.errors import BatchError, ConfigError, HybridFlowError, LayoutError, PlacementError, add_outcome
from hybridflow.models.hf_spec import use_of
from hybridflow.protocols.operation import kind_of
from hybridflow.settings import is_number, require
from hybridflow.topology import RankGrid
from hybridflow.tracking import run_lock  # noqa: F401  released behind a session that is open at the end
from hybridflow.workers.placing import check_memory, ranks_on
from hybridflow.workers.worker import Worker

logger = logging.getLogger(__name__)
_GONE_SECONDS = 60.0
_TOLERATED_SECONDS = 20


def init(
    address: str | None = None,
    devices: int | None = None,
    *,
    peer_timeout: float = 1800.0,
    collective_timeout: float = 600.0,
    wait_for_devices: float = 0.0,
    tolerate: float = 0.0,
    time_sharing: bool = False,
    deterministic: bool = False,
    prefetch: float | None = None,
) -> None:
    """Connect to the Ray cluster at `address` (or `RAY_ADDRESS`), or start a local one with `devices` logical devices.

    The first `ResourcePool` calls it if the driver does not. Timeouts in seconds: for results of other groups and for
    building a group, including its checkpoint; for a collective; for devices that the cluster lacks, at first or
    after a machine was lost; and how long a machine may be out of reach (at most 20 s) before its processes count as
    lost. With `time_sharing`, updates that the driver
    issues one right after the other run as in `together`, where they can. With `deterministic`, runs of a program on
    equal GPUs repeat bit for bit, more slowly, as on the CPU they always do (docs/gpus.md). `prefetch` bounds the GiB
    per device that an offloaded model brings back behind the call before its own (0: none; None: what the device has
    left). Until `shutdown`, SIGTERM ends the driver as Ctrl-C does, with status 143, unless the user installed a
    handler. Errors: ConfigError when a session is open.
    """
    good = prefetch is None or (is_number(prefetch) and prefetch >= 0)
    require(good, f"prefetch={prefetch!r}: give GiB of at least 0, or None.")
    require(
        isinstance(tolerate, int | float) and 0 <= tolerate <= _TOLERATED_SECONDS,
        f"tolerate={tolerate!r}: give 0 to {_TOLERATED_SECONDS} seconds. Connections between ranks end after 30 s "
        f"without an answer, and Ray gives a machine up after about as long.",
    )
    cell, session = current_cell(), Session.existing()
    if cell is not None and session is not None and cell.made_before(session.cells.get("")):
        replaced("the session")
        session.shutdown()
    deadlines = Deadlines(peer_timeout, collective_timeout, wait_for_devices, tolerate)
    session = Session.open(address, devices, deadlines, deterministic, prefetch)
    session.iterations.held.automatic = time_sharing
    if cell is not None:
        session.cells[""] = cell


def shutdown() -> None:
    """Free all models and devices and stop the Ray that was started. Can be called again; runs at exit too."""
    if (session := Session.existing()) is not None:
        session.shutdown()


def compute_advantage(
    batch: BatchRef | Batch,
    estimator: str | Estimator | Callable[..., Any],
    *,
    kl_coef: float | AdaptiveKL | None = None,
    kl: str | None = None,
    reward_norm: RunningNorm | None = None,
    **options: Any,
) -> BatchRef:
    """`advantages` and `returns`, ragged [B, R] float32, computed on the controller worker (paper, table 4).

    `estimator` is a value such as `hf.GAE(lam=0.95)`, or a name with its `options`: "gae", "grpo", "dr_grpo", "rloo",
    "opo", "gpg", "grpo_passk", "gdpo", "remax", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", or
    "safe_rlhf", which writes `cost_advantages`, `cost_returns` and `lagrange` as well. Or a function
    `f(token_rewards, batch, **options) -> (advantages, returns)`, or -> a mapping of columns with these two; its
    attributes `reads` and `writes` name the other columns.

    `kl_coef` * KL(actor || reference) per token, as estimated by `kl` ("k1", the default, "k2", "k3", "abs"), is
    subtracted from the rewards, which a `reward_norm`, an `hf.algorithms.RunningNorm()`, normalises before. It, an
    `AdaptiveKL`, and a `Lagrange` among the options keep their state between iterations and in checkpoints of the run;
    a call that fails leaves it unchanged.

    Estimators over groups write as `returns` the score of the row, its summed reward, at every valid token (verl: the
    advantages). They leave rows without a valid token out of the statistics of their group (verl and TRL count them).

    Returns at once. Errors: ConfigError (also for `kl` without `kl_coef`), MissingColumnError; where the result is
    used, BatchError for numbers that are not finite, and when every group has one row.
    """
    session = Session.current()
    if isinstance(batch, Batch):
        batch = BatchRef.from_batch(batch)
    if not isinstance(batch, BatchRef):
        raise BatchError(f"compute_advantage takes a batch, got {type(batch).__name__}.")
    return session.controller.compute_advantage(batch, estimator, kl_coef, kl, options, reward_norm)


def sync_weights(source: WorkerGroup, destination: WorkerGroup) -> Future:
    """Give `destination` the current weights of `source`, another group of the same model; returns at once.

    For a rollout on devices of its own, a reference that follows the actor, or a second actor. Pools and layouts may be
    equal, overlapping or disjoint: every rank receives exactly the elements that it needs and does not hold, by one
    weight plan per pair of groups (ReaL, section 5; PUZZLE, algorithm 1).

    The transfer runs in call order on both groups: later calls on `destination` see all of the new weights. A rollout
    on devices of its own decodes its unfinished rows until `source` is ready to send. Right behind an update of an
    actor with `overlap=True` and without generation, that update's last step sends each part once it is final, to a
    group on other devices. A destination that trains keeps
    its optimizer's moments; a reference with `ema_decay` takes a step of its moving average. If the transfer fails,
    calls on `destination` raise until a `sync_weights` into it succeeds. The future returns `bytes` (over the wire, of
    all ranks), `seconds`, and `pause`: the longest time for which a rank neither trained nor decoded.

    Errors, before a byte moves: LayoutError when the models differ, PlacementError for a closed group, ConfigError for
    a group without weights.
    """
    for group in (source, destination):
        check_group("sync_weights", group)
    if source is destination:
        raise ConfigError(f"sync_weights({source.name}, {source.name}): a group has its own weights already.")
    if source.session is not destination.session:
        raise PlacementError(f"{source.name} and {destination.name} belong to different sessions.")
    require(not (why := destination.ranks.spec.fixed), why)

    def layouts() -> tuple[Layout, Layout]:
        here, there = (group.session.backend.weights_layout(group.ranks) for group in (source, destination))
        _check_same_model(here, there, source.name, destination.name)
        _check_same_use(source, destination)
        return here, there

    moving = source.session.backend.channels.send(source.ranks, destination.ranks, WEIGHTS, layouts)
    destination.weights_changed(None if destination.settings.get("ema_decay") is not None else source)
    return moving


def together(*updates: Future) -> tuple[Future, ...]:
    """Run updates on the same pipeline stages together, each in the bubbles of the others (PUZZLE, section 4).

        actor_metrics, critic_metrics = hf.together(actor.update_actor(...), critic.update_critic(...))

    All groups train with `hf.Megatron`, equal sizes and two stages or more on the same devices; results are those of
    one update after the other. Other updates run so, and a warning says why, once, unless no group has several stages;
    so do updates between which the driver did something else. When a micro-batch fails, no model makes a step any more;
    steps that were made before stay. Returns the updates at once.
    """
    session = Session.current()
    good = len(updates) > 1 and all(isinstance(update, Future) and update.outputs for update in updates)
    require(
        good, "together(...) takes two updates or more, such as actor.update_actor(...) and critic.update_critic(...)."
    )
    origins = [update.outputs[0].origin for update in updates]
    for origin in origins:
        require(origin.role in session.groups, f"together(...): {origin.role} is closed. Give updates of open groups.")
        operation = session.groups[origin.role].operations.get(origin.method)
        trains = operation is not None and kind_of(operation) == "training"
        require(trains, f"together(...) takes updates; {origin.role}.{origin.method} is not one.")
    if not session.iterations.held.together([update.outputs[0].call for update in updates]):
        ranks = [session.groups[origin.role].ranks for origin in origins]
        why = next(filter(None, itertools.starmap(why_apart, itertools.combinations(ranks, 2))), "")
        if why and why not in session.iterations.held.said:
            session.iterations.held.said.add(why)
            logger.warning("%d updates run one after the other: %s.", len(updates), why)
    return updates


class _Keep:
    def __repr__(self) -> str:
        return "hf.KEEP"


KEEP = _Keep()
"""Keeps a setting unchanged."""


def reallocate(
    group: WorkerGroup,
    *,
    strategy: TrainStrategy | None = None,
    pool: ResourcePool | None = None,
    generate: VLLM | _Keep | None = KEEP,
) -> WorkerGroup:
    """Move `group` to another strategy, another pool or slice, or both; returns it: the same object, in a new layout.

    Weights, optimizer state and step counts move too, so training continues as before; earlier calls run first, and
    batches that the group wrote stay valid. An actor's generation engine is closed and rebuilt by `generate` (None: the
    group stops generating). Blocks until done.

    The old ranks are freed after everything has arrived: until then, devices in both layouts hold weights and optimizer
    state twice, and a failed step leaves the group unchanged.

    Errors, before a byte moves: PlacementError when sizes, devices or their memory do not fit or the group is closed,
    ModelError when the model does not divide, LayoutError, ConfigError. WorkerError of a rank that cannot be built.
    """
    check_group("reallocate", group)
    if group.session.traces:
        return group
    if group.sleeping:
        raise PlacementError(f"reallocate({group.name}): it has ranks in several sizes; close its GroupSizes first.")
    settings = dict(group.settings)
    if strategy is None and pool is None and generate is KEEP:
        raise ConfigError(f"reallocate({group.name}): give strategy= (such as hf.FSDP()) or pool=, or both.")
    if strategy is not None:
        if not is_strategy(strategy):
            raise ConfigError(f"reallocate({group.name}, strategy={strategy!r}): give a strategy such as hf.FSDP().")
        if "train" not in settings:
            raise ConfigError(
                f"reallocate({group.name}, strategy={strategy!r}): {group.worker_class.__name__} does not train."
            )
        settings["train"] = strategy
    if generate is not KEEP:
        settings = _generating(group, settings, generate)
    if pool is not None and not isinstance(pool, ResourcePool):
        raise ConfigError(f"reallocate({group.name}, pool={pool!r}): give a ResourcePool or a slice of one.")
    session = group.session
    where = (
        pool if pool is not None else next(p for p in session.pools if p.name == group.pool_name).part(group.members)
    )
    where.check_open()
    if where.session is not session:
        raise PlacementError(f"{group.name} and the pool that it should move to belong to different sessions.")
    if (where.name, where.members) == (group.pool_name, group.members) and settings == group.settings:
        return group
    leaves = group if "train" in settings else None
    grid = _own_grid(group, where, generate) if strategy is None else None
    for now_or_then in (group.settings, settings):
        require(not (why := spec_of(group.worker_class, now_or_then).fixed), why)
    new = ranks_on(group.worker_class, where, settings, group.name, grid, instead_of=leaves)
    here, there = (session.backend.weights_layout(ranks, built=False) for ranks in (group.ranks, new))
    _check_same_model(here, there, group.name, f"{group.name} as it would be")
    check_memory(where, [new], leaving=group.ranks)
    _replace_ranks(group, new)
    return group


def _generating(group: WorkerGroup, settings: dict[str, Any], generate: Any) -> dict[str, Any]:
    """The settings with `generate` replaced. Errors: ConfigError for a group that has no such setting."""
    if group.has_replica_for("generate_sequences"):
        raise ConfigError(f"reallocate({group.name}, generate=...): it generates where its placement says.")
    if "generate" not in settings:
        raise ConfigError(f"reallocate({group.name}, generate=...): {group.worker_class.__name__} cannot generate.")
    if generate is None:
        return {**settings, **group.ranks.spec.without_generation}
    return {**settings, "generate": generate}


def check_group(what: str, group: WorkerGroup) -> None:
    if not isinstance(group, WorkerGroup):
        raise ConfigError(f"{what} takes a group such as hf.ActorWorker.on(...) returns, got {group!r}.")
    group.check_open()
    if not issubclass(group.worker_class, Worker):
        raise ConfigError(f"{what}({group.name}): {group.worker_class.__name__} has no weights that could be moved.")


def _own_grid(group: WorkerGroup, where: ResourcePool, generate: Any) -> RankGrid | None:
    """For a group placed with an explicit grid: a grid with the same p and t on other devices.

    Errors: PlacementError when these sizes do not fit.
    """
    old = group.grid
    if not group.ranks.own_grid:
        return None
    if where.size % (old.p * old.t) or generate is not KEEP:
        raise PlacementError(
            f"{group.name} was placed with a grid of its own, p={old.p} and t={old.t}, which reallocate keeps: give a "
            f"multiple of {old.p * old.t} devices (found {where.size}) and no generate=, or a strategy that says sizes."
        )
    return replace(old, d=where.size // (old.p * old.t))


def _check_same_use(source: WorkerGroup, destination: WorkerGroup) -> None:
    """Errors: LayoutError for models with equal tensors but different computation, such as rotary embeddings."""
    uses = [use_of(model()) for group in (source, destination) if (model := group.ranks.spec.model) is not None]
    if len(uses) < 2:
        return
    for name in {**uses[0], **uses[1]}:
        here, there = (use.get(name) for use in uses)
        if here != there:
            raise LayoutError(
                f"{source.name} and {destination.name} are different models: {name} is {here} in {source.name} and "
                f"{there} in {destination.name}. Weights move between groups of one model only."
            )


def _replace_ranks(group: WorkerGroup, new: RankGroup) -> None:
    """Move `group` to the ranks `new` (ReaL's parameter reallocation).

    build the new ranks, without weights  ->  optimizer state (or weights) travels, kind by kind  ->
    what exists once per process is closed there and opened here  ->  the old ranks are freed

    The old ranks stay complete until the last step. Errors: those of the failed step, with the group unchanged.
    """
    old, backend = group.ranks, group.session.backend
    try:
        backend.build(new, uninitialized=True)
        move_state(group, old, new, "reallocate")
        _hand_over(backend, old, new)
    except BaseException as error:
        backend.drop(new, wait=1.0)  # peers of the failed rank may still wait for it
        add_outcome(error, f"{group.name} was not moved: it is still at {old}, with its state.")
        raise
    group.move_to(new)
    backend.drop(old, wait=_GONE_SECONDS)


def move_state(group: WorkerGroup, old: RankGroup, new: RankGroup, method: str) -> int:
    """Move the optimizer state (with the weights in it) to the new ranks; without an optimizer, the weights.

    All kinds are issued at once. Returns the bytes that travelled.
    """
    backend = group.session.backend
    asked = [backend.tell(ranks, "training_state") for ranks in (old, new)]
    state, there = (wait()[0] for wait in asked)
    layouts = tuple(group.session.backend.weights_layout(ranks) for ranks in (old, new))
    travelling = [(WEIGHTS, layouts)]
    if state is not None:
        if len(state.layout.tensors) == len(layouts[0].tensors):  # no weights are frozen
            travelling.clear()
        trained = state.layout, there.layout
        _check_same_model(*trained, group.name, f"{group.name} (new layout)")
        if set(state.kinds) != set(there.kinds):
            raise LayoutError(
                f"{group.name} keeps {sorted(state.kinds)}; the new layout would keep {sorted(there.kinds)}."
            )
        travelling += [(kind, trained) for kind in state.kinds]
    moving = [backend.channels.send(old, new, kind, lambda of=of: of, method) for kind, of in travelling]
    failed, moved = list[HybridFlowError](), 0
    for one in moving:  # all of them: no later call should raise their errors
        try:
            moved += int(one.get()["bytes"])
        except HybridFlowError as error:
            failed.append(error)
    if failed:
        raise failed[0]
    if state is not None:
        backend.ask(new, "training_state_arrived", state.counters)
    return moved


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
            add_outcome(error, f"{old.name} cannot generate any more: its engine could not be started again.")
        raise


def _check_same_model(source: Layout, destination: Layout, name: str, other: str) -> None:
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

"""What a driver calls that is no group: sessions, advantages, and weights that go from group to group."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from hybridflow.algorithms.kl import AdaptiveKL, FixedKL, KLState
from hybridflow.algorithms.lagrange import Lagrange, LagrangeState
from hybridflow.batch import Batch
from hybridflow.cluster import reallocation
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.future import Future
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.host import Deadlines
from hybridflow.cluster.pool import ResourcePool
from hybridflow.cluster.session import Session
from hybridflow.cluster.traced import TracedSession
from hybridflow.cluster.weight_link import WEIGHTS
from hybridflow.config import VLLM, TrainStrategy
from hybridflow.engine3d.layout import Layout
from hybridflow.errors import BatchError, ConfigError, LayoutError, PlacementError
from hybridflow.topology import RankGrid
from hybridflow.workers.worker import Worker, planned

_STATE_OF: dict[type, Callable[[Any], KLState | LagrangeState]] = {AdaptiveKL: KLState, Lagrange: LagrangeState}
"""What an argument that learns becomes on the helper process, which keeps it between iterations."""
_USE = ("heads", "kv_heads", "head_dim", "norm_eps", "rope_theta", "rope_scaling", "sliding_window")
_LABELS = ("transformers_version", "architectures", "dtype", "_name_or_path", "use_cache", "_token_id")  # how names end


def init(
    address: str | None = None,
    devices: int | None = None,
    *,
    peer_timeout: float = 1800.0,
    collective_timeout: float = 600.0,
) -> None:
    """Connect to the Ray cluster at `address` (or `RAY_ADDRESS`), or start a local one with `devices` logical devices.

    Called by the first `ResourcePool` if the driver does not. Timeouts in seconds: to wait for results of other
    groups, and to be inside a collective. Errors: ConfigError when a session is open.
    """
    if isinstance(Session.existing(), TracedSession):
        return
    Session.open(address=address, devices=devices, deadlines=Deadlines(peer_timeout, collective_timeout))


def shutdown() -> None:
    """Free all models and devices and stop the Ray that was started. Can be called again; runs at exit too."""
    if Session._current is not None:
        Session._current.shutdown()


def compute_advantage(
    batch: BatchRef | Batch,
    estimator: str | Callable[..., Any],
    *,
    kl_coef: float | FixedKL | AdaptiveKL | None = None,
    kl: str | None = None,
    **options: Any,
) -> BatchRef:
    """`advantages` and `returns`, ragged [B, R] float32, computed on the helper process (paper, table 4).

    `estimator` is a name with its `options`: "gae", "grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk", "gdpo",
    "remax", "reinforce", "reinforce_plus_plus", "reinforce_plus_plus_baseline", or "safe_rlhf", which writes
    `cost_advantages`, `cost_returns` and `lagrange` as well. Or a function
    `f(token_rewards, batch, **options) -> (advantages, returns)`, or -> a mapping of columns with these two; its
    attributes `reads` and `writes` name the other columns.

    `kl_coef` * KL(actor || reference) per token, as estimated by `kl` ("k1", the default, "k2", "k3", "abs"), is taken
    from the rewards. An `AdaptiveKL`, and a `Lagrange` among the options, keep what they learn from one iteration to
    the next, in no checkpoint, and learn nothing from a call that fails.

    Estimators over groups write as `returns` the score of the row, its summed reward, at every valid token (verl: the
    advantages). They leave rows without a valid token out of the statistics of their group (verl and TRL count them).

    Returns at once. Errors: ConfigError (also for `kl` without `kl_coef`), MissingColumnError; where the result is
    used, BatchError for numbers that are not finite, and when every group has one row.
    """
    session = Session.current()
    if isinstance(batch, Batch):
        batch = BatchRef.from_batch(batch, session)
    if not isinstance(batch, BatchRef):
        raise BatchError(f"compute_advantage takes a batch, got {type(batch).__name__}.")
    given = {"kl_coef": kl_coef, **options}
    states = {name: _identity(rule) for name, rule in given.items() if type(rule) in _STATE_OF}
    given |= {name: _STATE_OF[type(given[name])](given[name]) for name in states}
    return session.helper.compute_advantage(batch, estimator, given.pop("kl_coef"), kl, given, states)


def sync_weights(source: WorkerGroup, destination: WorkerGroup) -> Future:
    """Give `destination` the current weights of `source`, another group of the same model; returns at once.

    For a rollout that generates on devices of its own, a reference that follows the actor, or a second actor. Pools and
    layouts may be any, equal, overlapping or disjoint: every rank gets exactly what it needs and does not hold, in one
    weight plan that is made once for a pair of groups (ReaL, section 5; PUZZLE, algorithm 1).

    It takes place in the order of the calls on both groups: later calls on `destination` see the new weights, all of
    them. A destination that trains keeps its optimizer's moments. If it fails on the way, calls on `destination` raise
    until a `sync_weights` into it succeeds. The future gives `bytes` (over the wire, of all ranks) and `seconds`.

    Errors, before a byte moves: LayoutError when the models differ, PlacementError for a closed group, ConfigError for
    what has no weights.
    """
    for group in (source, destination):
        _check_group("sync_weights", group)
    if source is destination:
        raise ConfigError(f"sync_weights({source.name}, {source.name}): a group has its own weights already.")
    if source.session is not destination.session:
        raise PlacementError(f"{source.name} and {destination.name} belong to different sessions.")
    destination.worker_class.check_written(destination.settings)

    def layouts() -> tuple[Layout, Layout]:
        here, there = reallocation.weights_layout(source.placed), reallocation.weights_layout(destination.placed)
        reallocation.check_same_model(here, there, source.name, destination.name)
        _check_same_use(source, destination)
        return here, there

    moving = source.session.links.send(source.placed, destination.placed, WEIGHTS, layouts)
    destination.weights_changed()
    return moving


def reallocate(
    group: WorkerGroup,
    to: TrainStrategy | ResourcePool,
    pool: ResourcePool | None = None,
    *,
    generate: VLLM | Literal["as it was"] | None = "as it was",
) -> WorkerGroup:
    """Move `group` to another strategy, another pool or slice, or both; returns it: the same object, in a new layout.

    Weights, optimizer state and step counts come along, so it goes on training as if nothing had happened; calls that
    were issued before run before, and batches that it wrote stay valid. An actor's generation engine is closed and
    built again, as `generate` says. Blocks until the group is there.

    Only when everything has arrived are the old ranks freed: until then, weights and optimizer state exist twice on
    devices that both layouts use, and a step that fails leaves the group as it was.

    Errors, before a byte moves: PlacementError when sizes and devices do not fit or the group is closed, ModelError
    when the model does not divide, LayoutError, ConfigError. WorkerError of a rank that cannot be built.
    """
    _check_group("reallocate", group)
    if isinstance(group.session, TracedSession):
        return group
    settings = dict(group.settings)
    if isinstance(to, ResourcePool):
        if pool is not None:
            raise ConfigError(f"reallocate({group.name}, {to}, pool={pool}): give one pool.")
        pool = to
    elif isinstance(to, type | WorkerGroup) or not isinstance(to, TrainStrategy):
        raise ConfigError(f"reallocate({group.name}, to={to!r}): give a strategy such as hf.FSDP(), or a pool.")
    elif "train" not in settings:
        raise ConfigError(f"reallocate({group.name}, to={to!r}): {group.worker_class.__name__} does not train.")
    else:
        settings["train"] = to
    if generate != "as it was":
        settings = _generating(group, settings, generate)
    if pool is not None and not isinstance(pool, ResourcePool):
        raise ConfigError(f"reallocate({group.name}, pool={pool!r}): give a ResourcePool or a slice of one.")
    session = group.session
    where = session.pool_of(group) if pool is None else pool
    where.check_open()
    if where.session is not session:
        raise PlacementError(f"{group.name} and the pool that it should move to belong to different sessions.")
    if (where.name, where.members) == (group.pool_name, group.members) and settings == group.settings:
        return group
    leaves = group if "train" in settings else None
    grid = None if isinstance(to, TrainStrategy) else _own_grid(group, where, generate)
    for now_or_then in (group.settings, settings):
        group.worker_class.check_written(now_or_then)
    new = planned(group.worker_class, where, settings, group.name, grid, instead_of=leaves)
    here, there = (reallocation.weights_layout(placed, built=False) for placed in (group.placed, new))
    reallocation.check_same_model(here, there, group.name, f"{group.name} as it would be")
    reallocation.reallocate(group, new)
    return group


def _generating(group: WorkerGroup, settings: dict[str, Any], generate: Any) -> dict[str, Any]:
    """The settings with another way to generate, or none. Errors: ConfigError where that is not the group's to say."""
    if group.elsewhere("generate_sequences"):
        raise ConfigError(f"reallocate({group.name}, generate=...): it generates where its placement says.")
    if "generate" not in settings:
        raise ConfigError(f"reallocate({group.name}, generate=...): {group.worker_class.__name__} cannot generate.")
    if generate is None:
        return group.worker_class.without_generation(settings)
    return {**settings, "generate": generate}


def _check_group(what: str, group: WorkerGroup) -> None:
    if not isinstance(group, WorkerGroup):
        raise ConfigError(f"{what} takes a group such as hf.ActorWorker.on(...) returns, got {group!r}.")
    group.check_open()
    if not issubclass(group.worker_class, Worker):
        raise ConfigError(f"{what}({group.name}): {group.worker_class.__name__} has no weights that could be moved.")


def _own_grid(group: WorkerGroup, where: ResourcePool, generate: VLLM | str | None) -> RankGrid | None:
    """Where `group` was placed with a grid of its own: one of the same p and t on other devices.

    Errors: PlacementError when these sizes do not fit.
    """
    old = group.grid
    if not group.placed.own_grid:
        return None
    if where.size % (old.p * old.t) or generate != "as it was":
        raise PlacementError(
            f"{group.name} was placed with a grid of its own, p={old.p} and t={old.t}, which reallocate keeps: give a "
            f"multiple of {old.p * old.t} devices (found {where.size}) and no generate=, or a strategy that says sizes."
        )
    return replace(old, d=where.size // (old.p * old.t))


def _check_same_use(source: WorkerGroup, destination: WorkerGroup) -> None:
    """Errors: LayoutError for models of equal tensors that compute with them differently, such as in their rotation."""
    specs = [
        group.worker_class.model_spec(group.settings)  # type: ignore[attr-defined]
        for group in (source, destination)
        if hasattr(group.worker_class, "model_spec")
    ]
    if len(specs) < 2:
        return
    uses = [_use(spec) for spec in specs]
    for name in {**uses[0], **uses[1]}:
        here, there = (use.get(name) for use in uses)
        if here != there:
            raise LayoutError(
                f"{source.name} and {destination.name} are different models: {name} is {here} in {source.name} and "
                f"{there} in {destination.name}. Weights move between groups of one model only."
            )


def _use(spec: Any) -> dict[str, Any]:
    """What says how a model computes with its tensors: of a TransformersSpec its whole config, but for labels."""
    config: dict[str, Any] | None = getattr(spec, "config", None)
    if config is None:
        return {name: getattr(spec, name) for name in _USE}
    return {name: value for name, value in config.items() if not name.endswith(_LABELS)}


def _identity(rule: AdaptiveKL | Lagrange) -> str:
    """Names one object: two runs with equal settings do not share a coefficient."""
    name = getattr(rule, "_identity", None)
    if name is None:
        name = uuid.uuid4().hex
        object.__setattr__(rule, "_identity", name)
    return name

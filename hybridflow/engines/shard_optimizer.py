"""ShardOptimizer: torch's AdamW or SGD on the float32 tensors that one rank of a sharded model steps; which of its
settings hold for which parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridflow import config
from hybridflow.config import Optimizer
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.offloadable import HostImages, Residency
from hybridflow.engines.sharded_model import Shards
from hybridflow.errors import ConfigError, nearest
from hybridflow.models.hf_spec import ROUTER_BIAS, matches

logger = logging.getLogger(__name__)
INITIAL_SCALE, SCALE_GROWTH, GROWTH_INTERVAL, HYSTERESIS = 2.0**16, 2.0, 1000, 2


class LossScale:
    """The factor of float16 losses: keeps small gradients from vanishing (Micikevicius et al. 2018, section 3.2).

    Doubles after 1,000 updates without overflow, halves when two had one. Its state has the names that Megatron's has.
    """

    def __init__(self) -> None:
        self.value, self._good, self._patience = INITIAL_SCALE, 0, HYSTERESIS

    def update(self, overflow: bool) -> None:
        """Report the result of an update; the same on all ranks."""
        if overflow:
            self._good, self._patience = 0, self._patience - 1
            if self._patience <= 0:
                self.value = max(1.0, self.value / SCALE_GROWTH)
            return
        self._good += 1
        if self._good == GROWTH_INTERVAL:
            self._good, self._patience, self.value = 0, HYSTERESIS, self.value * SCALE_GROWTH

    def state(self) -> dict[str, Any]:
        return {"scale": [self.value], "growth_tracker": self._good, "hysteresis_tracker": self._patience}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value = float(state["scale"][0])
        self._good, self._patience = state["growth_tracker"], state["hysteresis_tracker"]


class ShardOptimizer:
    """Clips, follows the learning-rate schedule and steps `shards.main`.

    Weight decay leaves out the names in `no_decay` (norms and biases). `parts` are the names of each part of a step,
    `steps` counts the updates that were made, `result` is that of the last step; `changed`: it has changed parameters
    or state, completely or not. With `fp16` losses are scaled. Moments exist from the start: no step takes memory.
    `settings` are those given, with what `change` has changed since. `tensors` are a canonical tensor of each name that
    is not one.
    """

    def __init__(
        self,
        settings: config.Optimizer,
        shards: Shards,
        no_decay: Collection[str],
        parts: Sequence[frozenset[str]],
        fp16: bool = False,
        tensors: Mapping[str, str] | None = None,
    ) -> None:
        self.settings, self.shards, self.parts = settings, shards, parts
        self._given, self._changes, self._no_decay = settings, dict[str, Any](), no_decay
        self._tensors = tensors or {}
        self.scale = LossScale() if fp16 else None
        self.steps = 0
        self.result: dict[str, float] = {}
        self.overflowed = self.changed = False  # overflowed: a smaller loss scale may cure the skipped step
        self.resident = True
        main, parameters = shards.main, self._parameter_groups()
        self._moments: tuple[str, ...] = ()
        if isinstance(settings, config.Adam):
            self._moments = ("exp_avg", "exp_avg_sq")
            self.torch: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=settings.lr, fused=True)
        else:
            momentum = settings.momentum if isinstance(settings, config.SGD) else 0.0
            self._moments = ("momentum_buffer",) if momentum else ()
            self.torch = torch.optim.SGD(parameters, lr=settings.lr, momentum=momentum)
        for tensor in main.values():
            state = self.torch.state[tensor]
            if isinstance(settings, config.Adam):
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
            state.update({kind: torch.zeros_like(tensor) for kind in self._moments})

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """Torch's groups: parameters with equal settings. What a router adds to scores is not among them: it has state,
        and no step changes it."""
        own, main = self.settings, self.shards.main
        settings = {"betas": own.betas, "eps": own.eps} if isinstance(own, config.Adam) else {}
        found: dict[GroupSettings, list[Tensor]] = {GroupSettings(own.lr, own.weight_decay): []}
        for name, tensor in main.items():
            if self._tensors.get(name, name).endswith(ROUTER_BIAS):
                continue
            key = settings_of(own, self._tensors.get(name, name), decays=name not in self._no_decay)
            found.setdefault(key, []).append(tensor)
        return [{**settings, "params": params, **key._asdict(), "highest": key.lr} for key, params in found.items()]

    def change(self, changes: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> None:
        """From the next step on: the settings with `changes`, besides those made `before` (default: so far)."""
        self._changes = {**(self._changes if before is None else before), **changes}
        self.settings = replace(self._given, **self._changes)
        self.torch.param_groups.clear()
        for group in self._parameter_groups():
            self.torch.add_param_group(group)

    @property
    def _names(self) -> list[str]:
        """Names of parameters, the same on all data parallel ranks."""
        return [*self.shards.storage, *self.shards.adapters]

    @property
    def lr(self) -> float:
        return self.settings.lr_at(self.steps)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self.scale is None else loss * self.scale.value

    @torch.no_grad()
    def step(self, refused: bool = False, leaving: bool = False) -> dict[str, float]:
        """`grad_norm` (over all ranks, before clipping), `lr`, and `skipped`: 1.0 when gradients were not finite, or
        with `refused`, in which case nothing was updated. The gradients are zero afterwards. Collective.

        A step that is `refused` has the norm nan and does not count as an overflow: the loss scale stays. `leaving`:
        parameters and state are offloaded next, so each part is copied to host memory while the next one is stepped.
        """
        if self._prepare(refused):
            for part in self.parts if leaving else [self._names]:
                names = [name for name in self._names if name in part]
                self._update(names)
                if leaving:
                    self.shards.memory.save(names)
                    self.memory.save([f"{kind}/{name}" for kind in ("main", *self._moments) for name in names])
        return self._finish()

    def step_parts(self, refused: bool = False) -> Iterator[int]:
        """`step` part by part: yields each when its parameters are final, also when nothing changes."""
        with torch.no_grad():  # not around a yield: the caller's code must not run under it
            updates = self._prepare(refused)
        for part, names in enumerate(self.parts):
            if updates:
                with torch.no_grad():
                    self._update([name for name in self._names if name in names])
            yield part
        self._finish()

    def _prepare(self, refused: bool) -> bool:
        """Measure and clip the gradients of all parameters; False when there is no update."""
        self.overflowed = self.changed = False
        if refused:
            self.result = {"grad_norm": math.nan, "lr": self.lr, "skipped": 1.0}
            return False
        scale = 1.0 if self.scale is None else self.scale.value
        norm = math.sqrt(self.shards.square_sum().item()) / scale
        skipped = not math.isfinite(norm)
        if not skipped:
            limit, factor = self.settings.clip_grad, 1.0 / scale
            if limit > 0 and norm > limit:
                factor *= limit / (norm + 1e-6)
            grads = self.shards.main_gradients()
            if factor != 1.0 and grads:
                torch._foreach_mul_(list(grads.values()), factor)
            for name, main in self.shards.main.items():
                main.grad = grads.get(name)
        self.changed = not skipped or self.scale is not None  # from here on, nothing that an error would undo
        if not skipped:
            self.memory.changed()
        if self.scale is not None:
            self.overflowed = skipped and self.scale.value > 1.0
            self.scale.update(overflow=skipped)
        self.result = {"grad_norm": norm, "lr": self.lr, "skipped": float(skipped)}
        for group in self.torch.param_groups:
            group["lr"] = self.settings.lr_at(self.steps, group["highest"])
        return not skipped

    def _update(self, names: Iterable[str]) -> None:
        """Step the main parameters of these tensors."""
        names, main = list(names), self.shards.main
        wanted = {id(main[name]) for name in names if name in main}
        groups = self.torch.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in wanted]
            self.torch.step()
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        self.shards.updated(names)

    def _finish(self) -> dict[str, float]:
        self.steps += not self.result["skipped"]
        self.zero_grad()
        return self.result

    def zero_grad(self) -> None:
        for main in self.shards.main.values():
            main.grad = None
        self.shards.gradients.drop()

    # State

    def storage(self) -> dict[str, Mapping[str, Tensor]]:
        """Kind -> tensors by the names of `shards.main`; after writing into them comes `moved`."""
        main, state = self.shards.main, self.torch.state
        return {"main": main, **{kind: {name: state[main[name]][kind] for name in main} for kind in self._moments}}

    def counters(self) -> dict[str, Any]:
        """Updates made, the state of the loss scale, and changed settings; plain values."""
        scale = {} if self.scale is None else self.scale.state()
        replaced = {name: repr(getattr(self._given, name)) for name in self._changes}
        return {"steps": self.steps, "loss_scale": scale, "changes": self._changes, "replaced": replaced}

    def moved(self, counters: Mapping[str, Any]) -> None:
        """Main parameters and moments were written from outside: continue with `counters`, copy main ones to the
        parameters. Collective over the data parallel ranks."""
        self.memory.changed()
        self.steps = counters["steps"]
        self.change(counters.get("changes", {}), before={})
        for name, replaced in counters.get("replaced", {}).items():
            if (given := getattr(self._given, name)) != self._changes[name] and repr(given) != replaced:
                logger.warning(
                    "The checkpoint's set_optimizer(%s=%r) replaced %s, and replaces %r of this program too. Call "
                    "set_optimizer for another value.", name, self._changes[name], replaced, given,
                )  # fmt: skip
        if isinstance(self.settings, config.Adam):
            for main in self.shards.main.values():
                self.torch.state[main]["step"].fill_(self.steps)
        if self.scale is not None and counters["loss_scale"]:
            self.scale.load(counters["loss_scale"])
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Parameters := main parameters. Collective over the data parallel ranks."""
        self.shards.updated(self._names)

    # Memory

    @cached_property
    def memory(self) -> Residency:
        """Behind state that does not share memory with the parameters."""
        own = {k: tensors for k, tensors in self.storage().items() if self.shards.separate or k != "main"}
        tensors = {f"{k}/{name}": tensor for k, v in own.items() for name, tensor in v.items()}
        beside = self.shards.memory
        return Residency(tensors, beside.device, images=HostImages(beside.images.stream))

    def offload(self) -> None:
        """Move it to host memory."""
        if self.resident:
            self.memory.offload()
            self.resident = False

    def release(self) -> None:
        """Free this state and drop its content; `reload` brings it back as zeros."""
        self.memory.release()
        self.resident = False

    def reload(self) -> None:
        """Bring it back; `memory.arrive` comes before it is used."""
        if not self.resident:
            self.memory.zero(self.memory.fetch())
            self.resident = True

    def close(self) -> None:
        """Free the state, on the device and on the host, also of tensors that others still refer to."""
        self.memory.release()
        self.zero_grad()
        values = [value for state in self.torch.state.values() for value in state.values()]
        tensors = {str(i): tensor for i, tensor in enumerate(values) if isinstance(tensor, Tensor)}
        Residency(tensors, self.shards.memory.device).release()
        self.torch.state.clear()
        self.torch.param_groups.clear()


class GroupSettings(NamedTuple):
    """The highest learning rate of the schedule, and the weight decay."""

    lr: float
    weight_decay: float


def settings_of(optimizer: Optimizer, tensor: str, decays: bool) -> GroupSettings:
    """Those of the canonical `tensor`; `decays`: without a group for it, it has the optimizer's weight decay."""
    groups: Any = optimizer.groups
    own = next((dict(own) for pattern, own in groups if matches(pattern, tensor)), {})
    decay = optimizer.weight_decay if decays else 0.0
    return GroupSettings(own.get("lr", optimizer.lr), own.get("weight_decay", decay))


def check_groups(optimizer: Optimizer, trained: Collection[str], layout: Layout) -> None:
    """Errors: ConfigError for a pattern without a trained tensor, two patterns for one tensor, and a parameter of a
    backend's own that consists of tensors of different groups."""
    name = type(optimizer).__name__
    patterns = [pattern for pattern, _ in optimizer.groups]
    for pattern in patterns:
        if not any(matches(pattern, tensor) for tensor in trained):
            known = {part for tensor in trained for part in tensor.split(".")}
            raise ConfigError(
                f"{name}(groups={{{pattern!r}: ...}}): no trained tensor has {pattern!r} in its name."
                f"{nearest(pattern, known)} Their names are those of model.safetensors, such as {next(iter(trained))}."
            )
    of = {tensor: [pattern for pattern in patterns if matches(pattern, tensor)] for tensor in trained}
    for tensor, found in of.items():
        if len(found) > 1:
            raise ConfigError(
                f"{name}(groups=...): {tensor} is in the groups {found[0]!r} and {found[1]!r}. Write patterns of which "
                f"one at most fits; * stands for any text."
            )
    parts: dict[Any, int] = {layout.part(rank) if layout.part else rank: rank for rank in range(layout.ranks)}
    for rank in parts.values():
        for regions in layout.storages(rank).values():
            joined = {region.box.tensor: of.get(region.box.tensor) for region in regions}
            one, *others = joined
            if other := next((tensor for tensor in others if joined[tensor] != joined[one]), None):
                raise ConfigError(
                    f"{name}(groups=...): {one} and {other} are one tensor of this backend, and their groups differ. "
                    f"Give both to one group, or train with hf.FSDP() or hf.ZeRO(stage=...)."
                )

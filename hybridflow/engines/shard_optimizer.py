"""ShardOptimizer: torch's AdamW or SGD on the float32 tensors that one rank of a sharded model steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow import config
from hybridflow.engine3d.residency import Residency
from hybridflow.engines.loss_scale import LossScale
from hybridflow.engines.shards import Shards
from hybridflow.errors import CheckpointError


class ShardOptimizer:
    """Clips, follows the learning-rate schedule and steps `shards.main`.

    Weight decay leaves out one-dimensional parameters (norms and biases): `flat` names them. `steps` counts the updates
    that were made, `groups` are the canonical tensors of each part of a step, `result` is what the last one returned.
    With a `scale` (float16) gradients are so many times too large.
    """

    def __init__(
        self,
        settings: config.Optimizer,
        shards: Shards,
        flat: Iterable[str],
        groups: Sequence[frozenset[str]],
        scale: LossScale | None = None,
    ) -> None:
        self.settings, self.shards, self.groups, self.scale = settings, shards, groups, scale
        self.steps = 0
        self.result: dict[str, float] = {}
        one_dimensional, main = frozenset(flat), shards.main
        parameters = [
            {"params": [main[n] for n in main if n not in one_dimensional], "weight_decay": settings.weight_decay},
            {"params": [main[n] for n in main if n in one_dimensional], "weight_decay": 0.0},
        ]
        self.torch = _make(settings, parameters)
        self._offloaded: Residency | None = None

    @property
    def _names(self) -> list[str]:
        """Of parameters, and of main ones that have names of their own (adapters)."""
        return list(dict.fromkeys([*self.shards.storage, *self.shards.main]))

    @property
    def lr(self) -> float:
        return self.settings.lr_at(self.steps)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss if self.scale is None else loss * self.scale.value

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """`grad_norm` (over all ranks, before clipping), `lr`, and `skipped`: 1.0 when gradients were not finite,
        in which case nothing was updated. The gradients are zero afterwards. Collective."""
        if self._prepare():
            self._update(self._names)
        return self._finish()

    def step_parts(self) -> Iterator[int]:
        """`step` part by part: yields each when its parameters are final, also when nothing changes."""
        with torch.no_grad():  # not around a yield: the caller's code must not run under it
            updates = self._prepare()
        for part, names in enumerate(self.groups):
            if updates:
                with torch.no_grad():
                    self._update([name for name in self._names if name in names])
            yield part
        self._finish()

    def _prepare(self) -> bool:
        """Measure and clip the gradients of all parameters; False when they are not finite."""
        scale = 1.0 if self.scale is None else self.scale.value
        norm = math.sqrt(self.shards.square_sum().item()) / scale
        skipped = not math.isfinite(norm)
        if self.scale is not None:
            self.scale.update(overflow=skipped)
        self.result = {"grad_norm": norm, "lr": self.lr, "skipped": float(skipped)}
        if skipped:
            return False
        limit, factor = self.settings.clip_grad, 1.0 / scale
        if limit > 0 and norm > limit:
            factor *= limit / (norm + 1e-6)
        grads = self.shards.main_gradients()
        if factor != 1.0 and grads:
            torch._foreach_mul_(list(grads.values()), factor)
        for name, main in self.shards.main.items():
            main.grad = grads.get(name)
        for group in self.torch.param_groups:
            group["lr"] = self.lr
        return True

    def _update(self, names: Iterable[str]) -> None:
        """Step the main parameters of these tensors; their gradients are not needed any more."""
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
        """Kind -> tensors by the names of `shards.main`. What the first step would make is made here, as it would."""
        main = self.shards.main
        return {"main": main, **{kind: {name: self._of(main[name])[kind] for name in main} for kind in self._moments()}}

    def _moments(self) -> tuple[str, ...]:
        if isinstance(self.settings, config.Adam):
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if isinstance(self.settings, config.SGD) and self.settings.momentum else ()

    def _of(self, main: Tensor) -> dict[str, Any]:
        state = self.torch.state[main]
        if isinstance(self.settings, config.Adam) and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=main.device)
        for kind in self._moments():
            if state.get(kind) is None:
                state[kind] = torch.zeros_like(main)
        return state

    def counters(self) -> dict[str, Any]:
        """Updates made and the state of the loss scale; plain values."""
        return {"steps": self.steps, "loss_scale": {} if self.scale is None else self.scale.state()}

    def moved(self, counters: Mapping[str, Any]) -> None:
        """Main parameters and moments were written from outside: go on with `counters`, parameters from main ones."""
        self.steps = counters["steps"]
        if isinstance(self.settings, config.Adam):
            for main in self.shards.main.values():
                self._of(main)["step"].fill_(self.steps)
        if self.scale is not None and counters["loss_scale"]:
            self.scale.load(counters["loss_scale"])
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Parameters := main parameters. Collective over the data parallel ranks."""
        self.shards.updated(list(self.shards.storage))

    def state(self) -> dict[str, Any]:
        """This rank's part: counters, main parameters and moments by kind and name. Tensors are copies on the CPU."""
        copies = {
            kind: {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}
            for kind, held in self.storage().items()
        }
        return {**self.counters(), "tensors": copies}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Any]) -> None:
        """Errors: CheckpointError when the state is of another model, optimizer or parallelism."""
        here, saved = self.storage(), state["tensors"]
        shapes, found = ({k: {n: tuple(t.shape) for n, t in v.items()} for k, v in s.items()} for s in (here, saved))
        if shapes != found:
            sizes = [sum(math.prod(x) for v in s.values() for x in v.values()) for s in (found, shapes)]
            raise CheckpointError(
                f"this optimizer state is {', '.join(saved)} of {sizes[0]} numbers, the rank has {', '.join(here)} of "
                f"{sizes[1]}. Load it with an equal optimizer, model and strategy."
            )
        for kind, held in here.items():
            for name, tensor in held.items():
                tensor.copy_(saved[kind][name])
        self.moved(state)

    # Memory

    def offload(self) -> None:
        """Move what does not share memory with the parameters to host memory."""
        if self._offloaded is None:
            held = self.storage() if self.torch.state else {"main": self.shards.main}
            own = {kind: tensors for kind, tensors in held.items() if self.shards.separate or kind != "main"}
            tensors = {f"{k}/{name}": tensor for k, v in own.items() for name, tensor in v.items()}
            self._offloaded = Residency(tensors, device=self.shards.memory.device)
            self._offloaded.offload()

    def reload(self) -> None:
        if self._offloaded is not None:
            self._offloaded.acquire()
            self._offloaded = None

    @property
    def resident(self) -> bool:
        return self._offloaded is None

    def close(self) -> None:
        """Free the state, on the device and on the host, whoever still refers to it."""
        if self._offloaded is not None:
            self._offloaded.release()
        self.zero_grad()
        held = [value for state in self.torch.state.values() for value in state.values()]
        tensors = {str(i): tensor for i, tensor in enumerate(held) if isinstance(tensor, Tensor)}
        Residency(tensors, device=self.shards.memory.device).release()
        self.torch.state.clear()
        self.torch.param_groups.clear()


def _make(settings: config.Optimizer, parameters: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if isinstance(settings, config.Adam):
        return torch.optim.AdamW(parameters, lr=settings.lr, betas=settings.betas, eps=settings.eps, fused=True)
    momentum = settings.momentum if isinstance(settings, config.SGD) else 0.0
    return torch.optim.SGD(parameters, lr=settings.lr, momentum=momentum)

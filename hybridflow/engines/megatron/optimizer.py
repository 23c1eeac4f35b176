"""Megatron's optimizers: the distributed optimizer for Adam, its replicated ones for SGD.

Paper, section 5: training runs with 3D parallelism and a distributed optimizer, whose state is split over data
parallel ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, _get_megatron_optimizer_based_on_param_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from hybridflow import config
from hybridflow.engines.megatron.buckets import Buckets
from hybridflow.engines.megatron.optimizer_layout import is_distributed
from hybridflow.engines.megatron.optimizer_state import OptimizerState
from hybridflow.errors import CheckpointError


class MegatronOptimizer:
    """Clips, follows the learning-rate schedule and steps one model's Megatron optimizer.

    Weight decay leaves out one-dimensional parameters (norms and biases). `steps` counts the updates that were made,
    `parts` are those of a step (see `units.step_groups`), `result` is what the last step returned.
    """

    def __init__(
        self,
        settings: config.Optimizer,
        buckets: Buckets,
        groups: ProcessGroupCollection,
        dtype: torch.dtype,
        parts: int,
    ) -> None:
        self.settings, self.buckets, self.steps, self.parts = settings, buckets, 0, parts
        self.result: dict[str, float] = {}
        self.megatron: Any = _get_megatron_optimizer_based_on_param_groups(
            # get_megatron_optimizer itself gathers the parameter groups' names over the whole torch world, which a
            # model on a slice of the pool must not do; every rank of ours has both groups anyway
            config=_optimizer_config(settings, dtype),
            model_chunks=buckets.wrapped,
            param_groups=_parameter_groups(buckets.module, settings),
            per_model_buffers={i: wrapped.buffers for i, wrapped in enumerate(buckets.wrapped)},
            model_parallel_group=groups.mp,
            data_parallel_group=groups.dp_cp,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=dist.get_rank(groups.mp),
            intra_dist_opt_group=groups.intra_dist_opt,
            pg_collection=groups,
        )
        if isinstance(settings, config.Adam):
            for group in self.megatron.param_groups:
                group["fused"] = True
        self.tensors = OptimizerState(self.megatron, settings, buckets.module, dtype)
        self._part_of = {name: unit.part for unit in buckets.units for name in unit.parameters}

    @property
    def lr(self) -> float:
        return self.settings.lr_at(self.steps)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self.megatron.scale_loss(loss)

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """`grad_norm` (over all ranks, before clipping), `lr`, and `skipped`: 1.0 when gradients were not finite,
        in which case nothing was updated. The gradients are zero afterwards."""
        if self._prepare():
            self._update()
            self.buckets.gather()
        return self._finish()

    def step_parts(self) -> Iterator[int]:
        """`step` part by part: yields each when its parameters are final and gathered, also when nothing changes."""
        with torch.no_grad():  # not around a yield: the caller's code must not run under it
            updates = self._prepare()
        for part in range(self.parts):
            if updates:
                with torch.no_grad():
                    self._update(part)
                    self.buckets.gather(part)
            yield part
        self._finish()

    def _prepare(self) -> bool:
        """Measure and clip the gradients of all parameters; False when they are not finite."""
        lr, norm = self.lr, math.nan
        overflow = self.megatron.prepare_grads()
        if not overflow:
            norm = self._grad_norm()
        skipped = overflow or not math.isfinite(norm)
        self.result = {"grad_norm": norm, "lr": lr, "skipped": float(skipped)}
        if not skipped:
            self._clip(norm)
            for group in self.megatron.param_groups:
                group["lr"] = lr
        return not skipped

    def _update(self, part: int | None = None) -> None:
        """Step the main parameters of `part` (default: all) and copy them to the parameters that this rank owns."""
        tensors, groups = self.tensors, self.megatron.param_groups
        names = [name for name in tensors.main if part is None or self._part_of[name] == part]
        if not names:
            return
        wanted, whole = {id(tensors.main[name]) for name in names}, [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if id(p) in wanted]
            self.megatron.optimizer.step()
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
        tensors.copy_to_parameters(names)

    def _finish(self) -> dict[str, float]:
        self.steps += not self.result["skipped"]
        self.zero_grad()
        return self.result

    def zero_grad(self) -> None:
        self.buckets.zero()
        self.megatron.zero_grad()

    def counters(self) -> dict[str, Any]:
        """Updates made (Adam's own step count too) and the state of the loss scale; plain values."""
        scaler = getattr(self.megatron, "grad_scaler", None)
        scale = scaler.state_dict() if scaler else {}
        return {
            "steps": self.steps,
            "loss_scale": {k: v.tolist() if isinstance(v, Tensor) else v for k, v in scale.items()},
        }

    def moved(self, counters: Mapping[str, Any]) -> None:
        """Main parameters and moments were written from outside: go on with `counters`, parameters from main ones."""
        self.steps = counters["steps"]
        self.tensors.set_steps(self.steps)
        scaler = getattr(self.megatron, "grad_scaler", None)
        if scaler is not None and counters["loss_scale"]:
            scale = counters["loss_scale"]
            scaler.load_state_dict({**scale, "scale": torch.tensor(scale["scale"], device=scaler.scale.device)})
        self.restore()

    @torch.no_grad()
    def restore(self) -> None:
        """Parameters := main parameters, gathered over the data parallel ranks."""
        self.tensors.copy_to_parameters(self.tensors.main)
        self.buckets.gather()

    def _grad_norm(self) -> float:
        """Each parameter counts once: not its tensor parallel copies, not the second tied embedding."""
        grads = self.megatron.get_main_grads_for_grad_norm()
        total = torch.zeros((), dtype=torch.float64, device=next(self.buckets.module.parameters()).device)
        if grads:
            total += torch.stack(torch._foreach_norm(grads)).double().square_().sum()
        dist.all_reduce(total, group=self.megatron.get_grad_stats_parallel_group())
        return math.sqrt(total.item())

    def _clip(self, norm: float) -> None:
        limit = self.settings.clip_grad
        if limit > 0 and norm > limit:
            grads = [p.grad for p in self.megatron.get_parameters() if p.grad is not None]
            if grads:
                torch._foreach_mul_(grads, limit / (norm + 1e-6))

    def parameters_changed(self) -> None:
        """Take the model's parameters over into the float32 main parameters (they were written from outside)."""
        self.megatron.reload_model_params()

    def state(self) -> dict[str, Any]:
        """This rank's part: main parameters, moments, step count, loss scale. Tensors are copies on the CPU."""
        scaler = getattr(self.megatron, "grad_scaler", None)
        return {
            "steps": self.steps,
            "main": [p.detach().to("cpu", copy=True) for p in self.megatron.get_parameters()],
            "torch": _copied(self.megatron.optimizer.state_dict()),
            "scaler": scaler.state_dict() if scaler else None,
        }

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Errors: CheckpointError when the state is of another model or another parallelism."""
        mains, parameters = state["main"], self.megatron.get_parameters()
        if [m.shape for m in mains] != [p.shape for p in parameters]:
            raise CheckpointError(
                f"this optimizer state has {len(mains)} parameters of {sum(m.numel() for m in mains)} numbers, the "
                f"rank has {len(parameters)} of {sum(p.numel() for p in parameters)}. Load it with equal p, t and d."
            )
        for parameter, main in zip(parameters, mains, strict=True):
            parameter.copy_(main)
        self.megatron.optimizer.load_state_dict(state["torch"])
        self.steps = state["steps"]
        if state["scaler"] is not None:
            self.megatron.grad_scaler.load_state_dict(state["scaler"])

    def close(self) -> None:
        """Free the state, and drop the gradients that the optimizer refers to."""
        self.megatron.zero_grad()
        self.tensors.close()


def _optimizer_config(settings: config.Optimizer, dtype: torch.dtype) -> OptimizerConfig:
    own: dict[str, Any] = {}
    if isinstance(settings, config.Adam):
        own = {"adam_beta1": settings.betas[0], "adam_beta2": settings.betas[1], "adam_eps": settings.eps}
    elif isinstance(settings, config.SGD):
        own = {"sgd_momentum": settings.momentum}
    return OptimizerConfig(
        optimizer="adam" if isinstance(settings, config.Adam) else "sgd",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        initial_loss_scale=2.0**16,
        params_dtype=dtype,
        use_distributed_optimizer=is_distributed(settings),
        **own,
    )


def _parameter_groups(model: nn.Module, settings: config.Optimizer) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay, with the keys that Megatron reads."""
    out = []
    for flat, decay in ((False, 1.0), (True, 0.0)):
        parameters = [p for p in model.parameters() if p.requires_grad and (p.ndim == 1) == flat]
        keys = {"wd_mult": decay, "lr_mult": 1.0, "max_lr": settings.lr, "min_lr": settings.min_lr}
        keys |= {"is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
        out.append({"params": parameters, "weight_decay": settings.weight_decay * decay, **keys})
    return out


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value

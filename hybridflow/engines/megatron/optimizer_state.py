"""OptimizerState: main parameters and moments by parameter name, as `optimizer_layout` describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow import config
from hybridflow.engine3d.residency import Residency


class OptimizerState:
    """What a Megatron optimizer keeps on this rank. Adam's tensors are flat ranges of parameters, SGD's whole ones.

    `main` are the float32 tensors that are stepped. `separate`: they are copies that 16-bit parameters are made of;
    otherwise (`dtype` is float32) they are views of the parameters, or the parameters. All ranks agree on it, also one
    that owns nothing: of small units a data parallel rank may have the padding alone.
    """

    def __init__(self, megatron: Any, settings: config.Optimizer, model: nn.Module, dtype: torch.dtype) -> None:
        self.settings, self.separate, self._torch = settings, dtype != torch.float32, megatron.optimizer
        self.main: dict[str, Tensor] = {}
        self._copied: dict[str, Tensor] = {}  # the part of a 16-bit parameter that a main parameter is copied to
        flat = getattr(megatron, "model_param_group_index_map", None)
        parameter: Any
        for name, parameter in model.named_parameters():
            if flat is not None and parameter not in flat:
                continue  # another data parallel rank owns all of it
            if flat is not None:
                group, at = flat[parameter]
                self.main[name] = megatron.param_groups[group]["params"][at]
                if self.separate:
                    self._copied[name] = megatron.shard_float16_groups[group][at]
            elif self.separate:
                self.main[name], self._copied[name] = parameter.main_param, parameter.detach()
            else:
                self.main[name] = parameter
        self._views = {name: main.detach() for name, main in self.main.items()}
        self._offloaded: Residency | None = None

    def copy_to_parameters(self, names: Iterable[str]) -> None:
        """Round the main parameters `names` to the parameters' dtype."""
        wanted = list(names)
        if self.separate and wanted:
            torch._foreach_copy_([self._copied[n] for n in wanted], [self._views[n] for n in wanted])

    def storage(self) -> dict[str, Mapping[str, Tensor]]:
        """Kind -> tensors by name. What the optimizer would make in its first step is made here, as it makes it."""
        kinds: dict[str, Mapping[str, Tensor]] = {"main": self._views}
        for kind in self._moments():
            kinds[kind] = {name: self._of(main)[kind] for name, main in self.main.items()}
        return kinds

    def _moments(self) -> tuple[str, ...]:
        if isinstance(self.settings, config.Adam):
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if isinstance(self.settings, config.SGD) and self.settings.momentum else ()

    def _of(self, main: Tensor) -> dict[str, Any]:
        state = self._torch.state[main]
        if isinstance(self.settings, config.Adam) and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=main.device)
        for kind in self._moments():
            if state.get(kind) is None:
                state[kind] = torch.zeros_like(main, memory_format=torch.preserve_format).detach()
        return state

    def set_steps(self, steps: int) -> None:
        """Adam counts the steps of every parameter."""
        if isinstance(self.settings, config.Adam):
            for main in self.main.values():
                self._of(main)["step"].fill_(steps)

    def offload(self) -> None:
        """Move what does not share memory with the parameters to host memory."""
        if self._offloaded is None:
            kinds = self.storage() if self._torch.state else {"main": self._views}
            own = {kind: held for kind, held in kinds.items() if self.separate or kind != "main"}
            tensors = {f"{kind}/{name}": tensor for kind, held in own.items() for name, tensor in held.items()}
            self._offloaded = Residency(tensors)
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
        tensors = [value for state in self._torch.state.values() for value in state.values()]
        tensors += self._views.values() if self.separate else ()
        Residency({str(i): tensor for i, tensor in enumerate(tensors) if isinstance(tensor, Tensor)}).release()
        self._torch.state.clear()
        self.main, self._copied, self._views = {}, {}, {}

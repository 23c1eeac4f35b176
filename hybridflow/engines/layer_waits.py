"""Layer waits: a model whose parameters are still being copied in computes each layer once its own are there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines.units import LAYER


def wait_by_layer(model: nn.Module, memory: Residency, waited: Callable[[nn.Module, Any], None]) -> None:
    """From now on parameters in `memory` come in the order in which `model` uses them: those outside of layers, for
    which the model itself waits, then layer after layer, each of which waits before it computes, on its device's
    stream. `waited(module, mark)` is called where there was something to wait for.
    """

    def wait(names: set[str], module: nn.Module, *_: Any) -> None:
        if (mark := memory.arrive(names)) is not None:
            waited(module, mark)

    paths = {path: LAYER.match(f"{path}.") for path, _ in model.named_modules()}
    layers = [path for path, found in paths.items() if found is not None and found.end() == len(path) + 1]
    if isinstance(model, FSDPModule):  # which gathers with itself what is no unit of its own, such as image encoders
        layers = [path for path in layers if isinstance(model.get_submodule(path), FSDPModule)]
    named, left = list[str](), memory.names
    hooks: list[tuple[nn.Module, set[str]]] = []
    for layer in map(model.get_submodule, layers):
        own = memory.names_of(map(local_tensor, layer.parameters())) & left
        named, left = [*named, *sorted(own)], left - own
        hooks.append((layer, own))
    memory.sort([*sorted(left), *named])
    for module, names in [(model, left), *hooks]:
        if names:  # first: FSDP gathers a layer's parameters before it computes, too
            module.register_forward_pre_hook(partial(wait, names), prepend=True)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, detached, sharing its memory."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()

"""Parameters: the weights of one rank by name, their memory, and the padding that no box of the layout covers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from hybridflow.engine3d.residency import Residency
from hybridflow.engines.megatron.units import EMBEDDING, OUTPUT, Unit, vocabulary_rows
from hybridflow.model_spec import ModelSpec


class Parameters:
    """`storage` holds a model's parameters without gradients, `memory` what is behind them.

    Rows that pad the vocabulary must be finite, or they would spoil what they are multiplied with by zero: they are
    zero from the start, and again whenever memory comes back.
    """

    def __init__(self, model: nn.Module, units: Iterable[Unit], spec: ModelSpec, t: int, at: int) -> None:
        expected = {name: shape for unit in units for name, shape in unit.parameters.items()}
        found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert expected == found, "units.py does not describe Megatron's model"
        self.storage = {name: parameter.detach() for name, parameter in model.named_parameters()}
        start, stop = vocabulary_rows(spec.vocab, t, at)
        names = (EMBEDDING,) if spec.head == "value" else (EMBEDDING, OUTPUT)
        self.padding = {name: self.storage[name][stop - start :] for name in names if name in self.storage}
        for rows in self.padding.values():
            rows.zero_()
        self.memory: Residency = _PaddedMemory(self.storage, self.padding)


class _PaddedMemory(Residency):
    """Zeroes the padding whose memory it gives back."""

    def __init__(self, tensors: Mapping[str, Tensor], padding: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self._padding = padding

    def acquire(self, names: Iterable[str] | None = None) -> set[str]:
        fresh = super().acquire(names)
        for name in fresh & self._padding.keys():
            self._padding[name].zero_()
        return fresh

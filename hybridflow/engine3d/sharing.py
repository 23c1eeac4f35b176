"""Memory that training and generation use both: where a rank holds the same elements in the same places for either."""

from __future__ import annotations

from torch import Tensor

from hybridflow.engine3d.designs import Design, equal_storages
from hybridflow.engine3d.holders import Generator, Trainer


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether each can use the memory of the other."""
    return (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())


def share_equal(design: Design, train: Trainer, generate: Generator, rank: int) -> dict[str, str]:
    """Let generation use the memory of training tensors that hold the same elements in the same places.

    Returns generation name -> training name. A training storage that also holds tensors which cannot be shared is
    left out: it would have to stay for the sake of a part of it, and zero redundancy comes first.

    Errors: those of `Generator.share`.
    """
    if design.staging is not None:
        return {}
    source, destination = train.storage(), generate.storage()
    places: dict[int, set[str]] = {}
    for name, tensor in source.items():
        places.setdefault(tensor.untyped_storage()._cdata, set()).add(name)
    equal = equal_storages(design.source, design.destination, rank)
    pairs = {mine: theirs for mine, theirs in equal if alike(source[mine], destination[theirs])}
    shared = {}
    for names in places.values():
        if names <= pairs.keys():
            shared |= {pairs[name]: name for name in names if generate.share(pairs[name], source[name])}
    return shared

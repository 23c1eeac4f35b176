"""What the processes of the ZeRO tests do: each function runs on every data parallel rank of a model.

Models are transformers' own, and so is the forward pass: an engine adds no more than micro-batches to it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hybridflow import config
from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer.transfer import execute
from hybridflow.engines.flat_shards import FlatShards
from hybridflow.engines.fsdp.layout import fsdp_layout
from hybridflow.engines.shard_optimizer import ShardOptimizer
from hybridflow.engines.units import optimizer_layout, step_groups, whole_units
from hybridflow.topology import RankGrid
from tests.contracts.engine_tasks import share
from tests.contracts.example_models import load_model, loss_of, make_batch, reference, spec_of, totals_of
from tests.contracts.rank_processes import World

Boxes = list[tuple[str, tuple, tuple, Tensor]]
MICRO_BATCHES = 2


def flat_shards(context: Any, model: Any, tensors: Any, **settings: Any) -> FlatShards:
    return FlatShards(context, model, whole_units(tensors), context.groups.everyone(), **settings)


class Trained:
    """A model on `ranks` processes with what trains it."""

    def __init__(
        self,
        world: World,
        name: str,
        path: Path,
        head: str,
        optimizer: config.Optimizer,
        *,
        ranks: int = 4,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        self.head, self.tensors = head, spec_of(path, head).tensors()
        self.context = world.context(name, RankGrid(d=ranks), kept=True)
        self.model: Any = load_model(path, head).to(world.device, dtype)
        self.shards = flat_shards(self.context, self.model, self.tensors, **settings)
        flat = [name for name, shape in self.tensors.items() if len(shape) == 1]
        self.optimizer = ShardOptimizer(
            optimizer, self.shards, flat, step_groups(self.tensors), fp16=dtype == torch.float16
        )

    def backward(self, seed: int = 0, counts: Sequence[int] | None = None, scale: float = 1.0) -> None:
        """The gradients of a mini-batch, of which some ranks and micro-batches have no rows."""
        batch, loss = make_batch(seed=seed), loss_of(self.head)
        device = self.context.device
        mine = share(batch, self.context.grid, self.context.rank, counts).to(device)
        middle = (mine.rows + 1) // 2
        for i, rows in enumerate((mine[:middle], mine[middle:])):
            self.shards.before_backward(last=i == MICRO_BATCHES - 1)
            if rows.rows:
                scalar, _ = loss(reference(self.model, self.head, rows), rows, totals_of(batch))
            else:
                token = torch.zeros(1, 1, dtype=torch.int64, device=device)
                scalar = self.model.model(token).last_hidden_state[:0].sum()
            self.optimizer.scale_loss(scalar.float() * scale).backward()
        self.shards.after_pass()
        self.shards.reduce()

    def update(self, seed: int, counts: Sequence[int] | None = None) -> dict[str, float]:
        self.backward(seed, counts)
        return self.optimizer.step()

    def parameters(self) -> dict[str, Tensor]:
        return {name: tensor.float().clone() for name, tensor in self.shards.storage.items()}

    def state(self) -> dict[str, Boxes]:
        """Every kind of optimizer state as the canonical boxes that this rank has."""
        regions = optimizer_layout(self.tensors, self.context.grid.d).regions(self.context.rank)
        return {
            kind: [(r.box.tensor, r.box.start, r.box.stop, r.view(held[r.storage]).clone()) for r in regions]
            for kind, held in self.optimizer.storage().items()
        }

    def close(self) -> None:
        self.optimizer.close()
        self.shards.close()
        self.context.groups.close()


def updates(
    world: World,
    name: str,
    path: Path,
    head: str,
    optimizer: config.Optimizer,
    settings: Mapping[str, Any],
    counts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Two updates: the summed gradients of the first, all norms, the parameters and the state after them."""
    trained = Trained(world, name, path, head, optimizer, **settings)
    trained.backward(0, counts)
    gradients = trained.shards.gradients.tensors
    results = [trained.optimizer.step(), trained.update(1, counts)]
    found = {
        "gradients": gradients,
        "results": results,
        "parameters": trained.parameters(),
        "state": trained.state(),
        "scale": trained.optimizer.counters()["loss_scale"],
    }
    trained.close()
    return found


def passes_add_up(world: World, name: str, path: Path, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sum of two mini-batches' gradients: added up without a word in between, and looked at after the first."""
    trained = Trained(world, name, path, "lm", config.SGD(lr=0.1), stage=stage)
    found = []
    for look in (False, True):
        trained.backward(0)
        if look:
            assert trained.shards.gradients.tensors
        trained.backward(1)
        found.append(trained.shards.gradients.tensors)
        trained.shards.gradients.drop()
    trained.close()
    return found[0], found[1]


def in_parts(world: World, name: str, path: Path, optimizer: config.Optimizer, settings: Mapping[str, Any]) -> bool:
    """Updates as a whole and in parts are bitwise equal, and each part is final when it is yielded."""
    whole = Trained(world, f"{name}-whole", path, "lm", optimizer, **settings)
    parts = Trained(world, f"{name}-parts", path, "lm", optimizer, **settings)
    for seed in range(2):
        expected = whole.update(seed)
        parts.backward(seed)
        for part in parts.optimizer.step_parts():
            for tensor in parts.optimizer.parts[part]:
                assert parts.shards.storage[tensor].equal(whole.shards.storage[tensor]), f"{tensor} in part {part}"
        assert parts.optimizer.result == expected
    same = _equal_state(whole.state(), parts.state())
    before = parts.parameters()
    parts.backward(2, scale=float("inf") if world.rank == 0 else 1.0)
    skipped = [*parts.optimizer.step_parts()] == list(range(len(parts.optimizer.parts)))
    assert parts.optimizer.result["skipped"] == 1.0
    skipped = skipped and all(value.equal(before[key]) for key, value in parts.parameters().items())
    assert not any(gradient.any() for gradient in parts.shards.gradients.tensors.values())
    whole.close()
    parts.close()
    return same and skipped


def _equal_state(one: dict[str, Boxes], other: dict[str, Boxes]) -> bool:
    assert one.keys() == other.keys()
    pairs = [pair for kind in one for pair in zip(one[kind], other[kind], strict=True)]
    return all(a[:3] == b[:3] and a[3].equal(b[3]) for a, b in pairs)


def bytes_held(world: World, name: str, path: Path, dtype: str, optimizer: Any, stage: int) -> dict[str, int]:
    """Bytes of all tensors that an update leaves alive on this rank (`held`), those of them that are gradients, and the
    most that a backward pass adds to them."""
    trained = Trained(world, name, path, "lm", optimizer, dtype=getattr(torch, dtype), stage=stage)
    trained.update(0)
    held, gradients, during = _live_bytes(), trained.shards.gradients.memory.total_bytes, [0]
    parameters, known = list(trained.model.parameters()), []
    for parameter in parameters:  # hooks run in the order in which they were registered
        parameter.register_post_accumulate_grad_hook(lambda _: during.append(_live_bytes(parameters, known)))
    trained.shards.before_backward()
    scalar = trained.model(torch.zeros(1, 1, dtype=torch.int64, device=world.device)).logits.float().sum()
    known.extend(gc.get_objects())  # what is there now is not looked at
    scalar.backward()
    trained.shards.after_pass()
    known.clear()
    del scalar
    after = _live_bytes()
    trained.close()
    gone = _live_bytes()
    assert len(during) == 1 + len(trained.tensors)
    return {"held": held - gone, "again": after - gone, "gradients": gradients, "added": max(during)}


def _live_bytes(parameters: Sequence[Tensor] = (), known: Sequence[Any] = ()) -> int:
    """Of the storages of all tensors that the collector knows, without those `known`, and of the gradients of
    `parameters`."""
    if not parameters:
        gc.collect()
    before = {id(thing) for thing in known}
    # some things answer `isinstance` with warnings
    every = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor) and not thing.is_meta]
    found: list[Any] = [thing for thing in every if id(thing) not in before]
    storages = [tensor.untyped_storage() for tensor in [*found, *(p.grad for p in parameters)] if tensor is not None]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def main_parameters(world: World, name: str, path: Path, dtype: str, stage: int) -> dict[str, Any]:
    """16-bit parameters are those main parameters that were stepped, whatever was done to them in between."""
    settings: dict[str, Any] = {"dtype": getattr(torch, dtype), "stage": stage}
    trained = Trained(world, name, path, "lm", config.Adam(lr=1e-4, clip_grad=0), **settings)
    first = trained.parameters()
    results = [trained.update(seed) for seed in range(2)]
    found = {"results": results, "first": first, "parameters": trained.parameters(), "state": trained.state()}
    memory, before = trained.shards.memory, trained.parameters()
    memory.release()
    assert memory.resident_bytes == 0
    memory.acquire()
    for tensor in trained.shards.storage.values():
        tensor.fill_(torch.nan)
    trained.optimizer.restore()
    found["restored"] = all(value.equal(before[key]) for key, value in trained.parameters().items())
    for tensor in trained.shards.storage.values():
        tensor.fill_(0.5)
    trained.shards.parameters_changed()
    found["written"] = all(bool((main == 0.5).all()) for main in trained.shards.main.values())
    trained.close()
    return found


def offloaded(world: World, name: str, path: Path, optimizer: Any, stage: int) -> bool:
    """With state in host memory updates are bitwise those without."""
    here = Trained(world, f"{name}-here", path, "lm", optimizer, stage=stage)
    there = Trained(world, f"{name}-there", path, "lm", optimizer, stage=stage, offload=True)
    for seed in range(2):
        assert here.update(seed) == there.update(seed)
    equal = all(value.equal(there.shards.storage[key]) for key, value in here.shards.storage.items())
    apart = {main.untyped_storage()._cdata for main in there.shards.main.values()}
    apart -= {tensor.untyped_storage()._cdata for tensor in there.shards.storage.values()}
    equal = equal and len(apart) == len(there.shards.main)
    here.close()
    there.close()
    return equal


def moved(world: World, name: str, path: Path, optimizer: Any, stage: int) -> dict[str, Any]:
    """An update on four ranks, one on the first two of them, and one on four again, the state moving on; and three
    on four ranks."""
    everyone = Trained(world, f"{name}-0", path, "lm", optimizer, stage=stage)
    group = everyone.context.groups.everyone()
    everyone.update(0)
    layout = optimizer_layout(everyone.tensors, 4)
    half = Trained(world, f"{name}-1", path, "lm", optimizer, stage=stage, ranks=2) if world.rank < 2 else None
    narrow = optimizer_layout(everyone.tensors, 2).placed([0, 1], 4)
    _move(everyone, layout, half, narrow, group)
    if half is not None:
        half.update(1)
    back = Trained(world, f"{name}-2", path, "lm", optimizer, stage=stage)
    _move(half, narrow, back, layout, group, counters={"steps": 2, "loss_scale": {}})
    rows = fsdp_layout(everyone.tensors, 4)  # the state can be had in any other cut
    kinds = {kind: _in_layout(layout, rows, held, group, world.rank) for kind, held in back.optimizer.storage().items()}
    back.update(2)
    straight = Trained(world, f"{name}-3", path, "lm", optimizer, stage=stage)
    for seed in range(3):
        straight.update(seed)
    found = {"moved": back.parameters(), "straight": straight.parameters(), "rows": kinds}
    found |= {"counters": (back.optimizer.counters(), straight.optimizer.counters())}
    for trained in (everyone, half, back, straight):
        if trained is not None:
            trained.close()
    return found


def _move(
    old: Trained | None, source: Layout, new: Trained | None, to: Layout, group: Any, counters: Any = None
) -> None:
    planned, rank = plan(source, to), group.rank()
    kinds = (old or new).optimizer.storage()  # type: ignore[union-attr]
    for kind in kinds:
        held, wanted = (trained.optimizer.storage()[kind] if trained else {} for trained in (old, new))
        execute(planned, held, wanted, group, rank)
    if new is not None:
        new.optimizer.moved(counters or old.optimizer.counters())  # type: ignore[union-attr]


def _in_layout(layout: Layout, other: Layout, held: Any, group: Any, rank: int) -> Boxes:
    regions = other.regions(rank)
    device = next(iter(held.values())).device
    storage = {region.storage: torch.full(region.box.shape, torch.nan, device=device) for region in regions}
    execute(plan(layout, other), held, storage, group, rank)
    return [(r.box.tensor, r.box.start, r.box.stop, r.view(storage[r.storage])) for r in regions]


class Branches(nn.Module):
    """Uses its layers from the last to the first, and `odd` only where it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.odd = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor, odd: bool) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x).tanh()
        return self.odd(x) if odd else x


def any_order(world: World, name: str, stage: int, overlap: bool) -> tuple[bool, list[str]]:
    """Layers that are used in another order, and one that only some ranks use: sums are those of one process."""
    model, alone = Branches().to(world.device), Branches().to(world.device)
    tensors = {key: tuple(parameter.shape) for key, parameter in model.named_parameters()}
    context = world.context(name, RankGrid(d=4))
    shards = flat_shards(context, model, tensors, stage=stage, overlap=overlap)
    inputs = torch.randn(3, 4, 2, 8, generator=torch.Generator().manual_seed(1)).to(world.device)
    for inputs_of_pass in inputs:
        shards.before_backward()
        model(inputs_of_pass[world.rank], odd=world.rank == 2).square().sum().backward()
        for rank, x in enumerate(inputs_of_pass):
            alone(x, odd=rank == 2).square().sum().backward()
    shards.after_pass()
    shards.reduce()
    expected: dict[str, Any] = {key: parameter.grad for key, parameter in alone.named_parameters()}
    found = shards.gradients.tensors
    same = all(torch.allclose(found[key], expected[key], rtol=1e-5, atol=1e-6) for key in tensors)
    kept = [key for key, parameter in model.named_parameters() if parameter.grad is not None]
    shards.close()
    context.groups.close()
    return same, kept


def meta_and_frozen(world: World, name: str, path: Path) -> dict[str, Any]:
    """A model on the meta device gets memory once, tied as it was; a frozen one has no gradients and no state."""
    from transformers import AutoConfig, AutoModelForCausalLM

    spec, context = spec_of(path), world.context(name, RankGrid(d=4))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    shards = flat_shards(context, model.requires_grad_(False), spec.tensors(), stage=2)
    found = {
        "devices": {parameter.device.type for parameter in model.parameters()},
        "dtypes": {parameter.dtype for parameter in model.parameters()},
        "same": all(p.data_ptr() == shards.storage[n].data_ptr() for n, p in model.named_parameters()),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
        "kept": (shards.gradients.memory.total_bytes, len(shards.main), len(shards.gradients.tensors)),
    }
    shards.close()
    found["left"] = sum(tensor.untyped_storage().nbytes() for tensor in shards.storage.values())
    context.groups.close()
    return found


def left_after_close(world: World, name: str, path: Path, settings: Mapping[str, Any], away: bool) -> int:
    """Bytes behind what somebody still holds of closed shards."""
    trained = Trained(world, name, path, "lm", config.Adam(lr=1e-3), **settings)
    trained.update(0)
    shards, optimizer = trained.shards, trained.optimizer
    state = [tensor for kind in optimizer.storage().values() for tensor in kind.values()]
    held = [*shards.storage.values(), *trained.model.parameters(), *shards.gradients.own.values(), *state]
    if away:
        shards.memory.offload()
        shards.gradients.offload(zero=True)
        optimizer.offload()
    trained.close()
    return sum(tensor.untyped_storage().nbytes() for tensor in held)

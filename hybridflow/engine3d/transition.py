"""Transition: moves one rank's weights from the training layout to the generation layout, and back.

To generation, layer by layer: a generation tensor gets memory just before its first byte arrives, and a recoverable
training tensor is freed just after its last byte was read. Back, without communication: a training shard is part of its
device's generation shard (paper, section 5.3) and is copied out of it.

It works on a `Trainer` and a `Generator`, the part of a training and a generation engine that it uses, so `engine3d`
imports no engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.engine3d.layout import Layout, equal_storages
from hybridflow.engine3d.offloadable import Memory, MemoryAccount, TrackedMemory
from hybridflow.engine3d.plan import BUCKET_BYTES, WeightPlan, plan
from hybridflow.engine3d.transfer.buffers import same_memory
from hybridflow.engine3d.transfer.handshake import check_complete, holds, wire_device
from hybridflow.engine3d.transfer.transfer import LocalCopies, Storage, Transfer
from hybridflow.errors import LayoutError, WaitTimeoutError
from hybridflow.topology import RankGrid


class Holder(Protocol):
    """Holds one rank's part of a model's weights."""

    def layout(self) -> Layout:
        """Boxes of every rank of the group."""
        ...

    def storage(self) -> Mapping[str, Tensor]:
        """This rank's weights by the names that `layout().regions(rank)` uses; the same memory on every call."""
        ...

    def memory(self) -> Memory:
        """The memory behind `storage()`; while names are released the holder does not compute."""
        ...


class Trainer(Holder, Protocol):
    """A holder whose weights are trained. `step_result` is what an optimizer step returned last."""

    grid: RankGrid

    @property
    def restorable(self) -> bool:
        """Whether the optimizer has float32 main parameters apart from the parameters, which `restore` reads."""
        ...

    @property
    def step_result(self) -> dict[str, float]: ...

    def restore(self) -> None:
        """Parameters := main parameters, all of them resident again. Collective over the data parallel ranks. Errors:
        ConfigError when the trainer is not `restorable`."""
        ...

    def step_groups(self) -> Sequence[frozenset[str]]:
        """Canonical tensors that each part of a step updates, disjoint, all of them, the same on every rank.

        Every pipeline stage steps its k-th decoder layer in the same part, so that all stages are busy in all parts."""
        ...

    def step_parts(self) -> Iterator[int]:
        """An optimizer step part by part, bitwise equal to the step as a whole (PUZZLE, section 5.2).

        The gradient norm of all ranks and clipping come first. k is yielded when the parameters of `step_groups()[k]`
        are final on this rank, gathered from its data parallel ranks; every rank must continue at the same pace. A
        skipped step yields every part too. When exhausted, gradients are zero and `step_result` is set; an iterator
        that is dropped half-way leaves the step unfinished."""
        ...

    def offload(self, what: Collection[Any]) -> None:
        """Move parameters, optimizer or gradients to host memory. The trainer cannot compute without them."""
        ...

    def reload(self, what: Collection[Any]) -> None:
        """Bring offloaded state back; other state is left alone."""
        ...


class Generator(Holder, Protocol):
    """A holder that generates."""

    def share(self, name: str, tensor: Tensor) -> bool:
        """Make weight `name` use the memory of `tensor` (of equal shape, dtype, device): False where impossible.

        `memory()` has to be requested again afterwards; it leaves `name` alone."""
        ...

    def weights_changed(self, version: int | None = None) -> None:
        """Drop caches of the old weights (prefix cache). `version`: of the new ones, by default the next number."""
        ...

    def sleep(self) -> None:
        """Release the KV cache, and with it generation, until `wake()`. May be called twice."""
        ...

    def wake(self) -> None:
        """Allocate the KV cache again."""
        ...


SHARE, SMALLEST_BUCKET = 2, 128 << 10  # a bucket is half a shard: 16 more rounds would cost as much as the bytes
KEPT_SHARE = 0.25  # share of the training shard that may stay while generating instead of being gathered again


class Transition:
    """Between this rank's trainer and generator, which both have memory for all weights when it is built.

    A training tensor that no local copy can restore - generation's dtype is narrower, or its shard lacks a part
    (groupings other than the paper's, unequal vocabulary padding) - is kept; if there are many and the trainer has main
    parameters, they are released and restored from those.
    Building is collective over `group`.

    `nodes[rank]` is the node of each rank; empty: all are equally near. Errors, before anything moves or is shared:
    LayoutError when trainer and generator differ in their tensors or `nodes` has another number of ranks; those of
    `Generator.share` and `Transfer`."""

    def __init__(
        self,
        train: Trainer,
        generate: Generator,
        group: dist.ProcessGroup | None,
        rank: int,
        bucket_bytes: int | None = None,
        nodes: Sequence[int] = (),
    ) -> None:
        self._train, self._generate, self.account, self._left = train, generate, MemoryAccount(), False
        self._layouts = train.layout(), generate.layout()
        ranks = max(layout.ranks for layout in self._layouts)
        if nodes and len(nodes) != ranks:
            raise LayoutError(f"nodes={tuple(nodes)} are of {len(nodes)} ranks, the layouts of {ranks}.")
        self.plan: WeightPlan = plan(*self._layouts, nodes.__getitem__ if nodes else None, rank=rank, exact=True)
        source, self.shared = train.storage(), self._share(rank)
        destination = generate.storage()
        self.bucket_bytes = bucket_bytes or _bucket_bytes(self._layouts[1], destination)
        self._back, recovered = local_restore(self._layouts[0], self.plan, source, destination, rank)
        released = self._released(recovered, group)
        own = self._layouts[1].storages(rank)
        moved = [name for name in own if name not in self.shared]
        gaps = [name for name in moved if sum(r.box.numel for r in own[name]) < destination[name].numel()]
        self.train = TrackedMemory(train.memory(), source, self.account, released)
        self.generate = TrackedMemory(generate.memory(), destination, self.account, moved, gaps)
        self.transfer = Transfer(
            *(self.plan, source, destination, group, rank, self.bucket_bytes), release=self.train, acquire=self.generate
        )

    def _share(self, rank: int) -> dict[str, str]:
        """Let generation use the memory of training tensors with the same elements in the same places.

        Returns generation name -> training name. Leaves out a training storage that also holds unshared tensors: it
        would have to stay for a part of it, and zero redundancy comes first."""
        source, destination = self._train.storage(), self._generate.storage()
        by_storage: dict[int, set[str]] = {}
        for name, tensor in source.items():
            by_storage.setdefault(tensor.untyped_storage()._cdata, set()).add(name)
        equal = equal_storages(*self._layouts, rank)
        pairs = {mine: theirs for mine, theirs in equal if alike(source[mine], destination[theirs])}
        shared = {}
        for names in by_storage.values():
            if names <= pairs.keys():
                shared |= {pairs[name]: name for name in names if self._generate.share(pairs[name], source[name])}
        return shared

    def _released(self, recovered: set[str], group: dist.ProcessGroup | None) -> set[str]:
        """Training tensors that may be released; decides whether copies or main parameters restore them."""
        self._restored = False
        size = {name: tensor.nbytes for name, tensor in self._train.storage().items()}
        here = {name for name in self._back if name not in self.shared.values()}
        lost = sum(size[name] for name in here - recovered)
        if self._train.restorable and any_rank(lost > KEPT_SHARE * sum(size.values()), group):
            self._restored = True  # on all ranks: restoring is collective
            return here
        return here & recovered

    def check(self) -> None:
        """Errors: LayoutError when a holder's tensors were replaced."""
        sides = (("training", self._train, self.train), ("generation", self._generate, self.generate))
        for what, side, memory in sides:
            if replaced := memory.replaced(side.storage()):
                raise LayoutError(
                    f"{len(replaced)} {what} tensors were replaced since their weights were planned to move, "
                    f"{replaced[:3]} among them: what would move is what they were. Build the HybridEngine anew, and "
                    "after whatever replaces tensors (FSDP's first forward pass does)."
                )

    def prepare(self) -> None:
        """Take the memory that `run` needs first: its buffers, and generation's if that comes as a whole. Errors:
        OutOfMemoryError, also where less is free than later steps need: in them peers wait for this rank."""
        self._left = True
        self.transfer.prepare()
        if (device := next(iter(self.generate.tensors.values())).device).type == "cuda":
            need, free = self._needed(), torch.cuda.mem_get_info(device)[0]
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            if need > free:
                raise torch.OutOfMemoryError(f"weights that move to generation need {need} bytes, {free} are free.")

    def _needed(self) -> int:
        """The least that `run` needs at its peak beside what is allocated, in bytes."""
        need = most = 0
        for acquired, released in self.transfer.memory_steps:
            need += sum(self.generate.bytes_of(name) for name in acquired if not self.generate.resident(name))
            most = max(most, need)
            need -= sum(self.train.bytes_of(name) for name in released)
        return most

    def run(self) -> None:
        """Update the generation weights and release training tensors.

        Collective over the group. Errors: WaitTimeoutError, or out of memory. Pieces that have not arrived are then
        still in the training tensors, and `back` recovers the others."""
        self._left = True
        self.transfer.run()
        self.train.release()

    def recall(self) -> None:
        """Reload the current generation weights and release training's. No communication."""
        self._left = True
        self.generate.acquire()
        self.train.release()

    @torch.no_grad()
    def back(self, *, keep: bool) -> None:
        """Refill released training tensors, layer by layer, and release the generation tensors unless `keep`.

        After an error call it again: it continues where it stopped."""
        gone = self.train.gone
        if self._left and self._restored:  # on all ranks, even those that released nothing
            if not keep:
                self.generate.release()
            self.train.acquire()
            self._train.restore()
            gone.clear()
        order = [name for name in self._back if name in gone]
        last = {
            read: name for name in order for read in self._back[name].reads
        }  # the last training tensor that reads each
        if not keep:
            self.generate.release([name for name in self.generate.tensors if name not in last])
        for name in order:
            self.train.acquire((name,))
            self._back[name].run()
            gone.discard(name)
            if not keep:
                self.generate.release([read for read in self._back[name].reads if last[read] == name])
        self._left = False
        if not keep:
            self.generate.release()


def local_restore(
    layout: Layout, forward: WeightPlan, source: Storage, destination: Storage, rank: int
) -> tuple[dict[str, LocalCopies], set[str]]:
    """Copies that fill training tensors from this rank's generation tensors: the plan's local part in reverse (section
    5.3). Also returns the tensors that they restore exactly: fully covered, in a dtype that holds every value. Both
    sides have memory."""
    regions = layout.storages(rank)
    back = {name: LocalCopies() for name in regions}
    missing = {name: sum(region.box.numel for region in own) for name, own in regions.items()}
    for move in forward.local(rank):
        name, at = move.origin.storage, move.into[0]
        if holds(destination[at.storage].dtype, source[name].dtype):
            missing[name] -= move.box.numel
            into, from_ = move.origin.view(source[name], move.box), at.view(destination[at.storage], move.box)
            if not same_memory(into, from_):
                back[name].add(into, from_)
            back[name].reads.add(at.storage)
    return back, {name for name, count in missing.items() if count == 0}


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether the tensors can share memory."""
    return (one.shape, one.dtype, one.device, one.stride()) == (other.shape, other.dtype, other.device, other.stride())


def _bucket_bytes(layout: Layout, tensors: Storage) -> int:
    """Bucket size from the shard of rank 0, equal on all ranks."""
    elements = sum(region.box.numel for region in layout.regions(0))
    width = max(tensor.itemsize for tensor in tensors.values())
    return min(BUCKET_BYTES, max(SMALLEST_BUCKET, elements * width // SHARE))


def any_rank(condition: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether `condition` holds on some rank. Collective over `group`. Errors: WaitTimeoutError."""
    if group is None:
        return condition
    found = torch.tensor([condition], dtype=torch.uint8, device=wire_device(group))
    try:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    except RuntimeError as error:
        raise WaitTimeoutError(
            f"ranks agree on how weights move, and one did not come: {error}. All ranks of the group have to make the "
            "same calls of their HybridEngine; look for an earlier error on the others."
        ) from error
    result = bool(found.item())  # waits for the device
    check_complete(group)
    return result

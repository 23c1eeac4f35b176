"""CallEstimate: what the calls of a training engine take on one rank, counted by running the engine on a FakeDevice.

That runs an engine's code on tensors without memory. Floating point tensors are torch's FakeTensors on the device type
"cpu" (another needs a build of torch for it), which stand for a device's; whole numbers, such as token ids and lengths,
and what is computed from these alone are real, since code branches on them. Numbers that are read from fake tensors are
ones. Collectives are of a process group that has this rank alone.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import Optimizer, TrainStrategy
from hybridflow.engines import attention
from hybridflow.engines.contract import UNINITIALIZED
from hybridflow.engines.process_groups import Meeting, ProcessGroups, RankContext
from hybridflow.engines.profile import example_rows
from hybridflow.engines.router_replay import ROUTING, RouterReplay, replay_sizes
from hybridflow.engines.train_backends import build_engine
from hybridflow.engines.train_engine import TrainEngine
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import Decoder
from hybridflow.planner.describe.model_sizes import Sizes
from hybridflow.topology import RankGrid


@dataclass(frozen=True)
class CallEstimate:
    """Of one call on one rank."""

    held: Mapping[str, int]
    """Bytes by owner, as `TrainEngine.resident_bytes` has them, while the call runs."""
    active: int
    """Bytes beside these at the peak: activations, logits, what is gathered, message buffers."""
    flops: float
    collectives: Mapping[str, tuple[float, float]]
    """By kind: their number, and the bytes of their largest sides."""

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + self.active


@dataclass(frozen=True)
class CallRows:
    """A call of a group on one rank: its `rows` of (prompt, response) tokens, of one mini-batch in training, which is
    done `times` times."""

    kind: Literal["inference", "training"]
    rows: Sequence[tuple[int, int]]
    times: int = 1


def estimate_rank(
    role: str,
    rank: int,
    grid: RankGrid,
    strategy: TrainStrategy,
    spec: Decoder,
    optimizer: Optimizer | None,
    calls: Mapping[str, CallRows],
) -> dict[str, CallEstimate]:
    """Each of `calls` on this rank.

    Of a pass of many micro-batches twice as many as there are pipeline stages run, and at least four, whose rotations
    Megatron keeps, since peaks do not grow after these; FLOP and collectives of the others are added as of those.
    Errors: ConfigError in a process that is part of a torch world, and those of the engine.
    """
    device, found = FakeDevice(), dict[str, CallEstimate]()
    with device.rank(role, rank, grid) as context:
        engine = build_engine(context, strategy, spec, UNINITIALIZED, optimizer)
        if Sizes.of(spec).experts:
            engine.replay_routing()
        for name, asked in calls.items():
            found[name] = _Counted(device, engine, asked).estimate()
        engine.close()
        context.groups.close()
        del engine
        gc.collect()
    return found


def asked_rows(rows: Sequence[tuple[int, int]], spec: Decoder) -> Batch:
    """Rows of these numbers of prompt and response tokens, which meet all experts alike."""
    batch = example_rows(*zip(*rows, strict=True), spec=spec)
    if not Sizes.of(spec).experts:
        return batch
    layers, each, count = replay_sizes(spec)
    tokens = [sum(row) for row in rows]
    chosen = torch.arange(sum(tokens) * each).remainder(count).view(-1, 1, each).expand(-1, layers, -1)
    return batch.with_columns(**{ROUTING: Ragged.from_lengths(chosen, tokens)})


class _Counted:
    """Runs a call on the rows of the largest of its micro-batches."""

    def __init__(self, device: FakeDevice, engine: TrainEngine, asked: CallRows) -> None:
        self.device, self.engine, self.asked = device, engine, asked
        tokens = torch.tensor([prompt + response for prompt, response in asked.rows])
        self.parts = sorted(engine.tokens.split.rows(tokens), key=lambda rows: -int(tokens[rows].sum()))
        self.held: dict[str, int] = {}
        self.loss: Any = policy_loss() if engine.spec.head == "lm" else value_loss()

    def estimate(self) -> CallEstimate:
        stages, total = self.engine.grid.p, len(self.parts)
        least = max(4, 2 * stages)  # rows are split into two for each stage at least, however few they are
        taken = least + max(2, stages // 2)
        many, few = self._made(taken), self._made(least)
        peak, flops, collectives = self._run(taken)
        if few < many < total:  # the difference of two passes is what more micro-batches would add
            more = (total - many) / (many - few)
            _, less, before = self._run(least)
            flops += more * (flops - less)
            for kind, (count, size) in list(collectives.items()):
                fewer, smaller = before.get(kind, (0.0, 0.0))
                collectives[kind] = count + more * (count - fewer), size + more * (size - smaller)
        times = self.asked.times
        found = {kind: (times * count, times * size) for kind, (count, size) in collectives.items()}
        return CallEstimate(dict(self.held), peak - sum(self.held.values()), times * flops, found)

    def _rows(self, count: int) -> list[tuple[int, int]]:
        """Those of the `count` largest micro-batches."""
        return [self.asked.rows[at] for part in self.parts[:count] for at in part.tolist()]

    def _made(self, count: int) -> int:
        """How many micro-batches the engine makes of them."""
        return len(self.engine.tokens.split.rows(torch.tensor([sum(row) for row in self._rows(count)])))

    def _run(self, count: int) -> tuple[int, float, dict[str, tuple[float, float]]]:
        """Peak bytes, FLOP and collectives with the `count` largest micro-batches."""
        device, engine = self.device, self.engine
        batch = asked_rows(self._rows(count), engine.spec)
        device.restart()
        if self.asked.kind == "inference":
            engine.forward(batch, ("log_probs",) if engine.spec.head == "lm" else ("values",))
            self.held = engine.resident_bytes()
        else:
            engine.forward_backward(batch, self.loss, self.loss.outputs)
            self.held = engine.resident_bytes()
            engine.step()
        gc.collect()
        return device.peak, device.flops, dict(device.collectives)


aten: Any = torch.ops.aten
_KINDS = {"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"}
_KINDS |= {"alltoall": "all-to-all", "broadcast": "broadcast", "send": "send", "recv": "receive"}
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def _product(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> float:
    return 2.0 * a.numel() * out_val.shape[-1]


_FLOPS = {torch.ops.mkldnn._linear_pointwise: _product, aten._grouped_mm: _product}  # torch does not count these


class FakeDevice(TorchDispatchMode):
    """Within, `allocated` bytes have memory, `peak` at most since `restart`; `flops` and `collectives` (number and
    bytes, by kind) count from there."""

    def __init__(self) -> None:
        super().__init__()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._sizes: dict[int, int] = {}
        self.allocated = self.peak = 0
        self.restart()

    def restart(self) -> None:
        self.peak, self.flops = self.allocated, 0.0
        self.collectives: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Tensor) and kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it calls this again with the local ones
        if torch._C._get_dispatch_mode(_FAKE) is not None:  # torch asks for the shape of a result
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if fake and func is aten._local_scalar_dense.default:
            return 1.0 if tensors[0].is_floating_point() else 1
        if func is aten.copy_.default and any(tensor.is_meta for tensor in tensors):  # a storage's bytes
            return args[0]
        if func is aten._to_copy.default and str(kwargs.get("device")) == "meta":
            like, dtype = tensors[0], kwargs.get("dtype")
            return torch.empty_strided(like.shape, like.stride(), dtype=dtype or like.dtype, device="meta")
        out = None
        if _makes(tensors, kwargs):
            with self._mode:
                out = func(*args, **kwargs)
        if not isinstance(out, Tensor) or not out.is_floating_point():  # others are real
            out = func(*args, **kwargs)
        if func is torch.ops.c10d._allgather_base_.default and not fake:  # numbers, which all ranks say alike
            args[0].view(-1, args[1].numel()).copy_(args[1].view(-1))
        self._count(func, args, kwargs, out, fake)
        return out

    def _count(self, func: Any, args: Any, kwargs: Any, out: Any, fake: bool) -> None:
        if func.namespace == "c10d" and fake:
            name = func._overloadpacket.__name__
            kind = next((kind for known, kind in _KINDS.items() if known in name), name)
            sizes = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args]
            number, size = self.collectives[kind]
            self.collectives[kind] = number + 1, size + max(sizes)
        packet = func._overloadpacket
        if (flops := _FLOPS.get(packet) or flop_registry.get(packet)) is not None:
            causal = func.namespace == "torch_attn"  # torch counts all pairs of a sequence
            self.flops += flops(*args, **kwargs, out_val=out) / (2 if causal else 1)
        for tensor in tree_leaves(out):
            if type(tensor) in (Tensor, FakeTensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self._sizes:
                    self._sizes[key] = 0
                    weakref.finalize(storage, self._resized, key, None)
                    self._resized(key, storage.nbytes())

    def _resized(self, key: int, size: int | None) -> None:
        """A known storage has `size` bytes now; None: it is gone."""
        self.allocated += (size or 0) - self._sizes.pop(key)
        self.peak = max(self.peak, self.allocated)
        if size is not None:
            self._sizes[key] = size

    @contextmanager
    def rank(self, role: str, rank: int, grid: RankGrid) -> Iterator[RankContext]:
        """The context of one rank of a group, in which engines are built and run. Errors: ConfigError in a process
        that has a torch world."""
        if dist.is_initialized():
            raise ConfigError("an estimate needs a process of its own: this one is part of a torch world already.")
        device, resize = torch.device("cpu"), torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._sizes:
                self._resized(storage._cdata, storage.nbytes())

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=grid.size)
        try:
            with ExitStack() as within:
                within.enter_context(patch.object(torch.UntypedStorage, "resize_", resized))
                within.enter_context(patch.object(attention, "has_flash_kernels", lambda device: True))
                within.enter_context(patch.object(dist, "all_gather_object", _said_alike))
                within.enter_context(patch.object(RouterReplay, "__call__", _forced))
                groups = _FakeGroups(FakeStore(), role, range(grid.size), rank, device)
                within.enter_context(self)
                yield RankContext(role, rank, grid, device, groups)
        finally:
            dist.destroy_process_group()


def _makes(tensors: list[Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation on these makes a tensor on a device of nothing, such as `torch.zeros`."""
    device = kwargs.get("device")
    return all(tensor.is_meta for tensor in tensors) and str(device) != "meta" and not (tensors and device is None)


def _said_alike(everyone: list[Any], mine: Any, group: Any = None) -> None:
    """All ranks say what this one says."""
    everyone[:] = [mine] * len(everyone)


def _forced(replay: RouterReplay, chosen_Tk: Tensor) -> Tensor:
    """Code branches on the experts of tokens: those that rows say, and the first one of tokens that fill rows up."""
    assert replay.forced is not None
    return replay.forced.to(chosen_Tk.dtype).clamp(min=0)


class _Alone(Meeting):
    """The others do not exist."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(store)
        self.store = store

    def enter(self, name: str, rank: int, members: int, seconds: float, says: str = "") -> list[bytes]:
        return []


class _FakeGroups(ProcessGroups):
    def __post_init__(self) -> None:
        self.meeting = _Alone(self.store)

    def new(self, name: str, members: Any, backend: str | None = None, timeout: float | None = None) -> Any:
        return super().new(name, members, "fake", timeout)

    def collectives(self) -> dict[str, int]:
        return {}

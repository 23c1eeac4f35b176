"""Every operator of the CUDA dispatch key runs the CPU's kernel, on the same memory, as a launch of its stream."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tests.emulated_cuda import findings, graph_kernels, runtime
from tests.emulated_cuda.cpu_kernels import KERNELS
from tests.emulated_cuda.import_hooks import after_import
from tests.emulated_cuda.runtime import alias, current_stream, launch, touch

# fmt: off
# These are torch's own: no kernel of theirs runs, or the runtime's stand-in does the work.
NATIVE = {
    "empty.memory_format", "empty_strided", "as_strided", "view", "view.dtype", "_reshape_alias", "resize_", "unfold",
    "is_pinned", "pin_memory", "_pin_memory", "record_stream", "_local_scalar_dense", "alias", "is_set_to", "set_",
    "_fused_sdp_choice", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "detach",
    "resize_as_", "is_same_size", "equal_shape", "_has_compatible_shallow_copy_type", "_cudnn_init_dropout_state",
    "squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze", "expand",
}
# The host waits for the size, or the value, of their result.
DYNAMIC = {
    "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal", "histc",
    "is_all_true",
}
# They have no deterministic kernel in the wheel, by `torch.use_deterministic_algorithms`; the others have one.
NOT_DETERMINISTIC = {
    "put_", "histc", "kthvalue", "median.dim", "nll_loss2d_forward", "nll_loss2d_backward", "_ctc_loss_backward",
    "max_unpool2d", "max_unpool3d", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward", "grid_sampler_2d_backward",
    "reflection_pad1d_backward", "reflection_pad2d_backward", "upsample_bilinear2d_backward",
}
# fmt: on
WORKSPACES = (":4096:8", ":16:8")
INDEXING = {"index", "index_put_", "_index_put_impl_", "index_put", "_unsafe_index", "_unsafe_index_put"}

_library: Any = None
_draws = itertools.count()  # of random numbers by graphs


class Call:
    """One call of an operator: its arguments as CPU tensors, its results as CUDA tensors."""

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.device: torch.device | None = None
        self.originals: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the alias, which stays alive
        self.accesses: list[tuple[Tensor, bool]] = []  # tensor, written
        self.host: list[Tensor] = []  # arguments on the CPU
        self.fresh: list[Tensor | None] = []  # results as aliases; None: an argument

    def argument(self, x: Any, write: bool = False) -> Any:
        if isinstance(x, Tensor):
            return self.tensor(x, write)
        if isinstance(x, (list, tuple)) and any(isinstance(y, (Tensor, list, tuple)) for y in x):
            return type(x)(self.argument(y, write) for y in x)
        if isinstance(x, torch.device):
            if x.type == "cuda" and self.device is None:
                self.device = torch.device("cuda", torch.cuda.current_device() if x.index is None else x.index)
            return torch.device("cpu")
        if isinstance(x, torch.Generator):
            if x.device.type == "cpu":
                raise RuntimeError(f"Expected a 'cuda' device type for generator but found 'cpu' ({self.operator})")
            return generator(x)
        return x

    def tensor(self, x: Tensor, write: bool) -> Tensor:
        if x.device.type == "cpu":
            self.host.append(x)
        if x.device.type != "cuda":
            return x
        if self.device is None:
            self.device = x.device
        elif self.device != x.device:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found {self.device} and {x.device} "
                f"({self.operator})"
            )
        on_cpu = alias(x)
        self.originals[id(on_cpu)] = (on_cpu, x)
        self.accesses.append((x, write))
        return on_cpu

    def check_devices(self, base: str, first: Any) -> None:
        """Errors: RuntimeError for a tensor on the CPU, as CUDA's kernels. An index there costs a copy: reported."""
        wrong = [x for x in self.host if x.dim() and self.originals]
        if wrong and base in INDEXING and wrong[0] is not first:
            findings.tell("host index", f"{base} {tuple(wrong[0].shape)}")
        elif wrong:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {self.device} and "
                f"cpu! ({self.operator}, {tuple(wrong[0].shape)})"
            )

    def result(self, x: Any, stream: int, name: str) -> Any:
        """CPU results as CUDA tensors; arguments that were returned are the caller's."""
        if isinstance(x, (list, tuple)):
            return type(x)(self.result(y, stream, name) for y in x)
        if not isinstance(x, Tensor):
            return x
        if id(x) in self.originals:
            self.fresh.append(None)
            return self.originals[id(x)][1]
        out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=self.device)
        touch(out, stream, True, name)
        on_cpu = alias(out)
        on_cpu.copy_(x)
        self.fresh.append(on_cpu)
        return out


def tensors_of(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from tensors_of(x)


def generator(x: torch.Generator) -> torch.Generator:
    """The CPU's generator for the next numbers of a CUDA generator; in a graph, for those of each replay."""
    if torch.cuda.is_current_stream_capturing():
        return torch.Generator().manual_seed(next(_draws))
    made = torch.Generator().manual_seed((x.initial_seed() * 1000003 + x.get_offset()) % (1 << 63))
    x.set_offset(x.get_offset() + 4)
    return made


def run(operator: Any, name: str, special: Callable | None, args: tuple, kwargs: dict) -> Any:
    """Call `special`, or the operator itself, with the arguments as CPU tensors."""
    call = Call(operator)
    base = name.partition(".")[0]
    if torch.are_deterministic_algorithms_enabled():
        check_deterministic(name)
    given, named, outs = arguments(call, args, kwargs)
    if call.device is None:
        call.device = torch.device("cuda", torch.cuda.current_device())
    add_generator(call, given, named)
    call.check_devices(base, args[0] if args else None)
    stream = current_stream(call.device)
    capturing = launch(stream, name)
    if is_dynamic(base, args, kwargs):
        findings.tell("data-dependent", base)
        if capturing:
            graph_kernels.refuse(stream, base)
    for x, write in call.accesses:
        touch(x, stream, write, name)
    # a number in place of a tensor: the overload is chosen again
    numbers = (
        isinstance(x, (int, float)) and isinstance(a.type, torch.TensorType)
        for a, x in zip(operator._schema.arguments, given)
    )
    compute = special or (operator.overloadpacket if any(numbers) else operator)
    with torch._C._AutoDispatchBelowAutograd():
        value = computed(operator, compute, given, named, bool(outs))
        for key, out in outs.items():
            out.resize_(named[key].shape)
            touch(out, stream, True, name)
            alias(out).copy_(named[key])
            call.originals[id(named[key])] = (named[key], out)
        result = call.result(value, stream, name)
    if capturing:
        record(call, operator, compute, given, named, outs, stream)
    return result


def check_deterministic(name: str) -> None:
    """Errors: RuntimeError, as of CUDA's kernels."""
    if name in NOT_DETERMINISTIC:
        raise RuntimeError(f"{name} does not have a deterministic implementation")
    if name in ("mm", "addmm", "bmm", "baddbmm") and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in WORKSPACES:
        raise RuntimeError(f"Deterministic behavior was enabled, and CuBLAS needs CUBLAS_WORKSPACE_CONFIG ({name})")


def arguments(call: Call, args: tuple, kwargs: dict) -> tuple[list[Any], dict[str, Any], dict[str, Tensor]]:
    """Positional and named arguments on the CPU, and `out=` tensors that the operator will give their size."""
    schema = call.operator._schema.arguments
    writes = [a.alias_info is not None and a.alias_info.is_write for a in schema]
    given = [call.argument(x, write) for x, write in zip(args, writes)]
    named: dict[str, Any] = {}
    outs: dict[str, Tensor] = {}
    for a, write in zip(schema, writes):
        if a.name not in kwargs:
            continue
        x = kwargs[a.name]
        if write and a.is_out and isinstance(x, Tensor) and not x.numel():
            outs[a.name] = x
            call.device = call.device or x.device
            named[a.name] = torch.empty(0, dtype=x.dtype)
        else:
            named[a.name] = call.argument(x, write)
    return given, named, outs


def add_generator(call: Call, given: list[Any], named: dict[str, Any]) -> None:
    """The device's own generator, where the operator draws and none was given."""
    schema = call.operator._schema
    index = next((i for i, a in enumerate(schema.arguments) if a.name == "generator"), None)
    if schema.name == "aten::native_dropout":  # draws, and takes none
        index = len(given)
    if index is None or any(isinstance(x, torch.Generator) for x in (*given, *named.values())):
        return
    made = generator(torch.cuda.default_generators[call.device.index])
    if index < len(given):
        given[index] = made
    else:
        named["generator"] = made


def is_dynamic(base: str, args: tuple, kwargs: dict) -> bool:
    if base == "repeat_interleave":
        return kwargs.get("output_size") is None
    masks = (torch.bool, torch.uint8)
    return base in DYNAMIC or (base in INDEXING and any(isinstance(i, Tensor) and i.dtype in masks for i in args[1]))


def computed(operator: Any, compute: Callable, given: list[Any], named: dict[str, Any], sized: bool) -> Any:
    try:
        return compute(*given, **named)
    except (RuntimeError, NotImplementedError) as error:
        if "not implemented for" not in str(error) or sized:
            raise
        return widened(operator, given, named)


def widened(operator: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """In float32, where the CPU has no kernel for 16 bits; in float64, where it has none for whole numbers."""
    dtypes = [x.dtype for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    small = {torch.float16, torch.bfloat16} & set(dtypes) or {torch.int32, torch.int64}
    dtype = next(dtype for dtype in dtypes if dtype in small)
    wider = torch.float32 if dtype.is_floating_point else torch.float64

    def wide(x: Any) -> Any:
        return x.to(wider) if isinstance(x, Tensor) and x.dtype in small else x

    def narrow(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.dtype == wider else x

    out = operator(*map(wide, args), **{key: wide(x) for key, x in kwargs.items()})
    return type(out)(map(narrow, out)) if isinstance(out, (tuple, list)) else narrow(out)


def record(call: Call, operator: Any, compute: Callable, given: list, named: dict, outs: dict, stream: int) -> None:
    """A replay calls the CPU's kernel again, on the same memory."""
    fresh = call.fresh
    sized = [(key, alias(out)) for key, out in outs.items()]
    sources = [x for x in (*given, *named.values()) if isinstance(x, torch.Generator)]

    def kernel() -> None:
        for source in sources:
            source.manual_seed(next(_draws))
        with torch.no_grad():
            value = computed(operator, compute, given, named, bool(sized))
            for key, target in sized:
                target.copy_(named[key])
            for target, x in zip(fresh, tensors_of(value), strict=True):
                if target is not None:
                    target.copy_(x)

    graph_kernels.record(stream, kernel)


def copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Between devices and the host: torch's own, the runtime copies; on one device: the CPU's kernel."""
    copy = torch.ops.aten.copy_.default
    if self.device.type == "meta" or src.device.type == "meta":
        meta = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
        return copy.redispatch(meta, self, src, non_blocking)
    native = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    if self.device == src.device:
        if not is_same(self, src):
            run(copy, "copy_", None, (self, src), {})
        return self
    if src.shape != self.shape:
        src = src.expand(self.shape)
    dense = torch._prims_common.is_non_overlapping_and_dense_or_false(self)
    if self.dtype == src.dtype and self.stride() == src.stride() and dense:
        return copy.redispatch(native, self, src, non_blocking)
    src = src.contiguous()
    if self.device.type == "cuda":
        there = torch.empty_strided(src.shape, src.stride(), dtype=src.dtype, device=self.device)
        copy.redispatch(native, there, src, non_blocking)
        run(copy, "copy_", None, (self, there), {})
        return self
    src = src.to(self.dtype)
    if self.is_contiguous():
        return copy.redispatch(native, self, src, non_blocking)
    here = torch.empty_like(src, device="cpu")
    copy.redispatch(native, here, src, False)
    return self.copy_(here)


def is_same(one: Tensor, other: Tensor) -> bool:
    same = one.data_ptr() == other.data_ptr() and one.dtype == other.dtype
    return same and one.shape == other.shape and one.stride() == other.stride()


def foreach_copy_(self: list[Tensor], src: list[Tensor], non_blocking: bool = False) -> None:
    for one, other in zip(self, src, strict=True):
        one.copy_(other, non_blocking)


def install() -> None:
    """Once in a process, after torch was imported."""
    global _library
    if _library is not None:
        return
    from tests.emulated_cuda import vllm_patches

    runtime.connect()
    graph_kernels.connect()
    _library = torch.library.Library("aten", "IMPL")
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        space, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        if space != "aten" or name in NATIVE or name.endswith("_symint") or base == "copy_":
            continue
        operator = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if operator is not None:
            _library.impl(name, kernel(operator, name, KERNELS.get(name)), "CUDA", allow_override=True)
    _library.impl("copy_", copy_, "CUDA", allow_override=True)
    _library.impl("_foreach_copy_", foreach_copy_, "CUDA", allow_override=True)
    torch.library._impls -= _library._op_impls  # vLLM's kernels may replace these, as they may torch's own
    after_import(vllm_patches.PATCHES)


def kernel(operator: Any, name: str, special: Callable | None) -> Callable:
    return lambda *args, **kwargs: run(operator, name, special, args, kwargs)

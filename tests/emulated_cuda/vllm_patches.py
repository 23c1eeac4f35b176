"""What vLLM needs to run here: its kernels in plain torch, graphs without Inductor."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from tests.emulated_cuda import graph_kernels, operators
from tests.emulated_cuda.runtime import alias, current_stream, launch, quiet, touch
from tests.emulated_cuda.vllm_experts import EXPERT_OPERATORS, experts_matmul
from tests.emulated_cuda.vllm_kernels import OPERATORS, flash_attention

GRAPH_SIZES = (1, 4, 16)  # rows of a decode step

_libraries: list[torch.library.Library] = []


def as_kernel(function: Callable, name: str, written: tuple[str, ...] = ()) -> Callable:
    """A Python function on CPU tensors as a kernel; `written`: its named arguments that it changes."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = operators.Call(name)
        given = [call.argument(x) for x in args]
        named = {key: call.argument(x, key in written) for key, x in kwargs.items()}
        if wrong := [x for x in call.host if x.dim()]:
            raise RuntimeError(f"{name}: a tensor {tuple(wrong[0].shape)} is on the CPU")
        stream = current_stream(call.device)
        capturing = launch(stream, name)
        for x, write in call.accesses:
            touch(x, stream, write, name)
        with torch.no_grad():
            result = call.result(function(*given, **named), stream, name)
        if capturing:
            graph_kernels.record(stream, replayed(function, given, named, call.fresh))
        return result

    return kernel


def replayed(function: Callable, given: list, named: dict, fresh: list) -> Callable[[], None]:
    def kernel() -> None:
        with torch.no_grad():
            value = function(*given, **named)
            for target, x in zip(fresh, operators.tensors_of(value), strict=True):
                if target is not None:
                    target.copy_(x)

    return kernel


def own_operators(_: ModuleType) -> None:
    for space, kernels in {**OPERATORS, "_moe_C": EXPERT_OPERATORS}.items():
        library = torch.library.Library(space, "IMPL")
        _libraries.append(library)
        for name, function in kernels.items():
            operator = getattr(getattr(torch.ops, space), name).default
            library.impl(name, operators.kernel(operator, name, function), "CUDA", allow_override=True)
    interpret_triton()


def interpret_triton() -> None:
    """Triton's interpreter works on CPU tensors: it gets the device's memory as such, without copies of its own."""
    from triton.runtime import interpreter

    original = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.device.type == "cuda"]
        if not tensors:
            original(self, *args, **kwargs)
            return
        given = [alias(x) if isinstance(x, torch.Tensor) else x for x in args]
        named = {key: alias(x) if isinstance(x, torch.Tensor) else x for key, x in kwargs.items()}
        stream = current_stream(tensors[0].device)
        name = getattr(self.fn, "__name__", "triton")
        capturing = launch(stream, name)
        for x in tensors:
            touch(x, stream, capturing, name)  # which are written is not known; a capture restores all
        made = copy.copy(self)
        if callable(self.grid):  # a function may hold device tensors, which a graph does not keep

            def sizes(values: Any) -> Any:
                made.grid = self.grid(values)
                return made.grid

            made.grid = sizes
        with quiet():
            original(made, *given, **named)
        if capturing:
            graph_kernels.record(stream, lambda: original(made, *given, **named))

    interpreter.GridExecutor.__call__ = call
    dot = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return dot(self, widened(a), widened(b), *more)

    def widened(x: Any) -> Any:
        """Numbers instead of bits: the interpreter multiplies those of bfloat16 as integers."""
        if x.dtype.scalar is not interpreter.tl.bfloat16:
            return x
        return interpreter.TensorHandle((x.data.astype("uint32") << 16).view("float32"), interpreter.tl.float32)

    interpreter.InterpreterBuilder.create_dot = create_dot


def attention(module: ModuleType) -> None:
    module.flash_attn_varlen_func = as_kernel(flash_attention, "flash_attention", ("out",))
    module.get_scheduler_metadata = lambda *args, **kwargs: torch.zeros(1, dtype=torch.int32, device="cuda")


def experts(module: ModuleType) -> None:
    kernel = as_kernel(experts_matmul, "experts_matmul", ("C",))
    names = list(inspect.signature(module.invoke_fused_moe_triton_kernel).parameters)
    module.invoke_fused_moe_triton_kernel = lambda *args, **kwargs: kernel(**dict(zip(names, args)), **kwargs)


def sampling(module: ModuleType) -> None:  # Triton's interpreter cannot run this kernel
    module.apply_top_k_top_p_triton = module.apply_top_k_top_p_pytorch


def no_warmup(module: ModuleType) -> None:
    module.kernel_warmup = lambda worker: None


def no_inductor(module: ModuleType) -> None:
    """An engine that is not eager captures graphs of whole decode steps, which need no Inductor, for few sizes."""
    create = module.EngineArgs.create_engine_config

    def created(self: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import CompilationMode, CUDAGraphMode

        if not self.enforce_eager:
            compilation = self.compilation_config
            compilation.mode, compilation.cudagraph_mode = CompilationMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY
            compilation.cudagraph_capture_sizes = [size for size in GRAPH_SIZES if size <= (self.max_num_seqs or 1)]
        return create(self, *args, **kwargs)

    module.EngineArgs.create_engine_config = created


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "vllm.engine.arg_utils": no_inductor,
    "vllm._custom_ops": own_operators,
    "vllm.vllm_flash_attn": attention,
    "vllm.model_executor.layers.fused_moe.fused_moe": experts,
    "vllm.v1.sample.ops.topk_topp_sampler": sampling,
    "vllm.v1.worker.gpu_worker": no_warmup,
}

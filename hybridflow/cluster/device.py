"""Device of a host: whether torch can use what Ray counts, which one is a host's, what makes a process deterministic,
and after running out of memory what was in it, what was planned, and which settings change that.

Ray counts what NVIDIA's driver lists: also where torch is a CPU build, or one for a newer CUDA than the driver runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hybridflow.errors import ConfigError, PlacementError

_INVARIANT = {  # as vLLM's mode needs them; cuBLAS reads its two once, so models train with them, too
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "1",
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_AOT_COMPILE": "0",
}
_DRIVERS = {"13": 580, "12": 525}  # the oldest branch for each CUDA, by major version: its release notes, table 2
_GIB = 1 << 30
IMAGE = "image"
"""The owner of what is kept in host memory of state that leaves the device."""
_ADVICE: dict[str, tuple[str, ...]] = {
    "__init__": ("share", "offload", "memory_fraction"),
    "transition": ("memory_fraction", "offload", "tp_g", "share"),
    "generation": ("memory_fraction", "max_tokens", "offload", "tp_g"),
    "update": ("micro_tokens", "recompute", "offload", "share", "memory_fraction"),
    "compute": ("micro_tokens", "offload", "share", "memory_fraction"),
    "other": ("offload", "share", "memory_fraction"),
}


def cuda_problem(torch: str, cuda: str | None, driver: str, said: str = "") -> str:
    """Why torch cannot use the devices that the driver lists, and the cure: for torch's version, the CUDA that it was
    built for (None: a CPU build), the driver's version ("": unknown), and what torch `said`."""
    found, branch = f"NVIDIA's driver {driver or '(of unknown version)'} lists devices", driver.partition(".")[0]
    needed = _DRIVERS.get((cuda or "").partition(".")[0], 0)
    if not cuda:
        return (
            f"{found}, and torch {torch} is a CPU build. Install the CUDA build (pip install 'hybridflow[gpu]' in a "
            f"fresh environment), or set CUDA_VISIBLE_DEVICES= (empty) before Ray starts to run on the CPU."
        )
    if branch.isdigit() and int(branch) < needed:
        return (
            f"{found}, and torch {torch} is built for CUDA {cuda}, which needs driver {needed} or newer. Install a "
            f"newer driver, or NVIDIA's cuda-compat package for CUDA {cuda} on data center GPUs."
        )
    return f"{found}, and torch {torch} (built for CUDA {cuda}) cannot use them: {said}. Try `nvidia-smi`, then reboot."


def check_cuda(index: int | None = None) -> None:
    """Make device `index` this thread's; None: look at torch's build only. Errors: PlacementError with the cure."""
    import torch

    try:
        if not torch.backends.cuda.is_built():
            raise RuntimeError("this build of torch has no CUDA")
        if index is not None:
            torch.cuda.init()
            torch.cuda.set_device(index)
    except (RuntimeError, AssertionError) as error:
        said, (driver, _) = " ".join(str(error).split()), driver_answers()
        raise PlacementError(cuda_problem(torch.__version__, torch.version.cuda, driver, said)) from error


def make_deterministic(index: int | None) -> None:
    """Let this process compute by deterministic kernels, on CUDA device `index` (None: the CPU); operators without one
    raise, and torch's NCCL groups leave out NVLS. Errors: ConfigError for a device without vLLM's kernels."""
    import torch

    settings: Any = torch
    settings.use_deterministic_algorithms(True)
    settings.utils.deterministic.fill_uninitialized_memory = False  # against reading it, not for kernels
    if index is None:
        return
    (major, minor), missing = torch.cuda.get_device_capability(index), find_spec("triton") is None
    if major < 8 or missing:
        this = f"this is {torch.cuda.get_device_name(index)} with {major}.{minor}"
        raise ConfigError(
            "hf.init(deterministic=True) needs Triton and devices of compute capability 8.0 or newer, as vLLM's "
            f"batch-invariant kernels do: {'Triton is not installed' if missing else this}. Leave it out."
        )
    os.environ.update(_INVARIANT)
    matmul, cudnn = settings.backends.cuda.matmul, settings.backends.cudnn
    # these, too, are what vLLM's mode sets: training does not change when an engine starts
    matmul.fp32_precision = cudnn.conv.fp32_precision = cudnn.rnn.fp32_precision = "ieee"
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.preferred_blas_library("cublaslt")


def device_index(assigned: Sequence[int | str], visible: str | None) -> int:
    """Number, in this process, of the device that Ray `assigned`; `visible` is CUDA_VISIBLE_DEVICES.

    Ray usually shows a process its own device only, and with RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 all.
    """
    shown, own = [one for one in (visible or "").split(",") if one], [str(one) for one in assigned[:1]]
    if not shown:
        return int(own[0]) if own and own[0].isdigit() else 0
    return shown.index(own[0]) if own and own[0] in shown else 0


def driver_answers() -> tuple[str, int | None]:
    """The driver's version, and the bytes of its largest device; ("", None) where there is no driver."""
    from ray._private.thirdparty import pynvml  # by which Ray counts devices

    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        devices = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        sizes = [int(nvml.nvmlDeviceGetMemoryInfo(device).total) for device in devices]
        return str(nvml.nvmlSystemGetDriverVersion()), max(sizes, default=None)
    except nvml.NVMLError:
        return "", None


@dataclass(frozen=True)
class DeviceUse:
    """Bytes of a device, and by (group, owner) what groups have there, and as `IMAGE` in host memory; `planned`: by
    group the share of the device for generation."""

    total: int
    free: int
    held: Mapping[tuple[str, str], int]
    planned: Mapping[str, float]


def explain(
    role: str, method: str, stage: str, use: DeviceUse, settings: Mapping[str, Any], said: str, advises: bool = False
) -> str:
    """The message for a call of `role` that ran out of memory in `stage` (or ""); `settings` are those of its group,
    `said` is torch's message, or one of our own that `advises` what to change."""
    resident = {owner: size for owner, size in sorted(use.held.items()) if size and owner[1] != IMAGE}
    images = [f"{group} {_gib(size)}" for (group, kind), size in sorted(use.held.items()) if size and kind == IMAGE]
    there = [f"{group} {kind} {_gib(size)}" for (group, kind), size in resident.items()]
    rest = use.total - use.free - sum(resident.values())
    there.append(f"all else (activations, buffers, other processes) {_gib(max(0, rest))}")
    planned = [
        f"{group} VLLM(memory_fraction={share:g}) = {_gib(share * use.total)}" for group, share in use.planned.items()
    ]
    phase = f"{role}.{method}{f' ({stage})' if stage else ''}"
    account = (
        f"The device has {_gib(use.total)}, of which {_gib(use.free)} are free. In it: {', '.join(there)}. "
        f"Planned for generation: {', '.join(planned) or 'nothing'}."
        + (f" In host memory: {', '.join(images)}." if images else "")
    )
    if advises:
        return f"{phase}: {said} {account}"
    start = method if method == "__init__" else method.partition("_")[0]
    stage = stage if stage in _ADVICE else {"generate": "generation"}.get(start, start)
    changes = _changes(settings, bool(use.planned))
    named = [changes[name] for name in _ADVICE.get(stage, _ADVICE["other"]) if name in changes]
    said = " ".join(said.split())[:200].rstrip(". ")
    return f"{phase} ran out of device memory: {said}. {account} Change one of: {'; '.join(named)}."


def _changes(settings: Mapping[str, Any], planned: bool) -> dict[str, str]:
    """The settings of a group that can free memory, and their values now; `planned`: some group generates there."""
    train, generate = settings.get("train"), settings.get("generate")
    waits = "offload= of the groups on this device, whose state then waits on the host"
    found: dict[str, tuple[str, Any]] = {"offload": (waits, settings.get("offload", False))}
    if train is not None:
        sizes = ", ".join(f"{name}={getattr(train, name)}" for name in ("tp", "pp", "stage") if hasattr(train, name))
        smaller = "fewer tokens computed at a time, train=...(micro_tokens=...)"
        found["micro_tokens"] = smaller, getattr(train, "micro_tokens", None)
        shared = "a smaller part of the model per device, by larger tp or pp, FSDP() or ZeRO(stage=3)"
        found["share"] = shared, f"{type(train).__name__}({sizes})"
        if not getattr(train, "recompute", False):
            twice = "train=...(recompute=True), which computes activations twice instead of keeping them"
            found["recompute"] = twice, False
    if hasattr(generate, "memory_fraction"):  # without VLLM's module, which needs numpy
        shorter = "shorter or fewer sequences at a time, Sampling(max_tokens=...) or VLLM(max_sequences=...)"
        found["max_tokens"] = shorter, getattr(getattr(generate, "sampling", None), "max_tokens", None)
        found["tp_g"] = "a larger hf.VLLM(tp=...)", getattr(generate, "tp", None)
    if planned:
        found["memory_fraction"] = "a lower hf.VLLM(memory_fraction=...)", getattr(generate, "memory_fraction", None)
    return {name: words + (f" (now {now})" if now is not None else "") for name, (words, now) in found.items()}


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"

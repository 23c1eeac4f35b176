"""CUDA driver: whether torch can use the devices that Ray counts, which one is a host's, and their memory.

Ray counts what NVIDIA's driver lists: also where torch is a CPU build, or one for a newer CUDA than the driver runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from hybridflow.errors import PlacementError

DRIVERS: Mapping[str, int] = MappingProxyType({"13": 580, "12": 525})
"""The oldest branch of the driver for each CUDA, by its major version (table 2 of CUDA's release notes)."""


def cuda_problem(torch: str, cuda: str | None, driver: str, said: str = "") -> str:
    """Why torch cannot use the devices that the driver lists, and the cure: for torch's version, the CUDA that it was
    built for (None: a CPU build), the driver's version ("": unknown), and what torch `said`."""
    found, branch = f"NVIDIA's driver {driver or '(of unknown version)'} lists devices", driver.partition(".")[0]
    needed = DRIVERS.get((cuda or "").partition(".")[0])
    if not cuda:
        return (
            f"{found}, and torch {torch} is a CPU build. Install the CUDA build (pip install 'hybridflow[gpu]' in a "
            f"fresh environment), or set CUDA_VISIBLE_DEVICES= (empty) before Ray starts to run on the CPU."
        )
    if needed and branch.isdigit() and int(branch) < needed:
        return (
            f"{found}, and torch {torch} is built for CUDA {cuda}, which needs driver {needed} or newer. Install a "
            f"newer driver, or NVIDIA's cuda-compat package for CUDA {cuda} on data center GPUs."
        )
    return f"{found}, and torch {torch} (built for CUDA {cuda}) cannot use them: {said}. Try `nvidia-smi`, then reboot."


def check_build() -> None:
    """Where devices were counted. Errors: PlacementError for a torch that is a CPU build."""
    import torch

    if not torch.backends.cuda.is_built():
        raise PlacementError(cuda_problem(torch.__version__, None, driver_version()))


def check_cuda(index: int) -> None:
    """Make device `index` this thread's. Errors: PlacementError with driver, build and cure if torch cannot use it."""
    import torch

    check_build()
    try:
        torch.cuda.init()
        torch.cuda.set_device(index)
    except RuntimeError as error:
        said = " ".join(str(error).split())
        raise PlacementError(cuda_problem(torch.__version__, torch.version.cuda, driver_version(), said)) from error


def device_index(assigned: Sequence[int | str], visible: str | None) -> int:
    """Number, in this process, of the device that Ray `assigned`; `visible` is CUDA_VISIBLE_DEVICES.

    Ray usually shows a process its own device only, and with RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 all.
    """
    shown, own = [one for one in (visible or "").split(",") if one], [str(one) for one in assigned[:1]]
    if not shown:
        return int(own[0]) if own and own[0].isdigit() else 0
    return shown.index(own[0]) if own and own[0] in shown else 0


def driver_version() -> str:
    """Of the driver on this machine; "" without one."""
    return _asked(lambda nvml: str(nvml.nvmlSystemGetDriverVersion())) or ""


def device_memory() -> int | None:
    """Bytes of this machine's largest device; None without one."""
    return _asked(lambda nvml: max(map(partial(_memory, nvml), range(nvml.nvmlDeviceGetCount())), default=None))


def _memory(nvml: Any, index: int) -> int:
    return int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(index)).total)


def _asked(question: Callable[[Any], Any]) -> Any:
    """The driver's answer; None where there is no driver."""
    from ray._private.thirdparty import pynvml  # by which Ray counts devices

    try:
        pynvml.nvmlInit()
        return question(pynvml)
    except pynvml.NVMLError:
        return None

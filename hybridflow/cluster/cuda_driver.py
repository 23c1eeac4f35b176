"""CUDA driver: whether torch can use the devices that Ray counts, which one is a host's, and their memory.

Ray counts what NVIDIA's driver lists: also where torch is a CPU build, or one for a newer CUDA than the driver runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridflow.errors import PlacementError

_DRIVERS = {"13": 580, "12": 525}  # the oldest branch for each CUDA, by major version: its release notes, table 2


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

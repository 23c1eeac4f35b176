"""Where the emulation is installed, its set-up, and the environment of a process that runs on it.

`.venv/cuda/wheels-KEY` has torch's and vLLM's CUDA wheels, ahead of .venv's packages on the path;
`.venv/cuda/stand-ins-KEY` the libraries. A key is of what the folder was made from, so a change of the sources builds
anew and never under processes that run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / ".venv" / "cuda"
SOURCES = Path(__file__).parent
# '===': a local version such as 2.13.0+cpu satisfies '=='
WHEELS = ("torch===2.13.0", "vllm===0.32.0")
HEADERS = "nvidia-cuda-runtime==13.0.96"
DEFAULTS = {"EMULATED_DEVICES": "2", "EMULATED_MEMORY": str(1 << 30), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def key(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()[:12]


def wheels() -> Path:
    return HOME / f"wheels-{key(*WHEELS, HEADERS, sys.version)}"


def stand_ins() -> Path:
    sources = sorted(path for path in (SOURCES / "stand_ins").rglob("*") if path.is_file())
    parts = (part for path in (*sources, SOURCES / "build.py") for part in (path.name, path.read_bytes()))
    return HOME / f"stand-ins-{key(wheels().name, *parts)}"


def has_gpu() -> bool:
    """Whether NVIDIA's driver answers: then programs run on the real device."""
    program = shutil.which("nvidia-smi")
    return (
        program is not None
        and subprocess.run([program, "--list-gpus"], capture_output=True, check=False).returncode == 0
    )


def is_ready() -> bool:
    return (wheels() / ".compiled").exists() and (stand_ins() / ".ready").exists()


def variables(shared: str) -> dict[str, str]:
    """The environment of emulated CUDA. `shared`: a folder in shared memory for what processes exchange."""
    path = [str(SOURCES / "site"), str(wheels()), str(ROOT), os.environ.get("PYTHONPATH", "")]
    fixed = {
        "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
        "LD_LIBRARY_PATH": str(stand_ins()),
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "TRITON_INTERPRET": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "PYTEST_PLUGINS": "tests.emulated_cuda.plugin",
        "EMULATED_CUDA": "1",
        "EMULATED_SHARED": shared,
    }
    return DEFAULTS | os.environ | fixed


def run(command: list[str]) -> int:
    """Run a Python command line on CUDA: this machine's, or emulated. The exit status."""
    if has_gpu():
        return subprocess.run([sys.executable, *command], check=False).returncode
    if not is_ready():
        set_up()
    with (
        tempfile.TemporaryDirectory(prefix="emulated-cuda-", dir="/dev/shm") as shared,
        subprocess.Popen([sys.executable, *command], env=variables(shared)) as program,
    ):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the program, too
        signal.signal(signal.SIGTERM, lambda number, _: program.send_signal(number))
        return program.wait()


def set_up() -> None:
    """Install the wheels and build the stand-ins, where that was not done. Errors: SystemExit with what to do."""
    sys.path.insert(0, str(ROOT / "tools"))
    import setup_env

    from tests.emulated_cuda.build import BuildError, build

    try:
        with setup_env.only_one_at_a_time():
            install_wheels(setup_env)
            out = stand_ins()
            if not (out / ".ready").exists():
                setup_env.say("building the stand-ins for CUDA's libraries")
                include = next((wheels() / "headers").rglob("cuda_runtime_api.h")).parent
                build(wheels(), include, out)
                (out / ".ready").touch()
            compile_imports(setup_env)
    except (BuildError, setup_env.SetupError) as error:
        raise SystemExit(f"set-up of emulated CUDA failed: {error}") from error


def compile_imports(setup_env) -> None:
    """Write the bytecode of what every process of a run imports, which takes longer than most tests."""
    done = wheels() / ".compiled"
    if done.exists():
        return
    setup_env.say("compiling what every run imports")
    with tempfile.TemporaryDirectory() as shared:
        environment = variables(shared) | {"PYTHONDONTWRITEBYTECODE": "", "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [sys.executable, "-W", "ignore", "-c", setup_env.IMPORTED_BY_EVERY_RUN]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if found.returncode:
        raise setup_env.SetupError(f"the CUDA wheels do not import:\n{found.stderr}")
    done.touch()


def install_wheels(setup_env) -> None:
    folder = wheels()
    if (folder / ".ready").exists():
        return
    setup_env.say("installing torch's and vLLM's CUDA wheels, without NVIDIA's libraries (2.1 GB)")
    shutil.rmtree(folder, ignore_errors=True)
    install = setup_env.Installer()
    install("--no-deps", "--target", str(folder), *WHEELS)
    install("--no-deps", "--target", str(folder / "headers"), HEADERS)
    (folder / ".ready").touch()

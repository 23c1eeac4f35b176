"""Builds the CUDA libraries that torch's and vLLM's CUDA wheels ask for: stand_ins/*.cpp, refusals for all else."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

SOURCES = Path(__file__).parent / "stand_ins"
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-fvisibility=hidden", "-pthread")
# Unversioned symbols of these libraries are known by their prefix.
PREFIXES = {
    "nccl": "nccl",
    "cublas": "cublas(?!Lt)",
    "cufile": "cuFile",
    "cusparseLt": "cusparseLt",
    "nvshmem": "nvshmem",
    "cuda": "cu(?!File)[A-Z]",
    "curand": "curand",
}
# Handles are made and set up before anything is asked of them: these calls succeed and do nothing.
HARMLESS = re.compile("Create|Set|Destroy|cupti|Workspace|Get")
HANDLES = ("cublasCreate_v2", "cublasLtCreate", "cudnnCreate", "cusolverDnCreate", "cusparseCreate")
VERSIONS = ("cudnnGetVersion", "cudnnGetCudartVersion", "cublasLtGetVersion")
TOOLS = ("g++", "readelf", "nm")


class BuildError(Exception):
    """The stand-ins could not be built; the message says what to do."""


def build(wheels: Path, headers: Path, out: Path) -> None:
    """Write the libraries into `out`. `wheels`: folder of torch and vllm; `headers`: of cuda_runtime_api.h."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise BuildError(
            f"emulated CUDA is built with g++ and binutils; {', '.join(missing)} not found. On Debian and Ubuntu: "
            "apt-get install g++ binutils."
        )
    out.mkdir(parents=True, exist_ok=True)
    own = sorted((wheels / "torch" / "lib").glob("lib*.so"))
    needed, wanted = requirements([*own, *sorted((wheels / "vllm").rglob("*.so"))])
    cuda = sorted(name for name in needed - {path.name for path in own} if re.match("lib(cu|nv|nccl)", name))
    cuda.sort(key=lambda name: not name.startswith("libcudart"))  # others link it
    written = set(re.findall(r"^API [\w ]+[ *]+(\w+)\(", "".join(map(Path.read_text, SOURCES.glob("*.cpp"))), re.M))
    for name in cuda:
        build_library(name, wanted, written, headers, out)
    compile_library("libnvidia-ml.so.1", [SOURCES / "nvml.cpp"], out)


def requirements(libraries: Iterable[Path]) -> tuple[set[str], dict[str, set[str]]]:
    """Names of the libraries that `libraries` need, and symbols that they miss by version node ("": none)."""
    needed: set[str] = set()
    wanted: dict[str, set[str]] = defaultdict(set)
    for library in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", library)))
        for line in output("nm", "-D", "--undefined-only", library).splitlines():
            name, _, version = line.split()[-1].partition("@")
            wanted[version.lstrip("@")].add(name)
    return needed, wanted


def build_library(name: str, wanted: dict[str, set[str]], written: set[str], headers: Path, out: Path) -> None:
    """One library, with the version node that its users ask for."""
    stem = re.match("lib([A-Za-z]+)", name)[1]
    nodes = [node for node in wanted if node == name or (stem == "nvshmem" and node == "NVSHMEM")]
    symbols = {symbol for node in nodes for symbol in wanted[node]}
    if prefix := PREFIXES.get(stem):
        symbols |= {symbol for symbol in wanted[""] if re.match(prefix, symbol)}
    source, script = out / f"{stem}.cpp", out / f"{stem}.map"
    source.write_text("#include <cstdio>\n" + "".join(map(refusal, sorted(symbols - written))))
    script.write_text(f"{nodes[0] if nodes else ''} {{ global: *; }};\n")
    sources: list[str | Path] = [source]
    if stem == "cudart":
        sources += sorted(path for path in SOURCES.glob("*.cpp") if path.name != "nvml.cpp")
    elif stem in ("cuda", "nccl"):  # their functions are in the runtime's library
        sources += ["-Wl,--no-as-needed", out / "libcudart.so.13"]
    include = ("-I", SOURCES / "include", "-I", headers)
    compile_library(name, [f"-Wl,--version-script={script}", *include, *sources], out)


def refusal(symbol: str) -> str:
    """A function of that name: it succeeds without an effect where that is harmless, else it says so and fails."""
    export = 'extern "C" __attribute__((visibility("default"))) '
    if symbol in HANDLES:
        return f"{export}int {symbol}(void** handle) {{ *handle = (void*)64; return 0; }}\n"
    if symbol in VERSIONS:
        return f"{export}long {symbol}() {{ return 92000; }}\n"
    if HARMLESS.search(symbol):
        return f"{export}int {symbol}() {{ return 0; }}\n"
    return f'{export}int {symbol}() {{ fprintf(stderr, "emulated CUDA: {symbol} was called\\n"); return 1; }}\n'


def compile_library(name: str, arguments: list[str | Path], out: Path) -> None:
    output("g++", *FLAGS, f"-Wl,-soname,{name}", "-o", out / name, *arguments)


def output(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(map(str, command))}\nfailed:\n{done.stderr}")
    return done.stdout

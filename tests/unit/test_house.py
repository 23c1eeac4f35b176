"""The house rules of docs/architecture.md, held by reading the source: imports go down, files stay small."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "hybridflow"
RECIPES = ROOT / "recipes"

# From low to high: a module imports modules of its own row and of rows above it in this table, never below.
LAYERS = (
    ("errors", "lazy_names"),
    ("topology",),
    ("processes",),
    ("batch",),
    ("config", "lora", "settings"),
    ("models",),
    ("placement",),
    ("protocols",),
    ("algorithms",),
    ("data",),
    ("rewards",),
    ("engine3d",),
    ("planner",),
    ("engines",),
    ("environments",),
    ("cluster",),
    ("workers",),
    ("tracking",),
    ("loader", "driver", "held_out", "streams"),
    ("run",),
    ("tracing",),
    ("cli",),
    ("__main__",),
)
# Each of these packages is imported in one place; everything else reaches it through that place only.
HOMES = {
    "ray": ("hybridflow.cluster",),
    "megatron": ("hybridflow.engines.megatron",),
    "vllm": ("hybridflow.engines.vllm",),
    "peft": ("hybridflow.engines.lora",),
}
# Loading these takes seconds, so functions may import them late, and with them the backends that stand on them.
HEAVY = {"ray", "vllm", "megatron", "torch", "transformers", "tokenizers", "huggingface_hub", "tensordict"}
HEAVY |= {"pandas", "matplotlib", "rich", "datasets", "pyarrow", "math_verify", "peft", "aiohttp", "scipy"}
BACKENDS = ("hybridflow.engines.megatron", "hybridflow.engines.vllm", "hybridflow.engines.fsdp")
# What may be named in annotations only (under TYPE_CHECKING) although it stands higher: a loss is written against it.
TYPES_FROM_ABOVE = {("algorithms", "hybridflow.engines.contract")}

FILE_LINES, RECIPE_LINES, FUNCTION_LINES = 500, 100, 60
# Lines of each folder ("" is the package's own). Those of LARGER have more than planned, and may not grow.
BUDGET = {"": 2500, "cli": 1350, "run": 1200, "streams": 1700, "tracking": 2200, "tracing": 850, "workers": 2600}
BUDGET |= {"cluster": 5300, "environments": 2450, "engines": 10800, "rewards": 4100, "planner": 7300, "data": 1350}
BUDGET |= {"models": 1000, "algorithms": 3000, "engine3d": 2750, "protocols": 320, "batch": 1050, "processes": 550}
LARGER = {"": 2897, "batch": 1213, "cli": 1740, "cluster": 7515, "data": 2264, "engine3d": 2932, "engines": 14458}
LARGER |= {"environments": 3034, "models": 1585, "planner": 8715, "rewards": 5338, "run": 1993, "tracing": 1099}
LARGER |= {"tracking": 2534, "workers": 3127}
TWINS = {"__init__.py", "engine.py", "layout.py", "optimizer.py"}  # one for each backend
# Phrases that docs/architecture.md's words and plain English have better ones for.
PHRASES = (
    *(r"\bis none\b", r"\bbut for\b", r"\bso many\b", r"\bnobody\b", r"\bwhoever\b", r"\bis told\b", r"\bare told\b"),
    *(r"\bgoes on\b", r"\bmeets an? \w*error", r"\bwhat is over\b", r"\bthe former\b", r"\bthe latter\b"),
)


class Import(NamedTuple):
    """`module` imports `target`: `late` inside a function, `typing` under `if TYPE_CHECKING`."""

    module: str
    target: str
    line: int
    late: bool
    typing: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def imports() -> tuple[Import, ...]:
    known = {module_name(path) for path in sources()}
    return tuple(found for path in sources() for found in read_imports(path, known))


def read_imports(path: Path, known: set[str]) -> Iterator[Import]:
    module = module_name(path)

    def visit(node: ast.AST, late: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            inside = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import):
                yield from (Import(module, alias.name, child.lineno, late, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{path}:{child.lineno}: relative import"
                for alias in child.names:
                    full = f"{child.module}.{alias.name}"
                    yield Import(module, full if full in known else str(child.module), child.lineno, late, typing)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(child, inside, True)
            else:
                yield from visit(child, inside, typing)

    return visit(parse(path), False, False)


def layer(module: str) -> int:
    """Row of the table; the package itself, which only names what is public, stands above all."""
    if module == "hybridflow":
        return len(LAYERS)
    name = module.split(".")[1]
    rows = [row for row, names in enumerate(LAYERS) if name in names]
    assert rows, f"{module} has no place in the house: add {name!r} to LAYERS here and to docs/architecture.md"
    return rows[0]


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def report(broken: list[str]) -> None:
    assert not broken, "\n" + "\n".join(broken)


def test_imports_go_down_the_house():
    def allowed(found: Import) -> bool:
        exception = (found.module.split(".")[1], found.target) in TYPES_FROM_ABOVE and found.typing
        return exception or layer(found.target) <= layer(found.module)

    inner = [i for i in imports() if within(i.target, "hybridflow") and i.module != "hybridflow"]
    report([f"{found}, which stands above it" for found in inner if not allowed(found)])


def test_no_import_cycles():
    """Imports under TYPE_CHECKING count: a reader follows them, too."""
    graph: dict[str, set[str]] = {}
    for found in imports():
        exception = (found.module.split(".")[1:2] or [""])[0], found.target
        if within(found.target, "hybridflow") and exception not in TYPES_FROM_ABOVE and found.module != "hybridflow":
            graph.setdefault(found.module, set()).add(found.target)
    done: set[str] = set()

    def walk(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "import cycle: " + " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph.get(module, ())):
                walk(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        walk(module, ())


@pytest.mark.parametrize("package", HOMES)
def test_each_framework_has_one_home(package: str):
    uses = [i for i in imports() if within(i.target, package)]
    strangers = [i for i in uses if not any(within(i.module, home) for home in HOMES[package])]
    report([f"{found}: only {' and '.join(HOMES[package])} may" for found in strangers])


def test_late_imports_are_of_heavy_packages_only():
    def allowed(found: Import) -> bool:
        if found.module in (
            "hybridflow",
            "hybridflow.cli.commands",
            "hybridflow.cli.launch",
        ):  # the lazy public names; commands that load what they run
            return True
        heavy = found.target.split(".")[0] in HEAVY
        return heavy or any(within(found.target, backend) for backend in BACKENDS)

    report([f"{i} inside a function: move it to the top" for i in imports() if i.late and not allowed(i)])


def test_files_and_functions_stay_small():
    over = []
    for path in [*sources(), *sorted(RECIPES.rglob("*.py"))]:
        name, lines = path.relative_to(ROOT), len(path.read_text().splitlines())
        limit = RECIPE_LINES if within(module_name(path), "recipes") else FILE_LINES
        if lines > limit:
            over.append(f"{name}: {lines} lines, the limit is {limit}")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    over.append(f"{name}:{node.lineno} {node.name}: {length} lines, the limit is {FUNCTION_LINES}")
    report(over)


def test_every_folder_has_its_budget(capsys: pytest.CaptureFixture[str]):
    lines = Counter[str]()
    for path in sources():
        folder, *inner = path.relative_to(PACKAGE).parts
        lines[folder if inner else ""] += len(path.read_text().splitlines())
    with capsys.disabled():
        print(f"\nhybridflow: {len(sources())} files, {lines.total():,} lines")
    report([f"{name!r} has no budget" for name in lines.keys() - BUDGET.keys()])
    limits = BUDGET | LARGER
    report(
        [
            f"{name!r}: {count} lines, the budget is {limits[name]}"
            for name, count in lines.items()
            if count > limits[name]
        ]
    )
    report([f"{name!r} is within its budget: take it out of LARGER" for name in LARGER if lines[name] <= BUDGET[name]])


def test_names_are_used_once():
    files = Counter(path.name for path in sources() if path.name not in TWINS)
    classes = Counter(
        node.name for path in sources() for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)
    )
    report([f"{name}: {count} times" for name, count in {**files, **classes}.items() if count > 1])


def test_sentences_are_plain():
    """Comments, docstrings, errors and documents do without PHRASES."""
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = []
    for path in [*sources(), *sorted(RECIPES.rglob("*.py")), *documents]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            prose = path.suffix == ".md" or "#" in line or '"' in line or not re.search(r"[=(){}\[\]]", line)
            if prose and any(re.search(phrase, line) for phrase in PHRASES):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:90]}")
    report(found)


def test_the_package_does_not_print():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources()
        if module_name(path) not in ("hybridflow.cli.commands", "hybridflow.cli.launch")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    report([f"{place}: print in the package" for place in found])


def test_no_broad_except_swallows():
    """Who catches everything must raise, use the exception that was caught, or log it with its traceback."""
    broad = {"Exception", "BaseException"}
    found = []
    for path in sources():
        for node in ast.walk(parse(path)):
            place = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.ExceptHandler):
                kinds = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else broad
                inside = [child for statement in node.body for child in ast.walk(statement)]
                raises = any(isinstance(child, ast.Raise) for child in inside)
                uses = any(isinstance(child, ast.Name) and child.id == node.name for child in inside)
                logs = any(isinstance(child, ast.keyword) and child.arg == "exc_info" for child in inside)
                if kinds & broad and not (raises or uses or logs):
                    found.append(f"{place}: catches everything and says nothing")
            elif isinstance(node, ast.With) and broad & suppressed(node):
                found.append(f"{place}: suppresses everything")
    report(found)


def suppressed(node: ast.With) -> set[str]:
    """Names of the exceptions that the statement suppresses."""
    calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
    return {ast.unparse(name) for c in calls if ast.unparse(c.func).endswith("suppress") for name in c.args}


def in_fresh_interpreter(program: str) -> dict:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_hybridflow_loads_nothing_heavy():
    loaded = in_fresh_interpreter(
        "import json, sys, hybridflow\n"
        "dir(hybridflow)\n"
        "print(json.dumps({'modules': sorted({name.split('.')[0] for name in sys.modules})}))"
    )["modules"]
    assert "hybridflow" in loaded
    assert not {"torch", "ray", "numpy", "tensordict", "transformers", "vllm", "megatron", "pandas"} & set(loaded)


def test_what_reward_workers_load_is_light():
    """Each pool of workers imports it anew; only the driver needs `Functions`, with tensors."""
    loaded = in_fresh_interpreter(
        "import json, sys\n"
        "from hybridflow import rewards\n"
        "for name in {*rewards.__all__} - {'Functions', 'Scores'}:\n"
        "    getattr(rewards, name)\n"
        "print(json.dumps({'modules': sorted({name.split('.')[0] for name in sys.modules})}))"
    )["modules"]
    assert not {"torch", "ray", "numpy", "tensordict", "sympy"} & set(loaded)


def test_every_public_name_exists_and_none_loads_a_backend():
    found = in_fresh_interpreter(
        "import json, sys, hybridflow\n"
        "names = {name: repr(getattr(hybridflow, name)) for name in hybridflow.__all__}\n"
        "print(json.dumps({'names': names, 'modules': [m for m in ('vllm', 'megatron') if m in sys.modules]}))"
    )
    assert {"ResourcePool", "Megatron", "VLLM", "KEEP"} <= set(found["names"])
    assert found["modules"] == []

"""Runs a driver from the command line: `--help`, a check before anything starts, the start on the console, errors in
one paragraph, and where everything is."""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import runpy
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hybridflow import errors
from hybridflow.cli.command_line import HELP, help_text, read_settings
from hybridflow.cluster.startup import is_shown, listening, stage
from hybridflow.errors import ConfigError, HybridFlowError, WorkerError
from hybridflow.placement import Placement
from hybridflow.settings import is_address, staging_directory

CONFIGURATION = (ConfigError, errors.PlacementError, errors.ModelError, errors.PromptError)
CONFIGURATION += (errors.CheckpointError, errors.BatchError)
"""Errors of a run's arguments and files, unless a worker raised them or an iteration was done."""
STATUS = 2
_KEPT = {"metrics": "metrics.jsonl", "samples": "samples.jsonl", "events": "events.jsonl", "settings": "config.yaml"}
_KEPT |= {"model": "model", "checkpoints": "checkpoints"}


@dataclass(frozen=True)
class Driver:
    """A program to run."""

    run: Callable[[], Any]
    file: str
    usage: str = ""
    """Its docstring."""
    defaults: tuple[str, ...] = ()
    """Its default settings: texts of YAML."""


def run(main: Callable[[list[str]], Any]) -> None:
    """Run `main(arguments)` with the program's arguments, see `start`: for the last line of a program.

    The module of `main` may have `DEFAULTS`: its settings as YAML, in one text or several.
    """
    module, arguments = sys.modules[main.__module__], sys.argv[1:]
    file = getattr(module, "__file__", None) or ""
    call = _bound(main, f"{file}:{main.__name__}", arguments)
    start(Driver(call, file, module.__doc__ or "", _defaults(vars(module))), arguments)


def run_file(name: str, arguments: Sequence[str], check: bool = True, placement: str | None = None) -> None:
    """Run `FILE.py:FUNCTION`, or the `main` of `FILE.py`, with the arguments as one list if it takes any; a file
    without `main`, or one that calls it while it is imported, runs as a program. See `start`."""
    with _as_program(name, arguments):
        try:
            driver = _driver(name, arguments)
        except CONFIGURATION as error:
            _refuse(error, name.partition(":")[0])
        start(driver, arguments, check, placement)


def _driver(name: str, arguments: Sequence[str]) -> Driver:
    """Errors: ConfigError without such a file or function; those of a file that is imported for its function."""
    path, function = split_name(name)
    tree = ast.parse(Path(path).read_bytes(), filename=path)
    calls = any(isinstance(one, ast.Expr) and re.search(r"\bmain\b", ast.unparse(one)) for one in tree.body[1:])
    has_main = any(isinstance(one, ast.FunctionDef) and one.name == "main" for one in tree.body)
    usage = ast.get_docstring(tree) or ""
    if not function and (calls or not has_main):
        return Driver(lambda: runpy.run_path(path, run_name="__main__"), path, usage)
    found, function = runpy.run_path(path, run_name="__driver__"), function or "main"
    return Driver(_bound(found.get(function), f"{path}:{function}", arguments), path, usage, _defaults(found))


def start(driver: Driver, arguments: Sequence[str], check: bool = True, placement: str | None = None) -> None:
    """Run a driver, its groups as the file `placement` says. `--help` prints its docstring and settings instead.

    With `check` the first iteration is tried without processes before anything starts (`check_driver`); what it prints
    is dropped. Errors of settings before the end of the first iteration are one paragraph, with exit status 2.
    """
    if is_shown():  # by the program that started this one
        driver.run()
        return
    if HELP & {*arguments}:
        own = f"{inspect.cleandoc(driver.usage)}\n\nThe driver gets all arguments as they are.\n"
        print(help_text(driver.usage, *driver.defaults) if driver.defaults else own, end="")
        return
    display = None
    try:
        name = str(read_settings(*driver.defaults, arguments=arguments).get("name", "")) if driver.defaults else ""
        from hybridflow.tracking.displays import StartDisplay  # late: --help and wrong settings are quick

        display = StartDisplay(run_directory(name or Path(driver.file).stem))
        with listening(display):
            with stage("loading libraries"):
                from hybridflow.tracing.auto import auto
                from hybridflow.tracing.trace import check_driver
            planned = None if placement is None else Placement.load(placement)
            if check:
                with stage("checking the settings"), redirect_stdout(io.StringIO()):
                    check_driver(driver.run, placement=planned)
            driver.run() if planned is None else auto(driver.run, placement=planned)()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except CONFIGURATION as error:
        if isinstance(error, WorkerError) or (display is not None and display.started):
            raise
        _refuse(error, driver.file)
    if display is not None and display.directory is not None:
        _say_where(display.directory)


def run_directory(name: str) -> Path:
    """The directory of a run on this machine: `name` if it is a path, such as ./first, its staging directory if it is
    an address, such as s3://bucket/first, otherwise runs/<name>."""
    if is_address(name):
        return staging_directory(name)
    return Path(name).expanduser() if "/" in name else Path("runs") / name


def split_name(name: str) -> tuple[str, str]:
    """Both parts of FILE.py:FUNCTION. Errors: ConfigError without such a file."""
    path, _, function = name.partition(":")
    if not Path(path).is_file():
        raise ConfigError(f"there is no driver {path}. Give a Python file, such as recipes/ppo.py.")
    return path, function


def load_driver(name: str, arguments: Sequence[str]) -> Callable[[], Any]:
    """A driver for a trace or a replay: the program, or as in `run_file` where a function is named or the file does not
    ask for its `__name__`. Errors: ConfigError without such a file or function, and for any error of the driver, with
    the driver's own lines."""
    path, function = split_name(name)

    def run() -> None:
        with _as_program(name, arguments), _as_errors(path):
            if not function and "__name__" in Path(path).read_text():
                runpy.run_path(path, run_name="__main__")
            else:
                _driver(name, arguments).run()

    return run


def _defaults(module: Any) -> tuple[str, ...]:
    given = module.get("DEFAULTS", ())
    texts = (given,) if isinstance(given, str) else given if isinstance(given, tuple) else ()
    return texts if all(isinstance(text, str) for text in texts) else ()


def _bound(function: Any, name: str, arguments: Sequence[str]) -> Callable[[], Any]:
    """The call of a driver's function. Errors: ConfigError for one that wants more than a list of arguments."""
    if not callable(function):
        path, _, asked = name.partition(":")
        raise ConfigError(f"{path} has no function {asked!r}.")
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(needed) > 1:
        raise ConfigError(
            f"{name} takes {', '.join(needed)}: a driver takes nothing, or one list of arguments. Write a function "
            f"that calls it."
        )
    takes = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)
    return lambda: function(*([list(arguments)] if takes else []))


@contextmanager
def _as_program(name: str, arguments: Sequence[str]) -> Iterator[None]:
    """Sets arguments and module path as `python FILE.py ...` does; the first argument names the function, too."""
    before = sys.argv, list(sys.path)
    sys.argv, sys.path[0:0] = [name, *arguments], [str(Path(name).resolve().parent)]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


@contextmanager
def _as_errors(path: str) -> Iterator[None]:
    """Any error of a driver as a ConfigError with its lines. SystemExit ends the program normally."""
    try:
        yield
    except SystemExit as end:
        if end.code not in (None, 0):
            raise ConfigError(f"{path} ended before its loop: {end.code}") from None
    except HybridFlowError as error:
        if lines := [line for file, line, *_ in traceback.extract_tb(error.__traceback__) if file == path]:
            error.add_note(f"  asked for by {path}, line {lines[-1]}")
        raise
    except Exception as error:
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != path:
            own = own.tb_next
        text = "".join(traceback.format_exception(type(error), error, own)).rstrip()
        raise ConfigError(f"{path} cannot be run to its end, it raises {type(error).__name__}:\n{text}") from None


def _refuse(error: Exception, file: str) -> NoReturn:
    """One paragraph with the line of the driver that was refused, if there is one."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{Path(file).name}, line {lines[-1]}" if lines else Path(file).name
    text = " ".join(str(error).split())
    print(textwrap.fill(f"{where}: {text}", 120, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
    sys.exit(STATUS)


def _say_where(home: Path) -> None:
    """The files of a run that has ended, and its notes."""
    lines = [f"  {what:<12} {home / name}" for what, name in _KEPT.items() if (home / name).exists()]
    try:
        notes = json.loads((home / "notes.json").read_text())
    except (OSError, ValueError):
        notes = {}
    lines += [f"  {name}: {value}" for name, value in notes.items() if isinstance(value, str | int | float)]
    print("\n".join(["The run has ended.", *lines, f"  a page of it: hybridflow report {home}"]), flush=True)

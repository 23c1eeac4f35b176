"""Starts a recipe from the command line: `--help`, checks before anything starts, and errors in one paragraph."""

from __future__ import annotations

import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hybridflow.command_line import asks_for_help, help_text
from hybridflow.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    ModelError,
    PlacementError,
    PromptError,
    WorkerError,
)
from hybridflow.startup import listening, stage
from recipes import settings

CONFIGURATION = (ConfigError, PlacementError, ModelError, PromptError, CheckpointError, BatchError)
"""Errors of what a run is given, unless a worker raised them or an iteration was done."""
STATUS = 2


def run(main: Callable[[list[str]], None]) -> None:
    """Run `main(arguments)` with the program's arguments; its module has `DEFAULTS` and a docstring for `--help`.

    The first iteration is tried without processes before anything starts (`check_driver`), and the start is shown.
    """
    program, arguments, display = sys.modules[main.__module__], sys.argv[1:], None
    if asks_for_help(arguments):
        print(help_text(program.__doc__ or "", settings.COMMON, program.DEFAULTS), end="")
        return
    try:
        cfg = settings.read(program.DEFAULTS, arguments)
        from hybridflow.start_display import StartDisplay  # late, like the rest: --help and wrong settings are quick

        display = StartDisplay(settings.directory(cfg))
        with listening(display):
            with stage("loading libraries"):
                from hybridflow.tracing.trace import check_driver
            with stage("checking the settings"):
                check_driver(main, arguments)
            main(arguments)
    except CONFIGURATION as error:
        if isinstance(error, WorkerError) or (display is not None and display.started):
            raise
        _refuse(error, program.__file__ or "")


def _refuse(error: Exception, file: str) -> NoReturn:
    """One paragraph with the line of the recipe that was refused, if there is one."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f"{Path(file).name}, line {lines[-1]}" if lines else Path(file).name
    text = " ".join(str(error).split())
    print(textwrap.fill(f"{where}: {text}", 120, break_long_words=False, break_on_hyphens=False), file=sys.stderr)
    sys.exit(STATUS)

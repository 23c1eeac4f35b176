"""Functions that run when a module has been imported. Imports nothing heavy: every process loads this."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls `functions[name](module)` once, after the module of that name was executed."""

    def __init__(self, functions: dict[str, Callable[[ModuleType], None]]) -> None:
        self.functions = functions

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        function = self.functions.pop(fullname, None)
        spec = importlib.util.find_spec(fullname) if function else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            function(module)

        spec.loader.exec_module = exec_module
        return spec


def after_import(functions: dict[str, Callable[[ModuleType], None]]) -> None:
    sys.meta_path.insert(0, ImportHook(dict(functions)))

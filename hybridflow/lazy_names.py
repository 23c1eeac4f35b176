"""LazyNames: the public names of a package, each loaded from its module when it is first used."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any


class LazyNames:
    """Those of `package`: what its `__init__` imports from its own modules, for type checkers only.

    `modules`: the module of each name.
    """

    def __init__(self, package: str) -> None:
        self._package = sys.modules[package]
        self.modules = {
            name.name: str(line.module)
            for line in ast.walk(ast.parse(Path(str(self._package.__file__)).read_bytes()))
            if isinstance(line, ast.ImportFrom) and str(line.module).startswith(package) and line.module != __name__
            for name in line.names
        }

    def load(self, name: str) -> Any:
        """The package's `__getattr__`."""
        if name not in self.modules:
            raise AttributeError(f"module {self._package.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(self.modules[name]), name)
        setattr(self._package, name, value)
        return value

    def listed(self) -> list[str]:
        """The package's `__dir__`."""
        return sorted({*vars(self._package), *self.modules})

"""Loaded by every Python that has this folder on PYTHONPATH: torch, once imported, gets the emulated device.

A `sitecustomize` further down the path, which this one hides, runs too.
"""

import importlib.machinery
import os
import sys
from types import ModuleType

FOLDER = os.path.dirname(os.path.abspath(__file__))
PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(FOLDER)))


def run_hidden() -> None:
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(ModuleType("sitecustomize"))


def install(_: ModuleType) -> None:
    from tests.emulated_cuda import operators

    operators.install()


run_hidden()
if os.environ.get("EMULATED_CUDA"):
    if PROJECT not in sys.path:
        sys.path.append(PROJECT)
    from tests.emulated_cuda.import_hooks import after_import

    after_import({"torch": install})

"""What is installed: the build of torch that fits the device, in an environment of its own."""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import setup_env

ROOT = Path(__file__).resolve().parents[2]


def test_the_gpu_extra_takes_no_cpu_build():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["gpu"])]
    torch = [one.specifier for one in extra if one.name == "torch"]
    fits = {version: all(one.contains(version) for one in torch) for version in ("2.13.0", "2.13.0+cpu", "2.12.1")}
    assert fits == {"2.13.0": True, "2.13.0+cpu": False, "2.12.1": False}


@pytest.mark.parametrize(("driver", "says"), [("570.124.06", True), ("580.65.06", False), ("", False)])
def test_a_driver_that_is_too_old_is_named(driver: str, says: bool, tmp_path: Path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho {driver}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = setup_env.old_driver()
    assert (f"driver {driver} is too old for torch's CUDA 13: install 580 or newer" in found) if says else found == ""


def test_an_environment_of_the_other_extra_is_made_anew(monkeypatch):
    """Its torch 2.13.0+cpu would satisfy torch==2.13.0."""
    monkeypatch.setattr(setup_env, "PYTHON", Path(sys.executable))
    wrong = {extra: setup_env.of_other_device(extra) for extra in ("gpu", "cpu")}
    assert wrong == {"gpu": True, "cpu": False}

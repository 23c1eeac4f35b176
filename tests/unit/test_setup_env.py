"""What is installed: the build of torch that fits the device, in an environment of its own."""

from __future__ import annotations

import inspect
import os
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import ray
import yaml
from packaging.requirements import Requirement

from hybridflow.cli.command_line import read_settings
from hybridflow.cluster import host
from recipes import ppo
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


PAGE = Path(__file__).parents[2] / "docs" / "operating.md"


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    text = PAGE.read_text().partition("### KubeRay")[2].partition("```yaml\n")[2].partition("```")[0]
    return yaml.safe_load(text)["spec"]


@pytest.fixture(scope="module")
def groups(job) -> list[dict[str, Any]]:
    cluster = job["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: dict[str, Any]) -> dict[str, Any]:
    (found,) = group["template"]["spec"]["containers"]
    return found


def test_the_recipe_gets_the_devices_that_the_pods_have(job, groups):
    python, path, *arguments = job["entrypoint"].split()
    assert (python, path) == ("python", "/opt/hybridflow/recipes/ppo.py")
    head, workers = groups
    gpus = int(container(workers)["resources"]["limits"]["nvidia.com/gpu"])
    assert read_settings(*ppo.DEFAULTS, arguments=arguments).devices == [gpus] * workers["replicas"]
    assert workers["minReplicas"] == workers["maxReplicas"] == workers["replicas"]
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in container(head)["resources"]["limits"]


def test_ray_knows_its_options_and_version(job, groups):
    options = (Path(ray.__file__).parent / "scripts" / "scripts.py").read_text()
    assert all(f'"--{name}"' in options for group in groups for name in group["rayStartParams"])
    assert job["rayClusterSpec"]["rayVersion"] == ray.__version__
    assert job["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_all_pods_see_the_same_files_and_have_shared_memory(job, groups):
    for group in groups:
        mounts = {one["mountPath"]: one["name"] for one in container(group)["volumeMounts"]}
        volumes = {one["name"]: one for one in group["template"]["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory"}
        assert "persistentVolumeClaim" in volumes[mounts["/shared"]]
        environment = {one["name"]: one["value"] for one in container(group)["env"]}
        paths = [environment["HF_HOME"], *re.findall(r"=(/\S+)", job["entrypoint"])]
        assert len(paths) == 4
        assert all(path.startswith("/shared/") for path in paths)
        read = inspect.getsource(huggingface_hub.constants) + inspect.getsource(host)
        assert all(f'"{name}"' in read for name in environment)

"""The manifest for KubeRay in docs/operating.md has settings that Ray, the recipe and the hub's client read."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import ray
import yaml

from hybridflow.cli.command_line import read_settings
from hybridflow.cluster import host
from recipes import ppo

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

"""Decoders that only transformers knows, on FSDP and ZeRO: what transformers itself computes and how it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import any_model_tasks as tasks
import pytest
import torch
from any_model_tasks import FAMILIES, expected, make
from example_models import relative
from train_contract import whole

from hybridflow.config import FSDP, SGD, Adam, ZeRO
from hybridflow.engines.packable import is_packable
from hybridflow.errors import CheckpointError, ModelError
from hybridflow.transformers_spec import TransformersSpec, read_spec

STRATEGIES = {"fsdp-2": FSDP(micro_tokens=40), "zero-2": ZeRO(stage=2, micro_tokens=40)}
PACKED = {"gemma2", "gemma3", "gpt2", "gpt_neox", "phi3", "olmo2", "granite", "mixtral"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    directory = tmp_path_factory.mktemp("any")
    wanted = [(name, "lm") for name in FAMILIES] + [("gpt2", "value"), ("mixtral", "value")]
    return {key: make(*key, directory / "-".join(key)) for key in wanted}


@pytest.fixture(scope="module")
def oracle(directories) -> dict[tuple[str, str], dict[str, Any]]:
    return {key: expected(path, key[1]) for key, path in directories.items()}


def joined(parts: list[dict[str, Any]], key: str, output: str) -> torch.Tensor:
    return torch.cat([part[key][output].values for part in parts])


@pytest.mark.parametrize("way", STRATEGIES)
@pytest.mark.parametrize(
    "key", [*((name, "lm") for name in FAMILIES), ("gpt2", "value"), ("mixtral", "value")], ids="-".join
)
def test_it_is_transformers_model_that_is_trained(processes, directories, oracle, tmp_path, key, way):
    path, head, strategy = directories[key], key[1], STRATEGIES[way]
    target, names = tmp_path / "saved", [processes.name(), processes.name()]
    found, want = processes.run(2, tasks.trained, names, strategy, path, head, target), oracle[key]
    for output in found[0]["outputs"]:
        assert torch.allclose(joined(found, "outputs", output), want[output].values, atol=1e-4)
        assert joined(found, "again", output).equal(joined(found, "after", output))
    for part in found:
        assert part["norms"] == pytest.approx(want["norms"], rel=1e-5)
    spec = read_spec(path, head, strategy)
    after = tasks.tensors(path.with_name(f"{path.name}-after"), spec.tensors())
    assert relative(whole([part["boxes"] for part in found], spec.tensors()), after) < 1e-6
    assert relative(tasks.tensors(target, spec.tensors()), after) < 1e-6
    model = tasks.load_model(target, head)  # transformers reads what was saved
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_only_what_can_be_packed_is_packed(directories, name):
    config = read_spec(directories[name, "lm"], "lm", FSDP()).config
    assert is_packable(config) == (name in PACKED)

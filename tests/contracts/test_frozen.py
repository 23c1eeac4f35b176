"""`freeze`: tensors that are not trained stay as they are, without gradients and optimizer state; the others train as
with a learning rate of zero for these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hybridflow.config import FSDP, LoRA, ZeRO
from hybridflow.engines.fsdp.layout import state_layout, weights_layout
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import frozen_tensors, read_spec
from tests.contracts import vision_tasks as tasks
from tests.vision_models import KINDS, make_vision

VISION = ("visual",)
STRATEGIES = {
    "fsdp2": (FSDP(micro_tokens=60, freeze=VISION), 2),
    "tp2": (FSDP(tp=2, micro_tokens=60, freeze=VISION, recompute=True), 2),
    "zero1": (ZeRO(stage=1, micro_tokens=60, freeze=VISION), 2),
    "zero2": (ZeRO(stage=2, micro_tokens=60, freeze=VISION), 2),
    "zero2-bf16": (ZeRO(stage=2, micro_tokens=60, freeze=VISION, dtype="bfloat16"), 2),
    "zero3": (ZeRO(stage=3, micro_tokens=60, freeze=VISION), 2),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory) -> tuple[str, Path]:
    return request.param, make_vision(tmp_path_factory.mktemp(request.param) / "model", request.param)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_frozen_tower_has_no_state_and_stays(processes, model, tmp_path, strategy):
    (kind, path), (given, ranks) = model, STRATEGIES[strategy]
    parts = processes.run(ranks, tasks.frozen, processes.name(), given, path, kind, tmp_path / "saved", ranks)
    spec = read_spec(path, "lm")
    frozen = {name for name in spec.tensors() if "visual" in name}
    assert frozen
    joined = {key: set().union(*(part[key] for part in parts)) for key in parts[0]}
    assert joined["trained"] == joined["moments"] == spec.tensors().keys() - frozen
    assert joined["exact"] == spec.tensors().keys()
    before, after = (
        AutoModelForImageTextToText.from_pretrained(at, dtype=torch.float32).state_dict()
        for at in (path, tmp_path / "saved")
    )
    kept = torch.bfloat16 if given.dtype else torch.float32  # of weights without main parameters
    changed = {name for name in before if not torch.equal(before[name].to(kept), after[name].to(kept))}
    assert changed == {name for name in before if "visual" not in name}


def test_the_rest_trains_as_with_a_rate_of_zero(processes, model, tmp_path):
    kind, path = model
    losses = []
    for at, given in enumerate((FSDP(micro_tokens=60, freeze=VISION), FSDP(micro_tokens=60))):
        groups = {} if at == 0 else {"visual": 0.0}
        target = tmp_path / f"{at}"
        processes.run(2, tasks.frozen, processes.name(), given, path, kind, target, 2, groups, 0.0)
        losses.append(AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32).state_dict())
    for name, value in losses[0].items():
        assert torch.allclose(value, losses[1][name], atol=1e-6), name


def test_patterns_are_checked(model):
    _, path = model
    spec = read_spec(path, "lm")
    with pytest.raises(ConfigError, match=r"FSDP\(freeze=\('visuel',\)\): no tensor has 'visuel' in the name. Did you"):
        frozen_tensors(FSDP(freeze=("visuel",)), spec)
    with pytest.raises(ConfigError, match=r"ZeRO\(freeze=\('\*',\)\): all tensors have"):
        frozen_tensors(ZeRO(stage=2, freeze=("*",)), spec)
    with pytest.raises(ConfigError, match="parts of the names of parameters"):
        FSDP(freeze="visual")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with adapters all weights are frozen already"):
        FSDP(freeze=VISION, lora=LoRA(rank=4))
    strategy = FSDP(tp=2, freeze=VISION)
    weights, state = (of(strategy, spec, strategy.grid(4)) for of in (weights_layout, state_layout))
    assert {*state.tensors} == {name for name in weights.tensors if "visual" not in name}

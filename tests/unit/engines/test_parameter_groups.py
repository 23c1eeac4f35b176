"""Groups of parameters: how they are written, and what is refused before a model is built."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.config import FSDP, SGD, Adam, Megatron, ZeRO
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engines import weight_average
from hybridflow.engines.shard_optimizer import GroupSettings, ShardOptimizer, check_groups, settings_of
from hybridflow.engines.train_backends import backend
from hybridflow.engines.weight_average import WeightAverage
from hybridflow.errors import ConfigError
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

MODEL_SIZES: dict[str, Any] = {"hidden": 16, "intermediate": 32, "layers": 12, "heads": 4, "kv_heads": 2, "head_dim": 4}
SPEC = ModelSpec(family="llama", vocab=32, **MODEL_SIZES)


def check(groups: Any, strategy: Any = FSDP(), grid: RankGrid = RankGrid(d=2)) -> None:  # noqa: B008
    layout = backend(strategy, "layout").weights_layout(strategy, SPEC, grid)
    check_groups(Adam(lr=1.0, groups=groups), SPEC.tensors(), layout)


def test_a_pattern_is_a_part_of_a_name():
    adam = Adam(lr=1.0, weight_decay=0.5, groups={"embed": 0.1, "layers.1.": {"weight_decay": 0.25}, "3.*.q_": 0.2})
    wanted = {
        "model.embed_tokens.weight": (0.1, 0.5),
        "model.layers.1.mlp.up_proj.weight": (1.0, 0.25),
        "model.layers.11.mlp.up_proj.weight": (1.0, 0.5),  # a dot is a dot
        "model.layers.3.self_attn.q_proj.weight": (0.2, 0.5),
    }
    assert {name: tuple(settings_of(adam, name, decays=True)) for name in wanted} == wanted
    assert settings_of(adam, "model.layers.1.input_layernorm.weight", decays=False) == GroupSettings(1.0, 0.25)
    assert settings_of(adam, "model.norm.weight", decays=False) == GroupSettings(1.0, 0.0)


def test_they_are_values():
    one, other = (SGD(lr=1.0, groups={"embed": given}) for given in (0.1, {"lr": 0.1}))
    assert one == other
    assert hash(one) == hash(other)
    assert replace(one, lr=2.0).groups == one.groups
    assert replace(one, groups={}) == SGD(lr=1.0)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ({"embed": "1e-6"}, "this is a text"),
        ({"embed": -1.0}, r"Group\(lr=-1.0\): must be at least 0"),
        ({"embed": {"lrr": 1.0}}, "no setting 'lrr'. Did you mean 'lr'"),
        ({"embed": {}}, "give lr, weight_decay, or both"),
        ({"": 1.0}, "give a part of the names"),
        ({3: 1.0}, "give a part of the names"),
        (["embed"], "give learning rates by names"),
        ("embed", "give learning rates by names"),
        ({"embed": (1.0, 2.0)}, "give learning rates by names"),
    ],
)
def test_what_is_no_group_is_refused(groups, says):
    with pytest.raises(ConfigError, match=says):
        Adam(lr=1.0, groups=groups)


def test_every_pattern_fits_and_none_of_them_twice():
    check({"embed": 1.0, "layers.": 2.0, "model.norm": 3.0})
    with pytest.raises(ConfigError, match=r"'embd': \.\.\.}\): no trained tensor .* Did you mean 'embed_tokens'"):
        check({"embd": 1.0})
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.\S* is in the groups 'mlp' and 'layers\.1\.'"):
        check({"mlp": 1.0, "layers.1.": 2.0})


@pytest.mark.parametrize("grid", [RankGrid(), RankGrid(t=2), RankGrid(p=2, d=2)], ids=str)
def test_megatron_has_fused_tensors_in_one_group(grid):
    megatron = Megatron(tp=grid.t, pp=grid.p)
    check({"self_attn.*_proj": 1.0, "layers.3.mlp": 2.0}, megatron, grid)
    for pattern, one, other in (("q_proj", "q_proj", "k_proj"), ("layers.7.mlp.up", "gate_proj", "up_proj")):
        with pytest.raises(ConfigError, match=rf"{one}.weight and \S*{other}.weight are one tensor of this backend"):
            check({pattern: 1.0}, megatron, grid)
        check({pattern: 1.0})
        check({pattern: 1.0}, ZeRO(stage=1))


def optimizer(settings: Adam) -> ShardOptimizer:
    shards: Any = SimpleNamespace(main={"w": torch.zeros(2)}, storage={}, adapters={}, updated=lambda names: None)
    shards.memory, shards.separate = Residency({}, torch.device("cpu")), True
    return ShardOptimizer(settings, shards, (), [frozenset({"w"})])


@pytest.mark.parametrize(("lr", "says"), [(1e-6, None), (3e-6, r"lr=5e-07\) replaced 1e-06.* 3e-06 of")])
def test_a_changed_setting_that_beats_an_edited_one_is_said(lr, says, caplog):
    saved = optimizer(Adam(lr=1e-6, betas=(0.9, 0.99)))
    saved.change({"lr": 5e-7, "betas": (0.8, 0.9)})
    continued = optimizer(Adam(lr=lr, betas=(0.9, 0.99)))
    continued.moved(json.loads(json.dumps(saved.counters())))
    assert continued.settings.lr == 5e-7
    assert len(caplog.messages) == (says is not None)
    assert says is None or re.search(says, caplog.text)


SHAPES = {"matrix": (5, 3), "wide": (2, 70), "vector": (33,), "scalar": (), "none": (0, 4)}


class NewTensors(TorchDispatchMode):
    """Operations that return memory which none of their inputs has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in args if isinstance(each, torch.Tensor)}
        made = [each for each in (out if isinstance(out, list | tuple) else [out]) if isinstance(each, torch.Tensor)]
        self.found += [str(func) for each in made if each.untyped_storage()._cdata not in known]
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_takes_no_memory(dtype, monkeypatch):
    """One that ran out of it on one rank would leave the average of the others a step ahead."""
    monkeypatch.setattr(weight_average, "_ROOM", 8, raising=False)
    weights = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
    engine: Any = SimpleNamespace(
        device=torch.device("cpu"), storage=lambda: weights, layout=None, weights_loaded=lambda: None
    )
    average = WeightAverage(engine, 0.75)
    expected = {name: weight.float().clone() for name, weight in weights.items()}
    for _ in range(3):
        for weight in weights.values():
            weight.copy_(torch.randn(weight.shape))
        expected = {name: each.lerp(weights[name].float(), 0.25) for name, each in expected.items()}
        with NewTensors() as made:
            average.update()
        assert made.found == []
        assert all(torch.equal(average.storage()[name], each) for name, each in expected.items())
        assert all(torch.equal(weights[name], each.to(dtype)) for name, each in expected.items())

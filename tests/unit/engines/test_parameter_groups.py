"""Groups of parameters: how they are written, and what is refused before a model is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hybridflow.config import FSDP, SGD, Adam, Megatron, ZeRO
from hybridflow.engines.shard_optimizer import GroupSettings, check_groups, settings_of
from hybridflow.engines.train_backends import backend
from hybridflow.errors import ConfigError
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

SIZES: dict[str, Any] = {"hidden": 16, "intermediate": 32, "layers": 12, "heads": 4, "kv_heads": 2, "head_dim": 4}
SPEC = ModelSpec(family="llama", vocab=32, **SIZES)


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

"""What `hybridflow profile` makes of its measurements."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.cli.profile_run import Amounts, known_device, rising
from hybridflow.engines.process_groups import RankContext
from hybridflow.engines.profile import EngineProbe
from hybridflow.models.hf_spec import hf_config
from hybridflow.models.spec import ModelSpec


@given(st.lists(st.floats(0, 100), max_size=12))
def test_more_work_never_takes_less_time(values: list[float]):
    found = rising(values)
    assert len(found) == len(values)
    assert all(a <= b for a, b in pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    if values == sorted(values):
        assert found == pytest.approx(values, rel=1e-12)


def test_the_nearest_rising_sequence():
    assert rising([3.0, 1.0, 2.0, 4.0]) == [2.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-80GB", "a100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("Some Card 3", "some-card-3"),
        ("host", "host"),
    ],
)
def test_devices_are_called_as_the_planner_calls_them(name: str, device: str):
    assert known_device(name) == device


def test_powers_of_two():
    assert Amounts(devices=4, least=64, tokens=500).micro_batches == [64, 128, 256]


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "mistral", "sliding_window": 8},
        {"model_type": "qwen3", "layer_types": [FULL]},
        {"model_type": "qwen3", "layer_types": [SLIDING], "use_sliding_window": True, "max_window_layers": 0},
        {"model_type": "qwen2", "layer_types": [FULL], "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1},
        {"model_type": "qwen2", "use_sliding_window": True},
    ],
)
def test_a_copy_of_any_number_of_layers_has_the_models_layers(config: dict[str, Any], layers: int):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 32}
    given = {**sizes, "num_hidden_layers": 1, "num_key_value_heads": 2, "tie_word_embeddings": True, **config}
    own, probe = ModelSpec.from_hf_config(given), EngineProbe(cast(RankContext, None), given, length=8)
    copy = ModelSpec.from_hf_config(probe.few(layers))
    assert copy == replace(own, layers=layers)
    read = hf_config(probe.few(layers))  # as vLLM reads it
    assert read.num_hidden_layers == layers
    kinds = getattr(read, "layer_types", None) or []
    assert set(kinds) <= ({SLIDING} if own.sliding_window else {FULL})
    assert len(kinds) in (0, layers)

"""LoRA without processes: targets, settings, and what adapter directories may say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import transformers

from hybridflow.config import FSDP, LoRA, Megatron
from hybridflow.engines.lora.adapters import PREFIX, read_config, saved_names
from hybridflow.engines.lora.targets import adapter_names, adapter_tensors, modules, trained_tensors
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.families import FUSED_LINEAR
from hybridflow.models.hf_spec import spec_of_config
from hybridflow.models.spec import ModelSpec
from tests.vision_models import KINDS, sizes

SPEC = ModelSpec(
    family="llama", hidden=8, intermediate=12, layers=2, heads=2, kv_heads=1, head_dim=4, vocab=11, head="value"
)


def test_targets_match_as_in_peft():
    assert modules(SPEC, LoRA(targets="q_proj")) == [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    assert modules(SPEC, LoRA(targets=["mlp.up_proj"])) == [f"model.layers.{i}.mlp.up_proj" for i in range(2)]
    one = "model.layers.1.mlp.down_proj"
    assert modules(SPEC, LoRA(targets=one)) == [one]
    assert len(modules(SPEC, LoRA())) == 14


def test_adapters_have_the_shapes_of_their_layers():
    found = adapter_tensors(SPEC, LoRA(rank=3, targets=("k_proj",)))
    assert found["model.layers.0.self_attn.k_proj.lora_A.weight"] == (3, 8)
    assert found["model.layers.0.self_attn.k_proj.lora_B.weight"] == (4, 3)
    assert trained_tensors(SPEC, LoRA(rank=3, targets=("k_proj",))).keys() - found.keys() == {"score.weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_models_that_read_images_have_the_names_of_transformers_modules(kind):
    spec, lora = spec_of_config(sizes(kind).to_dict(), "lm"), LoRA(rank=2)
    want = {saved: PREFIX + own for own, saved in adapter_names(spec, lora).items()}
    assert saved_names(trained_tensors(spec, lora), reads_images=True) == want
    own = trained_tensors(SPEC, lora)
    assert saved_names(own, reads_images=False) == {name: PREFIX + name for name in own}


def test_all_linear_stands_alone():
    with pytest.raises(ConfigError, match="stands alone"):
        LoRA(targets=("all-linear", "q_proj"))


@pytest.mark.parametrize("target", ["q_porj", "lm_head", "embed_tokens", "proj", "input_layernorm"])
def test_targets_that_match_nothing_are_named(target):
    with pytest.raises(
        ConfigError, match=f"'{target}' matches no linear layer of this llama decoder, which has q_proj"
    ):
        modules(SPEC, LoRA(targets=("v_proj", target)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 0}, "rank=0"),
        ({"dropout": 1.0}, "dropout"),
        ({"targets": ()}, "targets"),
        ({"targets": (3,)}, "targets"),
        ({"targets": 5}, r"LoRA\(targets=5\): give a list"),
        ({"alpha": -1}, "alpha"),
        ({"alpha": 0}, r"alpha=0\): must be .*above 0"),
        ({"start": 3}, r"start=3\): give a directory"),
        ({"start": ""}, r"start=''\): give a directory"),
        ({"ranks": 3}, "Did you mean 'rank'"),
    ],
)
def test_settings_that_cannot_be(wrong, message):
    with pytest.raises(ConfigError, match=message):
        LoRA(**wrong)


def test_lora_on_fsdp_is_without_tensor_parallelism():
    with pytest.raises(ConfigError, match="adapters are not cut by tensor parallelism"):
        FSDP(tp=2, lora=LoRA())
    for backend in (FSDP, Megatron):
        with pytest.raises(ConfigError, match=r"give hf\.LoRA"):
            backend(lora=16)  # type: ignore[arg-type]


SAVED = {
    "peft_type": "LORA",
    "base_model_name_or_path": "/models/a",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["b", "a"],
}


def test_saved_adapters_say_what_they_are(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(SAVED | {"lora_dropout": 0.1, "rank_pattern": {}}))
    lora = LoRA(rank=4, alpha=8, targets=("a", "b"), dropout=0.1, start=str(tmp_path))
    assert read_config(tmp_path) == ("/models/a", lora)


@pytest.mark.parametrize(
    "more",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"use_rslora": True},
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 3}},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "pissa_niter_4"},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq"},
        {"init_lora_weights": "corda"},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ".*_proj"},
        {"target_modules": None},
        {"target_modules": ["q_proj", 3]},
        {"target_modules": 3},
        {"target_modules": {"q_proj": 1}},
        {"base_model_name_or_path": 3},
        {"modules_to_save": ["score", 3]},
        {"base_model_name_or_path": None},
    ],
)
def test_adapters_that_would_compute_something_else_are_refused(tmp_path, more):
    (tmp_path / "adapter_config.json").write_text(json.dumps(SAVED | more))
    with pytest.raises(CheckpointError, match=next(iter(more))):
        read_config(tmp_path)


@pytest.mark.parametrize(("name", "value"), [("r", "16"), ("r", 0), ("lora_alpha", None), ("lora_dropout", 1)])
def test_adapters_of_impossible_sizes_are_refused(tmp_path, name, value):
    (tmp_path / "adapter_config.json").write_text(json.dumps(SAVED | {name: value}))
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json .*{value!r}"):
        read_config(tmp_path)


@pytest.mark.parametrize("begin", [True, False, None, "gaussian"])
def test_how_adapters_of_the_same_model_began_is_all_the_same(tmp_path, begin):
    (tmp_path / "adapter_config.json").write_text(json.dumps(SAVED | {"init_lora_weights": begin}))
    assert read_config(tmp_path)[1].rank == 4


@pytest.mark.parametrize("text", ["", "{", "[]", '{"r": 3}'])
def test_an_unreadable_config_is_named(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read_config(tmp_path)


def test_layers_whose_weights_a_kernel_reads_are_those_of_transformers():
    """In classes with a convolution: linear layers whose weight the class itself names. A new family shows here."""
    found = {}
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        for source in re.split(r"\n(?=class )", file.read_text()):
            if source.startswith("class ") and "nn.Conv1d(" in source:
                linear = dict.fromkeys(re.findall(r"self\.(\w+) = nn\.Linear\(", source))
                if read := [name for name in linear if re.search(rf"self\.{name}\.weight\b", source)]:
                    found[re.match(r"class (\w+)", source)[1]] = read
    decoders = {name: read for name, read in found.items() if "Mixer" in name or "Mamba" in name}
    assert {name: set(read) for name, read in FUSED_LINEAR.items()} == {n: set(read) for n, read in decoders.items()}
    assert found.keys() == decoders.keys()

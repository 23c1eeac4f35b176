"""ModelSpec against transformers' own models (on the meta device): names, shapes, defaults, and published sizes."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridflow.errors import CheckpointError, ModelError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import FAMILIES, PUBLISHED, Cost, ModelSpec

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
}


def small(family: str, **changes) -> dict:
    return {"model_type": family, **SMALL, **changes}


def hf_config(settings: dict):
    settings = dict(settings)
    return AutoConfig.for_model(settings.pop("model_type"), **settings)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["lm", "value"])
def test_tensors_are_those_of_transformers(family, tied, head):
    head_dim = {} if family == "qwen2" else {"head_dim": 32}  # not hidden / heads, where the family allows it
    config = hf_config(small(family, tie_word_embeddings=tied, num_labels=1, **head_dim))
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    with torch.device("meta"):
        model = auto.from_config(config)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if tied:
        theirs.pop("lm_head.weight", None)  # the same storage as the embedding: not saved
    spec = ModelSpec.from_hf_config(config, head)
    assert spec.tensors() == theirs
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_config_json_and_config_object_mean_the_same(family):
    """Also where the file leaves settings to Hugging Face's defaults."""
    full = small(family)
    sparse = {key: value for key, value in full.items() if key != "num_key_value_heads"} | {"num_attention_heads": 32}
    for settings in (full, sparse):
        assert ModelSpec.from_hf_config(settings) == ModelSpec.from_hf_config(hf_config(settings))


def test_published_parameter_counts():
    assert {name: spec.num_parameters for name, spec in PUBLISHED.items()} == {
        "llama3-7b": 8_030_261_248,
        "llama3-13b": 14_001_525_760,
        "llama3-34b": 35_321_028_608,
        "llama3-70b": 70_553_706_496,
    }


def test_rope_settings_of_old_and_new_files():
    old = small("llama", rope_theta=500000.0) | {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    }
    new = {key: value for key, value in old.items() if not key.startswith("rope")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": 500000.0}
    spec = ModelSpec.from_hf_config(old)
    assert spec == ModelSpec.from_hf_config(new) == ModelSpec.from_hf_config(hf_config(old))
    assert spec.rope_theta == 500000.0
    assert dict(spec.rope_scaling)["factor"] == 8.0
    assert ModelSpec.from_hf_config(small("llama", rope_scaling=None)).rope_scaling == ()


@pytest.mark.parametrize(
    ("settings", "window"),
    [
        (small("llama"), None),
        (small("mistral", sliding_window=512), 512),
        (small("mistral", sliding_window=None), None),
        (small("mistral"), 4096),
        (small("qwen2"), None),
        (small("qwen2", sliding_window=512, use_sliding_window=False), None),
        (small("qwen2", sliding_window=512, use_sliding_window=True, max_window_layers=3), None),
        (small("qwen3", sliding_window=512, use_sliding_window=True, max_window_layers=0), 512),
        (small("llama", sliding_window=8, use_sliding_window=True), None),  # keys that transformers does not read
        (small("llama", sliding_window=8, layer_types=["sliding_attention"] * 3), None),
        (small("mistral", sliding_window=8, use_sliding_window=False), 8),
    ],
)
def test_sliding_window(settings, window):
    assert ModelSpec.from_hf_config(settings).sliding_window == window
    assert ModelSpec.from_hf_config(hf_config(settings)).sliding_window == window


def test_rope_scaling_replaces_rope_parameters_as_in_transformers():
    scaling = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    both = small("llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5}, rope_scaling=scaling)
    spec = ModelSpec.from_hf_config(both)
    assert dict(spec.rope_scaling) == {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
        "original_max_position_embeddings": float(spec.context)
    }
    assert spec == ModelSpec.from_hf_config(hf_config(both))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (small("gpt2"), "'gpt2' is not supported"),
        (small("qwen_2"), "Did you mean 'qwen2'"),
        ({"model_type": "llama", "hidden_size": 64}, "lacks intermediate_size, num_hidden_layers"),
        (small("llama", hidden_act="gelu"), "'gelu'"),
        (small("llama", mlp_bias=True), "mlp_bias"),
        (small("llama", attention_bias=True), "attention_bias=True is not supported for llama"),
        (small("qwen3", attention_bias=True), "attention_bias=True is not supported for qwen3"),
        (small("llama", rope_scaling={"type": "yarn", "factor": 2}), "'yarn'"),
        (small("llama", rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}), "partial_rotary_factor"),
        (small("llama", partial_rotary_factor=0.5), "partial_rotary_factor"),
        (small("llama", rope_parameters={"full_attention": {"rope_theta": 5e5}}), "full_attention are not read"),
        (small("llama", rope_parameters={"mrope_section": [1, 2]}), "mrope_section are not read"),
        (small("llama", rope_scaling={"rope_type": "llama3", "factor": 2}), "needs high_freq_factor, low_freq_factor"),
        (small("llama", rope_scaling={"rope_type": "default", "type": "linear"}), "type='linear'"),
        (small("llama", num_attention_heads=3, num_key_value_heads=3), "hidden_size=64 does not divide by 3 heads"),
        (small("llama", num_key_value_heads=3), "4 heads cannot share 3 kv-heads"),
        (small("llama", vocab_size=0), "vocab=0"),
        (small("llama", num_attention_heads=0), "heads=0"),
        (small("llama", num_hidden_layers=True), "lacks num_hidden_layers"),
        (small("llama", rms_norm_eps="small"), "rms_norm_eps='small' .* is not a number"),
        (small("llama", max_position_embeddings=[1]), "max_position_embeddings"),
        (small("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1), "1 of 3 layers"),
    ],
)
def test_models_that_cannot_be_run(settings, message):
    with pytest.raises(ModelError, match=message):
        ModelSpec.from_hf_config(settings)


def test_from_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"config.json does not exist"):
        ModelSpec.from_checkpoint(tmp_path / "nowhere")
    path = tmp_path / "config.json"
    for text, message in (("{", "not valid JSON"), ("[]", "holds a list")):
        path.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            ModelSpec.from_checkpoint(tmp_path)
    config = hf_config(small("qwen3", tie_word_embeddings=True))
    config.save_pretrained(tmp_path)
    assert ModelSpec.from_checkpoint(tmp_path) == ModelSpec.from_hf_config(config)
    assert json.loads(path.read_text())["model_type"] == "qwen3"


def test_check_parallel_suggests_sizes_that_fit():
    spec = ModelSpec.from_hf_config(small("llama", num_attention_heads=8, num_key_value_heads=4, intermediate_size=98))
    for p in (1, 2, 3):
        spec.check_parallel(p, 2)
    with pytest.raises(ModelError, match=r"critic has 8 heads, not divisible by t=3. Use tp in \[1, 2\]"):
        spec.check_parallel(1, 3, "critic")
    with pytest.raises(ModelError, match=r"98 MLP columns, not divisible by t=4. Use tp in \[1, 2\]"):
        spec.check_parallel(1, 4)
    with pytest.raises(ModelError, match=r"3 layers, fewer than p=4 stages. Use pp up to 3"):
        spec.check_parallel(4, 1)


def test_kv_heads_may_be_fewer_than_tensor_parallel_ranks():
    spec = ModelSpec.from_hf_config(small("llama", num_attention_heads=12, num_key_value_heads=3, head_dim=16))
    for t in (1, 3, 6, 12):
        spec.check_parallel(1, t)
    with pytest.raises(ModelError, match=r"3 kv-heads, which neither divide by t=2 nor .* Use tp in \[1, 3, 6, 12\]"):
        spec.check_parallel(1, 2)
    with pytest.raises(ModelError, match=r"3 kv-heads, which neither divide by t=4"):
        spec.check_parallel(1, 4)


@pytest.mark.parametrize("stage_layers", [(1, 1), (3, 0), (1, 1, 1), (4,)])
def test_stages_have_all_layers_and_at_least_one_each(stage_layers):
    spec = ModelSpec.from_hf_config(small("llama"))
    spec.check_parallel(2, 1, stage_layers=(1, 2))
    with pytest.raises(ModelError, match=r"the model has 3 layers and p=2\. Give the layers of each stage"):
        spec.check_parallel(2, 1, stage_layers=stage_layers)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_cost_is_what_transformers_computes(family, tied):
    """Torch's counter takes all pairs of positions, of which causal attention sees half; it skips the embedding."""
    config = hf_config(small(family, tie_word_embeddings=tied))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    cost = ModelSpec.from_hf_config(config).cost
    cost = Cost(cost.linear, cost.quadratic)
    for tokens in (10, 100):
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, tokens, dtype=torch.int64, device="meta"))
        computed = cost(torch.tensor([tokens])).item() + cost.quadratic * tokens**2
        rotation = tokens * config.head_dim if hasattr(config, "head_dim") else tokens * 16  # an outer product
        assert counter.get_total_flops() == pytest.approx(computed, abs=2 * rotation)


def test_cost_grows_linearly_beyond_a_window():
    """Of n positions each sees its window, the first ones what there is."""
    cost, tokens = Cost(3.0, 0.5, window=4), torch.arange(1, 40)
    pairs = cost(tokens) - 3.0 * tokens
    assert pairs[:4].tolist() == [0.5 * n * n for n in range(1, 5)]
    assert set(pairs[4:].diff().tolist()) == {4.0}


@pytest.mark.parametrize(("name", "said"), [("gema2", "Did you mean 'gemma2'?"), ("gemmaverse", "does not know it.")])
def test_a_family_is_hinted_only_when_it_is_one_letter_away(name, said):
    with pytest.raises(ModelError) as found:
        TransformersSpec.of({"model_type": name})
    assert str(found.value).endswith(said)

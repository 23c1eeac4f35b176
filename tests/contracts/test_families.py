"""The lists of `models.families` are what small copies of the families compute."""

from __future__ import annotations

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridflow.errors import ModelError
from hybridflow.models.families import check_causal, is_packable
from hybridflow.models.hf_spec import hf_config, make_model
from tests.contracts import family_cases as tasks
from tests.contracts.family_probes import can_be_packed, sees_later

SOME = ["bert", "gpt_neox", "llama", "qwen3_moe", "roformer", "xlnet"]  # the others take minutes
EVERY = [
    pytest.param(name, marks=() if name in SOME else pytest.mark.slow) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
]


@pytest.mark.parametrize("family", EVERY)
def test_a_family_is_in_the_lists_that_its_small_copy_says(family):
    try:
        with torch.device("meta"):
            model = make_model({"model_type": family})
    except ModelError:  # not made of its default config
        return
    found = sees_later(model)
    try:
        check_causal(hf_config({"model_type": family}))
        assert not found
        assert not is_packable({"model_type": family}) or can_be_packed({"model_type": family})
    except ModelError:
        assert found is not False


@pytest.mark.parametrize("name", tasks.FAMILIES)
def test_only_what_can_be_packed_is_packed(name):
    config = tasks.config(name).to_dict()
    assert is_packable(config) == can_be_packed(config)

"""In which dtypes weights are saved."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import save_file

from hybridflow.engines.checkpoint.reader import SINGLE, Checkpoint
from hybridflow.engines.checkpoint.writer import check_dtype, saved_dtypes
from hybridflow.errors import ConfigError
from hybridflow.models.hf_spec import TransformersSpec

NAMES = ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")
SIZES = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1}


def test_the_dtypes_are_those_of_the_files(tmp_path):
    """A tensor that the files lack, or have in a dtype for other things than training, has that of most elements."""
    kinds = (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16, torch.float32)
    save_file({name: torch.ones(8, 8).to(kind) for name, kind in zip(NAMES, kinds, strict=True)}, tmp_path / SINGLE)
    files = Checkpoint(tmp_path).dtypes([*NAMES, "score.weight"])
    assert files == {**dict.fromkeys(files, "BF16"), "model.norm.weight": "F32"}
    assert files.keys() == {*NAMES, "score.weight"}
    assert saved_dtypes(files, None) == {
        name: torch.float32 if name == "model.norm.weight" else torch.bfloat16 for name in files
    }


def test_another_dtype_holds_for_all_but_what_transformers_keeps_in_float32():
    assert {*saved_dtypes(dict.fromkeys(NAMES, "F32"), "float16").values()} == {torch.float16}
    assert {*saved_dtypes(dict.fromkeys(NAMES, "BF16"), "float32").values()} == {torch.float32}
    config = transformers.Ernie4_5_MoeConfig(**SIZES, moe_num_experts=2, moe_layer_start_index=0).to_dict()
    found = saved_dtypes(dict.fromkeys(TransformersSpec.of(config).tensors(), "F32"), "bfloat16", config)
    kept = {name.rpartition("mlp.")[2] for name, dtype in found.items() if dtype == torch.float32}
    assert kept == {"gate.weight", "moe_statics.e_score_correction_bias"}


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bf16", torch.bfloat16, 16, ["float16"]])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match="weights are saved as 'float32', 'bfloat16', 'float16'"):
        check_dtype(dtype)

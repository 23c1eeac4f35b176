"""The list of keys that vLLM alone follows is that of vLLM's own source."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hybridflow.engines.vllm.requirements import _FAMILIES
from hybridflow.models.families import VLLM_ONLY

vllm = pytest.importorskip("vllm")
transformers = pytest.importorskip("transformers")
HARMLESS = {
    **dict.fromkeys(("max_model_len", "model_max_length"), "a limit of lengths, of which the engine has its own"),
    **dict.fromkeys(
        ("mtp_layer_types", "mtp_sliding_windows", "num_mtp_modules", "num_nextn_predict_layers"),
        "layers behind the model's, which draft tokens",
    ),
    **dict.fromkeys(("disable_quant_module", "quantization_config"), "quantized checkpoints are refused"),
    **dict.fromkeys(
        ("index_skip_topk_offset", "index_topk_freq", "index_topk_pattern", "indexer_rope_interleave"),
        "read beside index_topk alone",
    ),
    **dict.fromkeys(("scoring_func", "topk_method", "use_routing_bias"), "of families that are refused"),
    "deepstack_visual_indexes": "of a vision model",
    "get_nemotron_h_config_for_layer": "a method",
    "first_k_dense_replace": "vLLM refuses a hy_v3 model without it",
}
"""Keys that vLLM's class of a family reads, transformers' does not, and that change no log-probability."""


def source(module: str) -> Path:
    full = module if "." in module else f"vllm.model_executor.models.{module}"
    found = find_spec(full)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin)


def read_if_there(text: str) -> Iterator[str]:
    """Keys that the code of a model reads of a config which may not have them."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            match node.args:
                case [owner, ast.Constant(value=str(key)), *_] if ast.unparse(owner).endswith("config"):
                    yield key


def test_every_key_that_vllm_alone_follows_is_listed():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    unlisted = dict[str, set[str]]()
    for family in sorted(_FAMILIES):
        known = transformers.CONFIG_MAPPING[family]
        own = Path(inspect.getfile(known))
        theirs = "".join(path.read_text() for path in (own, *own.parent.glob("modeling_*.py")))
        module = source(_TEXT_GENERATION_MODELS[MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]][0])
        for key in read_if_there(module.read_text()):
            if not (hasattr(known(), key) or key in known.attribute_map or re.search(rf"\b{key}\b", theirs)):
                unlisted.setdefault(key, set()).add(family)
    assert {key: found for key, found in unlisted.items() if key not in VLLM_ONLY and key not in HARMLESS} == {}
    assert HARMLESS.keys() <= unlisted.keys(), "nothing reads them any more"


def test_every_listed_key_is_one_that_vllm_reads():
    root = Path(vllm.__file__).parent
    text = "".join(
        path.read_text()
        for folder in ("model_executor/models", "model_executor/layers", "models", "config", "transformers_utils")
        for path in (root / folder).rglob("*.py")
    )
    assert [key for key in VLLM_ONLY if not re.search(rf"config\.{key}\b|[\"']{key}[\"']", text)] == []

"""Which of vLLM's model classes generates with a model, found without importing vLLM, which takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

from hybridflow.errors import ModelError
from hybridflow.model_spec import Decoder, ModelSpec

_OWN = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# not the table of models that vLLM runs on transformers' modules: it changes those classes for the whole process, in
# which they train
_TABLE = "_TEXT_GENERATION_MODELS"


def has_own_layout(spec: Decoder) -> TypeGuard[ModelSpec]:
    """Whether `layout.py` knows where vLLM keeps its weights; other models are probed."""
    return isinstance(spec, ModelSpec)


def architecture(spec: Decoder) -> str:
    """The name of vLLM's class, whatever head the checkpoint has.

    Errors: ModelError for a model that vLLM has no class of its own for.
    """
    if has_own_layout(spec):
        return _OWN[spec.family]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(spec.family))
    if name not in (known := _known()) and known:
        raise ModelError(
            f"vLLM has no model class {name} of its own, so it cannot generate with this {spec.family} model in the "
            "process that trains it. Use a model that vLLM has."
        )
    return name


@cache
def _known() -> frozenset[str]:
    """vLLM's classes of text models, read from the table in its source; empty where there is no such table."""
    found = find_spec("vllm")
    path = Path(found.origin).parent / "model_executor/models/registry.py" if found and found.origin else None
    if path is None or not path.is_file():
        return frozenset()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and ast.unparse(node.targets[0]) == _TABLE:
            return frozenset(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return frozenset()

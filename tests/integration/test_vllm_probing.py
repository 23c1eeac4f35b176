"""Layouts that are read off vLLM's loader: those of the known families again, and of models that only vLLM knows."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from hybridflow.config import VLLM, Sampling
from hybridflow.engines.vllm import isolation as environment
from hybridflow.engines.vllm import requirements
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.engines.vllm.requirements import check
from hybridflow.errors import ModelError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts.rank_processes import RankProcesses, World

PROMPTS = [[5, 9, 33, 69], [12, 7], list(range(3, 20))]
GREEDY = Sampling(max_tokens=10, greedy=True, ignore_eos=True)


def probed(world: World, name: str, directory: Path, p: int, t: int) -> VLLMEngine:
    """An engine that finds its layout out, whatever the family."""
    context = world.context(name, RankGrid(p, t))
    spec = TransformersSpec.of(json.loads((directory / "config.json").read_text()))
    strategy = VLLM(tp=t, pp=p, kv_cache_gb=0.02, max_sequences=16)
    world.engines.append(VLLMEngine(context, strategy, context.grid.generation(p, t), spec, directory))
    return world.engines[-1]


def same_regions(world: World, name: str, directory: Path, p: int, t: int) -> bool:
    """Whether what was found is what `vllm_layout` says, for every rank."""
    engine = probed(world, name, directory, p, t)
    known = vllm_layout(ModelSpec.from_checkpoint(directory), engine.grid)
    found = engine.layout()
    assert found.tensors == known.tensors
    return all(set(found.regions(rank)) == set(known.regions(rank)) for rank in range(engine.grid.size))


def packed(world: World, name: str, directory: Path, p: int, t: int) -> list[Any] | str:
    """`generated` where vLLM's CPU build packs experts, as it does by itself."""
    with environment.replaced(environment, "keeping_plain", lambda process: process):
        return generated(world, name, directory, p, t)


def generated(world: World, name: str, directory: Path, p: int, t: int) -> list[Any] | str:
    """Greedy tokens and log-probabilities with the checkpoint's weights, or why vLLM cannot have them."""
    try:
        engine = probed(world, name, directory, p, t)
    except ModelError as error:
        return str(error)
    weights, storage, memory = load_file(directory / "model.safetensors"), engine.storage(), engine.memory()
    views = [(region, region.view(storage[region.storage])) for region in engine.layout().regions(world.rank)]
    memory.release()
    memory.acquire()
    for tensor in engine.storage().values():
        torch.nn.init.constant_(tensor, 1e4)
    for region, view in views:
        box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        view.copy_(weights[region.box.tensor][box])
    engine.weights_changed()
    return [(one.token_ids, one.log_probs) for [one] in engine.generate(PROMPTS, GREEDY)]


SIZES: dict[str, Any] = {
    "vocab_size": 70,  # vLLM pads them to 128
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "mistral": SIZES,
    "qwen2": {**SIZES, "tie_word_embeddings": True},
    "qwen3": {**SIZES, "head_dim": 32},
    "phi3": SIZES,  # fused in the checkpoint too, and cut otherwise
    "gemma2": {**SIZES, **GEMMA},
    "gemma3_text": {**SIZES, **GEMMA},
    "granite": {**SIZES, "logits_scaling": 3.0},
    "gpt2": {**SIZES, "n_inner": 96},  # turned
    "bloom": SIZES,  # query, key and value of each head one after the other
    "mixtral": {**SIZES, "num_local_experts": 4},
    **dict.fromkeys(requirements._ON_TRANSFORMERS, SIZES),
}
MIXED = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "head_dim": 32}
KNOWN, OTHERS = (
    ("llama", "mistral", "qwen2", "qwen3"),
    ("phi3", "gemma2", "gemma3_text", "granite", "gpt2", "bloom", "mixtral"),
)


@pytest.fixture(scope="module")
def ranks(rank_processes) -> RankProcesses:
    return rank_processes(2)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for family, sizes in MODELS.items():
        torch.manual_seed(len(family))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).float()
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                torch.nn.init.normal_(parameter, 0.4, 0.2)
        model.save_pretrained(root / family)
    return {family: root / family for family in MODELS}


@pytest.mark.parametrize(("family", "p", "t"), [*((family, 1, t) for family in KNOWN for t in (1, 2)), ("qwen2", 2, 1)])
def test_known_families_are_found_as_they_are_known(ranks, directories, family, p, t) -> None:
    assert all(ranks.run(p * t, same_regions, ranks.name(), directories[family], p, t))


GENERATED = [*product(OTHERS, (1, 2)), *product(requirements._ON_TRANSFORMERS, (2,)), *product(KNOWN, (2,))]


@pytest.mark.thinned(12)
@pytest.mark.parametrize(("family", "t"), GENERATED)
def test_other_models_generate_what_transformers_computes(ranks, directories, family, t) -> None:
    found = ranks.run(t, generated, ranks.name(), directories[family], 1, t)
    model = AutoModelForCausalLM.from_pretrained(directories[family], dtype=torch.float32).eval()
    assert all(out == found[0] for out in found)
    for prompt, (token_ids, log_probs) in zip(PROMPTS, found[0], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
        assert token_ids == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(log_probs), wanted, rtol=0, atol=1e-3)


def test_weights_that_kernels_have_in_a_form_of_their_own_are_refused(ranks, directories) -> None:
    """Every rank hears of it, and the process can have another engine."""
    for error in ranks.run(2, packed, ranks.name(), directories["mixtral"], 1, 2):
        assert "weights of this mixtral model cannot be written into vLLM's" in error
        assert "w13_weight" in error
        assert "another form" in error
    assert isinstance(ranks.run(1, generated, ranks.name(), directories["phi3"], 1, 1)[0], list)


def test_families_are_those_that_vllm_has_classes_for() -> None:
    from vllm.model_executor.models import registry

    own = {family for family, name in NAMES.items() if name in registry._TEXT_GENERATION_MODELS}
    assert own == requirements._FAMILIES


def test_what_vllm_cannot_generate_with_is_refused_on_the_driver() -> None:
    def spec(family: str, **sizes: Any) -> TransformersSpec:
        return TransformersSpec.of(AutoConfig.for_model(family, **{**SIZES, **sizes}))

    check(spec("phi3"), VLLM(tp=2), "cpu")
    for found, strategy, device, words in (
        (spec("gpt_neox"), VLLM(), "cpu", "vLLM has no model class GPTNeoXForCausalLM of its own"),
        (spec("olmo2"), VLLM(), "cuda", "compiles transformers' class of this olmo2 model for the whole process"),
        (spec("phi3", num_attention_heads=8), VLLM(), "cpu", "head_dim=16"),
        (spec("phi3"), VLLM(tp=3), "cuda", "2 kv-heads are not divisible by tp"),
        (spec("phi3"), VLLM(pp=3), "cuda", "the model has 2 layers"),
        (spec("qwen2", **MIXED), VLLM(), "cuda", "of the 2 layers of this one 1 attend to everything"),
        (spec("qwen3", **MIXED), VLLM(), "cuda", "the same attention window"),
    ):
        with pytest.raises(ModelError, match=words):
            check(found, strategy, device)

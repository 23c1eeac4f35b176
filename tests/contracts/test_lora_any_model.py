"""LoRA on decoders with experts: each linear layer that is left has its adapter, and nothing else has one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from hybridflow.config import FSDP, SGD, LoRA
from hybridflow.engines.lora.targets import adapter_tensors, module_names, modules
from hybridflow.models.hf_spec import Decoder, TransformersSpec, read_spec
from tests.contracts.any_model_tasks import reference, tensors
from tests.contracts.example_models import VOCABULARY, load_model, loss_of, make_batch, relative, totals_of
from tests.contracts.family_cases import MEGATRON_CASES, spread
from tests.contracts.test_lora_training import updates
from tests.contracts.train_contract import whole

RANK, ALPHA, LR, STEPS = 2, 3, 0.05, 2
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": None}
_SIZES |= {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES |= {"intermediate_size": 48, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "head_dim": 8}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "mlp_only_layers": [0]},  # a dense layer names its matrices as experts name theirs
    "deepseek_v2": {
        **_LATENT,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "n_group": 1,
        "topk_group": 1,
    },
    "laguna": {"num_experts": 4, "shared_expert_intermediate_size": 16},  # a checkpoint has other names than the model
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 48},  # its class names a larger model's decoder
}
LINEAR = {
    "qwen3_moe": 7 + 2 * 4,
    "deepseek_v2": 3 * (5 + 3),
    "laguna": 3 * (5 + 3),
    "llama4_text": 3 * (4 + 3),
}


def make(name: str, path: Path) -> tuple[Path, Path]:
    """A random model and adapters of all its linear layers, neither A nor B of which is zero."""
    torch.manual_seed(len(name))
    config = AutoConfig.for_model(name, **(_SIZES | FAMILIES[name]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path / "model")
    return path / "model", make_adapters(path / "model", path / "adapters")


def make_adapters(model: Path, directory: Path) -> Path:
    """Random adapters of all linear layers."""
    shapes = adapter_tensors(read_spec(model, "lm"), LoRA(rank=RANK))
    start = {f"base_model.model.{key}": torch.randn(shape) * 0.2 for key, shape in shapes.items()}
    directory.mkdir()
    save_file(start, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return directory


def by_equation(path: Path, adapters: Path, spec: Decoder) -> dict[str, Any]:
    """Hu et al. 2021, equation 3, in hooks of transformers' own layers, and plain SGD of A and B."""
    model = load_model(path).eval().requires_grad_(False)
    files = load_file(adapters / "adapter_model.safetensors")
    found = {name.removeprefix("base_model.model."): nn.Parameter(tensor) for name, tensor in files.items()}
    for here, saved in module_names(spec, LoRA()).items():
        a, b = found[f"{saved}.lora_A.weight"], found[f"{saved}.lora_B.weight"]
        layer = model.get_submodule(here)
        layer.register_forward_hook(lambda _, given, out, a=a, b=b: out + ALPHA / RANK * given[0] @ a.T @ b.T)
    optimizer, norms = torch.optim.SGD(found.values(), lr=LR), []
    for seed in range(STEPS):
        batch = make_batch(seed=seed)
        optimizer.zero_grad()
        loss_of("lm")(reference(model, "lm", batch), batch, totals_of(batch))[0].backward()
        norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in found.values())))  # type: ignore[union-attr]
        optimizer.step()
    trained = {name: tensor.detach() for name, tensor in found.items()}
    return {"norms": norms, "adapters": trained, "merged": merged(tensors(path, spec.tensors()), trained)}


def merged(weights: Mapping[str, Tensor], adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = dict(weights)
    for name in adapters:
        if name.endswith(".lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            found[f"{module}.weight"] += ALPHA / RANK * adapters[f"{module}.lora_B.weight"] @ adapters[name]
    return found


@pytest.mark.parametrize(("name", "ep"), [*((name, 1) for name in FAMILIES), ("qwen3_moe", 2)])
def test_adapters_of_decoders_with_experts(processes, tmp_path, name, ep):
    path, adapters = make(name, tmp_path)
    assert len(modules(read_spec(path, "lm"), LoRA())) == LINEAR[name]
    assert_trains(processes, FSDP(ep=ep, micro_tokens=40), 2, path, adapters, tmp_path / "save")


@pytest.mark.thinned(10)
@pytest.mark.parametrize(("name", "grid"), sorted(spread(MEGATRON_CASES, each=2)))
def test_adapters_of_every_family_on_megatron(processes, family, tmp_path, name, grid):
    """Also of tensors that hold several matrices, of norms behind a layer, and of layers that ranks have whole."""
    path, strategy = family(name)[0], replace(MEGATRON_CASES[name, grid], micro_tokens=40)
    adapters, (p, t) = make_adapters(path, tmp_path / "adapters"), (strategy.pp, strategy.tp)
    size = p * t * (strategy.dp or 1) * strategy.cp
    assert_trains(processes, strategy, size, path, adapters, tmp_path / "save")


def assert_trains(processes, strategy: Any, size: int, path: Path, adapters: Path, save: Path) -> None:
    lora, spec = LoRA(rank=RANK, alpha=ALPHA, start=str(adapters)), read_spec(path, "lm")
    save.mkdir()
    args = (processes.name(), replace(strategy, lora=lora), size, path, "lm", SGD(lr=LR, clip_grad=0.0), STEPS, save)
    found, want = processes.run(size, updates, *args), by_equation(path, adapters, spec)
    assert found[0]["norms"] == pytest.approx(want["norms"], rel=1e-5)
    trained = whole([part["adapters"] for part in found], adapter_tensors(spec, lora))
    assert relative(trained, want["adapters"]) < 1e-5
    assert relative(whole([part["merged"] for part in found], spec.tensors()), want["merged"]) < 1e-5
    assert relative(tensors(save / "whole", spec.tensors()), want["merged"]) < 1e-5
    files = load_file(save / "adapters" / "adapter_model.safetensors")
    assert all(files[f"base_model.model.{key}"].equal(tensor) for key, tensor in trained.items())


def test_routers_have_no_adapters():
    """Some are linear layers by their class and give more than one tensor."""
    config = AutoConfig.for_model("phimoe", **(_SIZES | {"num_local_experts": 4}))
    found = modules(TransformersSpec.of(config), LoRA())
    assert {name.rpartition(".")[2] for name in found} == {"q_proj", "k_proj", "v_proj", "o_proj"}

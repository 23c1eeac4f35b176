"""What the processes of test_vllm_probing.py do: build engines, and answer in plain values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hybridflow.config import VLLM, Sampling
from hybridflow.engines.vllm import isolation as environment
from hybridflow.engines.vllm.engine import VLLMEngine
from hybridflow.engines.vllm.layout import vllm_layout
from hybridflow.errors import ModelError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests.contracts.rank_processes import World

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

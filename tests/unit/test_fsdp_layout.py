"""Layouts of FSDP2, HSDP and FSDP x TP: the arithmetic, and against what torch did to a transformers model."""

from __future__ import annotations

import multiprocessing as mp
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from hybridflow.engine3d.layout import Layout
from hybridflow.engine3d.plan import plan
from hybridflow.engines.fsdp.layout import fsdp_layout, tensor_parallel_dim
from hybridflow.errors import LayoutError, PlacementError
from hybridflow.model_spec import ModelSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contracts"))
from rank_processes import RankProcesses, World

# nothing divides by 4; 61 rows of the vocabulary leave 21, 21, 19 on three ranks and 31, 30 on two
SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 54,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 10,
    "max_position_embeddings": 32,
    "pad_token_id": None,
}
# (family, tied, replicate, shard, tp): the mesh; whether a training step runs, which DTensor wants even TP shards for
MESHES = {
    "fsdp-4": ("qwen2", False, 1, 4, 1, True),
    "fsdp-3": ("llama", True, 1, 3, 1, True),
    "fsdp-6": ("qwen2", True, 1, 6, 1, True),
    "hsdp-2x2": ("llama", False, 2, 2, 1, True),
    "hsdp-2x3": ("qwen2", True, 2, 3, 1, True),
    "fsdp-2-tp-2": ("qwen2", False, 1, 2, 2, True),
    "fsdp-3-tp-2": ("llama", True, 1, 3, 2, True),
    "fsdp-2-tp-3": ("qwen2", False, 1, 2, 3, False),
    "tp-4": ("llama", False, 1, 1, 4, False),
}


def make_model(family: str, tied: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    sizes = SIZES | {"tie_word_embeddings": tied}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=torch.float32)


def wrap(model: Any, replicate: int, shard: int, tp: int, *, last_kept: bool = False) -> None:
    """Shard `model` over a mesh of all ranks as a user of torch would; the root stays gathered if `last_kept`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (replicate, shard, tp), mesh_dim_names=("replicate", "shard", "tp"))
    if tp > 1:
        plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                dim = tensor_parallel_dim(f"{name}.weight")
                plan[name] = RowwiseParallel() if dim == 1 else ColwiseParallel()
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], plan, src_data_rank=None)  # pyright: ignore[reportArgumentType]
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
    if shard == 1 and replicate == 1:
        return
    over = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
    for layer in model.model.layers:
        fully_shard(layer, mesh=over)
    fully_shard(model, mesh=over, reshard_after_forward=not last_kept)


def spec_of(model: Any) -> ModelSpec:
    return ModelSpec.from_hf_config(model.config)


def whole_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def holds_its_boxes(layout: Layout, rank: int, storage: dict[str, Tensor], truth: dict[str, Tensor]) -> bool:
    for region in layout.regions(rank):
        index = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        if not torch.equal(region.view(storage[region.storage]), truth[region.box.tensor][index]):
            return False
    return sum(r.box.numel for r in layout.regions(rank)) == sum(t.numel() for t in storage.values())


def on_a_mesh(world: World, name: str) -> dict[str, Any] | None:
    """Wrap the model, compare every box with the whole model, train a step, and compare again."""
    from hybridflow.engines.fsdp.dtensors import dtensor_layout, dtensor_storage

    family, tied, replicate, shard, tp, trains = MESHES[name]
    model: Any = make_model(family, tied)
    spec, before = spec_of(model), whole_tensors(model)
    wrap(model, replicate, shard, tp, last_kept=True)
    layout = dtensor_layout(model, spec=spec)
    found: dict[str, Any] = {"wrapped": holds_its_boxes(layout, world.rank, dtensor_storage(model), before)}
    if trains:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        ids = torch.arange(12).reshape(2, 6)
        model(ids).logits.float().square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(ids)  # leaves the root gathered, whose parameters are then not what the optimizer trains
        storage = dtensor_storage(model)
        trained = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}
        found["moved"] = all(not torch.equal(trained[name], before[name]) for name in before)
        found["trained"] = holds_its_boxes(layout, world.rank, storage, trained)
        moments = {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
        found["moments"] = sets_of(dtensor_layout(moments)) == sets_of(layout)
    found["regions"] = regions_of(layout)
    found["parts"] = [layout.part(rank) for rank in range(layout.ranks)]  # type: ignore[misc]
    return found


def regions_of(layout: Layout) -> list:
    return [list(layout.regions(rank)) for rank in range(layout.ranks)]


def sets_of(layout: Layout) -> list[set]:
    return [set(layout.regions(rank)) for rank in range(layout.ranks)]


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[int, RankProcesses]]:
    made: dict[int, RankProcesses] = {}

    class Worlds(dict):
        def __missing__(self, size: int) -> RankProcesses:  # one world at a time: they only wait otherwise
            for other in made.values():
                other.close()
            made.clear()
            made[size] = self[size] = RankProcesses(size)
            return self[size]

    yield Worlds()
    for other in made.values():
        other.close()


@pytest.mark.parametrize("name", sorted(MESHES, key=lambda name: MESHES[name][2] * MESHES[name][3] * MESHES[name][4]))
def test_boxes_are_those_of_torch(processes, name):
    family, tied, replicate, shard, tp, trains = MESHES[name]
    size = replicate * shard * tp
    answers = processes[size].run(size, on_a_mesh, name)
    spec = spec_of(make_model(family, tied))
    expected = fsdp_layout(spec, shard, replicate=replicate, tp=tp)
    for answer in answers:
        assert answer["wrapped"]
        assert answer["regions"] == regions_of(expected)
        if trains:
            assert answer["moved"]
            assert answer["trained"]
            assert answer["moments"]
    assert expected.part is not None
    parts, own = answers[0]["parts"], [expected.part(rank) for rank in range(size)]
    assert len(set(own)) == shard * tp
    assert [parts.index(part) for part in parts] == [own.index(part) for part in own]

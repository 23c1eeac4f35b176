"""What FSDP and ZeRO hold on each rank, what they never hold, and where their optimizer state can go.

Rajbhandari et al. 2020, table 1: of P parameters on N ranks, ZeRO-1 keeps 1/N of the optimizer's state, ZeRO-2 of
gradients too, ZeRO-3 and FSDP of parameters too. Four gloo processes serve the whole file (see conftest.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron, ZeRO
from hybridflow.engines.call_estimate import CallRows, asked_rows, estimate_rank
from hybridflow.engines.fsdp.layout import check_tensor_parallel, fsdp_layout
from hybridflow.engines.initial_weights import initialise
from hybridflow.errors import ModelError
from hybridflow.models.hf_spec import spec_of_config
from hybridflow.models.spec import ModelSpec
from tests.contracts import engine_tasks, state_tasks
from tests.contracts import sharded_tasks as tasks
from tests.contracts.example_models import make_model, spec_of
from tests.contracts.family_cases import config
from tests.contracts.test_optimizer_moves import check_moves

ADAM = Adam(lr=0.02, eps=1e-3, betas=(0.9, 0.95), clip_grad=0.7, weight_decay=0.01)
MOMENTUM = SGD(lr=0.05, momentum=0.5, clip_grad=0.7)
SMALL: dict[str, Any] = {"micro_tokens": 48}
HELD: dict[str, tuple[Any, dict[str, float]]] = {  # in parameters of four bytes, P = 1
    "fsdp-4": (FSDP(), {"parameters": 1 / 4, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
    "fsdp-4-bf16": (FSDP(dtype="bfloat16"), {"parameters": 1 / 4, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
    "fsdp-2-tp-2": (FSDP(tp=2), {"parameters": 1 / 4, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
    "hsdp-2x2": (FSDP(replicate=2), {"parameters": 1 / 2, "gradients": 1 / 2, "moments": 2 / 2, "main": 0}),
    "zero-1": (ZeRO(stage=1), {"parameters": 1, "gradients": 1, "moments": 2 / 4, "main": 0}),
    "zero-1-bf16": (
        ZeRO(stage=1, dtype="bfloat16"),
        {"parameters": 1 / 2, "gradients": 1, "moments": 2 / 4, "main": 1 / 4},
    ),
    "zero-2": (ZeRO(stage=2), {"parameters": 1, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
    "zero-2-bf16": (
        ZeRO(stage=2, dtype="bfloat16"),
        {"parameters": 1 / 2, "gradients": 1 / 4, "moments": 2 / 4, "main": 1 / 4},
    ),
    "zero-3": (ZeRO(stage=3), {"parameters": 1 / 4, "gradients": 1 / 4, "moments": 2 / 4, "main": 0}),
}
DEEP = ModelSpec(
    family="llama", hidden=64, intermediate=128, layers=16, heads=4, kv_heads=4, head_dim=16, vocab=64, head="lm"
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3-tied", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", HELD)
def test_a_rank_holds_what_the_table_says(processes, path, name):
    """Up to padding: FSDP cuts whole rows, and norms stay whole under tensor parallelism; ZeRO's shares are multiples
    of 64 elements, and the last rank of a unit may own less."""
    strategy, shares = HELD[name]
    whole_bytes = 4 * spec_of(path).num_parameters
    found = processes.run(4, tasks.bytes_held, processes.name(), strategy, 4, path, ADAM)
    for what, share in shares.items():
        held = [rank[what] for rank in found]
        assert max(held) >= share * whole_bytes
        assert max(held) <= share * whole_bytes * 1.05, f"{what}: {held} bytes, the model has {whole_bytes}"


@pytest.mark.thinned(2)
@pytest.mark.parametrize("strategy", [FSDP(), FSDP(tp=2), FSDP(replicate=2), ZeRO(stage=3)], ids=str)
def test_no_rank_ever_holds_the_whole_model(processes, tmp_path, strategy):
    """A rank has its part, and for a moment what it reads of a tensor, or the layer that it computes and the next."""
    checkpoint = saved(tmp_path / "deep", DEEP)
    everything = 4 * DEEP.num_parameters
    layer = 4 * sum(a * b for a, b in ((s[0], s[1] if len(s) > 1 else 1) for s in DEEP.layer_tensors(0).values()))
    part = everything / (2 if isinstance(strategy, FSDP) and strategy.replicate == 2 else 4)
    for found in processes.run(4, tasks.peak_bytes, processes.name(), strategy, 4, checkpoint, DEEP):
        assert part <= found["build"] < part + 2 * layer < 0.75 * everything
        assert 0 < found["forward"] < 5 * layer < 0.4 * everything


WIDE = ModelSpec(family="llama", hidden=256, intermediate=704, layers=2, heads=4, kv_heads=2, head_dim=64, vocab=1024)


RUN: list[Any] = [
    FSDP(),
    FSDP(recompute=True),
    FSDP(tp=2),
    FSDP(cp=2),
    FSDP(lora=LoRA(rank=8)),
    ZeRO(stage=1),
    ZeRO(stage=2),
    ZeRO(stage=3, recompute=True),
    Megatron(tp=2),
    Megatron(tp=2, recompute=True),
    Megatron(pp=2),
    Megatron(cp=2),
    Megatron(lora=LoRA(rank=8)),
]
MIXTURE = spec_of_config(
    config("qwen3_moe", hidden_size=256, moe_intermediate_size=256, num_hidden_layers=2, num_experts=8).to_dict(), "lm"
)
SCORES = replace(WIDE, head="value")
MIXTURES: list[Any] = [FSDP(), Megatron(tp=2), Megatron(ep=2)]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("strategy", "spec"),
    [(one, WIDE) for one in RUN] + [(one, SCORES) for one in (RUN[0], RUN[-1])] + [(one, MIXTURE) for one in MIXTURES],
    ids=lambda one: str(one) if isinstance(one, FSDP | Megatron | ZeRO) else f"{one.family} {one.head}",
)
def test_an_estimate_is_what_a_run_takes(processes, strategy, spec):
    """Of the peak of each call, to 5 %: tensors without memory are counted as those with. Of dense models beside what
    is held; mixtures compute in 16 bits, in which the device's kernel of attention keeps less than the host's."""
    dense = spec is not MIXTURE
    strategy = replace(strategy, micro_tokens=512, dtype="float32" if dense else "bfloat16")
    grid, lengths = strategy.grid(2), [(40, 60 + row) for row in range(12)]
    args = (processes.name(), strategy, 2, spec, asked_rows(lengths, spec), Adam(lr=1e-6))
    calls = {"infer": CallRows("inference", lengths), "update": CallRows("training", lengths)}
    for rank, ran in enumerate(processes.run(2, tasks.call_peaks, *args)):
        found = estimate_rank("a", rank, grid, strategy, spec, Adam(lr=1e-6), calls)
        for name, one in found.items():
            held = sum(one.held.values()) if dense else 0
            assert one.peak - held == pytest.approx(ran[name] - held, rel=0.05)


def saved(directory: Path, spec: ModelSpec) -> Path:
    """The model of `spec` with drawn weights as a Hugging Face directory."""
    from hybridflow.models.hf_spec import hf_config

    storage = {name: torch.empty(shape) for name, shape in spec.tensors().items()}
    initialise(fsdp_layout(spec, 1), 0, storage)
    directory.mkdir()
    save_file(storage, directory / "model.safetensors")
    hf_config(spec.config).save_pretrained(directory)
    return directory


CIRCLE = [
    FSDP(**SMALL),
    Megatron(tp=2, **SMALL),
    ZeRO(stage=2, **SMALL),
    FSDP(tp=2, **SMALL),
    Megatron(pp=2, **SMALL),
    ZeRO(stage=1, **SMALL),
    FSDP(replicate=2, **SMALL),
]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("optimizer", "dtype"), [(ADAM, "float32"), (MOMENTUM, "bfloat16")], ids=["adam-float32", "sgd-bfloat16"]
)
def test_training_goes_on_in_another_backend(processes, path, optimizer, dtype):
    """Main parameters and moments are bit-equal after each move; losses are those of the run that never moved.

    Backends round in other places, and every update carries the difference on: in float32 to 1e-5 of the norm after six
    on some processors. In bfloat16 it is 2^-9 at a time: the first updates are compared.
    """
    strategies = [type(strategy)(**{**vars(strategy), "dtype": dtype}) for strategy in CIRCLE]
    found = processes.run(4, state_tasks.moving, processes.name(), strategies, path, optimizer)
    check_moves(found, path, optimizer, *((5e-5, len(CIRCLE)) if dtype == "float32" else (0.05, 4)))


def test_experts_move_between_ranks_that_share_them_otherwise(processes, family):
    path, _ = family("qwen3_moe")
    cuts = [
        FSDP(ep=2),
        Megatron(tp=2, ep=2),
        FSDP(),
        FSDP(ep=2, replicate=2),
        Megatron(ep=2, etp=2, dp=4),
        ZeRO(stage=2),
    ]
    found = processes.run(4, state_tasks.moving, processes.name(), [replace(c, **SMALL) for c in cuts], path, ADAM)
    check_moves(found, path, ADAM, 5e-5, len(cuts))


def test_a_rank_gathers_its_experts_only(processes, family):
    """Every layer has six, of which the engine of a rank never has more than three."""
    path, _ = family("qwen3_moe")
    for shapes in processes.run(4, tasks.shapes_of_experts, processes.name(), FSDP(ep=2), 4, path):
        assert len(shapes) == 2 * 2
        assert {shape[0] for shape in shapes} == {3}


@pytest.mark.parametrize(
    "strategies",
    [
        (FSDP(dtype="float16"), Megatron(dtype="float16")),
        (Megatron(dtype="float16"), ZeRO(stage=1, dtype="float16")),
        (Megatron(dtype="float16", **SMALL),) * 2,
    ],
    ids=["fsdp to megatron", "megatron to zero", "megatron"],
)
def test_step_counts_and_loss_scales_move_too(processes, path, strategies):
    fresh, before, after = processes.run(1, state_tasks.counters_follow, processes.name(), strategies, path, ADAM)[0]
    assert (fresh["steps"], before["steps"], after["steps"]) == (0, 1, 2)
    assert before["loss_scale"]["scale"] < fresh["loss_scale"]["scale"]
    assert after["loss_scale"]["scale"] == before["loss_scale"]["scale"]


@pytest.mark.parametrize(
    ("optimizer", "away"),
    [(ADAM, ()), (MOMENTUM, ("parameters", "optimizer", "gradients")), (None, ("parameters",))],
    ids=["adam-here", "sgd-away", "none-away"],
)
@pytest.mark.parametrize("strategy", [FSDP(tp=2), ZeRO(stage=1), ZeRO(stage=2, dtype="bfloat16")], ids=str)
def test_close_gives_all_memory_back(processes, path, strategy, optimizer, away):
    assert processes.run(4, tasks.closed, processes.name(), strategy, 4, path, optimizer, away) == [0] * 4


def test_closed_groups_end_with_their_threads(processes, path):
    """Each gloo group has threads of its own, and a process may train many models one after the other. The first one
    also starts what autograd keeps."""
    strategies = [FSDP(**SMALL), FSDP(tp=2), FSDP(replicate=2), ZeRO(stage=1), ZeRO(stage=2), Megatron(pp=2)]
    args = (processes.name(), strategies, path, ADAM)
    for left in processes.run(4, tasks.threads_left, *args):
        assert left[1:] == [0] * (len(strategies) - 1)


@pytest.mark.parametrize(
    ("strategy", "what", "error"),
    [
        (FSDP(), "values", "ModelError: actor was asked for 'values'"),
        (FSDP(), "train", "ConfigError: actor was built without an optimizer"),
        (ZeRO(stage=2), "prompt", "BatchError: row 0 has an empty prompt"),
        (
            FSDP(tp=2),
            "vocabulary",
            "BatchError: row 1 has the token id 61 in response_ids, the model's vocabulary",
        ),
        (FSDP(tp=3), "values", "ModelError: actor has 8 heads, not divisible by t=3"),
    ],
    ids=str,
)
def test_what_cannot_work_is_said(processes, path, strategy, what, error):
    size = strategy.tp if isinstance(strategy, FSDP) else 1
    found = processes.run(size, engine_tasks.fails, processes.name(), strategy, size, path, what)
    assert all(message.startswith(error) for message in found)


def test_a_kv_head_belongs_to_one_rank(path):
    spec = replace(spec_of(path), kv_heads=2)
    with pytest.raises(
        ModelError, match=r"actor has 2 kv-heads, which do not divide by tp=4. Use FSDP\(tp=\) in \[1, 2\]"
    ):
        check_tensor_parallel(spec, 4, "actor")

"""The contract of a TrainEngine, held by every backend: it computes and trains like transformers, however split.

One set of gloo processes serves the whole file (see conftest.py); what engines keep is in test_engine_state.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hybridflow.config import FSDP, SGD, Megatron, ZeRO
from tests.contracts import engine_tasks as tasks
from tests.contracts.example_models import VOCABULARY, make_batch, relative, spec_of
from tests.contracts.train_contract import (
    FEW_KV,
    OPTIMIZERS,
    SMALL,
    UPDATED,
    Case,
    Sizes,
    assert_outputs,
    assert_updates,
    count,
    joined,
    megatron,
    values_of,
    whole,
)

SHARDED: dict[str, Case] = {
    "fsdp-1": (FSDP(**SMALL), (1, 1, 1)),
    "fsdp-4": (FSDP(**SMALL), (1, 1, 4)),
    "fsdp-4-padded": (FSDP(**SMALL, packed=False), (1, 1, 4)),
    "fsdp-2-tp-2": (FSDP(tp=2, **SMALL), (1, 2, 2)),
    "hsdp-2x2": (FSDP(replicate=2, **SMALL), (1, 1, 4)),
    "tp-2-twice": (FSDP(tp=2, replicate=2, **SMALL), (1, 2, 2)),
    "tp-4": (FSDP(tp=4, **SMALL), (1, 4, 1)),
    "zero-1": (ZeRO(stage=1, **SMALL), (1, 1, 4)),
    "zero-2": (ZeRO(stage=2, **SMALL), (1, 1, 4)),
    "zero-3": (ZeRO(stage=3, **SMALL), (1, 1, 4)),
}
GRIDS = sorted(s for s in itertools.product(range(1, 5), repeat=3) if count(s) <= 4)
SPLIT: dict[str, Case] = {f"megatron-{p}-{t}-{d}": (megatron((p, t, d)), (p, t, d)) for p, t, d in GRIDS}
UNEVEN: dict[str, Case] = {  # layers of the stages, of four
    "stages-of-3": (megatron((3, 1, 1)), (3, 1, 1)),
    "stages-1-3": (megatron((2, 1, 2), stage_layers=(1, 3)), (2, 1, 2)),
    "stages-3-1": (megatron((2, 2, 1), stage_layers=(3, 1)), (2, 2, 1)),
}
SEQUENCE: dict[str, Case] = {
    f"sequence-{s[0]}-{s[1]}-{s[2]}": (megatron(s, sequence_parallel=True), s)
    for s in ((1, 4, 1), (2, 2, 1), (1, 2, 2))
}
PADDED: dict[str, Case] = {  # micro-batches: all others are packed
    "padded-1-2-2": (megatron((1, 2, 2), packed=False), (1, 2, 2)),
    "padded-2-2-1": (megatron((2, 2, 1), packed=False, sequence_parallel=True, recompute=True), (2, 2, 1)),
}
CASES = SHARDED | SPLIT | UNEVEN | SEQUENCE | PADDED
WAYS: dict[str, Case] = {  # to save memory
    "recompute": (FSDP(recompute=True, **SMALL), (1, 1, 4)),
    "recompute-tp": (FSDP(recompute=True, tp=2, **SMALL), (1, 2, 2)),
    "reduce-often": (FSDP(reduce_often=True, replicate=2, **SMALL), (1, 1, 4)),
    "offload": (FSDP(offload=True, **SMALL), (1, 1, 4)),
    "zero-1-offload": (ZeRO(stage=1, offload=True, **SMALL), (1, 1, 4)),
    "zero-2-offload": (ZeRO(stage=2, offload=True, recompute=True, **SMALL), (1, 1, 4)),
    "megatron-recompute": (megatron((2, 2, 1), recompute=True), (2, 2, 1)),
}
EVERY_FAMILY = ["fsdp-4", "fsdp-4-padded", "fsdp-2-tp-2", "padded-1-2-2"]
EVERY_FAMILY += ["megatron-1-1-1", "megatron-1-2-1", "megatron-1-4-1"]
BOTH_OPTIMIZERS = ["fsdp-4", "fsdp-2-tp-2", "hsdp-2x2", "zero-1", "zero-2", "zero-3"]
"""What is held to plain PyTorch under both optimizers; other cases under Adam, which has more state."""
UPDATE = [
    *[(name, kind) for name in SHARDED for kind in OPTIMIZERS if name in BOTH_OPTIMIZERS or kind == "adam"],
    *[(name, kind) for name in ("megatron-1-2-2", "megatron-2-2-1") for kind in OPTIMIZERS],
    *[("megatron-1-1-1", "sgd"), ("megatron-2-1-2", "adam"), ("megatron-1-1-4", "adam")],
]


def fitting(models: Any, name: str, sizes: Sizes) -> Any:
    """Every family without tensor parallelism and with it; elsewhere those with a peculiarity. Megatron's ranks may
    share a kv-head; sizes that no rank count divides go with three ranks and with FSDP."""
    kv_heads = {"qwen2-two-kv": 2, "qwen3-one-kv": 1, "thirds": 3}
    names = {key[0] for key in models}
    if name in SHARDED:
        names = names if name in EVERY_FAMILY else {"qwen3-tied", "llama", "thirds"}
        names = {one for one in names if kv_heads.get(one, 4) % sizes[1] == 0}
    elif 3 in sizes[1:]:
        names = {"thirds"}
    else:
        names = names - {"thirds"} if name in EVERY_FAMILY else {"qwen3-tied", "qwen2", "qwen3-one-kv"}
    return {key: path for key, path in models.items() if key[0] in names}


@pytest.mark.parametrize("name", [*UNEVEN, *SEQUENCE, *PADDED])
def test_outputs_of_other_stages_sequences_and_micro_batches(processes, models, expected, name):
    strategy, sizes = CASES[name]
    assert_outputs(processes, strategy, sizes, fitting(models, name, sizes), expected)


@pytest.mark.thinned(13)
@pytest.mark.parametrize("name", [*SHARDED, *SPLIT])
def test_outputs_are_those_of_transformers(processes, models, expected, name):
    strategy, sizes = CASES[name]
    assert_outputs(processes, strategy, sizes, fitting(models, name, sizes), expected)


def run_updates(processes: Any, case: Case, path: Any, head: str, kind: str, *more: Any) -> list[dict[str, Any]]:
    strategy, sizes = case
    args = (processes.name(), strategy, count(sizes), path, head, OPTIMIZERS[kind][0], *more)
    return processes.run(count(sizes), tasks.updates, *args)


@pytest.mark.thinned(15)
@pytest.mark.parametrize(("name", "kind"), UPDATE)
def test_updates_are_those_of_plain_pytorch(processes, models, oracles, name, kind):
    for key in UPDATED:
        found = run_updates(processes, CASES[name], models[key], key[1], kind)
        assert_updates(found, oracles[*key, kind], models[key], key[1])


@pytest.mark.parametrize(
    ("name", "kind", "key"),
    [
        *[(name, "adam", UPDATED[0]) for name in [*WAYS, *UNEVEN, *PADDED, "sequence-2-2-1"]],
        *[("megatron-1-4-1", "adam", FEW_KV), ("sequence-1-2-2", "sgd", FEW_KV)],  # whose ranks share a kv-head
    ],
    ids=str,
)
def test_updates_of_one_model(processes, models, oracles, name, kind, key):
    found = run_updates(processes, (CASES | WAYS)[name], models[key], key[1], kind)
    assert_updates(found, oracles[*key, kind], models[key], key[1])


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("fsdp-4", (4, 0, 2, 1)),
        ("fsdp-2-tp-2", (0, 7)),
        ("zero-2", (7, 0, 0, 0)),
        ("zero-1", (0, 3, 4, 0)),
        ("megatron-1-1-4", (4, 0, 2, 1)),
        ("megatron-2-1-2", (7, 0)),
        ("megatron-1-2-2", (0, 7)),
    ],
)
def test_uneven_and_empty_local_batches(processes, models, expected, oracles, name, counts):
    (strategy, sizes), key = CASES[name], UPDATED[counts == (4, 0, 2, 1)]
    path, head = models[key], key[1]
    assert_updates(run_updates(processes, CASES[name], path, head, "adam", counts), oracles[*key, "adam"], path, head)
    job = (processes.name(), strategy, count(sizes), path, head, 0.7)
    outputs = joined([p[0] for p in processes.run(count(sizes), tasks.outputs, [job], counts)], sizes)
    for output, want in expected[key].items():
        assert torch.allclose(values_of(outputs[output]), values_of(want), atol=1e-5)


@pytest.mark.parametrize(("kind", "sizes"), [("sgd", (2, 2, 1)), ("adam", (2, 1, 2))])
def test_tied_embeddings_stay_bitwise_equal(processes, models, kind, sizes):
    found = run_updates(processes, (megatron(sizes), sizes), models["llama-tied", "lm"], "lm", kind)
    copies = {}
    for rank, part in enumerate(found):
        for name, start, _, value in part["parameters"]:
            if name == "model.embed_tokens.weight":
                copies.setdefault(start, []).append((rank, value))
    assert sorted(len(held) for held in copies.values()) == ([2, 2] if sizes == (2, 2, 1) else [4])
    for held in copies.values():
        assert all(value.equal(held[0][1]) for _, value in held)


def test_two_models_with_different_sizes_train_side_by_side(processes, models, oracles):
    actor, critic = UPDATED
    optimizer = OPTIMIZERS["adam"][0]
    jobs = [
        (megatron((1, 2, 2)), models[actor], "lm", optimizer),
        (megatron((2, 1, 2)), models[critic], "value", optimizer),
    ]
    found = processes.run(4, tasks.side_by_side, [processes.name(), processes.name()], jobs, 4)
    for i, (name, head) in enumerate(UPDATED):
        oracle = oracles[name, head, "adam"]
        parameters = whole([part[i]["parameters"] for part in found], spec_of(models[name, head], head).tensors())
        for tensor, want in oracle["parameters"].items():
            assert float((parameters[tensor] - want).abs().max()) < 1e-5, tensor
        norms = [norm["grad_norm"] for norm in found[0][i]["norms"]]
        assert norms == pytest.approx([norm for norm, _, _ in oracle["updates"]], rel=1e-5)


@pytest.mark.parametrize(
    "name",
    ["fsdp-4", "fsdp-2-tp-2", "hsdp-2x2", "zero-1", "zero-2", "megatron-1-1-2", "megatron-2-1-1"],
)
def test_several_passes_before_a_step_add_up(processes, models, name):
    (strategy, sizes), path = CASES[name], models["qwen3", "lm"]
    args = (processes.name(), strategy, count(sizes), path, SGD(lr=0.0, clip_grad=0))
    found = processes.run(count(sizes), tasks.several_passes, *args)
    parts, once = (whole([part[key] for part in found], spec_of(path).tensors()) for key in ("gradients", "whole"))
    assert relative(parts, once) < 1e-5


def test_weights_without_a_checkpoint_do_not_depend_on_the_split(processes, models):
    spec, found = spec_of(models["qwen2-tied", "lm"]), []
    for name in ("fsdp-1", "fsdp-4", "fsdp-2-tp-2", "hsdp-2x2", "zero-1", "megatron-2-2-1", "megatron-1-4-1"):
        strategy, sizes = CASES[name]
        args = (processes.name(), strategy, count(sizes), spec)
        found.append(whole(processes.run(count(sizes), tasks.fresh_weights, *args), spec.tensors()))
    for other in found[1:]:
        assert all(other[name].equal(tensor) for name, tensor in found[0].items())


@pytest.mark.parametrize("name", ["fsdp-4", "megatron-2-1-1"])
def test_a_value_model_starts_from_a_language_model_with_a_zero_head(processes, models, name):
    strategy, sizes = CASES[name]
    job = (processes.name(), strategy, count(sizes), models["llama", "lm"], "value", 1.0)
    outputs = joined([part[0] for part in processes.run(count(sizes), tasks.outputs, [job])], sizes)
    assert outputs["values"].values.eq(0).all()
    assert len(outputs["values"].values) == len(make_batch().peek("response_ids").values)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocab_parallel_log_probs_and_their_gradients(processes, size, temperature):
    found = processes.run(size, tasks.vocabulary, processes.name(), size, temperature, size)
    logits, targets, weights = tasks.vocabulary_case(size)
    wide = logits.double().requires_grad_()
    log_p = (wide / temperature).log_softmax(-1)
    want = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    (want * weights[0] + entropy * weights[1]).sum().backward()
    for log_probs, found_entropy, _ in found:
        assert torch.allclose(log_probs.double(), want.detach(), rtol=1e-5, atol=1e-5)
        assert torch.allclose(found_entropy.double(), entropy.detach(), atol=1e-5)
    assert torch.allclose(torch.cat([part[2] for part in found], 1).double(), wide.grad, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "size", "what", "error"),
    [
        (
            Megatron(pp=4, stage_layers=(1, 1, 1, 2)),
            4,
            "stages",
            "ModelError: stage_layers=(1, 1, 1, 2) are 5 layers on 4 stages; actor has 4 layers",
        ),
        *[(one, 1, "values", "ModelError: actor was asked for 'values'") for one in (Megatron(), FSDP())],
        *[(one, 1, "train", "ConfigError: actor was built without an optimizer") for one in (Megatron(), FSDP())],
        *[(one, 1, "prompt", "BatchError: row 0 has an empty prompt") for one in (Megatron(), ZeRO(stage=2))],
        *[
            (one, 2, "vocabulary", "BatchError: row 1 has the token id 61 in response_ids, the model's vocabulary")
            for one in (Megatron(tp=2), FSDP(tp=2))
        ],
        *[
            (one, 3, "heads", "ModelError: actor has 8 heads, not divisible by t=3")
            for one in (Megatron(tp=3), FSDP(tp=3))
        ],
    ],
    ids=str,
)
def test_what_cannot_work_is_said(processes, models, strategy, size, what, error):
    args = (processes.name(), strategy, size, models["llama", "lm"], what)
    assert all(message.startswith(error) for message in processes.run(size, tasks.fails, *args))
    assert VOCABULARY % 2

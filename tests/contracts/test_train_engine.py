"""The contract of a TrainEngine, held by Megatron: it computes and trains like transformers, however split.

Other backends are held to the same in `test_sharded_engines.py`. One set of four gloo processes serves all these files
(see conftest.py).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import SGD, Adam, LoRA, Megatron
from tests.contracts import engine_tasks as tasks
from tests.contracts.example_models import (
    VOCABULARY,
    make_batch,
    relative,
    spec_of,
)
from tests.contracts.rank_processes import RankProcesses
from tests.contracts.train_contract import (
    FEW_KV,
    OPTIMIZERS,
    UPDATED,
    Key,
    Sizes,
    assert_outputs,
    assert_poison_changes_nothing,
    assert_updates,
    count,
    joined,
    values_of,
    whole,
)

SMALL = sorted(s for s in itertools.product(range(1, 5), repeat=3) if s[0] * s[1] * s[2] <= 4)
UPDATE = [
    *[((1, 2, 2), kind) for kind in OPTIMIZERS],
    *[((2, 2, 1), kind) for kind in OPTIMIZERS],
    *[((1, 1, 1), "sgd"), ((2, 1, 2), "adam"), ((1, 1, 4), "adam")],
]
UNEVEN = [((3, 1, 1), None), ((2, 1, 2), (1, 3)), ((2, 2, 1), (3, 1))]  # layers of the stages, of four

KINDS = [("adam", "float32"), ("sgd", "bfloat16"), ("adam", "float16")]  # what 16 bits add is alike for both optimizers


def megatron(sizes: Sizes, **settings: Any) -> Megatron:
    """(p, t, d), with micro-batches small enough that there are several."""
    p, t, d = sizes
    return Megatron(pp=p, tp=t, dp=d, **{"micro_tokens": 48, **settings})


def assert_megatron_outputs(
    processes: RankProcesses, models: dict[Key, Path], expected: dict[Key, Any], sizes: Sizes, **settings: Any
) -> None:
    """Every family on one rank and with both numbers of tensor parallel ranks; elsewhere those with a peculiarity."""
    thirds, every = 3 in sizes and sizes[0] != 3, not settings and sizes in ((1, 1, 1), (1, 2, 1), (1, 4, 1))
    names = {key[0] for key in models} - {"thirds"} if every else {"qwen3-tied", "qwen2", "qwen3-one-kv"}
    fitting = {k: path for k, path in models.items() if k[0] in ({"thirds"} if thirds else names)}
    assert_outputs(processes, megatron(sizes, **settings), sizes, fitting, expected)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_outputs_are_those_of_transformers(processes, models, expected, sizes):
    assert_megatron_outputs(processes, models, expected, sizes)


@pytest.mark.parametrize("sizes", [(1, 4, 1), (2, 2, 1), (1, 2, 2)], ids=str)
def test_outputs_with_sequence_parallelism(processes, models, expected, sizes):
    assert_megatron_outputs(processes, models, expected, sizes, sequence_parallel=True)


@pytest.mark.parametrize(("sizes", "stage_layers"), UNEVEN, ids=str)
def test_outputs_with_uneven_stages(processes, models, expected, sizes, stage_layers):
    assert_megatron_outputs(processes, models, expected, sizes, stage_layers=stage_layers)


@pytest.mark.parametrize(("sizes", "kind"), UPDATE, ids=str)
def test_updates_are_those_of_plain_pytorch(processes, models, oracles, sizes, kind):
    for name, head in UPDATED:
        path = models[name, head]
        args = (processes.name(), megatron(sizes), count(sizes), path, head, OPTIMIZERS[kind][0])
        found = processes.run(count(sizes), tasks.updates, *args)
        assert_updates(found, oracles[name, head, kind], path, head)


@pytest.mark.parametrize(
    ("sizes", "settings", "kind"), [((1, 4, 1), {}, "adam"), ((1, 2, 2), {"sequence_parallel": True}, "sgd")], ids=str
)
def test_updates_with_ranks_that_share_a_kv_head(processes, models, oracles, sizes, settings, kind):
    strategy = megatron(sizes, **settings)
    args = (processes.name(), strategy, count(sizes), models[FEW_KV], "lm", OPTIMIZERS[kind][0])
    assert_updates(processes.run(count(sizes), tasks.updates, *args), oracles[*FEW_KV, kind], models[FEW_KV], "lm")


@pytest.mark.parametrize(("sizes", "stage_layers"), UNEVEN, ids=str)
def test_updates_with_uneven_stages(processes, models, oracles, sizes, stage_layers):
    (name, head), strategy = UPDATED[0], megatron(sizes, stage_layers=stage_layers)
    args = (processes.name(), strategy, count(sizes), models[name, head], head, OPTIMIZERS["adam"][0])
    found = processes.run(count(sizes), tasks.updates, *args)
    assert_updates(found, oracles[name, head, "adam"], models[name, head], head)


@pytest.mark.parametrize("setting", ["sequence_parallel", "recompute"])
def test_updates_with_sequence_parallelism_and_with_recomputation(processes, models, oracles, setting):
    sizes, (name, head) = (2, 2, 1), UPDATED[0]
    strategy = megatron(sizes, **{setting: True})
    args = (processes.name(), strategy, count(sizes), models[name, head], head, OPTIMIZERS["adam"][0])
    found = processes.run(count(sizes), tasks.updates, *args)
    assert_updates(found, oracles[name, head, "adam"], models[name, head], head)


@pytest.mark.parametrize(("sizes", "counts"), [((1, 1, 4), (4, 0, 2, 1)), ((2, 1, 2), (7, 0)), ((1, 2, 2), (0, 7))])
def test_uneven_and_empty_local_batches(processes, models, expected, oracles, sizes, counts):
    name, head = UPDATED[sizes == (1, 1, 4)]
    path = models[name, head]
    args = (processes.name(), megatron(sizes), count(sizes), path, head, OPTIMIZERS["adam"][0], counts)
    assert_updates(processes.run(count(sizes), tasks.updates, *args), oracles[name, head, "adam"], path, head)
    job = (processes.name(), megatron(sizes), count(sizes), path, head, 0.7)
    outputs = joined([p[0] for p in processes.run(count(sizes), tasks.outputs, [job], counts)], sizes)
    for output, want in expected[name, head].items():
        assert torch.allclose(values_of(outputs[output]), values_of(want), atol=1e-5)


def test_tied_embeddings_stay_bitwise_equal(processes, models):
    for kind, sizes in zip(OPTIMIZERS, [(2, 2, 1), (2, 1, 2)], strict=True):
        args = (processes.name(), megatron(sizes), 4, models["llama-tied", "lm"], "lm", OPTIMIZERS[kind][0])
        found = processes.run(4, tasks.updates, *args)
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


@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 1)], ids=str)
def test_several_passes_before_a_step_add_up(processes, models, sizes):
    path = models["llama", "lm"]
    found = processes.run(2, tasks.two_passes, processes.name(), megatron(sizes), 2, path, SGD(lr=0.0, clip_grad=0))
    shapes = spec_of(path).tensors()
    halves, once = (whole([part[key] for part in found], shapes) for key in ("gradients", "whole"))
    assert relative(halves, once) < 1e-5


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_resuming_from_a_state_changes_nothing(processes, models, kind, dtype):
    strategy = megatron((1, 1, 2), dtype=dtype)
    args = (processes.name(), strategy, 2, models["llama", "lm"], OPTIMIZERS[kind][0])
    assert all(processes.run(2, tasks.resumed, *args))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1, 1, 3), (2, 2, 1)], ids=str)
def test_resuming_adapters_from_a_state_changes_nothing(processes, models, sizes, dtype):
    """Of a rank that owns the state of no adapter, too."""
    strategy = megatron(sizes, dtype=dtype, lora=LoRA(rank=2, targets=("layers.1.self_attn.q_proj",)))
    args = (processes.name(), strategy, count(sizes), models["llama", "lm"], OPTIMIZERS["adam"][0])
    assert all(processes.run(count(sizes), tasks.resumed, *args))


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_updates_start_from_weights_that_were_written_from_outside(processes, models, dtype, kind):
    optimizer = Adam(lr=1e-3) if kind == "adam" else SGD(lr=0.01)
    strategy = megatron((2, 1, 2), dtype=dtype)
    args = (processes.name(), strategy, 4, models["llama-tied", "lm"], optimizer)
    assert all(processes.run(4, tasks.written_from_outside, *args))


def test_weights_without_a_checkpoint_do_not_depend_on_the_split(processes, models):
    spec = spec_of(models["qwen2-tied", "lm"])
    found = {}
    for sizes in [(1, 1, 1), (2, 2, 1), (1, 4, 1)]:
        parts = processes.run(count(sizes), tasks.fresh_weights, processes.name(), megatron(sizes), count(sizes), spec)
        found[sizes] = whole(parts, spec.tensors())
    for other in ((2, 2, 1), (1, 4, 1)):
        assert all(found[other][name].equal(tensor) for name, tensor in found[1, 1, 1].items())


def test_a_value_model_starts_from_a_language_model_with_a_zero_head(processes, models):
    path, sizes = models["llama", "lm"], (2, 1, 1)
    job = (processes.name(), megatron(sizes), 2, path, "value", 1.0)
    outputs = joined([part[0] for part in processes.run(2, tasks.outputs, [job])], sizes)
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


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 2, 2), (2, 1, 2)], ids=str)
def test_a_loss_that_raises_on_one_replica_fails_on_every_rank_and_leaves_nothing(processes, models, sizes):
    """All ranks meet the same error, and the next update is that of an engine on which nothing failed."""
    args = (processes.name(), megatron(sizes), count(sizes), models["llama", "lm"], OPTIMIZERS["sgd"][0])
    found = processes.run(count(sizes), tasks.survives_a_loss_that_raises, *args)
    assert len({name for name, _, _ in found}) == 1
    assert all("the reward of this row is gone" in text for _, text, _ in found)
    assert all(same for _, _, same in found)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("sizes", "kind", "dtype", "key"),
    [
        ((1, 2, 2), "adam", None, ("qwen3-tied", "lm")),
        ((2, 2, 1), "sgd", None, ("qwen3-tied", "lm")),
        ((2, 1, 2), "adam", "float16", ("qwen3-tied", "lm")),
        ((2, 1, 2), "adam", None, ("llama", "value")),
    ],
    ids=str,
)
def test_what_is_not_finite_on_one_rank_changes_nothing(processes, models, sizes, kind, dtype, key):
    strategy, optimizer = megatron(sizes, dtype=dtype), OPTIMIZERS[kind][0]
    assert_poison_changes_nothing(processes, strategy, sizes, models[key], key[1], optimizer)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "away"),
    [
        (OPTIMIZERS["adam"][0], "float16", ()),
        (OPTIMIZERS["adam"][0], "float32", ("parameters", "optimizer", "gradients")),
        (OPTIMIZERS["sgd"][0], "float16", ("parameters", "optimizer", "gradients")),
        (None, "float32", ()),
    ],
    ids=["adam-float16-here", "adam-float32-away", "sgd-float16-away", "none-float32-here"],
)
def test_close_gives_all_memory_back(processes, models, optimizer, dtype, away):
    args = (processes.name(), megatron((1, 1, 2), dtype=dtype), 2, models["llama-tied", "lm"], optimizer, away)
    assert processes.run(2, tasks.closed, *args) == [0, 0]


def test_an_engine_that_cannot_be_built_leaves_nothing(processes, models, tmp_path):
    spec = spec_of(models["llama", "lm"])
    args = (processes.name(), megatron((1, 1, 1), dtype="float16"), tmp_path / "nowhere", spec, OPTIMIZERS["adam"][0])
    assert processes.run(1, tasks.left_by_a_failed_build, *args) == [0]


@pytest.mark.parametrize(
    ("sizes", "what", "error"),
    [
        ((4, 1, 1), "stages", "ModelError: stage_layers=(1, 1, 1, 2) are 5 layers on 4 stages; actor has 4 layers"),
        ((1, 1, 1), "values", "ModelError: actor was asked for 'values'"),
        ((1, 1, 1), "train", "ConfigError: actor was built without an optimizer"),
        ((1, 1, 1), "prompt", "BatchError: row 0 has an empty prompt"),
        ((1, 2, 1), "vocabulary", "BatchError: row 1 has the token id 61 in response_ids, the model's vocabulary"),
        ((1, 3, 1), "values", "ModelError: actor has 8 heads, not divisible by t=3"),
    ],
)
def test_what_cannot_work_is_said(processes, models, sizes, what, error):
    strategy = megatron(sizes, stage_layers=(1, 1, 1, 2) if what == "stages" else None)
    args = (processes.name(), strategy, count(sizes), models["llama", "lm"], what)
    assert all(message.startswith(error) for message in processes.run(count(sizes), tasks.fails, *args))
    assert VOCABULARY % 2

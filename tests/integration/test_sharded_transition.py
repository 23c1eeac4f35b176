"""FSDP over four hosts to vLLM at every tp, measured on running engines: bytes, and memory that was really asked for.

What must be received is counted element by element from what torch says that a rank's shards are; what is in memory
comes from the ledger of the executor and, apart from it, from the allocator of the process.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.profiler import ProfilerActivity, profile

import hybridflow as hf
from hybridflow.models.spec import ModelSpec
from tests import tiny_models
from tests.tiny_models import make_prompts, make_rows

# eight layers, so that each is small against the whole
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8}
SPEC = ModelSpec.from_hf_config({"model_type": "llama", **tiny_models.SIZES, **SIZES})
ADAM = hf.Adam(lr=0.02, eps=1e-3)
GREEDY = hf.Sampling(max_tokens=6, greedy=True)
ALLOCATIONS: dict[str, Any] = {"activities": [ProfilerActivity.CPU], "profile_memory": True}
PROMPTS = make_prompts(8)
FLOAT32 = 4
SPEC_BYTES = FLOAT32 * SPEC.num_parameters
LAYER_BYTES = FLOAT32 * sum(math.prod(shape) for shape in SPEC.layer_tensors(0).values())
CASES: dict[str, tuple[hf.FSDP, hf.VLLM]] = {
    "tp-1": (hf.FSDP(), hf.VLLM(tp=1, kv_cache_gb=0.02, sampling=GREEDY)),
    "tp-2": (hf.FSDP(), hf.VLLM(tp=2, kv_cache_gb=0.02, sampling=GREEDY)),
    "tp-4": (hf.FSDP(), hf.VLLM(tp=4, kv_cache_gb=0.02, sampling=GREEDY)),
    "tp-2-bf16": (hf.FSDP(dtype="bfloat16"), hf.VLLM(tp=2, dtype="bfloat16", kv_cache_gb=0.02, sampling=GREEDY)),
}


@dataclass
class Seen:
    """What one rank saw of one transition; bytes, and elements of canonical tensors where a field says so."""

    received: dict[str, int]
    missing: dict[str, int]  # elements that it generates with and does not train, by canonical tensor
    sent: int
    wrong: list[str]  # generation tensors with other values than those that were trained
    changed: list[str]  # training tensors with other values after the way back
    training: int
    generation: int
    itemsize: int  # of generation weights, in which values travel
    resident: int  # of both, while generating
    peak: int  # of both at a time, says the ledger
    buffers: int  # of messages at a time
    allocated: int  # of both, of messages and of whatever else is made on the way, at a time, says the allocator


class MeasuredActor(hf.ActorWorker):
    """An actor that looks at its own transitions."""

    @hf.register(hf.ONE_TO_ALL)
    def transition(self) -> Seen:
        assert self.generation is not None
        engine, generator, hybrid, rank = self.engine, self.generation.engine, self.hybrid, self.context.rank
        parameters = engine._shards.parameters
        whole = {name: parameter.full_tensor().detach().clone() for name, parameter in parameters.items()}
        shards = {name: tensor.clone() for name, tensor in engine.storage().items()}
        with profile(**ALLOCATIONS):  # the profiler tells of memory that goes only if it saw it come
            hybrid.to_generation()
            hybrid.to_training()
        held = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in engine.storage().values()}
        seen, wake = profile(**ALLOCATIONS), generator.wake

        def stop_and_wake() -> None:  # what comes then is the KV cache, which is no weight
            seen.stop()
            wake()

        generator.wake = stop_and_wake
        gc.collect()
        seen.start()
        hybrid.to_generation()
        generator.wake = wake
        report, weights = hybrid.report, generator.storage()
        wrong, missing = unlike(generator, rank, whole), needed(generator, rank, parameters)
        hybrid.to_training()
        return Seen(
            received=dict(report.received),
            missing=missing,
            sent=report.sent_bytes,
            wrong=wrong,
            changed=[name for name, tensor in engine.storage().items() if not torch.equal(tensor, shards[name])],
            training=sum(tensor.nbytes for tensor in engine.storage().values()),
            generation=sum(tensor.numel() * tensor.itemsize for tensor in weights.values()),
            itemsize=next(iter(weights.values())).itemsize,
            resident=report.resident_bytes,
            peak=report.peak_bytes,
            buffers=report.buffer_bytes,
            allocated=most_allocated(seen, held),
        )


def needed(generator: Any, rank: int, parameters: dict[str, Any]) -> dict[str, int]:
    """Elements of each canonical tensor that a rank generates with and that are not in its shard."""
    masks: dict[str, Tensor] = {}
    for region in generator.layout().regions(rank):
        box = region.box
        mask = masks.setdefault(box.tensor, torch.zeros(parameters[box.tensor].shape, dtype=torch.bool))
        mask[tuple(map(slice, box.start, box.stop))] = True
    for name, mask in masks.items():
        parameter = parameters[name]
        size, start = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        mask[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] = False
    return {name: int(mask.sum()) for name, mask in masks.items() if mask.any()}


def unlike(generator: Any, rank: int, whole: dict[str, Tensor]) -> list[str]:
    """Generation tensors that have not the values of `whole` in all their elements."""
    storage, found = generator.storage(), []
    for name, regions in generator.layout().storages(rank).items():
        tensor, filled = storage[name], 0
        for region in regions:
            box = region.box
            right = whole[box.tensor][tuple(map(slice, box.start, box.stop))].to(tensor.dtype)
            filled += box.numel
            if not torch.equal(region.view(tensor), right):
                found.append(str(box))
        if filled != tensor.numel():
            found.append(f"{name}: {filled} of {tensor.numel()} elements")
    return found


def most_allocated(seen: Any, held: dict[int, int]) -> int:
    """The most bytes in memory at a time while `seen` looked, beginning with those `held` at some addresses."""
    events, changes, held = list(seen.profiler.kineto_results.experimental_event_tree()), [], dict(held)
    while events:
        event = events.pop()
        events += event.children
        if event.tag == _EventType.Allocation:
            changes.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    total = peak = sum(held.values())
    for _, address, size in sorted(changes, key=lambda change: change[0]):
        total -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            total += size
        peak = max(peak, total)
    return peak


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_policy(tmp_path_factory.mktemp("deep"), tokenizer=False, **SIZES)


@dataclass
class Observed:
    tp: int
    ranks: list[Seen]
    drawn: list[list[int]]  # greedily, with the checkpoint's weights


@pytest.fixture(scope="module", params=CASES)
def observed(request: pytest.FixtureRequest, pool: hf.ResourcePool, policy: Path) -> Observed:
    """An actor that generates, trains, and looks at its second transition."""
    train, generate = CASES[request.param]
    name = f"moves-{request.param}"
    actor = MeasuredActor.on(pool, name=name, model=policy, train=train, optim=ADAM, generate=generate)
    try:
        responses = actor.generate_sequences(hf.BatchRef.from_batch(PROMPTS)).get()["response_ids"]
        metrics = actor.update_actor(hf.BatchRef.from_batch(make_rows(8))).get()
        assert metrics["actor/skipped"] == 0.0
        return Observed(generate.tp, actor.transition().get(), [row.tolist() for row in responses.rows()])
    finally:
        actor.close()


@pytest.fixture(scope="module")
def expected(policy: Path) -> list[list[int]]:
    return tiny_models.greedy(policy, [row.tolist() for row in PROMPTS["prompt_ids"].rows()], 6)


def test_a_rank_receives_what_it_needs_and_does_not_hold(observed):
    """Of every tensor, and nothing else: bytes are the set-theoretic minimum."""
    for rank in observed.ranks:
        assert rank.received == {name: count * rank.itemsize for name, count in rank.missing.items()}
    received = [sum(rank.received.values()) for rank in observed.ranks]
    assert sum(rank.sent for rank in observed.ranks) == sum(received) > 0
    if observed.tp == 1:
        assert received == [rank.generation - rank.training for rank in observed.ranks]


def test_what_arrives_is_what_was_trained_and_stays_it(observed, expected):
    for rank in observed.ranks:
        assert rank.wrong == []
        assert rank.changed == []
        if rank.itemsize == FLOAT32:
            assert observed.drawn == expected


def test_no_rank_ever_has_the_whole_model_but_to_generate_with_it(observed):
    """At tp=1 a rank generates with all weights: beside them are at most its training shards of one layer, because
    shards go as the weights come. At tp > 1 it has its part of each, with all buffers fewer numbers than the model.
    Nothing is gathered beside these."""
    for rank in observed.ranks:
        assert rank.training == SPEC_BYTES / 4
        most = rank.generation + (LAYER_BYTES // 4 if observed.tp == 1 else rank.training)
        assert rank.generation <= rank.resident <= rank.peak <= most
        assert rank.peak <= rank.allocated <= most + rank.buffers
        if observed.tp == 1:
            assert rank.resident == rank.generation == SPEC_BYTES
        else:
            numbers = (rank.generation + rank.buffers) / rank.itemsize + rank.training / FLOAT32
            assert numbers < SPEC.num_parameters

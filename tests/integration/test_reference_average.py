"""A reference whose weights are a moving average of the actor's: in any layout and dtype, saved and moved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.errors import ConfigError, WorkerError
from tests import tiny_models
from tests.tiny_models import make_rows, response_log_probs

pytestmark = pytest.mark.usefixtures("no_parts")
Weights = dict[str, torch.Tensor]


def weights(group: hf.WorkerGroup, path: Path) -> Weights:
    return load_file(Path(group.save(path, dtype="float32")) / "model.safetensors")


def largest(one: Weights, other: Weights) -> float:
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def equal(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


@pytest.mark.parametrize(
    ("here", "there", "offload"),
    [
        (hf.Megatron(tp=2), hf.FSDP(), True),
        (hf.Megatron(tp=2, pp=2), hf.Megatron(tp=2), False),
        (hf.FSDP(), hf.Megatron(pp=2), False),
    ],
    ids=str,
)
def test_the_average_of_trained_weights_is_numpys(pool, place, policy, tmp_path, here, there, offload):
    actor = place(hf.ActorWorker, pool if here == hf.Megatron(tp=2, pp=2) else pool[0:2], model=policy, train=here,
                  optim=hf.Adam(lr=0.02))  # fmt: skip
    reference = place(hf.ReferenceWorker, pool[1:3], model=policy, train=there, offload=offload, ema_decay=0.7)
    expected = {name: tensor.double() for name, tensor in weights(reference, tmp_path / "0").items()}
    rows = make_rows(8)
    for step in range(1, 4):
        actor.update_actor(rows)
        hf.sync_weights(actor, reference)
        new = weights(actor, tmp_path / f"actor-{step}")
        expected = {name: 0.7 * tensor + 0.3 * new[name].double() for name, tensor in expected.items()}
        assert largest(expected, weights(reference, tmp_path / f"{step}")) < 1e-6
        assert largest(expected, {name: tensor.double() for name, tensor in new.items()}) > 1e-3
    found = reference.compute_ref_log_prob(rows).get()["ref_log_probs"]
    assert torch.allclose(found.values, response_log_probs(tmp_path / "3", rows).values, atol=1e-4)
    assert all(rank["memory/average"] >= 0 for rank in reference.memory())


def test_steps_below_the_rounding_of_a_16_bit_reference_add_up(pool, place, policy, tmp_path):
    """With decay 0.999 one step is below half a unit of bfloat16: rounded each time, the weights would stay."""
    other = tiny_models.make_policy(tmp_path / "other", seed=5)
    actor = place(hf.ActorWorker, pool[0:1], model=other, train=hf.FSDP())
    strategy = hf.ZeRO(stage=1, dtype="bfloat16")
    reference = place(hf.ReferenceWorker, pool[0:2], model=policy, train=strategy, ema_decay=0.999)
    start, target = weights(reference, tmp_path / "start"), load_file(other / "model.safetensors")
    for _ in range(60):
        hf.sync_weights(actor, reference)
    kept = 0.999**60
    target = {name: target[name].bfloat16().float() for name in start}
    expected = {name: kept * start[name] + (1 - kept) * target[name] for name in start}
    assert largest(expected, weights(reference, tmp_path / "end")) < 1e-6
    assert largest(expected, start) > 1e-2


def test_a_checkpoint_has_the_average(pool, place, policy, tmp_path):
    other = tiny_models.make_policy(tmp_path / "other", seed=5)
    actor = place(hf.ActorWorker, pool[0:1], model=other, train=hf.FSDP())
    bf16 = {"model": policy, "ema_decay": 0.99}
    first = place(hf.ReferenceWorker, pool[0:2], name="kept", train=hf.Megatron(tp=2, dtype="bfloat16"), **bf16)
    hf.sync_weights(actor, first)
    assert first.weights_source is None  # nothing could give it these weights again
    saved = hf.save(tmp_path / "saved", parts=[first])
    hf.sync_weights(actor, first)
    expected = weights(first, tmp_path / "expected")
    hf.load(saved, parts=[first])
    hf.sync_weights(actor, first)
    assert equal(expected, weights(first, tmp_path / "again"))
    first.close()
    other_layout = place(hf.ReferenceWorker, pool[2:4], name="kept", train=hf.ZeRO(stage=2, dtype="bfloat16"), **bf16)
    hf.load(saved, parts=[other_layout])
    hf.sync_weights(actor, other_layout)
    assert equal(expected, weights(other_layout, tmp_path / "elsewhere"))
    other_layout.close()
    plain = place(hf.ReferenceWorker, pool[0:1], name="kept", model=policy, train=hf.FSDP())
    hf.load(saved, parts=[plain])  # without ema_decay it has the average and keeps it
    assert 0 < largest(weights(plain, tmp_path / "plain"), expected) < 0.05


def test_the_average_moves_to_another_layout(pool, place, policy, tmp_path):
    other = tiny_models.make_policy(tmp_path / "other", seed=5)
    actor = place(hf.ActorWorker, pool[0:1], model=other, train=hf.FSDP())
    strategy = hf.Megatron(tp=2, dtype="bfloat16")
    reference = place(hf.ReferenceWorker, pool[0:2], model=policy, train=strategy, ema_decay=0.99, offload=True)
    for number, layout in enumerate((hf.FSDP(dtype="bfloat16"), hf.Megatron(pp=2, dtype="bfloat16"))):
        hf.sync_weights(actor, reference)
        before = weights(reference, tmp_path / f"before-{number}")
        hf.reallocate(reference, strategy=layout, pool=pool[2:4] if number else None)
        assert equal(before, weights(reference, tmp_path / f"after-{number}"))


def test_what_is_no_average_is_refused(pool, place, policy, tmp_path):
    for decay in (1.0, -0.1, "0.9", True):
        with pytest.raises(ConfigError, match=r"ReferenceWorker\(ema_decay=.*give a number in \[0, 1\)"):
            hf.ReferenceWorker.on(pool[0:1], model=policy, ema_decay=decay)
    with pytest.raises(ConfigError, match=r"no setting 'ema_decays'\. Did you mean 'ema_decay'"):
        hf.ReferenceWorker.on(pool[0:1], model=policy, ema_decays=0.9)
    plain = place(hf.ReferenceWorker, pool[0:1], name="kept", model=policy)
    saved = hf.save(tmp_path / "saved", parts=[plain])
    plain.close()
    reference = place(hf.ReferenceWorker, pool[0:1], name="kept", model=policy, ema_decay=0.9)
    with pytest.raises(WorkerError, match=r"keeps \['main'\] of its optimizer or average, the checkpoint has \[\]"):
        hf.load(saved, parts=[reference])

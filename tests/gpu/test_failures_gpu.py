"""What fails on CUDA devices: too little memory and lost hosts, in every phase of an iteration, on real hosts.

After it the run goes on: the same call succeeds, and computes what a run without the failure computes.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow import VLLM, Megatron
from hybridflow.errors import DeviceMemoryError, HostLostError, WaitTimeoutError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from tests.tiny_models import make_policy, make_prompts, make_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
GREEDY = hf.Sampling(max_tokens=6, greedy=True)
LEFT = 1 << 20  # bytes that the ballast leaves free, as one block for small tensors
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
Groups = dict[str, hf.WorkerGroup]
ROWS = 128
PHASES = ("generate", "update", "log_prob", "sync")


class Ballast:
    """Memory of another user of the device."""

    role = "ballast"
    held: Sequence[torch.Tensor] = ()

    @register(ONE_TO_ALL, blocking=True)
    def fill(self, leave: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        """Take the device's memory, and what the allocator has free within blocks: that depends on what ran before, and
        ranks would run out in different places, one of them while its peers wait in a collective."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if self.context.rank not in ranks:
            return
        self.held = held = [torch.empty(leave, dtype=torch.uint8, device=self.context.device)]
        for size in (1 << exponent for exponent in range(36, 8, -1)):
            with suppress(torch.OutOfMemoryError):
                while True:
                    held.append(torch.empty(size, dtype=torch.uint8, device=self.context.device))
        del held[0]

    @register(ONE_TO_ALL, blocking=True)
    def free(self) -> None:
        self.held = ()
        torch.cuda.empty_cache()


class Mortal(hf.ActorWorker):
    """The host of its rank 1 dies in the call that a file in the model's directory names, once."""

    def dies_in(self, call: str) -> None:
        mark = self.checkpoint / "dies"
        if self.context.rank == 1 and mark.exists() and mark.read_text() == call:
            mark.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def _step(self, last: bool) -> dict[str, float]:
        self.dies_in("update")
        return super()._step(last)

    def weights_storage(self) -> Any:
        self.dies_in("sync")
        return super().weights_storage()

    @property
    def rollout(self) -> Any:
        self.dies_in("generate")
        return super().rollout


@pytest.fixture(scope="module")
def pool() -> Iterator[hf.ResourcePool]:
    hf.init(peer_timeout=200.0, collective_timeout=30.0)
    yield hf.ResourcePool([2])
    hf.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_policy(tmp_path / "policy", **WIDE)


@pytest.fixture
def ballast(pool) -> Iterator[hf.WorkerGroup]:
    group = hf.place(Ballast, pool)
    yield group
    group.free()
    group.close()


@contextmanager
def placed(pool: hf.ResourcePool, model: Path, eager: bool = True) -> Iterator[Groups]:
    """An actor, and a reference that takes its weights and waits on the host."""
    generate = VLLM(memory_fraction=0.3, max_sequences=16 if eager else 2, sampling=GREEDY, eager=eager)
    settings = {"model": model, "train": Megatron(tp=2)}
    found = {
        "actor": Mortal.on(pool, generate=generate, optim=hf.Adam(lr=1e-3), name="actor", **settings),
        "reference": hf.ReferenceWorker.on(pool, offload=True, **settings),
    }
    try:
        run("generate", found)  # the first calls allocate what stays
        run("log_prob", found)
        yield found
    finally:
        for group in found.values():
            group.close()


@pytest.fixture
def groups(pool, model) -> Iterator[Groups]:
    with placed(pool, model) as found:
        yield found


@pytest.fixture(scope="module")
def undisturbed(pool, tmp_path_factory) -> dict[str, list[float]]:
    """The numbers of each call where none fails."""
    with placed(pool, make_policy(tmp_path_factory.mktemp("undisturbed") / "policy", **WIDE)) as found:
        return {phase: run(phase, found) for phase in PHASES}


def run(phase: str, groups: Groups) -> list[float]:
    """Numbers that the call of this phase gives."""
    actor, rows = groups["actor"], hf.BatchRef.from_batch(make_rows(ROWS))
    if phase == "generate":
        return actor.generate_sequences(make_prompts(8)).get()["response_ids"].values.tolist()
    if phase == "log_prob":
        return actor.compute_log_prob(rows).get()["old_log_probs"].values.tolist()
    if phase == "sync":
        hf.sync_weights(actor, groups["reference"]).get()
        return groups["reference"].compute_ref_log_prob(rows).get()["ref_log_probs"].values.tolist()
    found = actor.update_actor(rows).get()
    return [found["actor/loss"], found["actor/grad_norm"]]


@pytest.mark.parametrize("phase", PHASES)
def test_too_little_memory_is_named_and_the_run_goes_on(undisturbed, groups, ballast, phase):
    ballast.fill(LEFT)
    with pytest.raises(DeviceMemoryError, match=r"ran out of device memory.*In it: actor .*Change one of"):
        run(phase, groups)
    ballast.free()
    for each in PHASES:
        assert run(each, groups) == pytest.approx(undisturbed[each], rel=1e-2), each


def test_a_rank_that_lacks_memory_to_generate_lets_no_peer_wait(undisturbed, pool, model, ballast):
    with placed(pool, model, eager=False) as groups:  # its memory comes as a whole, before ranks wait for each other
        ballast.fill(LEFT, (1,))
        with pytest.raises(DeviceMemoryError, match=r"actor\.generate_sequences.* ran out of device memory"):
            run("generate", groups)
        ballast.free()
        for each in PHASES:
            assert run(each, groups) == pytest.approx(undisturbed[each], rel=1e-2), each


def test_a_rank_of_a_rollout_that_lacks_memory_lets_no_peer_wait(pool, ballast, model):
    generate = VLLM(tp=2, memory_fraction=0.3, max_sequences=16, sampling=GREEDY, eager=True)
    rollout = hf.RolloutWorker.on(pool, model=model, generate=generate, offload=True, name="rollout")
    try:
        before = rollout.generate_sequences(make_prompts(8)).get()["response_ids"].values
        ballast.fill(LEFT, (1,))
        with pytest.raises(DeviceMemoryError, match="ran out of device memory"):
            rollout.generate_sequences(make_prompts(8)).get()
        ballast.free()
        assert torch.equal(rollout.generate_sequences(make_prompts(8)).get()["response_ids"].values, before)
    finally:
        rollout.close()


def test_too_little_memory_to_build_a_group(pool, ballast, model):
    """And all of its bytes are free again."""
    ballast.fill(LEFT)
    with pytest.raises(DeviceMemoryError, match=r"large\.__init__ ran out of device memory"):
        hf.ActorWorker.on(pool, model=model, train=Megatron(), optim=hf.Adam(lr=1e-3), name="large")
    ballast.free()
    actor = hf.ActorWorker.on(pool, model=model, train=Megatron(), optim=hf.Adam(lr=1e-3), name="small")
    assert actor.update_actor(make_rows(8)).get()["actor/grad_norm"] > 0
    actor.close()


@pytest.mark.parametrize("phase", ["generate", "update", "sync"])
def test_a_host_that_dies_is_replaced(pool, model, tmp_path, phase):
    """NCCL's peers of a dead rank wait in their kernels; recovery does not wait for them."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcdefgh"))
    loader = hf.PromptLoader(prompts, batch_size=4, steps=3)
    generate = VLLM(memory_fraction=0.3, max_sequences=16, sampling=GREEDY, eager=True)
    settings = {"model": model, "train": Megatron(tp=2)}
    actor = Mortal.on(pool, generate=generate, optim=hf.Adam(lr=1e-3), name="actor", **settings)
    reference = hf.ReferenceWorker.on(pool, **settings)
    checkpoints = hf.Checkpoints(tmp_path / "checkpoints", every=1, resume="auto")
    lost = 0
    while True:
        try:
            for batch in checkpoints.resume(loader):
                if checkpoints.done == 1 and not lost:
                    (model / "dies").write_text(phase)
                found = actor.generate_sequences(batch)
                found |= actor.compute_log_prob(found)
                found = hf.BatchRef.from_batch(found.get().with_columns(rewards=torch.arange(4.0)))
                found |= hf.compute_advantage(found, "reinforce_plus_plus")
                actor.update_actor(found).get()
                hf.sync_weights(actor, reference).get()
                checkpoints.step()
            break
        except (HostLostError, WaitTimeoutError):
            lost += 1
    assert (lost, checkpoints.done) == (1, 3)
    for group in (actor, reference):
        group.close()

"""`hf.init(deterministic=True)` on CUDA devices: what it turns on, in which calls, and that results repeat exactly.

On emulated CUDA, Triton's interpreter runs vLLM's batch-invariant kernels, and operators for which torch's wheel has no
deterministic kernel raise as there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow import FSDP, VLLM, LoRA, Megatron, ZeRO
from hybridflow.errors import WorkerError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from tests.tiny_models import make_policy, make_prompts, make_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
STRATEGIES: dict[str, Any] = {
    "fsdp": FSDP(),
    "float32": FSDP(dtype="float32", recompute=True),
    "lora": FSDP(lora=LoRA(rank=2, targets=["q_proj", "v_proj"])),
    "zero-1": ZeRO(stage=1),
    "zero-3": ZeRO(stage=3),
    "megatron": Megatron(tp=2),
    "pipeline": Megatron(pp=2),
}
GREEDY = hf.Sampling(max_tokens=6, greedy=True, ignore_eos=True)
ADAM = hf.Adam(lr=1e-2)
NEAR = 0.05  # of log-probabilities in bfloat16


def stand_ins() -> bool:
    """Whether vLLM's kernels stand in for torch's in this process."""
    from vllm.model_executor.determinism import batch_invariant

    softmax = torch._C._dispatch_dump("aten::_softmax")
    assert (batch_invariant._batch_invariant_LIB is not None) == ("batch_invariant.py" in softmax), softmax
    return "batch_invariant.py" in softmax


def variable(name: str) -> str | None:
    """As C++ has it."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found = getenv(name.encode())
    return found and found.decode()


class Watched(hf.ActorWorker):
    """Notes by which kernels it samples and steps; prompts take several steps (Triton's interpreter is slow)."""

    def open_generation(self) -> None:
        from hybridflow.engines.vllm import core

        core._STEP_TOKENS = 32
        super().open_generation()
        from hybridflow.engines.vllm.sampler import PolicySampler

        real, self.seen = PolicySampler.sample, set[tuple[str, bool]]()

        def sample(sampler: Any, *args: Any, **more: Any) -> Any:
            self.seen.add(("sample", stand_ins()))
            return real(sampler, *args, **more)

        PolicySampler.sample = sample  # type: ignore[method-assign]

    def _step(self, last: bool) -> dict[str, float]:
        self.seen.add(("step", stand_ins()))
        return super()._step(last)

    @register(ONE_TO_ALL)
    def noted(self) -> list[tuple[str, bool]]:
        return sorted(self.seen)

    @register(ONE_TO_ALL)
    def process(self) -> dict[str, Any]:
        return {
            "torch": torch.are_deterministic_algorithms_enabled(),
            "filled": torch.utils.deterministic.fill_uninitialized_memory,
            "cublas": variable("CUBLAS_WORKSPACE_CONFIG"),
            "channels": variable("NCCL_MAX_NCHANNELS"),  # not one, as vLLM would have it
            "nccl": variable("NCCL_ALGO"),  # torch sets it
        }

    @register(ONE_TO_ALL)
    def histogram(self) -> torch.Tensor:
        return torch.histc(torch.rand(9, device=self.context.device), 3).cpu()


@pytest.fixture(scope="module")
def pool() -> Iterator[hf.ResourcePool]:
    hf.init(peer_timeout=200.0, collective_timeout=60.0, deterministic=True)
    yield hf.ResourcePool([2])
    hf.shutdown()


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("name", STRATEGIES)
def test_updates_repeat(pool, policy, name):
    """No operator of ours is without a deterministic kernel."""
    rows, found = hf.BatchRef.from_batch(make_rows(8)), []
    for _ in range(2):
        actor = hf.ActorWorker.on(pool, model=policy, train=STRATEGIES[name], optim=ADAM)
        metrics = [actor.update_actor(rows, minibatches=2).get() for _ in range(2)]
        found.append((metrics, actor.compute_log_prob(rows).get()["old_log_probs"].values.tolist()))
        actor.close()
    assert found[0] == found[1]
    assert found[0][0][0]["actor/grad_norm"] > 0


@pytest.mark.parametrize(("tp", "eager"), [(1, True), (2, True), (1, False)])
def test_a_response_is_the_same_whatever_is_beside(pool, policy, tp, eager):
    generate = VLLM(tp=tp, memory_fraction=0.3, max_sequences=16, sampling=GREEDY, eager=eager)
    actor = Watched.on(pool, model=policy, train=Megatron(tp=2), optim=ADAM, generate=generate)
    twin = hf.ActorWorker.on(pool, model=policy, train=Megatron(tp=2), optim=ADAM)
    try:
        prompts, rows = make_prompts(12), make_rows(8)
        for seed in (None, 5):
            draw = {"greedy": seed is None, "seed": seed}
            whole, few = (actor.generate_sequences(given, **draw).get() for given in (prompts, prompts[:2]))
            for name in ("response_ids", "log_probs"):
                assert whole[:2][name].values.tolist() == few[name].values.tolist(), name
            computed = actor.compute_log_prob(hf.BatchRef.from_batch(whole)).get()["old_log_probs"].values
            assert (computed - whole["log_probs"].values).abs().max() < NEAR
        for _ in range(2):  # also after it has generated, gradients are those of a group that never does
            learned = [group.update_actor(rows).get() for group in (actor, twin)]
            assert learned[0] == learned[1]
            actor.generate_sequences(prompts[:2]).get()
        assert actor.noted().get() == [[("sample", True), ("step", False)]] * 2
        modes = {"torch": True, "filled": False, "cublas": ":16:8", "channels": None, "nccl": "^NVLS"}
        assert actor.process().get() == [modes, modes]
        with pytest.raises(WorkerError, match="histc does not have a deterministic implementation"):
            actor.histogram().get()
    finally:
        actor.close()
        twin.close()

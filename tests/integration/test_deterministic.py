"""`hf.init(deterministic=True)` on the CPU: every host computes so, and a run is what it is without."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.tiny_models import make_policy

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import torch
import hybridflow as hf
from tests.tiny_models import make_prompts

class Shown(hf.ActorWorker):
    @hf.register(hf.ONE_TO_ALL)
    def modes(self):
        import torch  # by value, its module of settings cannot be sent

        return torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory

def main():
    numbers = []
    for deterministic in (True, False):
        hf.init(devices=2, deterministic=deterministic)
        generate = hf.VLLM(tp=2, kv_cache_gb=0.05, max_length=64, sampling=hf.Sampling(max_tokens=6, seed=3))
        settings = {"model": sys.argv[1], "train": hf.Megatron(tp=2), "optim": hf.Adam(lr=1e-2), "generate": generate}
        actor = Shown.on(hf.ResourcePool([2]), **settings)
        batch = actor.generate_sequences(make_prompts(4))
        batch |= actor.compute_log_prob(batch)
        found = batch.get()
        rewards = hf.BatchRef.from_batch(found.with_columns(rewards=torch.arange(4.0)))
        trained = actor.update_actor(hf.compute_advantage(rewards, "reinforce_plus_plus") | rewards).get()
        numbers.append((found["response_ids"].values.tolist(), trained["actor/grad_norm"]))
        print("modes:", actor.modes().get())
        hf.shutdown()
    print("equal:", numbers[0] == numbers[1])

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_every_host_is_deterministic(tmp_path, warm):
    (tmp_path / "driver.py").write_text(PROGRAM)
    program = [*warm.command, str(tmp_path / "driver.py"), str(make_policy(tmp_path / "policy"))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | warm.environment
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    assert done.stdout.splitlines() == [
        "modes: [(True, False), (True, False)]",
        "modes: [(False, True), (False, True)]",
        "equal: True",
    ]

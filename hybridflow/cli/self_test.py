"""The run of `hybridflow doctor`: GRPO on a tiny model for three iterations, as a program of its own."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config import VLLM, Adam, Megatron, Sampling
from hybridflow.driver import compute_advantage, init, reallocate, shutdown
from hybridflow.workers.actor import ActorWorker

_MOST = 0.1  # by which log-probabilities of vLLM and of training may differ


def main() -> str:
    """What was seen. Errors: SystemExit when training and generation disagree about the model."""
    devices, difference = min(2, torch.cuda.device_count() or 2), 0.0
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory(prefix="hybridflow-doctor-") as directory:
        model.save_pretrained(directory)
        init(address="local")
        actor = ActorWorker.on(
            ResourcePool([devices]),
            model=directory,
            train=Megatron(tp=devices),
            optim=Adam(lr=1e-3),
            generate=VLLM(tp=devices, sampling=Sampling(max_tokens=8, seed=1, ignore_eos=True), max_length=32),
        )
        prompts = Batch({"prompt_ids": Ragged.from_lengths(torch.arange(2, 34), [4] * 8)})
        for iteration in range(3):
            if iteration == 2:  # builds a second engine, for which the first must be gone
                reallocate(actor, generate=replace(actor.settings["generate"], max_length=40))
            batch = actor.generate_sequences(prompts, n=2)
            batch |= actor.compute_log_prob(batch)
            found = batch.get()
            drawn, computed = found["log_probs"].values, found["old_log_probs"].values
            difference = max(difference, float((drawn - computed).abs().max()))
            odd = [float(sum(token % 2 for token in row)) for row in found["response_ids"].tolist()]
            batch = BatchRef.from_batch(found.with_columns(rewards=torch.tensor(odd)))
            batch |= compute_advantage(batch, "grpo")
            actor.update_actor(batch).get()
        shutdown()
    if not difference < _MOST:
        raise SystemExit(f"log-probabilities of vLLM and of training differ by {difference:.3g}")
    where = f"{devices} device{'s' if devices > 1 else ''}"
    return f"three iterations of GRPO and two engines on {where}; log-probabilities agree to {difference:.1e}"


if __name__ == "__main__":
    sys.stdout.write(f"{main()}\n")

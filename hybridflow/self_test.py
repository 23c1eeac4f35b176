"""The run of `hybridflow doctor`: GRPO on a tiny model for two iterations, as a program of its own."""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.pool import ResourcePool
from hybridflow.config import VLLM, Adam, Megatron, Sampling
from hybridflow.driver import compute_advantage, init, shutdown
from hybridflow.workers.actor import ActorWorker

_MOST = 0.1  # by which log-probabilities of vLLM and of training may differ


def main() -> str:
    """What was seen. Errors: SystemExit when training and generation disagree about the model."""
    devices, difference = min(2, torch.cuda.device_count() or 2), 0.0
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
    with tempfile.TemporaryDirectory(prefix="hybridflow-doctor-") as directory:
        model.save_pretrained(directory)
        init(address="local")
        actor = ActorWorker.on(
            ResourcePool([devices]),
            model=directory,
            train=Megatron(tp=devices),
            optim=Adam(lr=1e-3),
            generate=VLLM(sampling=Sampling(max_tokens=8, seed=1, ignore_eos=True), max_length=32),
        )
        prompts = Batch({"prompt_ids": Ragged.from_lengths(torch.arange(2, 34), [4] * 8)})
        for _ in range(2):
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
    return f"two iterations of GRPO on {devices} devices; log-probabilities agree to {difference:.1e}"


if __name__ == "__main__":
    sys.stdout.write(f"{main()}\n")

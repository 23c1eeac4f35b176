"""Small Hugging Face models of every family, a ragged batch for them, and what transformers computes from it.

Shapes: B rows, R response tokens. All float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridflow.algorithms.losses.loss import Loss, Totals
from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.models.spec import ModelSpec

VOCABULARY = 61  # a prime: padded for every t > 1
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": 7},
    "qwen2-two-kv": {"model_type": "qwen2", "num_key_value_heads": 2},  # fewer kv-heads than t = 4
    "qwen3-one-kv": {"model_type": "qwen3", "num_key_value_heads": 1},
    "thirds": {
        "model_type": "llama",
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 96,
    },
}


def make_model(name: str, directory: Path, head: str = "lm") -> Path:
    """A random model of a family as a Hugging Face directory. Norms and biases are not the trivial ones."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "num_labels": 1,
        "pad_token_id": None,  # transformers would not train the padding token
    }
    config = AutoConfig.for_model(**(sizes | FAMILIES[name]))
    torch.manual_seed(len(name))
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for tensor, parameter in model.named_parameters():
            trivial = parameter.ndim == 1
            parameter.add_(torch.randn_like(parameter) * (0.2 if trivial else 0.05))
            assert parameter.dtype == torch.float32, tensor
    path = directory / f"{name}-{head}"
    model.save_pretrained(path)
    return path


def load_model(path: Path, head: str = "lm") -> nn.Module:
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    return auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def make_batch(rows: int = 7, seed: int = 0) -> Batch:
    """Rows of different length (one response is a single token, one is empty) with all columns of a PPO update."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(low: int, high: int) -> list[int]:
        return torch.randint(low, high, (rows,), generator=generator).tolist()

    prompt, response = lengths(1, 9), lengths(1, 14)
    response[:2] = [1, 0] if rows > 2 else response[:2]
    tokens = sum(response)

    def ids(counts: list[int]) -> Ragged:
        return Ragged.from_lengths(torch.randint(0, VOCABULARY, (sum(counts),), generator=generator), counts)

    def numbers(scale: float = 1.0, shift: float = 0.0) -> Ragged:
        return Ragged.from_lengths(torch.randn(tokens, generator=generator) * scale + shift, response)

    mask = Ragged.from_lengths(torch.rand(tokens, generator=generator) < 0.9, response)
    return Batch(
        {
            "prompt_ids": ids(prompt),
            "response_ids": ids(response),
            "response_mask": mask,
            "old_log_probs": numbers(0.2, -4.2),
            "advantages": numbers(),
            "values": numbers(0.1),
            "returns": numbers(),
            "row_id": torch.arange(rows),
        }
    )


def loss_of(head: str) -> Loss:
    return policy_loss("ppo", entropy_coef=0.1) if head == "lm" else value_loss("value")


def reference(model: nn.Module, head: str, batch: Batch, temperature: float = 1.0) -> dict[str, Ragged]:
    """What transformers gives for every output of the head, one row at a time, differentiable."""
    found: dict[str, list[Tensor]] = {}
    prompts, responses = batch.peek("prompt_ids"), batch.peek("response_ids")
    for prompt, response in zip(prompts.rows(), responses.rows(), strict=True):
        ids = torch.cat([prompt, response])
        at = slice(len(prompt) - 1, len(ids) - 1)
        if head == "value":
            hidden = model.model(ids[None]).last_hidden_state[0]
            found.setdefault("values", []).append(model.score(hidden)[at, 0])
            continue
        log_probs = (model(ids[None]).logits[0, at] / temperature).log_softmax(-1)
        found.setdefault("log_probs", []).append(log_probs.gather(-1, response[:, None])[:, 0])
        found.setdefault("entropy", []).append(-(log_probs.exp() * log_probs).sum(-1))
    return {name: Ragged.from_rows(rows) for name, rows in found.items()}


def reference_scores(model: nn.Module, batch: Batch) -> Tensor:
    """[B]: transformers' score of the last token of every row."""
    rows = zip(batch.peek("prompt_ids").rows(), batch.peek("response_ids").rows(), strict=True)
    hidden = [model.model(torch.cat(pair)[None]).last_hidden_state[0, -1] for pair in rows]
    return torch.stack([model.score(row)[0] for row in hidden])


def reference_token_scores(model: nn.Module, batch: Batch) -> Ragged:
    """[B, R]: the head of the transformers model at each response token."""
    rows = []
    for prompt, response in zip(batch.peek("prompt_ids").rows(), batch.peek("response_ids").rows(), strict=True):
        hidden = model.model(torch.cat([prompt, response])[None]).last_hidden_state[0]
        rows.append(model.score(hidden)[len(prompt) :, 0])
    return Ragged.from_rows(rows)


def totals_of(batch: Batch) -> Totals:
    every = len(batch.peek("prompt_ids").values) + len(batch.peek("response_ids").values)
    return Totals(float(batch.peek("response_mask").values.sum()), batch.rows, every)


class Oracle:
    """The same update in plain PyTorch on the transformers model."""

    def __init__(self, path: Path, head: str, make: Callable[..., torch.optim.Optimizer], clip: float) -> None:
        self.model, self.head, self.clip = load_model(path, head), head, clip
        self.optimizer = make(self.model.parameters())

    def update(self, batch: Batch) -> tuple[float, dict[str, Tensor], dict[str, float]]:
        """One update: the unclipped gradient norm, the gradients by canonical name, the metrics."""
        loss = loss_of(self.head)
        self.optimizer.zero_grad()
        scalar, metrics = loss(reference(self.model, self.head, batch), batch, totals_of(batch))
        scalar.backward()
        gradients = {name: p.grad.clone() for name, p in self.model.named_parameters()}
        norm = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients.values()]).double()))
        if norm > self.clip:
            for parameter in self.model.parameters():
                parameter.grad.mul_(self.clip / (norm + 1e-6))
        self.optimizer.step()
        return norm, gradients, {name: float(value) for name, value in metrics.items()}

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.model.named_parameters()}


def spec_of(path: Path, head: str = "lm") -> ModelSpec:
    return ModelSpec.from_checkpoint(path, head)  # type: ignore[arg-type]


def relative(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Norm of the difference of all tensors over the norm of the expected ones."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    return (difference / sum(float(t.double().square().sum()) for t in expected.values())) ** 0.5

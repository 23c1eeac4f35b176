"""Tiny Hugging Face checkpoints with fixed seeds, prompts for them, and what transformers computes from them.

Sizes divide by t = 4 and p = 2, and vLLM's CPU kernels take the head dimension. Float32 on the CPU.
Shapes: B rows, R response tokens.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow import Batch, Ragged
from recipes.small_model import EOS, PAD, SmallModel
from tests.example_templates import byte_tokenizer

TEXT = SmallModel(characters=string.ascii_letters + " ")
VOCABULARY, CONTEXT = len(TEXT.vocabulary), 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": TEXT.vocabulary[EOS],
    "pad_token_id": TEXT.vocabulary[PAD],
}


@contextmanager
def away(directory: str | Path) -> Iterator[None]:
    """The directory has another name within."""
    there = Path(directory).rename(f"{directory}.away")
    try:
        yield
    finally:
        there.rename(directory)


def make_policy(directory: Path, *, seed: int = 0, tokenizer: bool = True, **sizes: Any) -> Path:
    """A language model with random weights (and a character tokenizer) as a Hugging Face directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(SIZES | sizes))).float().save_pretrained(directory)
    if tokenizer:
        TEXT.tokenizer().save_pretrained(directory)
    return directory


def make_chat(directory: Path) -> Path:
    """A language model of bytes with a chat template, for conversations of 512 tokens."""
    tokenizer = byte_tokenizer("qwen3")
    sizes = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 512}
    make_policy(directory, tokenizer=False, **sizes)
    tokenizer.save_pretrained(directory)
    return directory


def make_classifier(directory: Path, *, seed: int = 1, **sizes: Any) -> Path:
    """A sequence-classification model with one label: a reward model, or a critic with a value head."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(seed)
    LlamaForSequenceClassification(LlamaConfig(num_labels=1, **(SIZES | sizes))).float().save_pretrained(directory)
    return directory


def make_prompts(rows: int = 7, *, seed: int = 0, first_row_id: int = 100) -> Batch:
    """Prompts of 2 to 9 tokens, and a column `answer` that only the driver knows."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 10, (rows,), generator=generator)
    ids = torch.randint(3, VOCABULARY, (int(lengths.sum()),), generator=generator)
    return Batch(
        {
            "row_id": torch.arange(first_row_id, first_row_id + rows),
            "prompt_ids": Ragged.from_lengths(ids, lengths),
            "answer": [f"answer {i}" for i in range(rows)],
        }
    )


def make_rows(rows: int = 7, *, seed: int = 0) -> Batch:
    """Prompts with responses of 1 to 12 tokens, their lengths, and random columns of a PPO update."""
    generator = torch.Generator().manual_seed(seed + 1)
    lengths = torch.randint(1, 13, (rows,), generator=generator)
    tokens = int(lengths.sum())

    def numbers(shift: float = 0.0) -> Ragged:
        return Ragged.from_lengths(torch.randn(tokens, generator=generator) + shift, lengths)

    prompts = make_prompts(rows, seed=seed)
    return prompts.with_columns(
        response_ids=Ragged.from_lengths(torch.randint(3, VOCABULARY, (tokens,), generator=generator), lengths),
        response_mask=Ragged.from_lengths(torch.ones(tokens, dtype=torch.bool), lengths),
        num_tokens=prompts["prompt_ids"].lengths + lengths,
        old_log_probs=numbers(-4.0),
        advantages=numbers(),
        values=numbers(),
        returns=numbers(),
    )


def cut_rows(rows: Batch) -> Batch:
    """The ragged columns of the rows as trajectories of one to three rows, each with the tokens before it as its
    prompt; last rows first."""
    columns: dict[str, list[Tensor]] = {name: [] for name in rows.columns if isinstance(rows[name], Ragged)}
    ids, keys = [], []
    for i in range(rows.rows):
        prompt, length = rows["prompt_ids"].row(i), len(rows["response_ids"].row(i))
        bounds = [0, *(length * k // (1 + i % 3) for k in range(1, 1 + i % 3)), length]
        for piece in reversed(range(len(bounds) - 1)):
            first, last = bounds[piece : piece + 2]
            for name in columns:
                before = torch.cat([prompt, rows["response_ids"].row(i)[:first]])
                columns[name].append(before if name == "prompt_ids" else rows[name].row(i)[first:last])
            ids.append(i + 5)
            keys.append(100 * i + piece)
    found = {name: Ragged.from_rows(values) for name, values in columns.items()}
    return Batch({**found, "trajectory_id": torch.tensor(ids), "row_id": torch.tensor(keys)})


def response_log_probs(checkpoint: Path, batch: Batch, temperature: float = 1.0) -> Ragged:
    """[B, R]: log-probabilities of the responses under a language model, row by row without padding."""
    from transformers import AutoModelForCausalLM

    model, rows = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), []
    for prompt, response in _rows(batch):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        rows.append((logits / temperature).log_softmax(-1).gather(1, response[:, None])[:, 0])
    return Ragged.from_rows(rows)


def response_values(checkpoint: Path, batch: Batch) -> Ragged:
    """[B, R]: the value head at the position before each response token."""
    model, rows = _classifier(checkpoint), []
    for prompt, response in _rows(batch):
        with torch.no_grad():
            hidden = model.model(torch.cat([prompt, response])[None]).last_hidden_state
            rows.append(model.score(hidden)[0, len(prompt) - 1 : -1, 0])
    return Ragged.from_rows(rows)


def scores(checkpoint: Path, batch: Batch) -> Tensor:
    """[B]: transformers' own score of all rows in one right-padded batch."""
    model = _classifier(checkpoint)
    whole = Ragged.from_rows([torch.cat(row) for row in _rows(batch)])
    present = whole.map(lambda ids: torch.ones_like(ids))
    with torch.no_grad():
        return model(whole.pad(TEXT.vocabulary[PAD]), attention_mask=present.pad()).logits[:, 0]


def greedy(checkpoint: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy responses by transformers, each ended after the end-of-sequence token."""
    from transformers import AutoModelForCausalLM

    model, responses = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens)
        responses.append(out[0, len(prompt) :].tolist())
    return responses


def _classifier(checkpoint: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32)


def _rows(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    return list(zip(batch["prompt_ids"].rows(), batch["response_ids"].rows(), strict=True))

"""The small task: sums as text, a character tokenizer, and a tiny Llama that knows them but answers badly.

`make(directory)` writes a Hugging Face checkpoint with its tokenizer, and two prompt files, once per set of settings.
The checkpoint learns for a few seconds from worksheets on which most answers are wrong: often by one, sometimes by
more. So it can add, and still prefers wrong answers, sampled or greedy: what reinforcement learning has to change.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

CHARACTERS = "0123456789+= "
PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
_VERSION = 1  # part of the cache key: raise it when what is written changes


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Sums of two whole numbers below `numbers`, the sizes of the model, and its supervised warm start.

    A share `right` of the worksheets' answers is right and a share `slip` one too large; the others miss by more.
    """

    numbers: int = 30
    held_out: int = 128
    right: float = 0.2
    slip: float = 0.75
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    steps: int = 400
    batch: int = 128
    lr: float = 3e-3
    seed: int = 0

    @property
    def key(self) -> str:
        settings = json.dumps([_VERSION, CHARACTERS, dataclasses.asdict(self)], sort_keys=True)
        return hashlib.sha256(settings.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class ArithmeticFiles:
    """Where everything is: a Hugging Face `model` directory, and JSONL files with `prompt` and `answer`."""

    model: Path
    train: Path
    held_out: Path


def exact_match(prompt: str, response: str, answer: str) -> float:
    """The reward: 1.0 when the response is the answer and nothing else, else 0.0."""
    return float(response.strip() == answer)


def make(directory: str | Path, task: Arithmetic | None = None) -> ArithmeticFiles:
    """The files of `task` under `directory`, written by the first call (about fifteen seconds) and found by later ones."""
    task = task or Arithmetic()
    home = Path(directory) / f"arithmetic-{task.key}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        # written aside and moved in one step: a run that is stopped half-way leaves nothing that looks complete
        aside = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}-"))
        try:
            _write(aside, task)
            os.rename(aside, home)
        except OSError:
            if not home.exists():  # else another process was faster; its files are the same
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return ArithmeticFiles(home / "model", home / "train.jsonl", home / "held_out.jsonl")


def problems(task: Arithmetic) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All sums in an order given by the seed: those to train on, and those held out of both kinds of training."""
    pairs = [(a, b) for a in range(task.numbers) for b in range(task.numbers)]
    random.Random(task.seed).shuffle(pairs)
    return pairs[task.held_out :], pairs[: task.held_out]


def tokenizer():
    """One token per character, plus padding, end and unknown; no beginning-of-sequence token."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left"
    )


def _write(home: Path, task: Arithmetic) -> None:
    train, held_out = problems(task)
    for name, pairs in (("train", train), ("held_out", held_out)):
        lines = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in pairs]
        (home / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    model = _warm_start(train, task)
    model.save_pretrained(home / "model")
    tokenizer().save_pretrained(home / "model")


def _warm_start(pairs: list[tuple[int, int]], task: Arithmetic):
    """Supervised steps on worksheets. Deterministic on one machine, and leaves the global generators alone."""
    rng = random.Random(task.seed + 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        model = _model(task)
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, betas=(0.9, 0.98), weight_decay=0.0)
        for step in range(task.steps):
            decay = 1.0 - step / task.steps
            for group in optimizer.param_groups:
                group["lr"] = task.lr * min((step + 1) / 40, decay)
            model(**_worksheet(rng.choices(pairs, k=task.batch), task, rng)).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def _model(task: Arithmetic):
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = tokenizer()
    config = LlamaConfig(
        vocab_size=len(ids),
        hidden_size=task.hidden,
        intermediate_size=2 * task.hidden,
        num_hidden_layers=task.layers,
        num_attention_heads=task.heads,
        num_key_value_heads=task.kv_heads,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=ids.eos_token_id,
        pad_token_id=ids.pad_token_id,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def _worksheet(pairs: list[tuple[int, int]], task: Arithmetic, rng: random.Random) -> dict[str, torch.Tensor]:
    """One supervised batch: `input_ids` and `labels` [batch, longest] int64; only the answers are labels."""
    code = {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    rows, labels = [], []
    for a, b in pairs:
        prompt = [code[c] for c in f"{a}+{b}="]
        answer = [code[c] for c in str(_written_answer(a + b, task, rng))] + [code[EOS]]
        rows.append(prompt + answer)
        labels.append([-100] * len(prompt) + answer)
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [code[PAD]] * (longest - len(row)) for row in rows]),
        "labels": torch.tensor([row + [-100] * (longest - len(row)) for row in labels]),
    }


def _written_answer(right: int, task: Arithmetic, rng: random.Random) -> int:
    dice = rng.random()
    if dice < task.right:
        return right
    if dice < task.right + task.slip:
        return right + 1
    return abs(right + rng.choice((-10, -3, -2, -1, 2, 3, 10)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", help="where to write the checkpoint and the prompt files")
    print(make(parser.parse_args().directory).model)

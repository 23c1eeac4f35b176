"""A tiny Llama or mixture of experts with a character tokenizer, trained in seconds from its settings and seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.cluster.startup import progress, stage

PAD, EOS, UNKNOWN = "<pad>", "</s>", "<unk>"
_NO_LABEL, _MIXTURE = -100, {"num_experts_per_tok": 2, "norm_topk_prob": True}
Worksheet = Callable[[random.Random], tuple[Sequence[str], Sequence[str]]]  # a prompt, its target: texts or tokens


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """Sizes (head_dim 32; with `experts` a Qwen3-MoE) and training: `batch` exercises a step, linear decay of `lr`."""

    characters: str = "0123456789+= "
    chat_template: str | None = None
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    experts: int = 0
    steps: int = 400
    batch: int = 128
    lr: float = 3e-3
    seed: int = 0

    @property
    def vocabulary(self) -> dict[str, int]:
        return {token: i for i, token in enumerate([PAD, EOS, UNKNOWN, *self.characters])}

    def tokenizer(self) -> Any:
        """One token per character, plus padding, end and unknown; no beginning-of-sequence token."""
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        raw = Tokenizer(models.WordLevel(self.vocabulary, unk_token=UNKNOWN))
        raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        raw.decoder = decoders.Fuse()
        own = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNKNOWN, "chat_template": self.chat_template}
        return PreTrainedTokenizerFast(tokenizer_object=raw, padding_side="left", **own)

    @stage("making the small model")
    def write(self, directory: Path, worksheet: Worksheet) -> None:
        """Train on worksheets and save model and tokenizer as a Hugging Face directory."""
        import torch

        rng, threads = random.Random(self.seed + 1), torch.get_num_threads()
        torch.set_num_threads(1)  # weights must not depend on the number of cores; more threads are not faster
        with torch.random.fork_rng(devices=[]):  # do not change the caller's generators
            torch.manual_seed(self.seed)
            model = self._model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr, betas=(0.9, 0.98), weight_decay=0.0)
            for step in range(self.steps):
                progress(lambda step=step: f"step {step} of {self.steps}")
                optimizer.param_groups[0]["lr"] = self.lr * min((step + 1) / 40, 1.0 - step / self.steps)
                model(**self._examples([worksheet(rng) for _ in range(self.batch)])).loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        torch.set_num_threads(threads)
        model.eval().save_pretrained(directory)
        self.tokenizer().save_pretrained(directory)

    def _model(self) -> Any:
        from transformers import AutoConfig, AutoModelForCausalLM

        ends = {"bos_token_id": None, "eos_token_id": self.vocabulary[EOS], "pad_token_id": self.vocabulary[PAD]}
        config = AutoConfig.for_model(
            "qwen3_moe" if self.experts else "llama",
            vocab_size=len(self.vocabulary),
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=32,
            max_position_embeddings=64,
            initializer_range=0.05,
            **ends,
            **({"num_experts": self.experts, **_MIXTURE, "moe_intermediate_size": self.hidden} if self.experts else {}),
        )
        return AutoModelForCausalLM.from_config(config)

    def _examples(self, pairs: Sequence[tuple[Sequence[str], Sequence[str]]]) -> dict[str, Any]:
        """`input_ids` and `labels`, int64 [batch, longest]; only answer tokens have labels."""
        import torch

        code, pad, ids, labels = self.vocabulary, torch.nn.utils.rnn.pad_sequence, [], []
        for prompt, answer in pairs:
            told = [*(code[c] for c in answer), code[EOS]]
            ids.append(torch.tensor([code[c] for c in prompt] + told))
            labels.append(torch.tensor([_NO_LABEL] * len(prompt) + told))
        return {"input_ids": pad(ids, True, code[PAD]), "labels": pad(labels, True, _NO_LABEL)}

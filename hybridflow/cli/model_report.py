"""`hybridflow doctor MODEL_DIR`: what the readers of a model directory understand, and what they refuse."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybridflow.cli.doctor import Finding
from hybridflow.config import VLLM
from hybridflow.data.tokenizer import end_token_ids, has_tokenizer, load_tokenizer
from hybridflow.engines.checkpoint.reader import INDEX, Checkpoint
from hybridflow.engines.vllm.requirements import check, check_config
from hybridflow.errors import HybridFlowError
from hybridflow.models.hf_spec import Decoder, check_reading, read_spec, text_config
from hybridflow.models.spec import ModelSpec, read_config

_READ = (
    *("config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
    "additional_chat_templates",
)
_TOKENS = 512  # of a row that generation is asked for: longer ones are a matter of settings


def examine_model(directory: Path) -> Iterator[Finding]:
    """All findings of a model directory, each as soon as it is known."""
    try:
        names = read_config(directory).get("architectures") or []
        classifies = any("SequenceClassification" in str(name) for name in names)
        spec = read_spec(directory, "value" if classifies else "lm")
        check_reading(directory, spec)
    except HybridFlowError as error:
        yield Finding("config", "refused", str(error))
        return
    yield from _of_config(spec)
    yield from _of_tokenizer(directory)
    yield from _of_weights(directory, spec)
    if spec.head == "lm":
        yield _of_generation(directory, spec)


def _of_config(spec: Decoder) -> Iterator[Finding]:
    from hybridflow.engines.vllm.requirements import layer_windows

    own, config = isinstance(spec, ModelSpec), text_config(spec)
    yield Finding("family", f"{spec.family}, of {'every backend' if own else 'FSDP and ZeRO'}, head {spec.head!r}")
    yield Finding("context", f"{spec.context} tokens")
    yield Finding("rope", str(getattr(config, "rope_parameters", None) or "none"))
    windows = layer_windows(spec)
    counts = [f"{n} layers {f'of {size} tokens' if size else 'without'}" for size, n in Counter(windows or ()).items()]
    window = f"sliding_window={getattr(config, 'sliding_window', None)}"
    yield Finding("windows", window if windows is None else ", ".join(counts))
    yield Finding("tie", "output layer is the embeddings" if spec.tied else "output layer of its own")


def _of_tokenizer(directory: Path) -> Iterator[Finding]:
    try:
        yield Finding("end ids", ", ".join(map(str, end_token_ids(directory))) or "none")
        raw: Any = load_tokenizer(directory).raw if has_tokenizer(directory) else None
    except HybridFlowError as error:
        yield Finding("tokenizer", "refused", str(error))
        return
    template = None if raw is None else raw.chat_template
    shown = f"{len(template)} characters" if isinstance(template, str) else ", ".join(template or ()) or "none"
    yield Finding("template", "no tokenizer" if raw is None else shown)
    opened = {*_READ, *(() if raw is None else map(str, raw.vocab_files_names.values()))}
    with suppress(HybridFlowError):  # the weights' own finding says why
        opened |= {entry.file.name for entry in Checkpoint(directory).entries.values()}
    names = {path.name for path in directory.iterdir() if not path.name.startswith(".")}
    yield Finding("unread files", ", ".join(sorted(names - opened)) or "none")


def _of_weights(directory: Path, spec: Decoder) -> Iterator[Finding]:
    checkpoint = Checkpoint(directory)
    try:
        checkpoint.check(spec)
    except HybridFlowError as error:
        yield Finding("weights", "refused", str(error))
        return
    sizes = Counter[str]()
    for entry in checkpoint.entries.values():
        sizes[entry.dtype] += math.prod(entry.shape)
    yield Finding("weights", ", ".join(f"{size:,} parameters in {dtype}" for dtype, size in sizes.most_common()))
    yield Finding("unused tensors", ", ".join(checkpoint.surplus(spec)) or "none")


def _of_generation(directory: Path, spec: Decoder) -> Finding:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        check_config(directory)
        check(spec, VLLM(max_length=min(_TOKENS, spec.context)), device)
    except HybridFlowError as error:
        return Finding("generation", "refused", str(error))
    return Finding("generation", f"vLLM takes it on {device}")

"""Tokens/s of training and of log-probabilities, with packed and with padded micro-batches of the same budget.

Row lengths are those of a file of questions and answers (`--prompts`; counted in words, digits and punctuation marks).
By default they are sampled log-normally with the means and deviations of GSM8K's first 2,000 training rows. Each
backend runs on one rank, on the CPU or a CUDA device, with random weights.

`packed` concatenates rows; `padded` takes rows in order, as many as fit the budget when padded to the longest of them;
`sorted` also pads, but groups rows of similar length (`packed=False`). The methods are interleaved in one run. Tokens
exclude padding and are per median second of wall time, or with `--clock cpu` of this process's CPU time, which other
programs disturb less. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybridflow as hf
from hybridflow.engines.micro_batches import Split
from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.engines.train_backends import build_engine
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

WORD = re.compile(r"\d|[^\W\d]+|[^\w\s]|\n")
QUESTION, ANSWER = (54.9, 20.9), (124.4, 54.6)  # mean and standard deviation of tokens in GSM8K
CORRELATION = 0.53
MODELS = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
}
SHARDED: dict[str, Callable[..., Any]] = {
    "fsdp": hf.FSDP,
    **{f"zero{stage}": partial(hf.ZeRO, stage=stage) for stage in (1, 2, 3)},
}
BACKENDS = ["megatron", "fsdp", "zero1", "zero2"]  # ZeRO-3 is FSDP
WAYS = ("packed", "padded", "sorted")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class InOrder(Split):
    """Padded micro-batches of rows in order."""

    def rows(self, lengths: Tensor, units: Sequence[Tensor] | None = None) -> list[Tensor]:
        assert units is None
        out: list[list[int]] = []
        longest = 0
        for row, length in enumerate(lengths.tolist()):
            longest = max(longest, self._padded(length))
            if not out or longest * (len(out[-1]) + 1) > self.budget:
                out.append([])
                longest = self._padded(length)
            out[-1].append(row)
        return [torch.tensor(rows) for rows in out]


def read_lengths(path: Path, rows: int) -> tuple[list[int], list[int]]:
    """Token counts of the questions and answers in the first `rows` lines."""
    lines = [json.loads(line) for line in path.read_text().splitlines()[:rows]]
    counts = [[len(WORD.findall(line[name])) for line in lines] for name in ("question", "answer")]
    return counts[0], counts[1]


def draw_lengths(rows: int, seed: int = 0) -> tuple[list[int], list[int]]:
    """Log-normal lengths of prompts and responses; long questions have long answers."""
    generator = torch.Generator().manual_seed(seed)
    shared, own = torch.randn(2, rows, generator=generator)
    normal = (shared, CORRELATION * shared + math.sqrt(1 - CORRELATION**2) * own)
    out = []
    for (mean, deviation), z in zip((QUESTION, ANSWER), normal, strict=True):
        variance = math.log(1 + (deviation / mean) ** 2)
        tokens = (math.log(mean) - variance / 2 + math.sqrt(variance) * z).exp()
        out.append(tokens.round().clamp(min=1).to(torch.int64).tolist())
    return out[0], out[1]


def make_batch(prompts: list[int], responses: list[int], vocab: int) -> hf.Batch:
    generator = torch.Generator().manual_seed(1)

    def ids(lengths: list[int]) -> hf.Ragged:
        return hf.Ragged.from_lengths(torch.randint(0, vocab, (sum(lengths),), generator=generator), lengths)

    return hf.Batch({"prompt_ids": ids(prompts), "response_ids": ids(responses)})


def make_engine(backend: str, context: RankContext, spec: ModelSpec, micro_tokens: int) -> Any:
    strategy = {"megatron": hf.Megatron, **SHARDED}[backend](micro_tokens=micro_tokens)
    return build_engine(context, strategy, spec, None, hf.SGD(lr=0.0))


def one_rank(name: str, device: torch.device, store: dist.Store) -> RankContext:
    return RankContext("actor", 0, RankGrid(), device, ProcessGroups(store, name, [0], 0, device, 60.0))


def loss(found: Any, rows: hf.Batch, totals: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return -found["log_probs"].values.sum() / totals.tokens, {}


def splits(split: Split) -> dict[str, Split]:
    settings = {"budget": split.budget, "multiple": split.multiple, "vocab": split.vocab, "packed": False}
    return {"packed": split, "padded": InOrder(**settings), "sorted": replace(split, packed=False)}


def measure(engine: Any, batch: hf.Batch, repeats: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Tokens/s of each method, and the positions that it computes per token."""
    device, ways = engine.device, splits(engine.tokens.split)
    work: dict[str, Callable[[], Any]] = {
        "train": lambda: engine.forward_backward(batch, loss, ("log_probs",)),
        "log_probs": lambda: engine.forward(batch, ("log_probs",)),
    }
    seconds: dict[tuple[str, str], list[float]] = {(kind, way): [] for kind in work for way in WAYS}
    for turn in range(repeats + 1):
        for way in WAYS:
            engine.tokens.split = ways[way]
            for kind, run in work.items():
                synchronise(device)
                start = clock()
                run()
                synchronise(device)
                if turn:  # the first one warms up
                    seconds[kind, way].append(clock() - start)
            engine.step()
    prompts, responses = batch["prompt_ids"], batch["response_ids"]
    tokens = len(prompts.values) + len(responses.values)
    out: dict[str, Any] = {}
    for way in WAYS:
        micro_batches = ways[way].micro_batches(prompts, responses)
        out[way] = {f"{kind}_tokens_per_second": round(tokens / statistics.median(seconds[kind, way])) for kind in work}
        out[way] |= {
            "micro_batches": len(micro_batches),
            "positions_per_token": round(sum(micro.ids.numel() for micro in micro_batches) / tokens, 3),
        }
    for kind in work:
        name = f"{kind}_tokens_per_second"
        out[f"{kind}_speedup"] = {way: round(out["packed"][name] / out[way][name], 2) for way in WAYS[1:]}
    return out


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path, help="JSON lines with question and answer")
    parser.add_argument("--rows", type=int, default=1024 if cuda else 128)
    parser.add_argument("--micro-tokens", type=int, default=32768 if cuda else 4096)
    parser.add_argument("--model", choices=MODELS, default="0.5B" if cuda else "tiny")
    parser.add_argument("--backends", nargs="+", choices=("megatron", *SHARDED), default=BACKENDS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    args = parser.parse_args()
    if cuda and args.clock == "cpu":
        parser.error("--clock cpu does not see what a CUDA device does.")
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world, timeout = dist.PrefixStore("world", store), datetime.timedelta(seconds=60)
    dist.init_process_group("nccl" if cuda else "gloo", store=world, rank=0, world_size=1, timeout=timeout)
    sizes = {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 512 if args.model == "tiny" else 151936}
    spec = ModelSpec.from_hf_config({**sizes, **MODELS[args.model]})
    lengths = read_lengths(args.prompts, args.rows) if args.prompts else draw_lengths(args.rows)
    batch = make_batch(*lengths, spec.vocab)
    rows = [prompt + response for prompt, response in zip(*lengths, strict=True)]
    result: dict[str, Any] = {
        "benchmark": "packing",
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "parameters": spec.num_parameters,
        "rows": len(rows),
        "tokens_per_row": {"mean": round(statistics.mean(rows), 1), "std": round(statistics.pstdev(rows), 1)},
        "longest_row": max(rows),
        "micro_tokens": args.micro_tokens,
        "clock": args.clock,
    }
    for backend in args.backends:
        engine = make_engine(backend, one_rank(backend, device, store), spec, args.micro_tokens)
        result[backend] = measure(engine, batch, args.repeats, CLOCKS[args.clock])
        engine.close()
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()

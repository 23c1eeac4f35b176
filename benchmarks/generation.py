"""Tokens per second of generation, and of Hugging Face's own loop in the same run, for two Llamas on the CPU.

128 prompts of 16 tokens, sampled at temperature 1 without stop tokens: `fixed` responses have 64 tokens; lengths of
`ragged` ones are lognormal quantiles with median 16 and maximum 256. Rows end at their own limit in both loops.

`ours`: the engine of RolloutWorker on two data parallel processes of one thread, each with half of the rows; the slower
one counts. It also records log-probabilities, which `generate` is not asked for. `transformers`: `model.generate` in
one process of two threads with all rows as one batch, which runs until the longest row has ended. Both take turns;
`ratio` is the median over turns. `shares` says where an engine's time goes with fixed lengths, measured in a turn of
its own: the model's forward pass, drawing, vLLM's scheduler and outputs, the rest of vLLM's step (mostly inputs), and
our loop. Float32, vLLM's CPU build, no Ray. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.config import VLLM, Sampling, Until

SMALL = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
LARGE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 8}
MODELS = {"0.6M": {**SMALL, "vocab_size": 64}, "4.5M": {**LARGE, "vocab_size": 256}}
ROWS, PROMPT, FIXED, MEDIAN, LONGEST = 128, 16, 64, 16, 256
PROCESSES = 2


def ragged_lengths(rows: int = ROWS) -> list[int]:
    """Quantiles of the lognormal distribution with this median, whose highest is LONGEST; in random order."""
    normal = statistics.NormalDist()
    scores = [normal.inv_cdf((i + 0.5) / rows) for i in range(rows)]
    width = math.log(LONGEST / MEDIAN) / scores[-1]
    lengths = [max(1, round(MEDIAN * math.exp(width * score))) for score in scores]
    return [lengths[i] for i in torch.randperm(rows, generator=torch.Generator().manual_seed(0)).tolist()]


def make_model(directory: Path, sizes: dict[str, int]) -> int:
    """The number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = sizes["num_attention_heads"] // 2
    special = {"pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}
    config = LlamaConfig(**sizes, num_key_value_heads=heads, max_position_embeddings=PROMPT + LONGEST, **special)
    model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    return model.num_parameters()


# Ours


def serve(pipe: Any, directory: Path) -> None:
    """A process with an engine: runs what comes through the pipe until None."""
    torch.set_num_threads(1)
    engine = build_engine(directory)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        prompts, limits, parts = asked
        pipe.send(measured_parts(engine, prompts, limits) if parts else generate(engine, prompts, limits))
    engine.close()


def build_engine(directory: Path) -> Any:
    import torch.distributed as dist
    from safetensors.torch import load_file

    from hybridflow.engines.process_groups import ProcessGroups, RankContext
    from hybridflow.engines.vllm.engine import VLLMEngine
    from hybridflow.models.spec import ModelSpec
    from hybridflow.topology import RankGrid

    store, device = dist.HashStore(), torch.device("cpu")
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    context = RankContext(
        "rollout", 0, RankGrid(1, 1, 1), device, ProcessGroups(store, "rollout", [0], 0, device, 60.0)
    )
    strategy = VLLM(max_length=PROMPT + LONGEST, kv_cache_gb=0.5, max_sequences=ROWS)
    grid, spec = context.grid.generation(1, 1), ModelSpec.from_checkpoint(directory)
    engine = VLLMEngine(context, strategy, grid, spec, directory)
    weights, storage = load_file(directory / "model.safetensors"), engine.storage()
    for region in engine.layout().regions(0):
        box = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
        region.view(storage[region.storage]).copy_(weights[region.box.tensor][box])
    engine.weights_changed()
    return engine


def generate(engine: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> int:
    """The number of tokens drawn."""
    rows = engine.new_rows(prompts, Sampling(max_tokens=LONGEST, ignore_eos=True, seed=1))
    for row, limit in zip(rows, limits, strict=True):
        row.sampling = replace(row.sampling, max_tokens=limit)
    engine.submit(rows)
    engine.advance(Until(rows=len(rows)))
    return sum(len(row.token_ids) for row in engine.take())


def measured_parts(engine: Any, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> dict[str, float]:
    """Seconds in each part of the engine."""
    from hybridflow.engines.vllm.core import model_runner

    core = engine._alive()
    runner, seconds = model_runner(core), defaultdict[str, float](float)
    parts = {
        "step": (core, "step_fn"),
        "forward": (runner, "_model_forward"),
        "logits": (runner.model, "compute_logits"),
        "drawing": (runner, "_sample"),
        "schedule": (core.scheduler, "schedule"),
        "outputs": (core.scheduler, "update_from_output"),
    }
    for part, (owner, name) in parts.items():
        setattr(owner, name, timed(getattr(owner, name), seconds, part))
    start = time.perf_counter()
    generate(engine, prompts, limits)
    total = time.perf_counter() - start
    for owner, name in parts.values():
        setattr(owner, name, getattr(owner, name).plain)
    found = {
        "forward": seconds["forward"] + seconds["logits"],
        "drawing": seconds["drawing"],
        "scheduler": seconds["schedule"] + seconds["outputs"],
    }
    return {**found, "inputs": seconds["step"] - sum(found.values()), "own": total - seconds["step"]}


def timed(function: Callable[..., Any], seconds: dict[str, float], part: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - start

    call.plain = function  # type: ignore[attr-defined]
    return call


class Engines:
    """The processes of one model, each with an engine."""

    def __init__(self, directory: Path) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"  # the children read it
        context, self.pipes = multiprocessing.get_context("spawn"), list[Any]()
        self.processes = []
        for _ in range(PROCESSES):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, directory), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:
            pipe.recv()

    def run(self, prompts: list[list[int]], limits: list[int], parts: bool = False) -> list[Any]:
        for i, pipe in enumerate(self.pipes):
            pipe.send((prompts[i::PROCESSES], limits[i::PROCESSES], parts))
        return [pipe.recv() for pipe in self.pipes]

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            pipe.send(None)
            process.join()


# Theirs


def hugging_face(directory: Path) -> Callable[[list[list[int]], list[int]], int]:
    """`model.generate` on all rows."""
    from transformers import LlamaForCausalLM
    from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

    class Limits(StoppingCriteria):
        """Ends each row at its own number of tokens, as a stop token would."""

        def __init__(self, limits: list[int]) -> None:
            self.ends = torch.tensor(limits) + PROMPT

        def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
            return input_ids.shape[1] >= self.ends

    model: Any = LlamaForCausalLM.from_pretrained(directory).float().eval()

    def run(prompts: list[list[int]], limits: list[int]) -> int:
        ids = torch.tensor(prompts)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=LONGEST,
            stopping_criteria=StoppingCriteriaList([Limits(limits)]),
        )
        assert out.shape[1] == PROMPT + max(limits)
        return sum(limits)

    return run


def measure(directory: Path, sizes: dict[str, int], repeats: int) -> dict[str, Any]:
    found: dict[str, Any] = {"parameters": make_model(directory, sizes)}
    engines, theirs = Engines(directory), hugging_face(directory)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, sizes["vocab_size"], (ROWS, PROMPT), generator=generator).tolist()
    for name, limits in (("fixed", [FIXED] * ROWS), ("ragged", ragged_lengths())):
        loops = {"ours": lambda at: sum(engines.run(prompts, at)), "transformers": lambda at: theirs(prompts, at)}
        seconds: dict[str, list[float]] = {loop: [] for loop in loops}
        for turn in range(repeats + 1):
            for loop, run in loops.items():
                start = time.perf_counter()
                assert run(limits) == sum(limits)
                if turn:  # the first warms it up
                    seconds[loop].append(time.perf_counter() - start)
        ratios = [b / a for a, b in zip(seconds["ours"], seconds["transformers"], strict=True)]
        rates = {f"{loop}_tokens_per_s": round(sum(limits) / statistics.median(of)) for loop, of in seconds.items()}
        found[name] = {"tokens": sum(limits), **rates, "ratio": round(statistics.median(ratios), 2)}
    slower = max(engines.run(prompts, [FIXED] * ROWS, parts=True), key=lambda parts: sum(parts.values()))
    found["shares"] = {part: round(value / sum(slower.values()), 3) for part, value in slower.items()}
    engines.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(PROCESSES)
    result: dict[str, Any] = {"benchmark": "generation"}
    for name in args.models:
        with tempfile.TemporaryDirectory() as directory:
            result[name] = measure(Path(directory), MODELS[name], args.repeats)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

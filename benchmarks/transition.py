"""Cost of a transition from training to generation: the three designs of the paper's table 2, and full tensors.

A Llama of 100 M parameters in bfloat16, trained at 1-4-1 and generating at 1-2-2-1, with Megatron-core and vLLM on four
Ray hosts. `full_tensors` is the method of other systems: every rank gathers each full parameter, converts it to Hugging
Face tensors and passes them to vLLM's `load_weights`. `messages` is hybridflow without reads from other ranks' memory.
The methods are interleaved in one run; seconds are the slowest rank's, medians over `--repeats`, and on CUDA those of
what the device does, too. `memcpy` copies the bytes received by the hybridflow design within the device (on the CPU
within host memory), into fresh and into touched pages. `overlap` is an Adam step and the move of all
weights, one after the other and as asynchronous weight transformation. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hybridflow as hf
from benchmarks.designs import WEAKER, WeakerTransition
from hybridflow.engine3d.hybrid_engine import HybridEngine
from hybridflow.engine3d.layout import Layout
from hybridflow.engines.contract import UNINITIALIZED
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16384,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}
WAYS = ("hybridflow", "messages", *WEAKER, "full_tensors")


class Regrouped:
    """A generation engine whose ranks are grouped by another rule: the same storages with other boxes."""

    def __init__(self, engine: Any, layout: Layout) -> None:
        self._engine, self._layout = engine, layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def layout(self) -> Layout:
        return self._layout


class Transitions:
    """One rank with all methods, from the same training weights into the same generation storage."""

    def __init__(self, *, model: str, optimizer: hf.Adam | None, designs: bool = True) -> None:
        from hybridflow.engines.train_backends import build_engine
        from hybridflow.engines.vllm import core
        from hybridflow.engines.vllm.engine import VLLMEngine
        from hybridflow.engines.vllm.layout import vllm_layout

        context, spec = self.context, ModelSpec.from_checkpoint(model)  # type: ignore[attr-defined]
        self.rank, self.grid, self.group = context.rank, context.grid, context.groups.everyone()
        strategy = hf.Megatron(tp=self.grid.t, pp=self.grid.p, dtype="bfloat16")
        self.train = build_engine(context, strategy, spec, UNINITIALIZED, optimizer)
        with torch.no_grad():
            for tensor in self.train.storage().values():
                tensor.normal_(0, 0.02)
        self.train.weights_loaded()
        generation = self.grid.generation()
        vllm = hf.VLLM(tp=generation.t, pp=generation.p, dtype="bfloat16", kv_cache_gb=0.05)
        self.loaders: dict[nn.Parameter, Any] = {}
        with patch.object(core, "lighten", partial(self._lighten, core.lighten)):
            self.generator = VLLMEngine(context, vllm, generation, spec, model)
        vanilla = vllm_layout(spec, self.grid.generation(rule="vanilla"))
        self.engines: dict[str, Any] = {"hybridflow": self._hybrid(overlap=optimizer is not None)}
        if optimizer is None and designs:
            with patch.dict(os.environ, {"HYBRIDFLOW_PEER_MEMORY": "0"}):
                self.engines["messages"] = self._hybrid()
            for name in WEAKER:
                self.generator.memory().acquire()
                regrouped = Regrouped(self.generator, vanilla)
                self.engines[name] = WeakerTransition(name, self.train, regrouped, self.group, self.rank)

    def _lighten(self, lighten: Callable[[nn.Module], None], model: nn.Module) -> None:
        """Keep the classes of vLLM's parameters, which have its loaders and which an engine does not need."""
        self.loaders = {parameter: type(parameter) for parameter in model.parameters()}
        lighten(model)

    def _hybrid(self, overlap: bool = False) -> HybridEngine:
        self.generator.memory().acquire()
        groups = self.context.groups  # type: ignore[attr-defined]
        overlap_group = groups.new("overlap", range(self.grid.size)) if overlap else None
        settings: dict[str, Any] = {"overlap": overlap, "overlap_group": overlap_group}
        return HybridEngine(self.train, self.generator, self.group, self.rank, **settings)

    def _clock(self) -> float:
        """Seconds, once the device has done all that it was given."""
        if (device := self.context.device).type == "cuda":  # type: ignore[attr-defined]
            torch.cuda.synchronize(device)
        return time.perf_counter()

    @hf.register(hf.ONE_TO_ALL)
    def transit(self, way: str) -> dict[str, float]:
        """Seconds and bytes of one transition; afterwards the weights are in the training layout again."""
        dist.barrier(self.group)
        self._clock()  # nothing of the method before
        if way == "full_tensors":
            return self._load_full_tensors()
        engine = self.engines[way]
        engine.trained()
        engine.to_generation()
        engine.to_training()
        report = engine.report
        return {
            "seconds": report.seconds,
            "back_seconds": report.back_seconds,
            "received_mb": report.received_bytes / 1e6,
            "resident_mb": report.resident_bytes / 1e6,
            "peak_mb": report.peak_bytes / 1e6,
        }

    def _load_full_tensors(self) -> dict[str, float]:
        self.generator.memory().acquire()
        received, plain = [0], {parameter: type(parameter) for parameter in self.loaders}
        for parameter, kind in self.loaders.items():
            parameter.__class__ = kind
        start = self._clock()
        with torch.no_grad():
            self.generator._runner().model.load_weights(self._full_tensors(received))  # vLLM's own loader
        seconds = self._clock() - start
        for parameter, kind in plain.items():
            parameter.__class__ = kind
        self.generator.memory().release()
        return {"seconds": seconds, "received_mb": received[0] / 1e6}

    def _full_tensors(self, received: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face tensors, one Megatron parameter at a time, gathered over the tensor parallel ranks."""
        layout, storage = self.train.layout(), self.train.storage()
        peers = [layout.storages(rank) for rank in range(self.grid.size)]
        for name, own in storage.items():
            gathered = [torch.empty_like(own) for _ in peers]
            dist.all_gather(gathered, own, group=self.group)
            received[0] += own.nbytes * (len(peers) - 1)
            full: dict[str, Tensor] = {}
            for regions, tensor in zip(peers, gathered, strict=True):
                for region in regions[name]:
                    box = region.box
                    whole = full.setdefault(box.tensor, own.new_empty(layout.tensors[box.tensor]))
                    whole[tuple(map(slice, box.start, box.stop))] = region.view(tensor)
            yield from full.items()

    @hf.register(hf.ONE_TO_ALL)
    def memcpy(self, megabytes: float) -> dict[str, float]:
        """Seconds to copy this number of bytes within this rank's device, into fresh and into touched pages."""
        device: torch.device = self.context.device  # type: ignore[attr-defined]
        source = torch.ones(int(megabytes * 1e6), dtype=torch.uint8, device=device)
        fresh = torch.UntypedStorage(source.nbytes, device=device)
        into = torch.empty(0, dtype=torch.uint8, device=device).set_(fresh).view_as(source)
        seconds = {}
        for pages in ("fresh", "touched"):
            dist.barrier(self.group)
            start = self._clock()
            into.copy_(source)
            seconds[pages] = self._clock() - start
        return seconds

    @hf.register(hf.ONE_TO_ALL)
    def step(self, overlapped: bool) -> dict[str, float]:
        """Seconds from the start of an Adam step until generation has the updated weights."""
        engine = self.engines["hybridflow"]
        self._add_gradients()
        dist.barrier(self.group)
        start = self._clock()
        if overlapped:
            engine.step()
        else:
            engine.trained()
            self.train.step()
        stepped = self._clock() - start
        engine.to_generation()
        seconds = self._clock() - start
        report = engine.report
        engine.to_training()
        moved, hidden = report.moved_seconds, report.hidden_seconds
        return {"seconds": seconds, "stepped": stepped, "moved": moved, "hidden": hidden}

    def _add_gradients(self) -> None:
        row = torch.arange(2, 18)
        ids = hf.Ragged.from_lengths(row.repeat(2), [16, 16])
        batch = hf.Batch({"prompt_ids": ids, "response_ids": ids})
        loss: Callable = lambda found, rows, totals: (-found["log_probs"].values.mean(), {})  # noqa: E731
        self.train.forward_backward(batch, loss, ("log_probs",))

    def close(self) -> None:
        self.generator.close()


def slowest(ranks: list[Mapping[str, float]]) -> dict[str, float]:
    """The maximum over ranks."""
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(one[name] for one in rounds), 5) for name in rounds[0]}


def measure_ways(pool: hf.ResourcePool, model: str, repeats: int) -> dict[str, Any]:
    grid = RankGrid(t=4, p_g=1, t_g=2)
    group = hf.place(Transitions, pool, name="transitions", grid=grid, model=model, optimizer=None)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    copies = []
    for turn in range(repeats + 2):
        for way in WAYS:
            figures = slowest(group.transit(way).get())
            if turn >= 2:  # the first ones touch memory for the first time
                found[way].append(figures)
        copies.append(slowest(group.memcpy(found["hybridflow"][-1]["received_mb"] if turn >= 2 else 1.0).get()))
    out: dict[str, Any] = {way: medians(rounds) for way, rounds in found.items()}
    ours, copied = out["hybridflow"]["seconds"], medians(copies[2:])
    out["memcpy_seconds"] = copied
    out["seconds_per_memcpy"] = {pages: round(ours / seconds, 2) for pages, seconds in copied.items()}
    out["speedup_over"] = {way: round(out[way]["seconds"] / ours, 2) for way in WAYS[1:]}
    group.close()
    return out


def measure_overlap(pool: hf.ResourcePool, model: str, repeats: int) -> dict[str, Any]:
    grid = RankGrid(t=4, p_g=1, t_g=2)
    group = hf.place(Transitions, pool, name="steps", grid=grid, model=model, optimizer=hf.Adam(lr=1e-5))
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for turn in range(repeats + 1):
        for overlapped in (False, True):
            figures = slowest(group.step(overlapped).get())
            if turn:
                found[overlapped].append(figures)
    one_by_one, overlapped = medians(found[False]), medians(found[True])
    group.close()
    return {
        "one_after_the_other_seconds": one_by_one["seconds"],
        "step_alone_seconds": one_by_one["stepped"],
        "overlapped_seconds": overlapped["seconds"],
        "moved_seconds": overlapped["moved"],
        "hidden_fraction": round(overlapped["hidden"] / overlapped["moved"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(CONFIG))
        pool = hf.ResourcePool([4])
        result: dict[str, Any] = {
            "benchmark": "transition",
            "layouts": "1-4-1 -> 1-2-2-1",
            "parameters": ModelSpec.from_hf_config(CONFIG).num_parameters,
            **measure_ways(pool, directory, args.repeats),
            "overlap": measure_overlap(pool, directory, args.repeats),
        }
    hf.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()

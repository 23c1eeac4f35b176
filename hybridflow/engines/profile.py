"""EngineProbe: times real engines of a model with few layers on one rank, at several amounts of work.

From two numbers of layers the caller derives the time per layer and the rest. Methods are collective over the ranks of
the context's grid. Shapes: B rows, R response tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from hybridflow.algorithms.registry import policy_loss, value_loss
from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.config import VLLM, Adam, Megatron, Sampling
from hybridflow.engines.contract import Output
from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.engines.train_backends import build_engine
from hybridflow.models.hf_spec import Decoder
from hybridflow.models.spec import Head, ModelSpec
from hybridflow.topology import RankGrid

Points = list[tuple[float, float]]
"""(tokens, rows, or elements on this rank; seconds)."""
BIG = 1 << 22  # bytes of the message that bandwidth is read from
_SMALLEST_VOCABULARY = 2


@dataclass(frozen=True)
class EngineProbe:
    """Measures the model of `config` (a Hugging Face one) on the rank of `context`.

    Rows have `length` tokens, the second half of them a response; every figure is the median of `repeats`.
    """

    context: RankContext
    config: Mapping[str, Any]
    length: int
    repeats: int = 5

    def passes(self, models: Sequence[tuple[int, Head]], tokens: Sequence[int]) -> list[dict[str, Points]]:
        """Of each model, given as (layers, head): by tokens "forward" and "both" (that and backward), by elements on
        this rank "update" (an optimizer step), and of passes and updates "busy" and "busy update", see `_share`.
        Models take turns: what disturbs one of them disturbs all."""
        grid = self.context.grid
        strategy = Megatron(tp=grid.t, dp=grid.d, micro_tokens=max(tokens), sequence_parallel=grid.t > 1)
        kinds = ("forward", "both", "update", "busy", "busy update")
        found: list[dict[str, Points]] = [{kind: [] for kind in kinds} for _ in models]
        with ExitStack() as undo:
            engines = []
            for layers, head in models:
                engine = build_engine(self.context, strategy, self._spec(layers, head), None, Adam(lr=1e-6))
                undo.callback(engine.close)
                lm = head == "lm"
                engines.append((engine, (policy_loss if lm else value_loss)(), ("log_probs",) if lm else ("values",)))
            for count in tokens:
                rows = self._rows(engines[0][0].spec, count)
                rounds = []
                for _ in range(1 + self.repeats):
                    rounds.append([self._turn(engine, loss, outputs, rows) for engine, loss, outputs in engines])
                for own, (engine, *_), of_one in zip(found, engines, zip(*rounds[1:]), strict=True):  # once warm
                    forward, both, step, busy, busy_step = map(statistics.median, zip(*of_one, strict=True))
                    own["forward"].append((count, forward))
                    own["both"].append((count, both))
                    own["busy"].append((count, busy))
                    if count == min(tokens):
                        elements = sum(tensor.numel() for tensor in engine.storage().values())
                        own["update"].append((elements, step))
                        own["busy update"].append((elements, busy_step))
        return found

    def _turn(self, engine: Any, loss: Any, outputs: tuple[Output, ...], rows: Batch) -> tuple[float, ...]:
        """Seconds of a forward pass, of both passes, of the optimizer step; shares of the passes and of the step."""
        share = self._share()
        forward = self._clocked(lambda: engine.forward(rows, outputs))
        both = self._clocked(lambda: engine.forward_backward(rows, loss, outputs))
        passes, share = share(), self._share()
        return forward, both, self._clocked(engine.step), passes, share()

    def busy(self, tokens: int, seconds: float, sizes: Sequence[int]) -> list[float]:
        """Median seconds of a forward pass of one layer on this rank while the first n ranks make such passes, each for
        itself, for each n in `sizes` of which it is one. Sizes take turns, `seconds` each time."""
        everyone, rank, spec = self.context.groups, self.context.rank, self._spec(1, "lm")
        own = (everyone.store, f"{everyone.name}/busy-{rank}", [everyone.ranks[rank]], 0)
        groups = ProcessGroups(*own, everyone.device, everyone.timeout)
        alone = replace(self.context, rank=0, grid=RankGrid(), groups=groups)
        took: list[list[float]] = [[] for _ in sizes]
        with ExitStack() as undo:
            undo.callback(groups.close)
            engine = build_engine(alone, Megatron(micro_tokens=tokens), spec, None)
            undo.callback(engine.close)
            rows = self._rows(spec, tokens)
            engine.forward(rows, ("log_probs",))
            for _ in range(self.repeats):
                for count, found in zip(sizes, took, strict=True):
                    self._together()
                    end = time.perf_counter() + seconds
                    while rank < count and time.perf_counter() < end:
                        found.append(self._clocked(lambda: engine.forward(rows, ("log_probs",))))
            self._together()
        return [statistics.median(found) for found in took if found]

    def decode(self, layers: int, rows: Sequence[int], prompt: int, steps: int) -> dict[str, Points]:
        """ "decode": seconds of a step of one generation replica over all ranks, by its rows, after prompts of `prompt`
        tokens; "busy", see `_share`."""
        from hybridflow.engines.vllm.engine import VLLMEngine

        grid, spec = self.context.grid, self._spec(layers, "lm")
        strategy = VLLM(
            tp=grid.t, max_length=prompt + steps + 1, sampling=Sampling(max_tokens=1, ignore_eos=True, seed=1)
        )
        one, several = strategy.sampling, replace(strategy.sampling, max_tokens=1 + steps)
        found: Points = []
        busy: Points = []
        with TemporaryDirectory() as directory, ExitStack() as undo:
            (Path(directory) / "config.json").write_text(json.dumps(self.few(layers)))
            engine = VLLMEngine(self.context, strategy, grid.generation(), spec, directory)
            undo.callback(engine.close)
            for tensor in engine.storage().values():
                tensor.normal_(0.0, 0.02)
            for count in rows:
                ids = torch.randint(1, spec.vocab, (count, prompt), generator=_seeded()).tolist()

                def drawn(sampling: Any, ids: list[list[int]] = ids) -> Callable[[], object]:
                    return lambda: engine.generate(ids, sampling, range(len(ids)))

                # what is left of the prompts in the cache would make the second one faster
                forget = engine.weights_changed
                share = self._share()
                took = self._median(drawn(several), forget) - self._median(drawn(one), forget)
                busy.append((count, share()))
                found.append((count, max(took, 0.0) / steps))
        return {"decode": found, "busy": busy}

    def link(self) -> tuple[float, float]:
        """Seconds of an all-reduce of one number over all ranks, and of one of `BIG` bytes."""
        return self._messages(self.context.groups)

    def pairs(self) -> tuple[float, float]:
        """`link` of each rank of the first half with that of the second half, all pairs at once."""
        everyone, half = self.context.groups, self.context.grid.size // 2
        number, own = divmod(self.context.rank, half)
        ranks = [everyone.ranks[own], everyone.ranks[own + half]]
        at = (everyone.store, f"{everyone.name}/pair-{own}", ranks, number)
        groups = ProcessGroups(*at, everyone.device, everyone.timeout)
        try:
            return self._messages(groups)
        finally:
            groups.close()

    def _messages(self, groups: ProcessGroups) -> tuple[float, float]:
        group = groups.everyone()
        small, big = (torch.zeros(size, device=self.context.device) for size in (1, BIG // 4))
        return tuple(self._median(lambda x=x: dist.all_reduce(x, group=group)) for x in (small, big))  # type: ignore[return-value]

    def host(self) -> float:
        """Bytes per second from host memory, pinned where the device is another, into the device's."""
        there, device = torch.empty(BIG, dtype=torch.uint8), self.context.device
        there, here = there.pin_memory() if device.type == "cuda" else there, torch.empty_like(there, device=device)
        return BIG / self._median(lambda: here.copy_(there, non_blocking=True))

    def _median(self, run: Callable[[], object], after: Callable[[], object] | None = None) -> float:
        """Median seconds of `run`, once warm; `after` follows each time, and is not counted."""
        took = []
        for _ in range(1 + self.repeats):
            took.append(self._clocked(run))
            if after is not None:
                after()
        return statistics.median(took[1:])

    def _share(self) -> Callable[[], float]:
        """Asked later: the share of the time since now in which this process worked, and did not wait for its peers, of
        what its part of the cores allows. What works on an accelerator has it for itself: 1."""
        if self.context.device.type == "cuda":
            return lambda: 1.0
        own = min(1.0, len(os.sched_getaffinity(0)) / self.context.grid.size)
        wall, ran = time.perf_counter(), time.process_time()
        return lambda: min(1.0, (time.process_time() - ran) / (time.perf_counter() - wall) / own)

    def _clocked(self, run: Callable[[], object]) -> float:
        self._finished()
        start = time.perf_counter()
        run()
        self._finished()
        return time.perf_counter() - start

    def _finished(self) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)

    def _together(self) -> None:
        if self.context.grid.size > 1:
            dist.barrier(group=self.context.groups.everyone())

    def few(self, layers: int) -> dict[str, Any]:
        """The model's configuration with `layers` layers, which may be more than it has: all are as its own ones, since
        a ModelSpec's layers are alike."""
        few = {**self.config, "num_hidden_layers": layers}
        if kinds := few.get("layer_types"):
            few["layer_types"] = [kinds[i % len(kinds)] for i in range(layers)]
        if few.get("use_sliding_window"):  # Qwen's: the layers from this one on have the window
            windowed = ModelSpec.from_hf_config(self.config).sliding_window is not None
            few["max_window_layers"] = 0 if windowed else layers
        return few

    def _spec(self, layers: int, head: Head) -> ModelSpec:
        return ModelSpec.from_hf_config(self.few(layers), head)

    def _rows(self, spec: ModelSpec, tokens: int) -> Batch:
        """Rows of `length` tokens, `tokens` in all (a last one may be shorter), with the columns that losses read."""
        lengths = [self.length] * (tokens // self.length)
        if rest := tokens - sum(lengths):
            lengths.append(rest)
        answers = [max(1, n // 2) for n in lengths]
        prompts = [max(1, n - answer) for n, answer in zip(lengths, answers, strict=True)]
        return example_rows(prompts, answers, spec)


def example_rows(prompts: Sequence[int], answers: Sequence[int], spec: Decoder) -> Batch:
    """Rows of text of these lengths in tokens, with the columns that losses read."""
    text = torch.arange(1, max(spec.vocab, _SMALLEST_VOCABULARY))
    if spec.images:
        text = text[~torch.isin(text, torch.tensor(spec.images.special))]
    ids = text[torch.randint(len(text), (sum(prompts) + sum(answers),), generator=_seeded())]
    token = Ragged.from_lengths(torch.zeros(sum(answers)), answers)
    return Batch(
        {
            "prompt_ids": Ragged.from_lengths(ids[: sum(prompts)], prompts),
            "response_ids": Ragged.from_lengths(ids[sum(prompts) :], answers),
            "response_mask": Ragged.from_lengths(torch.ones(sum(answers), dtype=torch.bool), answers),
            **dict.fromkeys(("old_log_probs", "advantages", "values", "returns"), token),
        }
    )


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)

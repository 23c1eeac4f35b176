"""Loops with long-tailed responses on real host processes, and the speeds that predict them; see benchmarks.streams."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import hybridflow as hf
from hybridflow.cluster.future import Future
from hybridflow.config import Until
from hybridflow.engines.contract import Row, derived_seed
from hybridflow.planner import DecodingSpeed, ResponseLengths
from hybridflow.streams.stream import ResponseStream
from recipes.small_model import EOS, PAD, SmallModel

TEXT = SmallModel(characters="abcdefghijklmnopqrstuvwxyz ")
PROMPT = 16  # tokens
TRAINERS = REPLICAS = 2  # processes
SIZES: dict[str, Any] = {
    "vocab_size": len(TEXT.vocabulary),
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": TEXT.vocabulary[EOS],
    "pad_token_id": TEXT.vocabulary[PAD],
}
SEED = 1
_FIRST_ROW = 1 << 40  # no loader has row ids like this


def make_policy(directory: Path, context: int, hidden: int = 128) -> str:
    """A Llama of 0.6 M random parameters with a character tokenizer; more parameters with more `hidden` units."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            **SIZES | {"max_position_embeddings": context, "hidden_size": hidden, "intermediate_size": 2 * hidden}
        )
    ).save_pretrained(directory)
    TEXT.tokenizer().save_pretrained(directory)
    return str(directory)


def draw_lengths(engine: Any, lengths: ResponseLengths) -> None:
    """Responses have lengths drawn from `lengths` by the seeds of their rows, so a row has the same length in any loop.

    The length is the row's own `max_tokens`: vLLM ends the request there, and does not schedule by it.
    """
    new_rows = engine.new_rows

    def rows_with_lengths(*args: Any, **options: Any) -> list[Row]:
        rows = new_rows(*args, **options)
        for row in rows:
            row.sampling = replace(row.sampling, max_tokens=lengths.draw(random.Random(row.seed)))
        return rows

    engine.new_rows = rows_with_lengths


class LongTailedRollout(hf.RolloutWorker):
    """Its responses have drawn `lengths`."""

    def __init__(self, *, model: str, generate: hf.VLLM, lengths: ResponseLengths) -> None:
        super().__init__(model=model, generate=generate)
        draw_lengths(self.engine, lengths)

    @hf.register(hf.ONE_TO_ALL)
    def decoding_seconds(self, rows: int, context: int, steps: int) -> tuple[float, float]:
        """Seconds per token of `rows` prompts of `context` tokens, and per decoding step of these rows."""
        with self.generating() as generation:
            engine, drawn = generation.engine, random.Random(rows)
            sampling = hf.Sampling(max_tokens=steps + 2, ignore_eos=True)
            for number in range(rows):
                ids = [drawn.randrange(3, len(TEXT.vocabulary)) for _ in range(context)]
                engine.submit([Row(_FIRST_ROW + number, 0, ids, sampling, seed=number)])
            moments = [time.perf_counter()]
            for count in (1, steps):
                engine.advance(Until(steps=count))
                moments.append(time.perf_counter())
            engine.withdraw()
        step = (moments[2] - moments[1]) / steps
        return max(0.0, moments[1] - moments[0] - step) / (rows * context), step


@dataclass(frozen=True, kw_only=True)
class LoopRun:
    """A loop that ran. `staleness` of each row, by its oldest token."""

    rows_per_second: float
    trainer_busy: float
    recomputed: float  # tokens computed again, per token that was sampled
    staleness: Sequence[int]


class Job:
    """An actor on two hosts, and a rollout of two replicas on two others."""

    def __init__(self, policy: str, lengths: ResponseLengths, rows: int, n: int, call_seconds: float) -> None:
        self.policy, self.rows, self.n, self.call_seconds, self.tail = policy, rows, n, call_seconds, lengths
        self.pool, longest = hf.ResourcePool([TRAINERS + REPLICAS]), round(lengths.median * lengths.ratio)
        sampling = hf.Sampling(max_tokens=longest, ignore_eos=True, seed=SEED)
        generate = hf.VLLM(max_length=PROMPT + longest, max_sequences=512, sampling=sampling)
        train = {"train": hf.Megatron(), "optim": hf.Adam(lr=1e-6)}
        self.actor = hf.ActorWorker.on(self.pool[:TRAINERS], model=policy, **train)
        self.rollout = LongTailedRollout.on(self.pool[TRAINERS:], model=policy, generate=generate, lengths=lengths)

    def lengths(self, rows: int) -> list[int]:
        """Of the first `rows` rows of a loader; a run compares its rows with them."""
        seeds = [derived_seed(SEED * 1_000_003 + row // self.n, row % self.n) for row in range(rows)]
        return [self.tail.draw(random.Random(seed)) for seed in seeds]

    def stream(self, bound: int, whole_batches: bool, batches: int) -> ResponseStream:
        """The same prompts each time, with the same row ids, so the same lengths."""
        drawn = random.Random(0)
        prompts = [{"prompt": "".join(drawn.choices(TEXT.characters[:26], k=PROMPT))} for _ in range(256)]
        loader = hf.PromptLoader(prompts, batch_size=self.rows // self.n, steps=batches, tokenizer=self.policy)
        settings: dict[str, Any] = {"rows": self.rows, "n": self.n, "max_staleness": bound}
        if whole_batches:
            return hf.stream(loader, lambda batch: self.rollout.generate_sequences(batch, n=self.n), **settings)
        return hf.stream(loader, self.rollout, call_seconds=self.call_seconds, **settings)

    def train(self, batch: hf.BatchRef) -> Future:
        """The trainer's part of GRPO, with random rewards."""
        batch |= self.actor.compute_log_prob(batch)
        batch |= {"rewards": torch.rand(batch.rows)}
        batch |= hf.compute_advantage(batch, "grpo")
        return self.actor.update_actor(batch, minibatches=2)

    def run(self, bound: int, whole_batches: bool, batches: int, warm_up: int) -> LoopRun:
        """The loop of docs/asynchronous.md for `batches` batches of a stream that has more.

        Batches end with their updates, as in the simulation. Errors: AssertionError for a row of another length.
        """
        stream, start, kept = self.stream(bound, whole_batches, batches + bound + 1), time.time(), []
        for batch in stream:
            kept.append(batch.select("row_id", "policy_version"))
            self.train(batch)
            hf.sync_weights(self.actor, self.rollout)
            if len(kept) == batches:
                break
        self.rollout.withdraw_rows().get()
        self.rollout.advance_rows(None, until=Until(steps=1)).get()  # takes rows that finished during a weight sync
        events = [e for e in self.pool.events() if e.start >= start and e.role == self.actor.name]
        ends = sorted({e.seq: e.end for e in events if e.method == "update_actor"}.values())
        begin, seconds = ends[warm_up - 1], ends[-1] - ends[warm_up - 1]
        whole = [e for e in events if e.method in ("compute_log_prob", "update_actor")]
        busy = sum(max(0.0, e.end - max(begin, e.ready)) for e in whole) / TRAINERS
        staleness, tokens = self._versions(kept)
        return LoopRun(
            rows_per_second=(batches - warm_up) * self.rows / seconds,
            trainer_busy=busy / seconds,
            recomputed=stream.metrics()["stream/recomputed_tokens"] / tokens,
            staleness=staleness,
        )

    def _versions(self, batches: Sequence[hf.BatchRef]) -> tuple[list[int], int]:
        """The staleness of each row, and all tokens."""
        lengths, staleness, tokens, first = self.lengths((len(batches) + 8) * self.rows), [], 0, 0
        for number, batch in enumerate(found.get() for found in batches):
            versions = batch["policy_version"].tolist()
            first = min(map(min, versions)) if number == 0 else first
            staleness += [number - (min(row) - first) for row in versions]
            tokens += sum(map(len, versions))
            assert [lengths[row] for row in batch["row_id"].tolist()] == list(map(len, versions))
        return staleness, tokens


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What the simulator is told of this machine. `call_overhead`: seconds per call of a replica that decodes nothing.
    `cores` follows from how much slower decoding and training are while both run."""

    decoding: DecodingSpeed
    train_seconds_per_token: float
    sync_seconds: float
    call_overhead: float
    cores: float


def measure_speeds(job: Job, repeats: int, few: int, many: int) -> Speeds:
    """Each alone, medians of `repeats`; then decoding and training at the same time."""

    def decoding(rows: int, steps: int = 24) -> Any:
        return job.rollout.decoding_seconds(rows=rows, context=3 * PROMPT, steps=steps)

    def train() -> float:
        start = time.perf_counter()
        job.train(batch).get()
        return time.perf_counter() - start

    def sync() -> float:
        start = time.perf_counter()
        hf.sync_weights(job.actor, job.rollout).get()
        return time.perf_counter() - start

    def empty_calls(count: int = 20) -> float:
        start = time.perf_counter()
        calls = [job.rollout.advance_rows(None, until=Until(steps=1), replica=0) for _ in range(count)]
        calls[-1].get()
        return (time.perf_counter() - start) / count

    batch = next(iter(job.stream(0, True, 1)))
    tokens = int(batch.get("num_tokens")["num_tokens"].sum())
    alone, training, syncs, prefill, empty = {few: [], many: []}, [], [], [], []
    for _ in range(repeats):
        for rows, found in alone.items():
            prefills, steps = zip(*decoding(rows).get(), strict=True)
            prefill += prefills if rows == many else ()
            found.append(statistics.mean(steps))
        training.append(train())
        syncs.append(sync())
        empty.append(empty_calls())
    step, trained = statistics.median(alone[many]), statistics.median(training)
    room = round(job.tail.median * job.tail.ratio) - 2 * PROMPT - 2  # contexts are 3 * PROMPT
    long = decoding(many, steps=min(room, round(4 * trained / step)))
    both = []
    while not long.done():
        both.append(train())
    slower = statistics.mean(each for _, each in long.get()) / step, statistics.median(both[1:-1] or both) / trained
    speed = DecodingSpeed.fitted(
        (few, statistics.median(alone[few])), (many, step), prefill=statistics.median(prefill), slots=512
    )
    return Speeds(
        decoding=speed,
        train_seconds_per_token=trained / tokens,
        sync_seconds=statistics.median(syncs),
        call_overhead=statistics.median(empty),
        cores=(TRAINERS + REPLICAS) / max(1.0, statistics.geometric_mean(slower)),
    )

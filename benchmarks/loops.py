"""Seconds per iteration of the colocated, split, streamed and elastic loop on this machine, measured and predicted.

First the layers of a Llama of `--hidden` units in float32 are profiled on two host processes (`hybridflow profile`).
With that profile the planner prices the four loops as `hybridflow plan` does (`planner.loops`), each on the hosts that
it is then run on: GRPO with random rewards and two mini-batches, and lognormal response lengths, of which one in a
thousand is longer than `--ratio` times the median, and cut there. Colocated: both hosts generate and train in turns.
Split and streamed: one generates, the other trains, with whole batches one ahead, or `hf.stream` with `--staleness`.
Elastic: one trains, both may generate (`gain`). Rows have the same lengths in all loops, which run in turn, `--rounds`
times, after iterations that are not counted. `slower`: how much slower the machine was than while it was profiled, by
the median loop; `error_at_one_speed` is the error of the predictions times that. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hybridflow as hf
from benchmarks.stream_runs import PROMPT, SEED, TEXT, LongTailedRollout, draw_lengths, make_policy
from hybridflow.cli.profile_run import profile
from hybridflow.engines.contract import derived_seed
from hybridflow.models.spec import ModelSpec
from hybridflow.placement import Placement
from hybridflow.planner import ResponseLengths, Workload
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT, LayerProfile
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Lengths
from hybridflow.planner.loops import ROLLOUT, price_loops
from hybridflow.planner.search.planning import placement_of

HOSTS, MINIBATCHES = 2, 2


class LongTailedActor(hf.ActorWorker):
    """Its responses have drawn `lengths`."""

    def __init__(self, *, lengths: ResponseLengths | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        if lengths is not None and self.generation is not None:
            draw_lengths(self.generation.engine, lengths)


class Loops:
    """The four loops; each has the hosts to itself."""

    def __init__(self, policy: str, args: argparse.Namespace) -> None:
        self.policy, self.args = policy, args
        self.tail = ResponseLengths(median=args.median, ratio=args.ratio)
        longest = round(args.median * args.ratio)
        sampling = hf.Sampling(max_tokens=longest, ignore_eos=True, seed=SEED)
        self.generate = hf.VLLM(max_length=PROMPT + longest, max_sequences=256, sampling=sampling)
        self.pool = hf.ResourcePool([HOSTS])

    def workload(self) -> Workload:
        """With the lengths of the rows that all loops generate first; its longest is that of a mean batch."""
        rows, n = self.args.rows, self.args.n
        seeds = [derived_seed(SEED * 1_000_003 + row // n, row % n) for row in range(self.args.iterations * rows)]
        drawn = [self.tail.draw(random.Random(seed)) for seed in seeds]
        longest = statistics.fmean(max(drawn[at : at + rows]) for at in range(0, len(drawn), rows))
        square = statistics.fmean(length * length for length in drawn)
        lengths = Lengths(statistics.fmean(drawn), longest, square)
        sizes = {"rows": rows, "responses_per_prompt": n, "minibatches": MINIBATCHES, "dtype": "float32"}
        return Workload(prompt=PROMPT, response=lengths, **sizes)

    def loader(self, iterations: int) -> hf.PromptLoader:
        drawn = random.Random(0)
        prompts = [{"prompt": "".join(drawn.choices(TEXT.characters[:26], k=PROMPT))} for _ in range(256)]
        size = self.args.rows // self.args.n
        return hf.PromptLoader(prompts, batch_size=size, steps=iterations, tokenizer=self.policy)

    @contextmanager
    def actor(self, devices: Any, generate: bool = False, **train: Any) -> Iterator[Any]:
        own = {"generate": self.generate, "lengths": self.tail} if generate else {}
        train = train or {"train": hf.Megatron()}
        group = LongTailedActor.on(devices, model=self.policy, optim=hf.Adam(lr=1e-6), **train, **own)
        try:
            yield group
        finally:
            group.close()

    @contextmanager
    def rollout(self, devices: Any) -> Iterator[Any]:
        group = LongTailedRollout.on(devices, model=self.policy, generate=self.generate, lengths=self.tail)
        try:
            yield group
        finally:
            group.close()

    def train(self, actor: Any, batch: hf.BatchRef, minibatches: int = MINIBATCHES) -> Any:
        batch |= actor.compute_log_prob(batch)
        batch |= {"rewards": torch.rand(batch.rows)}
        batch |= hf.compute_advantage(batch, "grpo")
        return actor.update_actor(batch, minibatches=minibatches)

    def timed(self, batches: Any, step: Callable[[hf.BatchRef], Any]) -> float:
        """Seconds between the updates of iterations, without those that warm up."""
        args, ends = self.args, list[float]()
        for batch in batches:
            step(batch).get()
            ends.append(time.perf_counter())
            if len(ends) == args.warm_up + args.iterations:
                break
        return (ends[-1] - ends[args.warm_up - 1]) / args.iterations

    def colocated(self) -> float:
        with self.actor(self.pool, generate=True) as actor:
            batches = (actor.generate_sequences(prompts, n=self.args.n) for prompts in self.loader(64))
            return self.timed(batches, lambda batch: self.train(actor, batch))

    def ahead(self, whole: bool, staleness: int) -> float:
        with self.actor(self.pool[:1]) as actor, self.rollout(self.pool[1:]) as rollout:
            how: dict[str, Any] = {"rows": self.args.rows, "n": self.args.n, "max_staleness": staleness}
            source = (lambda batch: rollout.generate_sequences(batch, n=self.args.n)) if whole else rollout
            stream = hf.stream(self.loader(64), source, call_seconds=0.05, **how)

            def step(batch: hf.BatchRef) -> Any:
                updated = self.train(actor, batch)
                hf.sync_weights(actor, rollout)
                return updated

            try:
                return self.timed(stream, step)
            finally:
                stream.close()

    def split(self) -> float:
        return self.ahead(True, 1)

    def streamed(self) -> float:
        return self.ahead(False, self.args.staleness)

    def elastic(self) -> float:
        args = self.args
        with self.actor(self.pool[:1]) as actor, self.rollout(self.pool) as rollout:
            elastic = hf.Elastic(self.pool, actor=actor, rollout=rollout, sizes=(1, 2), policy="gain")
            stream = elastic.stream(self.loader(64), n=args.n, minibatches=MINIBATCHES, call_seconds=0.05)
            for batch in stream:
                self.train(actor, batch, 1)
                if len(stream.seconds) >= args.iterations + args.warm_up + 3:  # `gain` keeps still in the first three
                    break
            stream.close()
        return statistics.fmean(stream.seconds[-args.iterations :])


def predicted(policy: str, loops: Loops, measured: LayerProfile) -> dict[str, float]:
    """Of each loop on its hosts: a model of one device on each."""
    args, actor = loops.args, ModelSpec.from_checkpoint(policy)
    cluster, k = measured.measured(ClusterSpec.this_machine(HOSTS)), measured.coefficients(DEFAULT)
    graph = hf.trace(
        lambda actor, prompts: loops.train(actor, actor.generate_sequences(prompts, n=args.n)),
        {"actor": hf.trace_spec(hf.ActorWorker, model=actor, optim=hf.Adam(lr=1e-6), generate=loops.generate)},
    )
    costs = Costs(cluster, graph, loops.workload(), k, measured)

    def planned(other: Graph, constraints: Sequence[Any]) -> Placement:
        own = Costs(cluster, other, costs.workload, k, measured)
        apart = ROLLOUT in other.groups
        at = {"actor": Mesh.of(0, 1 if apart else HOSTS), ROLLOUT: Mesh.of(1, 1)}
        plans = {call.name: CallPlan(at[call.group], Parallel(d=at[call.group].size)) for call in own.calls}
        return placement_of(own, plans, "given")

    found = price_loops(costs, planned, None, args.staleness)
    if against := [f"{one.name}: {one.against}" for one in found if one.against]:
        raise SystemExit("; ".join(against))
    return {one.name: one.seconds for one in found}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        policy = make_policy(Path(directory), PROMPT + round(args.median * args.ratio), args.hidden)
        found = profile(policy, HOSTS, length=PROMPT + args.median, tokens=4096, rows=args.rows, repeats=args.repeats)
        loops = Loops(policy, args)
        expected, took = predicted(policy, loops, found), dict[str, list[float]]()
        for _ in range(args.rounds):
            for name in expected:
                took.setdefault(name, []).append(getattr(loops, name)())
                print(f"{name}: {took[name][-1]:.3f} s, predicted {expected[name]:.3f} s", file=sys.stderr)
        hf.shutdown()
    median = {name: statistics.median(seconds) for name, seconds in took.items()}
    slower = statistics.median(median[name] / expected[name] for name in median)
    rows = {
        name: {
            "predicted": round(expected[name], 3),
            "measured": round(seconds, 3),
            "error": round(expected[name] / seconds - 1, 3),
            "error_at_one_speed": round(slower * expected[name] / seconds - 1, 3),
            "repeats": [round(one, 3) for one in took[name]],
        }
        for name, seconds in median.items()
    }
    order = [sorted(values, key=values.__getitem__) for values in (expected, median)]
    return {"loops": rows, "slower": round(slower, 3), "same_order": order[0] == order[1], "order": order[1]}


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"hidden": 256, "rows": 128, "n": 4, "median": 48, "iterations": 5, "warm-up": 2, "rounds": 2, "repeats": 5}
    for name, size in sizes.items():
        out.add_argument(f"--{name}", type=int, default=size)
    out.add_argument("--ratio", type=float, default=8)
    out.add_argument("--staleness", type=int, default=2)
    return out


def main() -> None:
    os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15 hosts wait for whatever else computes
    print(json.dumps({"benchmark": "loops", **measure(parser().parse_args())}))


if __name__ == "__main__":
    main()

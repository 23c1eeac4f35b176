"""Seconds per iteration under each device policy, on four host processes of this machine, and their prediction.

Ray, vLLM, FSDP and a Llama of `--hidden` units in float32 (128: 0.6 M parameters). In the static placement `--actor`
hosts train and the others generate; the other policies move devices. `forecast` is `gain` without its look at what
earlier iterations took, as the simulator knows it. An iteration has `--prompts` prompts of 16 tokens with `--n`
responses each, in `--minibatches` mini-batches; one response in a thousand is longer than `--ratio` times the median,
and cut there. A row has the same length under all policies, which run in turn, `--rounds` times, `--iterations`
iterations each after a first one that is not counted.

Hosts are paced, so that four processes on few cores have the speeds of four devices: each really decodes and trains,
and then waits until a decoding step has taken `--step-ms` + rows x `--row-ms`, and an update `--token-ms` per token of
its rows. With all three 0 they run as fast as the cores that they share allow. `predicted` is what the simulator
(`hybridflow.planner.elastic`) makes of speeds that were measured before each round, each alone, and of decoding on all
hosts at once; `best_static` is the split that it finds the fastest.

`--draw FILE` writes the last counted iteration under each policy as a picture (SVG), from the hosts' events.

Prints one JSON line.
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
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import hybridflow as hf
from benchmarks.stream_runs import PROMPT, SEED, TEXT, Job, LongTailedRollout, make_policy
from benchmarks.timelines import Bar, picture
from hybridflow.planner import DecodingSpeed, ResponseLengths
from hybridflow.planner.elastic import policies
from hybridflow.planner.elastic.policies import gain, static
from hybridflow.planner.elastic.simulation import ElasticRun, Measured, best_static, simulate_elastic
from hybridflow.planner.elastic.state import Policy, Speeds, Switch

HOSTS = 4
SIZES = (1, 2, 4)  # of the actor
POLICIES: dict[str, Policy] = {"static": static, **policies.POLICIES, "forecast": gain(history=False)}


class ElasticRollout(LongTailedRollout):
    """Its decoding steps take `step_seconds` + rows x `row_seconds` at least; one replica can be measured alone."""

    def __init__(self, *, step_seconds: float, row_seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        loop = self.engine._loop
        step = loop._step

        def paced(*args: Any, **options: Any) -> None:
            end = time.perf_counter() + step_seconds + row_seconds * len(loop.rows)
            step(*args, **options)
            sleep_until(end)

        loop._step = paced  # type: ignore[method-assign]

    @hf.register(hf.THREE_D_ALL_MICRO_DP, replica="replica")
    def decode_alone(self, rows: int, context: int, steps: int, replica: int) -> tuple[float, float]:
        """`decoding_seconds` of one replica."""
        del replica
        return LongTailedRollout.decoding_seconds(self, rows, context, steps)


class PacedActor(hf.ActorWorker):
    """Its updates take `token_seconds` per token of its rows at least."""

    def __init__(self, *, token_seconds: float, **settings: Any) -> None:
        super().__init__(**settings)
        update = self._update

        def paced(batch: hf.Batch, *args: Any) -> dict[str, float]:
            end = time.perf_counter() + token_seconds * int(batch["num_tokens"].sum())
            found = update(batch, *args)
            sleep_until(end)
            return found

        self._update = paced  # type: ignore[method-assign]


def sleep_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


class ElasticJob(Job):
    """An actor on the first of four hosts, and rollouts on all."""

    def __init__(self, policy: str, args: argparse.Namespace) -> None:
        self.policy, self.args, self.n = policy, args, args.n
        self.tail, longest = ResponseLengths(median=args.median, ratio=args.ratio), round(args.median * args.ratio)
        self.pool = hf.ResourcePool([HOSTS])
        sampling = hf.Sampling(max_tokens=longest, ignore_eos=True, seed=SEED)
        generate = hf.VLLM(max_length=PROMPT + longest, max_sequences=256, sampling=sampling)
        train: dict[str, Any] = {"train": hf.FSDP(), "optim": hf.Adam(lr=1e-6), "token_seconds": args.token_ms / 1e3}
        pace = {"step_seconds": args.step_ms / 1e3, "row_seconds": args.row_ms / 1e3}
        self.actor = PacedActor.on(self.pool[: args.actor], model=policy, **train)
        self.rollout = ElasticRollout.on(self.pool, model=policy, generate=generate, lengths=self.tail, **pace)
        self.histories = {name: deque[tuple[bool, float]](maxlen=32) for name in POLICIES}
        self.elastic = hf.Elastic(self.pool, actor=self.actor, rollout=self.rollout, sizes=SIZES)

    def loader(self, iterations: int) -> hf.PromptLoader:
        """The same prompts each time, with the same row ids, so the same lengths."""
        drawn = random.Random(0)
        prompts = [{"prompt": "".join(drawn.choices(TEXT.characters[:26], k=PROMPT))} for _ in range(256)]
        return hf.PromptLoader(prompts, batch_size=self.args.prompts, steps=iterations, tokenizer=self.policy)

    def step(self, batch: hf.BatchRef) -> Any:
        batch |= self.actor.compute_log_prob(batch)
        batch |= {"rewards": torch.rand(batch.rows)}
        batch |= hf.compute_advantage(batch, "grpo")
        return self.actor.update_actor(batch)

    def iterations(self, policy: str) -> tuple[list[float], list[Switch], list[Bar]]:
        """Seconds of each iteration but the first, the switches in them, and the timeline of the last one."""
        args = self.args
        self.elastic.policy = POLICIES[policy]
        self.elastic.measured.iterations = self.histories["gain" if policy == "static" else policy]
        stream = self.elastic.stream(
            self.loader(args.iterations + 2), n=args.n, minibatches=args.minibatches, call_seconds=args.call_seconds
        )
        first = 0
        for number, batch in enumerate(stream):
            self.step(batch)
            if number == args.minibatches:
                first = len(self.elastic.events)
            if len(stream.seconds) > args.iterations:
                break
        end = time.time() - (time.monotonic() - stream._begun)
        self.rollout.withdraw_rows().get()
        self.rollout.advance_rows(None, until=hf.Until(steps=1)).get()
        self.elastic.resize(args.actor)
        return stream.seconds[1:], self.elastic.events[first:], self.timeline(end - stream.seconds[-1], end)

    def timeline(self, start: float, end: float) -> list[Bar]:
        """Of each host, from its events; what a host of the actor does between calls is not seen."""
        kinds = {"advance_rows": "generation", "resize": "moves", "sync_weights": "moves"}
        bars = []
        for event in self.pool.events():
            kind = kinds.get(event.method, "training" if event.role == self.actor.name else "")
            first, last = max(start, event.ready) - start, min(end, event.end) - start
            if kind and first < last:
                bars.append(Bar(event.rank, kind, round(first, 3), round(last, 3)))
        return sorted(bars, key=lambda bar: (bar.kind == "moves", bar))

    def speeds(self, repeats: int = 3) -> tuple[Speeds, float, float]:
        """Speeds, the seconds of a weight sync, and the cores."""
        args, few, many = self.args, 2, max(8, self.args.prompts * self.n // HOSTS)
        rows = max(1, args.prompts // args.minibatches)
        batch = self.rollout.generate_sequences(next(self.loader(1).drawn())[:rows], n=self.n)
        tokens = int(batch.get("num_tokens")["num_tokens"].sum())

        def timed(call: Any) -> float:
            start = time.perf_counter()
            call().get()
            return time.perf_counter() - start

        alone: dict[int, list[float]] = {few: [], many: []}
        prefill, together, syncs, empty = [], [], [], []
        for _ in range(repeats):
            for count, found in alone.items():
                first, step = self.rollout.decode_alone(count, 3 * PROMPT, 24, replica=0).get()
                found.append(step)
                prefill.append(first)
            together += [step for _, step in self.rollout.decoding_seconds(many, 3 * PROMPT, 24).get()]
            syncs.append(timed(lambda: hf.sync_weights(self.actor, self.rollout)))
            until = hf.Until(steps=1)
            empty.append(timed(lambda until=until: self.rollout.advance_rows(None, until=until, replica=0)))
        training = Measured()
        for size in SIZES:
            self.elastic.resize(size)
            self.step(batch).get()
            for _ in range(repeats):
                training.trained(timed(lambda: self.step(batch)), tokens, size)
        self.elastic.resize(args.actor)
        slower = 1.0 + statistics.median(empty) / args.call_seconds
        steps = [(count, slower * statistics.median(found)) for count, found in alone.items()]
        decoding = DecodingSpeed.fitted(*steps, prefill=statistics.median(prefill), slots=256)
        other, trained = self.elastic.measured.speeds(), training.speeds()
        speeds = Speeds(
            decoding,
            train=trained.train + args.call_seconds,
            train_per_token=trained.train_per_token,
            resize=other.resize,
            hand_over=other.hand_over,
            look=other.look,
        )
        cores = HOSTS / max(1.0, statistics.median(together) / statistics.median(alone[many]))
        return speeds, statistics.median(syncs), cores


def measure(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[float]] = {name: [] for name in POLICIES}
    switches: dict[str, list[Switch]] = {name: [] for name in POLICIES}
    predicted: dict[str, list[float]] = {name: [] for name in POLICIES}
    found, timelines = [], dict[str, list[Bar]]()
    with tempfile.TemporaryDirectory() as directory:
        longest = PROMPT + round(args.median * args.ratio)
        job = ElasticJob(make_policy(Path(directory), longest, args.hidden), args)
        for name in ("rlinf", "static", "forecast"):
            job.iterations(name)
        lengths = job.lengths((args.iterations + 1) * args.prompts * args.n)
        for _ in range(args.rounds):
            speeds, sync, cores = job.speeds()
            found.append({**{k: v for k, v in vars(speeds).items() if k != "decoding"}, "sync": sync, "cores": cores})
            found[-1] |= {"step_base": speeds.decoding.base, "step_per_row": speeds.decoding.per_row}
            run = ElasticRun(
                devices=HOSTS, rollout=HOSTS - args.actor, actor=args.actor, prompts=args.prompts, n=args.n,
                minibatches=args.minibatches, speeds=speeds, lengths=lengths, prompt_tokens=PROMPT,
                actor_sizes=SIZES, sync_seconds=sync, cores=cores, iterations=args.iterations,
            )  # fmt: skip
            for name, policy in POLICIES.items():
                seconds, events, timelines[name] = job.iterations(name)
                runs[name] += seconds
                switches[name] += events
                predicted[name].append(simulate_elastic(run, policy).mean)
                print(f"{name}: {statistics.mean(seconds):.2f} s, predicted {predicted[name][-1]:.2f}", file=sys.stderr)
        events = [asdict_of(switch) for switch in job.elastic.events[-40:]]
        hf.shutdown()
    if args.draw is not None:
        args.draw.write_text(picture(timelines, [f"host {number}" for number in range(HOSTS)]))
    static = statistics.median(runs["static"])
    best, _ = best_static(replace(run, actor_sizes=None), [(HOSTS - actor, actor) for actor in range(1, HOSTS)])
    return {
        "best_static": {"rollout": best.rollout, "actor": best.actor},
        "speeds": [{name: round(value, 6) for name, value in one.items()} for one in found],
        "policies": {
            name: {
                "seconds": round(statistics.median(seconds), 3),
                "ratio": round(statistics.median(seconds) / static, 3),
                "predicted": round(statistics.mean(predicted[name]), 3),
                "error": round(statistics.mean(predicted[name]) / statistics.mean(seconds) - 1, 3),
                "switches": len(switches[name]),
                "switch_ms": round(1e3 * statistics.median([s.seconds for s in switches[name]] or [0.0]), 1),
                "moved_rows": sum(s.rows for s in switches[name]),
                "repeats": [round(one, 2) for one in seconds],
            }
            for name, seconds in runs.items()
        },
        "events": events,
    }


def asdict_of(switch: Switch) -> dict[str, Any]:
    return {"when": round(switch.when, 3), "why": switch.why, "from": dict(switch.origin), "to": dict(switch.target),
            "seconds": round(switch.seconds, 3), "rows": switch.rows}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--hidden", type=int, default=128)
    out.add_argument("--actor", type=int, default=2, help="hosts that train in the static placement")
    out.add_argument("--step-ms", type=float, default=20)
    out.add_argument("--row-ms", type=float, default=2)
    out.add_argument("--token-ms", type=float, default=2)
    out.add_argument("--prompts", type=int, default=32)
    out.add_argument("--n", type=int, default=4)
    out.add_argument("--minibatches", type=int, default=4)
    out.add_argument("--median", type=int, default=32, help="tokens of a response")
    out.add_argument("--ratio", type=float, default=8)
    out.add_argument("--iterations", type=int, default=3)
    out.add_argument("--rounds", type=int, default=2)
    out.add_argument("--call-seconds", type=float, default=0.05)
    out.add_argument("--draw", type=Path)
    return out


def main() -> None:
    args = parser().parse_args()
    os.environ.setdefault("RAY_worker_niceness", "0")  # at Ray's 15 hosts wait for whatever else computes
    print(json.dumps({"benchmark": "elastic", **measure(args)}))


if __name__ == "__main__":
    main()

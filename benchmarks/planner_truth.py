"""Predicted and measured iteration times of PPO placements on this machine.

Actor, critic, reference and reward model of benchmarks.iteration (0.6 M parameters, float32) on 4 host processes that
share the machine's cores: 128 prompts of 16 tokens, exactly 64 response tokens, 2 mini-batches. First the layers are
profiled, or a profile is read. Then the planner chooses a placement and predicts its time and that of nine others. All
ten run in turn, three times: seconds per iteration in a pipelined loop, medians of the repeats. Prints a table and one
JSON line. `slower`: how much slower the machine was than while it was profiled, by the median placement;
`median_error_at_one_speed` is the median error of the predictions times that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import hybridflow as hf
from benchmarks.dataflows import ppo
from benchmarks.iteration import PROMPT, RESPONSE, make_models
from hybridflow.cli.profile_run import profile
from hybridflow.cluster.future import Future
from hybridflow.models.hf_spec import read_spec
from hybridflow.models.spec import ModelSpec
from hybridflow.placement import Placement
from hybridflow.planner.cost.costs import Costs
from hybridflow.planner.cost.hardware import DEFAULT, LayerProfile
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.graph import Call, Graph
from hybridflow.planner.describe.mesh import CallPlan, Mesh, Parallel
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.planning import placement_of, plan
from hybridflow.tracing.auto import as_priced

DEVICES, ROWS, MINIBATCHES = 4, 128, 2
WORKLOAD = Workload(rows=ROWS, prompt=PROMPT, response=RESPONSE, minibatches=MINIBATCHES, dtype="float32")
GROUPS = ("actor", "critic", "reference", "reward")
# Group -> (devices, (p, t, d)); the actor's also (p_g, t_g). "all" stands for every group that is not named.
Where = Mapping[str, tuple[tuple[int, ...], tuple[int, int, int]]]
ALL, LEFT, RIGHT = (0, 1, 2, 3), (0, 1), (2, 3)
CANDIDATES: dict[str, tuple[Where, tuple[int, int]]] = {
    "together, 1-1-4": ({"all": (ALL, (1, 1, 4))}, (1, 1)),
    "together, 1-2-2": ({"all": (ALL, (1, 2, 2))}, (1, 1)),
    "together, 1-4-1, generation 1-2": ({"all": (ALL, (1, 4, 1))}, (1, 2)),
    "together, 2-1-2": ({"all": (ALL, (2, 1, 2))}, (1, 1)),
    "together, 2-2-1": ({"all": (ALL, (2, 2, 1))}, (1, 1)),
    "together on 2": ({"all": (LEFT, (1, 1, 2))}, (1, 1)),
    "split, 1-1-2": (
        {"actor": (LEFT, (1, 1, 2)), "reference": (LEFT, (1, 1, 2)), "all": (RIGHT, (1, 1, 2))},
        (1, 1),
    ),
    "split, 1-2-1": (
        {"actor": (LEFT, (1, 2, 1)), "reference": (LEFT, (1, 2, 1)), "all": (RIGHT, (1, 2, 1))},
        (1, 2),
    ),
    "standalone": (
        {
            "actor": ((0,), (1, 1, 1)),
            "critic": ((1,), (1, 1, 1)),
            "reference": ((2,), (1, 1, 1)),
            "reward": ((3,), (1, 1, 1)),
        },
        (1, 1),
    ),
    "actor on 2": (
        {"actor": (LEFT, (1, 1, 2)), "critic": ((2,), (1, 1, 1)), "all": ((3,), (1, 1, 1))},
        (1, 1),
    ),
    "actor on 4": (
        {"actor": (ALL, (1, 1, 4)), "critic": (LEFT, (1, 1, 2)), "all": (RIGHT, (1, 1, 2))},
        (1, 1),
    ),
}


def program(policy: str, reward: str) -> Graph:
    actor = ModelSpec.from_checkpoint(policy)
    value = ModelSpec.from_checkpoint(policy, "value")
    return ppo(actor, value, actor, ModelSpec.from_checkpoint(reward, "value"))


def call_plan(call: Call, where: Where, generate: tuple[int, int]) -> CallPlan:
    devices, (p, t, d) = where.get(call.group, where.get("all", ((), (1, 1, 1))))
    if call.kind == "generation":
        p, t, d = *generate, len(devices) // (generate[0] * generate[1])
    return CallPlan(Mesh(devices), Parallel(p, t, d))


def placements(graph: Graph, measured: LayerProfile, count: int, budget_s: float) -> dict[str, Placement]:
    """The planner's choice first, then the others, each with its predictions."""
    cluster, k = measured.measured(ClusterSpec.this_machine(DEVICES)), measured.coefficients(DEFAULT)
    problem = Costs(cluster, graph, WORKLOAD, k, measured)
    chosen = plan(
        graph, ClusterSpec.this_machine(DEVICES), WORKLOAD, profile=measured, budget_s=budget_s, per_call=False
    )
    found = {"chosen": chosen}
    for name, (where, generate) in CANDIDATES.items():
        layouts = {call.name: call_plan(call, where, generate) for call in problem.calls}
        other = placement_of(problem, layouts, "given")
        if dict(other.groups) != dict(chosen.groups) and len(found) < count:
            found[name] = other
    return {name: as_priced(placement, WORKLOAD) for name, placement in found.items()}


class Job:
    """PPO's groups, placed by a placement, with prompts and responses of the lengths of `work`."""

    def __init__(self, placement: Placement, policy: str, reward: str, work: Workload = WORKLOAD) -> None:
        optim, self.work, self.vocabulary = hf.Adam(lr=1e-5), work, read_spec(policy, "lm").vocab
        self.prompt, response = int(work.prompt.max), int(work.response.max)
        generate = hf.VLLM(
            max_length=self.prompt + response, sampling=hf.Sampling(max_tokens=response, ignore_eos=True, seed=1)
        )
        own = {"model": policy, "train": hf.Megatron()}
        self.actor = hf.ActorWorker.on(placement["actor"], optim=optim, generate=generate, **own)
        self.critic = hf.CriticWorker.on(placement["critic"], optim=optim, **own)
        self.reference = hf.ReferenceWorker.on(placement["reference"], **own)
        self.reward = hf.RewardWorker.on(placement["reward"], model=reward, train=hf.Megatron())
        self.rows = 0

    def iteration(self) -> tuple[Future, Future]:
        batch = self.actor.generate_sequences(self._prompts())
        batch |= self.actor.compute_log_prob(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.critic.compute_values(batch)
        batch |= self.reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "gae", kl_coef=0.05)
        updated = self.critic.update_critic(batch, minibatches=self.work.minibatches)
        return updated, self.actor.update_actor(batch, minibatches=self.work.minibatches)

    def _prompts(self) -> hf.BatchRef:
        rows, prompt, generator = self.work.rows, self.prompt, torch.Generator().manual_seed(self.rows)
        ids = torch.randint(2, self.vocabulary, (rows * prompt,), generator=generator)
        first, self.rows = self.rows, self.rows + rows
        columns = {"prompt_ids": hf.Ragged.from_lengths(ids, [prompt] * rows)}
        batch = hf.Batch({**columns, "row_id": torch.arange(first, first + rows)})
        return hf.BatchRef.from_batch(batch)

    def close(self) -> None:
        for name in GROUPS:
            getattr(self, name).close()


@contextmanager
def placed(placement: Placement, policy: str, reward: str) -> Iterator[Job]:
    job = Job(placement, policy, reward)
    try:
        yield job
    finally:
        job.close()


def measure(job: Job, warm: int, counted: int) -> tuple[float, dict[str, float]]:
    """Seconds per iteration with two in flight, as with a loader, and the seconds of every call."""
    iterations, begun, calls = job.actor.session.iterations, [], []
    for _ in range(warm + counted + 1):
        iterations.begin(in_flight=2)
        begun.append(time.perf_counter())
        calls.append(iterations.current)
        job.iteration()
    iterations.drain()
    each = [iterations.seconds(number) for number in calls[warm:-1]]
    names = each[0] if each else {}
    seconds = {name: statistics.median(one.get(name, 0.0) for one in each) for name in names}
    return (begun[-1] - begun[warm]) / counted, seconds


def compare(found: Mapping[str, Placement], times: Mapping[str, list[float]]) -> dict[str, Any]:
    """Predicted and measured seconds, relative errors, and the rank of the planner's choice by measured time."""
    rows: dict[str, Any] = {}
    for name, placement in found.items():
        took = statistics.median(times[name])
        error = placement.seconds / took - 1
        rows[name] = {"predicted": round(placement.seconds, 3), "measured": round(took, 3), "error": round(error, 3)}
        rows[name]["repeats"] = [round(seconds, 3) for seconds in times[name]]
    fastest = sorted(rows, key=lambda name: rows[name]["measured"])
    errors = [abs(row["error"]) for row in rows.values()]
    slower = statistics.median(1 / (1 + row["error"]) for row in rows.values())
    relative = [abs((1 + row["error"]) * slower - 1) for row in rows.values()]
    return {
        "placements": rows,
        "median_error": round(statistics.median(errors), 3),
        "slower": round(slower, 3),
        "median_error_at_one_speed": round(statistics.median(relative), 3),
        "largest_error": round(max(errors), 3),
        "rank_of_chosen": fastest.index("chosen") + 1,
    }


def table(found: Mapping[str, Placement], result: Mapping[str, Any]) -> str:
    lines = [f"{'placement':34} {'predicted':>9} {'measured':>9} {'error':>7}"]
    for name, row in sorted(result["placements"].items(), key=lambda item: item[1]["measured"]):
        lines.append(f"{name:34} {row['predicted']:9.3f} {row['measured']:9.3f} {row['error']:+7.1%}")
    return "\n".join([*lines, "", "chosen:", str(found["chosen"])])


def details(found: Mapping[str, Placement], calls: Mapping[str, Mapping[str, float]]) -> str:
    """Predicted and measured seconds of each call; measured seconds include the slowdown by concurrent calls."""
    lines = []
    for name, placement in found.items():
        lines.append(name)
        for call, layout in placement.calls.items():
            took = calls[name].get(call, float("nan"))
            lines.append(f"    {call:34} {layout.layout:6} {layout.seconds:9.3f} {took:9.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, help="read it instead of measuring; with --save, write it there")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--placements", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=4)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--budget", type=float, default=10.0, help="seconds for the search")
    parser.add_argument("--details", action="store_true", help="also the seconds of every call")
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "planner_truth"}
    with tempfile.TemporaryDirectory() as directory:
        policy, reward = make_models(Path(directory))
        start = time.perf_counter()
        if args.profile and not args.save:
            measured = LayerProfile.load(args.profile)
        else:
            measured = profile(policy, DEVICES, length=PROMPT + RESPONSE)
            result["profile_seconds"] = round(time.perf_counter() - start, 1)
        if args.save:
            measured.save(args.profile)
        found = placements(program(policy, reward), measured, args.placements, args.budget)
        times: dict[str, list[float]] = {name: [] for name in found}
        calls: dict[str, Mapping[str, float]] = {}
        for _ in range(args.repeats):
            for name, placement in found.items():
                with placed(placement, policy, reward) as job:
                    took, calls[name] = measure(job, args.warm, args.iterations)
                times[name].append(took)
                print(f"{name}: {took:.3f} s, predicted {placement.seconds:.3f} s", file=sys.stderr)
    hf.shutdown()
    result |= compare(found, times)
    if args.details:
        print(details(found, calls), file=sys.stderr)
    print(table(found, result), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

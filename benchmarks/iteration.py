"""Seconds per iteration and per stage of PPO and GRPO on a Llama of 0.6 M parameters.

PPO: actor, critic, reference and reward model, 128 prompts of 16 tokens, exactly 64 response tokens, one epoch. GRPO:
16 prompts x 8 responses, no critic. Float32, real Ray, Megatron-core and vLLM. Prints one JSON line.

A stage is the sum of the slowest rank's seconds of its calls, which wait for one another; metrics of the batch are
computed concurrently. `controller` is the rest of an iteration, in which no rank computes, so all stages add up to
`mean_seconds`.

`events` is the cost of recording every call: iterations of GRPO in turns with and without (hosts neither measure memory
nor count the rows' work, the tracker writes no events), the median of the ratios of neighbours, and the driver's own
milliseconds per iteration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import hybridflow as hf
from hybridflow.cluster import host
from hybridflow.cluster.future import Future
from hybridflow.engines import process_groups
from hybridflow.engines.call_events import CallWork

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}
PROMPT, RESPONSE = 16, 64
STAGES = {
    "generate_sequences": "generation",  # less its transition
    "generate_sequences/transition": "transition",
    "compute_log_prob": "preparation",
    "compute_ref_log_prob": "preparation",
    "compute_values": "preparation",
    "compute_reward": "preparation",
    "compute_advantage": "preparation",
    "update_actor": "update",
    "update_critic": "update",
}


def make_models(directory: Path) -> tuple[str, str]:
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    policy, reward = directory / "policy", directory / "reward"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(policy)
    LlamaForSequenceClassification(LlamaConfig(num_labels=1, **SIZES)).save_pretrained(reward)
    return str(policy), str(reward)


class Job:
    """The groups of one run on one pool, and the loops of both algorithms."""

    def __init__(self, devices: int, policy: str, reward: str) -> None:
        self.pool = hf.ResourcePool([devices])
        train = hf.Megatron()
        self.actor = hf.ActorWorker.on(
            self.pool,
            model=policy,
            train=train,
            optim=hf.Adam(lr=1e-5),
            generate=hf.VLLM(
                max_length=PROMPT + RESPONSE, sampling=hf.Sampling(max_tokens=RESPONSE, ignore_eos=True, seed=1)
            ),
        )
        self.critic = hf.CriticWorker.on(self.pool, model=policy, train=train, optim=hf.Adam(lr=1e-5))
        self.reference = hf.ReferenceWorker.on(self.pool, model=policy, train=train)
        self.reward = hf.RewardWorker.on(self.pool, model=reward, train=train)
        self.rows = 0

    def prompts(self, count: int) -> hf.BatchRef:
        ids = torch.randint(2, 64, (count * PROMPT,), generator=torch.Generator().manual_seed(self.rows))
        first, self.rows = self.rows, self.rows + count
        columns = {"prompt_ids": hf.Ragged.from_lengths(ids, [PROMPT] * count)}
        return hf.BatchRef.from_batch(hf.Batch({**columns, "row_id": torch.arange(first, first + count)}))

    def ppo(self) -> Sequence[Future]:
        batch = self.actor.generate_sequences(self.prompts(128))
        batch |= self.actor.compute_log_prob(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.critic.compute_values(batch)
        batch |= self.reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "gae", kl_coef=0.05)
        return self.critic.update_critic(batch), self.actor.update_actor(batch), batch.metrics()

    def grpo(self) -> Sequence[Future]:
        batch = self.actor.generate_sequences(self.prompts(16), n=8)
        batch |= self.actor.compute_log_prob(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        return self.actor.update_actor(batch, kl_coef=0.05), batch.metrics()


def measure(job: Job, step: Callable[[], Sequence[Future]], repeats: int) -> dict[str, Any]:
    for _ in range(2):
        finish(step())
    iterations, times, calls = job.pool.session.iterations, [], []
    for _ in range(repeats):
        iterations.begin(in_flight=1)
        start = time.perf_counter()
        finish(step())
        times.append(time.perf_counter() - start)
        calls.append(iterations.seconds(iterations.current))
    mean = statistics.mean(times)
    return {
        "seconds": round(statistics.median(times), 3),
        "min_seconds": round(min(times), 3),
        "mean_seconds": round(mean, 3),
        "stages": {name: round(seconds, 4) for name, seconds in stage_seconds(calls, mean).items()},
    }


class Recording:
    """Turns the measurements of the host that it is on off and on."""

    def __init__(self) -> None:
        self._before = (host.memory_used, host.work_of, process_groups.memory_used)

    @hf.register(hf.ONE_TO_ALL, blocking=True)
    def record(self, on: bool) -> None:
        memory, work, stage_memory = self._before
        host.memory_used = memory if on else lambda device: 0
        host.work_of = work if on else lambda *given: CallWork()
        process_groups.memory_used = stage_memory if on else lambda device: 0


def measure_events(job: Job, step: Callable[[], Sequence[Future]], pairs: int, directory: str) -> dict[str, Any]:
    """Seconds of iterations with and without events, in pairs of changing order."""
    switch, iterations = hf.place(Recording, job.pool, name="recording"), job.pool.session.iterations
    seconds: dict[bool, list[float]] = {True: [], False: []}
    driver: list[float] = []
    with hf.Tracker(directory, console=False) as tracker:
        take = tracker._take_events

        def timed(*given: Any) -> dict[str, float]:
            start = time.perf_counter()
            found = take(*given)
            driver.append(time.perf_counter() - start)
            return found

        tracker._take_events = timed  # type: ignore[method-assign]
        for number in range(2 * pairs + 2):
            on = number % 4 in (0, 3)
            switch.record(on)
            iterations.listen() if on else setattr(iterations, "events", None)
            start = time.perf_counter()
            futures = step()
            tracker.log(*futures)
            finish(futures)
            tracker.flush()
            if number >= 2:
                seconds[on].append(time.perf_counter() - start)
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    return {
        "with_seconds": round(statistics.median(seconds[True]), 4),
        "without_seconds": round(statistics.median(seconds[False]), 4),
        "median_ratio": round(statistics.median(ratios), 4),
        "driver_ms": round(1000 * max(statistics.median(driver[0::4]), statistics.median(driver[3::4])), 2),
    }


def finish(futures: Sequence[Future]) -> None:
    for future in futures:
        future.get()


def stage_seconds(calls: Sequence[Mapping[str, float]], mean: float) -> dict[str, float]:
    """Seconds per iteration in each stage, from the seconds of each `role.method` and the mean iteration time."""
    totals = dict.fromkeys(("generation", "transition", "preparation", "update"), 0.0)
    for of_one in calls:
        for name, seconds in of_one.items():
            if (stage := STAGES.get(name.partition(".")[2])) is not None:
                totals[stage] += seconds / len(calls)
    totals["generation"] -= totals["transition"]
    return {**totals, "controller": mean - sum(totals.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "iteration"}
    with tempfile.TemporaryDirectory() as directory:
        policy, reward = make_models(Path(directory))
        for devices in args.devices:
            job = Job(devices, policy, reward)
            result[f"ppo_{devices}"] = measure(job, job.ppo, args.iterations)
            result[f"grpo_{devices}"] = measure(job, job.grpo, args.iterations)
            result[f"events_{devices}"] = measure_events(job, job.grpo, args.iterations, f"{directory}/{devices}")
            job.pool.close()
    hf.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()

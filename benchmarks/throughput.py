"""Tokens per second of whole iterations, by the papers' protocol (HybridFlow, section 8.2; ReaL, section 8.1).

Synthetic prompts of one length, responses of one length, 10 iterations of warm-up and 5 that count; tokens are those of
prompts and responses. Algorithms: PPO, ReMax, GRPO, with a reference model. The defaults are small enough for a CPU; on
a node of GPUs, as in the papers:

    python -m benchmarks.throughput --model DIR --reward-model DIR --devices 8 --tp 8 --rows 1024 --prompt 1024 \
        --response 1024 --minibatches 8

Without `--model` a small random model plays all roles. Groups share all devices. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import hybridflow as hf
from recipes.small_model import SmallModel

ALGORITHMS = ("ppo", "remax", "grpo")


def small_models(directory: Path) -> tuple[str, str]:
    from transformers import AutoModelForSequenceClassification

    policy, reward = directory / "policy", directory / "reward"
    SmallModel(steps=0).write(policy, lambda rng: ("1+1=", "2"))
    AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1).save_pretrained(reward)
    return str(policy), str(reward)


class Loop:
    """The groups of one algorithm on one pool, and its iteration."""

    def __init__(self, args: argparse.Namespace, policy: str, reward: str | None) -> None:
        self.args, pool = args, hf.ResourcePool([args.devices])
        settings: dict[str, Any] = {"model": policy, "train": hf.Megatron(tp=args.tp, pp=args.pp)}
        length = args.prompt + args.response
        sampling = hf.Sampling(max_tokens=args.response, ignore_eos=True, seed=1)
        generate = hf.VLLM(tp=args.generation_tp or args.tp, max_length=length, sampling=sampling)
        self.actor = hf.ActorWorker.on(pool, optim=hf.Adam(lr=1e-6), generate=generate, **settings)
        self.reference = hf.ReferenceWorker.on(pool, **settings)
        judge: dict[str, Any] = {"function": _letters} if reward is None else {**settings, "model": reward}
        self.reward = hf.RewardWorker.on(pool, **judge)
        if args.algorithm == "ppo":
            self.critic = hf.CriticWorker.on(pool, optim=hf.Adam(lr=1e-6), **settings)

    def iteration(self, prompts: hf.BatchRef) -> None:
        n, minibatches = self.args.n, self.args.minibatches
        batch = self.actor.generate_sequences(prompts, n=n)
        batch |= self.actor.compute_log_prob(batch)
        batch |= self.reference.compute_ref_log_prob(batch)
        batch |= self.reward.compute_reward(batch)
        if self.args.algorithm == "ppo":
            batch |= self.critic.compute_values(batch)
            batch |= hf.compute_advantage(batch, "gae", kl_coef=0.05)
            self.critic.update_critic(batch, minibatches=minibatches)
        elif self.args.algorithm == "remax":
            greedy = self.actor.generate_sequences(prompts, greedy=True, n=1)
            batch |= self.reward.compute_reward(greedy).rename(rewards="baseline")
            batch |= hf.compute_advantage(batch, "remax", kl_coef=0.05)
        else:
            batch |= hf.compute_advantage(batch, "grpo")
        self.actor.update_actor(batch, minibatches=minibatches)


def _letters(completions: list[str]) -> list[float]:
    return [len(set(text)) / 10 for text in completions]


def measure(args: argparse.Namespace, policy: str, reward: str | None) -> dict[str, Any]:
    loop, prompts = Loop(args, policy, reward), args.rows // args.n
    steps, begun = args.warm_up + args.iterations, list[float]()
    loader = hf.PromptLoader.synthetic(prompts, args.prompt, policy, batch_size=prompts, steps=steps)
    for batch in loader:
        begun.append(time.perf_counter())
        loop.iteration(batch)
    begun.append(time.perf_counter())  # the loader's end has waited for the last iteration
    seconds = (begun[-1] - begun[args.warm_up]) / args.iterations
    each = [after - before for before, after in zip(begun[args.warm_up :], begun[args.warm_up + 1 :], strict=False)]
    return {
        "seconds": round(seconds, 4),
        "median_seconds": round(statistics.median(each), 4),
        "tokens_per_second": round(args.rows * (args.prompt + args.response) / seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=ALGORITHMS, default="ppo")
    parser.add_argument("--model", help="a directory with weights; default: a small random model")
    parser.add_argument("--reward-model", help="a directory, with --model; default: a function")
    sizes = {"devices": 2, "tp": 1, "pp": 1, "generation-tp": None, "rows": 64, "n": 1, "prompt": 16, "response": 32}
    for name, size in {**sizes, "minibatches": 2, "warm-up": 10, "iterations": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    if args.algorithm == "grpo" and args.n < 2:
        parser.error("GRPO compares the responses to a prompt: give --n 2 or more")
    if args.rows % args.n:
        parser.error(f"--rows {args.rows} are no whole number of prompts with --n {args.n} responses")
    with tempfile.TemporaryDirectory() as directory:
        models = (args.model, args.reward_model) if args.model else small_models(Path(directory))
        found = measure(args, *models)
    hf.shutdown()
    sizes = {name: getattr(args, name) for name in ("algorithm", "devices", "rows", "prompt", "response")}
    print(json.dumps({"benchmark": "throughput", **sizes, **found}))


if __name__ == "__main__":
    main()

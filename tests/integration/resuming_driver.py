"""A driver that tests kill and continue: PPO or GRPO on a tiny model, with every figure and sample written to files.

    python resuming_driver.py RUN MODEL PROMPTS ppo|grpo STEPS [key=value ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import hybridflow as hf

STRATEGIES: dict[str, Any] = {
    "p2d2": hf.Megatron(pp=2),
    "t2d2": hf.Megatron(tp=2),
    "t2": hf.Megatron(tp=2),
    "d2": hf.Megatron(),
    "fsdp": hf.FSDP(),
    "zero3": hf.ZeRO(stage=3),
    "zero1": hf.ZeRO(stage=1),
}


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [sum(letter in "abcdefgh" for letter in text) / max(len(text), 1) for text in completions]


def main(run: Path, model: str, prompts: str, algorithm: str, steps: int, options: dict[str, str]) -> None:
    devices, layout = int(options.get("devices", 2)), STRATEGIES[options.get("layout", "t2")]
    critic_layout = STRATEGIES[options.get("critic", options.get("layout", "t2"))]
    loader = hf.PromptLoader(prompts, batch_size=8, steps=steps, seed=3, tokenizer=None)
    pool = hf.ResourcePool([devices])
    actor = hf.ActorWorker.on(
        pool, model=model, train=layout, optim=hf.Adam(lr=0.01, warmup_steps=4),
        generate=hf.VLLM(tp=1, sampling=hf.Sampling(max_tokens=6, seed=5)),
    )  # fmt: skip
    reference = hf.ReferenceWorker.on(pool, model=model, train=layout)
    judge = hf.RewardWorker.on(pool, function=reward)
    critic = None
    if algorithm == "ppo":
        critic = hf.CriticWorker.on(pool, model=model, train=critic_layout, optim=hf.Adam(lr=0.01))
    tracker = hf.Tracker(run, total=steps, console=False)
    checkpoints = hf.Checkpoints(
        run / "checkpoints",
        every=int(options.get("every", 2)),
        asynchronous=options.get("asynchronous", "1") == "1",
        resume=options.get("resume", "auto"),
        best="reward/mean",
    )
    kl = hf.algorithms.AdaptiveKL(init=0.05, target=0.5, horizon=100)
    record = (run / "record.jsonl").open("a")
    for batch in checkpoints.resume(loader):
        batch = actor.generate_sequences(batch, n=2 if algorithm == "grpo" else 1)
        batch |= actor.compute_log_prob(batch)
        batch |= reference.compute_ref_log_prob(batch)
        batch |= judge.compute_reward(batch)
        if critic is not None:
            batch |= critic.compute_values(batch)
            batch |= hf.compute_advantage(batch, "gae", kl_coef=kl)
            learned = [critic.update_critic(batch, minibatches=2), actor.update_actor(batch, minibatches=2)]
        else:
            batch |= hf.compute_advantage(batch, "grpo")
            learned = [actor.update_actor(batch, kl_coef=0.02, minibatches=2)]
        metrics = batch.metrics()
        tracker.log(metrics, *learned)
        checkpoints.step(metrics)
        if "record" in options:
            rows = batch.get(["prompt_ids", "response_ids", "log_probs", "old_log_probs", "advantages"])
            figures = {k: v for part in [metrics, *learned] for k, v in part.get().items()}
            plain = {name: rows[name].tolist() for name in rows.columns}
            record.write(json.dumps({"step": checkpoints.done, "figures": figures, "rows": plain}) + "\n")
            record.flush()
        if checkpoints.done == int(options.get("die", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
    actor.save(run / "model")
    tracker.finish()


if __name__ == "__main__":
    where, model, prompts, algorithm, steps, *rest = sys.argv[1:]
    main(Path(where), model, prompts, algorithm, int(steps), dict(one.split("=", 1) for one in rest))

"""Run directories as `hf.Tracker` writes them, made up."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import yaml

START = 1_760_000_000.0
HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 2'> \u2028 <!-- ${x} {DATA}"
PLAN = (  # role, method, share of an iteration, waits for its inputs
    ("actor", "generate_sequences", 0.45, 0.0),
    ("reward", "compute_reward", 0.05, 0.02),
    ("reference", "compute_ref_log_prob", 0.1, 0.01),
    ("actor", "compute_log_prob", 0.1, 0.0),
    ("actor", "update_actor", 0.22, 0.03),
)


def write_run(
    directory: Path,
    steps: int = 12,
    devices: int = 4,
    seed: int = 0,
    restart: int | None = None,
    samples_every: int = 2,
    more_metrics: int = 0,
    response_tokens: int = 12,
) -> Path:
    """A run of `steps` iterations; iteration 3 takes three times as long; `restart`: an iteration lost time."""
    rng = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    config = {"seed": seed, "actor": {"optim": {"lr": 1e-5 * (seed + 1)}, "train": {"tp": 2}}, "name": HOSTILE}
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    (directory / "notes.json").write_text(json.dumps({"accuracy_before": 0.25}))
    places = [
        {"pool": "main", "rank": rank, "node": f"n{rank // 2}", "device": f"cuda:{rank % 2}"} for rank in range(devices)
    ]
    memory = {f"main/{rank}": 60_000_000_000 for rank in range(devices)}
    run = {
        "kind": "run",
        "time": START,
        "devices": [{**place, "name": "H100", "memory": 80_000_000_000} for place in places],
        "roles": {
            role: {"pool": "main", "ranks": list(range(devices)), "class": role, "layout": "1-2-2"}
            for role in ("actor", "reward")
        },
        "plan": {"seconds": 9.0, "memory": memory},
    }
    events, metrics, samples, now = [run], [], [], START
    for step in range(1, steps + 1):
        length = 10.0 * (3 if step == 3 else 1) * rng.uniform(0.95, 1.05)
        if step == restart:
            events.append({"kind": "restart", "step": step, "start": now, "end": now + 7, "what": f"host n1 {HOSTILE}"})
            events.append(run)
            now += 7
        events += iteration(step, now, length, devices, rng)
        reward = step / steps + rng.gauss(0, 0.03)
        line = {"step": step, "time/iteration": length, "time/total": now + length - START, "reward/mean": reward}
        line |= {f"figure/{number:03d}": rng.random() for number in range(more_metrics)}
        metrics.append(line | {"kl/ref": 0.01 * step, "actor/loss": None if step == 5 else -reward})
        now += length
        if step % samples_every == 0:
            samples += [sample(step, number, response_tokens, rng) for number in range(8)]
    for name, lines in (("metrics", metrics), ("samples", samples), ("events", events)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def iteration(step: int, start: float, length: float, devices: int, rng: random.Random) -> list[dict[str, Any]]:
    """Calls on every device, a switch inside generation, a transfer on device 0, and the loader before."""
    out: list[dict[str, Any]] = [{"kind": "wait", "step": step, "what": "loader", "start": start, "end": start + 0.3}]
    at = start + 0.3
    for seq, (role, method, share, wait) in enumerate(PLAN):
        for rank in range(devices):
            came = at + wait * length * (rank % 2)
            worked = came + share * length * rng.uniform(0.9, 1.0)
            size = int(2e10 * (1 + seq) * rng.uniform(0.7, 0.75))
            same = {"step": step, "seq": step * 10 + seq, "role": role, "pool": "main", "rank": rank, "failed": False}
            same |= {"bytes_in": 10_000, "bytes_out": 20_000, "memory_before": size // 2, "memory_after": size // 2}
            times = {"start": at, "ready": came, "end": worked}
            out.append({"kind": "call", **same, **times, "method": method, "peak": size, "rows": 64, "tokens": 4096})
            if seq == 0:
                out.append({"kind": "switch", **same, **span(at, at + 0.4), "method": f"{method}/transition"})
                out.append({"kind": "stage", **same, **span(at + 0.4, worked), "method": f"{method}/generation"})
        at += (share + wait) * length
    same |= {"role": "actor", "rank": 0, "peak": None}
    times = {"start": at, "ready": at + 0.05, "end": at + 0.03 * length}
    out.append({"kind": "transfer", **same, **times, "method": "sync_weights"})
    return sorted(out, key=lambda event: event["end"])


def span(start: float, end: float) -> dict[str, Any]:
    return {"start": start, "ready": start, "end": end, "peak": None}


def sample(step: int, number: int, tokens: int, rng: random.Random) -> dict[str, Any]:
    words = [rng.choice(["one", " two", " three", " 4", "\n"]) for _ in range(tokens)]
    response = HOSTILE if number == 1 else "".join(words)
    return {
        "step": step,
        "title": "samples",
        "group": number // 4,
        "prompt": f"prompt {step}/{number // 4} {HOSTILE}",
        "response": response,
        "rewards": round(rng.random(), 4),
        "finished": number % 3 > 0,
        "tokens": [HOSTILE, *words[1:]] if number == 1 else words,
        "log_probs": [-rng.random() * 4 for _ in words],
        "advantages": [rng.gauss(0, 1) for _ in words],
        "policy_version": [step - (i < tokens // 2) for i in range(tokens)],
    }

"""A driver that tests kill and continue: PPO, or GRPO with `rollout=1` (a stream with `stream=1`, elastic with
`elastic=1`), on a tiny model.

python resuming_driver.py RUN MODEL PROMPTS STEPS [key=value ...]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

import hybridflow as hf
from hybridflow.cluster import liveness
from hybridflow.streams.stream import ResponseStream
from tests.integration import throttled

STRATEGIES: dict[str, Any] = {
    "p2d2": hf.Megatron(pp=2),
    "t2d2": hf.Megatron(tp=2),
    "t2": hf.Megatron(tp=2),
    "d2": hf.Megatron(),
    "fsdp": hf.FSDP(),
    "hsdp": hf.FSDP(replicate=2),
    "zero3": hf.ZeRO(stage=3),
    "zero1": hf.ZeRO(stage=1),
}


def reward(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
    return [sum(letter in "abcdefgh" for letter in text) / max(len(text), 1) for text in completions]


class Fault(threading.Thread):
    """Sends signals to the process of the group's rank 1.

    `faults` are "call:step:signal", separated by commas: one comes when that runs `call` in iteration `step`.
    """

    def __init__(self, group: hf.WorkerGroup, faults: str) -> None:
        super().__init__(daemon=True)
        self.group, self.iterations = group, group.session.iterations
        self.paused = threading.Event()
        self.faults = [fault.split(":") for fault in faults.split(",")]

    def run(self) -> None:
        for call, step, name in self.faults:
            while (self.iterations.step or 0) < int(step):
                time.sleep(0.002)
            self.send(call, getattr(signal, name))

    def send(self, call: str, number: int) -> None:
        if call == "idle":
            self.paused.wait()
        host = self.group.ranks.hosts[1]  # after the pause: a fault before it may have replaced the hosts
        while True:
            if call == "__init__":  # of a group that is built again
                host = self.group.ranks.hosts[1]
            doing = liveness.ask(host.address)
            now = doing if isinstance(doing, str) else doing.call or "idle"
            if now.endswith(call):
                time.sleep({"idle": 0.5, "advance_rows": 0.2}.get(call, 0))
                os.kill(pid := process_of(host), number)
                print(f"fault: {number} to {pid} in {now} at {time.time()}", flush=True)
                return
            time.sleep(0.002)


def process_of(host: Any) -> int:
    import ray

    port = ray.get(host.address)[1]
    listening = (one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN)
    return next(one.pid for one in listening if one.laddr.port == port)


def main(run: Path, model: str, prompts: str, steps: int, options: dict[str, str]) -> None:
    devices, layout = [int(n) for n in options.get("devices", "2").split("+")], STRATEGIES[options.get("layout", "t2")]
    critic_layout = STRATEGIES[options.get("critic", options.get("layout", "t2"))]
    deadline = float(options.get("deadline", 60))
    tolerate = float(options.get("tolerate", 0))
    own_cluster = None if "RAY_ADDRESS" in os.environ else 6
    waits: Any = {"peer_timeout": float(options.get("peers", 4 * deadline)), "collective_timeout": deadline}
    hf.init(devices=own_cluster, wait_for_devices=float(options.get("wait", 0)), tolerate=tolerate, **waits)
    loader = hf.PromptLoader(prompts, batch_size=8, steps=steps, seed=3, tokenizer=None)
    elastic = "elastic" in options
    pool = hf.ResourcePool([3] if elastic else devices, nodes=options["at"].split("+") if "at" in options else ())
    own = pool[:1] if elastic else pool
    streams, apart = "stream" in options or elastic, "rollout" in options
    generate = hf.VLLM(tp=1, sampling=hf.Sampling(max_tokens=40 if streams else 6, seed=5, ignore_eos=streams))
    actor = hf.ActorWorker.on(
        own, model=model, train=layout, optim=hf.Adam(lr=0.01, warmup_steps=4), generate=None if apart else generate
    )  # fmt: skip
    where = pool if elastic else hf.ResourcePool([2]) if apart else None
    rollout = hf.RolloutWorker.on(where, model=model, generate=generate) if where else actor
    decay = float(options["ema"]) if "ema" in options else None
    copies: dict[str, Any] = {"offload": True, "dies": str(run / "died")} if "dies" in options else {}
    reference_class = throttled.Reference if copies else hf.ReferenceWorker
    reference = reference_class.on(own, model=model, train=layout, ema_decay=decay, **copies)
    judge = hf.RewardWorker.on(pool, function=reward)
    critic = None
    if not apart:
        settings: dict[str, Any] = {"optim": hf.Adam(lr=0.01), "offload": bool(copies)}
        critic = hf.CriticWorker.on(pool, model=model, train=critic_layout, **settings)
    tracker = hf.Tracker(run, total=steps, console=False)
    checkpoints = hf.Checkpoints(
        options.get("checkpoints", run / "checkpoints"),
        every=int(options.get("every", 2)),
        asynchronous=options.get("asynchronous", "1") == "1",
        resume=options.get("resume", "auto"),
        best="reward/mean",
        batches="batches" in options,
        in_memory="in_memory" in options,
    )
    kl = hf.algorithms.AdaptiveKL(init=0.05, target=0.5, horizon=100)
    record = (run / "record.jsonl").open("a")
    fault = Fault(rollout, options.get("fault", ""))
    if "fault" in options:
        fault.start()

    staleness = int(options.get("staleness", 2))
    bounds: Any = {"rows": 16, "n": 2, "max_staleness": staleness, "call_seconds": 0.01, "copy_seconds": 0.001}
    source = loader
    if elastic:  # the policy with the most switches
        groups: Any = {"actor": actor, "rollout": rollout, "inference": [reference]}
        source = hf.Elastic(pool, **groups, policy="rlinf").stream(loader, n=2, minibatches=2, call_seconds=0.01)
    elif streams:
        source = hf.stream(loader, rollout, **bounds)

    def at(phase: str, *before: Any) -> None:
        """In `phase` of iteration 3, once: the machine that is then lost is stopped before the driver goes on."""
        if checkpoints.done == 2 and phase == options.get("phase"):
            del options["phase"]
            _ = [part.get() for part in before]
            print("phase", phase, flush=True)
            while not (run / "stopped").exists():
                time.sleep(0.05)

    def loop() -> None:
        for batch in checkpoints.resume(source):
            print("nodes", *(host.node_name for host in (where or own).hosts), flush=True)
            print(f"iteration {checkpoints.done + 1} at {time.time():.2f}", flush=True)
            at("idle")
            at("generate")
            if not streams:
                batch = rollout.generate_sequences(batch, n=2)
            batch |= actor.compute_log_prob(batch)
            batch |= reference.compute_ref_log_prob(batch)
            batch |= judge.compute_reward(batch)
            if critic is not None:
                batch |= critic.compute_values(batch)
                batch |= hf.compute_advantage(batch, "gae", kl_coef=kl)
                at("update", batch)
                learned = [critic.update_critic(batch, minibatches=2), actor.update_actor(batch, minibatches=2)]
            else:
                batch |= hf.compute_advantage(batch, "grpo")
                at("update", batch)
                learned = [actor.update_actor(batch, kl_coef=0.02, minibatches=2)]
            if apart and not elastic:
                at("sync", *learned)
                hf.sync_weights(actor, rollout)
            if decay is not None:
                hf.sync_weights(actor, reference)
            metrics = batch.metrics()
            tracker.log(metrics, *learned)
            at("save", *learned)
            checkpoints.step(metrics)
            if "record" in options:
                names = ["prompt_ids", "response_ids", "log_probs", "old_log_probs", "advantages"]
                rows = batch.get(names + ["group_id", "policy_version"] * streams)
                figures = {k: v for part in [metrics, *learned] for k, v in part.get().items()}
                figures |= source.metrics() if isinstance(source, ResponseStream) else {}
                plain = {name: rows[name].tolist() for name in rows.columns}
                record.write(json.dumps({"step": checkpoints.done, "figures": figures, "rows": plain}) + "\n")
                record.flush()
            if checkpoints.done == int(options.get("pause", -1)):
                del options["pause"]
                _ = [part.get() for part in learned]  # all calls have ended; the fault comes now
                fault.paused.set()
                while not rollout.session.lost_hosts:
                    time.sleep(0.05)
            if checkpoints.done == int(options.get("ask", -1)):
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoints.done == int(options.get("die", -1)):
                os.kill(os.getpid(), signal.SIGKILL)

    while True:
        try:
            loop()
            break
        except hf.errors.HybridFlowError as error:
            if "retry" not in options or "max_restarts" in str(error):
                raise
            print(f"caught at {time.time()}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    actor.save(run / "model")
    tracker.finish()


def as_function(arguments: list[str]) -> None:
    where, model, prompts, steps, *rest = arguments
    main(Path(where), model, prompts, int(steps), dict(one.split("=", 1) for one in rest))


if __name__ == "__main__":
    as_function(sys.argv[1:])

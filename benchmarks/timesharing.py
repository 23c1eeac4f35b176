"""Time of two trainings on the same four pipeline stages, together over serial: predicted, asleep, and computed.

`asleep`: stages of real processes run a schedule with messages over gloo, and sleep in place of computing. `error` is
the wall time over that of the simulation, which prices neither messages nor Python. `computed`: updates of a random
actor and critic by `hf.together` and in series; stages share the cores of this machine, so a gain needs as many cores
as stages. Medians over `--repeats`, the two ways in turns. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import hybridflow as hf
from hybridflow.engines.megatron.engine import StageMessages, StagePass
from hybridflow.engines.micro_batches import MicroBatch
from hybridflow.planner.pipeline.schedule import Schedule, Work, one_f_one_b, simulate
from hybridflow.planner.pipeline.shared_schedule import together
from hybridflow.topology import RankGrid

STAGES = 4
CASES = {
    "figure 5": (Work(micro_batches=(4,), backward=1.0), Work(micro_batches=(4,), backward=1.0)),
    "alike": (Work(micro_batches=(8,)), Work(micro_batches=(8,))),
    "mini-batches": (Work(micro_batches=(4, 4)), Work(micro_batches=(4, 4))),
    "unlike": (Work(micro_batches=(8, 8)), Work(micro_batches=(6,), forward=2.0, backward=5.0)),
}


class Asleep(torch.autograd.Function):
    """The identity, which takes some seconds forward and backward."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        time.sleep(forward)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.backward_seconds)
        return gradients[0], None, None


class SleepingModel:
    """One stage of a model without weights, for `StagePass`."""

    config = SimpleNamespace(sequence_parallel=False, hidden_size=64, pipeline_dtype=torch.float32)

    def __init__(self, work: Work, slot: float) -> None:
        self.work, self.slot = work, slot
        self.set_input_tensor([torch.ones(16, 1, 64, requires_grad=True)])

    def set_input_tensor(self, given: list[Tensor]) -> None:
        self.given = given[0]

    def __call__(self, micro: MicroBatch) -> Tensor:
        return Asleep.apply(self.given, self.slot * self.work.forward, self.slot * self.work.backward)  # type: ignore[no-any-return]


class SleepingStages:
    """One rank that runs schedules of sleeping models."""

    def __init__(self) -> None:
        self.messages = [StageMessages(self.context) for _ in range(2)]  # type: ignore[attr-defined]

    @hf.register(hf.ONE_TO_ALL)
    def run(self, schedules: list[Schedule], slot: float) -> float:
        """Seconds of these schedules, one after the other, from when all ranks begin."""
        context = self.context  # type: ignore[attr-defined]
        at, device = context.coords.p, torch.device("cpu")
        nothing = torch.zeros(0, dtype=torch.int64)
        micro = MicroBatch(nothing, torch.zeros(1, 16, dtype=torch.int64), nothing, nothing, nothing)
        loss = (lambda micro, out: out.sum()) if at == STAGES - 1 else None
        dist.barrier(context.groups.everyone())
        start = time.perf_counter()
        for schedule in schedules:
            models = [SleepingModel(work, slot) for work in schedule.works]
            passes: dict[tuple[int, int], StagePass] = {}
            for each in schedule.stages[at]:
                model, count = models[each.model], schedule.works[each.model].micro_batches[each.step]
                if (key := (each.model, each.step)) not in passes:
                    messages, micro_batches = self.messages[each.model], [micro] * count
                    passes[key] = StagePass(model, messages, micro_batches, device, model, loss, lambda _: False)
                if each.kind != "finish":
                    passes[key].run(each)
        for messages in self.messages:
            messages.flush()
        return time.perf_counter() - start


def asleep(group: hf.WorkerGroup, works: tuple[Work, ...], slot: float, repeats: int) -> dict[str, Any]:
    ways = {"serial": [one_f_one_b(STAGES, work) for work in works], "together": [together(STAGES, works)]}
    predicted = {way: slot * sum(simulate(one).makespan for one in each) for way, each in ways.items()}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        for way, schedules in ways.items():
            spent = max(group.run(schedules, slot).get())
            seconds[way] += [spent] if turn else []  # the first connects the processes
    measured = {way: statistics.median(each) for way, each in seconds.items()}
    return {
        "predicted": {way: round(each, 3) for way, each in predicted.items()},
        "seconds": {way: round(each, 3) for way, each in measured.items()},
        "error": {way: round(measured[way] / predicted[way] - 1, 4) for way in ways},
        "predicted_speedup": round(predicted["serial"] / predicted["together"], 4),
        "speedup": round(measured["serial"] / measured["together"], 4),
    }


def random_model(directory: Path) -> Path:
    """A small Llama with random weights as a Hugging Face directory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8}
    LlamaForCausalLM(LlamaConfig(**heads, **sizes, max_position_embeddings=512)).save_pretrained(directory)
    return directory


def computed(pool: hf.ResourcePool, directory: Path, rows: int, repeats: int) -> dict[str, Any]:
    """Seconds of updates of a small actor and critic, eight micro-batches in each of two mini-batches."""
    model = random_model(directory)
    train, optim = hf.Megatron(pp=STAGES, micro_tokens=512), hf.Adam(lr=1e-5)
    actor = hf.ActorWorker.on(pool, model=model, train=train, optim=optim)
    critic = hf.CriticWorker.on(pool, model=model, train=train, optim=optim)
    generator = torch.Generator().manual_seed(0)
    lengths = [128] * rows

    def column(values: Tensor) -> hf.Ragged:
        return hf.Ragged.from_lengths(values, lengths)

    tokens = sum(lengths)
    columns: dict[str, Any] = {
        name: column(torch.randn(tokens, generator=generator)) for name in ("advantages", "values", "returns")
    }
    columns["old_log_probs"] = column(torch.randn(tokens, generator=generator) - 3.0)
    columns["response_mask"] = column(torch.ones(tokens, dtype=torch.bool))
    for name in ("prompt_ids", "response_ids"):
        columns[name] = column(torch.randint(3, 20, (tokens,), generator=generator))
    batch = hf.BatchRef.from_batch(hf.Batch(columns))
    seconds: dict[str, list[float]] = {"serial": [], "together": []}
    for turn in range(repeats + 1):
        for way, spent in seconds.items():
            start = time.perf_counter()
            updates = [actor.update_actor(batch, minibatches=2)]
            if way == "serial":
                updates[0].done()  # sends it
            updates.append(critic.update_critic(batch, minibatches=2))
            for update in hf.together(*updates) if way == "together" else updates:
                update.get()
            if turn:
                spent.append(time.perf_counter() - start)
    measured = {way: statistics.median(each) for way, each in seconds.items()}
    return {
        "seconds": {way: round(each, 3) for way, each in measured.items()},
        "speedup": round(measured["serial"] / measured["together"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--slot", type=float, default=0.1, help="seconds of a forward that sleeps")
    parser.add_argument("--rows", type=int, default=16)
    args = parser.parse_args()
    pool = hf.ResourcePool([STAGES])
    group = hf.place(SleepingStages, pool, name="stages", grid=RankGrid(p=STAGES))
    line: dict[str, Any] = {"benchmark": "timesharing", "stages": STAGES, "slot": args.slot}
    line["asleep"] = {name: asleep(group, works, args.slot, args.repeats) for name, works in CASES.items()}
    with tempfile.TemporaryDirectory() as directory:
        line["computed"] = computed(pool, Path(directory) / "model", args.rows, args.repeats)
    hf.shutdown()
    print(json.dumps(line))


if __name__ == "__main__":
    main()

"""A driver whose groups change their sizes, and whose host 1 dies in a switch of the third iteration.

python resizing_driver.py RUN MODEL FAULT     FAULT: a file, as `shown_actor.Shown` reads them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hybridflow as hf
from hybridflow.streams.elastic_devices import GroupSizes
from tests import tiny_models
from tests.integration.shown_actor import ADAM, Shown

STEPS = 4


def train(seed: int, actor: hf.WorkerGroup, reference: hf.WorkerGroup) -> None:
    rows = hf.BatchRef.from_batch(tiny_models.make_rows(8, seed=seed))
    rows |= reference.compute_ref_log_prob(rows)
    actor.update_actor(rows, kl_coef=0.1)


def main(run: Path, model: Path, fault: str) -> None:
    prompts = run / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "abcdefgh"))
    hf.init(devices=2, peer_timeout=80, collective_timeout=20)
    pool = hf.ResourcePool([2])
    loader = hf.PromptLoader(prompts, batch_size=4, steps=STEPS, seed=3, tokenizer=None)
    actor = Shown.on(pool[:1], model=model, train=hf.FSDP(), optim=ADAM, name="actor")
    reference = hf.ReferenceWorker.on(pool, model=model, train=hf.Megatron())
    elastic = [GroupSizes(group, pool, (1, 2)) for group in (actor, reference)]
    checkpoints = hf.Checkpoints(run / "checkpoints", every=2, resume="auto")

    def loop() -> None:
        nonlocal fault
        for _ in checkpoints.resume(loader):
            for size in (1, 2):
                for sizes in elastic:
                    sizes.resize(size)
                if checkpoints.done == 2 and size == 1 and fault:
                    (model / fault).write_text("0 die")
                    fault = ""
                train(2 * checkpoints.done + size - 1, actor, reference)
            checkpoints.step()

    while True:
        try:
            loop()
            break
        except hf.errors.HybridFlowError as error:
            print(f"caught: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            assert elastic[0].size == 1, "the old placement is that of the group"
    actor.save(run / "model")


if __name__ == "__main__":
    where, model, fault = sys.argv[1:]
    main(Path(where), Path(model), fault)

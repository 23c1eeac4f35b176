"""A driver whose groups change their sizes, and whose host 1 dies in switches of the third iteration, and of later ones.

python resizing_driver.py RUN [FAULT ...]     FAULT: as `tests.integration.test_resizing.Shown` reads them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import hybridflow as hf
from hybridflow.resizing import GroupSizes
from tests import tiny_models
from tests.integration.test_resizing import ADAM, Shown

STEPS = 6


def main(run: Path, faults: list[str]) -> None:
    model = tiny_models.make_policy(run / "policy")
    prompts = run / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in "abcdefgh"))
    hf.init(devices=2, peer_timeout=80, collective_timeout=20)
    pool = hf.ResourcePool([2])
    loader = hf.PromptLoader(prompts, batch_size=4, steps=STEPS, seed=3, tokenizer=None)
    actor = Shown.on(pool[:1], model=model, train=hf.FSDP(), optim=ADAM, name="actor")
    reference = hf.ReferenceWorker.on(pool, model=model, train=hf.Megatron())
    elastic = [GroupSizes(actor, pool, (1, 2)), GroupSizes(reference, pool, (1, 2))]
    checkpoints = hf.Checkpoints(run / "checkpoints", every=2, resume="auto")

    def loop() -> None:
        for _ in checkpoints.resume(loader):
            for size in (1, 2):
                for group in elastic:
                    group.resize(size)
                    assert group.group.memory()[0]["memory/parameters"] > 0
                if checkpoints.done in (2, 4) and size == 1 and len(faults) == 3 - checkpoints.done // 2:
                    (model / faults.pop(0)).write_text("0 die")
                rows = hf.BatchRef.from_batch(tiny_models.make_rows(8, seed=2 * checkpoints.done + size))
                rows |= reference.compute_ref_log_prob(rows)
                actor.update_actor(rows, kl_coef=0.1)
            checkpoints.step()

    while True:
        try:
            loop()
            break
        except hf.errors.HybridFlowError as error:
            print(f"caught: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    actor.save(run / "model")


if __name__ == "__main__":
    where, *rest = sys.argv[1:]
    main(Path(where), rest)

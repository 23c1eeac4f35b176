"""A driver whose session shares stages by itself. Prints what its updates gave, and whether they ran at the same time.

    python sharing_driver.py POLICY CRITIC FILE

It ends while an update is held whose loss writes FILE.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import hybridflow as hf
from hybridflow.cluster import held_calls
from hybridflow.cluster.future import Future
from tests.tiny_models import make_rows

TRAIN, ADAM = hf.Megatron(pp=2, micro_tokens=24), hf.Adam(lr=1e-3)
Between = Callable[[Future, hf.BatchRef], Any]


def writes(file: str, outputs: Any, rows: Any, totals: Any) -> Any:
    Path(file).touch()
    return outputs["log_probs"].values.sum()


def updates(pool: hf.ResourcePool, policy: str, value_model: str, between: Between) -> dict[str, Any]:
    """What an update of a new actor and of a new critic give, with `between(actor's update, a computed batch)`."""
    actor = hf.ActorWorker.on(pool, model=policy, train=TRAIN, optim=ADAM)
    critic = hf.CriticWorker.on(pool, model=value_model, train=TRAIN, optim=ADAM)
    rows = hf.BatchRef.from_batch(make_rows(12))
    values = critic.compute_values(rows)
    first = actor.update_actor(rows, minibatches=2)
    between(first, values)
    second = critic.update_critic(rows, minibatches=3)
    metrics = [first.get(), second.get()]
    one, other = [next(e for e in pool.events()[::-1] if e.method == f"update_{role}") for role in ("actor", "critic")]
    computed = (actor.compute_log_prob(rows) | critic.compute_values(rows)).get()
    weights = hashlib.sha256(b"".join(computed[n].values.numpy().tobytes() for n in ("old_log_probs", "values")))
    actor.close()
    critic.close()
    together = max(one.start, other.start) < min(one.end, other.end)
    return {"together": together, "metrics": metrics, "outputs": weights.hexdigest()}


def main(policy: str, value_model: str, file: str) -> None:
    held_calls.HELD_SECONDS = 60.0  # also where this process waits for others
    hf.init(devices=2, time_sharing=True)
    pool = hf.ResourcePool([2])
    found: list[Between] = [lambda update, _: update.get(), lambda *_: None, lambda _, values: values.get()]
    for between in found:
        print("found:", json.dumps(updates(pool, policy, value_model, between)), flush=True)
    actor = hf.ActorWorker.on(pool, model=policy, train=TRAIN, optim=ADAM)
    hf.CriticWorker.on(pool, model=value_model, train=TRAIN, optim=ADAM)
    actor.update_actor(hf.BatchRef.from_batch(make_rows(12)), loss=partial(writes, file))
    hf.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

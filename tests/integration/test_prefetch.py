"""Offloaded models in PPO: their returns hide behind the calls before them, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.tracking.report.record import read_events
from tests.integration import throttled
from tests.tiny_models import make_rows

STEPS, HIDDEN = 4, 0.7
STRATEGIES: dict[str, Any] = {
    "megatron": hf.Megatron(tp=2),
    "fsdp": hf.FSDP(),
    "zero": hf.ZeRO(stage=2),
}


@pytest.fixture
def ppo(place, hosts, policy, tmp_path, settle, no_parts) -> Callable[..., Any]:
    """PPO on given responses: what it computed in each iteration, its last weights, events, and seconds of the link."""

    def run(strategy: Any, name: str, offload: bool) -> tuple[list[Any], dict[str, Any], list[dict], list[Any]]:
        pool = hosts[0:2]
        model: dict[str, Any] = {"model": policy, "train": strategy}
        adam = hf.Adam(lr=0.01)
        gate = place(throttled.Gate, pool, name=f"{name}-gate")
        actor = place(throttled.Actor, pool, name=f"{name}-actor", **model, optim=adam)
        reference = place(throttled.Reference, pool, name=f"{name}-reference", **model, offload=offload)
        critic = place(throttled.Critic, pool, name=f"{name}-critic", **model, optim=adam, offload=offload)
        found, directory = [], tmp_path / name
        with hf.Tracker(directory, console=False) as tracker:
            for step in range(STEPS):
                opened = tmp_path / f"{name}-{step}"
                gate.wait(str(opened))
                rows = make_rows(8, seed=step).without("old_log_probs", "advantages", "values", "returns")
                batch = actor.compute_log_prob(rows) | hf.BatchRef.from_batch(rows)
                batch |= reference.compute_ref_log_prob(batch)
                batch |= critic.compute_values(batch)
                batch |= hf.BatchRef.from_batch(rows.select("row_id").with_columns(rewards=rows["num_tokens"].float()))
                batch |= hf.compute_advantage(batch, "gae", kl_coef=0.05)
                learned = [critic.update_critic(batch, minibatches=2), actor.update_actor(batch, minibatches=2)]
                opened.write_text("")
                tracker.log(*learned)
                columns = batch.get(["old_log_probs", "ref_log_probs", "values", "advantages"])
                found.append([{n: columns[n].tolist() for n in columns.columns}, *(one.get() for one in learned)])
        weights = load_file(Path(actor.save(tmp_path / f"{name}-model")) / "model.safetensors")
        weights |= {
            f"critic.{k}": v
            for k, v in load_file(Path(critic.save(tmp_path / f"{name}-critic")) / "model.safetensors").items()
        }
        settle()
        return found, weights, read_events(directory), reference.link_seconds() if offload else []

    return run


@pytest.mark.parametrize("name", STRATEGIES)
def test_returns_hide_behind_the_calls_before_them(ppo, name):
    plain, weights, _, _ = ppo(STRATEGIES[name], f"{name}-plain", offload=False)
    found, others, events, seconds = ppo(STRATEGIES[name], name, offload=True)
    assert found == plain
    assert all(others[key].equal(tensor) for key, tensor in weights.items())
    for copied, stalled in seconds:
        assert copied == pytest.approx(STEPS * throttled.SECONDS)
        assert stalled <= (1 - HIDDEN) * copied

    def sizes(what: str) -> list[tuple[int, int]]:
        mine = [one for one in events if one.get("method") == what and one["rank"] == 0]
        return [(one["bytes_in"], one["bytes_out"]) for one in mine]

    (whole, _), *rest = sizes("compute_ref_log_prob/prefetch")
    assert rest == [(whole, 0)] * (STEPS - 1)  # 1.0 times in, nothing out
    assert sizes("compute_ref_log_prob/reload") == sizes("compute_ref_log_prob/offload") == [(0, 0)] * STEPS
    (whole, _), *rest = sizes("compute_values/prefetch")
    assert rest == [(whole, 0)] * (STEPS - 1)
    assert sizes("compute_values/offload") == [(0, 0)] * STEPS
    (state, _), *rest = sizes("update_critic/reload")  # behind a call of the same model
    assert state > whole
    assert rest == [(state, 0)] * (STEPS - 1)
    assert sizes("update_critic/offload") == [(0, state)] * STEPS

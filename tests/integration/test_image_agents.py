"""Conversations with images: rows to train on have the tokens and log-probabilities of generation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

import hybridflow as hf
from hybridflow.data.prompts import PromptSource
from tests.example_agents import Echo, Gallery, looks
from tests.vision_models import CHAT, IMAGE, KINDS, make_vision, noise, outputs

SAMPLING = hf.Sampling(max_tokens=40, seed=5, n=2, stop_token_ids=tuple(range(6, 50)))


@pytest.fixture(scope="module", params=list(zip(KINDS, (1, 2), strict=True)), ids=lambda one: f"{one[0]}-tp{one[1]}")
def acting(request, hosts, tmp_path_factory) -> Iterator[tuple[hf.WorkerGroup, Path]]:
    """An actor that generates and trains, and its model."""
    kind, tp = request.param
    model = make_vision(tmp_path_factory.mktemp("model"), kind, template=CHAT)
    generate = hf.VLLM(tp=tp, kv_cache_gb=0.02, max_sequences=16, sampling=SAMPLING)
    train = hf.FSDP(micro_tokens=200)
    actor = hf.ActorWorker.on(hosts[0:tp], model=model, train=train, optim=hf.SGD(lr=0.1), generate=generate)
    yield actor, model
    actor.close()


def prompts(model: Path, *counts: int) -> hf.Batch:
    """Rows with so many images each."""
    pictures = iter(range(sum(counts)))
    rows = []
    for count in counts:
        content: list[dict[str, str]] = [{"type": "text", "text": "w1 w2"}, *[{"type": "image"}] * count]
        images = [noise(number, 64 + 32 * (number % 2), 96) for number in (next(pictures) for _ in range(count))]
        rows.append({"prompt": [{"role": "user", "content": content}], "images": images})
    return next(iter(PromptSource(rows, batch_size=len(rows), processor=str(model), shuffle=False)))


def agrees(actor: hf.WorkerGroup, model: Path, batch: Any) -> hf.Batch:
    """The rows, whose log-probabilities are those of training, and of transformers; an update computes gradients."""
    batch |= actor.compute_log_prob(batch)
    found = batch.get()
    kept = found["response_mask"].values
    there: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        wanted = outputs(there, found)["log_probs"].values
    for mine in ("log_probs", "old_log_probs"):
        assert (found[mine].values - wanted)[kept].abs().max() < 1e-3, mine
    assert not kept[found["response_ids"].values == IMAGE].any()
    batch |= hf.Batch({"advantages": found["log_probs"].map(torch.ones_like)})
    assert actor.update_actor(batch, minibatches=1).get()["actor/grad_norm"] > 0
    return found


def test_prompts_with_images_begin_conversations(acting):
    actor, model = acting
    begun = hf.save(model / "begun", [actor])
    own = prompts(model, 1, 0, 2)
    found = agrees(actor, model, actor.generate_sequences(own, environment=Echo, max_turns=3))
    hf.load(begun, [actor])
    assert set(found["stop"]) == {"done"}
    assert found["turns"].tolist() == [3] * 6
    several = torch.arange(3).repeat_interleave(2)
    for name in ("pixel_values", "image_grid_thw"):
        assert found[name].equal(own[name].index(several)), name
    assert found["images"] == [row for row in own["images"] for _ in range(2)]


def test_environments_show_images_in_several_turns(acting):
    actor, model = acting
    hf.load(model / "begun", [actor])
    own = prompts(model, 1, 0, 2).with_columns(shows=[True, "late", False])
    found = agrees(actor, model, actor.generate_sequences(own, environment=Gallery, max_turns=3))
    assert set(found["environment_failure"]) == {None}
    assert found["turns"].tolist() == [3] * 6
    assert [len(grids) for grids in found["image_grid_thw"].rows()] == [3, 3, 1, 1, 2, 2]
    shown = [int((ids == IMAGE).sum()) > 0 for ids in found["response_ids"].rows()]
    assert shown == [True, True, True, True, False, False]
    first, second = (found[name].rows()[0] for name in ("pixel_values", "image_grid_thw"))
    assert first[: len(own["pixel_values"].row(0))].equal(own["pixel_values"].row(0))
    assert len(first) == int(second.prod(-1).sum())


def test_programs_show_images_in_several_conversations(acting):
    actor, model = acting
    hf.load(model / "begun", [actor])
    found = agrees(actor, model, actor.run(prompts(model, 1, 0), looks))
    assert set(found["environment_failure"]) == {None}
    assert [len(grids) for grids in found["image_grid_thw"].rows()] == [2, 1, 2, 1, 1, 1, 1, 1]

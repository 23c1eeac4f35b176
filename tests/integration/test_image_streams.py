"""Streams of prompts with images: staleness, weights in the middle of responses, rewards, continuing, environments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import hybridflow as hf
from hybridflow.data.prompts import PromptSource
from hybridflow.errors import PromptError
from tests.example_agents import Echo, Gallery, looks
from tests.vision_models import CHAT, IMAGE, KINDS, make_vision, noise, outputs

SAMPLING = hf.Sampling(max_tokens=12, seed=5, stop_token_ids=tuple(range(6, 50)))
WIDTHS = [64, 96, 128, 0, 160, 192, 0, 224]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_vision(tmp_path_factory.mktemp("model"), "qwen3_vl", template=CHAT)


@pytest.fixture(scope="module")
def actor(keep, pool, model) -> hf.WorkerGroup:
    return keep(hf.ActorWorker, pool[0:1], model=model, train=hf.FSDP(micro_tokens=200), optim=hf.SGD(lr=0.1))


@pytest.fixture(scope="module")
def rollout(keep, pool, model) -> hf.WorkerGroup:
    generate = hf.VLLM(kv_cache_gb=0.02, max_sequences=16, sampling=SAMPLING)
    return keep(hf.RolloutWorker, pool[2:3], model=model, generate=generate)


def loader(model: Path, steps: int, **more: Any) -> hf.PromptLoader:
    rows = []
    for number, width in enumerate(WIDTHS):
        content: list[dict[str, str]] = [{"type": "text", "text": f"w{number}"}, *[{"type": "image"}] * (width > 0)]
        images = [noise(number, 64, width)] if width else []
        rows.append({"prompt": [{"role": "user", "content": content}], "images": images, "width": width, **more})
    return hf.PromptLoader(rows, batch_size=4, steps=steps, processor=str(model), seed=3)


def width_of(completions: list[str], images: list[list[Image.Image]]) -> list[float]:
    return [float(sum(one.width for one in own)) for own in images]


def trained(batch: hf.BatchRef, actor: hf.WorkerGroup, rollout: hf.WorkerGroup, version: int) -> tuple[hf.Batch, int]:
    """An iteration, and how many rows of the present version have its log-probabilities."""
    batch |= actor.compute_log_prob(batch)
    rows, checked = batch.get(), 0
    columns = (rows[name].rows() for name in ("policy_version", "response_mask", "log_probs", "old_log_probs"))
    for versions, mask, ours, theirs in zip(*columns, strict=True):
        if set(versions[mask].tolist()) == {version}:
            assert (ours - theirs)[mask].abs().max() < 1e-3
            checked += 1
    batch |= hf.Batch({"advantages": rows["log_probs"].map(torch.ones_like)})
    assert actor.update_actor(batch, minibatches=1).get()["actor/grad_norm"] > 0
    hf.sync_weights(actor, rollout)
    return rows, checked


def test_a_stream_of_prompts_with_images(place, pool, model, actor, rollout):
    hf.sync_weights(actor, rollout)
    seen, newest, widths = list[int](), 0, list[float]()
    judge = place(hf.RewardWorker, pool[0:1], function=width_of)
    stream = hf.stream(loader(model, 4), rollout, rows=8, n=2, max_staleness=1, call_seconds=0.01, ignore_eos=True)
    for number, batch in enumerate(stream):
        widths += (batch | judge.compute_reward(batch)).get("rewards")["rewards"].tolist()
        rows, checked = trained(batch, actor, rollout, number)
        newest += checked
        seen += [int(width) for width in rows["width"]]
        assert rows["image_grid_thw"].lengths.tolist() == [int(width > 0) for width in rows["width"]]
        assert number - 1 <= rows["policy_version"].values.min() <= rows["policy_version"].values.max() <= number
    assert widths == seen
    assert sorted(seen) == sorted(WIDTHS * 4)
    assert newest


def test_a_loop_that_was_left_begins_their_rows_anew(model, actor, rollout):
    hf.sync_weights(actor, rollout)
    stream = hf.stream(loader(model, 3), rollout, rows=8, n=2, max_staleness=1, call_seconds=0.01)
    seen = list[int]()
    for number in range(2):
        for batch in stream:
            seen += trained(batch, actor, rollout, -1)[0]["width"]
            if number == 0:
                break
    assert len(seen) == 24
    wanted = [width for batch in loader(model, 3).drawn() for width in batch["width"] for _ in range(2)]
    assert sorted(seen) == sorted(wanted)


@pytest.mark.parametrize("way", [{}, {"environment": Gallery, "max_turns": 3}], ids=["rows", "trajectories"])
def test_what_a_loaded_state_had_under_way_begins_anew(model, actor, rollout, way):
    """With copies asked for, of which rows with images have none."""
    hf.sync_weights(actor, rollout)
    settings: dict[str, Any] = {
        "rows": 8,
        "n": 2,
        "max_staleness": 2,
        "call_seconds": 0.001,
        "copy_seconds": 1e-4,
        **way,
    }
    stream = hf.stream(loader(model, 4, shows=True), rollout, **settings)
    stream.state()  # from now on there are copies
    batches: Any = iter(stream)
    _ = trained(next(batches), actor, rollout, -1)
    state = stream.state()
    under_way = [row for rows in rollout.withdraw_rows(keep=True).get() for row in rows]
    assert not any(IMAGE in row.get("prompt_ids", ()) for row in under_way)
    batches.close()
    stream.load_state(state)
    seen = [width for batch in stream for width in trained(batch, actor, rollout, -1)[0]["width"]]
    assert len(seen) == 24


def test_environments_show_images_in_streams(model, actor, rollout):
    hf.sync_weights(actor, rollout)
    newest = 0
    how: dict[str, Any] = {"environment": Gallery, "max_turns": 3, "max_staleness": 1, "call_seconds": 0.01}
    for number, batch in enumerate(hf.stream(loader(model, 2, shows=True), rollout, rows=8, n=2, **how)):
        rows, checked = trained(batch, actor, rollout, number)
        newest += checked
        assert set(rows["environment_failure"]) == {None}
        whole = [stop == "done" for stop in rows["stop"]]
        assert any(whole)
        counts = rows["image_grid_thw"].lengths.tolist()
        own = [int(width > 0) for width in rows["width"]]
        assert all(count == given + 2 for count, given, all_ in zip(counts, own, whole, strict=True) if all_)
    assert newest


def test_elastic_devices_refuse_images(pool, place, model, actor):
    rollout = place(hf.RolloutWorker, pool[0:2], name="wide", model=model, generate=hf.VLLM(kv_cache_gb=0.02))
    elastic = hf.Elastic(pool[0:2], actor=actor, rollout=rollout, policy="static")
    with pytest.raises(PromptError, match=r"prompts have images .*rows of hf.Elastic move"):
        next(iter(elastic.stream(loader(model, 1), n=2)))


PAIRS = hf.Sampling(max_tokens=40, seed=5, n=2, stop_token_ids=tuple(range(6, 50)))


@pytest.fixture(scope="module", params=list(zip(KINDS, (1, 2), strict=True)), ids=lambda one: f"{one[0]}-tp{one[1]}")
def acting(request, hosts, tmp_path_factory) -> Iterator[tuple[hf.WorkerGroup, Path]]:
    """An actor that generates and trains, and its model."""
    kind, tp = request.param
    model = make_vision(tmp_path_factory.mktemp("model"), kind, template=CHAT)
    generate = hf.VLLM(tp=tp, kv_cache_gb=0.02, max_sequences=16, sampling=PAIRS)
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

"""Workers of vision-language models: prompts with images through generation, inference and updates of all roles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import hybridflow as hf
from hybridflow.errors import CheckpointError, ConfigError, PromptError, WorkerError
from hybridflow.streams.elastic_devices import GroupSizes
from tests.vision_models import KINDS, make_rows, make_vision, outputs

GENERATE = {"kv_cache_gb": 0.02, "max_sequences": 16, "sampling": hf.Sampling(max_tokens=6, seed=5, ignore_eos=True)}
PLACEMENTS: dict[str, tuple[str, Any, int]] = {
    "fsdp": ("qwen2_5_vl", hf.FSDP(micro_tokens=60), 1),
    "fsdp-tp": ("qwen3_vl", hf.FSDP(tp=2, micro_tokens=60), 2),
    "zero-2": ("qwen3_vl", hf.ZeRO(stage=2, packed=False), 1),
}


@dataclass
class Observed:
    model: Path
    saved: Path
    drawn: list[hf.Batch]
    figures: list[dict[str, float]]
    moved: dict[str, float]
    greedy: list[list[list[int]]]


@pytest.fixture(scope="module", params=PLACEMENTS)
def seen(request, pool, tmp_path_factory) -> Observed:
    """Two updates on responses to prompts with images, the actor's weights to separate rollouts after each."""
    kind, train, tp = PLACEMENTS[request.param]
    root = tmp_path_factory.mktemp(request.param)
    model = make_vision(root / "model", kind)
    generate = hf.VLLM(tp=tp, **GENERATE)
    actor = hf.ActorWorker.on(pool[0:2], model=model, train=train, optim=hf.SGD(lr=0.5), generate=generate)
    rollout = hf.RolloutWorker.on(pool[2:3], model=model, generate=hf.VLLM(**GENERATE))
    prompts = hf.BatchRef.from_batch(make_rows(kind, response=False))
    found = Observed(model, root / "saved", [], [], {}, [])
    try:
        for _ in range(2):
            batch = actor.generate_sequences(prompts, n=2)
            batch |= actor.compute_log_prob(batch)
            found.drawn.append(batch.get())
            noise = torch.randn(60, generator=torch.Generator().manual_seed(7))
            batch |= hf.Batch({"advantages": found.drawn[-1]["response_ids"].with_values(noise)})
            found.figures.append(actor.update_actor(batch, minibatches=2).get())
        found.moved = hf.sync_weights(actor, rollout).get()
        found.greedy = [
            group.generate_sequences(prompts, greedy=True).get()["response_ids"].tolist() for group in (actor, rollout)
        ]
        actor.save(found.saved)
    finally:
        actor.close()
        rollout.close()
    return found


def test_generation_and_training_agree_and_are_transformers(seen):
    """vLLM's log-probabilities against training's, before and after an update, and both against transformers'."""
    for batch in seen.drawn:
        assert (batch["log_probs"].values - batch["old_log_probs"].values).abs().max() < 1e-3
    assert seen.drawn[0]["response_ids"].lengths.tolist() == [6] * 10
    model: Any = AutoModelForImageTextToText.from_pretrained(seen.model, dtype=torch.float32)
    with torch.no_grad():
        want = outputs(model, seen.drawn[0])["log_probs"].values
    assert torch.allclose(seen.drawn[0]["old_log_probs"].values, want, atol=1e-4)
    assert all(figures["actor/grad_norm"] > 0 for figures in seen.figures)
    before, after = (batch["old_log_probs"].values for batch in seen.drawn)
    assert not torch.allclose(before, after, atol=1e-2)


def test_weights_arrive_at_rollouts_and_in_files(seen):
    assert seen.greedy[0] == seen.greedy[1]
    assert seen.moved["bytes"] > 0
    saved: Any = AutoModelForImageTextToText.from_pretrained(seen.saved, dtype=torch.float32)
    prompts = make_rows({"qwen2_5_vl": "qwen2_5_vl"}.get(saved.config.model_type, "qwen3_vl"), response=False)
    responses = hf.Ragged.from_rows(seen.greedy[0], torch.int64)
    with torch.no_grad():
        logits = outputs(saved, prompts.with_columns(response_ids=responses), "logits")["logits"].values
    logits[:, 2:6] = -torch.inf  # tokens of images
    assert logits.argmax(-1).equal(responses.values)


def test_columns_of_images_follow_their_rows(seen):
    kind = "qwen2_5_vl" if seen.drawn[0]["pixel_values"].values.shape[1] == 1176 else "qwen3_vl"
    prompts = make_rows(kind, response=False)
    twice = torch.arange(5).repeat_interleave(2)
    for name in ("pixel_values", "image_grid_thw", "prompt_ids"):
        assert seen.drawn[0][name].equal(prompts[name].index(twice)), name


@pytest.mark.parametrize("kind", KINDS)
def test_reference_critic_and_reward_model_read_images(place, pool, tmp_path, kind):
    model = make_vision(tmp_path / "model", kind)
    rows = make_rows(kind)
    batch = hf.BatchRef.from_batch(rows)
    reference = place(hf.ReferenceWorker, pool[0:2], model=model, train=hf.FSDP(micro_tokens=60))
    critic = place(
        hf.CriticWorker, pool[0:2], model=model, train=hf.ZeRO(stage=2, micro_tokens=60), optim=hf.SGD(lr=0.1)
    )
    found = reference.compute_ref_log_prob(batch).get()["ref_log_probs"]
    values = critic.compute_values(batch)
    returns = rows["response_ids"].map(lambda ids: torch.ones(len(ids)))
    updated = critic.update_critic(batch | values | hf.Batch({"returns": returns})).get()
    changed = critic.compute_values(batch).get()["values"]
    critic.save(tmp_path / "critic")
    there: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(found.values, outputs(there, rows)["log_probs"].values, atol=1e-4)
    assert updated["critic/grad_norm"] > 0
    assert (changed.values != 0).all()
    reward = place(hf.RewardWorker, pool[0:2], model=tmp_path / "critic", train=hf.FSDP(micro_tokens=60))
    scores = reward.compute_reward(batch).get()["rewards"]
    tokens = place(hf.CriticWorker, pool[0:1], model=tmp_path / "critic", train=hf.FSDP())
    longer = rows.with_columns(
        response_ids=hf.Ragged.from_rows([[*row, 7] for row in rows["response_ids"].tolist()], torch.int64)
    )
    last = [row[-1].item() for row in tokens.compute_values(hf.BatchRef.from_batch(longer)).get()["values"].rows()]
    assert torch.allclose(scores, torch.tensor(last), atol=1e-5)
    with pytest.raises(WorkerError, match=r"row 1.*has 6 tokens of images, image_grid_thw of 0"):
        reward.compute_reward(batch.without("pixel_values", "image_grid_thw")).get()


def test_a_text_model_refuses_images(place, pool, policy):
    rows = hf.BatchRef.from_batch(make_rows("qwen3_vl"))
    actor = place(hf.ActorWorker, pool[0:1], model=policy, train=hf.FSDP(), optim=hf.SGD(lr=0.1), generate=hf.VLLM())
    with pytest.raises(PromptError, match=r"5 prompts have images \(pixel_values\), and the model, a llama, reads"):
        actor.generate_sequences(rows)
    for call in (actor.compute_log_prob, actor.update_actor):
        with pytest.raises(WorkerError, match="is a llama model, which reads text only, and the batch has images"):
            call(rows).get()


FROZEN = ("visual",)
ADAM = hf.Adam(lr=0.02, eps=1e-3)
RESUMED = {
    "fsdp": hf.FSDP(micro_tokens=60),
    "fsdp-frozen": hf.FSDP(tp=2, micro_tokens=60, freeze=FROZEN),
    "zero2-frozen": hf.ZeRO(stage=2, micro_tokens=60, freeze=FROZEN),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("train", RESUMED)
def test_training_continues_bitwise_from_a_checkpoint(pool, place, no_parts, tmp_path, train):
    """Two updates, and one each before and after a checkpoint: equal weights; and nearly equal ones after a move to
    another layout, frozen weights too."""
    strategy, kind = RESUMED[train], "qwen3_vl"
    model = make_vision(tmp_path / "model", kind)
    placed = {"model": model, "train": strategy, "optim": ADAM}
    rows = [hf.BatchRef.from_batch(make_rows(kind, seed=seed)) for seed in (0, 1)]

    def weights(actor: hf.WorkerGroup, name: str) -> dict[str, torch.Tensor]:
        found = load_file(Path(actor.save(tmp_path / name)) / "model.safetensors")
        actor.close()
        return found

    first = place(hf.ActorWorker, pool[0:2], name="actor", **placed)
    first.update_actor(rows[0]).get()
    saved = hf.save(tmp_path / "checkpoint", parts=[first])
    first.update_actor(rows[1]).get()
    want = weights(first, "whole")
    second = place(hf.ActorWorker, pool[0:2], name="actor", **placed)
    hf.load(saved, parts=[second])
    second.update_actor(rows[1]).get()
    found = weights(second, "resumed")
    assert all(torch.equal(found[name], want[name]) for name in want)
    before = load_file(model / "model.safetensors")
    frozen = {name for name in before if "visual" in name and strategy.freeze}
    assert {name for name in want if torch.equal(before[name], want[name])} == frozen
    moved = place(hf.ActorWorker, pool[0:2], name="actor", **placed)
    moved.update_actor(rows[0]).get()
    hf.reallocate(moved, pool=pool[1:4], strategy=hf.FSDP(micro_tokens=60, freeze=strategy.freeze))
    moved.update_actor(rows[1]).get()
    found = weights(moved, "moved")
    assert max(float((found[name] - want[name]).abs().max()) for name in want) < 1e-4
    if strategy.freeze:
        with pytest.raises(ConfigError, match=r"only the trained tensors of 'actor', which has freeze=visual"):
            hf.export(saved, tmp_path / "exported")
        other = place(hf.ActorWorker, pool[0:2], name="actor", **{**placed, "model": tmp_path / "whole"})
        with pytest.raises(CheckpointError, match="the frozen weights of actor are not those that"):
            hf.load(saved, parts=[other])


class Watched(hf.RolloutWorker):
    """A rollout that shows its image encoder, and can lose it."""

    @hf.register(hf.ONE_TO_ALL)
    def tower(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.storage().items() if "visual" in name}

    @hf.register(hf.ONE_TO_ALL)
    def lose(self) -> None:
        self.engine.memory().release()
        for name in self.engine.memory().acquire():
            self.engine.storage()[name].fill_(7.0)


@pytest.mark.parametrize("train", ["fsdp", "lora", "overlap"])
def test_weights_that_cannot_change_are_sent_once(pool, place, tmp_path, train):
    """And again to whatever has lost them, or has had others since."""
    kind = "qwen3_vl"
    models = [make_vision(tmp_path / f"{seed}", kind, seed=seed) for seed in (0, 1)]
    strategy = hf.FSDP(lora=hf.LoRA(rank=2, targets=("q_proj",))) if train == "lora" else hf.FSDP(freeze=FROZEN)
    placed = {"train": strategy, "optim": hf.SGD(lr=0.1), "overlap": train == "overlap"}
    first, second = (
        place(hf.ActorWorker, pool[0:2], name=f"actor-{at}", model=model, **placed) for at, model in enumerate(models)
    )
    rollout = place(Watched, pool[2:3], model=models[0], generate=hf.VLLM(**GENERATE))
    rows = hf.BatchRef.from_batch(make_rows(kind))

    def moved(actor: hf.WorkerGroup = first) -> float:
        actor.update_actor(rows)
        return hf.sync_weights(actor, rollout).get()["bytes"]

    tower = rollout.tower().get()[0]
    saved = {name: tensor.nbytes for name, tensor in load_file(models[0] / "model.safetensors").items()}
    fixed = sum(size for name, size in saved.items() if ("q_proj" not in name if train == "lora" else "visual" in name))
    whole = sum(saved.values())
    assert [moved() for _ in range(3)] == [whole, whole - fixed, whole - fixed]
    rollout.lose().get()
    assert moved() == whole
    assert moved(second) == whole
    other = rollout.tower().get()[0]
    assert not any(torch.equal(other[name], tower[name]) for name in tower if tower[name].ndim > 1)
    assert moved() == whole
    again = rollout.tower().get()[0]
    assert all(torch.equal(again[name], tower[name]) for name in tower)
    assert moved() == whole - fixed
    rollout.close()
    rollout = place(Watched, pool[2:3], model=models[1], generate=hf.VLLM(**GENERATE))
    assert moved() == whole
    again = rollout.tower().get()[0]
    assert all(torch.equal(again[name], tower[name]) for name in tower)


def test_frozen_weights_follow_an_actor_of_several_sizes(pool, place, tmp_path):
    """Ranks that slept have dropped them."""
    model, rows = make_vision(tmp_path / "model", "qwen3_vl"), hf.BatchRef.from_batch(make_rows("qwen3_vl"))
    placed = {"model": model, "train": hf.FSDP(freeze=FROZEN), "optim": hf.SGD(lr=0.1)}
    actor = place(hf.ActorWorker, pool[0:1], **placed)
    sizes = GroupSizes(actor, pool, (1, 2))
    rollout = place(Watched, pool[2:3], model=model, generate=hf.VLLM(**GENERATE))
    before = rollout.tower().get()[0]
    for size in (2, 1, 2, 1):
        sizes.resize(size)
        actor.update_actor(rows).get()
        hf.sync_weights(actor, rollout).get()
        found = rollout.tower().get()[0]
        assert all(torch.equal(found[name], before[name]) for name in before)
    sizes.close()


def test_adapters_are_of_the_language_part(pool, place, tmp_path):
    kind, lora = "qwen2_5_vl", hf.LoRA(rank=4, alpha=8)
    model = make_vision(tmp_path / "model", kind)
    actor = place(
        hf.ActorWorker,
        pool[0:2],
        model=model,
        train=hf.FSDP(micro_tokens=60, lora=lora),
        optim=hf.SGD(lr=0.5),
        generate=hf.VLLM(**GENERATE),
    )
    rows = make_rows(kind)
    for _ in range(2):
        drawn = actor.generate_sequences(hf.BatchRef.from_batch(make_rows(kind, response=False)))
        batch = (drawn | actor.compute_log_prob(drawn)).get()
        assert (batch["log_probs"].values - batch["old_log_probs"].values).abs().max() < 1e-3
        assert actor.update_actor(hf.BatchRef.from_batch(rows)).get()["actor/grad_norm"] > 0
    adapters = load_file(Path(actor.save(tmp_path / "adapters")) / "adapter_model.safetensors")
    assert adapters
    assert not any("visual" in name for name in adapters)
    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    read = dict(PeftModel.from_pretrained(plain, tmp_path / "adapters").named_parameters())
    found = {name.replace(".default", ""): value for name, value in read.items() if "lora_" in name}
    assert found.keys() == adapters.keys()
    assert all(torch.equal(found[name], value) for name, value in adapters.items())
    again = hf.LoRA(rank=4, alpha=8, start=tmp_path / "adapters")
    other = place(hf.ActorWorker, pool[0:1], name="other", model=model, train=hf.FSDP(lora=again), optim=hf.SGD(lr=0.5))
    kept = load_file(Path(other.save(tmp_path / "again")) / "adapter_model.safetensors")
    assert all(torch.equal(kept[name], value) for name, value in adapters.items())
    merged = load_file(Path(actor.save(tmp_path / "merged", merged=True)) / "model.safetensors")
    before = load_file(model / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert changed == {name for name in before if "proj.weight" in name and "visual" not in name}


def _changed(rows: hf.Batch, name: str, row: int, value: torch.Tensor) -> hf.BatchRef:
    parts = rows[name].rows()
    parts[row] = value
    values, lengths = torch.cat(parts), [len(part) for part in parts]
    return hf.BatchRef.from_batch(rows.with_columns(**{name: hf.Ragged.from_lengths(values, lengths)}))


def test_prompts_that_do_not_fit_their_images_are_refused(pool, place, tmp_path):
    """On the hosts, before a token is computed; and another number of responses for each prompt works."""
    kind = "qwen3_vl"
    model, rows = make_vision(tmp_path / "model", kind), make_rows(kind, response=False)
    rollout = place(hf.RolloutWorker, pool[0:1], model=model, generate=hf.VLLM(**GENERATE))
    several = rollout.generate_sequences(hf.BatchRef.from_batch(rows), n=[1, 2, 1, 3, 1]).get()
    own = torch.tensor([0, 1, 1, 2, 3, 3, 3, 4])
    assert several["pixel_values"].equal(rows["pixel_values"].index(own))
    assert several["response_ids"].lengths.tolist() == [6] * 8
    grids, ids, pixels = (rows[name] for name in ("image_grid_thw", "prompt_ids", "pixel_values"))
    long = torch.cat([torch.tensor([7, 2]), torch.full((600,), 4), torch.tensor([3])])
    many = rows.with_columns(
        image_grid_thw=hf.Ragged.from_lengths(
            torch.cat([grids.row(0), torch.tensor([[1, 40, 60]]), *map(grids.row, (2, 3, 4))]), grids.lengths
        ),
        pixel_values=hf.Ragged.from_rows([pixels.row(0), torch.randn(2400, 1536), *map(pixels.row, (2, 3, 4))]),
    )
    for batch, message in (
        (_changed(many, "prompt_ids", 1, long), "prompt 1 has 603 tokens and leaves no room for 6 response tokens"),
        (_changed(rows, "prompt_ids", 1, ids.row(1)[ids.row(1) != 4]), "prompt 1 has 0 tokens of images, its images"),
        (_changed(rows, "pixel_values", 2, pixels.row(2)[:-4]), "row 2 has 52 patches in pixel_values, and image_grid"),
        (_changed(rows, "image_grid_thw", 3, torch.tensor([[1, 3, 8]])), r"images of \[\[1, 3, 8\]\] patches: height"),
        (
            hf.BatchRef.from_batch(make_rows("qwen2_5_vl", response=False)),
            r"patches of \[1176\] numbers, the model reads",
        ),
    ):
        with pytest.raises(WorkerError, match=message):
            rollout.generate_sequences(batch).get()

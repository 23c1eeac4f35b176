"""vLLM with images: greedy tokens and log-probabilities are those of transformers, with new weights too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hybridflow.algorithms.masked import token_column
from hybridflow.batch.ragged import Ragged
from hybridflow.config import KV, VLLM, Sampling, Until
from hybridflow.engines.vllm.row_images import RowImages
from hybridflow.errors import PromptError
from hybridflow.planner.cost.device_memory import STEP_TOKENS
from tests.contracts.rank_processes import World
from tests.integration.test_expert_generation import build, write
from tests.vision_models import KINDS, SPECIAL, make_rows, make_vision, outputs

GREEDY = Sampling(max_tokens=8, greedy=True, ignore_eos=True, n=2)


def _prompts(kind: str) -> tuple[list[list[int]], list[RowImages | None] | None]:
    rows = make_rows(kind, response=False)
    return token_column(rows, "prompt_ids").tolist(), RowImages.of(rows)


def generated(world: World, name: str, models: Sequence[Path], kind: str, tp: int) -> list[Any]:
    """Greedy tokens and log-probabilities with the weights of each model."""
    engine = build(world, name, models[0], VLLM(tp=tp, kv_cache_gb=0.02, max_sequences=16, dtype="float32"))
    prompts, images = _prompts(kind)
    found: list[Any] = []
    for directory in models:
        write(engine, world.rank, directory)
        drawn = engine.generate(prompts, GREEDY, images=images)
        found.append([(row.token_ids, row.log_probs) for several in drawn for row in several])
    try:
        engine.generate(prompts, GREEDY)
    except PromptError as error:
        found.append(str(error))
    return found


def profiled(
    world: World, name: str, model: Path, max_length: int, image_tokens: int
) -> tuple[bool, list[int], set[int]]:
    """Whether vLLM is told to leave images out where it measures memory, the patches that it encodes there, and the
    most tokens of images in a step and kept for later ones."""
    strategy = VLLM(
        kv_cache_gb=0.02, max_sequences=16, max_length=max_length, dtype="float32", image_tokens=image_tokens
    )
    engine, seen = build(world, name, model, strategy), list[int]()
    runner = engine._runner()
    multimodal = runner.model_config.multimodal_config
    skipped, multimodal.skip_mm_profiling = multimodal.skip_mm_profiling, False
    runner._dummy_sampler_run = lambda hidden: hidden  # our sampler comes after the profile, and knows rows only
    runner.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with torch.inference_mode():
        runner.profile_run()
    return skipped, seen, {runner.mm_budget.encoder_compute_budget, runner.mm_budget.encoder_cache_size}


def updated(world: World, name: str, models: Sequence[Path], kind: str, kv: KV) -> list[Any]:
    """Token ids, log-probabilities and versions of rows that get the second model's weights after four steps, and of
    rows that begin then."""
    engine = build(world, name, models[0], VLLM(kv_cache_gb=0.02, max_sequences=16, dtype="float32", kv=kv))
    prompts, images = _prompts(kind)
    write(engine, world.rank, models[0])
    engine.submit(engine.new_rows(prompts, GREEDY, images=images))
    engine.advance(Until(steps=4))
    write(engine, world.rank, models[1])
    engine.submit(engine.new_rows(prompts, GREEDY, row_ids=range(10, 10 + len(prompts)), images=images))
    engine.advance()
    rows = sorted(engine.take(), key=lambda row: (row.row_id, row.index))
    return [(row.token_ids, row.log_probs, row.policy_version) for row in rows]


@pytest.mark.parametrize(
    ("kind", "tp", "width"), [*((kind, 1, 64) for kind in KINDS), ("qwen3_vl", 2, 64), ("qwen2_5_vl", 2, 63)]
)
def test_tokens_and_log_probabilities_are_those_of_transformers(rank_processes, tmp_path, kind, tp, width):
    """Of layers of `width` in what encodes images, which do not divide in the last case."""
    models = [make_vision(tmp_path / f"{seed}", kind, seed=seed, width=width) for seed in (0, 1)]
    processes = rank_processes(tp)
    parts = processes.run(tp, generated, processes.name(), models, kind, tp)
    assert all(part == parts[0] for part in parts)
    *found, refused = parts[0]
    assert "prompt 1 has 6 tokens of images, its images have 0" in refused
    rows = make_rows(kind, response=False)
    for path, drawn in zip(models, found, strict=True):
        model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        both = torch.arange(len(rows)).repeat_interleave(2)
        responses = Ragged.from_rows([ids for ids, _ in drawn], torch.int64)
        with torch.no_grad():
            want = outputs(model, rows[both].with_columns(response_ids=responses), "logits")["logits"].values
        kept = want.clone()
        kept[:, range(2, len(SPECIAL))] = -torch.inf  # tokens of images are never drawn
        assert kept.argmax(-1).equal(responses.values)
        logs = want.log_softmax(-1).gather(-1, responses.values[:, None])[:, 0]
        assert torch.allclose(torch.tensor([one for _, several in drawn for one in several]), logs, atol=1e-3)
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("kind", "most", "step"), [(KINDS[0], 16384, STEP_TOKENS), (KINDS[1], 200, 200), (KINDS[0], 1, 1)]
)
def test_the_profile_of_memory_encodes_the_images_of_a_step(rank_processes, tmp_path, kind, most, step):
    """As many of the largest as vLLM encodes at once, or one with fewer `image_tokens`; on a CPU, whose cache has the
    size that is asked for, it is not made."""
    model, processes = make_vision(tmp_path / "model", kind), rank_processes(1)
    ((skipped, encoded, budget),) = processes.run(1, profiled, processes.name(), model, 500, most)
    assert skipped
    assert budget == {step}
    assert 4 * step * 0.95 < sum(encoded) < 4 * step * 1.05


@pytest.mark.parametrize(("kind", "kv"), list(zip(KINDS, ("recompute", "keep"), strict=True)))
def test_rows_continue_with_new_weights(rank_processes, tmp_path, kind, kv):
    """Tokens are those of their version's weights: where the KV cache is computed again, so are images; where it is
    kept, rows that begin later have images of the new weights."""
    models = [make_vision(tmp_path / f"{seed}", kind, seed=seed) for seed in (0, 1)]
    processes = rank_processes(1)
    (drawn,) = processes.run(1, updated, processes.name(), models, kind, kv)
    rows = make_rows(kind, response=False)[torch.arange(5).repeat_interleave(2).repeat(2)]
    rows = rows.with_columns(response_ids=Ragged.from_rows([ids for ids, _, _ in drawn], torch.int64))
    found, versions = (torch.tensor([one[at] for one in drawn]) for at in (1, 2))
    later = torch.arange(20)[:, None] >= 10
    assert versions.tolist() == [[0] * 4 + [1] * 4] * 10 + [[1] * 8] * 10
    for version, path in enumerate(models):
        model: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
        with torch.no_grad():
            want = outputs(model, rows)["log_probs"].values.view(20, 8)
        own = (versions == version) & (later | torch.tensor(kv == "recompute" or not version))
        assert own.any()
        assert torch.allclose(found[own], want[own], atol=1e-3)

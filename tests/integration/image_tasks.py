"""What the processes of test_image_generation.py do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridflow.algorithms.masked import token_column
from hybridflow.config import KV, VLLM, Sampling, Until
from hybridflow.engines.vllm.row_images import RowImages
from hybridflow.errors import PromptError
from tests.contracts.rank_processes import World
from tests.integration.expert_tasks import build, write
from tests.vision_models import make_rows

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

"""What the processes of test_image_generation.py do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridflow.algorithms.masked import token_column
from hybridflow.config import VLLM, Sampling
from hybridflow.engines.row_images import RowImages
from hybridflow.errors import PromptError
from hybridflow.models.images import GRIDS, PIXELS
from tests.contracts.rank_processes import World
from tests.integration.expert_tasks import build, write
from tests.vision_models import make_rows

GREEDY = Sampling(max_tokens=8, greedy=True, ignore_eos=True, n=2)


def generated(world: World, name: str, models: Sequence[Path], kind: str, tp: int) -> list[Any]:
    """Greedy tokens and log-probabilities with the weights of each model."""
    engine = build(world, name, models[0], VLLM(tp=tp, kv_cache_gb=0.02, max_sequences=16, dtype="float32"))
    rows = make_rows(kind, response=False)
    prompts = token_column(rows, "prompt_ids").tolist()
    columns = (token_column(rows, column).rows() for column in (PIXELS, GRIDS))
    names = [[f"{row}.{image}" for image in range(3)] for row in range(len(prompts))]
    images = [
        RowImages(patches, grids, own[: len(grids)]) if len(grids) else None
        for patches, grids, own in zip(*columns, names, strict=True)
    ]
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

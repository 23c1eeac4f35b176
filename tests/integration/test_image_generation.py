"""vLLM with images: greedy tokens and log-probabilities are those of transformers, with new weights too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hybridflow.batch.ragged import Ragged
from hybridflow.planner.cost.device_memory import STEP_TOKENS
from tests.contracts.rank_processes import RankProcesses
from tests.integration import image_tasks as tasks
from tests.vision_models import KINDS, SPECIAL, make_rows, make_vision, outputs


@pytest.mark.parametrize(
    ("kind", "tp", "width"), [*((kind, 1, 64) for kind in KINDS), ("qwen3_vl", 2, 64), ("qwen2_5_vl", 2, 63)]
)
def test_tokens_and_log_probabilities_are_those_of_transformers(tmp_path, kind, tp, width):
    """Of layers of `width` in what encodes images, which do not divide in the last case."""
    models = [make_vision(tmp_path / f"{seed}", kind, seed=seed, width=width) for seed in (0, 1)]
    processes = RankProcesses(tp)
    try:
        parts = processes.run(tp, tasks.generated, "images", models, kind, tp)
    finally:
        processes.close()
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
def test_the_profile_of_memory_encodes_the_images_of_a_step(tmp_path, kind, most, step):
    """As many of the largest as vLLM encodes at once, or one with fewer `image_tokens`; on a CPU, whose cache has the
    size that is asked for, it is not made."""
    model, processes = make_vision(tmp_path / "model", kind), RankProcesses(1)
    try:
        ((skipped, encoded, budget),) = processes.run(1, tasks.profiled, "profile", model, 500, most)
    finally:
        processes.close()
    assert skipped
    assert budget == {step}
    assert 4 * step * 0.95 < sum(encoded) < 4 * step * 1.05


@pytest.mark.parametrize(("kind", "kv"), list(zip(KINDS, ("recompute", "keep"), strict=True)))
def test_rows_continue_with_new_weights(tmp_path, kind, kv):
    """Tokens are those of their version's weights: where the KV cache is computed again, so are images; where it is
    kept, rows that begin later have images of the new weights."""
    models = [make_vision(tmp_path / f"{seed}", kind, seed=seed) for seed in (0, 1)]
    processes = RankProcesses(1)
    try:
        (drawn,) = processes.run(1, tasks.updated, "updated", models, kind, kv)
    finally:
        processes.close()
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

"""Loops with images: rewards and samples see them, the driver's memory does not grow with them, and a recipe learns."""

from __future__ import annotations

import gc
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

import hybridflow as hf
from hybridflow.algorithms.masked import token_column
from hybridflow.cluster.row_refs import outputs_of
from hybridflow.cluster.store import Manifest
from hybridflow.errors import PromptError
from hybridflow.models.images import GRIDS, PIXELS
from hybridflow.protocols.protocol import THREE_D_PROTO
from hybridflow.tracking.report.page import write_report
from recipes import run_all, shapes
from tests.tiny_models import make_policy
from tests.warm_programs import WarmPrograms

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> Path:
    """The recipe's task, with a model that has hardly been trained."""
    return shapes.make(tmp_path_factory.mktemp("shapes"), steps=3)


def recipe(warm: WarmPrograms, home: Path, *arguments: str) -> list[dict[str, float]]:
    warm.run(ROOT / "recipes" / "vision.py", "name=short", "devices=[1]", *arguments, cwd=home, timeout=1200)
    return [json.loads(line) for line in (home / "runs/short/metrics.jsonl").read_text().splitlines()]


def test_the_recipe_runs_and_its_report_shows_images(warm, tmp_path, counted):
    files = (
        f"model={counted / 'model'}",
        f"prompts={counted / 'train.jsonl'}",
        f"held_out={counted / 'held_out.jsonl'}",
    )
    sizes = ("steps=2", "batch_size=4", "n=2", "minibatches=1", "actor.generate.sampling.max_tokens=3")
    lines = recipe(warm, tmp_path, *files, *sizes)
    assert len(lines) == 2
    assert all("actor/loss" in line for line in lines)
    run = tmp_path / "runs/short"
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert {one["title"].split(" ")[0] for one in samples} == {"greedy", "samples"}
    assert all(len(one["images"]) == 1 for one in samples)
    assert all(one["images"][0].startswith("data:image/jpeg;base64,") for one in samples)
    assert samples[-1]["images"][0] in write_report(run).read_text()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_recipe_learns_what_pictures_show(warm, tmp_path):
    (tmp_path / ".cache").symlink_to(ROOT / ".cache")
    found = run_all.outcome("vision", 1, recipe(warm, tmp_path), 0.0)
    assert found.improved, found


def sees(prompts: list[Any], completions: list[str], images: list[list[Image.Image]]) -> list[float]:
    """How many images a row has, and a share of their width."""
    return [len(own) + own[0].width / 1000 for own in images]


def test_rewards_see_images_and_text_models_are_refused(pool, tmp_path, counted, settle):
    how: dict[str, Any] = {"batch_size": 3, "processor": counted / "model"}
    one = pool[0:1]
    strategy = hf.VLLM(kv_cache_gb=0.02, max_sequences=16, dtype="float32", sampling=hf.Sampling(max_tokens=3))
    with (
        closing(hf.RolloutWorker.on(one, model=counted / "model", generate=strategy)) as actor,
        closing(hf.RewardWorker.on(one, function=sees)) as reward,
        closing(hf.RewardWorker.on(one, function=sees, workers=1)) as apart,
    ):
        for prompts in hf.PromptLoader(counted / "train.jsonl", steps=2, **how):
            batch = actor.generate_sequences(prompts, n=2)
            for judge in (reward, apart):
                found = (batch | judge.compute_reward(batch)).get(["rewards", "group_id"])
                assert found["rewards"].tolist() == [pytest.approx(1.084)] * 6
        held_out = hf.HeldOut(
            actor, reward, counted / "held_out.jsonl", every=1, options={"processor": how["processor"]}
        )
        assert isinstance(held_out.prompts, hf.BatchRef)
        assert held_out.after(1).get() == {"held_out/reward": pytest.approx(1.084)}
    text = make_policy(tmp_path / "text")
    with closing(hf.RolloutWorker.on(one, model=text, generate=strategy)) as other:
        loader = hf.PromptLoader(counted / "train.jsonl", steps=2, **how)
        with pytest.raises(PromptError, match=r"1024 of 1024 prompts have images, and .*text reads text only"):
            next(iter(loader))
        loader.check_context = False
        (batch, *_) = loader.drawn()
        with pytest.raises(PromptError, match="reads text only"):
            other.generate_sequences(batch)
    settle()


class Looks:
    """Reads all images of its rows."""

    @hf.register(THREE_D_PROTO, reads=(PIXELS, GRIDS), writes=("seen",))
    def look(self, batch: hf.Batch) -> hf.Batch:
        sums = token_column(batch, PIXELS).map(lambda values: values.double().sum(-1)).row_sum()
        return hf.Batch({"seen": sums.float()})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_drivers_memory_does_not_grow_with_images(pool, counted, tmp_path):
    """1,000 images of 1 MB in 20 iterations; the rows of a group share one copy of theirs in the store."""
    random = np.random.RandomState(0)
    whole = random.randint(0, 255, (592, 592, 3), dtype=np.uint8)
    lines = []
    for at in range(1000):
        Image.fromarray(np.roll(whole, at, 0)).save(tmp_path / f"{at}.bmp")
        prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "circles="}]}]
        lines.append(json.dumps({"prompt": prompt, "images": f"{at}.bmp"}))
    assert (tmp_path / "0.bmp").stat().st_size > MB
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    process, used = psutil.Process(), list[int]()
    with closing(hf.place(Looks, pool[0:2])) as group:
        for prompts in hf.PromptLoader(tmp_path / "rows.jsonl", batch_size=50, steps=20, processor=counted / "model"):
            batch = prompts.repeat(4)
            outputs = {id(one): one for one in outputs_of([batch.column_refs[PIXELS].node])}
            manifests = [one.ref for one in outputs.values()]
            assert len(manifests) == 1
            assert isinstance(manifests[0], Manifest)
            assert not isinstance(manifests[0].columns[PIXELS], tuple)  # by reference
            seen = group.look(batch).get("seen")["seen"].view(50, 4)
            assert torch.equal(seen, seen[:, :1].expand(-1, 4))
            del batch, outputs, manifests, seen
            gc.collect()
            used.append(process.memory_full_info().uss)
    print(shown := [one // MB for one in used])
    assert max(used[10:]) - max(used[3:10]) < 16 * MB, shown

"""Models of a loop whose prompts have images are checked before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoImageProcessor

import hybridflow as hf
from hybridflow.errors import PromptError
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.tracing.auto import workload_of
from hybridflow.tracing.estimate import EstimatedCall, estimate_driver
from hybridflow.tracing.trace import check_driver, trace_driver
from tests.tiny_models import make_classifier, make_policy
from tests.vision_models import VOCABULARY, make_vision, noise


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> Path:
    return make_vision(tmp_path_factory.mktemp("vision"), "qwen2_5_vl")


def beside(vision: Path, directory: Path) -> Path:
    """The text-only model in `directory`, with the tokenizer of the model that reads images."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(vision / name, directory)
    return directory


def prompts() -> list[dict[str, Any]]:
    content = [{"type": "image"}, {"type": "text", "text": "w1"}]
    return [{"prompt": [{"role": "user", "content": content}], "images": noise(seed, 40, 40)} for seed in range(2)]


def scored(completions: list[str]) -> list[float]:
    return [0.0] * len(completions)


def loop(vision: Path, how: dict[str, Any], *groups: Any, held_out: dict[str, Any] | None = None) -> Any:
    """A driver with an actor, the further `groups` (class and settings) and a reward."""

    def driver() -> None:
        pool = hf.ResourcePool(1)
        generate = hf.VLLM(sampling=hf.Sampling(max_tokens=3))
        given: dict[str, Any] = {"model": vision, "train": hf.FSDP(), "optim": hf.SGD(lr=1.0), "generate": generate}
        actor = hf.ActorWorker.on(pool, **given)
        for worker, settings in groups:
            worker.on(pool, train=hf.FSDP(), **settings)
        reward = hf.RewardWorker.on(pool, function=scored, name="judge")
        own = None if held_out is None else hf.HeldOut(actor, reward, prompts(), every=1, options=held_out)
        run = hf.Run("run", console=False, held_out=own)
        for batch in run.loop(hf.PromptLoader(prompts(), batch_size=2, processor=vision, **how)):
            batch = actor.generate_sequences(batch, n=2)
            batch |= actor.compute_log_prob(batch)
            batch |= hf.compute_advantage(batch | reward.compute_reward(batch), "grpo")
            run.step(batch, actor.update_actor(batch, minibatches=1))

    return driver


def text_models(vision: Path, tmp_path: Path) -> dict[str, tuple[Any, dict[str, Any]]]:
    sizes = {"vocab_size": VOCABULARY}
    text = beside(vision, make_policy(tmp_path / "text", tokenizer=False, **sizes))
    judge = beside(vision, make_classifier(tmp_path / "judge", **sizes))
    return {
        "reference": (hf.ReferenceWorker, {"model": text}),
        "critic": (hf.CriticWorker, {"model": text, "optim": hf.SGD(lr=1.0)}),
        "reward": (hf.RewardWorker, {"model": judge}),
        "template": (hf.RewardWorker, {"model": judge, "template": "chat"}),
    }


@pytest.mark.parametrize("role", ["reference", "critic", "reward", "template"])
def test_models_that_read_text_only_are_refused_whatever_their_role(vision, tmp_path, role):
    group = text_models(vision, tmp_path)[role]
    (tmp_path / "judge/chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    reads = "reward, whose tokenizer= or template=" if role == "template" else str(group[1]["model"])
    with pytest.raises(PromptError, match=rf"2 of 2 prompts have images, and {reads}.* reads text only"):
        check_driver(loop(vision, {}, group))
    check_driver(loop(vision, {"check_context": False}, group))
    assert trace_driver(loop(vision, {"steps": 1}, group)).graph  # of a plan models may be anything


def test_models_that_read_images_are_not_refused(vision):
    check_driver(loop(vision, {}, (hf.ReferenceWorker, {"model": vision}), held_out={"processor": vision}))


def test_patches_of_a_plan_are_those_of_the_first_prompts(vision):
    found = trace_driver(loop(vision, {"steps": 1}))
    work = workload_of(found, {"response": 8}, ClusterSpec.of("a100:1x1"))
    assert work.patches == 2 * 2  # an image of 40 x 40 pixels has so few
    assert work.image_tokens == 16384
    assert workload_of(found, {"response": 8, "patches": 0}, ClusterSpec.of("a100:1x1")).patches == 0


def test_held_out_prompts_need_the_processor_of_the_model_and_of_the_loader(vision, tmp_path):
    smaller = AutoImageProcessor.from_pretrained(vision, backend="pil", max_pixels=1568)
    with pytest.raises(PromptError, match=r"HeldOut.* is another one than that of the loader: it has size=.*1568"):
        check_driver(loop(vision, {}, held_out={"processor": smaller, "tokenizer": str(vision)}))
    other = shutil.copytree(vision, tmp_path / "other")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps(settings | {"image_mean": [0.5] * 3}))
    with pytest.raises(PromptError, match=r"processor=\) is of another model than .* it has image_mean=\[0\.5"):
        check_driver(loop(vision, {}, held_out={"processor": other}))


@pytest.mark.slow
def test_estimates_are_of_rows_of_text_and_say_so(vision, tmp_path):
    """Of 96 tokens four stand for images: hundreds of rows without any are not drawn by chance."""
    work = {"rows": 64, "prompt": 200, "response": (100, 200)}
    text = make_policy(tmp_path / "text")
    found = estimate_driver(loop(vision, {}), cluster="a100:1x1", workload=work)
    assert found[-1] == "images are not counted: rows are text, and encoding images takes more of actor"
    calls = {one.name: one.found for one in found if isinstance(one, EstimatedCall)}
    assert calls["actor.update_actor"].flops > calls["actor.compute_log_prob"].flops > 0
    found = estimate_driver(loop(vision, {}), cluster="a100:1x1", workload=work, models={"actor": text})
    assert "images" not in str(found[-1])

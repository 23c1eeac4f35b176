"""`push_to_hub` with the real client and a server on loopback: what is uploaded, what the card says."""

from __future__ import annotations

import html
import importlib.metadata
import json
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

import hybridflow as hf
from hybridflow.errors import ConfigError
from hybridflow.tracing.trace import trace_driver
from hybridflow.tracking.tracker import Tracker
from tests import tiny_models
from tests.hub_server import TOKEN, served_hub
from tests.unit.engines.test_export import write_run

SECRETS = {
    "api_key": "plainsecretvalue1",
    "wandb": {"token": "plainsecretvalue2", "apiKey": "plainsecretvalue3"},
    "database": "postgres://alice:plainsecretvalue4@db.example/x",
    "judge": "https://judge.example/v1?version=2&api_key=plainsecretvalue5&n=3",
    "headers": [{"Authorization": "Bearer plainsecretvalue6"}, {"X-Token": "plainsecretvalue7"}],
    "password": 8123456789,
    "note": "with hf_plainsecretvalue9abcdef in it",
    "of_the_environment": "left|*plainsecretvalue10",
    "args": "--api-key=plainsecretvalue11 --verbose",
    "mirror": "https://me:plainsecretvalue12/def@host",
    "store": "s3://key:wJalrXUt/plainsecretvalue13@bucket/run",
    "server": {"pwd": "plainsecretvalue14", "accesskey": "plainsecretvalue15", "passphrase": "plainsecretvalue16 y"},
    "alerts": ["https://hooks.slack.com/services/plainsecretvalue17", {"to": "plainsecretvalue18"}],
    "robot": "ghs_plainsecretvalueabcdef",
    "grader": {"api_key": 8123456789},
    "env": {"WANDB_API_KEY": "8123456789"},
    "cmd": "curl -u bob:plainsecretvalue19 http://x",
    "random": "runs/wJalrXUtnFEMI7K7MDENG",
}
CONFIG = {
    "name": "grpo",
    "model": "Qwen/Qwen3-0.6B",
    "prompts": "openai/gsm8k",
    "actor": {"optim": {"lr": 1e-6}, "generate": {"sampling": {"max_tokens": 64, "stop_token_ids": [7, 8]}}},
    "track": ["wandb"],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_models.make_chat(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def run(tmp_path, model) -> Path:
    """A run of 40 iterations, with the model that it saved."""
    directory = tmp_path / "runs" / "first"
    with Tracker(directory, console=False, config=CONFIG | SECRETS) as tracker:
        for step in range(1, 41):
            tracker.log({"reward/mean": step / 64, "held_out/reward": step / 128, "actor/loss": -step})
        best = "step-00000040, held_out/reward 0.312"
        tracker.note(accuracy_before=0.125, accuracy_after=0.625, best_checkpoint=best)
    (directory / "model").symlink_to(model)
    (model / "notes.bak").write_text("no file of a model")
    for name in ("data", "additional_chat_templates"):
        (model / name).mkdir(exist_ok=True)
    (model / "additional_chat_templates" / "tool use.jinja").write_text("{{ messages }}")
    (model / "data" / "private.txt").write_text("no file of a model")
    return directory


@pytest.fixture
def hub(monkeypatch):
    with served_hub(monkeypatch) as served:
        yield served


def cells(card: str, title: str) -> dict[str, str]:
    """A table of the card."""
    part = card.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [html.unescape(re.sub(r"\\(.)", r"\1", line)) for line in part.splitlines() if line.startswith("|")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    return {row[0]: row[1] for row in rows[2:] if len(row) == 2}


def test_the_files_and_the_card_of_a_run_are_uploaded(run, model, hub, monkeypatch):
    monkeypatch.setenv("JUDGE_PASSWORD", "left|*plainsecretvalue10")
    before = sorted(path.name for path in run.iterdir())
    assert hf.push_to_hub(run / "model", "me/tiny") == f"{hub.url}/me/tiny"
    assert sorted(path.name for path in run.iterdir()) == before
    assert hub.repos["me/tiny"]["visibility"] == "private"
    saved = {path.name: path.read_bytes() for path in model.iterdir() if path.suffix in (".json", ".safetensors")}
    text = hub.files["me/tiny"].pop("README.md").decode()
    assert {name: hub.files["me/tiny"][name] for name in saved} == saved
    assert hub.files["me/tiny"]["additional_chat_templates/tool use.jinja"] == b"{{ messages }}"
    assert not {"notes.bak", "data/private.txt"} & set(hub.files["me/tiny"])

    card = ModelCard(text)
    assert card.data.base_model == "Qwen/Qwen3-0.6B"
    assert card.data.library_name == "transformers"
    assert card.data.datasets == ["openai/gsm8k"]
    assert card.data.pipeline_tag == "text-generation"
    assert {"hybridflow", "reinforcement-learning", "grpo"} == set(card.data.tags)
    assert "after 40 iterations of `grpo`" in text
    figures = cells(text, "Held-out figures")
    assert (figures["accuracy_before"], figures["accuracy_after"]) == ("0.125", "0.625")
    assert figures["held_out/reward"] == "0.3125"
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = cells(text, "Curve")
    assert {"1", "40"} <= set(curve)
    assert 8 <= len(curve) <= 13
    assert all(float(curve[step]) == metrics[int(step) - 1]["reward/mean"] for step in curve)
    settings = cells(text, "Settings")
    assert settings["actor.optim.lr"] == "1e-06"
    assert settings["actor.generate.sampling.max_tokens"] == "64"
    assert settings["actor.generate.sampling.stop_token_ids"] == "[7, 8]"
    for package in ("hybridflow", "torch", "transformers"):
        assert cells(text, "Versions")[package] == importlib.metadata.version(package)


def test_weights_of_an_earlier_upload_do_not_stay_beside_the_new(run, model, hub):
    """vLLM and transformers would read what an index of shards names, and adapters."""
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter_config.json")
    kept = ("onnx/other.safetensors", "LICENSE", "notes.json")
    hub.files["me/tiny"] = dict.fromkeys((*stale, *kept, "config.json", "model.safetensors"), b"earlier")
    hf.push_to_hub(run / "model", "me/tiny")
    files = hub.files["me/tiny"]
    assert not {*stale} & {*files}
    assert {*kept} <= {*files}
    assert all(files[name] == (model / name).read_bytes() for name in ("config.json", "model.safetensors"))
    assert [path for _, path in hub.asked].count("/api/models/me/tiny/commit/main") == 2  # with the card's


def test_secrets_of_settings_do_not_reach_the_card(run, hub, monkeypatch):
    monkeypatch.setenv("JUDGE_PASSWORD", "left|*plainsecretvalue10")
    hf.push_to_hub(run / "model", "me/tiny")
    text = hub.files["me/tiny"]["README.md"].decode()
    assert not re.findall(r"plainsecretvalue\d*|8123456789|wJalrXUt", text)
    assert TOKEN not in text
    settings = cells(text, "Settings")
    assert settings["judge"] == "https://judge.example"
    assert settings["alerts"] == '["https://hooks.slack.com", "(removed)"]'
    assert settings["random"] == "runs/(removed)"
    assert settings["track"] == '["wandb"]'
    assert cells(text, "Held-out figures")["best_checkpoint"] == "step-00000040, held_out/reward 0.312"
    assert settings["password"] == settings["api_key"] == settings["wandb.apiKey"] == "(removed)"


def test_the_card_of_a_checkpoint_ends_with_its_step(run, model, hub):
    path, _ = write_run(run / "checkpoints", model, step=20)
    for given in (path, run):  # of the run: its newest checkpoint
        hf.push_to_hub(given, "me/tiny")
        text = hub.files["me/tiny"]["README.md"].decode()
        assert "after 20 iterations (a checkpoint; the run made 40) of `grpo`" in text
        assert cells(text, "Held-out figures") == {"held_out/reward": "0.15625"}
        assert max(map(int, cells(text, "Curve"))) == 20


def test_another_curve_and_a_public_repository(run, hub):
    hf.push_to_hub(run / "model", "tiny", private=False, metric="actor/loss", run=run)
    assert hub.repos["me/tiny"]["visibility"] == "public"
    assert cells(hub.files["me/tiny"]["README.md"].decode(), "Curve")["40"] == "-40.0"
    with pytest.raises(ConfigError, match="Did you mean 'actor/loss'"):
        hf.push_to_hub(run / "model", "me/tiny", metric="actor/los")


def test_a_card_of_local_files_names_none(tmp_path, model, hub):
    config = {"name": str(tmp_path / "mine"), "model": str(model), "prompts": "data/train.jsonl"}
    with Tracker(tmp_path / "run", console=False, config=config) as tracker:
        tracker.log({"some/metric": 1.0})
    hf.push_to_hub(model, "me/tiny", run=tmp_path / "run")
    text = hub.files["me/tiny"]["README.md"].decode()
    assert ModelCard(text).data.base_model is None
    assert ModelCard(text).data.datasets is None
    assert "## Curve" not in text
    assert "of `mine`" in text


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("/create", 403, r"'me/tiny'.*status 403\. Give a token that may write there"),
        ("/auth-check/write", 403, "status 403"),
        ("/create", 401, "status 401.*Give a token"),
        ("/create", 500, "status 500. Look at the hub's status"),
        ("/commit/main", 403, "status 403"),
    ],
)
def test_what_the_hub_refuses_is_said_before_anything_is_uploaded_and_leaves_nothing(run, hub, end, status, message):
    hub.refuses[end] = status
    before = sorted(path.name for path in run.iterdir())
    with pytest.raises(ConfigError, match=message):
        hf.push_to_hub(run / "model", "me/tiny")
    sent = any("preupload" in path or "commit" in path for _, path in hub.asked)
    assert sent == (end == "/commit/main")
    assert sorted(path.name for path in run.iterdir()) == before


def test_bad_input_is_refused_without_a_request(run, model, hub, monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="Give user/model"):
        hf.push_to_hub(run / "model", "me/too/deep")
    with pytest.raises(ConfigError, match=r"has none of config.yaml"):
        hf.push_to_hub(model, "me/tiny", run=tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"there is no token\. Call `hf auth login`"):
        hf.push_to_hub(run / "model", "me/tiny")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        hf.push_to_hub(run / "model", "me/tiny", token=TOKEN)
    assert hub.asked == []


def test_options_of_a_save_that_is_made_already_are_refused(run, hub):
    with pytest.raises(ConfigError, match=r"uploaded as they are\. Leave dtype out"):
        hf.push_to_hub(run / "model", "me/tiny", dtype="bfloat16")


def test_a_trace_uploads_nothing(model, hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def driver() -> None:
        actor = hf.ActorWorker.on(hf.ResourcePool([1]), model=str(model), optim=hf.Adam(lr=1e-5), generate=hf.VLLM())
        run = hf.Run("runs/traced", every=None, console=False)
        for prompts in run.loop(hf.PromptLoader([{"prompt": "a"}, {"prompt": "b"}], batch_size=2, steps=1)):
            run.step(actor.generate_sequences(prompts))
        addresses.append(hf.push_to_hub(actor, "me/traced"))

    addresses: list[str] = []
    trace_driver(driver)
    assert addresses == [f"{hub.url}/me/traced"]
    assert hub.asked == []


def test_a_hub_that_cannot_be_reached_is_said(run, hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="the upload failed: ConnectError"):
        hf.push_to_hub(run / "model", "me/tiny")

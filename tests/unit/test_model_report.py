"""`hybridflow doctor MODEL_DIR`: what is understood of a directory, and the refusals that a run of it would meet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hybridflow.cli import commands as cli
from tests import tiny_models


def findings(model: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    status = cli.main(["doctor", str(model)])
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:5].strip()]
    return status, {line[5:20].strip(): line[:5].strip() + " " + line[20:] for line in lines}


def test_what_is_understood_of_a_directory(tmp_path, capsys):
    model = tiny_models.make_policy(tmp_path / "model", sliding_window=None, eos_token_id=[3, 5], head_dim=32)
    (model / "additional.bin").write_bytes(b"x")
    weights = load_file(model / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in weights.values())
    surplus = weights["model.norm.weight"].clone()
    save_file({**weights, "model.spare": surplus}, model / "model.safetensors", metadata={"format": "pt"})
    status, found = findings(model, capsys)
    assert status == 0
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    assert found["family"].startswith("ok llama")
    assert found["context"] == f"ok {config['max_position_embeddings']} tokens"
    assert "rope_theta" in found["rope"]
    assert found["windows"] == f"ok {layers} layers without"
    assert found["tie"].startswith("ok output layer")
    assert {"3", "5"} <= set(found["end ids"].removeprefix("ok ").split(", "))
    assert found["template"] in ("ok none",) or "characters" in found["template"]
    assert found["weights"] == f"ok {parameters + surplus.numel():,} parameters in F32"
    assert found["unread files"] == "ok additional.bin"
    assert found["unused tensors"] == "ok model.spare"
    assert found["generation"].startswith("ok vLLM takes it")


@pytest.mark.parametrize(
    ("key", "value", "where"),
    [
        ("eos_token_id", "end", "config"),
        ("num_hidden_layers", 99, "weights"),
        ("logit_scale", 0.5, "generation"),
    ],
)
def test_a_directory_that_a_run_would_refuse(tmp_path, capsys, key, value, where):
    model = tiny_models.make_policy(tmp_path / "model", head_dim=32)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    status, found = findings(model, capsys)
    assert status == 1
    assert [name for name, text in found.items() if text.startswith("FAIL")] == [where]

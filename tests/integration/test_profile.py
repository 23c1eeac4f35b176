"""`hybridflow profile` on host processes: what it measures, and that a plan is made with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.dataflows import ppo
from hybridflow.cli import commands as cli
from hybridflow.cli.profile_run import profile
from hybridflow.cluster.session import Session
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.spec import ModelSpec
from hybridflow.planner.cost.hardware import LayerProfile, architecture
from hybridflow.planner.describe.cluster_spec import ClusterSpec
from hybridflow.planner.describe.workload import Workload
from hybridflow.planner.search.planning import plan
from tests import tiny_models


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_layers_are_measured_and_priced(cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = tmp_path / "config.json"  # fewer layers than the copies that are built, and each has its own setting
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "tie_word_embeddings": True}
    own = {"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["sliding_attention"], **window}
    model.write_text(json.dumps(tiny_models.SIZES | own))
    saved = tmp_path / "profile.yaml"
    sizes = ["--length", "32", "--tokens", "128", "--rows", "4", "--repeats", "1"]
    assert cli.main(["profile", str(model), "--devices", "2", "--save", str(saved), *sizes]) == 0
    assert str(saved) in capsys.readouterr().out
    assert Session.existing() is cluster  # a session that ran before goes on

    found = LayerProfile.load(saved)
    assert found.device == "host"
    assert [n for n, _ in found.slowdown] == [1, 2]
    assert min(found.latency or 0, found.bandwidth or 0, found.call_seconds or 0, found.host or 0) > 0
    policy, value = ModelSpec.from_checkpoint(tmp_path), ModelSpec.from_checkpoint(tmp_path, "value")
    curves = {(curve.model, curve.kind, curve.t, curve.d): curve for curve in found.curves}
    passes = ("forward", "backward", "output", "output_backward")
    due = {(architecture(spec), kind, t, 1) for spec in (policy, value) for kind in passes for t in (1, 2)}
    due |= {(architecture(spec), "update", *sizes) for spec in (policy, value) for sizes in ((1, 1), (1, 2), (2, 1))}
    due |= {(architecture(policy), kind, t, 1) for kind in ("decode", "step") for t in (1, 2)}
    assert set(curves) == due
    assert [n for n, _ in curves[architecture(policy), "forward", 1, 1].points] == [64, 128]
    assert [n for n, _ in curves[architecture(policy), "decode", 2, 1].points] == [1, 2, 4]

    work = Workload(rows=16, prompt=8, response=8, dtype="float32")
    graph = ppo(policy, value, policy, value)
    placement = plan(graph, ClusterSpec.this_machine(2), work, profile=found, budget_s=1.0)
    assert placement.seconds > 16 * found.call_seconds / 16


def test_what_cannot_be_profiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(ConfigError, match="devices=0"):
        profile(tmp_path, 0)
    with pytest.raises(ConfigError, match="two numbers of layers"):
        profile(tmp_path, 1, few=2, many=2)
    with pytest.raises(ConfigError, match="no setting 'token'"):
        profile(tmp_path, 1, token=3)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        profile(tmp_path / "nowhere", 1)
    assert cli.main(["profile", str(tmp_path), "other"]) == 2
    assert "one model" in capsys.readouterr().err

"""`benchmarks.train_step`: what it counts, and that it runs where ray, vLLM and Megatron-core are not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import train_step

ABSENT = """
import runpy, sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ("ray", "vllm", "megatron"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
runpy.run_module("benchmarks.train_step", run_name="__main__")
"""
ROWS = ["--rows", "4", "--repeats", "1"]


def test_models_have_the_sizes_of_their_names():
    assert {name: round(spec.num_parameters / 1e6) for name, spec in train_step.MODELS.items()} == {
        "tiny": 1,
        "0.5b": 494,
        "7b": 7616,
    }


def test_flops_are_six_per_weight_and_token_and_those_of_attention():
    spec, prompt, response = train_step.MODELS["tiny"], 10, 30
    layers = spec.num_parameters - 2 * spec.vocab * spec.hidden - (2 * spec.layers + 1) * spec.hidden
    layers -= spec.layers * (spec.heads + 2 * spec.kv_heads) * spec.head_dim  # biases
    tokens = prompt + response
    attention = 2 * 2 * spec.heads * spec.head_dim * spec.layers * tokens**2 / 2
    forward = 2 * layers * tokens + 2 * spec.vocab * spec.hidden * response + attention
    assert train_step.update_flops(spec, prompt, response, 5) == pytest.approx(5 * 3 * forward)


def test_peaks_are_those_of_known_devices():
    assert train_step.peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert train_step.peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert train_step.peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12
    for name, tflops in (("L40S", 362), ("L40", 181), ("L4", 121), ("H200", 989.4), ("H200 NVL", 835), ("H20", 148)):
        assert train_step.peak_flops(f"NVIDIA {name}", "bfloat16") == tflops * 1e12
    assert train_step.peak_flops("NVIDIA B200", "bfloat16") == 2250e12
    assert train_step.peak_flops("NVIDIA GeForce RTX 4090", "bfloat16") == 165e12
    for name in ("NVIDIA L40G", "NVIDIA GB200", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        assert train_step.peak_flops(name, "bfloat16") is None
    assert train_step.peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert train_step.peak_flops("cpu", "bfloat16") is None


@pytest.mark.slow
def test_it_runs_without_ray_vllm_and_megatron():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", ABSENT, "--device", "cpu", *ROWS]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["device"] == "cpu"
    assert found["backend"] == "fsdp"
    assert found["tokens_per_second"] > 0
    assert found["peak_memory_gib"] > 0
    assert found["utilisation"] is None
    assert "the peak of 'cpu' in float32 is not known" in found["reason"]

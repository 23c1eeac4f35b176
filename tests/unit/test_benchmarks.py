"""The arithmetic of the benchmark programs; the programs themselves are run by hand (docs/benchmarks.md)."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import controller, controls, generation, iteration, memory_picture, packing, streams, train_step
from benchmarks.stream_runs import LoopRun, Speeds
from hybridflow.planner import DecodingSpeed


def test_stages_add_up_to_the_iteration():
    calls = {
        "actor.generate_sequences": 0.5,
        "actor.generate_sequences/transition": 0.1,
        "actor.generate_sequences/generation": 0.39,
        "actor.compute_log_prob": 0.05,
        "helper.compute_advantage": 0.02,
        "helper.batch_metrics": 0.3,  # runs beside the updates
        "critic.update_critic": 0.1,
        "actor.update_actor": 0.15,
    }
    stages = iteration.stage_seconds([calls, {name: 3 * seconds for name, seconds in calls.items()}], mean=2.0)
    expected = {"generation": 0.8, "transition": 0.2, "preparation": 0.14, "update": 0.5, "controller": 0.36}
    assert stages == pytest.approx(expected)
    assert sum(stages.values()) == pytest.approx(2.0)


def test_the_rise_is_that_of_the_last_iterations_over_the_first():
    assert controls.rise([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]) == pytest.approx(0.5)


def test_a_hop_is_measured_as_often_as_asked():
    hops = []
    found = controller.measure(lambda: hops.append(0), 20)
    assert len(hops) == 5 + 20  # five warm it up
    assert 0 <= found["min_ms"] <= found["median_ms"]


def test_drawn_lengths_are_distributed_like_gsm8k():
    for drawn, (mean, deviation) in zip(packing.draw_lengths(20_000), (packing.QUESTION, packing.ANSWER), strict=True):
        assert statistics.mean(drawn) == pytest.approx(mean, rel=0.02)
        assert statistics.pstdev(drawn) == pytest.approx(deviation, rel=0.05)


def test_lengths_of_a_file_are_words_digits_and_marks(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "Why 12?", "answer": "Because.\\n#### 7"}\n' * 3)
    assert packing.read_lengths(path, 2) == ([4, 4], [8, 8])


def test_the_synchronous_loop_on_shared_cores_is_predicted_by_hand():
    """Each of 2 replicas decodes 4 rows of 10 tokens: a step takes 0.5 + 4 * 0.25 s. Then 8 * 26 tokens are trained."""
    options = streams.parser().parse_args(["--rows", "8", "--batches", "4", "--warm-up", "1"])
    decoding = DecodingSpeed(base=0.5, per_row=0.25)
    speeds = Speeds(decoding=decoding, train_seconds_per_token=0.125, sync_seconds=2.0, call_overhead=0.0, cores=2.0)
    seconds = 10 * 1.5 + 8 * 26 * 0.125 + 2.0
    predicted = streams.predict("sync", speeds, [10] * 8, options)
    assert 8 / predicted.rows_per_second == pytest.approx(seconds)
    enough = replace(speeds, cores=4.0)
    assert 8 / streams.predict("one_step_off", enough, [10] * 8, options).rows_per_second == pytest.approx(26 + 2)
    runs = [
        LoopRun(rows_per_second=rate, trainer_busy=0.5, recomputed=0.0, staleness=[0, number])
        for number, rate in enumerate((0.1, 0.2, 0.4))
    ]
    found = streams.compare(runs, [predicted], sync=0.1)
    assert (found["rows_per_s"], found["ratio"], found["staleness"][1]) == (0.2, 2.0, 2)
    assert found["error"] == pytest.approx(8 / seconds / 0.2 - 1, abs=1e-3)


def test_rows_as_they_come_fill_padded_micro_batches_to_the_budget():
    lengths = torch.tensor([3, 5, 2, 9, 1, 30])
    rows = packing.InOrder(budget=12, packed=False).rows(lengths)
    assert [part.tolist() for part in rows] == [[0, 1], [2], [3], [4], [5]]
    ways = packing.splits(packing.Split(12))
    assert ways["packed"].packed
    assert not ways["padded"].packed
    assert not ways["sorted"].packed


def test_ragged_lengths_have_their_median_and_longest():
    lengths = generation.ragged_lengths()
    assert max(lengths) == generation.LONGEST
    assert min(lengths) >= 1
    assert statistics.median(lengths) == pytest.approx(generation.MEDIAN, abs=1)
    assert lengths != sorted(lengths)


def test_a_picture_of_memory_has_a_column_for_each_call():
    """As tall as what is held and, above it, what the call had at its peak; without what is in host memory."""
    call = {"kind": "call", "pool": "main", "rank": 0, "role": "actor", "method": "update_actor", "step": 2}
    held = {"actor parameters": 3 << 30, "critic image": 9 << 30, "activations": 1 << 30}
    events = [{**call, "held": held}, {**call, "held": {"actor parameters": 2 << 30}}, {**call, "step": 1}, call]
    calls = memory_picture.calls_of([*events, {**call, "rank": 1, "held": held}], 2, "main/0")
    assert len(calls) == 2
    drawn = memory_picture.picture(calls)
    tall = [memory_picture.HEIGHT * part for part in (3 / 4, 1 / 4, 2 / 4)]
    assert [f'height="{one:.1f}"' in drawn for one in tall] == [True] * 3
    assert "4 GiB" in drawn
    assert "image" not in drawn


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
STEP_ROWS = ["--rows", "4", "--repeats", "1"]


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
    command = [sys.executable, "-c", ABSENT, "--device", "cpu", *STEP_ROWS]
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

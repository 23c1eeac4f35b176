"""What a training backend cannot do with a model is said on the driver, before any process, file or memory is touched
beyond the headers of the checkpoint: what was asked, what was found, what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.engines.fsdp.engine import bytes_kept, require_host_memory
from hybridflow.engines.fsdp.layout import fsdp_layout
from hybridflow.engines.host_memory import available
from hybridflow.engines.process_groups import ProcessGroups, RankContext
from hybridflow.engines.train_backends import backend
from hybridflow.errors import CheckpointError, ConfigError, HybridFlowError, ModelError, PlacementError
from hybridflow.models.hf_spec import read_spec
from hybridflow.models.spec import ModelSpec
from hybridflow.topology import RankGrid
from tests import tiny_models

ADAM = hf.Adam(lr=1e-3)
ADAPTED = hf.Megatron(tp=2, sequence_parallel=True, lora=hf.LoRA(rank=2))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model that every backend takes, and what is left of models that some or none of them take: their configs."""
    directory = tmp_path_factory.mktemp("models")
    found = {"llama": tiny_models.make_policy(directory / "llama", tokenizer=False, num_key_value_heads=2)}
    configs: dict[str, dict[str, Any]] = {
        "gpt2": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 11},
        "t5": {"model_type": "t5", "d_model": 8},
        "text": {"model_type": "gemma2", "hidden_size": "abc"},
        "no heads": {"model_type": "gemma2", "num_attention_heads": 0},
    }
    for name, config in configs.items():
        found[name] = directory / name
        found[name].mkdir()
        (found[name] / "config.json").write_text(json.dumps(config))
    for name in ("gpt2", "mamba"):
        sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 11}
        found[f"whole {name}"] = directory / f"whole-{name}"
        made = transformers.AutoConfig.for_model(name, **sizes)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(found[f"whole {name}"])
    return found


def placed(devices: int, settings: dict[str, Any], worker: Any = hf.ActorWorker, grid: Any = None) -> None:
    """What placing a worker on a pool of so many devices does before the pool is asked for anything."""
    every = {
        "optim": ADAM,
        "generate": None,
        "offload": (),
        "overlap": False,
        "bucket_mb": None,
        "of": "rewards",
        **settings,
    }
    spec = worker.worker_spec(worker.worker_spec(every).resolve(every))
    spec.check(grid or spec.grid(devices), "cpu")


@pytest.mark.parametrize("train", [hf.FSDP(), hf.FSDP(tp=2), hf.ZeRO(stage=2), hf.Megatron(tp=2), ADAPTED], ids=str)
def test_what_fits_is_taken(models, train):
    placed(4, {"model": models["llama"], "train": train})


def test_peft_is_asked_on_the_driver(models, monkeypatch):
    train = hf.FSDP(lora=hf.LoRA())
    placed(4, {"model": models["whole mamba"], "train": train})

    def refused(*given: Any, **named: Any) -> None:
        raise ValueError("not this one")

    monkeypatch.setattr("peft.inject_adapter_in_model", refused)
    with pytest.raises(ConfigError, match=r"of a mamba decoder means in_proj: peft does not add .*: not this one"):
        placed(4, {"model": models["whole mamba"], "train": train})


@pytest.mark.parametrize(
    ("model", "devices", "train", "error", "says"),
    [
        ("llama", 4, lambda: "fsdp", ConfigError, r"train='fsdp'.*give a strategy such as"),
        (
            "llama",
            4,
            lambda: hf.FSDP,
            ConfigError,
            r"ActorWorker\(train=FSDP\): .* hf.Megatron\(tp=2\), hf.FSDP\(\) or hf.ZeRO",
        ),
        (
            "llama",
            4,
            lambda: hf.FSDP(tp=3),
            PlacementError,
            r"actor: FSDP\(tp=3\) needs .* = 3 devices, the pool has 4",
        ),
        ("llama", 4, lambda: hf.FSDP(dp=3), PlacementError, r"the pool has 4. Use FSDP\(tp=1, dp=4\)"),
        ("llama", 6, lambda: hf.FSDP(replicate=4), PlacementError, r"dp=6 .* Use replicate in \[1, 2, 3, 6\]"),
        ("llama", 3, lambda: hf.ZeRO(stage=3, dp=4), PlacementError, r"the pool has 3. Use ZeRO\(stage=3, dp=3\)"),
        ("llama", 4, lambda: hf.ZeRO(stage=2, dtype="int8"), ConfigError, r"ZeRO\(dtype='int8'\) is unknown.*bfloat16"),
        ("llama", 4, lambda: hf.FSDP(dtype="half"), ConfigError, r"FSDP\(dtype='half'\) is unknown.*float16"),
        ("llama", 4, lambda: hf.FSDP(tp=4), ModelError, r"2 kv-heads, which do not divide by tp=4. Use FSDP\(tp=\) in"),
        ("gpt2", 4, lambda: hf.Megatron(), ModelError, r"does not compute gpt2 models.*Use FSDP\(\) or ZeRO\(\)"),
        ("gpt2", 4, lambda: hf.FSDP(tp=2), ModelError, r"gpt2 model.* no plan.*FSDP\(tp=2\) cannot cut it.*without tp"),
        (
            "gpt2",
            4,
            lambda: hf.FSDP(),
            CheckpointError,
            "gpt2 needs .*safetensors files, it has none. Convert the model",
        ),
        ("t5", 4, lambda: hf.FSDP(), ModelError, "'t5' is not supported: AutoModelForCausalLM does not know it"),
        ("text", 4, lambda: hf.FSDP(), ModelError, r"gemma2 config.json: .*'hidden_size' expected int, got str"),
        ("no heads", 4, lambda: hf.ZeRO(stage=1), ModelError, "does not take this gemma2 config.json: .* by zero"),
        (
            "llama",
            4,
            lambda: hf.FSDP(lora=hf.LoRA(targets=("c_attn",))),
            ConfigError,
            "'c_attn' matches no linear layer of this llama decoder, which has q_proj, .* in 2 layers",
        ),
        *(
            (
                "whole gpt2",
                4,
                lambda targets=targets: hf.FSDP(lora=hf.LoRA(targets=targets)),
                ConfigError,
                "this gpt2 decoder has no linear layers that adapters could be added to. Train it without lora=",
            )
            for targets in ("all-linear", "c_attn")
        ),
        (
            "whole mamba",
            4,
            lambda: hf.FSDP(lora=hf.LoRA(targets=("out_proj",))),  # its fused kernel reads the weights themselves
            ConfigError,
            "'out_proj' matches no linear layer of this mamba decoder, which has in_proj in 1 layers",
        ),
        (
            "llama",
            4,
            lambda: hf.Megatron(pp=2, lora=hf.LoRA(targets=("c_attn",))),
            ConfigError,
            "'c_attn' matches no linear layer of this llama decoder, which has q_proj, .* in 2 layers",
        ),
        (
            "llama",
            4,
            lambda: hf.Megatron(tp=2, lora=hf.LoRA(dropout=0.1)),
            ConfigError,
            r"actor: LoRA\(dropout=0.1\) with t=2: .* different inputs of one layer. Use dropout=0 or tp=1",
        ),
    ],
)
def test_what_cannot_work_is_refused(models, model, devices, train, error, says):
    with pytest.raises(HybridFlowError, match=says) as found:
        placed(devices, {"model": models[model], "train": train()})
    assert type(found.value) is error


@pytest.mark.parametrize(
    ("grid", "train", "says"),
    [
        (RankGrid(p=2, d=2), hf.FSDP(), r"actor has a grid of its own, p=2, t=1, d=2.*FSDP.* ranks are p=1, t=1, d=4"),
        (RankGrid(p=2, d=2), hf.ZeRO(stage=1), r"p=2, t=1, d=2.*ZeRO\(stage=1.*Leave grid= out, or use hf.Megatron"),
        (RankGrid(t=2, d=2), hf.ZeRO(stage=1), r"p=1, t=2, d=2.*ZeRO\(stage=1"),
        (RankGrid(t=2, d=2), hf.FSDP(), r"p=1, t=2, d=2.*p=1, t=1, d=4"),
        (RankGrid(d=4), hf.FSDP(tp=2), r"p=1, t=1, d=4.*p=1, t=2, d=2"),
        (RankGrid(d=4), hf.FSDP(dp=2), r"the pool has 4"),
        (RankGrid(t=2, d=2), hf.FSDP(tp=2, replicate=4), r"replicate=4\).*dp=2"),
    ],
    ids=str,
)
def test_a_grid_of_ones_own_is_that_of_the_strategy(models, grid, train, says):
    """The worker refuses it, and so does whoever lays the model out on it."""
    with pytest.raises(PlacementError, match=says):
        placed(4, {"model": models["llama"], "train": train}, grid=grid)
    spec = read_spec(models["llama"], "lm")
    with pytest.raises(PlacementError):
        backend(train, "layout").weights_layout(train, spec, grid)


def test_a_grid_of_ones_own_that_fits_is_taken(models):
    grid = RankGrid(t=2, d=2, p_g=1, t_g=1)
    placed(4, {"model": models["llama"], "train": hf.FSDP(tp=2, replicate=2)}, grid=grid)


def test_a_rollout_of_adapters_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"RolloutWorker\(model=.*LoRA adapters.*hf.sync_weights.*merged=True"):
        placed(1, {"model": tmp_path, "generate": hf.VLLM()}, hf.RolloutWorker)


def test_a_critic_says_who_it_is(models):
    with pytest.raises(PlacementError, match=r"critic: ZeRO\(stage=1, dp=3\) needs"):
        placed(4, {"model": models["llama"], "train": hf.ZeRO(stage=1, dp=3), "offload": False}, hf.CriticWorker)
    with pytest.raises(ConfigError, match=r"CriticWorker\(offload='cpu'\): the critic waits as a whole"):
        placed(4, {"model": models["llama"], "train": hf.FSDP(), "offload": "cpu"}, hf.CriticWorker)


SPEC = ModelSpec(family="llama", hidden=32, intermediate=64, layers=2, heads=4, kv_heads=4, head_dim=8, vocab=61)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_data_parallel_size_follows_from_the_pool(tp, shard, replicate):
    grid = hf.FSDP(tp=tp, replicate=replicate).grid(tp * shard * replicate)
    assert grid == RankGrid(p=1, t=tp, d=shard * replicate)
    assert hf.ZeRO(stage=2).grid(shard) == RankGrid(d=shard)


@settings(deadline=None)
@given(st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3))
def test_ranks_of_the_grid_are_those_of_the_layout(tp, shard, replicate):
    """rank = (r * shard + s) * tp + t: the data parallel group of a rank holds its tensor parallel part together."""
    strategy = hf.FSDP(tp=tp, replicate=replicate)
    grid = strategy.grid(tp * shard * replicate)
    layout, expected = (
        backend(strategy, "layout").weights_layout(strategy, SPEC, grid),
        fsdp_layout(SPEC, shard, replicate=replicate, tp=tp),
    )
    for rank in range(grid.size):
        assert list(layout.regions(rank)) == list(expected.regions(rank))
        copies = grid.group(rank, "d")[grid.coords(rank).d % shard :: shard]
        assert all(layout.regions(other) == layout.regions(rank) for other in copies)


def test_zero_keeps_parameters_whole_until_stage_3():
    grid = RankGrid(d=4)
    held = {}
    for stage in (1, 2, 3):
        strategy = hf.ZeRO(stage=stage)
        layouts = backend(strategy, "layout")
        for state, of in ((False, layouts.weights_layout), (True, layouts.state_layout)):
            layout = of(strategy, SPEC, grid)
            held[stage, state] = sum(region.box.numel for region in layout.regions(0))
    whole = SPEC.num_parameters
    assert held[1, False] == held[2, False] == whole
    assert held[3, False] == held[3, True] < 0.3 * whole
    assert held[1, True] == held[2, True] < 0.3 * whole


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: hf.FSDP(tp=0), ConfigError, r"FSDP\(tp=0\): must be a whole number of at least 1"),
        (lambda: hf.FSDP(replicas=2), ConfigError, "FSDP has no setting 'replicas'"),
        (lambda: hf.FSDP(pp=2), ConfigError, r"no setting 'pp'\..*hf\.Megatron\(pp=...\) has pipeline stages"),
        (lambda: hf.FSDP(stage=2), ConfigError, r"no setting 'stage'\..*hf\.ZeRO\(stage=...\)"),
        (lambda: hf.ZeRO(stage=2, tp=2), ConfigError, r"no setting 'tp'\..*hf\.FSDP\(tp=...\)"),
        (lambda: hf.ZeRO(stage=2, lora=None), ConfigError, r"no setting 'lora'\. hf\.FSDP\(lora=...\)"),
        (lambda: hf.ZeRO(stages=2), ConfigError, "no setting 'stages'. Did you mean 'stage'"),
        (lambda: hf.FSDP(offload="all"), ConfigError, r"FSDP\(offload='all'\): give True or False"),
        (lambda: hf.FSDP(dp=4, replicate=3), PlacementError, r"replicate=3\).*dp=4.*Use replicate in \[1, 2, 4\]"),
        (lambda: hf.FSDP(dp=2, replicate=2).grid(4), PlacementError, r"Use FSDP\(tp=1, replicate=2, dp=4\)"),
        (lambda: hf.FSDP(dp=2, replicate=2).grid(5), PlacementError, r"FSDP\(tp=1, replicate=2\) on 4 devices"),
        (lambda: hf.ZeRO(stage=4), ConfigError, r"ZeRO\(stage=4\): must be 1 \(optimizer state\), 2 .* or 3"),
        (lambda: hf.ZeRO(stage=True), ConfigError, "stage=True"),
        (lambda: hf.ZeRO(), ConfigError, "ZeRO needs stage="),
    ],
)
def test_bad_settings_are_refused(make, error, says):
    with pytest.raises(error, match=says):
        make()


def test_offloading_needs_host_memory():
    """Parameters, gradients and two moments in float32, of both ranks of the second node."""
    grid, strategy, adam = RankGrid(d=4), hf.FSDP(offload=True), hf.Adam(lr=1e-3)
    layout = backend(strategy, "layout").weights_layout(strategy, SPEC, grid)
    needed = 2 * 16 * sum(region.box.numel for region in layout.regions(1))
    groups = ProcessGroups(dist.HashStore(), "critic", range(4), 1, torch.device("cpu"))
    context = RankContext("critic", 1, grid, groups.device, groups, nodes=(7, 3, 3, 7))
    require_host_memory(context, strategy, layout, torch.bfloat16, adam, free=needed)
    with pytest.raises(ConfigError, match=r"critic: offload=True keeps .* GiB of 2 ranks.*has .* GiB free"):
        require_host_memory(context, strategy, layout, torch.bfloat16, adam, free=needed - 1)
    require_host_memory(context, hf.FSDP(), layout, torch.bfloat16, adam, free=0)
    require_host_memory(context, strategy, layout, torch.bfloat16, None, free=needed // 8)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "expected"),
    [
        (hf.FSDP(), hf.Adam(lr=1), 16),
        (hf.FSDP(), hf.SGD(lr=1, momentum=0.5), 12),
        (hf.FSDP(), hf.SGD(lr=1), 8),
        (hf.FSDP(), None, 2),
        (hf.ZeRO(stage=1), hf.Adam(lr=1), 12 / 4),
        (hf.ZeRO(stage=2), hf.Adam(lr=1), 16 / 4),
        (hf.ZeRO(stage=2), None, 0),
        (hf.ZeRO(stage=3), hf.Adam(lr=1), 16),
    ],
    ids=str,
)
def test_bytes_in_host_memory(strategy, optimizer, expected):
    assert bytes_kept(strategy, torch.bfloat16, optimizer, ranks=4) == expected


def test_a_container_has_what_its_limit_leaves(tmp_path):
    machine, group = tmp_path / "meminfo", tmp_path / "group"
    assert available(machine, group) is None
    machine.write_text("MemTotal: 900 kB\nMemAvailable:  800 kB\n")
    assert available(machine, group) == 800 * 1024
    group.mkdir()
    for name, text in (("max", "max\n"), ("current", "300000\n"), ("stat", "anon 5\ninactive_file 50000\n")):
        (group / f"memory.{name}").write_text(text)
    assert available(machine, group) == 800 * 1024
    (group / "memory.max").write_text("500000\n")
    assert available(machine, group) == 500000 - 300000 + 50000
    (group / "memory.max").write_text("200000\n")
    assert available(machine, group) == 0

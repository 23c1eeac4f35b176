"""LoRA on every backend against peft on transformers' model in one process: outputs, gradients, updates, files."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.engines.checkpoint.writer import save_checkpoint, saved_dtypes
from hybridflow.engines.lora.adapters import read_config
from hybridflow.engines.lora.targets import trained_tensors
from hybridflow.models.hf_spec import read_spec
from tests.contracts.engine_tasks import _sum_of_log_probs, boxes, build, share
from tests.contracts.example_models import load_model, loss_of, make_batch, reference, relative, spec_of, totals_of
from tests.contracts.rank_processes import World
from tests.contracts.train_contract import OPTIMIZERS, Sizes, count, joined, values_of, whole


def updates(
    world: World, name: str, strategy: Any, size: int, path: Path, head: str, optimizer: Any, steps: int, save: Path
) -> dict[str, Any]:
    """Updates of adapters: gradients of the first, norms, adapters and merged weights after them, bytes, and both kinds
    of saved directories."""
    spec = read_spec(path, head)  # type: ignore[arg-type]
    engine = build(world, name, strategy, size, path, head, optimizer, spec)
    adapters, loss = engine.adapters, loss_of(head)
    found: dict[str, Any] = {"norms": []}
    regions = engine.layout().regions(engine.context.rank)
    names = {region.storage for region in regions if region.box.tensor != "score.weight"}
    frozen = {key: engine.storage()[key].clone() for key in names}
    for step in range(steps):
        engine.forward_backward(share(make_batch(seed=step), engine.grid, world.rank), loss, loss.outputs)
        if step == 0:
            found["gradients"] = boxes(engine, engine.gradients(), adapters.layout)
        found["gradient_bytes"] = sum(grad.nbytes for grad in engine.gradients().values())
        found["norms"].append(engine.step()["grad_norm"])
    found["adapters"] = boxes(engine, adapters.storage, adapters.layout)
    found["state_bytes"] = {k: sum(t.nbytes for t in kind.values()) for k, kind in engine.optimizer_storage().items()}
    assert all(engine.storage()[key].equal(frozen[key]) for key in names), "the frozen model was trained"
    adapters.merge()
    adapters.merge()  # does nothing
    found["merged"] = boxes(engine, engine.storage())
    everyone = engine.context.groups.everyone()
    if save.name:
        (layout, storage), known = engine.exact_weights(), Checkpoint(path).dtypes(spec.tensors())
        who = {"group": everyone, "rank": world.rank}
        save_checkpoint(save / "whole", layout, storage, like=path, dtypes=saved_dtypes(known, None), **who)
    adapters.restore()
    assert all(engine.storage()[key].equal(frozen[key]) for key in names), "restored to other bits"
    adapters.save(save / "adapters", path)
    adapters.save(save / "adapters", path)  # in the place of what is there
    engine.context.groups.close()
    return found


def outputs(world: World, name: str, strategy: Any, size: int, path: Path, head: str, disabled: bool) -> Any:
    """Outputs of this rank's rows; with `disabled` those of the model without its adapters."""
    engine = build(world, name, strategy, size, path, head)
    rows, names = share(make_batch(), engine.grid, world.rank), ("values",) if head == "value" else ("log_probs",)
    if disabled:
        with engine.adapters.disabled():
            engine.forward(rows, names)
        adapted = engine.forward(rows, names)
        with engine.adapters.disabled():
            found = engine.forward(rows, names)
        if adapted is not None:
            values = adapted[names[0]].values
            assert not values.equal(found[names[0]].values) or not len(values)
    else:
        found = engine.forward(rows, names)
    engine.context.groups.close()
    return found


def in_parts(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> bool:
    """A step part by part updates what a step in one go does, bit for bit."""
    loss, found = loss_of("lm"), []
    for parts in (False, True):
        engine = build(world, f"{name}-{parts}", strategy, size, path, "lm", optimizer)
        for seed in range(2):
            engine.forward_backward(share(make_batch(seed=seed), engine.grid, world.rank), loss, loss.outputs)
            if parts:
                assert list(engine.step_parts()) == list(range(len(engine.step_groups())))
            else:
                engine.step()
        found.append({key: tensor.clone() for key, tensor in engine.adapters.storage.items()})
        engine.context.groups.close()
    return all(found[0][key].equal(found[1][key]) for key in found[0])


def sixteen_bits(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> dict[str, Any]:
    """Dtypes of a model with adapters, and its first gradient norm under a loss without the jumps of clipping."""
    engine = build(world, name, strategy, size, path, "lm", optimizer)
    rows = share(make_batch(), engine.grid, world.rank)
    engine.forward_backward(rows, _sum_of_log_probs, ("log_probs",))
    norm = engine.step()["grad_norm"]
    kinds = {tensor.dtype for tensor in engine.storage().values()}, {t.dtype for t in engine.adapters.storage.values()}
    before = {key: tensor.clone() for key, tensor in engine.storage().items()}
    engine.adapters.merge()
    changed = any(not torch.equal(before[key], tensor) for key, tensor in engine.storage().items())
    engine.adapters.restore()
    same = all(torch.equal(before[key], tensor) for key, tensor in engine.storage().items())
    engine.context.groups.close()
    return {"norm": norm, "kinds": kinds, "changed": changed, "same": same}


def dropped_out(world: World, name: str, strategy: Any, size: int, path: Path, optimizer: Any) -> list[float]:
    """Gradient norms of two passes over the same rows, with random numbers from one seed."""
    engine, norms = build(world, name, strategy, size, path, "lm", optimizer), []
    torch.manual_seed(5)
    for _ in range(2):
        engine.forward_backward(make_batch(), _sum_of_log_probs, ("log_probs",))
        norms.append(sum(float(grad.square().sum()) for grad in engine.gradients().values()))
        engine._optimizer.zero_grad()
        engine._gradients = "zero"
    engine.context.groups.close()
    return norms


SMALL: dict[str, Any] = {"micro_tokens": 48}
CASES: dict[str, tuple[Any, Sizes]] = {
    "fsdp-1": (FSDP(**SMALL), (1, 1, 1)),
    "fsdp-4": (FSDP(**SMALL), (1, 1, 4)),
    "hsdp-2x2": (FSDP(replicate=2, **SMALL), (1, 1, 4)),
    "recompute": (FSDP(recompute=True, reduce_often=True, **SMALL), (1, 1, 4)),
    "offload": (FSDP(offload=True, **SMALL), (1, 1, 4)),
    "megatron-1": (Megatron(recompute=True, **SMALL), (1, 1, 1)),
    "megatron-d3": (Megatron(**SMALL), (1, 1, 3)),
    "megatron-t2": (Megatron(tp=2, recompute=True, packed=False, **SMALL), (1, 2, 1)),
    "megatron-t2-sequence": (Megatron(tp=2, sequence_parallel=True, **SMALL), (1, 2, 2)),
    "megatron-p2": (Megatron(pp=2, recompute=True, **SMALL), (2, 1, 2)),
    "megatron-p3t2": (Megatron(tp=2, pp=3, stage_layers=(1, 2, 1), **SMALL), (3, 2, 1)),
    "megatron-p2t2": (Megatron(tp=2, pp=2, sequence_parallel=True, recompute=True, **SMALL), (2, 2, 1)),
}
BOTH = ("fsdp-4", "megatron-p2t2", "megatron-t2-sequence")  # a language and a value model
KEYS = [("qwen3-tied", "lm"), ("llama", "value")]
RANK, ALPHA, TARGETS, STEPS = 3, 5, ["q_proj", "v_proj", "down_proj"], 3  # a rank that no number of ranks divides


@pytest.fixture(scope="module")
def starts(models, tmp_path_factory) -> dict[tuple[str, str], Path]:
    """Adapters that peft saved, of which neither A nor B is zero."""
    found = {}
    for name, head in KEYS:
        found[name, head] = tmp_path_factory.mktemp("adapters") / f"{name}-{head}"
        make_adapters(models[name, head], head, TARGETS, found[name, head])
    return found


def make_adapters(path: Path, head: str, targets: Any, directory: Path) -> None:
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="SEQ_CLS" if head == "value" else "CAUSAL_LM"
    )
    model = get_peft_model(load_model(path, head), config)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in trained(model).values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    model.save_pretrained(str(directory))


def near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted) < 1e-5


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained parameters of a peft model by our names."""
    short = ((".default.", "."), (".modules_to_save", ""), ("base_model.model.", ""))
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            for old, new in short:
                name = name.replace(old, new)
            found[name] = parameter
    return found


def peft_model(path: Path, head: str, adapters: Path) -> Any:
    return PeftModel.from_pretrained(load_model(path, head), str(adapters), is_trainable=True)  # type: ignore[arg-type]


def peft_updates(
    path: Path, head: str, adapters: Path, make: Any, clip: float = 0.7, steps: int = STEPS
) -> dict[str, Any]:
    model, loss = peft_model(path, head, adapters), loss_of(head)
    parameters, norms, gradients = trained(model), [], {}
    optimizer = make(parameters.values())
    for step in range(steps):
        batch = make_batch(seed=step)
        optimizer.zero_grad()
        scalar, _ = loss(reference(model.base_model.model, head, batch), batch, totals_of(batch))
        scalar.backward()
        grads = {name: parameter.grad.clone() for name, parameter in parameters.items()}  # type: ignore[union-attr]
        gradients = gradients or grads
        norms.append(math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values())))
        if norms[-1] > clip:
            for parameter in parameters.values():
                parameter.grad.mul_(clip / (norms[-1] + 1e-6))  # type: ignore[union-attr]
        optimizer.step()
    after = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    merged = {name: tensor.detach() for name, tensor in model.merge_and_unload().named_parameters()}
    return {"norms": norms, "gradients": gradients, "adapters": after, "merged": merged}


@pytest.fixture(scope="module")
def expected(models, starts) -> dict[tuple[str, str, str], dict[str, Any]]:
    found = {}
    for key in KEYS:
        for kind, (_, make) in OPTIMIZERS.items():
            found[*key, kind] = peft_updates(models[key], key[1], starts[key], make)
    return found


def lora(start: Path | None, **more: Any) -> LoRA:
    return LoRA(**({"rank": RANK, "alpha": ALPHA, "targets": TARGETS, "start": start and str(start)} | more))


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("name", "kind"), [("fsdp-4", "sgd"), ("megatron-t2-sequence", "sgd"), *((name, "adam") for name in CASES)]
)
def test_updates_are_those_of_peft(processes, models, starts, expected, tmp_path, name, kind):
    strategy, size = CASES[name][0], count(CASES[name][1])
    for key in KEYS if name in BOTH else KEYS[:1]:
        (_, head), path, oracle = key, models[key], expected[*key, kind]
        strategy, save = replace(strategy, lora=lora(starts[key])), tmp_path / head
        save.mkdir()
        args = (processes.name(), strategy, size, path, head, OPTIMIZERS[kind][0], STEPS, save)
        found = processes.run(size, updates, *args)
        shapes = trained_tensors(spec_of(path, head), lora(None))
        assert found[0]["norms"] == pytest.approx(oracle["norms"], rel=1e-5)
        assert relative(whole([part["gradients"] for part in found], shapes), oracle["gradients"]) < 1e-5
        adapters = whole([part["adapters"] for part in found], shapes)
        merged = whole([part["merged"] for part in found], spec_of(path, head).tensors())
        assert near(adapters, oracle["adapters"])
        assert near(merged, oracle["merged"])
        assert_saved(save, path, head, adapters, oracle)


def assert_saved(save: Path, path: Path, head: str, adapters: dict[str, Tensor], oracle: dict[str, Any]) -> None:
    """peft loads what was saved, transformers loads the merged model, and both compute the same."""
    again = peft_model(path, head, save / "adapters")
    assert all(adapters[name].equal(parameter) for name, parameter in trained(again).items())
    config = json.loads((save / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(path)
    base, setting = read_config(save / "adapters")
    assert (base, setting.rank, setting.alpha, setting.targets) == (str(path), RANK, ALPHA, tuple(sorted(TARGETS)))
    name = "values" if head == "value" else "log_probs"
    with torch.no_grad():
        here = reference(again.base_model.model, head, make_batch())[name].values
        there = reference(load_model(save / "whole", head), head, make_batch())[name].values
    assert float((here - there).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("model", "tp", "targets"),
    [
        ("llama-tied", 2, ("all-linear",)),
        ("qwen2", 2, ("k_proj", "model.layers.1.mlp.gate_proj")),
        ("mistral", 2, ("all-linear",)),
        ("thirds", 3, ("mlp.up_proj",)),
        ("qwen2-two-kv", 4, ("all-linear",)),
        ("qwen3-one-kv", 4, ("k_proj", "o_proj")),
    ],
)
def test_families_cut_as_megatron_cuts_them(processes, models, tmp_path, model, tp, targets):
    """Also where ranks share a kv-head, and where a layer, or a rank's part of it, has adapters of some rows only."""
    path, start = models[model, "lm"], tmp_path / "start"
    make_adapters(path, "lm", targets[0] if targets == ("all-linear",) else list(targets), start)
    oracle = peft_updates(path, "lm", start, OPTIMIZERS["adam"][1], steps=2)
    adapters = lora(start, targets=targets)
    strategy = Megatron(tp=tp, sequence_parallel=model != "qwen2", recompute=model == "mistral", lora=adapters, **SMALL)
    args = (processes.name(), strategy, tp, path, "lm", OPTIMIZERS["adam"][0], 2, tmp_path)
    found = processes.run(tp, updates, *args)
    shapes = trained_tensors(spec_of(path), adapters)
    assert found[0]["norms"] == pytest.approx(oracle["norms"], rel=1e-5)
    assert relative(whole([part["gradients"] for part in found], shapes), oracle["gradients"]) < 1e-5
    after, merged = (
        whole([p[kind] for p in found], s) for kind, s in (("adapters", shapes), ("merged", spec_of(path).tensors()))
    )
    assert near(after, oracle["adapters"])
    assert near(merged, oracle["merged"])


@pytest.mark.parametrize("strategy", [FSDP(), FSDP(replicate=2), Megatron(tp=2), Megatron(pp=2)], ids=str)
@pytest.mark.parametrize(
    ("files", "computes"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "bfloat16")]
)
def test_a_merged_save_is_the_model_and_its_adapters(processes, models, starts, tmp_path, strategy, files, computes):
    """Names and dtypes are those of the files; the values are rounded as the frozen model is that computes."""
    key, path = KEYS[0], tmp_path / "model"
    load_model(models[key]).to(getattr(torch, files)).save_pretrained(path)
    trains = replace(strategy, dtype=computes, lora=lora(starts[key]))
    processes.run(2, updates, processes.name(), trains, 2, path, "lm", SGD(lr=0.0), 0, tmp_path)
    before, found = (load_file(one / "model.safetensors") for one in (path, tmp_path / "whole"))
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    adapters, changed = load_file(starts[key] / "adapter_model.safetensors"), 0
    for name, tensor in before.items():
        want, module = tensor.to(getattr(torch, computes)), f"base_model.model.{name.removesuffix('.weight')}"
        if (a := adapters.get(f"{module}.lora_A.weight")) is not None:
            change = ALPHA / RANK * (adapters[f"{module}.lora_B.weight"] @ a)
            want, changed = (want.float() + change).to(want.dtype), changed + 1
        apart = (found[name].float() - want.float()).abs() / want.float().abs().clamp(min=1e-3)
        assert float(apart.max()) <= (1e-5 if computes == "float32" else 2**-7), name  # one unit in the last place
    assert changed == len(adapters) // 2 > 0
    if computes == "float32":
        with torch.no_grad():
            here = reference(peft_model(path, "lm", starts[key]).base_model.model, "lm", make_batch())["log_probs"]
            there = reference(load_model(tmp_path / "whole"), "lm", make_batch())["log_probs"]
        assert float((here.values - there.values).abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["fsdp-4", "hsdp-2x2", "fsdp-1"])
def test_only_what_is_trained_has_gradients_and_optimizer_state(processes, models, starts, tmp_path, name):
    strategy, size = CASES[name][0], count(CASES[name][1])
    for (model, head), path in ((key, models[key]) for key in KEYS):
        strategy = replace(strategy, lora=lora(starts[model, head]))
        args = (processes.name(), strategy, size, path, head, Adam(lr=0.01), 1, tmp_path)
        found = processes.run(size, updates, *args)
        copies = strategy.replicate
        shapes = trained_tensors(spec_of(path, head), lora(None))
        nbytes = 4 * copies * sum(math.prod(shape) for shape in shapes.values())
        assert sum(part["gradient_bytes"] for part in found) == nbytes
        for kind in ("main", "exp_avg", "exp_avg_sq"):
            assert sum(part["state_bytes"][kind] for part in found) == nbytes
        assert nbytes < 4 * copies * spec_of(path, head).num_parameters / 5


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", BOTH)
def test_outputs_with_adapters_and_without(processes, models, starts, name, disabled):
    strategy, sizes = CASES[name]
    for key in KEYS:
        (_, head), path = key, models[key]
        strategy = replace(strategy, lora=lora(starts[key]))
        parts = processes.run(4, outputs, processes.name(), strategy, 4, path, head, disabled)
        output = "values" if head == "value" else "log_probs"
        with torch.no_grad():
            model = peft_model(path, head, starts[key])
            if disabled:
                model.base_model.disable_adapter_layers()
                if head == "value":  # the head that was trained is part of the model
                    model.base_model.model.score = model.base_model.model.score.modules_to_save["default"]
            want = reference(model.base_model.model, head, make_batch())[output].values
        assert torch.allclose(values_of(joined(parts, sizes)[output]), want, atol=1e-5)


def test_new_adapters_change_nothing_and_do_not_depend_on_the_split(processes, models, tmp_path):
    path, found = models["qwen3-tied", "lm"], []
    for name in ("fsdp-1", "fsdp-4", "hsdp-2x2", "megatron-p2t2", "megatron-d3"):
        strategy, size = replace(CASES[name][0], lora=LoRA(rank=RANK)), count(CASES[name][1])
        args = (processes.name(), strategy, size, path, "lm", SGD(lr=0.0), 0, tmp_path)
        parts = processes.run(size, updates, *args)
        adapters = whole([p["adapters"] for p in parts], trained_tensors(spec_of(path), LoRA(rank=RANK)))
        merged = whole([part["merged"] for part in parts], spec_of(path).tensors())
        assert all(tensor.equal(merged[name]) for name, tensor in load_model(path).named_parameters())
        assert all(tensor.eq(0).all() == name.endswith("lora_B.weight") for name, tensor in adapters.items())
        found.append(adapters)
    for other in found[1:]:
        assert all(other[name].equal(tensor) for name, tensor in found[0].items())


@pytest.mark.parametrize("name", BOTH)
def test_a_step_in_parts_is_the_step_in_one_go(processes, models, name):
    strategy = replace(CASES[name][0], lora=LoRA(rank=RANK))
    args = (processes.name(), strategy, 4, models["qwen3-tied", "lm"], OPTIMIZERS["adam"][0])
    assert all(processes.run(4, in_parts, *args))


@pytest.mark.parametrize("name", BOTH)
def test_a_frozen_model_is_kept_in_16_bits_and_its_adapters_in_float32(processes, models, starts, name):
    """Norms agree as far as 8 bits of every activation and frozen weight allow."""
    key, norms = KEYS[0], []
    for dtype in ("float32", "bfloat16"):
        strategy = replace(CASES[name][0], dtype=dtype, lora=lora(starts[key]))
        args = (processes.name(), strategy, 4, models[key], OPTIMIZERS["adam"][0])
        found = processes.run(4, sixteen_bits, *args)
        norms.append(found[0]["norm"])
        for part in found:
            assert part["kinds"] == ({getattr(torch, dtype)}, {torch.float32})
            assert part["changed"]
            assert part["same"]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.parametrize("backend", [FSDP, Megatron])
def test_dropout_is_drawn_alike_when_activations_are_computed_again(processes, models, starts, backend):
    path, found = models[KEYS[0]], []
    for recompute in (False, True):
        strategy = backend(recompute=recompute, lora=lora(starts[KEYS[0]], dropout=0.5), **SMALL)
        args = (processes.name(), strategy, 1, path, OPTIMIZERS["sgd"][0])
        found.append(processes.run(1, dropped_out, *args)[0])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len(set(found[0])) == 2, "dropout has to differ from pass to pass"

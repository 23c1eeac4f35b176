"""Vision-language models on FSDP and ZeRO: log-probabilities, gradients and saved weights are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from hybridflow.algorithms.masked import token_column
from hybridflow.batch.batch import Batch
from hybridflow.config import FSDP, SGD, Adam, LoRA, Megatron, ZeRO
from hybridflow.engine3d.copy_stream import CopyStream
from hybridflow.engines.checkpoint.writer import save_checkpoint
from hybridflow.engines.fsdp.layout import check, state_layout, weights_layout
from hybridflow.engines.megatron.layout import check as check_megatron
from hybridflow.engines.micro_batches import Split
from hybridflow.engines.token_outputs import TokenOutputs
from hybridflow.errors import BatchError, ConfigError, ModelError
from hybridflow.models.hf_spec import frozen_tensors, read_spec
from hybridflow.topology import RankGrid
from tests.contracts.engine_tasks import boxes, build, share
from tests.contracts.example_models import loss_of, relative, totals_of
from tests.contracts.rank_processes import World
from tests.contracts.train_contract import joined, whole
from tests.vision_models import IMAGE, KINDS, make_rows, make_vision, outputs

LR = 0.05


def trained(
    world: World, name: str, strategy: Any, path: Path, kind: str, target: Path, size: int, counts: Any = None
) -> dict[str, Any]:
    """Log-probabilities, gradients of a PPO update, and what is saved after it."""
    engine = build(world, name, strategy, size, path, "lm", SGD(lr=LR, clip_grad=0.0))
    loss, rows = loss_of("lm"), share(make_rows(kind), engine.grid, world.rank, counts)
    found: dict[str, Any] = {"log_probs": engine.forward(rows, ("log_probs",))}
    engine.forward_backward(rows, loss, loss.outputs)
    found["gradients"] = boxes(engine, engine.gradients())
    engine.step()
    save_checkpoint(
        target, engine.layout(), engine.storage(), like=path, group=engine.context.groups.everyone(), rank=world.rank
    )
    found["after"] = engine.forward(rows, ("log_probs",))
    engine.context.groups.close()
    engine.close()
    return found


def encoded(world: World, name: str, strategy: Any, path: Path, rows: Batch, size: int) -> dict[str, Any]:
    """Gradients of a PPO update, how many bytes the image encoder keeps for its backward pass, and its patches."""
    engine = build(world, name, strategy, size, path, "lm", SGD(lr=LR, clip_grad=0.0))
    loss, rows = loss_of("lm"), share(rows, engine.grid, world.rank)
    kept, patches = list[int](), list[int]()
    tower = engine._shards.model.decoder.visual
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one.nbytes) or one, lambda one: one)
    tower.register_forward_pre_hook(lambda _, args: patches.append(len(args[0])))
    tower.register_forward_pre_hook(lambda *_: hooks.__enter__())
    tower.register_forward_hook(lambda *_: hooks.__exit__(None, None, None), always_call=True)
    engine.forward_backward(rows, loss, loss.outputs)
    found: dict[str, Any] = {"kept": sum(kept), "patches": patches, "gradients": boxes(engine, engine.gradients())}
    engine.context.groups.close()
    engine.close()
    return found


def arriving(world: World, name: str, strategy: Any, path: Path, kind: str, size: int) -> list[Tensor]:
    """Log-probabilities before the parameters left, and with parameters that are copied in as late as they may be: in
    a stream that does nothing until it is waited for."""
    engine = build(world, name, strategy, size, path, "lm")
    rows, queue = share(make_rows(kind), engine.grid, world.rank), list[tuple[Tensor, Tensor]]()
    found = [engine.forward(rows, ("log_probs",))["log_probs"].values]
    engine.offload(("parameters",))

    def copy(self: CopyStream, destination: Tensor, source: Tensor) -> None:
        destination.fill_(0xFF if destination.dtype == torch.uint8 else torch.nan)
        queue.append((destination, source))

    def run(self: CopyStream, until: int | None = None) -> None:
        for at in range(len(queue) if until is None else until):
            destination, source = queue[at]
            destination.copy_(source)

    late = {"copy": copy, "wait": run, "join": run, "mark": lambda self: len(queue)}
    with patch.multiple(CopyStream, **late):
        engine.reload(("parameters",))
        assert queue
        found.append(engine.forward(rows, ("log_probs",))["log_probs"].values)
    engine.context.groups.close()
    engine.close()
    return found


def values(world: World, name: str, strategy: Any, path: Path, kind: str, size: int) -> Any:
    engine = build(world, name, strategy, size, path, "value")
    torch.nn.init.constant_(engine.storage()["score.weight"], 0.1)
    engine.weights_loaded()
    rows = share(make_rows(kind), engine.grid, world.rank)
    found = engine.forward(rows, ("values",))
    engine.context.groups.close()
    engine.close()
    return found


def train_frozen(
    world: World,
    name: str,
    strategy: Any,
    path: Path,
    kind: str,
    target: Path,
    size: int,
    groups: Any = (),
    clip: float = 1.0,
) -> dict[str, Any]:
    """Two updates with Adam, and what is saved after them: names of gradients, moments and exact weights here."""
    engine = build(world, name, strategy, size, path, "lm", Adam(lr=0.01, groups=groups, clip_grad=clip))
    loss, rows = loss_of("lm"), share(make_rows(kind), engine.grid, world.rank)
    found: dict[str, Any] = {}
    for _ in range(2):
        engine.forward_backward(rows, loss, loss.outputs)
        found["trained"] = {name for name, grad in engine.gradients().items() if grad.abs().max() > 0}
        engine.step()
    layout: Any = engine.optimizer_layout()
    regions = {region.storage: region.box.tensor for region in layout.regions(world.rank)}
    moments = engine.optimizer_storage()["exp_avg"]
    assert moments.keys() == regions.keys()
    found["moments"] = {regions[name] for name, moment in moments.items() if moment.abs().max() > 0}
    exact, storage = engine.exact_weights()
    found["exact"] = {region.box.tensor for region in exact.regions(world.rank)}
    save_checkpoint(target, exact, storage, like=path, group=engine.context.groups.everyone(), rank=world.rank)
    engine.context.groups.close()
    engine.close()
    return found


STRATEGIES = {
    "fsdp": (FSDP(micro_tokens=60), 1),
    "padded": (FSDP(packed=False, micro_tokens=90), 1),
    "recompute": (FSDP(recompute=True, micro_tokens=60), 1),
    "fsdp2": (FSDP(micro_tokens=60), 2),
    "zero2": (ZeRO(stage=2, micro_tokens=60), 2),
    "tp2": (FSDP(tp=2, micro_tokens=60), 2),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Any]]:
    """A family, a model of it, and what transformers computes from `make_rows` and trains in one update."""
    kind = request.param
    path = make_vision(tmp_path_factory.mktemp(kind) / "model", kind)
    there: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    rows, found = make_rows(kind), dict[str, Any]()
    before = outputs(there, rows)
    loss_of("lm")(before, rows, totals_of(rows))[0].backward()
    found["log_probs"] = before["log_probs"].map(torch.detach)
    found["gradients"] = {name: parameter.grad for name, parameter in there.named_parameters()}
    torch.optim.SGD(there.parameters(), lr=LR).step()
    with torch.no_grad():
        found["after"] = outputs(there, rows)["log_probs"]
    return kind, path, found


@pytest.mark.thinned(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_computes_and_trains_as_transformers_does(processes, model, tmp_path, strategy):
    (kind, path, want), (given, ranks) = model, STRATEGIES[strategy]
    counts = [4, 1] if strategy == "fsdp2" else None  # the second rank has no image at all
    parts = processes.run(ranks, trained, processes.name(), given, path, kind, tmp_path / "saved", ranks, counts)
    grid, spec = given.grid(ranks), read_spec(path, "lm")
    for name in ("log_probs", "after"):
        found = joined([part[name] for part in parts], (grid.p, grid.t, grid.d))["log_probs"]
        assert torch.allclose(found.values, want[name].values, atol=1e-4), name
    gradients = whole([part["gradients"] for part in parts], spec.tensors())
    owners = {part.tensors[0]: name for name, part in spec.parts.items()}
    expected = {name: want["gradients"][owners.get(name, name)] for name in gradients}
    assert relative(gradients, expected) < 1e-5
    saved: Any = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    with torch.no_grad():
        again = outputs(saved, make_rows(kind))["log_probs"]
    assert torch.allclose(again.values, want["after"].values, atol=1e-4)


@pytest.mark.parametrize("strategy", [FSDP(), ZeRO(stage=3)], ids=["fsdp", "zero3"])
def test_the_image_encoder_waits_for_parameters_that_are_copied_in(processes, model, strategy):
    """FSDP gathers it with what is outside of layers, before it computes."""
    kind, path, _ = model
    [(before, late)] = processes.run(1, arriving, processes.name(), strategy, path, kind, 1)
    assert torch.equal(late, before)


@pytest.mark.parametrize("strategy", [FSDP(micro_tokens=60), ZeRO(stage=2, micro_tokens=60)], ids=["fsdp", "zero2"])
def test_recomputing_includes_what_encodes_images(processes, model, strategy):
    kind, path, _ = model
    spec, each = read_spec(path, "lm"), list[dict[str, Any]]()
    for recompute in (False, True):
        given = replace(strategy, recompute=recompute)
        each += processes.run(1, encoded, processes.name(), given, path, make_rows(kind), 1)
    kept, less = each
    assert less["kept"] < 0.8 * kept["kept"]  # patch embedding and merger keep theirs
    gradients = [whole([one["gradients"]], spec.tensors()) for one in each]
    assert relative(gradients[1], gradients[0]) < 1e-5


@pytest.mark.parametrize("packed", [True, False])
def test_an_image_of_several_rows_is_encoded_once(processes, model, packed):
    """Gradients are the sum over the rows that share it."""
    kind, path, _ = model
    given = make_rows(kind).reorder(torch.tensor([1, 2, 0, 2, 1, 3, 1]))
    for column in ("old_log_probs", "advantages"):
        own = given[column].map(lambda values: values + torch.linspace(-0.1, 0.1, len(values)))
        given = given.with_columns(**{column: own})
    strategy = FSDP(packed=packed, micro_tokens=1000)
    (found,) = processes.run(1, encoded, processes.name(), strategy, path, given, 1)
    assert found["patches"] == [24 + (24 + 8 + 24) + 24]
    there: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    loss_of("lm")(outputs(there, given), given, totals_of(given))[0].backward()
    spec, expected = read_spec(path, "lm"), {name: one.grad for name, one in there.named_parameters()}
    owners = {part.tensors[0]: name for name, part in spec.parts.items()}
    gradients = whole([found["gradients"]], spec.tensors())
    assert relative(gradients, {name: expected[owners.get(name, name)] for name in gradients}) < 1e-5


def test_a_value_model_reads_images(processes, model):
    kind, path, _ = model
    (found,) = processes.run(1, values, processes.name(), FSDP(), path, kind, 1)
    there: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        want = outputs(there, make_rows(kind), "hidden")["hidden"].values.sum(-1) * 0.1
    assert torch.allclose(found["values"].values, want, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_computed_is_refused(tmp_path, kind):
    spec = read_spec(make_vision(tmp_path / "model", kind), "lm")
    with pytest.raises(ModelError, match=f"Megatron does not compute {kind} models, which read images"):
        check_megatron(Megatron(), spec, RankGrid())
    with pytest.raises(ModelError, match="reads images, which cp=2 ranks cannot share"):
        check(FSDP(cp=2), spec, FSDP(cp=2).grid(2))


def _checked(rows: Batch, spec: Any) -> None:
    group: Any = None
    split = Split(100, vocab=spec.vocab, images=spec.images)
    tokens = TokenOutputs("actor", spec, split, (0, spec.vocab), group)
    tokens.check(rows, ("log_probs",))


def test_rows_whose_images_do_not_fit_are_refused(tmp_path):
    spec, rows = read_spec(make_vision(tmp_path / "model", "qwen3_vl"), "lm"), make_rows("qwen3_vl")
    _checked(rows, spec)
    with pytest.raises(BatchError, match=r"row 1.*has 6 tokens of images, image_grid_thw of 0"):
        _checked(rows.select(["prompt_ids", "response_ids", "response_mask"]), spec)
    other = make_rows("qwen2_5_vl")
    with pytest.raises(BatchError, match="reads pixel_values of 1536 numbers per patch"):
        _checked(other, spec)
    grids = token_column(rows, "image_grid_thw")
    odd = grids.with_values(torch.where(grids.values == torch.tensor([1, 4, 6]), torch.tensor([1, 3, 8]), grids.values))
    with pytest.raises(BatchError, match=r"row 1 .*image_grid_thw of 24 patches and .*\(3 of 5 rows do"):
        _checked(rows.with_columns(image_grid_thw=odd), spec)
    responses = token_column(rows, "response_ids")
    drawn = responses.values.clone()
    drawn[5] = IMAGE
    with pytest.raises(BatchError, match=r"row 1.*has a token of an image in its response"):
        _checked(rows.with_columns(response_ids=responses.with_values(drawn)), spec)
    masked = rows.with_columns(response_ids=responses.with_values(drawn))
    masked = masked.with_columns(response_mask=responses.with_values(drawn != IMAGE))
    with pytest.raises(BatchError, match=r"row 1 .*has 7 tokens of images, image_grid_thw of 24 patches"):
        _checked(masked, spec)  # an observation, whose image is lacking


VISION = ("visual",)
FREEZES = {
    "fsdp2": (FSDP(micro_tokens=60, freeze=VISION), 2),
    "tp2": (FSDP(tp=2, micro_tokens=60, freeze=VISION, recompute=True), 2),
    "zero1": (ZeRO(stage=1, micro_tokens=60, freeze=VISION), 2),
    "zero2": (ZeRO(stage=2, micro_tokens=60, freeze=VISION), 2),
    "zero2-bf16": (ZeRO(stage=2, micro_tokens=60, freeze=VISION, dtype="bfloat16"), 2),
    "zero3": (ZeRO(stage=3, micro_tokens=60, freeze=VISION), 2),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("strategy", FREEZES)
def test_a_frozen_tower_has_no_state_and_stays(processes, model, tmp_path, strategy):
    (kind, path, _), (given, ranks) = model, FREEZES[strategy]
    parts = processes.run(ranks, train_frozen, processes.name(), given, path, kind, tmp_path / "saved", ranks)
    spec = read_spec(path, "lm")
    frozen = {name for name in spec.tensors() if "visual" in name}
    assert frozen
    joined = {key: set().union(*(part[key] for part in parts)) for key in parts[0]}
    assert joined["trained"] == joined["moments"] == spec.tensors().keys() - frozen
    assert joined["exact"] == spec.tensors().keys()
    before, after = (
        AutoModelForImageTextToText.from_pretrained(at, dtype=torch.float32).state_dict()
        for at in (path, tmp_path / "saved")
    )
    kept = torch.bfloat16 if given.dtype else torch.float32  # of weights without main parameters
    changed = {name for name in before if not torch.equal(before[name].to(kept), after[name].to(kept))}
    assert changed == {name for name in before if "visual" not in name}


def test_the_rest_trains_as_with_a_rate_of_zero(processes, model, tmp_path):
    kind, path, _ = model
    losses = []
    for at, given in enumerate((FSDP(micro_tokens=60, freeze=VISION), FSDP(micro_tokens=60))):
        groups = {} if at == 0 else {"visual": 0.0}
        target = tmp_path / f"{at}"
        processes.run(2, train_frozen, processes.name(), given, path, kind, target, 2, groups, 0.0)
        losses.append(AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32).state_dict())
    for name, value in losses[0].items():
        assert torch.allclose(value, losses[1][name], atol=1e-6), name


def test_patterns_are_checked(model):
    _, path, _ = model
    spec = read_spec(path, "lm")
    with pytest.raises(ConfigError, match=r"FSDP\(freeze=\('visuel',\)\): no tensor has 'visuel' in the name. Did you"):
        frozen_tensors(FSDP(freeze=("visuel",)), spec)
    with pytest.raises(ConfigError, match=r"ZeRO\(freeze=\('\*',\)\): all tensors have"):
        frozen_tensors(ZeRO(stage=2, freeze=("*",)), spec)
    with pytest.raises(ConfigError, match="parts of the names of parameters"):
        FSDP(freeze="visual")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="with adapters all weights are frozen already"):
        FSDP(freeze=VISION, lora=LoRA(rank=4))
    strategy = FSDP(tp=2, freeze=VISION)
    weights, state = (of(strategy, spec, strategy.grid(4)) for of in (weights_layout, state_layout))
    assert {*state.tensors} == {name for name in weights.tensors if "visual" not in name}

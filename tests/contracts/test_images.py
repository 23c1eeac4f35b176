"""Vision-language models on FSDP and ZeRO: log-probabilities, gradients and saved weights are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hybridflow.algorithms.masked import token_column
from hybridflow.batch.batch import Batch
from hybridflow.config import FSDP, Megatron, ZeRO
from hybridflow.engines.fsdp.layout import check
from hybridflow.engines.megatron.layout import check as check_megatron
from hybridflow.engines.micro_batches import Split
from hybridflow.engines.token_outputs import TokenOutputs
from hybridflow.errors import BatchError, ModelError
from hybridflow.models.hf_spec import read_spec
from hybridflow.topology import RankGrid
from tests.contracts import vision_tasks as tasks
from tests.contracts.example_models import loss_of, relative, totals_of
from tests.contracts.train_contract import joined, whole
from tests.vision_models import IMAGE, KINDS, make_rows, make_vision, outputs

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
    torch.optim.SGD(there.parameters(), lr=tasks.LR).step()
    with torch.no_grad():
        found["after"] = outputs(there, rows)["log_probs"]
    return kind, path, found


@pytest.mark.thinned(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_computes_and_trains_as_transformers_does(processes, model, tmp_path, strategy):
    (kind, path, want), (given, ranks) = model, STRATEGIES[strategy]
    counts = [4, 1] if strategy == "fsdp2" else None  # the second rank has no image at all
    parts = processes.run(ranks, tasks.trained, processes.name(), given, path, kind, tmp_path / "saved", ranks, counts)
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
    [(before, late)] = processes.run(1, tasks.arriving, processes.name(), strategy, path, kind, 1)
    assert torch.equal(late, before)


@pytest.mark.parametrize("strategy", [FSDP(micro_tokens=60), ZeRO(stage=2, micro_tokens=60)], ids=["fsdp", "zero2"])
def test_recomputing_includes_what_encodes_images(processes, model, strategy):
    kind, path, _ = model
    spec, each = read_spec(path, "lm"), list[dict[str, Any]]()
    for recompute in (False, True):
        given = replace(strategy, recompute=recompute)
        each += processes.run(1, tasks.encoded, processes.name(), given, path, make_rows(kind), 1)
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
    (found,) = processes.run(1, tasks.encoded, processes.name(), strategy, path, given, 1)
    assert found["patches"] == [24 + (24 + 8 + 24) + 24]
    there: Any = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    loss_of("lm")(outputs(there, given), given, totals_of(given))[0].backward()
    spec, expected = read_spec(path, "lm"), {name: one.grad for name, one in there.named_parameters()}
    owners = {part.tensors[0]: name for name, part in spec.parts.items()}
    gradients = whole([found["gradients"]], spec.tensors())
    assert relative(gradients, {name: expected[owners.get(name, name)] for name in gradients}) < 1e-5


def test_a_value_model_reads_images(processes, model):
    kind, path, _ = model
    (found,) = processes.run(1, tasks.values, processes.name(), FSDP(), path, kind, 1)
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

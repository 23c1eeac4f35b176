"""Checkpoints of a run, written rank by rank, are exported as `save_checkpoint` writes the model, bit for bit."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

import hybridflow as hf
from hybridflow.cli import commands as cli
from hybridflow.config import LoRA
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.checkpoint import writer
from hybridflow.engines.checkpoint.manifest import (
    CheckpointManifest,
    FileEntry,
    SavedGroup,
    beside_name,
    beside_path,
    partial_directory,
    publish,
    step_directory,
)
from hybridflow.engines.checkpoint.rank_state import Kinds, RankFile, StateWriter, dtype_name
from hybridflow.engines.checkpoint.reader import INDEX, SINGLE, Checkpoint
from hybridflow.engines.checkpoint.writer import check_dtype, read_beside, save_checkpoint, saved_dtypes
from hybridflow.engines.lora.adapters import PREFIX, check_adapters, read_config
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.models.hf_spec import TransformersSpec
from hybridflow.models.spec import ModelSpec
from tests.example_layouts import row_shards, storage_shapes, whole

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 60,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    for kind in ("actor", "tied"):
        config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=kind == "tied")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(root / kind)
        (root / kind / "tokenizer_config.json").write_text("{}")
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0)
    config.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "critic")
    return {path.name: path for path in root.iterdir()}


def spec_of(model: Path) -> ModelSpec:
    return ModelSpec.from_checkpoint(model, head="value" if model.name == "critic" else "lm")


def weights(spec: ModelSpec, model: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Canonical tensors that are not those of the model's directory: training has changed them."""
    found = {name: torch.empty(shape) for name, shape in spec.tensors().items()}
    Checkpoint(model).read_into(whole(spec), 0, found)
    return {name: tensor.add(0.123).to(dtype) for name, tensor in found.items()}


def shards(tensors: Mapping[str, Tensor], layout: Layout, rank: int) -> dict[str, Tensor]:
    """A rank's storage in `layout` of whole tensors."""
    out: dict[str, Tensor] = {}
    for region in layout.regions(rank):
        dtype = tensors[region.box.tensor].dtype
        shape = storage_shapes(layout, rank)[region.storage]
        place = out.setdefault(region.storage, torch.zeros(shape, dtype=dtype))
        box = tuple(map(slice, region.box.start, region.box.stop))
        region.view(place, region.box).copy_(tensors[region.box.tensor][box])
    return out


def write_group(
    partial: Path, name: str, kinds: Mapping[str, Mapping[str, Tensor]], layout: Layout, like: Mapping[str, bytes],
    dtypes: Mapping[str, str],
) -> tuple[SavedGroup, dict[str, FileEntry]]:  # fmt: skip
    (partial / name).mkdir(parents=True)
    files = dict[str, FileEntry]()
    names = [f"{name}/rank-{rank:05d}.safetensors" for rank in range(layout.ranks)]
    for rank, file in enumerate(names):
        report = partial / f".{rank}.json"
        beside = {partial / name / beside_name(one): content for one, content in like.items()} if rank == 0 else {}
        state: Kinds = {kind: (layout, shards(tensors, layout, rank)) for kind, tensors in kinds.items()}
        saving = StateWriter(rank, torch.device("cpu"))
        saving.save(RankFile(partial / file, report, "some-id", beside), state)
        assert saving._thread is not None
        saving._thread.join()
        found = json.loads(report.read_text())
        assert "error" not in found, found
        report.unlink()
        files |= {file: FileEntry(**entry) for file, entry in found["files"].items()}
    shapes = {tensor: tuple(shape) for tensor, shape in layout.tensors.items()}
    beside = tuple(f"{name}/{beside_name(one)}" for one in like)
    return SavedGroup("ActorWorker", tuple(names), tuple(kinds), shapes, dtypes=dtypes, beside=beside), files


def write_run(root: Path, model: Path, step: int = 4, ranks: int = 2, **options: Any) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint of one training group, and the parameters that it contains."""
    spec = spec_of(model)
    main = weights(spec, model)
    parameters = {name: tensor.to(options.get("dtype", torch.float32)) for name, tensor in main.items()}
    dtypes = {"": dtype_name(options.get("dtype", torch.float32))}
    for name in options.get("wide", ()):
        parameters[name], dtypes[name] = main[name], "F32"
    kinds = {"main": main, "exp_avg": {name: torch.full_like(tensor, 7.0) for name, tensor in main.items()}}
    if not options.get("trains", True):
        kinds = {"weights": parameters}
    target = step_directory(root, step)
    partial = partial_directory(target)
    like = read_beside(model)
    saved, files = write_group(partial, "actor", kinds, row_shards(spec, ranks), like, dtypes)
    groups = {"actor": saved, "rollout": SavedGroup("RolloutWorker", follows="actor"), "reward": SavedGroup("Reward")}
    publish(partial, target, CheckpointManifest(step, "some-id", groups, files, {}, {}))
    return target, parameters


def same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(one, other, names, shallow=False) == (names, [], [])


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "wide": ("model.norm.weight",)}, {"trains": False}],
)
def test_an_export_equals_a_save(models: dict[str, Path], tmp_path: Path, ranks: int, options: dict[str, Any]):
    for kind, model in models.items():
        path, parameters = write_run(tmp_path / kind, model, ranks=ranks, **options)
        dtypes = {name: tensor.dtype for name, tensor in parameters.items()}
        save_checkpoint(tmp_path / f"{kind}-saved", whole(spec_of(model)), parameters, like=model, dtypes=dtypes)
        assert hf.export(path, tmp_path / f"{kind}-out") == str(tmp_path / f"{kind}-out")
        same_files(tmp_path / f"{kind}-out", tmp_path / f"{kind}-saved")


def test_an_export_has_the_files_in_directories_too(models: dict[str, Path], tmp_path: Path):
    model = shutil.copytree(models["actor"], tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool use.jinja").write_text("{{ messages }}")
    path, _ = write_run(tmp_path / "run", model)
    hf.export(path, tmp_path / "out")
    assert (tmp_path / "out" / "additional_chat_templates" / "tool use.jinja").read_text() == "{{ messages }}"
    for name in ("../x", "/etc/x", "a/../x", ".x", "a//x", "a\0b"):
        with pytest.raises(CheckpointError, match="hidden, or outside"):
            beside_path(f"actor/{beside_name(name)}")


def test_large_models_are_written_file_by_file(models: dict[str, Path], tmp_path: Path, monkeypatch):
    """The same number of files as the ranks of the group write, in model order; only one in memory."""
    path, parameters = write_run(tmp_path / "run", models["actor"], ranks=3)
    monkeypatch.setattr(writer.file_contents, "__defaults__", (1, 4 << 30, 1000))
    total = sum(tensor.nbytes for tensor in parameters.values())
    save_checkpoint(
        tmp_path / "saved", whole(spec_of(models["actor"])), parameters, like=models["actor"],
        max_file_bytes=-(-total // 3),
    )  # fmt: skip
    hf.export(path, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) >= 3
    assert (tmp_path / "out" / INDEX).is_file()
    same_files(tmp_path / "out", tmp_path / "saved")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(model.state_dict()["lm_head.weight"], parameters["lm_head.weight"])


def test_adapters_are_exported_in_the_format_of_peft(models: dict[str, Path], tmp_path: Path):
    names = [f"model.layers.{layer}.self_attn.q_proj.lora_{part}.weight" for layer in range(2) for part in "AB"]
    tensors = {name: torch.randn((4, 64) if "lora_A" in name else (128, 4)) for name in names}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    regions = [Region(Box.whole(name, shape), name, (0, 0)) for name, shape in shapes.items()]
    layout = Layout(shapes, 1, lambda rank: regions)
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj"],
        base_model_name_or_path=str(models["actor"]),
        task_type="CAUSAL_LM",
    )
    config.save_pretrained(tmp_path / "config")
    like = {"adapter_config.json": (tmp_path / "config" / "adapter_config.json").read_bytes()}
    partial = partial_directory(target := step_directory(tmp_path / "run", 2))
    saved, files = write_group(partial, "actor", {"main": tensors}, layout, like, {"": "F32"})
    publish(partial, target, CheckpointManifest(2, "some-id", {"actor": saved}, files, {}, {}))
    hf.export(target, tmp_path / "out")
    assert read_config(tmp_path / "out") == (
        str(models["actor"]),
        LoRA(rank=4, alpha=8, targets=("q_proj",), start=str(tmp_path / "out")),
    )
    found = check_adapters(tmp_path / "out", layout.tensors, spec_of(models["actor"]))
    assert len(found) == len(tensors)
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(models["actor"]), str(tmp_path / "out")
    )
    found = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
    for name, tensor in tensors.items():
        assert torch.equal(found[PREFIX + name.replace(".weight", ".default.weight")], tensor)


def test_the_newest_whole_checkpoint_of_a_run_is_exported(
    models: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    run = tmp_path / "run"
    old, parameters = write_run(run / "checkpoints", models["actor"], step=2)
    new, _ = write_run(run / "checkpoints", models["tied"], step=4)
    for given in (run, run / "checkpoints"):
        hf.export(given, tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    file = new / "actor" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    hf.export(run, tmp_path / "out")
    assert str(file) in caplog.text
    save_checkpoint(tmp_path / "saved", whole(spec_of(models["actor"])), parameters, like=models["actor"])
    same_files(tmp_path / "out", tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"rank-00001\.safetensors is damaged"):
        hf.export(new, tmp_path / "out")
    (old / "actor" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        hf.export(run, tmp_path / "out")
    same_files(tmp_path / "out", tmp_path / "saved")


def test_what_cannot_be_exported(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, _ = write_run(tmp_path / "run", models["actor"])
    for group, message in (
        ("aktor", "Did you mean 'actor'"),
        ("rollout", "its weights are those of 'actor'"),
        ("reward", "no tensors of 'reward'.*Groups with tensors: actor"),
    ):
        with pytest.raises(ConfigError, match=message):
            hf.export(path, tmp_path / "out", group=group)
    (tmp_path / "link").symlink_to(path)
    for inside in (path, path / "actor", path / "new" / "model", tmp_path / "link" / "actor"):
        with pytest.raises(ConfigError, match="outside of it"):
            hf.export(path, inside)
    hf.export(path, tmp_path / "out")  # the checkpoint is whole
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"notes\.txt"):
        hf.export(path, tmp_path / "mine")
    for nothing in (tmp_path / "mine", tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="is not a checkpoint of a run and has none"):
            hf.export(nothing, tmp_path / "out")
    assert cli.main(["export", str(path), str(tmp_path / "told"), "--group", "aktor"]) == 2
    assert "Did you mean" in capsys.readouterr().err
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "told")]) == 0
    assert str(tmp_path / "told") in capsys.readouterr().out
    same_files(tmp_path / "out", tmp_path / "told")


def test_weights_that_are_not_finite_leave_the_directory_as_it_was(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A rank refuses to write such numbers; a file that has them all the same is not exported."""
    path, _ = write_run(tmp_path / "run", models["actor"])
    hf.export(path, tmp_path / "out")
    hf.export(path, tmp_path / "kept")
    monkeypatch.setattr("tests.unit.engines.test_export.weights", _diverged)
    monkeypatch.setattr("hybridflow.engines.checkpoint.rank_state._check_finite", lambda *_: None)
    path, _ = write_run(tmp_path / "other", models["actor"])
    with pytest.raises(CheckpointError, match=r"not finite, in model\.norm\.weight \(64\).*unchanged"):
        hf.export(path, tmp_path / "out")
    same_files(tmp_path / "out", tmp_path / "kept")
    assert not list(tmp_path.glob(".*.partial"))


def _diverged(spec: ModelSpec, model: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, shape in spec.tensors().items()}
    tensors["model.norm.weight"].fill_(torch.nan)
    return tensors


NAMES = ("lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")
MOE_SIZES = {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1}


def test_the_dtypes_are_those_of_the_files(tmp_path):
    """A tensor that the files lack, or have in a dtype for other things than training, has that of most elements."""
    kinds = (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16, torch.float32)
    save_file({name: torch.ones(8, 8).to(kind) for name, kind in zip(NAMES, kinds, strict=True)}, tmp_path / SINGLE)
    files = Checkpoint(tmp_path).dtypes([*NAMES, "score.weight"])
    assert files == {**dict.fromkeys(files, "BF16"), "model.norm.weight": "F32"}
    assert files.keys() == {*NAMES, "score.weight"}
    assert saved_dtypes(files, None) == {
        name: torch.float32 if name == "model.norm.weight" else torch.bfloat16 for name in files
    }


def test_another_dtype_holds_for_all_but_what_transformers_keeps_in_float32():
    assert {*saved_dtypes(dict.fromkeys(NAMES, "F32"), "float16").values()} == {torch.float16}
    assert {*saved_dtypes(dict.fromkeys(NAMES, "BF16"), "float32").values()} == {torch.float32}
    config = transformers.Ernie4_5_MoeConfig(**MOE_SIZES, moe_num_experts=2, moe_layer_start_index=0).to_dict()
    found = saved_dtypes(dict.fromkeys(TransformersSpec.of(config).tensors(), "F32"), "bfloat16", config)
    kept = {name.rpartition("mlp.")[2] for name, dtype in found.items() if dtype == torch.float32}
    assert kept == {"gate.weight", "moe_statics.e_score_correction_bias"}


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bf16", torch.bfloat16, 16, ["float16"]])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match="weights are saved as 'float32', 'bfloat16', 'float16'"):
        check_dtype(dtype)

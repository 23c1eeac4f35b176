"""`hf.push_to_hub`: a trained model on the Hugging Face hub, with a card made of its run."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from hybridflow.cluster.group import WorkerGroup
from hybridflow.cluster.session import Session
from hybridflow.engines.checkpoint.export import export_here
from hybridflow.errors import ConfigError
from hybridflow.run.model_card import kind_of, model_card
from hybridflow.run.training_run import Run
from hybridflow.tracking.report.run_files import FILES, RunFiles

_SAVED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*_templates/*.jinja")  # of `save`
_EARLIER = re.compile(r"[^/]*\.safetensors(\.index\.json)?|(adapter_)?config\.json")  # would be read beside the new
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

"""Where records are: a file, a directory, a pattern of files, a dataset, a name on the Hugging Face Hub, or a list."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import Any

from hybridflow.data.records import DatasetRecords, Records, is_dataset, listed, read_files
from hybridflow.errors import ConfigError, PromptError, nearest

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FILE_SUFFIXES = {".jsonl", ".json", ".parquet", ".pq", ".txt", ".csv", ".gz", ".zst", ".arrow"}
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk writes, of several splits and of one


def open_records(source: Any, *, split: str | None = None, name: str | None = None, what: str = "prompts") -> Records:
    """The records of `source`, at least one.

    A path is a JSONL or Parquet file, a directory of one of them, a pattern such as "data/*.parquet", or a directory
    that `save_to_disk` wrote; a text that is no path is a name on the Hugging Face Hub, of which `name` is the
    configuration and `split` the split. Also a `datasets.Dataset` (or a `DatasetDict` with `split`), a list of files,
    or a list of mappings. Errors: PromptError naming what was looked for, ConfigError for a split of what has none.
    """
    if isinstance(source, str | os.PathLike):
        records = _at(source, split, name, what)
    elif is_dataset(source):
        _no_name(name, "a dataset that is loaded")
        records = _of_dataset(source, split, f"the dataset of {what}")
    else:
        _no_split(split, name, f"a list of {what}")
        given = source if isinstance(source, list | tuple) else None
        if given and all(isinstance(one, str | os.PathLike) for one in given):
            records = read_files(f"the files of {what}", [_existing(Path(one), what) for one in given])
        else:
            records = listed(source, what)
    if len(records) == 0:
        raise PromptError(f"{records.where} has no {what}: give at least one record.")
    return records


def _at(source: str | os.PathLike[str], split: str | None, name: str | None, what: str) -> Records:
    text = os.fspath(source)
    path = Path(text).expanduser()
    if path.is_dir():
        return _in_directory(path, split, name, what)
    if path.exists():
        _no_split(split, name, f"the file {path}")
        return read_files(str(path), [path])
    if glob.has_magic(text):
        _no_split(split, name, f"the files {text}")
        files = [Path(found) for found in sorted(glob.glob(str(path), recursive=True)) if Path(found).is_file()]
        if not files:
            raise PromptError(f"no file matches {text}.")
        return _of_one_kind(text, files)
    if isinstance(source, str) and _HUB_NAME.fullmatch(text) and path.suffix not in _FILE_SUFFIXES:
        return _of_dataset(_load(text, split, name, what), split, text)
    return read_files(text, [_existing(path, what)])


def _existing(path: Path, what: str) -> Path:
    if not path.is_file():
        raise PromptError(f"there is no {what.removesuffix('s')} file {path}.")
    return path


def _in_directory(path: Path, split: str | None, name: str | None, what: str) -> Records:
    if any((path / saved).is_file() for saved in _SAVED):
        import datasets

        _no_name(name, f"{path}, which save_to_disk wrote,")
        try:
            loaded = datasets.load_from_disk(str(path))
        except (OSError, ValueError, KeyError) as error:
            raise PromptError(f"{path} is not a dataset that can be read: {_first_line(error)}.") from error
        return _of_dataset(loaded, split, str(path))
    if split is not None or name is not None:
        return _of_dataset(_load(str(path), split, name, what), split, str(path))
    files = sorted(file for file in path.iterdir() if file.suffix in (".parquet", ".jsonl"))
    if not files:
        raise PromptError(
            f"{path} is a directory without .parquet or .jsonl files. Give the files, or split= where the directory "
            f"is that of a Hugging Face dataset."
        )
    return _of_one_kind(str(path), files)


def _of_one_kind(where: str, files: list[Path]) -> Records:
    if len(kinds := sorted({file.suffix for file in files})) > 1:
        raise PromptError(f"{where} has files of several kinds ({', '.join(kinds)}): choose by a pattern as '*.jsonl'.")
    return read_files(where, files)


def _load(path: str, split: str | None, name: str | None, what: str) -> Any:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        return datasets.load_dataset(path, name, split=split)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        asked = "".join(f", {key}={value!r}" for key, value in (("name", name), ("split", split)) if value is not None)
        missing = "" if Path(path).exists() else "there is no such file or directory, and "
        raise PromptError(
            f"{what}={path}{asked}: {missing}as a dataset it cannot be loaded: {_first_line(error).rstrip('.')}. Give "
            f"the path of a file, or a dataset that the Hugging Face Hub or its local cache has."
        ) from error


def _of_dataset(loaded: Any, split: str | None, where: str) -> Records:
    """The one split of what the library gave."""
    import datasets

    if isinstance(loaded, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise PromptError(
            f"{where} is a streaming dataset, which has no rows to choose from: load it with streaming off."
        )
    if isinstance(loaded, datasets.DatasetDict):
        splits = sorted(map(str, loaded))
        if split is None and len(splits) != 1:
            raise PromptError(f"{where} has the splits {', '.join(splits)}: choose one with split=.")
        chosen = splits[0] if split is None else split
        if chosen not in loaded:
            raise PromptError(f"{where} has no split {split!r}.{nearest(chosen, splits)}")
        return DatasetRecords(f"{where} ({chosen})", loaded[chosen])
    if split is not None and loaded.split is not None and str(loaded.split) != split:
        raise PromptError(f"{where} is the split {loaded.split}, asked for was split={split!r}.")
    return DatasetRecords(where if split is None else f"{where} ({split})", loaded)


def _no_split(split: str | None, name: str | None, source: str) -> None:
    _no_name(name, source)
    if split is not None:
        raise ConfigError(f"split={split!r}: {source} has no splits; they are of Hugging Face datasets.")


def _no_name(name: str | None, source: str) -> None:
    if name is not None:
        raise ConfigError(f"name={name!r}: {source} has no configurations; they are of the Hugging Face Hub.")


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__

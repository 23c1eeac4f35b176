"""Records: rows of JSONL and Parquet files, of Hugging Face datasets (also by name) and lists, each with its place."""

from __future__ import annotations

import codecs
import glob
import itertools
import json
import os
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.errors import PromptError, nearest
from hybridflow.settings import require

if TYPE_CHECKING:
    import datasets

Record = dict[str, Any]
CHUNK = 1024  # rows that are Python objects at a time while a table is looked through
_MAGIC = b"PAR1"
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
_FILE_SUFFIXES = {".jsonl", ".json", ".parquet", ".pq", ".txt", ".csv", ".gz", ".zst", ".arrow"}
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk writes, of several splits and of one


@dataclass(eq=False)
class Records:
    """Rows in the order of their source, which `where` names; `place(i)` names row i of it.

    `read(start, stop, columns)` gives `size` rows as Python objects, of a table only these columns (None: all).
    `columns` are those of a table, whose rows all have them; None for records that may differ. `encoded()` are the same
    records with images as the bytes or paths of their files. `scan` reads `at_once` rows at a time.
    """

    where: str
    size: int
    read: Callable[[int, int, tuple[str, ...] | None], list[Any]]
    place: Callable[[int], str]
    columns: Sequence[str] | None = None
    with_encoded_images: Callable[[], Records] | None = None
    at_once: int = CHUNK

    def encoded(self) -> Records:
        return self if self.with_encoded_images is None else self.with_encoded_images()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.read(index, index + 1, None)[0]

    def scan(self, columns: Iterable[str] | None) -> Iterator[list[tuple[int, Any]]]:
        """All rows with their numbers, in order, `at_once` at a time."""
        chosen = None if columns is None else tuple(columns)
        for start in range(0, self.size, self.at_once):
            yield list(enumerate(self.read(start, min(start + self.at_once, self.size), chosen), start))


def open_records(source: Any, *, split: str | None = None, name: str | None = None, what: str = "prompts") -> Records:
    """The records of `source`, at least one.

    A path is a JSONL or Parquet file, a directory of one of them, a pattern such as "data/*.parquet", or a directory
    that `save_to_disk` wrote; any other string is a name on the Hugging Face Hub, with its configuration `name` and
    `split`. Also a `datasets.Dataset` (or a `DatasetDict` with `split`), a list of files, or a list of mappings.
    Errors: PromptError naming the missing source, ConfigError for a split of a source without splits.
    """
    if isinstance(source, str | os.PathLike):
        records = _at(source, split, name, what)
    elif is_dataset(source):
        _refuse("a dataset that is loaded", name)
        records = _of_dataset(source, split, f"the dataset of {what}")
    else:
        _refuse(f"a list of {what}", name, split)
        given = source if isinstance(source, list | tuple) else None
        if given and all(isinstance(one, str | os.PathLike) for one in given):
            records = read_files(f"the files of {what}", [_existing(Path(one), what) for one in given])
        else:
            if isinstance(source, Mapping | str | bytes) or not isinstance(source, Iterable):
                raise PromptError(
                    f"{what} are a {type(source).__name__}: give a JSONL or Parquet file, a dataset, or a list of "
                    f"mappings."
                )
            rows = list(source)
            records = Records(f"the list of {what}", len(rows), lambda a, b, _: rows[a:b], lambda row: f"record {row}")
    if len(records) == 0:
        raise PromptError(f"{records.where} has no {what}: give at least one record.")
    return records


def _at(source: str | os.PathLike[str], split: str | None, name: str | None, what: str) -> Records:
    text = os.fspath(source)
    path = Path(text).expanduser()
    if path.is_dir():
        return _in_directory(path, split, name, what)
    if path.exists():
        _refuse(f"the file {path}", name, split)
        return read_files(str(path), [path])
    if glob.has_magic(text):
        _refuse(f"the files {text}", name, split)
        files = [Path(found) for found in sorted(glob.glob(str(path), recursive=True)) if Path(found).is_file()]
        if not files:
            raise PromptError(f"no file matches {text}.")
        return read_files(text, files, alike=True)
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

        _refuse(f"{path}, which save_to_disk wrote,", name)
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
    return read_files(str(path), files, alike=True)


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
    """The records of the chosen split."""
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
        return _dataset_records(f"{where} ({chosen})", loaded[chosen])
    if split is not None and loaded.split is not None and str(loaded.split) != split:
        raise PromptError(f"{where} is the split {loaded.split}, asked for was split={split!r}.")
    return _dataset_records(where if split is None else f"{where} ({split})", loaded)


def _dataset_records(where: str, dataset: datasets.Dataset) -> Records:
    """Its rows as plain Python objects whatever its format."""
    if dataset.format["type"] == "custom":
        raise PromptError(f"{where} has a transform (set_transform): give the dataset without it, and map=.")
    plain = dataset.with_format(None)
    chosen = cache(lambda columns: plain.select_columns(list(columns)))

    def read(start: int, stop: int, columns: tuple[str, ...] | None) -> list[Record]:
        found = (plain if columns is None else chosen(columns))[start:stop]
        return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]

    def encoded() -> Records:
        other = plain
        for name, feature in plain.features.items():
            if (undecoded := _undecoded(feature)) != feature:
                other = other.cast_column(name, undecoded)
        return _dataset_records(where, other)

    return Records(where, len(plain), read, lambda row: f"{where}, row {row}", plain.column_names, encoded)


def _undecoded(feature: Any) -> Any:
    """The feature with images as the bytes or paths of their files: an image, or a list of them."""
    import datasets

    if isinstance(feature, datasets.Image):
        return datasets.Image(decode=False)
    if isinstance(feature, datasets.List | datasets.LargeList):
        return type(feature)(_undecoded(feature.feature))
    return feature


def _refuse(source: str, name: str | None, split: str | None = None) -> None:
    """Errors: ConfigError for a name or a split of a source that has none."""
    require(name is None, f"name={name!r}: {source} has no configurations; they are of the Hugging Face Hub.")
    require(split is None, f"split={split!r}: {source} has no splits; they are of Hugging Face datasets.")


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__


def read_files(where: str, files: Sequence[Path], alike: bool = False) -> Records:
    """The rows of all files, which are JSONL or Parquet, with `alike` named so. Errors: PromptError naming file and
    line, or a pipe or device, which may block for ever and could not be read again by a run that continues."""
    if alike and len(kinds := sorted({file.suffix for file in files})) > 1:
        raise PromptError(f"{where} has files of several kinds ({', '.join(kinds)}): choose by a pattern as '*.jsonl'.")
    for file in files:
        if file.exists() and not file.is_file():
            kinds = {"directory": file.is_dir, "pipe": file.is_fifo, "socket": file.is_socket}
            kind = next((kind for kind, is_one in kinds.items() if is_one()), "device")
            raise PromptError(f"{file} is a {kind}, not a regular file: write the records to one.")
    if all(is_parquet(file) for file in files):
        return _parquet_records(where, files)
    lines = [(file, number, record) for file in files for number, record in _read_lines(file)]
    places, records = [line[:2] for line in lines], [line[2] for line in lines]
    return Records(where, len(lines), lambda a, b, _: records[a:b], lambda row: "{}, line {}".format(*places[row]))


def _parquet_records(where: str, files: Sequence[Path]) -> Records:
    """Files with the same columns: Arrow columns in memory, Python objects where rows are read."""
    import pyarrow
    import pyarrow.parquet

    tables = list[pyarrow.Table]()
    for file in files:
        try:
            # a reader of this one file: read_table would make columns of directories that are called name=value
            with pyarrow.parquet.ParquetFile(file) as opened:
                tables.append(table := opened.read())
        except (OSError, pyarrow.ArrowException) as error:
            raise PromptError(f"{file} is not a Parquet file that can be read: {error}.") from None
        if twice := [name for name, times in Counter(table.column_names).items() if times > 1]:
            raise PromptError(f"{file} has more than one column {twice[0]!r}; each needs a name of its own.")
        if text := differing_column(str(file), table.column_names, str(files[0]), tables[0].column_names):
            raise PromptError(f"{text}; all files need the same columns.")
    try:
        joined = pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException as error:
        raise PromptError(f"{where}: the files have columns of different types: {error}.") from None
    whole = joined.combine_chunks()  # else each lookup searches all row groups
    ends = list(itertools.accumulate(len(table) for table in tables))

    def read(start: int, stop: int, columns: tuple[str, ...] | None) -> list[Record]:
        return (whole if columns is None else whole.select(columns)).slice(start, stop - start).to_pylist()

    def place(row: int) -> str:
        file = bisect_right(ends, row)
        return f"{files[file]}, row {row - (ends[file - 1] if file else 0)}"

    return Records(where, len(whole), read, place, whole.column_names)


def is_parquet(file: Path) -> bool:
    """By its name or its first bytes."""
    if file.suffix in (".parquet", ".pq"):
        return True
    try:
        with file.open("rb") as stream:
            return stream.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def is_dataset(source: object) -> bool:
    """Whether it is a dataset of the `datasets` library, of any kind; does not import it."""
    library = sys.modules.get("datasets")
    kinds = ("Dataset", "DatasetDict", "IterableDataset", "IterableDatasetDict")
    return library is not None and isinstance(source, tuple(getattr(library, kind) for kind in kinds))


def differing_column(place: str, names: Iterable[Any], first: str, firsts: Iterable[Any]) -> str:
    """Says which column only one of two records or files has; "" if none."""
    if not (differing := {*names} ^ {*firsts}):
        return ""
    column = min(map(str, differing))
    has, other = ("a", "has none") if column in map(str, names) else ("no", "has one")
    return f"{place} has {has} column {column!r}, {first} {other}"


def _read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and value of each line that is not blank."""
    try:
        raw = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error}.") from None
    for number, line in enumerate(raw.split(b"\n"), start=1):
        where = f"{path}, line {number}"
        try:
            text = line.decode()
        except UnicodeDecodeError as error:
            found = f"0x{line[error.start]:02x} at byte {error.start + 1}"
            raise PromptError(f"{where} is not UTF-8 text: {found}. Give a JSONL or Parquet file.") from None
        if not text.strip():
            continue
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise PromptError(f"{where} is not JSON: {error.msg} at character {error.colno}.") from None
        except ValueError as error:  # Python bounds the digits of whole numbers
            raise PromptError(f"{where} has a number that cannot be read: {str(error).split(';')[0]}.") from None
        except RecursionError:
            raise PromptError(f"{where} is nested too deeply.") from None
        yield number, found

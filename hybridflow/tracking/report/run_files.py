"""RunFiles: the files of a run directory, read line by line; damaged lines are counted, not fatal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hybridflow.errors import ConfigError
from hybridflow.settings import is_number

CALLS = ("call", "transfer", "switch", "stage")  # events of devices
FILES = ("config.yaml", "metrics.jsonl", "samples.jsonl", "events.jsonl", "notes.json")

_DECODER = json.JSONDecoder(parse_constant=lambda _: None)


@dataclass
class RunFiles:
    """The files of a run in `directory`. `damaged` counts lines by file that are not one JSON object."""

    directory: Path
    damaged: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, directory: str | Path) -> RunFiles:
        """Errors: ConfigError for a directory without any file of a run."""
        path = Path(directory)
        if not path.is_dir():
            raise ConfigError(f"{directory}: not a directory. Give the directory of a run, such as runs/first.")
        if not any((path / name).is_file() for name in FILES):
            raise ConfigError(f"{directory} has none of {', '.join(FILES)}: give the directory of a run.")
        return cls(path)

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        return (line for _, line in self.placed_lines(name))

    def placed_lines(self, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """The objects of a .jsonl file with their offsets, for `lines_at`; nothing without the file."""
        self.damaged.pop(name, None)
        for offset, text in self.raw_lines(name):
            if (line := self.parsed(name, text)) is not None:
                yield offset, line

    def parsed(self, name: str, text: bytes) -> dict[str, Any] | None:
        """The object of a line; counts a damaged one."""
        line = as_object(text)
        if line is None and text.strip():
            self.damaged[name] = self.damaged.get(name, 0) + 1
        return line

    def raw_lines(self, name: str) -> Iterator[tuple[int, bytes]]:
        path, start = self.directory / name, 0
        if not path.is_file():
            return
        with path.open("rb") as file:
            for text in file:
                yield start, text
                start += len(text)

    def lines_at(self, name: str, offsets: list[int]) -> Iterator[dict[str, Any]]:
        """The objects at `offsets` of `placed_lines`; lines that were replaced meanwhile are left out."""
        with (self.directory / name).open("rb") as file:
            for offset in offsets:
                file.seek(offset)
                if (line := as_object(file.readline())) is not None:
                    yield line

    def values(self, name: str) -> dict[str, str]:
        """The values of config.yaml or notes.json, each under its dotted name, as text."""
        path = self.directory / name
        try:
            return dict(_flat("", yaml.safe_load(path.read_text()) if path.is_file() else {}))
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError):
            self.damaged[name] = 1
            return {}


def as_object(text: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is not one."""
    try:
        found = _DECODER.decode(text.decode())
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_event(found: Mapping[str, Any]) -> bool:
    """Whether it has what each event of its kind has in events.jsonl."""
    kind = found.get("kind")
    names = ("role", "method", "pool") if kind in CALLS else ()
    numbers = (*(("time",) if kind == "run" else ("start", "end")), *(("rank", "seq", "ready") if names else ()))
    texts = (kind, *(found.get(name) for name in names))
    values = (found.get(name) for name in numbers)
    return all(isinstance(text, str) for text in texts) and all(is_number(n) and abs(n) < 1e12 for n in values)


def _flat(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value and depth < 8:
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), inner, depth + 1)
    elif prefix:
        yield prefix, value if isinstance(value, str) else json.dumps(value, default=str)


def rounded(value: float, digits: int = 6) -> float:
    """With this number of significant digits, which a page can show."""
    return value if type(value) is int else float(f"{value:.{digits}g}")

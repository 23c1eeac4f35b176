"""BatchRecords: what calls that generate have returned, as files of a run, for `hybridflow replay`. Pure.

`step-00000012.0.pt` is the first such call of iteration 12, `program.json` the program that made the calls. Files hold
tensors and plain data only: reading one runs no code of it.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.columns import Column, Objects
from hybridflow.batch.ragged import Ragged
from hybridflow.data.encoded_image import EncodedImage
from hybridflow.errors import BatchError, ConfigError

PROGRAM = "program.json"
BATCHES = "batches"
"""The directory of the records, beside the checkpoints of their run."""
_DAMAGED = (EOFError, BatchError, pickle.UnpicklingError)
_NAME = re.compile(r"step-(\d{8,})\.(\d+)\.pt")


@dataclass(frozen=True)
class BatchRecord:
    """One call of `role`.`method`: `prompts` are the columns that it read, `rows` those that it wrote, `factor` rows
    per prompt."""

    role: str
    method: str
    factor: int
    prompts: Batch
    rows: Batch

    def write(self, path: Path) -> None:
        """A complete file, or none. Errors: OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial")
        content = vars(self) | {"prompts": _plain(self.prompts), "rows": _plain(self.rows)}
        try:
            with partial.open("wb") as file:
                torch.save(content, file)
            partial.replace(path)
        except BaseException:
            with suppress(OSError):
                partial.unlink()
            raise

    @classmethod
    def read(cls, path: Path) -> BatchRecord:
        """Errors: ConfigError for a file that is damaged, or has objects other than plain data."""
        try:
            with torch.serialization.safe_globals([EncodedImage]):
                content = torch.load(path, map_location="cpu", weights_only=True)
            return cls(**content | {name: _batch(content[name]) for name in ("prompts", "rows")})
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, *_DAMAGED) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{path} cannot be read as a recorded batch: {why:.200} Replay another step.") from None


def _plain(batch: Batch) -> dict[str, Any]:
    return {name: _plain_column(batch.peek(name)) for name in batch.columns}


def _plain_column(column: Column) -> Any:
    """Tensors are copied: a view would be written with all of its memory."""
    if isinstance(column, Ragged):
        return {"values": column.values.clone(), "offsets": column.offsets.clone()}
    return list(column) if isinstance(column, list) else column.clone()


def _batch(columns: dict[str, Any]) -> Batch:
    made = {name: Ragged(**column) if isinstance(column, dict) else column for name, column in columns.items()}
    return Batch({name: Objects(column) if isinstance(column, list) else column for name, column in made.items()})


@dataclass(frozen=True)
class BatchRecords:
    """The records in `directory`, by iteration and number of the call in it; iteration 0: before the loop."""

    directory: Path

    def path(self, step: int, index: int) -> Path:
        return self.directory / f"step-{step:08d}.{index}.pt"

    def read(self, step: int, index: int) -> BatchRecord:
        """Errors: ConfigError for a call that is not recorded."""
        if not (path := self.path(step, index)).is_file():
            where = f"step {step}" if step else "the calls before the loop"
            there = f"step {step} has {self._calls(step)} calls" if self._calls(step) else f"recorded are {self}"
            raise ConfigError(f"call {index + 1} that generates of {where} is not in {self.directory}: {there}.")
        return BatchRecord.read(path)

    def drop(self, after: int, until: float | None = math.inf) -> None:
        """Remove the records of the iterations after `after` up to `until`, if they can be removed."""
        for path in [path for path, step in self._files() if after < step <= (until or 0)]:
            with suppress(OSError):
                path.unlink()

    @property
    def steps(self) -> list[int]:
        """Iterations of the loop with a record."""
        return sorted({step for _, step in self._files() if step})

    def __str__(self) -> str:
        """Such as "steps 1-4, 7"."""
        parts: list[list[int]] = []
        for step in self.steps:
            if parts and parts[-1][1] == step - 1:
                parts[-1][1] = step
            else:
                parts.append([step, step])
        return f"steps {', '.join(f'{a}-{b}' if a < b else str(a) for a, b in parts)}" if parts else "no steps"

    def _calls(self, step: int) -> int:
        return sum(found == step for _, found in self._files())

    def _files(self) -> list[tuple[Path, int]]:
        found = [(path, _NAME.fullmatch(path.name)) for path in self.directory.glob("step-*.pt")]
        return [(path, int(name[1])) for path, name in found if name]


@dataclass(frozen=True)
class RecordedProgram:
    """How a run was started: `driver` with `arguments`, in the directory `directory`; "" without a file."""

    driver: str
    arguments: list[str]
    directory: str

    def write(self, records: BatchRecords) -> None:
        """Errors: OSError."""
        records.directory.mkdir(parents=True, exist_ok=True)
        partial = records.directory / f".{PROGRAM}.{os.getpid()}"
        partial.write_text(json.dumps(vars(self), indent=2) + "\n")
        partial.replace(records.directory / PROGRAM)

    @classmethod
    def read(cls, records: BatchRecords) -> RecordedProgram:
        """Errors: ConfigError for a damaged file."""
        path = records.directory / PROGRAM
        try:
            found = cls(**json.loads(path.read_text()))
            if all(isinstance(one, str) for one in (found.driver, found.directory, *found.arguments)):
                return found
        except (OSError, ValueError, TypeError):
            pass
        raise ConfigError(f"{path} does not say which program made this run: it is damaged. Give --driver FILE.py.")

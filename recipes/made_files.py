"""Files of a generated task, made once from its settings and kept."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def made(directory: str | os.PathLike[str], name: str, settings: Any, write: Callable[[Path], None]) -> Path:
    """The directory below `directory` that `write` has filled for these settings: the first call does, later calls
    reuse it."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    home = Path(directory) / f"{name}-{digest[:12]}"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        # write to a temporary directory and rename it: an interrupted run leaves no incomplete directory
        aside = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}-"))
        try:
            write(aside)
            os.rename(aside, home)
        except OSError:
            if not home.exists():  # otherwise another process wrote the same files first
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return home

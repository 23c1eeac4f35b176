"""`hybridflow new`: a recipe as a program of one's own, with the files of `recipes/` that it imports beside it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hybridflow.errors import ConfigError, nearest

_IMPORT = re.compile(r"^ *from recipes(?:\.(\w+))? import (.+?)(?: *#.*)?$", re.MULTILINE)
_HOME = "parents[1]"  # of a recipe, the folder above `recipes`


def recipes_directory() -> Path:
    """Of an installed package inside it, of a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def write_recipe(name: str, target: str) -> tuple[list[Path], list[Path]]:
    """The files that were written, `target` and those of `recipes/` beside it, and others that were there and stay.

    Errors: ConfigError for an unknown recipe, with the nearest one, and for a file that is there.
    """
    source, path = recipes_directory(), Path(target)
    known = sorted(one.stem for one in source.glob("*.py") if "DEFAULTS" in (text := one.read_text()) and _HOME in text)
    if name not in known:
        raise ConfigError(f"there is no recipe {name!r}.{nearest(name, known)}")
    if path.suffix != ".py" or os.path.lexists(path) or not path.parent.is_dir():
        raise ConfigError(f"{target}: give a new file of Python in a folder that is there, such as my_run.py.")
    text = (source / f"{name}.py").read_text()
    beside = [f"{name}.yaml"] if (source / f"{name}.yaml").is_file() else []
    helpers = [path.parent / "recipes" / one for one in [*sorted(set(_imported(source, text))), *beside]]
    if helpers[0].parent.resolve() == source.resolve():
        raise ConfigError(f"{target}: this folder has the recipes themselves. Give another folder.")
    if os.path.lexists(helpers[0].parent) and not helpers[0].parent.is_dir():
        raise ConfigError(f"{helpers[0].parent} is there and no folder. Give a file in another folder, or rename it.")
    kept = [one for one in helpers if os.path.lexists(one)]
    written = [one for one in helpers if one not in kept]
    helpers[0].parent.mkdir(exist_ok=True)
    for one in written:
        one.write_text((source / one.name).read_text())
    path.write_text(text.replace(_HOME, "parents[0]").replace(f"python recipes/{name}.py", f"python {path.name}"))
    return [path, *written], kept


def _imported(source: Path, text: str) -> Iterator[str]:
    """The files that a recipe imports, and those that they do."""
    for module, names in _IMPORT.findall(text):
        for one in [module] if module else re.findall(r"\w+", names):
            yield f"{one}.py"
            yield from _imported(source, (source / f"{one}.py").read_text())

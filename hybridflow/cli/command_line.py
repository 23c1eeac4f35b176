"""The command line of a driver: settings from YAML, `key=value`, `--key value` and `config=FILE`, and what `--help`
prints. Takes neither torch nor ray."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import SequenceMatcher
from inspect import cleandoc
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import TagToken, YAMLError, scan

from hybridflow.config import VLLM, Adam, Megatron, Sampling
from hybridflow.errors import ConfigError

SECTIONS: Mapping[str, type] = MappingProxyType(
    {"train": Megatron, "optim": Adam, "generate": VLLM, "sampling": Sampling}
)
"""Sections of these names, wherever they are, hold arguments of these classes."""
_CLOSE = 0.6
_MOST_NAMED = 3
_LEAST_LETTERS = 4  # of a word that is looked for in comments
HELP = {"-h", "--help"}


def read_settings(*defaults: str, arguments: Sequence[str] = (), sections: Mapping[str, type] = SECTIONS) -> DictConfig:
    """`defaults` (YAML texts) changed by `arguments`, of which later ones win.

    An argument is `key=value`, `--key=value`, `--key value`, or `config=FILE.yaml` with any of the settings. Keys are
    dotted: `actor.optim.lr`. Below `sections` all options of the class are known, also those without a default here.

    Errors: ConfigError for an unknown key, with the nearest ones of all settings; for a value of another type; and for
    a YAML tag, which could name an object. The options of a section as a whole are checked by `check_sections`.
    """
    settings: Any = OmegaConf.merge(*map(OmegaConf.create, defaults))
    known = _tree(OmegaConf.to_container(settings), "", sections)
    comments = {name: about for text in defaults for name, about in _comments(text).items()}
    keys = {key: comments.get(key, "") for key, _ in _leaves(known)}
    for key, value in _pairs(arguments):
        try:
            if key != "config":
                _refuse_tags(value, f"{key}={value}")
            change = _read_file(value) if key == "config" else OmegaConf.from_dotlist([f"{key}={value}"])
            _check(OmegaConf.to_container(change), known, "", keys)
            settings = OmegaConf.merge(settings, change)
        except (OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(f"{key}={value}: {str(error).splitlines()[0]}.") from None
    return settings


def check_sections(settings: Any, sections: Mapping[str, type] = SECTIONS, prefix: str = "") -> None:
    """Construct the values of all sections. Errors: ConfigError of a class, with the section's key."""
    for name, section in settings.items():
        if not isinstance(section, DictConfig):
            continue
        if name not in sections:
            check_sections(section, sections, f"{prefix}{name}.")
            continue
        try:
            sections[name](**{str(key): value for key, value in section.items()})
        except ConfigError as error:
            raise ConfigError(f"{prefix}{name}: {error}") from None
        except OmegaConfBaseException as error:
            raise ConfigError(f"{prefix}{name}: {str(error).splitlines()[0]}.") from None


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Keys and values. Errors: ConfigError for an argument that is neither."""
    left = list(arguments)
    while left:
        argument = left.pop(0)
        key, given, value = argument.partition("=")
        if key.startswith("--"):
            key = key[2:].replace("-", "_")
            if not given and left and not left[0].startswith("--"):
                given, value = "=", left.pop(0)
        if not given or not key:
            raise ConfigError(f"{argument!r} is no setting: write key=value or --key value, like steps=100.")
        yield key, value


def _read_file(path: str) -> DictConfig:
    try:
        text = Path(path).read_text()
        _refuse_tags(text, path)
        found = OmegaConf.create(text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={path} cannot be read: {error}.") from None
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(f"config={path} is not valid YAML: {error}.") from None
    if not isinstance(found, DictConfig):
        raise ConfigError(f"config={path}: write settings as `key: value` lines, as in the config.yaml of a run.")
    return found


def _refuse_tags(text: str, where: str) -> None:
    if any(isinstance(token, TagToken) for token in scan(text)):
        raise ConfigError(f"{where}: a YAML tag ('!') names a type. Leave it out, or quote the value.")


def _check(change: Any, known: Mapping[str, Any], prefix: str, keys: Mapping[str, str]) -> None:
    """Errors: ConfigError for a key of `change` that `known`, the settings below `prefix`, does not have, and at the
    top for a value of another type than that of a default that is a number or a switch."""
    for name, value in change.items():
        key = f"{prefix}{name}"
        if name not in known:
            key = next((inner for inner, _ in _leaves({key: value})), key)
            raise ConfigError(f"there is no setting {key!r}.{_nearest(key, keys, known)}")
        default = known[name]
        if isinstance(default, dict):
            if not isinstance(value, dict):
                raise ConfigError(f"{key}={value} replaces the settings {', '.join(default)}: name one.")
            _check(value, default, f"{key}.", keys)
        elif not prefix and value is not None and not (isinstance(value, str) and "${" in value):
            asked = {int: "a whole number", float: "a number", bool: "true or false"}.get(type(default))
            if asked and type(value) is not type(default) and (type(default), type(value)) != (float, int):
                raise ConfigError(f"{key}={value}: give {asked}, such as {str(default).lower()}.")


def _tree(value: Any, name: str, sections: Mapping[str, type]) -> Any:
    """All settings with their defaults, as nested dicts: those in `value`, and below sections those of the class."""
    if name not in sections and not isinstance(value, dict):
        return value
    options = fields(sections[name]) if name in sections else ()
    found = {field.name: None if field.default is MISSING else field.default for field in options}
    found |= value if isinstance(value, dict) else {}
    return {key: _tree(one, key, sections) for key, one in found.items()}


def _nearest(key: str, keys: Mapping[str, str], beside: Mapping[str, Any]) -> str:
    """` Did you mean 'actor.optim.lr'?`: the keys whose last part is most like that of `key`, those of its section
    first; without any, those whose comments in `keys` have most of its words, or the names `beside` it."""

    def likeness(one: str) -> tuple[float, float]:
        parts = key.rpartition(".")[2], one.rpartition(".")[2]
        whole = SequenceMatcher(None, key, one).ratio()
        return max(whole * ("." not in key), SequenceMatcher(None, *parts).ratio()), whole

    section = key.rpartition(".")[0]
    own = [one for one in keys if section and one.rpartition(".")[0] == section and likeness(one)[0] >= _CLOSE]
    found = sorted(own or keys, key=likeness, reverse=True)
    best = likeness(found[0])[0] if found else 0.0
    if best < _CLOSE:
        words = {word for word in key.split("_") if len(word) >= _LEAST_LETTERS}
        shared = {one: len(words & set(re.findall(r"[a-z]+", about))) for one, about in keys.items()}
        if most := max(shared.values(), default=0):
            same = [f"{one!r} ({keys[one]})" for one in shared if shared[one] == most][:_MOST_NAMED]
            return f" Did you mean {' or '.join(same)}?"
        return f" Known: {', '.join(beside)}. --help describes them."
    same = [one for one in found if likeness(one)[0] == best][: 1 if "." in key else _MOST_NAMED]
    return f" Did you mean {' or '.join(map(repr, same))}?"


# Help


def help_text(usage: str, *defaults: str, sections: Mapping[str, type] = SECTIONS) -> str:
    """What `--help` prints: `usage`, all settings in `defaults` with the comments beside them, and the options of the
    classes of sections."""
    lines = [cleandoc(usage), "", "Settings: key=value, --key value, or config=FILE.yaml with any of them", ""]
    found = dict[str, dict[str, None]]()
    for text in reversed(defaults):  # a driver's own first
        settings: Any = OmegaConf.to_container(OmegaConf.create(text))
        comments = _comments(text)
        for key, value in _leaves(settings):
            comment = comments.pop(key.partition(".")[0], "")
            lines.append(f"  {f'{key}={_shown(value)}':<38}  {comment}".rstrip())
        for key, _ in _leaves(_tree(settings, "", sections)):
            *outer, _ = key.split(".")
            for depth, name in enumerate(outer, 1):
                if name in sections:
                    found.setdefault(name, {})[".".join(outer[:depth])] = None
    for name, keys in found.items():
        lines += ["", f"{', '.join(keys)}: options of hf.{sections[name].__name__}", ""]
        for field in fields(sections[name]):
            default = "(needed)" if field.default is MISSING else _shown(field.default)
            lines.append(f"  {field.name}={'(below)' if field.name in sections else default}")
        lines.append("")
        documented = [base for base in reversed(sections[name].__mro__) if base is not object]
        lines += [f"  {line}".rstrip() for base in documented for line in cleandoc(base.__doc__ or "").splitlines()]
    return "\n".join(lines) + "\n"


def _comments(text: str) -> dict[str, str]:
    """The comments of each setting at the top level."""
    found, name = dict[str, str](), ""
    for line in text.splitlines():
        if key := re.match(r"(\w+):", line):
            name = key[1]
            found[name] = ""
        if comment := re.search(r"\s#\s+(.*)", line):
            found[name] = f"{found[name]} {comment[1]}".strip()
    return found


def _leaves(known: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in known.items():
        yield from _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else ((f"{prefix}{name}", value),)


def _shown(value: Any) -> str:
    """As it is written in an argument."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_shown, value))}]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))

"""Signature: how a reward function wants to be called, read from its parameters."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.errors import ConfigError

Style = Literal["keywords", "batch", "row"]
_OWN = ("prompts", "completions", "completion_ids")
"""What a function of the "keywords" style is given besides columns."""
_TEXTS = ("prompt", "prompts", "response")
_LOGS = ("log_extra", "log_metric")
_TRAINER = "trainer_state"


@dataclass(frozen=True, kw_only=True)
class Signature:
    """`style`: all rows by keyword as TRL does, all rows by position, or one row.

    `own`: which of prompts, completions and completion_ids go in by keyword (`needs_ids`: the last must), and `logs`
    which of TRL's functions for figures. `needed` and `optional`: columns by name (optional: the parameter has a
    default). `everything`: all columns, except those in `excluded`. `texts`: the parameters that get prompts and
    responses by position, under names that a column may have too; where one has, the call must be `by_name` (or none).
    """

    style: Style
    own: tuple[str, ...] = ()
    needs_ids: bool = False
    logs: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    everything: bool = False
    excluded: frozenset[str] = frozenset()
    texts: tuple[str, ...] = ()
    by_name: Signature | None = None


def read_signature(function: Callable[..., Any], name: str) -> Signature:
    """Errors: ConfigError when it cannot be called with two texts, or with the columns that its `reads` names."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"reward function {name} has no signature: wrap it in a Python function.") from None
    parameters = list(signature.parameters.values())
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    everything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    per_row = bool(positional) and positional[0].name == "prompt"
    if per_row and "completions" in named:
        raise ConfigError(
            f"reward function {name}{signature} is for one row by its first parameter and for all rows by "
            f"`completions`: take (prompt, response, ...) or (prompts, completions, ...)."
        )
    nameless = any(p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters)
    reads = _said_reads(function, name, signature, set(named), everything)
    by_name = None if nameless or per_row else _by_keyword(name, named, everything, reads)
    if by_name is not None and (
        "completions" in named or "completion_ids" in named or (everything and len(positional) < 2)
    ):
        return by_name
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(
            f"reward function {name}{signature} must take (prompts, completions, ...) for all rows, or (prompt, "
            f"response, ...) for one."
        )
    texts = tuple(p.name for p in positional[:2])
    needed, optional = _columns(named, texts) if reads is None else reads
    for_trl = everything and reads is None and texts[:1] == ("prompts",)
    return Signature(
        style="row" if per_row else "batch",
        needed=needed,
        optional=optional,
        everything=everything and reads is None,
        excluded=frozenset({"prompt", "response", *texts}),
        texts=() if reads is not None else tuple(t for t in texts if t in named and t not in _TEXTS),
        by_name=by_name if for_trl else None,
    )


def _by_keyword(
    name: str,
    named: dict[str, inspect.Parameter],
    everything: bool,
    reads: tuple[tuple[str, ...], tuple[str, ...]] | None,
) -> Signature:
    """As TRL calls it. Errors: ConfigError when it cannot do without the state of TRL's trainer."""
    if _TRAINER in named and named[_TRAINER].default is inspect.Parameter.empty and reads is None:
        raise ConfigError(
            f"reward function {name} takes {_TRAINER!r}: there is no trainer that could have a state. Give the "
            f"parameter a default, and bring what it needs as a column of the prompts."
        )
    logs = tuple(key for key in _LOGS if key in named)
    needed, optional = _columns(named, (*_OWN, *_LOGS, _TRAINER)) if reads is None else reads
    takes_all = everything and (reads is None or not any(key in named for key in _OWN))
    ids = named.get("completion_ids")
    return Signature(
        style="keywords",
        own=tuple(key for key in _OWN if key in named or takes_all),
        needs_ids=ids is not None and ids.default is inspect.Parameter.empty,
        logs=logs,
        needed=needed,
        optional=optional,
        everything=everything and reads is None,
        excluded=frozenset({"prompt", "response", *_OWN, *logs, _TRAINER}),
    )


def _columns(named: dict[str, inspect.Parameter], but: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Parameters that are columns: those without a default, and those with one."""
    found = [p for p in named.values() if p.name not in but]
    return tuple(p.name for p in found if p.default is p.empty), tuple(
        p.name for p in found if p.default is not p.empty
    )


def _said_reads(
    function: Any, name: str, signature: inspect.Signature, known: set[str], everything: bool
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The columns, needed and optional, that a verifier's attribute `reads` names; None without one."""
    reads = getattr(function, "reads", None)
    if reads is None:
        return None
    if isinstance(reads, str) or not all(isinstance(entry, str) and entry.rstrip("?") for entry in reads):
        raise ConfigError(f"reward function {name}: reads={reads!r} must be a tuple of column names.")
    strange = [entry for entry in reads if not everything and entry.removesuffix("?") not in known]
    if strange:
        raise ConfigError(f"reward function {name}{signature} reads the column {strange[0]!r} and does not take it.")
    optional = tuple(entry.removesuffix("?") for entry in reads if entry.endswith("?"))
    return tuple(entry for entry in reads if not entry.endswith("?")), optional


def layers(function: Any) -> Iterator[Any]:
    """The function, and what it stands on: what partials bind, and adapters keep as `inner`."""
    while callable(function):
        yield function
        function = function.func if isinstance(function, functools.partial) else getattr(function, "inner", None)


def innermost(function: Any) -> Any:
    """The user's own function inside partials and adapters."""
    return list(layers(function))[-1] if callable(function) else function


def name_of(function: Any) -> str:
    """As it is called in messages: the function's name, or the class of a callable object."""
    inner = innermost(function)
    return getattr(inner, "__qualname__", type(inner).__name__).rpartition("<locals>.")[2]


def place_of(function: Any) -> str | None:
    """`rewards.py:12`, where it can be known."""
    inner = innermost(function)
    for candidate in (inner, type(inner).__call__):
        code = getattr(inspect.unwrap(candidate), "__code__", None) if callable(candidate) else None
        if code is not None:
            near = os.path.relpath(code.co_filename)
            return f"{code.co_filename if near.startswith('..') else near}:{code.co_firstlineno}"
    return None

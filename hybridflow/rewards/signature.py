"""Signature: how a reward function wants to be called, read from its parameters."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.errors import ConfigError

Style = Literal["keywords", "batch", "row"]
_OWN = ("prompts", "completions", "completion_ids")
"""What a function of the "keywords" style is given besides columns."""


@dataclass(frozen=True, kw_only=True)
class Signature:
    """`style`: all rows by keyword as TRL does, all rows by position, or one row.

    `own`: which of prompts, completions and completion_ids go in by keyword (`needs_ids`: the last must). `needed` and
    `optional`: columns by name (optional: the parameter has a default). `everything`: all columns, except those in
    `excluded`.
    """

    style: Style
    own: tuple[str, ...] = ()
    needs_ids: bool = False
    needed: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    everything: bool = False
    excluded: frozenset[str] = frozenset()


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
    if "completions" in named:
        texts, style = [p for p in parameters if p.name in _OWN], "keywords"
        own = tuple(key for key in _OWN if key in named or (everything and not hasattr(function, "reads")))
    else:
        texts, style, own = positional[:2], "row" if per_row else "batch", ()
        if len(texts) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
            raise ConfigError(
                f"reward function {name}{signature} must take (prompts, completions, ...) for all rows, or (prompt, "
                f"response, ...) for one."
            )
    columns = [p for p in named.values() if p not in texts]
    read = _said_reads(function, name, signature, {p.name for p in columns}, everything)
    return Signature(
        style=style,
        own=own,
        needs_ids=bool(own)
        and "completion_ids" in named
        and named["completion_ids"].default is inspect.Parameter.empty,
        needed=tuple(p.name for p in columns if p.default is p.empty) if read is None else read[0],
        optional=tuple(p.name for p in columns if p.default is not p.empty) if read is None else read[1],
        everything=everything and read is None,
        excluded=frozenset({"prompt", "response", *own, *(p.name for p in texts)}),
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


def innermost(function: Any) -> Any:
    """The user's own function inside partials and adapters (which keep it as `inner`)."""
    while True:
        inside = function.func if isinstance(function, functools.partial) else getattr(function, "inner", None)
        if not callable(inside):
            return function
        function = inside


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

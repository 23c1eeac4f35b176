"""RowFunction: a user's function for one row as a reward function; adapters wrap other signatures.

It imports little: the worker processes that run such a function import this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.rewards.calling import RowFailure, is_async, name_of


class RowFunction:
    """A reward function that is called with (prompt, response, **columns), row by row; `inner` is the user's function.

    `reads`: the columns that it takes ("name?" where they may be missing); None: every column.
    """

    def __init__(self, inner: Callable[..., Any], reads: tuple[str, ...] | None) -> None:
        self.inner, self.is_async, self.reads = inner, is_async(inner), reads

    def __call__(self, prompt: Any, response: str, **columns: Any) -> Any:
        return self.inner(prompt, response, **columns)


def per_row(function: Callable[..., Any]) -> RowFunction:
    """A reward function from `f(prompt, response, **columns) -> number`, for one row.

    `response` is a text, also where the prompt is a list of chat messages. The parameters behind the first two name
    columns, whose value for the row they get; one with a default may be missing. Each row has a time limit of its own,
    and a row that fails costs no other row. The rows of an async function run at the same time.
    Errors: ConfigError when the function does not take two texts.
    """
    signature, parameters, everything = parameters_of(function)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 2 and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ConfigError(f"per_row({name_of(function)}{signature}): it must take (prompt, response, **columns).")
    columns = [p for p in parameters if p not in positional[:2] and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return RowFunction(function, None if everything else entries(columns))


def from_compute_score(
    function: Callable[..., Any],
    *,
    data_source: str | None = "data_source",
    ground_truth: str = "ground_truth",
    extra_info: str | None = "extra_info",
    components: Sequence[str] = (),
) -> ComputeScore:
    """A reward function from verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`.

    The function, sync or async, is called by keyword for every row with the response's text, and returns a number or a
    dict with the entry "score". `data_source`, `ground_truth` and `extra_info` name the columns of the batch; a name
    with a dot is an entry of a column of dicts ("reward_model.ground_truth" in verl's own Parquet files), None leaves
    the argument out (data_source: passes None). Without the column `extra_info` a function that cannot do without the
    argument gets {}. A row whose dict has no such entry is a RowFailure. `components` names the entries of the answered
    dict that become columns `rewards/<entry>`, NaN where a row's dict has none. Errors: ConfigError when the function
    does not take these arguments.
    """
    if isinstance(components, str) or not all(isinstance(name, str) and name for name in components):
        raise ConfigError(
            f"from_compute_score(components={components!r}): give a tuple of names, as in components=('acc',)."
        )
    signature, parameters, everything = parameters_of(function)
    taken = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if missing := [n for n in ("data_source", "solution_str", "ground_truth") if n not in taken and not everything]:
        raise ConfigError(
            f"{name_of(function)}{signature} has no parameter {missing[0]!r}: from_compute_score takes functions "
            f"(data_source, solution_str, ground_truth, extra_info=None)."
        )
    needs_info = "extra_info" in taken and taken["extra_info"].default is inspect.Parameter.empty
    names = {"data_source": data_source, "ground_truth": ground_truth}
    if extra_info is not None and (everything or "extra_info" in taken):
        names["extra_info"] = extra_info
    return ComputeScore(function, names, needs_info, tuple(components))


class ComputeScore(RowFunction):
    """`names`: the column, or the entry in one, that an argument is; the column of `extra_info` may be missing."""

    def __init__(
        self, function: Callable[..., Any], names: dict[str, str | None], needs_info: bool, components: tuple[str, ...]
    ) -> None:
        self._names, self._needs_info, self.components = names, needs_info, components
        columns = {key: name.partition(".")[0] for key, name in names.items() if name is not None}
        self._extra = columns.pop("extra_info", None)
        needed = tuple(dict.fromkeys(columns.values()))
        extra = () if self._extra is None or self._extra in needed else (f"{self._extra}?",)
        super().__init__(function, (*needed, *extra))

    def __call__(self, prompt: Any, response: str, **columns: Any) -> Any:
        given = {key: name for key, name in self._names.items() if key != "extra_info" or self._extra in columns}
        found = {key: None if name is None else _entry(columns, name) for key, name in given.items()}
        if failed := [value for value in found.values() if isinstance(value, RowFailure)]:
            return failed[0]
        if self._needs_info:
            found.setdefault("extra_info", {})
        return self.inner(solution_str=response, **found)


def parameters_of(function: Callable[..., Any]) -> tuple[inspect.Signature, list[inspect.Parameter], bool]:
    """Its signature, the parameters, and whether it takes any keyword. Errors: ConfigError without a signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"reward function {name_of(function)} has no signature: wrap it in one.") from None
    parameters = list(signature.parameters.values())
    return signature, parameters, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _entry(columns: dict[str, Any], name: str) -> Any:
    """The value of a column, or of an entry in it ("reward_model.ground_truth"); a RowFailure if it is missing."""
    column, *path = name.split(".")
    value = columns[column]
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            there = (
                f"its entries are {sorted(map(str, value))}" if isinstance(value, Mapping) else f"it is {value!r:.60}"
            )
            return RowFailure(f"column {column!r} has no entry {name.partition('.')[2]!r}; {there}")
        value = value[key]
    return value


def entries(parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    """Columns for parameters, "name?" for one that has a default."""
    return tuple(p.name if p.default is p.empty else f"{p.name}?" for p in parameters)

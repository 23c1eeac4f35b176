"""Placement: where every group of a loop is, how its model is cut there, and why: what the planner finds. Pure.

A plain value: it is printed, drawn, saved as YAML, and taken by the runtime. Devices are numbers in the cluster, which
count through from node to node.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from hybridflow.config import FSDP, Megatron, ZeRO
from hybridflow.errors import HybridFlowError, PlacementError, nearest

Strategy = Megatron | FSDP | ZeRO
_STRATEGIES: Mapping[str, type[Strategy]] = {kind.__name__: kind for kind in (Megatron, FSDP, ZeRO)}
GIB = float(1 << 30)
_MOST = 1 << 20  # devices of a range: a typing error must not fill the memory
_MEANT = MappingProxyType(
    {
        "float": "finite number of at least 0",
        "str": "text",
        "bool": "true or false",
        "tuple[int, int, int]": "(p, t, d)",
    }
)


@dataclass(frozen=True)
class CallPlacement:
    """`method` runs on `devices` in the sizes (p, t, d), with weights that its group gives them."""

    method: str
    devices: tuple[int, ...]
    sizes: tuple[int, int, int]

    def __post_init__(self) -> None:
        _check_values(self)


@dataclass(frozen=True)
class GroupPlacement:
    """Devices of a group and how its model is trained, or kept where it is not trained (None: a group of functions).

    `nodes` are the devices of each node of the cluster. `generate` are (p_g, t_g), None for a group that does not
    generate. `elsewhere` are methods with layouts of their own; one that is called several times in an iteration, and
    not always in the group's layout, is there once for each call, in their order. `memory_fraction` is the share of a
    device's memory that weights and KV cache of generation may have beside all that stays there.
    Errors: PlacementError for devices that the nodes have not, or that are not in ascending order.
    """

    devices: tuple[int, ...]
    nodes: tuple[int, ...]
    train: Strategy | None = None
    generate: tuple[int, int] | None = None
    elsewhere: tuple[CallPlacement, ...] = ()
    memory_fraction: float | None = None

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)
        for where in (self, *self.elsewhere):
            _check_devices(where.devices, self.nodes)
        if self.generate is not None and (len(self.generate) != 2 or not all(map(_is_size, self.generate))):
            raise PlacementError(f"generate={self.generate!r}: give (p_g, t_g), both at least 1.")
        share = self.memory_fraction
        if share is not None and not (isinstance(share, int | float) and 0 < share < 1):
            raise PlacementError(f"memory_fraction={share!r}: a share of a device's memory, in (0, 1).")


@dataclass(frozen=True)
class CallLayout:
    """Where one call runs, its sizes (p, t, d), and what is expected of it.

    `differs`: the weights of its group are at home elsewhere or in other sizes, and are moved here in `move_seconds`
    before it. `memory` are bytes on its fullest device while it runs, of all groups there, of `capacity`. `limit` is
    what most of its `seconds` are spent on, `runner_up` the next best layout and `lost` why it is not taken.
    """

    group: str
    kind: str
    devices: tuple[int, ...]
    sizes: tuple[int, int, int]
    seconds: float
    differs: bool = False
    move_seconds: float = 0.0
    limit: str = ""
    memory: float = 0.0
    capacity: float = 0.0
    runner_up: str = ""
    lost: str = ""

    def __post_init__(self) -> None:
        _check_values(self)

    @property
    def layout(self) -> str:
        p, t, d = self.sizes
        return f"{p}-{t}-{d}"


@dataclass(frozen=True)
class Bar:
    """`call` runs on `devices` from `start` to `stop` [s]; `move`: its weights are on their way to them."""

    call: str
    group: str
    devices: tuple[int, ...]
    start: float
    stop: float
    move: bool = False

    def __post_init__(self) -> None:
        _check_values(self)


@dataclass(frozen=True)
class Placement:
    """`placement["actor"]` is where the actor goes. `nodes` are the devices of each node of the `cluster`.

    `calls` are in program order, `seconds` the expected time of an iteration, `bars` one of them, and `found_by` the
    search that found it. Errors: PlacementError for a group that it does not have, with the nearest name.
    """

    nodes: tuple[int, ...]
    groups: Mapping[str, GroupPlacement] = field(default_factory=dict)
    calls: Mapping[str, CallLayout] = field(default_factory=dict)
    seconds: float = 0.0
    cluster: str = ""
    found_by: str = ""
    bars: tuple[Bar, ...] = ()

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)
        _check_values(self)
        for one in (*self.calls.values(), *self.bars):
            _check_devices(one.devices, self.nodes, least=0)
        object.__setattr__(self, "groups", MappingProxyType(dict(self.groups)))
        object.__setattr__(self, "calls", MappingProxyType(dict(self.calls)))

    def __getitem__(self, group: str) -> GroupPlacement:
        if group not in self.groups:
            raise PlacementError(f"the placement has no group {group!r}.{nearest(str(group), self.groups)}")
        return self.groups[group]

    def __contains__(self, group: object) -> bool:
        return group in self.groups

    def __reduce__(self):
        return _from_plain, (self.plain(),)

    @property
    def differing(self) -> Mapping[str, CallLayout]:
        """Calls before which weights are moved, because their layout is not that of their group."""
        return {name: call for name, call in self.calls.items() if call.differs}

    def plain(self) -> dict[str, Any]:
        """Everything as numbers, texts, lists and dictionaries."""
        groups = {
            name: {
                "devices": ranges(group.devices),
                "train": _plain_strategy(group.train),
                "generate": group.generate and list(group.generate),
                "memory_fraction": group.memory_fraction,
                "elsewhere": [
                    {"method": one.method, "devices": ranges(one.devices), "sizes": list(one.sizes)}
                    for one in group.elsewhere
                ],
            }
            for name, group in self.groups.items()
        }
        calls = {name: asdict(call) for name, call in self.calls.items()}
        for call in calls.values():
            call |= {"devices": ranges(call["devices"]), "sizes": list(call["sizes"])}
        bars = [asdict(bar) | {"devices": ranges(bar.devices)} for bar in self.bars]
        head = {"cluster": self.cluster, "nodes": list(self.nodes), "seconds": self.seconds, "found_by": self.found_by}
        return {**head, "groups": groups, "calls": calls, "bars": bars}

    def save(self, path: str | Path) -> None:
        """Write YAML."""
        Path(path).write_text(yaml.safe_dump(self.plain(), sort_keys=False))

    @classmethod
    def load(cls, path: str | Path) -> Placement:
        """What `save` wrote. Errors: PlacementError for a missing file or one that is no placement."""
        try:
            return _from_plain(yaml.safe_load(Path(path).read_text()))
        except FileNotFoundError:
            raise PlacementError(f"there is no placement file {path}. Placement.save writes one.") from None
        except OSError as error:
            raise PlacementError(f"{path} cannot be read: {error}.") from None
        except HybridFlowError as error:
            raise PlacementError(f"{path} is not a placement that can be used: {error}") from None
        except KeyError as error:
            raise PlacementError(f"{path} is not a placement as Placement.save writes it: it has no {error}.") from None
        except (yaml.YAMLError, TypeError, AttributeError, ValueError, LookupError) as error:
            raise PlacementError(f"{path} is not a placement as Placement.save writes it: {error}.") from None

    def rows(self) -> list[tuple[str, ...]]:
        """The table: a heading, and a row for each call."""
        heading = ("call", "devices", "p-t-d", "seconds", "weights", "memory", "limited by")
        found: list[tuple[str, ...]] = [heading]
        for name, call in self.calls.items():
            moved = f"+{call.move_seconds:.3g} s" if call.differs else "at home"
            memory = f"{call.memory / GIB:.1f} of {call.capacity / GIB:.1f} GiB" if call.capacity else ""
            row = (name, ranges(call.devices), call.layout, f"{call.seconds:.3g}", moved, memory, call.limit)
            found.append(row)
        return found

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([self._title(), *lines])

    def _title(self) -> str:
        return f"{self.seconds:.4g} s per iteration on {self.cluster or list(self.nodes)} ({self.found_by or 'given'})"

    def _repr_html_(self) -> str:
        heading, *rows = self.rows()
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in heading)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        table = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
        return f"<p>{html.escape(self._title())}</p>{table}"

    def explain(self) -> str:
        """For every call: where it is, its time and what limits it, memory, and why the runner-up was not taken."""
        parts = [self._title()]
        for name, call in self.calls.items():
            lines = [f"{name}: {call.layout} (p-t-d) on devices {ranges(call.devices)}"]
            lines.append(f"  takes {call.seconds:.4g} s" + (f", mostly {call.limit}" if call.limit else ""))
            if call.differs:
                lines.append(f"  its weights are moved there before it, in {call.move_seconds:.3g} s")
            if call.capacity:
                share = call.memory / call.capacity
                lines.append(f"  fills {call.memory / GIB:.1f} of {call.capacity / GIB:.1f} GiB ({share:.0%}) a device")
            lines.append(f"  runner-up: {call.runner_up}: {call.lost}" if call.runner_up else "  there is no runner-up")
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def chart(self, path: str | Path | None = None) -> Any:
        """Devices over the time of an iteration; a PNG at `path`, else the matplotlib figure (a notebook shows it)."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        devices = sum(self.nodes)
        figure = Figure(figsize=(10, 1.2 + min(8.0, 0.16 * devices + 1.0)), layout="constrained")
        canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
        groups, labels = list(self.groups), []
        for bar in self.bars:
            color = f"C{groups.index(bar.group) % 10}" if bar.group in groups else "0.7"
            runs = _runs(bar.devices)
            for first, last in runs:
                axes.broken_barh(
                    [(bar.start, bar.stop - bar.start)],
                    (first - 0.45, last - first + 0.9),
                    facecolors=color,
                    edgecolor="white",
                    hatch="////" if bar.move else None,
                    alpha=0.5 if bar.move else 0.9,
                )
            if not bar.move:
                first, last = max(runs, key=lambda run: run[1] - run[0])
                at = (bar.start + bar.stop) / 2, (first + last) / 2
                label = axes.text(*at, bar.call.replace(".", "\n", 1), ha="center", va="center", fontsize=7)
                labels.append((label, (bar.start, first - 0.45), (bar.stop, last + 0.45)))
        edges = [sum(self.nodes[:i]) - 0.5 for i in range(1, len(self.nodes))]
        for edge in edges:
            axes.axhline(edge, color="0.5", linewidth=0.6, linestyle=":")
        axes.set(xlabel="seconds", ylabel="device", ylim=(devices - 0.5, -0.5), title=self._title())
        figure.draw_without_rendering()
        for label, low, high in labels:
            _fit(label, *(abs(a - b) for a, b in zip(*axes.transData.transform([low, high]), strict=True)))
        if path is not None:
            canvas.print_png(str(path))
        return figure


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 1


def _check_nodes(nodes: Sequence[int]) -> None:
    if not nodes or not all(map(_is_size, nodes)):
        raise PlacementError(f"nodes={nodes!r}: give the number of devices of each node.")


def _check_devices(devices: Sequence[int], nodes: Sequence[int], least: int = 1) -> None:
    whole = all(type(device) is int for device in devices)
    if len(devices) < least or not whole or any(a >= b for a, b in itertools.pairwise((-1, *devices, sum(nodes)))):
        raise PlacementError(
            f"devices={devices!r}: give device numbers from 0 to {sum(nodes) - 1} in ascending order, each once."
        )


def _check_values(value: Any) -> None:
    """Numbers are finite and not negative, texts are texts, sizes at least 1."""
    for one in fields(value):
        found, good = getattr(value, one.name), True
        if one.type == "float":
            good = type(found) in (int, float) and 0.0 <= found < float("inf")
        elif one.type in ("str", "bool"):
            good = type(found).__name__ == one.type
        elif one.name == "sizes":
            good = len(found) == 3 and all(map(_is_size, found))
        if not good:
            raise PlacementError(f"{type(value).__name__}({one.name}={found!r}): that is no {_MEANT[str(one.type)]}.")


def _fit(label: Any, width: float, height: float) -> None:
    """Turns a label that is wider than its bar [pixels] on its side, and takes away what does not fit even so."""
    for rotation in (0, 90):
        label.set_rotation(rotation)
        box = label.get_window_extent()
        if box.width <= width and box.height <= height:
            return
    label.set_visible(False)


def ranges(devices: Sequence[int]) -> str:
    """Device numbers with neighbours as `first-last`."""
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in _runs(devices))


def _runs(devices: Sequence[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for device in devices:
        if found and device == found[-1][1] + 1:
            found[-1] = (found[-1][0], device)
        else:
            found.append((device, device))
    return found


def _numbers(text: str) -> tuple[int, ...]:
    found: list[int] = []
    for part in str(text).split(","):
        first, _, last = part.partition("-")
        found += range(int(first), min(int(last or first), int(first) + _MOST) + 1)
    return tuple(found)


def _plain_strategy(strategy: Strategy | None) -> dict[str, Any] | None:
    """The settings that are not the default ones, by the name of the strategy."""
    if strategy is None:
        return None
    own = {f.name: getattr(strategy, f.name) for f in fields(strategy)}
    kept = {name: value for name, value in own.items() if value != getattr(type(strategy), name, None)}
    return {type(strategy).__name__: {n: list(v) if isinstance(v, tuple) else v for n, v in kept.items()}}


def _strategy(plain: Mapping[str, Any] | None) -> Strategy | None:
    if plain is None:
        return None
    ((name, settings),) = plain.items()
    if name not in _STRATEGIES:
        raise PlacementError(f"strategy {name!r} is unknown.{nearest(name, _STRATEGIES)}")
    return _STRATEGIES[name](**settings)


def _elsewhere(plain: Mapping[str, Any]) -> CallPlacement:
    p, t, d = plain["sizes"]
    return CallPlacement(plain["method"], _numbers(plain["devices"]), (p, t, d))


def _from_plain(plain: Mapping[str, Any]) -> Placement:
    nodes = tuple(plain["nodes"])
    groups = {
        name: GroupPlacement(
            _numbers(group["devices"]),
            nodes,
            _strategy(group["train"]),
            (group["generate"][0], group["generate"][1]) if group["generate"] else None,
            tuple(_elsewhere(one) for one in group.get("elsewhere", ())),
            group.get("memory_fraction"),
        )
        for name, group in plain["groups"].items()
    }
    calls = {
        name: CallLayout(**(call | {"devices": _numbers(call["devices"]), "sizes": tuple(call["sizes"])}))
        for name, call in plain["calls"].items()
    }
    bars = tuple(Bar(**(bar | {"devices": _numbers(bar["devices"])})) for bar in plain["bars"])
    return Placement(nodes, groups, calls, plain["seconds"], plain["cluster"], plain["found_by"], bars)

"""Placement: the planner's result: devices and layout of every group of a loop, and the reasons. Pure.

A plain value that can be printed, drawn, saved as YAML and run. Devices are numbered through the cluster, node by node.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import yaml

from hybridflow.batch import markup
from hybridflow.config import FSDP, LoRA, Megatron, ZeRO
from hybridflow.errors import ConfigError, HybridFlowError, PlacementError, nearest
from hybridflow.settings import Check, Count, NonNegative, check_fields, read_yaml

Strategy = Megatron | FSDP | ZeRO
_STRATEGIES: Mapping[str, type[Strategy]] = {kind.__name__: kind for kind in (Megatron, FSDP, ZeRO)}
GIB = float(1 << 30)
_MOST = 1 << 20  # devices of a range: a typo must not fill the memory
_COMPARED = ("colocated", "heuristic", "symmetric")
"""Of a `Placement`, what it is compared with."""
Text = Annotated[str, Check("a text", lambda value: isinstance(value, str))]
_FORM = "(p, t, d), or with cp and ep behind them"
Sizes = Annotated[tuple[int, ...], Check(_FORM, lambda value: len(value) in (3, 5) and all(map(_is_size, value)))]


class _Checked:
    """Numbers are finite and not negative, texts are texts, sizes at least 1. Errors: PlacementError."""

    def __post_init__(self) -> None:
        try:
            check_fields(self)
        except ConfigError as error:
            raise PlacementError(str(error)) from None


@dataclass(frozen=True)
class CallPlacement(_Checked):
    """`method` runs on `devices` with the sizes (p, t, d), or (p, t, d, cp, ep), and weights from its group."""

    method: Text
    devices: tuple[int, ...]
    sizes: Sizes


@dataclass(frozen=True)
class GroupPlacement:
    """Devices of a group and the strategy that trains or holds its model (None: a group of functions).

    `nodes` are the devices of each node of the cluster. `generate` is (p_g, t_g), None for a group that does not
    generate. `elsewhere` lists methods with layouts of their own; a method that is called several times in an
    iteration, not always in the group's layout, is listed once per call, in order. `memory_fraction` is the share of
    device memory that generation's weights and KV cache may use beside all resident memory. `offload`: whether the
    model waits in host memory between its calls (None: it is not said).
    Errors: PlacementError for devices beyond the nodes or not in ascending order.
    """

    devices: tuple[int, ...]
    nodes: tuple[int, ...]
    train: Strategy | None = None
    generate: tuple[int, int] | None = None
    elsewhere: tuple[CallPlacement, ...] = ()
    memory_fraction: float | None = None
    offload: bool | None = None

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
class CallLayout(_Checked):
    """Devices, sizes (p, t, d), or (p, t, d, cp, ep), and predicted costs of one call.

    `differs`: its group's weights have another layout or other devices and are moved here first, in `move_seconds`.
    `memory`: bytes of all groups on its fullest device while it runs, out of `capacity`; `held`: by owner, in GiB.
    `limit` names the largest part of its `seconds`.
    Functions use no device memory: their `capacity` is 0.
    """

    group: Text
    kind: Text
    devices: tuple[int, ...]
    sizes: Sizes
    seconds: NonNegative
    differs: bool = False
    move_seconds: NonNegative = 0.0
    limit: Text = ""
    memory: NonNegative = 0.0
    capacity: NonNegative = 0.0
    held: Text = ""

    @property
    def layout(self) -> str:
        more = zip(("cp", "ep"), self.sizes[3:], strict=False)
        return "-".join(map(str, self.sizes[:3])) + "".join(f" {name}={n}" for name, n in more if n > 1)


@dataclass(frozen=True)
class Bar(_Checked):
    """`call` runs on `devices` from `start` to `stop` [s]; `move`: its weights travel to them."""

    call: Text
    group: Text
    devices: tuple[int, ...]
    start: NonNegative
    stop: NonNegative
    move: bool = False


@dataclass(frozen=True)
class Colocated(_Checked):
    """What a placement is compared with: all groups on all devices, with `tp` inside a node and `pp` stages.

    `seconds` of an iteration; `memory`: bytes on its fullest device, out of `capacity`, more than that where it does
    not fit; `against`: why it cannot be.
    """

    tp: Count = 0
    seconds: NonNegative = 0.0
    memory: NonNegative = 0.0
    capacity: NonNegative = 0.0
    against: Text = ""
    pp: Count = 1

    def slower(self, seconds: float) -> float | None:
        """The share by which it takes longer than `seconds`; None where it cannot run."""
        return self.seconds / seconds - 1 if self.seconds and seconds else None

    def compared(self, devices: int, seconds: float) -> str:
        """A sentence on a placement on `devices` with these `seconds`."""
        name = f"Plain placement (all groups on all {devices} devices" + (f", tp={self.tp})" if self.tp else ")")
        if self.against:
            return f"{name}: not possible, {self.against}."
        if self.memory > self.capacity:
            bytes_ = f"{self.memory / GIB:.1f} of {self.capacity / GIB:.1f} GiB"
            return f"{name}: does not fit, {bytes_} a device ({self.memory - self.capacity:,.0f} bytes too many)."
        more = self.seconds - seconds
        if abs(more) <= 1e-6 * self.seconds:
            return f"{name}: as long, {self.seconds:.4g} s per iteration."
        which = "less" if more > 0 else "more"
        share = f"{abs(more):.3g} s ({abs(more) / self.seconds:.0%}) {which}"
        return f"{name}: {self.seconds:.4g} s per iteration; this one takes {share}."


@dataclass(frozen=True)
class LoopPrice(_Checked):
    """A loop: seconds per iteration, updates by which its weights may be too old, devices; or why it cannot be
    (`against`)."""

    name: Text
    seconds: NonNegative = 0.0
    tokens_per_second: NonNegative = 0.0
    staleness: Count = 0
    devices: Text = ""
    against: Text = ""


def loop_table(loops: Sequence[LoopPrice]) -> str:
    """A line for each loop, and which is the fastest."""
    rows: list[tuple[str, ...]] = [("loop", "seconds", "tokens/s", "staleness", "devices")]
    for one in loops:
        priced = (f"{one.seconds:.4g}", f"{one.tokens_per_second:,.0f}") if one.seconds else ("-", "-")
        rows.append((one.name, *priced, str(one.staleness), one.devices or f"not possible: {one.against}"))
    best = min((one for one in loops if one.seconds), key=lambda one: one.seconds, default=None)
    return _aligned(rows) + (f"\nfastest: {best.name}" if best else "")


@dataclass(frozen=True, repr=False)
class Placement(_Checked):
    """`placement["actor"]` is the actor's GroupPlacement.

    `nodes` are the devices of each node of the `cluster`. `calls` are in program order, `seconds` is the predicted time
    of an iteration, `bars` its timeline, `found_by` how it was found, `shape` how the calls of a stream overlap, and
    what models in host memory cost. It is compared with `colocated`, the plain placement, with `heuristic`, which an
    expert would write, and with `symmetric`, the fastest in which all models are cut alike. `staleness` is all that a
    stream needs of its bound. `loops` computes what other loops would take (`loop_table`), which takes a while. Errors:
    PlacementError for an unknown group, with the nearest name.
    """

    nodes: tuple[int, ...]
    groups: Mapping[str, GroupPlacement] = field(default_factory=dict)
    calls: Mapping[str, CallLayout] = field(default_factory=dict)
    seconds: NonNegative = 0.0
    cluster: Text = ""
    found_by: Text = ""
    bars: tuple[Bar, ...] = ()
    shape: Text = ""
    colocated: Colocated | None = None
    heuristic: Colocated | None = None
    symmetric: Colocated | None = None
    staleness: Annotated[int | None, Check("a whole number", lambda value: value is None or _is_size(value))] = None
    loops: Callable[[], Sequence[LoopPrice]] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)
        super().__post_init__()
        for one in (*self.calls.values(), *self.bars):
            _check_devices(one.devices, self.nodes, least=0)
        object.__setattr__(self, "groups", MappingProxyType(dict(self.groups)))
        object.__setattr__(self, "calls", MappingProxyType(dict(self.calls)))

    def check_placed(self, placed: Collection[str]) -> None:
        """Errors: PlacementError when one of the groups is not among those that a driver has `placed`."""
        if left := [name for name in self.groups if name not in placed]:
            hint = nearest(left[0], placed)
            raise PlacementError(f"the placement is for a group {left[0]!r}, which the driver does not place.{hint}")

    def __getitem__(self, group: str) -> GroupPlacement:
        if group not in self.groups:
            raise PlacementError(f"the placement has no group {group!r}.{nearest(str(group), self.groups)}")
        return self.groups[group]

    def __contains__(self, group: object) -> bool:
        return group in self.groups

    def __reduce__(self):
        return _from_plain, (self.plain(),)

    def plain(self) -> dict[str, Any]:
        """The placement as numbers, strings, lists and dicts."""
        head = {"cluster": self.cluster, "nodes": list(self.nodes), "seconds": self.seconds, "found_by": self.found_by}
        groups = {name: _plain(group) for name, group in self.groups.items()}
        for group in groups.values():
            del group["nodes"]
        body = {"groups": groups, "calls": _plain(self.calls), "bars": _plain(self.bars)}
        beside = {name: _plain(one) for name in _COMPARED if (one := getattr(self, name))}
        own = {name: value for name in ("shape", "staleness") if (value := getattr(self, name))}
        return {**head, **body, **own, **beside}

    def save(self, path: str | Path) -> None:
        """Write YAML."""
        Path(path).write_text(yaml.safe_dump(self.plain(), sort_keys=False))

    @classmethod
    def load(cls, path: str | Path) -> Placement:
        """Read a file of `save`. Errors: PlacementError for a missing file or one without a placement."""
        plain = read_yaml(path, "placement file", PlacementError)
        try:
            return _from_plain(plain)
        except (HybridFlowError, TypeError, AttributeError, ValueError, LookupError) as error:
            raise PlacementError(f"{path} is not a placement as Placement.save writes it: {error}.") from None

    def rows(self) -> list[tuple[str, ...]]:
        """The table: a heading, and a row for each call."""
        heading = ("call", "devices", "p-t-d", "seconds", "weights", "memory", "limited by")
        found: list[tuple[str, ...]] = [heading]
        for name, call in self.calls.items():
            moved = f"+{call.move_seconds:.3g} s" if call.differs else "in place"
            memory, layout = f"{call.memory / GIB:.1f} of {call.capacity / GIB:.1f} GiB", call.layout
            if call.kind == "function":
                moved, memory, layout = "", "none: on the CPU", ""
            found += [(name, ranges(call.devices), layout, f"{call.seconds:.3g}", moved, memory, call.limit)]
        return found

    def __repr__(self) -> str:
        return f"{self._compared()}\n{_aligned(self.rows())}"

    @property
    def faster(self) -> dict[str, float | None]:
        """By what share of throughput it is faster than the `heuristic` and the fastest `symmetric` plan; None where no
        such plan can run."""
        known = {name: getattr(self, name) for name in _COMPARED[1:]}
        return {name: one.slower(self.seconds) for name, one in known.items() if one is not None}

    def _compared(self) -> str:
        plain = self.colocated and self.colocated.compared(sum(self.nodes), self.seconds)
        return "\n".join(filter(None, [self._title(), plain, self._against_symmetric()]))

    def _against_symmetric(self) -> str:
        if (best := self.symmetric) is None:
            return ""
        over, other = self.faster.get("heuristic"), best.slower(self.seconds)
        if other is None:
            return f"No symmetric plan (all groups on all devices, cut alike): {best.against or 'none fits'}."
        second = f"{_share(other)} than the best symmetric plan (tp={best.tp}, pp={best.pp})"
        if self.heuristic is None or over is None:
            return f"{second}; the heuristic does not fit."
        return f"{_share(over)} than the heuristic (tp={self.heuristic.tp}, pp={self.heuristic.pp}), {second}."

    def _title(self) -> str:
        where, how = self.cluster or list(self.nodes), self.found_by or "given"
        return f"{self.seconds:.4g} s per iteration on {where} ({how})" + (self.shape and f"\n{self.shape}")

    def _repr_html_(self) -> str:
        heading, *rows = self.rows()
        return markup.table(self._compared(), heading, rows)

    def explain(self) -> str:
        """For every call: devices, time and its limit, and memory by owner."""
        parts = ["\n".join(filter(None, [self._title(), self._against_symmetric()]))]
        for name, call in self.calls.items():
            lines = [f"{name}: {call.layout} (p-t-d) on devices {ranges(call.devices)}"]
            if call.kind == "function":
                lines = [f"{name}: on the CPU, in the processes of devices {ranges(call.devices)}"]
            lines.append(f"  takes {call.seconds:.4g} s" + (f", mostly {call.limit}" if call.limit else ""))
            if call.differs:
                lines.append(f"  its weights are moved there before it, in {call.move_seconds:.3g} s")
            if call.capacity:
                share = call.memory / call.capacity
                lines.append(f"  uses {call.memory / GIB:.1f} of {call.capacity / GIB:.1f} GiB ({share:.0%}) a device")
                lines += [f"    {call.held}"] if call.held else []
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def chart(self, path: str | Path | None = None) -> Any:
        """Devices over the time of an iteration; a PNG at `path`, else the matplotlib figure (a notebook shows it)."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch

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
                    hatch="////" if bar.move else "...." if self._on_cpu(bar) else None,
                    alpha=0.5 if bar.move or self._on_cpu(bar) else 0.9,
                )
            if not bar.move:
                first, last = max(runs, key=lambda run: run[1] - run[0])
                at = (bar.start + bar.stop) / 2, (first + last) / 2
                label = axes.text(*at, bar.call.replace(".", "\n", 1), ha="center", va="center", fontsize=7)
                labels.append((label, (bar.start, first - 0.45), (bar.stop, last + 0.45)))
        for edge in itertools.accumulate(self.nodes[:-1]):
            axes.axhline(edge - 0.5, color="0.5", linewidth=0.6, linestyle=":")
        axes.set(xlabel="seconds", ylabel="device", ylim=(devices - 0.5, -0.5), title=self._title())
        patches = [Patch(facecolor=f"C{i % 10}", label=group) for i, group in enumerate(groups)]
        if any(bar.move for bar in self.bars):
            patches.append(Patch(facecolor="0.8", hatch="////", label="weights move"))
        if any(map(self._on_cpu, self.bars)):
            patches.append(Patch(facecolor="0.8", hatch="....", label="on the CPU"))
        if patches:
            figure.legend(handles=patches, loc="outside right upper", fontsize=8)
        figure.draw_without_rendering()
        for label, low, high in labels:
            _fit(label, *(abs(a - b) for a, b in zip(*axes.transData.transform([low, high]), strict=True)))
        if path is not None:
            canvas.print_png(str(path))
        return figure

    def _on_cpu(self, bar: Bar) -> bool:
        return bar.call in self.calls and self.calls[bar.call].kind == "function"


def _share(more: float) -> str:
    return f"{abs(more):.0%} {'slower' if more < -0.005 else 'faster'}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


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


def _fit(label: Any, width: float, height: float) -> None:
    """Rotates a label that is wider than its bar [pixels]; removes it if it still does not fit."""
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


def _plain(value: Any) -> Any:
    """Devices as ranges; strategies by name with their non-default settings."""
    if isinstance(value, Strategy):
        own = {f.name: getattr(value, f.name) for f in fields(value)}
        kept = {name: _plain(one) for name, one in own.items() if one != getattr(type(value), name, None)}
        return {type(value).__name__: kept}
    if is_dataclass(value):
        own = {f.name: getattr(value, f.name) for f in fields(value)}
        return {name: ranges(one) if name == "devices" else _plain(one) for name, one in own.items()}
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _values(plain: Mapping[str, Any]) -> dict[str, Any]:
    own = {name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()}
    return own | {"devices": _numbers(plain["devices"])}


def _strategy(plain: Mapping[str, Any] | None) -> Strategy | None:
    if plain is None:
        return None
    ((name, settings),) = plain.items()
    if name not in _STRATEGIES:
        raise PlacementError(f"strategy {name!r} is unknown.{nearest(name, _STRATEGIES)}")
    lora = settings.get("lora")
    return _STRATEGIES[name](**settings | ({"lora": LoRA(**lora)} if lora else {}))


def _from_plain(plain: Mapping[str, Any]) -> Placement:
    nodes, groups = tuple(plain["nodes"]), {}
    for name, group in plain["groups"].items():
        elsewhere = tuple(CallPlacement(**_values(one)) for one in group.get("elsewhere", ()))
        own = _values(group) | {"nodes": nodes, "train": _strategy(group["train"]), "elsewhere": elsewhere}
        groups[name] = GroupPlacement(**own)
    calls = {name: CallLayout(**_values(call)) for name, call in plain["calls"].items()}
    bars = tuple(Bar(**_values(bar)) for bar in plain["bars"])
    head = plain["seconds"], plain["cluster"], plain["found_by"]
    beside: dict[str, Any] = {name: Colocated(**plain[name]) for name in _COMPARED if name in plain}
    beside |= {name: plain[name] for name in ("shape", "staleness") if name in plain}
    return Placement(nodes, groups, calls, *head, bars, **beside)

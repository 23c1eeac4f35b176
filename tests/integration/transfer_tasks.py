"""What eight gloo processes do with weight plans, and what each of them saw: tasks of `test_transfer.py`."""

from __future__ import annotations

import datetime
import gc
import json
import os
import resource
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.offloadable import Residency
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.routing import DIRECT_BYTES
from hybridflow.engine3d.transfer.transfer import Transfer, execute
from hybridflow.engines.checkpoint.writer import save_checkpoint
from hybridflow.engines.process_groups import ProcessGroups
from hybridflow.errors import CheckpointError, LayoutError, WaitTimeoutError
from tests.example_layouts import SPEC, fused, placed, whole
from tests.integration.transfer_pairs import MHA, RANKS, Pair, empty, fill, filled, flat, missing, some_pair, values_of

PAIRS, CYCLES = 130, 24
CPU = torch.device("cpu")
CASES = (
    "missing",
    "small",
    "integer",
    "narrow",
    "complex",
    "no memory",
    "unreadable",
    "other plan",
    "other bucket",
    "other rank",
)
SLACK = 16 * 4 * RANKS  # messages of both rounds in flight start at multiples of 16 bytes


def tensors(group: dist.ProcessGroup, pair: Pair, rank: int, part: bool = True, **memory: bool) -> tuple:
    """Storages of `pair` with values, and the Transfer between them: with this rank's part of the plan or all of it."""
    held = filled(pair.source, rank, values_of(pair.source, 0), pair.dtypes[0])
    got = empty(pair.destination, rank, pair.dtypes[1])
    made = plan(pair.source, pair.destination, pair.node_of, rank=rank if part else None)
    sides = {"release": held, "acquire": got}
    owners = {side: Residency(sides[side], CPU) for side, wanted in memory.items() if wanted}
    return held, got, owners, Transfer(made, held, got, group, rank, pair.bucket_bytes, **owners)


def arrived(pair: Pair, rank: int, got: dict[str, torch.Tensor], seed: int) -> bool:
    rounded = {name: tensor.to(pair.dtypes[0]) for name, tensor in values_of(pair.source, seed).items()}
    expected = filled(pair.destination, rank, rounded, pair.dtypes[1])
    return all(torch.equal(got[name], expected[name]) for name in expected)


def random_pairs(group: dist.ProcessGroup, rank: int) -> dict[str, object]:
    """What did not arrive bit for bit, took more bytes than must be, or more memory than it may."""
    wrong: list[str] = []
    moved, relayed = [0, 0], 0
    for seed in range(PAIRS):
        pair = some_pair(seed)
        _, got, _, transfer = tensors(group, pair, rank, part=seed % 5 != 0)
        transfer.run()
        if not arrived(pair, rank, got, 0):
            wrong.append(f"pair {seed}: values")
        if transfer.received_bytes != missing(pair, rank) * min(dtype.itemsize for dtype in pair.dtypes):
            wrong.append(f"pair {seed}: received {transfer.received_bytes}")
        if sum(transfer.received.values()) != transfer.received_bytes:
            wrong.append(f"pair {seed}: received by tensor")
        if transfer.peak_bytes != transfer.buffer_bytes or transfer.peak_bytes > pair.bucket_bytes + SLACK:
            wrong.append(f"pair {seed}: {transfer.peak_bytes} bytes of buffers")
        itemsize = min(dtype.itemsize for dtype in pair.dtypes)
        (planned,) = transfer.plan.part(rank).traffic(itemsize, pair.bucket_bytes)
        if (planned.messages, planned.sent_bytes) != (transfer.messages, transfer.sent_bytes):
            wrong.append(f"pair {seed}: {transfer.messages} messages, {planned.messages} planned")
        if planned.peak_bytes < transfer.peak_bytes:
            wrong.append(f"pair {seed}: {transfer.peak_bytes} bytes of buffers, {planned.peak_bytes} planned")
        moved = [moved[0] + transfer.sent_bytes, moved[1] + transfer.received_bytes]
        relayed += any(move.hop and rank == move.source for move in transfer.plan.moves)
    return {"wrong": wrong, "moved": moved, "relayed": relayed}


def cycles(group: dist.ProcessGroup, rank: int) -> dict[str, bool]:
    """Training tensors go and generation tensors come, again and again, with new values each time."""
    seen = {"equal": True, "released": True, "flat": True}
    sources = (fused(MHA, 1, 6, 1), flat(fused(MHA, 2, 3, 1)))
    for source in (layout.placed(range(layout.ranks), RANKS) for layout in sources):
        destination = fused(MHA, 1, 2, 4)
        pair = Pair(source, destination, (torch.float32, torch.bfloat16), None, 2000)
        held, got, owners, transfer = tensors(group, pair, rank, release=True, acquire=True)
        train, generation = owners["release"], owners["acquire"]
        live = []  # tensors of this process; a look at all its objects takes longer than many cycles
        for cycle in range(CYCLES):
            generation.release()
            train.acquire()
            fill(held, source, rank, values_of(source, cycle % 3))
            transfer.run()
            seen["equal"] &= arrived(pair, rank, got, cycle % 3)
            seen["released"] &= train.resident_bytes == 0 and generation.resident_bytes == generation.total_bytes
            if cycle % 8 == 0:
                transfer.release()
            if cycle in (3, CYCLES - 5, CYCLES - 1):
                live.append(sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor))
        seen["flat"] &= live[0] == live[1] == live[2]
    return seen


class Watch(Residency):
    """Notes the most bytes that it and its partner had together."""

    partner: Residency
    most = 0

    def acquire(self, names=None):
        fresh = super().acquire(names)
        self.most = max(self.most, self.resident_bytes + self.partner.resident_bytes)
        return fresh


def layer_by_layer(group: dist.ProcessGroup, rank: int) -> list[int]:
    """Twenty equal tensors over all ranks are gathered: the most memory of both sides, their sizes, the buffers."""
    shape, count = (64, 64), 20
    tensors = {f"w{i:02}": shape for i in range(count)}

    def rows(first: int, last: int) -> list[Region]:
        return [Region(Box(name, (first, 0), (last, 64)), name, (0, 0)) for name in tensors]

    train = Layout(tensors, RANKS, lambda r: rows(8 * r, 8 * r + 8))
    generation = Layout(tensors, RANKS, lambda r: rows(16 * (r // 2), 16 * (r // 2) + 16))
    held = {name: torch.full((8, 64), float(rank)) for name in tensors}
    got = {name: torch.zeros(16, 64) for name in tensors}
    before, after = Residency(held, CPU), Watch(got, CPU)
    after.partner = before
    limit = 4 * 8 * 64 * 4  # two rounds, in each of which a rank sends and receives its part of one tensor
    made = plan(train, generation, rank=rank)
    transfer = Transfer(made, held, got, group, rank, limit, release=before, acquire=after)
    after.release()
    transfer.run()
    good = all(
        torch.equal(tensor[::8, 0], torch.tensor([rank // 2 * 2, rank // 2 * 2 + 1.0])) for tensor in got.values()
    )
    return [int(good), after.most, before.total_bytes, after.total_bytes, transfer.peak_bytes]


def large_pieces(group: dist.ProcessGroup, rank: int) -> list[int]:
    """Pieces of DIRECT_BYTES go from storage to storage; only where they become columns they need a buffer."""
    rows = DIRECT_BYTES // 4 // 256
    shapes = {"rows": (2 * rows, 256), "columns": (rows, 512), "small": (3, 5)}
    boxes = [
        [Box("rows", (0, 0), (rows, 256)), Box("columns", (0, 0), (rows, 256)), Box("small", (0, 0), (3, 5))],
        [Box("rows", (rows, 0), (2 * rows, 256)), Box("columns", (0, 256), (rows, 512))],
    ]
    source = Layout(shapes, 2, lambda r: [Region(box, box.tensor, (0, 0)) for box in boxes[r]])
    pair = Pair(
        source.placed([0, 1], RANKS), whole_of(shapes).placed([2], RANKS), (torch.float32, torch.float32), None, 8 << 20
    )
    _, got, _, transfer = tensors(group, pair, rank)
    transfer.run()
    return [int(arrived(pair, rank, got, 0)), transfer.buffer_bytes]


def whole_of(shapes: dict[str, tuple[int, ...]]) -> Layout:
    regions = [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in shapes.items()]
    return Layout(shapes, 1, lambda rank: regions)


def relays(group: dist.ProcessGroup, rank: int) -> dict[str, object]:
    """One rank's model to seven that hold nothing, two on a node: it enters a node once and is passed on there."""
    source, destination = whole(SPEC).placed([3], RANKS), whole(SPEC).placed([3], RANKS)
    seven = Layout(SPEC.tensors(), RANKS, lambda r: whole(SPEC).regions(0) if r != 3 else ())
    equal, hops, sent = True, 0, 0
    for target, dtypes in (
        (seven, (torch.float32, torch.float32)),
        (seven, (torch.bfloat16, torch.float32)),
        (destination, (torch.float32, torch.float32)),
    ):
        for limit in (3000, 1 << 20):
            pair = Pair(source, target, dtypes, lambda rank: rank // 2, limit)
            _, got, _, transfer = tensors(group, pair, rank, part=limit == 3000)
            transfer.run()
            equal &= arrived(pair, rank, got, 0)
            hops = max(hops, *(move.hop for move in transfer.plan.moves), 0)
            sent = max(sent, transfer.sent_bytes)
    return {"equal": equal, "hops": hops, "sent": sent}


def relayed_halves(group: dist.ProcessGroup, rank: int) -> list[bool]:
    """Two dtypes of equal size in one source, widened on the way: relays know in which of them a piece began."""
    names = {"a": (64, 2), "b": (64, 2)}
    source = whole_of(names).placed([0], RANKS)
    destination = Layout(names, RANKS, lambda r: whole_of(names).regions(0) if r else ())
    values, equal = values_of(source, 7), []
    for dtypes in ((torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16), (torch.float16, torch.float32)):
        held = {name: values[name].to(dtype) for name, dtype in zip(names, dtypes, strict=True)}
        got = {name: torch.zeros(names[name]) for name in names} if rank else {}
        made = plan(source, destination, lambda rank: rank // 4, rank=rank)
        transfer = Transfer(made, held if rank == 0 else {}, got, group, rank, 200)
        transfer.run()
        narrow = sum(held[name].nbytes for name in names) if rank else 0
        equal.append(transfer.received_bytes == narrow and all(torch.equal(got[n], held[n].float()) for n in got))
    return equal


class Unreadable(dict):
    """A storage whose file is gone."""

    def __getitem__(self, name):
        raise OSError("stale file handle")


def half_group(groups: ProcessGroups, rank: int) -> bool:
    """Two members-only groups run plans of their own at the same time; group ranks are not world ranks."""
    members = [0, 1] if rank < 2 else list(range(2, RANKS))
    group, me = groups.new("half", members), rank if rank < 2 else rank - 2
    source, destination = placed(whole(SPEC), [1]), whole(SPEC, 2)
    values = values_of(source, rank // 2)
    held, got = filled(source, me, values, torch.float32), empty(destination, me, torch.float32)
    execute(plan(source, destination), held, got, group, me)
    return me > 1 or all(torch.equal(got[name], values[name]) for name in values)


def mixed_dtypes(group: dist.ProcessGroup, rank: int) -> dict[str, bool]:
    """One message with several dtypes and odd sizes: every piece stays aligned, and travels in the narrower dtype."""
    names = {"a": (3,), "b": (5, 3), "c": (1,), "d": (7,), "e": (3,)}
    source, destination = whole_of(names), whole_of(names).placed([3], 4)
    starts = (torch.bfloat16, torch.float32, torch.float32, torch.float64, torch.uint8)
    ends = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.uint8)
    values = {name: tensor.abs() for name, tensor in values_of(source, 5).items()}
    held = {name: values[name].to(dtype) for name, dtype in zip(names, starts, strict=True)} if rank == 0 else {}
    into = dict(zip(names, ends, strict=True)) if rank == 3 else {}
    got = {name: torch.zeros(names[name], dtype=dtype) for name, dtype in into.items()}
    transfer = Transfer(plan(source, destination), held, got, group, rank)
    transfer.run()
    transfer.release()
    transfer.run()
    same = all(torch.equal(got[n], values[n].to(starts[i]).to(ends[i])) for i, n in enumerate(names) if n in got)
    expected = 3 * 2 + 15 * 4 + 1 * 2 + 7 * 8 + 3 if rank in (0, 3) else 0
    return {"equal": same, "narrow": transfer.buffer_bytes == -(-expected // 16) * 16}


def refused(group: dist.ProcessGroup, rank: int) -> dict[str, str]:
    """What is wrong on one rank: nobody may be left waiting, and no byte may have moved."""
    source, destination = whole(SPEC).placed([0], RANKS), whole(SPEC, RANKS)
    values = filled(source, rank, values_of(source, 0), torch.float32)
    norm, told = "model.norm.weight", {}
    for case in CASES:
        held = {name: tensor.to(torch.complex64) for name, tensor in values.items()} if case == "complex" else values
        node_of = (lambda rank: min(rank, 1)) if case == "narrow" else None  # rank 2 passes on to its node
        got, made = empty(destination, rank, torch.float32), plan(source, destination, node_of, rank=rank)
        limit = 1 << 20
        if rank == 2:
            dtype = torch.int32 if case == "integer" else torch.float32
            got[norm] = torch.zeros(7 if case == "small" else 8, dtype=dtype)
            if case == "narrow":
                got = {name: tensor.bfloat16() for name, tensor in got.items()}
            if case == "missing":
                del got[norm]
            elif case == "no memory":
                Residency({norm: got[norm]}, CPU).release()
            elif case == "unreadable":
                got = Unreadable(got)
            elif case == "other plan":
                made = plan(whole(SPEC).placed([1], RANKS), destination, rank=2)
            elif case == "other bucket":
                limit = 1 << 21
            elif case == "other rank":
                made = plan(source, destination, rank=3)
        try:
            Transfer(made, held, got, group, rank, limit)
            told[case] = "built"
        except (LayoutError, OSError) as error:
            told[case] = f"{type(error).__name__}: {error}"
        if case != "unreadable" and any(bool((tensor != 9).any()) for name, tensor in got.items() if name != norm):
            told[case] = "moved"
    return told


def absent_peer(groups: ProcessGroups, rank: int) -> str:
    """Rank 1 never runs the transfer that rank 0 runs."""
    if rank > 1:
        return ""
    group = groups.new("pair", [0, 1])
    held = filled(whole(SPEC), 0, values_of(whole(SPEC), 0), torch.float32) if rank == 1 else {}
    got = empty(whole(SPEC), 0, torch.float32) if rank == 0 else {}
    transfer = Transfer(plan(placed(whole(SPEC), [1]), whole(SPEC)), held, got, group, rank)
    message = ""
    if rank == 0:
        try:
            transfer.run(timeout=0.5)
        except WaitTimeoutError as error:
            message = str(error)
    return message


def killed_peer(groups: ProcessGroups, rank: int) -> list[str]:
    """Rank 7 dies after the transfer was built: who meets it fails, in the run and in the next building."""
    members = [0, 5, 7]
    if rank not in members:
        return []
    group, me = groups.new("mortal", members), members.index(rank)
    values = values_of(whole(MHA), 0)
    made = plan(whole(MHA).placed([2], 3), Layout(MHA.tensors(), 3, lambda r: whole(MHA).regions(0) if r < 2 else ()))
    held, got = (values, {}) if me == 2 else ({}, {name: torch.zeros_like(tensor) for name, tensor in values.items()})
    transfer = Transfer(made, held, got, group, me)
    if rank == 7:
        os._exit(0)
    errors = []
    for again in (lambda: transfer.run(timeout=20), lambda: Transfer(made, held, got, group, me)):
        try:
            again()
            errors.append("")
        except WaitTimeoutError as error:
            errors.append(str(error))
    return errors


class Dying(Residency):
    """The process ends when the first tensor is given back: some rounds have gone through, the next are under way."""

    def release(self, names=None):
        os._exit(0)


def killed_midway(groups: ProcessGroups, rank: int) -> str:
    """Rank 6 dies while ranks 0 and 5 read its memory."""
    members = [0, 5, 6]
    if rank not in members:
        return ""
    group, me = groups.new("midway", members), members.index(rank)
    layout = whole_of({f"w{i}": (1 << 16,) for i in range(12)})
    destination = Layout(layout.tensors, 3, lambda r: layout.regions(0) if r < 2 else ())
    values = {name: tensor.clone() for name, tensor in values_of(layout, 0).items()}
    held, got = (values, {}) if me == 2 else ({}, {name: torch.zeros_like(tensor) for name, tensor in values.items()})
    made = plan(layout.placed([2], 3), destination)
    transfer = Transfer(made, held, got, group, me, 1 << 20, release=Dying(held, CPU) if me == 2 else None)
    try:
        transfer.run()
    except WaitTimeoutError as error:
        return f"{len(transfer._memory.readable)} readable, {transfer.received_bytes > 0}: {error}"
    return "arrived"


def save(group: dist.ProcessGroup, rank: int, folder: Path) -> dict[str, str]:
    """Two stages by two tensor shards, twice, write a checkpoint; then nobody can make the target, then each rank in
    turn may not write files as large as its own, and then the disk is full. The errors by what was wrong."""
    layout = fused(SPEC, 2, 2, 2)
    storage = filled(layout, rank, values_of(layout, 11), torch.float32)
    errors = {}

    def attempt(what: str, target: Path) -> None:
        try:
            save_checkpoint(target, layout, storage, like=folder / "like", group=group, rank=rank, max_file_bytes=1000)
        except CheckpointError as error:
            errors[what] = str(error)

    attempt("nothing", folder / "saved")
    attempt("file", folder / "file" / "saved")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for small in range(RANKS):
        if rank == small:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        attempt(f"rank {small}", folder / "saved")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    if (folder / "full").is_mount():
        attempt("full", folder / "full" / "saved")
    return errors


def member(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timeout=wait)
    groups = ProcessGroups(store, "transfer", range(RANKS), rank, CPU, timeout=60)
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=RANKS, timeout=wait)
    group, report = groups.everyone(), Path(folder) / f"{rank}.json"
    seen = {
        "pairs": random_pairs(group, rank),
        "cycles": cycles(group, rank),
        "layers": layer_by_layer(group, rank),
        "large": large_pieces(group, rank),
        "relays": relays(group, rank),
        "halves": relayed_halves(group, rank),
        "half": half_group(groups, rank),
        "mixed": mixed_dtypes(group, rank),
        "save": save(group, rank, Path(folder)),
        "refused": refused(group, rank),
        "absent": absent_peer(groups, rank),
    }
    report.write_text(json.dumps(seen))
    dist.barrier()
    seen["midway"] = killed_midway(groups, rank)
    seen["killed"] = killed_peer(groups, rank)
    report.write_text(json.dumps(seen))
    store.set(f"done {rank}", "")
    if rank == 0:  # whose store the others need
        store.wait([f"done {other}" for other in range(6)], wait)
    os._exit(0)  # without ranks 6 and 7 the groups cannot be closed

"""Weight plans executed on eight gloo processes: hundreds of random pairs of layouts, compared bit by bit.

One set of processes serves the whole file; each writes what it saw to a file, and the tests read it.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from example_layouts import SPEC, fused, placed, whole
from transfer_pairs import MHA, RANKS, Pair, empty, fill, filled, flat, missing, some_pair, values_of

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.residency import Residency
from hybridflow.engine3d.rounds import DIRECT_BYTES
from hybridflow.engine3d.transfer import Transfer, execute
from hybridflow.engines.checkpoint import Checkpoint
from hybridflow.engines.checkpoint_writer import save_checkpoint
from hybridflow.engines.process_groups import ProcessGroups
from hybridflow.errors import CheckpointError, LayoutError, WaitTimeoutError

PAIRS, CYCLES = 510, 24
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
    owners = {side: Residency(sides[side]) for side, wanted in memory.items() if wanted}
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
        live = []
        for cycle in range(CYCLES):
            generation.release()
            train.acquire()
            fill(held, source, rank, values_of(source, cycle % 3))
            transfer.run()
            seen["equal"] &= arrived(pair, rank, got, cycle % 3)
            seen["released"] &= train.resident_bytes == 0 and generation.resident_bytes == generation.total_bytes
            if cycle % 8 == 0:
                transfer.release()
            live.append(sum(1 for thing in gc.get_objects() if type(thing) is torch.Tensor))
        seen["flat"] &= live[3] == live[-5] == live[-1]
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
    before, after = Residency(held), Watch(got)
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
    """One rank's model to seven that hold nothing: they pass it on, so that nobody sends seven copies."""
    source, destination = whole(SPEC).placed([3], RANKS), whole(SPEC).placed([3], RANKS)
    seven = Layout(SPEC.tensors(), RANKS, lambda r: whole(SPEC).regions(0) if r != 3 else ())
    equal, hops, sent = True, 0, 0
    for target, dtypes in (
        (seven, (torch.float32, torch.float32)),
        (seven, (torch.bfloat16, torch.float32)),
        (destination, (torch.float32, torch.float32)),
    ):
        for limit in (3000, 1 << 20):
            pair = Pair(source, target, dtypes, None, limit)
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
        made = plan(source, destination, rank=rank)
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
        got, made, limit = empty(destination, rank, torch.float32), plan(source, destination, rank=rank), 1 << 20
        if rank == 2:
            dtype = {"integer": torch.int32, "narrow": torch.bfloat16}.get(case, torch.float32)
            got[norm] = torch.zeros(7 if case == "small" else 8, dtype=dtype)
            if case == "missing":
                del got[norm]
            elif case == "no memory":
                Residency({norm: got[norm]}).release()
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


def save(group: dist.ProcessGroup, rank: int, folder: Path) -> list[str]:
    """Two stages by two tensor shards, twice, write a checkpoint; then a target that nobody can make is asked for."""
    layout = fused(SPEC, 2, 2, 2)
    storage = filled(layout, rank, values_of(layout, 11), torch.float32)
    errors = []
    for target in (folder / "saved", folder / "file" / "saved"):
        try:
            save_checkpoint(target, layout, storage, like=folder / "like", group=group, rank=rank, max_file_bytes=1000)
        except CheckpointError as error:
            errors.append(str(error))
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
    seen["killed"] = killed_peer(groups, rank)
    report.write_text(json.dumps(seen))
    store.set(f"done {rank}", "")
    if rank == 0:  # whose store the others need
        store.wait([f"done {other}" for other in range(7)], wait)
    os._exit(0)  # without rank 7 the groups cannot be closed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transfer")
    (folder / "like").mkdir()
    (folder / "like" / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "file").write_text("")
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(member, (port, str(folder)), RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_random_pairs_arrive_bit_by_bit_at_the_smallest_cost_within_the_memory_bound(seen):
    assert [rank["pairs"]["wrong"] for rank in seen] == [[]] * RANKS
    sent, received = (sum(rank["pairs"]["moved"][i] for rank in seen) for i in range(2))
    assert sent == received > 1_000_000
    assert sum(rank["pairs"]["relayed"] for rank in seen) > 50


def test_memory_comes_and_goes_for_twenty_cycles_without_growth(seen):
    assert [rank["cycles"] for rank in seen] == [{"equal": True, "released": True, "flat": True}] * RANKS


def test_both_copies_are_never_in_memory_together(seen):
    for equal, most, before, after, buffers in (rank["layers"] for rank in seen):
        assert equal
        assert most <= after + 3 * before // 20 < after + before
        assert 0 < buffers <= 4 * 8 * 64 * 4


def test_large_pieces_travel_without_a_buffer(seen):
    assert [rank["large"][0] for rank in seen] == [1] * RANKS
    assert [rank["large"][1] for rank in seen] == [0, 0, 2 * DIRECT_BYTES, 0, 0, 0, 0, 0]


def test_wide_fan_out_is_relayed(seen):
    size = 4 * sum(torch.Size(shape).numel() for shape in SPEC.tensors().values())
    assert all(rank["relays"]["equal"] for rank in seen)
    assert max(rank["relays"]["hops"] for rank in seen) > 0
    assert max(rank["relays"]["sent"] for rank in seen) <= 2 * size


def test_relays_keep_the_dtype_in_which_a_piece_began(seen):
    assert [rank["halves"] for rank in seen] == [[True] * 3] * RANKS


def test_members_only_groups_run_side_by_side(seen):
    assert all(rank["half"] for rank in seen)


def test_mixed_dtypes_share_a_message_and_travel_narrow(seen):
    assert [rank["mixed"] for rank in seen] == [{"equal": True, "narrow": True}] * RANKS


def test_a_sharded_model_is_saved_by_all_ranks(seen, folder):
    layout = whole(SPEC)
    checkpoint = Checkpoint(folder / "saved")
    checkpoint.check(SPEC)
    assert len({entry.file for entry in checkpoint.entries.values()}) > RANKS
    checkpoint.read_into(layout, 0, storage := empty(layout, 0, torch.float32))
    assert all(torch.equal(storage[name], tensor) for name, tensor in values_of(layout, 11).items())
    assert [len(rank["save"]) for rank in seen] == [1] * RANKS
    assert "rank 0 could not write" in seen[3]["save"][0]
    assert "Not a directory" in seen[0]["save"][0]


@pytest.mark.parametrize(
    ("case", "there", "elsewhere"),
    [
        ("missing", "rank 2 names 'model.norm.weight', its storage has", "rank 2, another rank"),
        ("small", r"'model.norm.weight', which has shape \(7,\)", "rank 2, another rank"),
        ("integer", "torch.int32 on rank 2.* no conversion", "rank . cannot|torch.int32 on rank 2"),
        ("narrow", "through rank 2.* rounded twice|rank . cannot", "through rank 2.* rounded twice|rank . cannot"),
        (
            "complex",
            "dtype torch.complex64 cannot be moved",
            "rank 0, another rank, .* torch.complex64 cannot be moved",
        ),
        ("no memory", "'model.norm.weight' of rank 2 has no memory", "rank 2, another rank"),
        ("unreadable", "^OSError: stale file", "^LayoutError: rank 2, another rank, .* OSError: stale file"),
        ("other plan", "plans were made from different layouts", "plans were made from different layouts"),
        ("other bucket", "2097152 bytes per bucket, rank 0 one of", "2097152 bytes per bucket, rank 0 one of"),
        ("other rank", "rank 2 was given the part of the plan that is rank 3's", "rank 2, another rank"),
    ],
)
def test_what_does_not_fit_on_one_rank_is_an_error_on_all_before_a_byte_moves(seen, case, there, elsewhere):
    for rank in (0, 1, 2, 3, 7):
        own = rank == (0 if case == "complex" else 2)
        assert re.search(there if own else elsewhere, seen[rank]["refused"][case])


def test_an_absent_peer_ends_in_an_error_that_names_it(seen):
    assert "rank 0 exchanges weights with ranks [1]" in seen[0]["absent"]


def test_a_killed_peer_ends_in_errors_on_those_who_meet_it(seen):
    assert ["exchanges weights with ranks" in seen[rank]["killed"][0] for rank in (0, 5)] == [True, True]
    assert ["not all of them came" in seen[rank]["killed"][1] for rank in (0, 5)] == [True, True]


def test_equal_memory_is_not_copied_and_one_rank_needs_no_group():
    source = whole(SPEC)
    values = values_of(source, 1)
    shared = {name: tensor.clone() for name, tensor in values.items()}
    transfer = Transfer(plan(source, source), shared, dict(shared))
    versions = {name: tensor._version for name, tensor in shared.items()}
    transfer.run()
    assert {name: tensor._version for name, tensor in shared.items()} == versions
    copies = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in values.items()}
    execute(plan(source, source), shared, copies)
    assert all(torch.equal(copies[name], values[name].bfloat16()) for name in values)


def test_a_local_plan_goes_tensor_by_tensor():
    source = whole(SPEC)
    held = {name: tensor.clone() for name, tensor in values_of(source, 4).items()}
    got = {name: torch.full_like(tensor, 9) for name, tensor in held.items()}
    before, after = Residency(held), Watch(got)
    after.partner = before
    transfer = Transfer(plan(source, source), held, got, release=before, acquire=after)
    after.release()
    transfer.run()
    largest = max(tensor.nbytes for tensor in got.values())
    assert (before.resident_bytes, after.resident_bytes) == (0, after.total_bytes)
    assert after.most <= after.total_bytes + largest < before.total_bytes + after.total_bytes
    assert all(torch.equal(got[name], values_of(source, 4)[name]) for name in got)
    with pytest.raises(LayoutError, match=r"source tensor .* has no memory"):
        transfer.run()


def test_padding_of_memory_that_was_just_given_is_zero():
    source = whole(SPEC)
    values = values_of(source, 6)
    got = {name: torch.full((len(tensor) + 2, *tensor.shape[1:]), 9.0) for name, tensor in values.items()}
    memory = Residency(got)
    transfer = Transfer(plan(source, source), dict(values), got, acquire=memory)
    transfer.run()
    assert all(bool((tensor[-2:] == 9).all()) for tensor in got.values())
    memory.release()
    transfer.run()
    assert all(bool((tensor[-2:] == 0).all()) and torch.equal(tensor[:-2], values[n]) for n, tensor in got.items())


def test_parameters_that_require_gradients_can_be_filled():
    source = whole(SPEC)
    values = values_of(source, 2)
    parameters = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in values.items()}
    execute(plan(source, source), values, parameters)
    assert all(torch.equal(parameters[name], values[name]) for name in values)


def test_storages_that_do_not_fit_are_refused():
    source = whole(SPEC)
    values = values_of(source, 3)
    with pytest.raises(LayoutError, match=r"names 'model.norm.weight', its storage has"):
        execute(plan(source, source), values, {n: t for n, t in values.items() if n != "model.norm.weight"})
    with pytest.raises(LayoutError, match=r"'model.norm.weight', which has shape \(7,\)"):
        execute(plan(source, source), values, values | {"model.norm.weight": torch.zeros(7)})
    with pytest.raises(LayoutError, match="no conversion between them"):
        execute(plan(source, source), values, values | {"model.norm.weight": torch.zeros(8, dtype=torch.int64)})
    with pytest.raises(LayoutError, match="plan is for 2 ranks, the process group has 1"):
        execute(plan(source, placed(whole(SPEC), [1])), values, {})

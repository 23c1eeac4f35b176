"""Weight plans executed on four gloo processes: many random pairs of layouts, compared bit by bit.

One set of processes serves the whole file; each writes what it saw to a file, and the tests read it.
"""

from __future__ import annotations

import datetime
import json
import random
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from example_layouts import SPEC, TIED, fused, placed, some_layout, storage_shapes, whole

from hybridflow.engine3d.layout import Box, Layout, Region
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.transfer import Transfer, execute
from hybridflow.engines.checkpoint import Checkpoint
from hybridflow.engines.checkpoint_writer import save_checkpoint
from hybridflow.engines.process_groups import ProcessGroups
from hybridflow.errors import CheckpointError, LayoutError, WaitTimeoutError

RANKS, PAIRS = 4, 60
CPU = torch.device("cpu")


def canonical(layout: Layout, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in layout.tensors.items()}


def part(values: dict[str, torch.Tensor], box: Box) -> torch.Tensor:
    return values[box.tensor][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


def empty(layout: Layout, rank: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 9.0, dtype=dtype) for name, shape in storage_shapes(layout, rank).items()}


def filled(layout: Layout, rank: int, values: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    storage = empty(layout, rank, dtype)
    for region in layout.regions(rank) if rank < layout.ranks else ():
        storage[region.storage][region.index()] = part(values, region.box).to(dtype)
    return storage


def random_pairs(group: dist.ProcessGroup, rank: int) -> list[int]:
    """Seeds of the pairs that did not arrive bit for bit, twice in a row with changed values."""
    wrong = []
    for seed in range(PAIRS):
        rng = random.Random(seed)
        spec = rng.choice([SPEC, TIED])
        source, destination = some_layout(spec, 2 * seed), some_layout(spec, 2 * seed + 1)
        from_, into = rng.choice([torch.float32, torch.bfloat16]), rng.choice([torch.float32, torch.bfloat16])
        limit = rng.choice([64, 1000, 1 << 20])
        held, got = filled(source, rank, canonical(source, seed), from_), empty(destination, rank, into)
        transfer = Transfer(plan(source, destination), held, got, group, rank, bucket_bytes=limit)
        slack = 16 * 2 * RANKS
        for run in range(2):
            values = canonical(source, seed + 1000 * run)
            for name, tensor in filled(source, rank, values, from_).items():
                held[name].copy_(tensor)
            transfer.run()
            rounded = {name: tensor.to(from_) for name, tensor in values.items()}
            expected = filled(destination, rank, rounded, into)
            if any(not torch.equal(got[name], expected[name]) for name in expected):
                wrong.append(seed)
        if transfer.buffer_bytes > limit + slack:
            wrong.append(seed)
    return wrong


def half_group(groups: ProcessGroups, rank: int) -> bool:
    """Two members-only groups run plans of their own at the same time; group ranks are not world ranks."""
    members = [0, 1] if rank < 2 else [2, 3]
    group, me = groups.new("half", members), rank % 2
    source, destination = placed(whole(SPEC), [1]), whole(SPEC, 2)
    values = canonical(source, rank // 2)
    held, got = filled(source, me, values, torch.float32), empty(destination, me, torch.float32)
    execute(plan(source, destination), held, got, group, me)
    return all(torch.equal(got[name], values[name]) for name in values)


def mixed_dtypes(group: dist.ProcessGroup, rank: int) -> dict[str, bool]:
    """One message with several dtypes and odd sizes: every piece stays aligned, and travels in the narrower dtype."""
    names = {"a": (3,), "b": (5, 3), "c": (1,), "d": (7,)}
    regions = [Region(Box.whole(name, shape), name, (0,) * len(shape)) for name, shape in names.items()]
    source, destination = Layout(names, 1, lambda rank: regions), placed(Layout(names, 1, lambda rank: regions), [3])
    dtypes = dict(zip(names, (torch.bfloat16, torch.float32, torch.float32, torch.float64), strict=True))
    ends = dict(zip(names, (torch.float32, torch.float32, torch.bfloat16, torch.float64), strict=True))
    values = canonical(source, 5)
    held = {name: values[name].to(dtypes[name]) for name in names} if rank == 0 else {}
    got = {name: torch.zeros(shape, dtype=ends[name]) for name, shape in names.items()} if rank == 3 else {}
    transfer = Transfer(plan(source, destination), held, got, group, rank)
    transfer.run()
    transfer.release()
    transfer.run()
    same = all(torch.equal(got[name], values[name].to(dtypes[name]).to(ends[name])) for name in got)
    expected = 3 * 2 + 15 * 4 + 1 * 2 + 7 * 8 if rank in (0, 3) else 0
    return {"equal": same, "narrow": transfer.buffer_bytes == -(-expected // 16) * 16}


def absent_peer(groups: ProcessGroups, rank: int) -> str:
    """Rank 1 never runs the transfer that rank 0 runs."""
    if rank > 1:
        return ""
    group = groups.new("pair", [0, 1])
    held = filled(whole(SPEC), 0, canonical(whole(SPEC), 0), torch.float32) if rank == 1 else {}
    got = empty(whole(SPEC), 0, torch.float32) if rank == 0 else {}
    transfer = Transfer(plan(placed(whole(SPEC), [1]), whole(SPEC)), held, got, group, rank)
    message = ""
    if rank == 0:
        try:
            transfer.run(timeout=0.5)
        except WaitTimeoutError as error:
            message = str(error)
    return message


def misfit(group: dist.ProcessGroup, rank: int) -> str:
    """Rank 2 has not the storage that its layout names: nobody may be left waiting for it."""
    source, destination = whole(SPEC), whole(SPEC, RANKS)
    held = canonical(source, 0) if rank == 0 else {}
    got = empty(destination, rank, torch.float32)
    if rank == 2:
        del got["model.norm.weight"]
    try:
        Transfer(plan(source, destination), held, got, group, rank)
    except LayoutError as error:
        return str(error)
    return ""


def save(group: dist.ProcessGroup, rank: int, folder: Path) -> list[str]:
    """Two stages by two tensor shards write a checkpoint; then a target that nobody can make is asked for."""
    layout = fused(SPEC, 2, 2, 1)
    storage = filled(layout, rank, canonical(layout, 11), torch.float32)
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
    dist.init_process_group("gloo", store=dist.PrefixStore("world", store), rank=rank, world_size=RANKS, timeout=wait)
    groups = ProcessGroups(store, "transfer", range(RANKS), rank, CPU, timeout=60)
    seen = {
        "wrong": random_pairs(groups.everyone(), rank),
        "half": half_group(groups, rank),
        "mixed": mixed_dtypes(groups.everyone(), rank),
        "save": save(groups.everyone(), rank, Path(folder)),
        "misfit": misfit(groups.everyone(), rank),
        "absent": absent_peer(groups, rank),
    }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    groups.close()
    dist.destroy_process_group()


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


def test_random_pairs_arrive_bit_by_bit_within_the_memory_bound(seen):
    assert [rank["wrong"] for rank in seen] == [[]] * RANKS


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
    assert all(torch.equal(storage[name], tensor) for name, tensor in canonical(layout, 11).items())
    assert [len(rank["save"]) for rank in seen] == [1] * RANKS
    assert "rank 0 could not write" in seen[3]["save"][0]
    assert "Not a directory" in seen[0]["save"][0]


def test_a_misfit_on_one_rank_is_an_error_on_all(seen):
    assert "rank 2 names 'model.norm.weight'" in seen[2]["misfit"]
    assert all("another rank" in seen[rank]["misfit"] for rank in (0, 1, 3))


def test_an_absent_peer_ends_in_an_error_that_names_it(seen):
    assert "rank 0 exchanges weights with ranks [1]" in seen[0]["absent"]


def test_equal_memory_is_not_copied_and_one_rank_needs_no_group():
    source = whole(SPEC)
    values = canonical(source, 1)
    shared = {name: tensor.clone() for name, tensor in values.items()}
    transfer = Transfer(plan(source, source), shared, dict(shared))
    versions = {name: tensor._version for name, tensor in shared.items()}
    transfer.run()
    assert {name: tensor._version for name, tensor in shared.items()} == versions
    copies = {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in values.items()}
    execute(plan(source, source), shared, copies)
    assert all(torch.equal(copies[name], values[name].bfloat16()) for name in values)


def test_parameters_that_require_gradients_can_be_filled():
    source = whole(SPEC)
    values = canonical(source, 2)
    parameters = {name: torch.nn.Parameter(torch.zeros_like(tensor)) for name, tensor in values.items()}
    execute(plan(source, source), values, parameters)
    assert all(torch.equal(parameters[name], values[name]) for name in values)


def test_storages_that_do_not_fit_are_refused():
    source = whole(SPEC)
    values = canonical(source, 3)
    with pytest.raises(LayoutError, match=r"names 'model.norm.weight', its storage has"):
        execute(plan(source, source), values, {n: t for n, t in values.items() if n != "model.norm.weight"})
    with pytest.raises(LayoutError, match=r"'model.norm.weight', which has shape \(7,\)"):
        execute(plan(source, source), values, values | {"model.norm.weight": torch.zeros(7)})
    with pytest.raises(LayoutError, match="plan is for 2 ranks, the process group has 1"):
        execute(plan(source, placed(whole(SPEC), [1])), values, {})

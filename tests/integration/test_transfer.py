"""Weight plans executed on eight gloo processes: 130 random pairs of layouts, compared bit by bit.

One set of processes serves the whole file; each writes what it saw to a file, and the tests read it.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from hybridflow.engine3d.offloadable import Residency
from hybridflow.engine3d.plan import plan
from hybridflow.engine3d.routing import DIRECT_BYTES
from hybridflow.engine3d.transfer.transfer import Transfer, execute
from hybridflow.engines.checkpoint.reader import Checkpoint
from hybridflow.errors import LayoutError
from tests.contracts.rank_processes import forking
from tests.example_layouts import SPEC, placed, whole
from tests.integration.transfer_pairs import RANKS, empty, values_of
from tests.integration.transfer_tasks import CPU, Watch, member


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transfer")
    (folder / "like").mkdir()
    (folder / "like" / "config.json").write_text('{"model_type": "qwen2"}')
    (folder / "file").write_text("")
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> Iterator[list[dict]]:
    (folder / "full").mkdir()
    mounted = mount(folder / "full", 24)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    forking()
    mp.start_processes(member, (port, str(folder)), RANKS, start_method="forkserver")
    yield [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    if mounted:
        subprocess.run(["umount", "-l", folder / "full"], check=True)


def mount(folder: Path, kilobytes: int) -> bool:
    """A small file system of its own, where one may be mounted."""
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "hybridflow", str(folder)]
    return shutil.which("mount") is not None and not subprocess.run(["mount", *options], capture_output=True).returncode


@pytest.mark.slow
def test_random_pairs_arrive_bit_by_bit_at_the_smallest_cost_within_the_memory_bound(seen):
    assert [rank["pairs"]["wrong"] for rank in seen] == [[]] * RANKS
    sent, received = (sum(rank["pairs"]["moved"][i] for rank in seen) for i in range(2))
    assert sent == received > 500_000
    assert sum(rank["pairs"]["relayed"] for rank in seen) > 50


@pytest.mark.slow
def test_memory_comes_and_goes_for_twenty_cycles_without_growth(seen):
    assert [rank["cycles"] for rank in seen] == [{"equal": True, "released": True, "flat": True}] * RANKS


@pytest.mark.slow
def test_both_copies_are_never_in_memory_together(seen):
    for equal, most, before, after, buffers in (rank["layers"] for rank in seen):
        assert equal
        assert most <= after + 3 * before // 20 < after + before
        assert 0 < buffers <= 4 * 8 * 64 * 4


def test_large_pieces_travel_without_a_buffer(seen):
    assert [rank["large"][0] for rank in seen] == [1] * RANKS
    assert [rank["large"][1] for rank in seen] == [0, 0, 2 * DIRECT_BYTES, 0, 0, 0, 0, 0]


def test_what_ranks_of_a_node_need_is_relayed(seen):
    size = 4 * sum(torch.Size(shape).numel() for shape in SPEC.tensors().values())
    assert all(rank["relays"]["equal"] for rank in seen)
    assert max(rank["relays"]["hops"] for rank in seen) > 0
    assert max(rank["relays"]["sent"] for rank in seen) == 4 * size  # to its neighbour and three other nodes


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


def test_a_save_that_fails_says_on_all_ranks_which_rank_could_not_write_what_and_why(seen, folder):
    errors = seen[0]["save"]
    assert [rank["save"] for rank in seen] == [errors] * RANKS
    assert re.search(r"rank 0 on .* could not write .*file/.saved.partial: Not a directory", errors.pop("file"))
    if full := errors.pop("full", None):
        assert re.search(r"rank \d on .* could not write .*/model-\d+-.*: No space left on device \(\d.* bytes", full)
        assert "Nothing is there." in full
        assert list((folder / "full").iterdir()) == []
    for rank in range(RANKS):
        file = "model-0000" if rank else "config.json"
        why = rf"rank {rank} on .* could not write .*/.saved.partial/{file}.*: File too large \([\d,]+ bytes free\)"
        assert re.search(why, errors[f"rank {rank}"]), errors
        assert "What was there before is unchanged." in errors[f"rank {rank}"]
    assert len(errors) == RANKS
    assert not list(folder.glob(".saved*"))


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
    assert "ranks [1] did not take part in moving weights with rank 0" in seen[0]["absent"]


def test_a_killed_peer_ends_in_errors_on_those_who_meet_it(seen):
    assert ["did not take part in moving weights with" in seen[rank]["killed"][0] for rank in (0, 5)] == [True, True]
    assert ["not all of them came" in seen[rank]["killed"][1] for rank in (0, 5)] == [True, True]


def test_a_peer_that_dies_while_its_memory_is_read_ends_in_errors(seen):
    for rank in (0, 5):
        assert seen[rank]["midway"].startswith("1 readable, True: ranks [")
        assert "did not take part in moving weights with" in seen[rank]["midway"]


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
    before, after = Residency(held, CPU), Watch(got, CPU)
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
    memory = Residency(got, CPU)
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

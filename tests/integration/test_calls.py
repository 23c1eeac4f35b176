"""One call as a whole: every rank counts, batches of a call stay together, an error is met once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import hybridflow as hf
from hybridflow.errors import ConfigError, MissingColumnError, WorkerError
from hybridflow.topology import RankGrid


class Calls:
    """Breaks, joins and repeats."""

    @hf.register(hf.THREE_D_PROTO, reads=("x",), writes=("y",))
    def fail_on_one(self, batch, rank):
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} broke")
        return hf.Batch({"y": batch["x"]})

    @hf.register(hf.THREE_D_PROTO, reads=("x",))
    def fail_before_a_collective(self, batch, rank):
        if self.context.rank == rank:
            raise ValueError(f"rank {rank} broke")
        dist.all_reduce(torch.zeros(1), group=self.context.groups.new("only here", range(4), timeout=8.0))

    @hf.register(hf.DP_PROTO, reads=("x",), writes=("first", "last"), groups=True)
    def ends(self, batch):
        x = batch["x"]
        return hf.Batch({"first": x[:1].expand(len(x)), "last": x[-1:].expand(len(x))})

    @hf.register(
        hf.DP_PROTO, reads=("x",), writes=("y",), balance="tokens", repeat=lambda worker, call: call["n"], carries=True
    )
    def twice(self, batch, n):
        return hf.Batch({"y": batch["x"].repeat_interleave(n)})

    @hf.register(hf.DP_PROTO, reads=("x",), writes=("d",), balance="tokens")
    def difference(self, a, b):
        return hf.Batch({"d": a["x"] - b["x"]})

    @hf.register(hf.DP_PROTO, reads=("x",), chunks="minibatches")
    def chunked(self, batch, minibatches=1):
        return [chunk.rows for chunk in batch.chunks()]


@pytest.fixture(scope="module")
def rows():
    tokens = torch.tensor([9, 1, 1, 1, 1, 1, 1, 9, 3, 3])
    return hf.Batch({"x": torch.arange(10), "tokens": tokens, "group_id": torch.tensor([0] * 5 + [1] * 5)})


@pytest.fixture(scope="module")
def group(pool):
    group = hf.place(Calls, pool, name="calls", grid=RankGrid(t=2, d=2))
    yield group
    group.close()


@pytest.fixture(scope="module")
def flat(pool):
    group = hf.place(Calls, pool, name="flat_calls")
    yield group
    group.close()


def test_a_rank_that_nobody_collects_does_not_fail_in_silence(group, rows):
    with pytest.raises(WorkerError, match="rank 3 broke") as caught:
        group.fail_on_one(rows, rank=3).get()
    assert (caught.value.rank, caught.value.rows) == (3, (5, 10))


def test_the_rank_that_broke_is_named_while_its_peers_wait_in_a_collective(group, rows):
    with pytest.raises(WorkerError, match="rank 1 broke"):
        group.fail_before_a_collective(rows, rank=1).get(timeout=6)


def test_an_error_that_was_met_is_not_raised_again(flat, rows, settle):
    settle()
    with pytest.raises(WorkerError):
        flat.fail_on_one(rows, rank=0).get()
    prompts = [{"prompt": str(i)} for i in range(4)]
    assert len(list(hf.PromptLoader(prompts, batch_size=2, steps=2))) == 2


def test_an_error_that_nobody_met_is_raised_by_the_loader(flat, rows, settle):
    settle()
    with pytest.raises(WorkerError, match="rank 2 broke"):  # noqa: PT012
        for _ in hf.PromptLoader([{"prompt": "a"}], batch_size=1, steps=4):
            flat.fail_on_one(rows, rank=2)


def test_groups_stay_whole_although_the_method_does_not_read_them(flat, rows):
    ends = flat.ends(rows).get()
    assert ends["first"].tolist() == [0] * 5 + [5] * 5
    assert ends["last"].tolist() == [4] * 5 + [9] * 5
    with pytest.raises(MissingColumnError, match="group_id"):
        flat.ends(rows.without("group_id"))


def test_a_balanced_call_that_repeats_rows_keeps_them_beside_their_columns(flat, rows):
    out = flat.twice(rows, n=3).get()
    assert out["x"].tolist() == out["y"].tolist() == [i for i in range(10) for _ in range(3)]


def test_two_batches_of_one_call_are_split_alike(flat, rows):
    other = rows.without("tokens")
    assert flat.difference(rows, other).get()["d"].tolist() == [0] * 10
    assert flat.difference(other, rows).get()["d"].tolist() == [0] * 10


def test_part_of_a_balanced_part_is_no_longer_that_part(rows):
    parts = hf.BatchRef.from_batch(rows).split(2, balance="tokens")
    joined = hf.BatchRef.concat([parts[0][0:2], parts[1]])
    assert joined.rows == len(joined.get()) == 7


def test_more_mini_batches_than_rows_are_refused(flat, rows):
    with pytest.raises(ConfigError, match="at most 10"):
        flat.chunked(rows, minibatches=11)


def test_rows_without_an_id_are_numbered():
    ref = hf.BatchRef.from_batch(hf.Batch({"x": torch.zeros(3)})).repeat(2)
    got = ref.get()
    assert got["row_id"].tolist() == [0, 1, 2, 3, 4, 5]
    assert got["group_id"].tolist() == [0, 0, 1, 1, 2, 2]


def test_what_the_caller_writes_later_does_not_reach_the_batch():
    x = torch.zeros(4)
    ref = hf.BatchRef.from_batch(hf.Batch({"x": x}))
    x.add_(1)
    assert ref.get()["x"].tolist() == [0.0] * 4

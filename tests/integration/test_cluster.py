"""Operations on real hosts: what travels, what comes back, and what is refused. Worker classes are pickled by value."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.connection import private_directory
from hybridflow.cluster.future import Future
from hybridflow.errors import (
    ConfigError,
    MissingColumnError,
    ProtocolError,
)
from hybridflow.models.spec import Cost
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ALL_TO_ALL, DP_PROTO, ONE_TO_ALL, ONE_TO_ONE

ROWS = 10


class Base:
    """Operations that groups of different classes inherit."""

    role = "base"

    @register(ONE_TO_ALL)
    def where(self):
        return self.context.rank, os.getpid()

    @register(DP_PROTO, reads=("x",), writes=("y",))
    def double(self, batch):
        return hf.Batch({"y": batch["x"] * 2})


class Arithmetic(Base):
    """Every kind of operation, on small numbers."""

    role = "arithmetic"

    def __init__(self, factor: int = 1, **extras: Any) -> None:
        self.factor, self.extras = factor, extras
        self.called: list[str] = []

    @register(DP_PROTO, reads=("x", "tokens", "num_tokens"), writes=("y", "z", "rank"), balance="num_tokens")
    def balanced(self, batch):
        z = batch["tokens"].map(lambda ids: ids + 1)
        assert z.lengths.tolist() == (batch["num_tokens"] - 1).tolist()
        return hf.Batch({"y": batch["x"] * 2, "z": z, "rank": torch.full((batch.rows,), self.context.rank)})

    @register(DP_PROTO, reads=("x", "num_tokens"), writes=("y", "chunk"), balance="num_tokens", chunks="minibatches")
    def in_chunks(self, batch, minibatches=1):
        numbers = [torch.full((part.rows,), i) for i, part in enumerate(batch.chunks())]
        return hf.Batch({"y": batch["x"] * 2, "chunk": torch.cat(numbers)})

    @register(DP_PROTO, reads=("group_id",), writes=("home",), groups=True)
    def grouped(self, batch):
        return hf.Batch({"home": torch.full((batch.rows,), self.context.rank)})

    @register(DP_PROTO, reads=lambda settings, call: (call["column"],), writes=lambda settings, call: (call["into"],))
    def copy(self, batch, column, into="copied"):
        return hf.Batch({into: batch[column]})

    @register(DP_PROTO, reads=("a|x", "hint?"), writes=("seen",))
    def alternatives(self, batch):
        return hf.Batch({"seen": [batch.columns] * batch.rows})

    @register(DP_PROTO, reads=("x",), writes=("x",), resizes=True)
    def drop_odd(self, batch):
        return batch.filter(batch["x"] % 2 == 0)

    @register(
        DP_PROTO,
        reads=("x",),
        writes=("draw",),
        repeat=lambda settings, call: call["n"] * settings["factor"],
        carries=True,
    )
    def sample(self, batch, n=1):
        return hf.Batch({"draw": batch["x"].repeat_interleave(n * self.factor)})

    @register(ONE_TO_ONE, reads=("x",))
    def total(self, batch):
        self.called.append("total")
        return float(batch["x"].sum())

    @register(ONE_TO_ALL)
    def calls(self):
        return list(self.called)

    @register(ALL_TO_ALL)
    def each(self, item, other=0):
        return item, other, self.context.rank

    @register(ALL_TO_ALL, writes=("rows",), resizes=True)
    def each_rows(self, batch):
        return hf.Batch({"rows": torch.full((len(batch) + self.context.rank,), self.context.rank)})

    @register(DP_PROTO, reads=("x",), writes=("y",), blocking=True)
    def blocking_double(self, batch):
        return hf.Batch({"y": batch["x"] * 2})

    @register(ONE_TO_ALL, reads=("x",), writes=("y",), blocking=True)
    def blocking_everywhere(self, batch):
        return hf.Batch({"y": batch["x"] * self.context.rank})

    @register(DP_PROTO, reads=("x",), blocking=True)
    def mean(self, batch):
        return {"x/mean": float(batch["x"].mean())}

    @register(ONE_TO_ALL, blocking=True)
    def configured(self):
        return self.factor, self.extras

    @register(DP_PROTO, reads=("x",), check=lambda settings, call: _at_most(settings["factor"], call["scale"]))
    def checked(self, batch, scale=1):
        return scale

    @register(DP_PROTO, reads=None, writes=("columns",))
    def whole(self, batch, other):
        assert other["x"].tolist() == batch["x"].tolist()
        return hf.Batch({"columns": [batch.columns] * batch.rows})


class Attentive(Arithmetic):
    """Whose rows cost the square of their tokens."""

    role = "attentive"

    @classmethod
    def worker_spec(cls, settings):
        return hf.WorkerSpec(token_cost=Cost(linear=0.0, quadratic=float(settings["factor"])))


def _at_most(limit: int, scale: int) -> None:
    if scale > limit:
        raise ConfigError(f"scale={scale} is above {limit}.")


def example(rows: int = ROWS) -> hf.Batch:
    lengths = torch.arange(rows) * 7 % 5
    return hf.Batch(
        {
            "row_id": torch.arange(rows),
            "x": torch.arange(rows, dtype=torch.float32),
            "num_tokens": lengths + 1,
            "tokens": hf.Ragged.from_lengths(torch.arange(int(lengths.sum())), lengths),
        }
    )


@pytest.fixture(scope="module")
def batch(cluster) -> BatchRef:
    return BatchRef.from_batch(example())


@pytest.fixture(scope="module")
def four(keep, pool):
    """Arithmetic on all four hosts, data parallel."""
    return keep(Arithmetic, pool, name="four", factor=2, colour="red")


@pytest.fixture(scope="module")
def two(keep, pool):
    """Arithmetic on the first two hosts."""
    return keep(Arithmetic, pool[0:2], name="two")


def test_a_call_returns_references_at_once(four, batch):
    out = four.double(batch)
    assert isinstance(out, BatchRef)
    assert out.columns == ("y",)
    assert out.get()["y"].tolist() == [2.0 * x for x in range(ROWS)]
    assert isinstance(four.where(), Future)
    ranks, pids = zip(*four.where().get(), strict=True)
    assert ranks == (0, 1, 2, 3)
    assert len(set(pids)) == 4
    assert os.getpid() not in pids


def test_a_batch_of_the_driver_is_an_input_like_any_other(four):
    assert four.double(example())["y"].get().tolist() == [2.0 * x for x in range(ROWS)]
    assert four.total(example()).get() == 45


@pytest.mark.parametrize("rows", [1, 3, 4, 10])
def test_balanced_calls_keep_the_order_of_rows(four, two, rows):
    """Through two groups of different size, also with fewer rows than ranks."""
    batch = BatchRef.from_batch(example(rows))
    for group in (four, two):
        batch |= group.balanced(batch)
        got = batch.get()
        assert got["y"].tolist() == [2.0 * x for x in range(rows)]
        assert got["z"].equal(example(rows)["tokens"].map(lambda ids: ids + 1))
    assert two.double(four.double(batch).rename(y="x"))["y"].get().tolist() == [4.0 * x for x in range(rows)]


def test_balance_evens_out_the_tokens(four, batch):
    ranks = four.balanced(batch)["rank"].get()
    load = torch.zeros(4).index_add(0, ranks, example()["num_tokens"].float())
    assert load.max() - load.min() <= 2
    assert ranks.bincount().tolist() == [3, 3, 2, 2]


def test_balance_evens_out_what_a_worker_says_tokens_cost(pool, two):
    tokens = torch.tensor([6, 5, 1, 4, 4, 4])
    columns = {
        "x": torch.arange(6.0),
        "num_tokens": tokens,
        "tokens": hf.Ragged.from_lengths(torch.arange(18), tokens - 1),
    }
    batch = BatchRef.from_batch(hf.Batch(columns))
    attentive = hf.place(Attentive, pool[0:2], name="attentive", factor=3)
    squares = [int((tokens[group.balanced(batch)["rank"].get() == 0] ** 2).sum()) for group in (two, attentive)]
    attentive.close()
    halves = [abs(2 * half - int((tokens**2).sum())) for half in squares]
    assert halves[1] < halves[0]
    assert [int(tokens[two.balanced(batch)["rank"].get() == rank].sum()) for rank in (0, 1)] == [12, 12]


@pytest.mark.parametrize("minibatches", [1, 2, 3])
def test_mini_batches_are_the_same_rows_at_any_data_parallel_size(four, two, batch, minibatches):
    of_four = four.in_chunks(batch, minibatches=minibatches).get()
    of_two = two.in_chunks(batch, minibatches=minibatches).get()
    assert of_four.equal(of_two)
    assert of_four["y"].tolist() == [2.0 * x for x in range(ROWS)]
    assert of_four["chunk"].bincount().tolist() == [len(part) for part in torch.arange(ROWS).tensor_split(minibatches)]


def test_groups_stay_on_one_rank(four, cluster):
    ids = torch.tensor([3, 3, 3, 1, 1, 7, 7, 7, 7, 2])
    homes = four.grouped(BatchRef.from_batch(hf.Batch({"group_id": ids})))["home"].get()
    for group in ids.unique():
        assert len(homes[ids == group].unique()) == 1
    assert len(homes.unique()) > 1


def test_reads_and_writes_that_depend_on_the_call(four, batch):
    out = four.copy(batch, "tokens", into="again")
    assert out.columns == ("again",)
    assert out["again"].get().equal(example()["tokens"])
    with pytest.raises(MissingColumnError, match=r"four\.copy reads 'tokns'; .*Did you mean 'tokens'"):
        four.copy(batch, column="tokns")


def test_only_what_is_read_travels(four, batch):
    """The first of the alternatives, and optional columns where they are."""
    assert set(four.alternatives(batch)["seen"].get()) == {("x",)}
    more = hf.Batch({"a": torch.zeros(ROWS), "hint": ["h"] * ROWS})
    assert set(four.alternatives(batch | more)["seen"].get()) == {("a", "hint")}
    assert set(four.whole(batch, other=batch)["columns"].get()) == {batch.columns}


def test_calls_that_change_the_number_of_rows(four, two, batch):
    kept = four.drop_odd(batch)
    assert len(kept) == 5
    assert two.double(kept)["y"].get().tolist() == [0, 4, 8, 12, 16]
    none = four.drop_odd(kept.select("x")[0:1] | hf.Batch({"x": torch.ones(1)}))
    assert len(none) == 0
    assert none.get()["x"].dtype == torch.float32


def test_repeated_rows_carry_their_columns(four, batch):
    out = four.sample(batch, n=3)
    assert out.rows == ROWS * 6
    got = out.get()
    assert got["draw"].tolist() == got["x"].tolist() == torch.arange(10.0).repeat_interleave(6).tolist()
    assert got["row_id"].tolist() == list(range(60))
    assert got["group_id"].tolist() == torch.arange(10).repeat_interleave(6).tolist()
    assert [part["draw"].get().tolist() for part in out.split(30)][7] == [2.0, 2.0]


def test_one_to_one_calls_rank_zero_only(four, batch):
    before = [len(called) for called in four.calls().get()]
    assert four.total(batch).get() == 45.0
    assert [len(called) for called in four.calls().get()] == [before[0] + 1, 0, 0, 0]


def test_prepared_lists(four, batch):
    assert four.each(["a", "b", "c", "d"], other=[1, 2, 3, 4]).get() == [
        ("a", 1, 0),
        ("b", 2, 1),
        ("c", 3, 2),
        ("d", 4, 3),
    ]
    assert four.each([1, 2, 3, 4]).get()[3] == (4, 0, 3)
    with pytest.raises(ProtocolError, match=r"one item per rank \(4\), got 2 items"):
        four.each([1, 2])
    parts = four.each_rows(batch.split(4))
    assert [part.get()["rows"].tolist() for part in parts] == [[0] * 3, [1] * 4, [2] * 4, [3] * 5]


def test_blocking_calls_are_done_when_they_return(four, batch):
    out = four.blocking_double(batch)
    assert isinstance(out, BatchRef)
    assert out.get(timeout=0.5)["y"].tolist() == [2.0 * x for x in range(ROWS)]
    everywhere = four.blocking_everywhere(batch)
    assert [ref.get()["y"][1].item() for ref in everywhere] == [0, 1, 2, 3]
    assert four.mean(batch[0:4]) == {"x/mean": 1.5}


def test_settings_reach_every_rank(four, two):
    assert four.configured() == [(2, {"colour": "red"})] * 4
    assert two.configured() == [(1, {})] * 2


def test_a_setting_nobody_knows_gets_the_nearest_name(four, batch):
    with pytest.raises(ConfigError, match=r"four.in_chunks: .*no setting 'minibatchs'. Did you mean 'minibatches'"):
        four.in_chunks(batch, minibatchs=2)
    with pytest.raises(ConfigError, match="missing a required argument: 'column'"):
        four.copy(batch)
    with pytest.raises(ConfigError, match="scale=3 is above 2"):
        four.checked(batch, scale=3)
    with pytest.raises(ConfigError, match=r"minibatches=0\): at least 1"):
        four.in_chunks(batch, minibatches=0)
    with pytest.raises(AttributeError, match=r"four has no operation 'doubel'. Did you mean 'double'"):
        four.doubel(batch)
    assert "double" in dir(four)


def test_a_missing_column_names_who_writes_it(four, two, batch):
    with pytest.raises(MissingColumnError, match=r"two.copy reads 'z'; no call has written it: call two.balanced\("):
        two.copy(batch, column="z")
    with pytest.raises(MissingColumnError, match=r"reads 'copied'; .* call two.copy\(batch\) first"):
        two.copy(batch, column="copied")
    with pytest.raises(MissingColumnError, match=r"reads 'advantages'; .* call hf.compute_advantage\(batch"):
        two.copy(batch, column="advantages")
    with pytest.raises(MissingColumnError, match=r"place hf.ReferenceWorker and call compute_ref_log_prob\(batch\)"):
        two.copy(batch, column="ref_log_probs")
    with pytest.raises(MissingColumnError, match="no group writes it: the prompts must bring it"):
        two.copy(batch, column="unheard_of")


def test_nobody_else_reaches_a_local_cluster(cluster, four, two, batch, outward, tmp_path, monkeypatch):
    """Neither over the network, nor in the directories of its files and sockets."""
    assert four.double(batch).get().rows == two.double(batch).get().rows
    assert not outward()
    with socket.create_server(("", 0)):
        assert len(outward()) == 1  # it would be seen
    private = Path(cluster.backend.directory).parents[1]
    assert (private.stat().st_mode & 0o777, private.stat().st_uid) == (0o700, os.getuid())

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    made = private_directory()
    made.chmod(0o777)
    assert private_directory() == made
    assert made.stat().st_mode & 0o777 == 0o700
    made.rename(tmp_path / "elsewhere")
    made.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is another user's, or not a directory"):
        private_directory()

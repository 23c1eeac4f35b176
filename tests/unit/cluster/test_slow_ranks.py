"""Which ranks of a group are named slow, from samples of what they do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.cluster.host_monitor import WINDOW_SECONDS, Sample, SlowRanks, sample, slow
from hybridflow.cluster.liveness import Doing

CALL = "actor.update"
WAITS, WORKS, IDLE = Doing(CALL, "x.py:1 in f", True), Doing(CALL, "own.py:12 in step", False), Doing()


def samples(working: Sequence[set[int]], every: float = 2.0) -> list[Sample]:
    return [Sample(every * i, CALL, dict.fromkeys(ranks, "here")) for i, ranks in enumerate(working)]


@pytest.mark.parametrize(
    ("doing", "working"),
    [
        ([WAITS, WORKS, WAITS, WAITS], {1: "own.py:12 in step"}),
        ([WAITS, None, WAITS, WAITS], {1: "no answer from its process"}),
        ([WORKS, WORKS, WAITS, WAITS], {}),  # half of them is the pipeline of any training step
        ([WORKS, WORKS, WORKS, WORKS], {}),
        ([WAITS, WAITS, WAITS, WAITS], {}),
        ([IDLE, WORKS, IDLE, IDLE], {}),  # nobody waits for it
        ([IDLE, WORKS, WAITS, IDLE], {1: "own.py:12 in step"}),
        ([WAITS, Doing("critic.update", "y.py:1 in g"), WAITS, WAITS], {}),  # its host is busy with another group
    ],
)
def test_a_sample_has_the_ranks_that_the_others_wait_for(doing, working):
    found = sample("actor", 5.0, doing)
    assert found == Sample(5.0, CALL, working)


def test_idle_groups_give_no_samples():
    assert sample("actor", 0.0, [IDLE, IDLE]) is None
    assert sample("actor", 0.0, [None, None]) is None
    assert sample("act", 0.0, [WAITS, WORKS]) is None


def test_one_rank_that_stands_out_is_slow():
    half = [{2} if i % 2 else set() for i in range(20)]
    assert slow(samples(half), 4) == {2: 0.5}
    assert slow(samples(half[:10]), 4) == {}  # 18 s
    assert slow(samples([{2} if i % 10 == 0 else set() for i in range(20)]), 4) == {}  # a tenth of the time


def test_ranks_that_take_turns_are_not_slow():
    assert slow(samples([{i % 2} for i in range(30)]), 2) == {}
    assert slow(samples([{i % 4} for i in range(30)]), 4) == {}
    assert slow(samples([{0} if i % 5 else {1} for i in range(30)]), 2) == {0: 0.8}


@given(st.lists(st.sets(st.integers(0, 7)), max_size=40), st.integers(8, 16))
def test_few_are_named_and_each_has_its_share(working, ranks):
    found = slow(samples(working), ranks)
    assert len(found) <= max(1, ranks // 4)
    for rank, share in found.items():
        assert share == sum(rank in at for at in working) / len(working) >= 0.2


def test_a_notice_names_rank_node_share_and_line_once_a_minute():
    ranks, said = SlowRanks("actor", ["a", "b", "", "d"]), []
    for i in range(91):  # three minutes
        ranks.add(2.0 * i, [WAITS, WORKS if i % 4 else WAITS, WAITS, WAITS])
        if text := ranks.notice(2.0 * i):
            said.append((2.0 * i, text))
    assert len(said) == 3
    assert all(b - a >= WINDOW_SECONDS for (a, _), (b, _) in pairwise(said))
    assert "rank 1 (node b) for 75% of the time, last at own.py:12 in step, in actor.update" in said[0][1]
    assert not any(name in text for _, text in said for name in ("rank 0", "rank 2", "rank 3"))

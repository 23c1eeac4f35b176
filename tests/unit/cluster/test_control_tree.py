"""Ranks that agree through a tree of connections: threads stand in for their processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from hybridflow.cluster.member import ControlTree
from hybridflow.errors import WaitTimeoutError


def trees(ranks: int, seconds: float = 30.0) -> list[ControlTree]:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=seconds))
    return [ControlTree(store, "group", ranks, rank, "127.0.0.1", seconds) for rank in range(ranks)]


def agree(trees: list[ControlTree], failures: dict[int, str]) -> list[str | None]:
    with ThreadPoolExecutor(len(trees)) as threads:
        return list(threads.map(lambda rank: trees[rank].agree(failures.get(rank)), range(len(trees))))


@pytest.mark.parametrize("ranks", [2, 17, 18, 40])
def test_all_ranks_learn_of_a_failure_on_any_rank(ranks):
    made = trees(ranks)
    assert agree(made, {}) == [None] * ranks
    for rank in {0, 1, ranks - 1}:
        assert agree(made, {rank: f"of {rank}" * 1000}) == [f"of {rank}" * 1000] * ranks
    (both,) = set(agree(made, {0: "zero", 1: "one"}))
    assert both in ("zero", "one")
    assert agree(made, {}) == [None] * ranks
    for tree in made:
        tree.close()


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_ranks_notice_one_that_is_gone_and_cannot_agree_any_more(gone):
    made = trees(3)
    assert agree(made, {}) == [None] * 3
    made[gone].close()
    others = [tree for rank, tree in enumerate(made) if rank != gone]
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(tree.agree, None) for tree in others]
    for _ in range(2):
        for answer in asked:
            with pytest.raises(WaitTimeoutError, match="a peer did not take part"):
                answer.result()
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(tree.agree, None) for tree in others]


def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline():
    first, _ = trees(2, seconds=0.5)
    with pytest.raises(WaitTimeoutError, match="a peer did not take part"):
        first.agree(None)


@pytest.mark.parametrize("known", ["before", "while it waits"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_lost_before_it_came_is_not_waited_for(rank, known):
    """The root waits for a connection, another rank for the root's address."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    tree = ControlTree(store, "group", 2, rank, "127.0.0.1", 60.0)
    if known == "before":
        tree.abort()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(tree.agree, None)
        with pytest.raises(TimeoutError if known != "before" else WaitTimeoutError):
            asked.result(0.5)
        tree.abort()
        with pytest.raises(WaitTimeoutError, match="a peer did not take part"):
            asked.result(10)

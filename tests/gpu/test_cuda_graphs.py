"""Captured graphs: a capture computes nothing, a replay computes on the same addresses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.conftest import OneRank

pytestmark = pytest.mark.gpu


def captured(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    run()  # whatever the first call prepares
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def test_a_replay_computes_with_the_values_of_now():
    x, weight = torch.ones(4, 8, device="cuda"), torch.randn(8, 8, device="cuda")
    graph, out = captured(lambda: torch.softmax(x @ weight, -1).sum(0))
    for value in (2.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert torch.allclose(out, torch.softmax(x @ weight, -1).sum(0))


def test_a_capture_leaves_memory_as_it_was():
    x = torch.zeros(4, device="cuda")
    graph, _ = captured(lambda: x.add_(1))
    assert x.tolist() == [1.0] * 4  # of the call before the capture
    graph.replay()
    graph.replay()
    assert x.tolist() == [3.0] * 4


def test_results_of_a_capture_are_not_there_before_a_replay():
    x = torch.ones(4, device="cuda")
    graph, out = captured(lambda: x * 5)
    assert out.tolist() != [5.0] * 4
    graph.replay()
    assert out.tolist() == [5.0] * 4


def test_a_graph_of_two_streams():
    x, side = torch.ones(1 << 16, device="cuda"), torch.cuda.Stream()

    def run() -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        z = x * 3
        torch.cuda.current_stream().wait_stream(side)
        return y + z

    graph, out = captured(run)
    x.fill_(2)
    graph.replay()
    assert float(out[0]) == 10


def test_graphs_share_a_pool():
    x, pool = torch.ones(1 << 20, device="cuda"), torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool):
            out = (x + 1) * 2
        del out
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = (x + 1) * 2
    graph.replay()
    assert float(out[0]) == 4
    assert torch.cuda.memory_reserved() == before


def test_copies_and_random_numbers():
    pinned = torch.ones(8, pin_memory=True)
    graph, out = captured(lambda: pinned.to("cuda", non_blocking=True) + torch.rand(8, device="cuda"))
    pinned.fill_(10)
    values = []
    for _ in range(2):
        graph.replay()
        values.append(out.tolist())
    assert values[0] != values[1]
    assert all(10 <= value < 11 for value in values[1])


def test_a_collective(alone: OneRank):
    x = torch.ones(8, device="cuda")

    def run() -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    graph, out = captured(run)
    x.fill_(4)
    graph.replay()
    assert out.tolist() == [9.0] * 8


@pytest.mark.parametrize(
    "wait",
    [lambda x: x.sum().item(), lambda x: x.nonzero(), lambda x: torch.cuda.current_stream().synchronize()],
    ids=["item", "nonzero", "synchronize"],
)
def test_a_wait_of_the_host_ends_a_capture(wait: Callable[[Tensor], object]):
    x, graph = torch.ones(8, device="cuda"), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="captur"), torch.cuda.graph(graph):  # noqa: PT012
        x * 2
        wait(x)
    torch.cuda.synchronize()
    assert float((x * 2)[0]) == 2


def test_a_stream_that_does_not_come_back():
    x, side, graph = torch.ones(8, device="cuda"), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="unjoined"), torch.cuda.graph(graph):  # noqa: PT012
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x * 2
    torch.cuda.synchronize()


def test_replays_are_ordered_with_other_streams(expected_faults: Callable[[], list[str]]):
    x, side = torch.ones(1 << 16, device="cuda"), torch.cuda.Stream()
    graph, _ = captured(lambda: x.mul_(2))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.replay()
    torch.cuda.current_stream().wait_stream(side)
    x += 1
    torch.cuda.synchronize()
    assert not expected_faults()
    with torch.cuda.stream(side):
        graph.replay()
    x += 1
    torch.cuda.synchronize()
    assert any(fault.startswith("race") for fault in expected_faults())

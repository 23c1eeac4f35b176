"""Emulated CUDA finds device mistakes: one is planted in each test, beside the correct form. It captures graphs, which
compute nothing until they are replayed, and maps memory behind one address range (expandable segments), as devices do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.conftest import OneRank
from tests.gpu.test_host_syncs import host_syncs

pytestmark = pytest.mark.gpu
SIZE = 1 << 16
Faults = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def _synchronized() -> Iterator[None]:
    """A test's memory may be given to the next one."""
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def ones(size: int = SIZE) -> Tensor:
    return torch.ones(size, device="cuda")


def kinds(faults: Faults) -> set[str]:
    return {fault.partition(":")[0] for fault in faults()}


def doubled(x: Tensor, stream: torch.cuda.Stream) -> Tensor:
    with torch.cuda.stream(stream):
        return x * 2


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_on_another_stream(expected_faults: Faults, waits: bool):
    stream, x = torch.cuda.Stream(), torch.zeros(SIZE, device="cuda") + 1
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    doubled(x, stream)
    assert ("race" in kinds(expected_faults)) == (not waits)


@pytest.mark.parametrize("waits", [True, False])
def test_a_result_of_another_stream(expected_faults: Faults, waits: bool):
    stream, x = torch.cuda.Stream(), ones()
    stream.wait_stream(torch.cuda.current_stream())
    y = doubled(x, stream)
    if waits:
        torch.cuda.current_stream().wait_stream(stream)
    assert float((y + 1)[0]) == 3
    assert ("race" in kinds(expected_faults)) == (not waits)


@pytest.mark.parametrize("waits", [True, False])
def test_a_result_of_another_stream_that_an_event_orders(expected_faults: Faults, waits: bool):
    stream, event, x = torch.cuda.Stream(), torch.cuda.Event(), ones()
    torch.cuda.synchronize()
    y = doubled(x, stream)
    event.record(stream)
    if waits:
        torch.cuda.current_stream().wait_event(event)
    y += 1
    assert ("race" in kinds(expected_faults)) == (not waits)


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_freed_while_another_stream_reads_it(expected_faults: Faults, recorded: bool):
    stream, x = torch.cuda.Stream(), ones()
    stream.wait_stream(torch.cuda.current_stream())
    doubled(x, stream)
    if recorded:
        x.record_stream(stream)
    del x
    again = [torch.zeros(SIZE, device="cuda").add_(3) for _ in range(8)]  # the allocator gives that memory again
    torch.cuda.synchronize()
    assert len(again) == 8
    assert ("race" in kinds(expected_faults)) == (not recorded)


@pytest.mark.parametrize("waits", [True, False])
def test_a_tensor_that_a_collective_reduces(alone: OneRank, expected_faults: Faults, waits: bool):
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    if waits:
        work.wait()
    x.add_(1)
    work.wait()
    assert ("race" in kinds(expected_faults)) == (not waits)


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_read_before_a_copy_arrived(expected_faults: Faults, waits: bool):
    pinned = torch.empty(8, pin_memory=True)
    pinned.copy_(ones(8), non_blocking=True)
    if waits:
        torch.cuda.current_stream().synchronize()
    assert (float(pinned[0]) == 1) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_pinned_memory_overwritten_while_a_copy_reads_it(expected_faults: Faults, waits: bool):
    pinned = torch.ones(8, pin_memory=True)
    copied = pinned.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    pinned.fill_(7)
    torch.cuda.synchronize()
    assert copied.is_cuda
    assert ("race" in kinds(expected_faults)) == (not waits)


def test_the_device_reads_what_it_wrote_to_pinned_memory():
    """In the order of one stream, although neither copy has reached the host."""
    pinned, x = torch.zeros(SIZE, pin_memory=True), ones()
    for _ in range(3):
        pinned.copy_(pinned.to("cuda", non_blocking=True) + x, non_blocking=True)
    torch.cuda.synchronize()
    assert pinned.unique().tolist() == [3.0]


@pytest.mark.parametrize("waits", [True, False])
def test_two_streams_and_pinned_memory(expected_faults: Faults, waits: bool):
    pinned, x, stream = torch.zeros(SIZE, pin_memory=True), ones(), torch.cuda.Stream()
    torch.cuda.synchronize()
    pinned.copy_(x, non_blocking=True)
    if waits:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copied = pinned.to("cuda", non_blocking=True)
    stream.synchronize()
    assert copied.is_cuda
    assert ("race" in kinds(expected_faults)) == (not waits)


def test_an_index_on_the_cpu(expected_faults: Faults):
    assert ones()[torch.tensor([1])].is_cuda
    assert kinds(expected_faults) == {"host index"}


def test_a_kernel_that_is_not_emulated(expected_faults: Faults):
    with pytest.raises(RuntimeError, match="not emulated"):
        torch.cuda._sleep(100)
    assert kinds(expected_faults) == {"kernel"}


def test_dropout_draws_from_the_generator_of_the_device():
    host, device = torch.get_rng_state(), torch.cuda.get_rng_state()
    first, second = (torch.nn.functional.dropout(ones().requires_grad_(), 0.25) for _ in range(2))
    assert torch.get_rng_state().equal(host)
    assert not first.equal(second)
    assert first.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    torch.cuda.set_rng_state(device)
    assert torch.nn.functional.dropout(ones().requires_grad_(), 0.25).equal(first)


def test_uninitialised_memory_is_not_zero(expected_faults: Faults):
    assert torch.empty(1 << 21, dtype=torch.uint8, device="cuda").max() == 255


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: torch.where(torch.ones(SIZE, dtype=torch.bool), ones(), ones()),
        lambda: ones() + torch.ones(SIZE),
        lambda: torch.cat([ones(), torch.ones(SIZE)]),
        lambda: torch.randn(3, device="cuda", generator=torch.Generator()),
        lambda: ones().numpy(),
        lambda: torch.empty(1 << 42, device="cuda"),
    ],
    ids=["mask on the CPU", "operand on the CPU", "part on the CPU", "CPU generator", "numpy", "too large"],
)
def test_errors_that_cuda_raises(mistake: Callable[[], object]):
    with pytest.raises((RuntimeError, TypeError)):
        mistake()


@pytest.mark.parametrize(
    "tensor", [lambda: torch.ones(3), lambda: torch.ones(4, 4, device="cuda").t()[:, :2]], ids=["CPU", "strided"]
)
def test_errors_that_nccl_raises(alone: OneRank, tensor: Callable[[], Tensor]):
    with pytest.raises((RuntimeError, ValueError)):
        dist.all_reduce(tensor(), group=dist.new_group(backend="nccl"))


@pytest.mark.parametrize(
    ("run", "waits"),
    [
        (lambda x: x + 1, 0),
        (lambda x: x.sum().item(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: torch.ones(8).cuda(), 1),
        (lambda x: torch.ones(8).pin_memory().to("cuda", non_blocking=True), 0),
        (lambda x: torch.cuda.synchronize(), 1),
    ],
    ids=["none", "item", "mask", "nonzero", "to the host", "from the host", "from pinned memory", "synchronize"],
)
def test_host_syncs_are_counted(run: Callable[[Tensor], object], waits: int):
    x = ones()
    with host_syncs() as found:
        run(x)
    if not found.counted:
        pytest.skip("a real device does not count")
    assert found.total == waits, str(found)
    assert all("tests/gpu/test_device_checks.py" in place for _, place in found.by_place)


def test_conjugates_that_nothing_has_computed_yet_are_read_as_such():
    """Gradients of a product of complex numbers are products with such."""
    found = []
    for device in ("cpu", "cuda"):
        x, y = (torch.arange(8.0, device=device).add(start).view(4, 2) for start in (1, 5))
        product = torch.view_as_complex(x.requires_grad_()) * torch.view_as_complex(y)
        (torch.view_as_real(product) * y).sum().backward()
        found.append(x.grad)
    assert found[0] is not None
    assert found[0].equal(found[1].cpu())


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


MIB = 1 << 20


@pytest.fixture
def expandable() -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    yield
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def full(mib: int, value: int) -> torch.Tensor:
    return torch.full((mib * MIB,), value, dtype=torch.uint8, device="cuda")


@pytest.mark.usefixtures("expandable")
def test_freed_neighbours_hold_a_larger_tensor():
    """Which fixed segments cannot: each tensor had one of its own."""
    before = torch.cuda.memory_reserved()
    parts = [full(20, value) for value in range(8)]
    reserved = torch.cuda.memory_reserved()
    del parts[2:6]
    large = full(80, 9)
    assert torch.cuda.memory_reserved() == reserved
    assert [int(part.max()) for part in parts] == [0, 1, 6, 7]
    assert [int(part.min()) for part in parts] == [0, 1, 6, 7]
    assert int(large.min()) == 9
    del parts, large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before


@pytest.mark.usefixtures("expandable")
def test_memory_goes_back_to_the_device_and_comes_again():
    free = torch.cuda.mem_get_info()[0]
    for value in range(3):
        part = full(100, value)
        assert int(part.max()) == value
        assert torch.cuda.mem_get_info()[0] <= free - 100 * MIB
        del part
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] == free


@pytest.mark.usefixtures("expandable")
def test_too_little_memory_is_reported():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(torch.cuda.mem_get_info()[1] + 1, dtype=torch.uint8, device="cuda")
    assert int(full(20, 3).max()) == 3


@pytest.mark.usefixtures("expandable")
def test_streams_share_segments_in_order():
    side = torch.cuda.Stream()
    x = full(40, 1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x + 1
    x.record_stream(side)
    del x
    torch.cuda.current_stream().wait_stream(side)
    assert int((y + full(40, 1)).max()) == 3
    torch.cuda.synchronize()

"""Emulated CUDA finds device mistakes: one is planted in each test, beside the correct form."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.conftest import OneRank
from tests.gpu.host_syncs import host_syncs

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

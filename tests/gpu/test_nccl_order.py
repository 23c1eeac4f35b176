"""NCCL's order: an operation waits for its stream, for its communicator and for all ranks, and the host does not."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.gpu import nccl_ranks
from tests.gpu.nccl_ranks import run

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def test_the_host_does_not_wait_in_calls_and_an_abort_releases_it():
    found = run(nccl_ranks.calls_return_at_once, nccl_ranks.messages_both_ways, nccl_ranks.an_abort)
    assert found == [
        (0, [(False, [6.0] * 4), [2.0] * 4, (True, [2.0] * 4)]),
        (0, [(False, [6.0] * 4), [1.0] * 4, None]),
    ]


def test_orders_that_differ_are_reported_as_a_deadlock(expected_faults):
    found = run(nccl_ranks.orders_that_differ, EMULATED_DEADLINE="4")
    assert [code for code, _ in found] == [-signal.SIGABRT] * 2, found
    reports = [fault for fault in expected_faults() if fault.startswith("deadlock")]
    assert len(reports) == 2
    waiting = [report.partition(" still waits")[0].partition("communicator ")[2].split(",")[0] for report in reports]
    assert waiting[0] != waiting[1]  # each rank in the other's second operation


def test_different_operations_of_one_communicator(expected_faults):
    run(nccl_ranks.operations_that_differ, EMULATED_DEADLINE="4")
    assert any(fault.startswith("collective") and "ncclBroadcast" in fault for fault in expected_faults())

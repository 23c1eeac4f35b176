"""torch's out-of-memory exception in a worker of real hosts reaches the driver with figures and settings."""

from __future__ import annotations

import pytest
import torch

import hybridflow as hf
from hybridflow.errors import DeviceMemoryError, WorkerError
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL


class Greedy:
    """Raises what CUDA would; `large` is what it says to have in memory."""

    role = "greedy"

    @register(ONE_TO_ALL, blocking=True)
    def update_all(self):
        with self.context.stage("transition"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    @register(ONE_TO_ALL, blocking=True)
    def compute(self):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def resident_bytes(self):
        return {"parameters": 3 << 30}


class Broken:
    """Its memory cannot be read."""

    role = "broken"

    @register(ONE_TO_ALL, blocking=True)
    def compute(self):
        return 1

    def resident_bytes(self):
        raise RuntimeError("half built")


class NeverBuilt:
    role = "large"

    def __init__(self):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    @register(ONE_TO_ALL, blocking=True)
    def compute(self):
        return 1


def test_the_driver_learns_phase_contents_and_settings(cluster, pool, place):
    greedy, _ = place(Greedy, pool[:2]), place(Broken, pool[:2])
    with pytest.raises(DeviceMemoryError) as caught:
        greedy.update_all()
    error = caught.value
    assert isinstance(error, WorkerError)
    assert (error.role, error.method) == ("greedy", "update_all")
    for part in ("greedy.update_all (transition) ran out of device memory", "9.00 GiB", "greedy parameters 3.00 GiB"):
        assert part in str(error)
    assert "in update_all" in error.remote_traceback
    with pytest.raises(DeviceMemoryError, match=r"greedy\.compute ran out"):  # not in the stage of the call before
        greedy.compute()


def test_a_group_that_does_not_fit_is_named(cluster, pool):
    with pytest.raises(DeviceMemoryError, match=r"large\.__init__ ran out of device memory.*Change one of"):
        hf.place(NeverBuilt, pool[:1])

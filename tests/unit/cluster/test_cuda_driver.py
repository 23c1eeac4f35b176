"""What a driver and a build of torch can do together, and which device is a host's, from plain answers."""

from __future__ import annotations

import re

import pytest

from hybridflow.cluster.device import cuda_problem, device_index


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (("2.13.0+cpu", None, "580.65.06"), r"580.65.06 .*2.13.0\+cpu is a CPU.*hybridflow\[gpu\].*to run on the"),
        (("2.13.0+cu130", "13.0", "570.124.06"), "570.124.06 .*built for CUDA 13.0, which needs driver 580 or newer"),
        (("2.13.0+cu126", "12.6", "470.82"), "needs driver 525 or newer"),
        (("2.13.0+cu130", "13.0", "580.65.06", "no CUDA-capable device"), "cannot use them: no CUDA-capable device"),
        (("2.13.0+cu130", "13.0", "", "CUDA unknown error"), "driver .of unknown version.*CUDA unknown error"),
        (("2.14.0+cu140", "14.0", "580.65.06", "too old"), "cannot use them: too old"),
    ],
)
def test_an_unusable_driver_is_named_with_its_cure(answers: tuple[str, ...], message: str):
    assert re.search(message, cuda_problem(*answers))


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ([3], "3", 0),  # Ray shows a host its own device
        ([3], None, 3),  # RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1
        ([0], "", 0),
        (["6"], "4,6", 1),  # ... of devices that the user chose
        (["GPU-b"], "GPU-a,GPU-b", 1),
        ([], None, 0),
        ([], "2", 0),
    ],
)
def test_a_host_takes_the_device_that_it_was_given(assigned: list, visible: str | None, index: int):
    assert device_index(assigned, visible) == index

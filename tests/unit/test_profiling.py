"""What `hybridflow profile` makes of its measurements."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.profiling import Amounts, known_device, rising


@given(st.lists(st.floats(0, 100), max_size=12))
def test_more_work_never_takes_less_time(values: list[float]):
    found = rising(values)
    assert len(found) == len(values)
    assert all(a <= b for a, b in pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    if values == sorted(values):
        assert found == values


def test_the_nearest_rising_sequence():
    assert rising([3.0, 1.0, 2.0, 4.0]) == [2.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-80GB", "a100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("Some Card 3", "some-card-3"),
        ("host", "host"),
    ],
)
def test_devices_are_called_as_the_planner_calls_them(name: str, device: str):
    assert known_device(name) == device


def test_powers_of_two():
    assert Amounts(devices=4, least=64, tokens=500).micro_batches == [64, 128, 256]

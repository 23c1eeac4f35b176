"""The self-test of `hybridflow doctor`, on this machine."""

from __future__ import annotations

import pytest

from hybridflow.cli import doctor


@pytest.mark.slow
def test_this_machine_can_run_hybridflow(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")  # a cluster that is gone does not disturb it
    found = doctor.self_test()
    assert found.cure == ""
    assert "three iterations of GRPO and two engines on 2 devices" in found.found


def test_a_self_test_that_takes_too_long_is_ended():
    assert "did not end within 1 s" in doctor.self_test(1.0).cure

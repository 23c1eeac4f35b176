"""Where the ranks of a group are, as the driver numbers it."""

from __future__ import annotations

from hybridflow.cluster.placed import numbered


def test_machines_are_numbered_in_order_of_appearance():
    assert numbered(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)
    assert numbered([]) == ()

"""Runs on two machines of several devices each have the figures of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.multinode.machines import Machines, missing
from tests.multinode.test_several_machines import Runs, check_equal

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why := missing()), reason=why or "it can")]
KINDS: dict[str, dict[str, Any]] = {
    "ppo": {},
    "grpo": {"rollout": 1},
    "async": {"rollout": 1, "stream": 1, "staleness": 0},
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Iterator[Runs]:
    """Two machines of six devices each."""
    with Machines(tmp_path_factory.mktemp("wide"), 2, devices=6) as machines:
        yield Runs(machines)


@pytest.mark.parametrize("layout", ["d2", "t2", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_four_devices_of_two_machines_train_as_those_of_one(wide, kind, layout):
    options = {"layout": layout, "record": 1, **KINDS[kind]}
    one, two = (wide.run(f"{kind} {layout} {at}", 3, devices=at, **options) for at in ("4", "2+2"))
    check_equal(two, one)

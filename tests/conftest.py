"""Defaults of every test process and of the processes that tests start; a value set outside wins."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.contracts.rank_processes import RankProcesses

hypothesis.settings.register_profile("tests", deadline=None)  # a loaded machine takes any time
hypothesis.settings.load_profile("tests")

TESTS = Path(__file__).parent

for name, value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # at 15 hosts wait for whatever else computes, such as the other tests
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(name, value)


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in its own hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process of pytest-xdist runs all tests that share a Ray cluster, one tests/contracts, whose files share a
    server of processes; files of other tests go to whichever is free. One process has a real CUDA device.

    Of the cases of a test marked `thinned`, most are slow. Tests marked `gpu` are skipped without a CUDA device.
    """
    together = ("contracts",) if "EMULATED_CUDA" in os.environ else ("contracts", "gpu")
    for item in items:
        folder, *rest = item.path.relative_to(TESTS).parts
        shares_ray = "cluster" in getattr(item, "fixturenames", ())
        group = "Ray" if shares_ray else folder if folder in together else "/".join(rest)
        item.add_marker(pytest.mark.xdist_group(group))
    cases: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("thinned"):
            cases.setdefault((item.path, getattr(item, "originalname", item.name)), []).append(item)
    for of_test in cases.values():
        keep = of_test[0].get_closest_marker("thinned").args[0]  # type: ignore[union-attr]
        kept = {at * len(of_test) // keep for at in range(keep)}
        for at, item in enumerate(of_test):
            if at not in kept:
                item.add_marker(pytest.mark.slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Errors: UsageError when pytest-xdist would spread tests that start processes over its own processes."""
    if session.config.getoption("loadgroup", False) and any("@" not in item.nodeid for item in session.items):
        raise pytest.UsageError("this pytest-xdist does not keep groups of tests together with this pytest")


@pytest.fixture
def left_behind() -> Callable[[], list[str]]:
    """Processes of multiprocessing that this test started and that still run."""
    earlier = {child.pid for child in multiprocessing.active_children()}
    return lambda: [child.name for child in multiprocessing.active_children() if child.pid not in earlier]


@pytest.fixture(scope="module")
def rank_processes() -> Iterator[Callable[[int], RankProcesses]]:
    """So many gloo processes, which are those of the whole file."""
    from tests.contracts.rank_processes import RankProcesses

    with ExitStack() as made:
        yield cache(lambda size: made.enter_context(closing(RankProcesses(size))))

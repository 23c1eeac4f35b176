"""How many files of the package a reader enters who follows one call, on the driver and on a host, by a profile.

docs/architecture.md walks through the same calls. Figures may fall, not rise; the aim is 25 for each.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import ray

import hybridflow as hf
from hybridflow.cluster.row_refs import outputs_of
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from tests.tiny_models import make_policy, make_prompts, make_rows

ROOT = str(Path(hf.__file__).parent) + os.sep
# name: files on the driver, files on a host (with expected_calls.py, where a model has waited in host memory before)
MOST = {"generate_sequences": (19, 33), "update_actor": (22, 44)}


class Walk:
    """The package's files whose functions are called, while it is this thread's profile and that of new threads."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            self.files.add(frame.f_code.co_filename.removeprefix(ROOT))

    def start(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> set[str]:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        return self.files


class Walked(hf.ActorWorker):
    @register(ONE_TO_ALL, blocking=True)
    def start_walk(self) -> None:
        self.walk = Walk()
        self.walk.start()

    @register(ONE_TO_ALL, blocking=True)
    def end_walk(self) -> set[str]:
        return self.walk.stop()


@pytest.fixture(scope="module")
def calls(tmp_path_factory, pool) -> Iterator[tuple[Any, dict[str, Callable[[], Any]]]]:
    policy = make_policy(tmp_path_factory.mktemp("policy"))
    generate = hf.VLLM(kv_cache_gb=0.02, sampling=hf.Sampling(max_tokens=8))
    actor = Walked.on(pool[0:2], model=policy, train=hf.Megatron(), optim=hf.SGD(lr=0.1), generate=generate)
    prompts, rows = hf.BatchRef.from_batch(make_prompts(6)), hf.BatchRef.from_batch(make_rows(8))
    yield (
        actor,
        {
            "generate_sequences": lambda: actor.generate_sequences(prompts),
            "update_actor": lambda: actor.update_actor(rows),
        },
    )
    actor.close()


@pytest.mark.parametrize("name", MOST)
def test_a_call_enters_few_files(calls, name):
    actor, by_name = calls
    by_name[name]().get()  # what only a first call does
    actor.start_walk()
    walk = Walk()
    walk.start()
    future = by_name[name]()
    driver = walk.stop()
    future.get()
    host = set.union(*actor.end_walk())
    counts = len(driver), len(host)
    assert all(count <= most for count, most in zip(counts, MOST[name])), (counts, sorted(driver), sorted(host))


@pytest.mark.parametrize("name", MOST)
def test_a_result_is_flat(calls, name):
    """Bytes that Python's own pickler made: cloudpickle would take ten times as long, for each rank."""
    found = calls[1][name]()
    outputs = outputs_of([found.column_refs["response_ids"].node]) if isinstance(found, hf.BatchRef) else found.outputs
    statuses = [status for output in outputs for status in output.call.statuses]
    assert {type(ray.get(status.ref)) for status in statuses} == {bytes}

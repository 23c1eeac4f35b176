"""What worker classes say on the driver, from settings alone."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hybridflow as hf
from hybridflow.cluster.backend import RankGroup
from hybridflow.engines.worker_spec import spec_of
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.topology import RankGrid

MODEL: dict[str, Any] = {"model": "./nowhere", "train": hf.Megatron(pp=2), "optim": hf.Adam(lr=1e-5)}
EVERY: dict[type, dict[str, Any]] = {
    hf.ActorWorker: {**MODEL, "generate": hf.VLLM(), "offload": ("optimizer",), "bucket_mb": 8, "overlap": True},
    hf.CriticWorker: {**MODEL, "of": "rewards", "offload": False},
    hf.ReferenceWorker: {"model": "./nowhere", "train": hf.FSDP(), "offload": False},
    hf.RolloutWorker: {"model": "./nowhere", "generate": hf.VLLM(tp=2), "offload": False},
}


@pytest.mark.parametrize("worker", EVERY, ids=lambda worker: worker.__name__)
def test_no_file_is_read_before_a_part_is_asked_for(worker: type):
    """A trace may have the name of a model only."""
    spec = spec_of(worker, EVERY[worker])
    assert spec.grid(4).size == 4
    assert (spec.fixed, spec.shares_stages) == ("", "optim" in EVERY[worker])
    for part in (lambda: spec.resolve(EVERY[worker]), spec.model, lambda: spec.layout(spec.grid(4))):
        assert part is not None
        with pytest.raises(CheckpointError, match="nowhere"):
            part()


def test_a_class_that_says_nothing_is_data_parallel():
    class Plain: ...

    for worker in (Plain, hf.Worker):
        spec = spec_of(worker, {"a": 1})
        spec.check(spec.grid(3), "cpu")
        assert (spec.grid(3), spec.resolve({"a": 1})) == (RankGrid(d=3), {"a": 1})
        assert (spec.model, spec.layout, spec.token_cost, spec.replicas) == (None, None, None, {})


def test_a_subclass_changes_what_it_wants_to():
    class Own(hf.CriticWorker):
        @classmethod
        def worker_spec(cls, settings: Any) -> hf.WorkerSpec:
            return replace(super().worker_spec(settings), fixed="its weights are its own")

    spec, base = (spec_of(worker, EVERY[hf.CriticWorker]) for worker in (Own, hf.CriticWorker))
    assert (spec.fixed, spec.shares_stages) == ("its weights are its own", True)
    assert spec.replicas["inference"][0] is Own
    assert base.replicas["inference"][1] == {**EVERY[hf.CriticWorker], "optim": None, "offload": True}


def test_actors_that_train_or_generate_never_wait_as_a_whole():
    idle = {**EVERY[hf.ActorWorker], "optim": None, "generate": None, "offload": True}
    assert [spec_of(worker, own).waits for worker, own in EVERY.items()] == [None, False, False, False]
    assert spec_of(hf.ActorWorker, idle).waits is True
    for own in ({"optim": hf.Adam(lr=1e-5)}, {"generate": hf.VLLM()}):
        assert spec_of(hf.ActorWorker, {**idle, **own, "offload": False}).waits is None


def test_an_actor_that_no_longer_generates_has_no_settings_of_generation():
    settings = EVERY[hf.ActorWorker]
    spec = spec_of(hf.ActorWorker, settings)
    rest = {**settings, **spec.without_generation}
    assert rest == {**settings, "generate": None, "offload": (), "bucket_mb": None, "overlap": False}
    assert {*spec_of(hf.ActorWorker, rest).replicas} == {"inference", "function"} == {*spec.replicas} - {"generation"}


def test_the_weights_of_a_reward_function_cannot_move():
    spec = spec_of(hf.RewardWorker, {"model": None, "function": len, "train": hf.Megatron()})
    assert spec.layout is not None
    with pytest.raises(ConfigError, match="this reward is a function"):
        spec.layout(RankGrid())


def test_ranks_travel_without_what_their_class_said():
    ranks = RankGroup("r", hf.ReferenceWorker, EVERY[hf.ReferenceWorker], RankGrid(), "p", (0,), (), "p/r/0")
    assert ranks.spec is ranks.spec
    sent = pickle.loads(pickle.dumps(replace(ranks, hosts=())))
    assert sent == ranks
    assert "spec" not in vars(sent)
    assert Path(sent.settings["model"]) == Path("nowhere")

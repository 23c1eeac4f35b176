"""Updates of an actor and a critic in turns give, bit by bit, what they give one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import LoRA, Megatron
from hybridflow.errors import WorkerError
from tests.contracts import sharing_tasks as tasks
from tests.contracts.example_models import VOCABULARY
from tests.contracts.rank_processes import RankProcesses
from tests.tiny_models import make_classifier, make_policy

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
STRATEGIES = {
    "4-1-1": {"lm": Megatron(pp=4, micro_tokens=24), "value": Megatron(pp=4, micro_tokens=48)},
    "2-1-2": {"lm": Megatron(pp=2, dp=2, micro_tokens=24), "value": Megatron(pp=2, dp=2, micro_tokens=16)},
    "2-2-1": {"lm": Megatron(pp=2, tp=2, micro_tokens=48), "value": Megatron(pp=2, tp=2, micro_tokens=24)},
    "2-2-1-lora": {
        "lm": Megatron(pp=2, tp=2, micro_tokens=48, sequence_parallel=True, lora=LoRA(rank=2)),
        "value": Megatron(pp=2, tp=2, micro_tokens=24, recompute=True, lora=LoRA(rank=4)),
    },
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    policy = make_policy(directory / "policy", tokenizer=False, num_hidden_layers=4, **SIZES)
    large = SIZES | {"hidden_size": 64, "num_attention_heads": 4}
    return {"lm": policy, "value": make_classifier(directory / "critic", num_hidden_layers=8, **large)}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, list | tuple) else a == b


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", STRATEGIES)
def test_shared_updates_equal_serial_ones(processes: RankProcesses, paths: dict[str, Path], layout: str):
    found = processes.run(4, tasks.both, processes.name(), STRATEGIES[layout], paths, 4)
    for rank in found:
        for head in paths:
            assert not equal(rank["before"][head], rank["shared"][head][-1]), "the updates must change the weights"
            assert equal(rank["serial"][head], rank["shared"][head])
        own = [each for each in rank["planned"] if each in set(rank["ran"])]
        assert rank["ran"] == own  # in the planned order, without micro-batches that only other replicas have
        if layout != "2-1-2":
            assert rank["ran"] == rank["planned"]
    counts = [tasks.micro_batches(rank["ran"]) for rank in found]
    assert len(set(counts)) == (2 if layout == "2-1-2" else 1), "replicas have unlike micro-batches"
    of_models = [work.micro_batches for work in found[0]["works"]]
    assert len(of_models[0]) != len(of_models[1])
    assert layout != "4-1-1" or set(of_models[0]) != set(of_models[1])


@pytest.fixture(scope="module")
def three(paths: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = SIZES | {"hidden_size": 48}
    another = make_policy(tmp_path_factory.mktemp("another") / "policy", tokenizer=False, num_hidden_layers=4, **sizes)
    return {**paths, "lm2": another}


@pytest.mark.parametrize("layout", ["4-1-1", "2-1-2"])
def test_three_updates_equal_serial_ones(processes: RankProcesses, three: dict[str, Path], layout: str):
    strategies = STRATEGIES[layout] | {"lm2": STRATEGIES[layout]["lm"]}
    for rank in processes.run(4, tasks.both, processes.name(), strategies, three, 4):
        for head in three:
            assert not equal(rank["before"][head], rank["shared"][head][-1]), "the updates must change the weights"
            assert equal(rank["serial"][head], rank["shared"][head])
        assert len(rank["works"]) == 3


@pytest.mark.parametrize("layout", ["4-1-1", "2-2-1"])
def test_forward_passes_equal_serial_ones(processes: RankProcesses, three: dict[str, Path], layout: str):
    strategies = STRATEGIES[layout] | {"lm2": STRATEGIES[layout]["lm"]}
    found = processes.run(4, tasks.forwards, processes.name(), strategies, three)
    for rank in found:
        assert equal(rank["serial"], rank["shared"])
        assert not any(work.trains for work in rank["works"])
        assert tasks.micro_batches(rank["ran"]) == sum(work.total for work in rank["works"])
    assert any(any(each) for rank in found for each in rank["shared"])


def test_one_rank_searches_and_again_only_for_other_micro_batches(processes: RankProcesses, paths: dict[str, Path]):
    found = processes.run(4, tasks.searches, processes.name(), STRATEGIES["2-1-2"], paths)
    assert found == [[1, 1, 2], *[[0, 0, 0]] * 3]


def test_a_search_that_fails_ends_the_updates_of_all_ranks(processes: RankProcesses, paths: dict[str, Path]):
    for rank in processes.run(4, tasks.search_that_fails, processes.name(), STRATEGIES["2-1-2"], paths):
        assert all("MemoryError: no room for the search" in error for error in rank)


@pytest.mark.parametrize("sizes", [(4, 1, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4)], ids=str)
def test_one_model_has_the_gradients_of_megatrons_schedule(processes: RankProcesses, paths: dict[str, Path], sizes):
    strategy = Megatron(pp=sizes[0], tp=sizes[1], dp=sizes[2], micro_tokens=24)
    for rank in processes.run(4, tasks.one_model, processes.name(), strategy, paths["lm"], 4):
        assert equal(rank["ours"], rank["megatron"])


@pytest.mark.parametrize("fails", ["lm", "value"])
def test_a_loss_that_raises_leaves_both_models_unstepped(processes: RankProcesses, paths: dict[str, Path], fails: str):
    for rank in processes.run(4, tasks.both, processes.name(), STRATEGIES["4-1-1"], paths, 4, fails, 1):
        for head, (error, parameters) in rank["shared"].items():
            assert told(error, fails)
            assert equal(rank["before"][head], parameters)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    ("fails", "layout", "part", "ranks", "micro"),
    [
        ("lm", "4-1-1", "forward", (0,), 1),
        ("lm", "4-1-1", "backward", (3,), 0),
        ("value", "4-1-1", "backward", (1,), 3),
        ("value", "4-1-1", "forward", (2,), 0),
        ("value", "2-1-2", "backward", (1,), 0),  # one replica of two
        ("lm", "2-2-1", "forward", (2, 3), 1),  # all tensor parallel ranks
    ],
)
def test_a_failed_computation_reaches_every_rank(
    processes: RankProcesses,
    paths: dict[str, Path],
    fails: str,
    layout: str,
    part: str,
    ranks: tuple[int, ...],
    micro: int,
):
    """Peers get the messages that they wait for, so no error is a timeout. No rank steps, in serial updates neither."""
    strategies, breaks = STRATEGIES[layout], (part, ranks, micro)
    for rank in processes.run(4, tasks.both, processes.name(), strategies, paths, 4, fails, 1, "", breaks):
        for head, (error, parameters) in rank["shared"].items():
            assert told(error, fails)
            assert equal(rank["before"][head], parameters)
        assert told(rank["serial"][fails][0], fails)
        assert len(rank["serial"][fails]) == 2


def test_steps_before_a_loss_that_raises_stay(processes: RankProcesses, paths: dict[str, Path]):
    """Each of several mini-batches is a step, of serial updates too; the other model's last step is not made."""
    for rank in processes.run(4, tasks.both, processes.name(), STRATEGIES["4-1-1"], paths, 4, "value"):
        assert equal(rank["serial"]["value"][:-2], rank["shared"]["value"][:-2])
        assert equal(rank["serial"]["value"][-1], rank["shared"]["value"][-1])
        *made, error, _ = rank["shared"]["lm"]
        assert len(made) == 1 == len(rank["serial"]["lm"]) - 2
        assert told(error, "value")


def test_an_update_that_announces_nothing_runs_alone(processes: RankProcesses, paths: dict[str, Path]):
    for rank in processes.run(4, tasks.both, processes.name(), STRATEGIES["2-2-1"], paths, 4, "", 2, "lm"):
        assert all(equal(rank["serial"][head], rank["shared"][head]) for head in paths)
        assert len(rank["works"]) == 1


def test_an_update_that_cannot_begin_on_one_rank_stops_nothing_else(processes: RankProcesses, paths: dict[str, Path]):
    found = processes.run(4, tasks.both, processes.name(), STRATEGIES["4-1-1"], paths, 4, "lm", 2, "", None, 2)
    for number, rank in enumerate(found):
        assert equal(rank["serial"]["value"], rank["shared"]["value"])
        if number != 2:
            error, parameters = rank["shared"]["lm"]
            assert isinstance(error, WorkerError)
            assert "failed on other ranks" in str(error)
            assert equal(rank["before"]["lm"], parameters)


def told(error: Exception, fails: str) -> bool:
    """Whether an error names the model whose loss has raised, and why."""
    role = "actor" if fails == "lm" else "critic"
    return isinstance(error, WorkerError) and role in str(error) and "the reward of this row is gone" in str(error)

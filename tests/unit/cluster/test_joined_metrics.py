"""Metrics of ranks become one dict: by their mean, or as the operation declares."""

from __future__ import annotations

import math

import pytest

import hybridflow as hf
from hybridflow.cluster.future import Status, joined_metrics, received
from hybridflow.cluster.iterations import Iterations, IterationSeconds, _Iteration
from hybridflow.engines.call_events import CallWork, Event
from hybridflow.engines.process_groups import SkippedStep
from hybridflow.errors import BatchError, ConfigError, RewardError, at_row, of_row, rows_named

RANKS = [{"loss": 1.0, "tokens": 1.0}, {"loss": 4.0, "tokens": 2.0}, {"tokens": 0.0, "own": 5.0}]


@pytest.mark.parametrize(
    ("how", "expected"), [("mean", 2.5), ("sum", 5.0), ("max", 4.0), ("min", 1.0), ("by tokens", 3.0)]
)
def test_a_metric_is_joined_as_declared(how, expected):
    assert joined_metrics(RANKS, {"loss": how})["loss"] == expected


def test_others_are_means_of_the_ranks_that_give_them():
    found = joined_metrics(RANKS, {"own": "by tokens"})
    assert found["tokens"] == 1.0
    assert math.isnan(found["own"])  # no rank has a token
    assert joined_metrics(RANKS, {})["own"] == 5.0


def test_an_unknown_join_is_refused():
    with pytest.raises(ConfigError, match="give one of"):
        hf.register(hf.DP_PROTO, metrics={"loss": "median"})


def test_errors_of_rows_name_the_drivers_row():
    with pytest.raises(BatchError, match=r"^row 13 has no prompt$"), rows_named(lambda row: row + 10):
        raise of_row(3, "has no prompt")
    with pytest.raises(RewardError, match=r"^mask: row 13: 3 of row 30$"), rows_named(lambda row: row + 10):
        raise at_row(3, RewardError("mask: row 3: 3 of row 30"))
    with pytest.raises(BatchError, match=r"^row 3 has"), rows_named(lambda row: row + 10):
        raise BatchError("row 3 has")


def test_an_iteration_takes_as_long_as_its_calls_whenever_it_is_written():
    iterations = Iterations(1.0)
    iterations._all = {
        3: _Iteration(end=100.0),
        4: _Iteration(seconds={("actor.update_actor", 0): 1.5, ("actor.update_actor", 1): 2.0}, end=102.5),
        5: _Iteration(end=102.5),
        7: _Iteration(end=110.0),
    }
    assert IterationSeconds(iterations, 4).get() == {"time/iteration": 2.5, "time/actor.update_actor": 2.0}
    for without in (3, 5, 7, 9):  # nothing before, no call, one before that is not known
        assert "time/iteration" not in IterationSeconds(iterations, without).get()


def test_ends_that_overlap_say_nothing():
    iterations = Iterations(1.0)
    iterations._all = {0: _Iteration(end=5.0), 1: _Iteration(end=4.0)}
    assert iterations.span(1) is None
    assert iterations.span(0) is None
    assert iterations.seconds(0) == pytest.approx({})


def test_a_status_without_objects_of_classes_is_sent_flat():
    """Else each result of each call would go through cloudpickle, which takes ten times as long."""
    work = CallWork(rows=3, tokens=40, flops=1e9, minibatches=2, longest=20, tail=0.5)
    own = ("call", 4, 17, "actor", "update_actor", "pool", 1, 1.0, 2.0, 3.5, 10, 20, 30, 40, 50, True, "training", work)
    event = Event(*own, (("actor parameters", 7), ("activations", 8)))
    packed = Status(None, (event, event._replace(work=CallWork(), held=())), (), {"loss": 0.5}).packed()
    assert type(packed) is bytes
    got = received(packed)
    assert got == Status(None, (event, event._replace(work=CallWork(), held=())), (), {"loss": 0.5})
    assert got.events[0].work.longest == 20


def test_a_status_with_objects_of_classes_is_sent_as_it_is():
    for status in (
        Status(None, value=object()),
        Status(None, skipped=(SkippedStep("actor", "update", 1, 2, 0, "inf"),)),
    ):
        assert status.packed() is status
        assert received(status) is status

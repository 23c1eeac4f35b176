"""The bookkeeping of a driver's iterations that needs no process."""

from __future__ import annotations

import pytest

from hybridflow.cluster.iterations import Iterations, IterationSeconds, _Iteration


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

"""An update's side of shared stages: errors of other models' computations reach its step."""

from __future__ import annotations

from hybridflow.engines.time_sharing import PipelineTurn


def test_an_error_elsewhere_reaches_an_update_that_has_computed():
    turn = PipelineTurn()
    turn.announce([2], 1.0)
    assert turn.settle() is None
    error = LookupError("a backward of the other model")
    turn.abandon(error)
    turn.all_done()
    assert turn.settle() is error

"""Statuses: what the driver gets of each call of each rank."""

from __future__ import annotations

from hybridflow.cluster.future import Status, received
from hybridflow.engines.call_events import CallWork, Event
from hybridflow.engines.process_groups import SkippedStep


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

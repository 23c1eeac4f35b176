"""A call as its hosts get it: the same rows and settings, references beside the bytes, shared parts pickled once."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import ObjectRef

import hybridflow as hf
from hybridflow.cluster.backend import RankCall
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.cluster.call_request import call_of, requests_of
from hybridflow.cluster.row_refs import CallOrigin, RankOutput, outputs_of
from hybridflow.cluster.store import Reader
from hybridflow.errors import ConfigError

NAMES = ("a", "b")


def call(**settings: Any) -> RankCall:
    return RankCall(7, "group-1", "go", settings, ("x",), (0, 1), 4, (0, 4), phase="inference")


def written(rows: int, start: int) -> BatchRef:
    """A batch as another call would have written it, except that its manifest is in this process."""
    numbers = torch.arange(start, start + rows)
    ref = BatchRef.from_batch(
        hf.Batch({"row_id": numbers, "group_id": numbers // 2, "a": numbers * 3, "b": numbers % 5})
    )
    (output,) = set(outputs_of([ref.column_refs["a"].node]))
    return BatchRef.of_output(replace(output, origin=CallOrigin("actor", start, "make", "node", 3)), ref.columns)


@settings(deadline=None)
@given(st.data())
def test_ranks_read_the_rows_that_they_are_given(data):
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    whole = BatchRef.concat([written(count, 10 * i) for i, count in enumerate(counts)])
    if data.draw(st.booleans()):
        whole = whole.repeat(2)
    parts = data.draw(st.integers(1, whole.rows))
    how = data.draw(st.sampled_from([{}, {"balance": "b"}, {"groups": True}]))
    split = whole.split(parts, **how)
    if data.draw(st.booleans()):
        split = BatchRef.concat(split).split(data.draw(st.integers(1, whole.rows)))
    sent = [call(batch=part.to_rank(), times=2) for part in split]
    given_twice = [one for one in sent for _ in range(2)]
    requests = requests_of([None, *given_twice], "group.go", 5, {})
    assert requests[0] is None
    for part, own, request in zip([p for p in split for _ in range(2)], given_twice, requests[1:], strict=True):
        assert request is not None
        found = call_of(*request.arguments)
        assert replace(found, settings={}) == replace(own, settings={}, step=5)
        assert list(found.settings) == ["batch", "times"]
        assert found.settings["times"] == 2
        read, expected = Reader(1.0).read(found.settings["batch"]), part.get()
        assert read.columns == expected.columns
        assert all(torch.equal(read[name], expected[name]) for name in read.columns)
        assert read.chunk_rows == Reader(1.0).read(own.settings["batch"]).chunk_rows
    assert len({id(request) for request in requests[1:]}) == len(split)  # ranks with equal inputs have one request


def test_references_lie_beside_the_bytes():
    refs = [ObjectRef(os.urandom(28)) for _ in range(3)]
    outputs = [RankOutput(ref, 2, CallOrigin("actor", i, "make")) for i, ref in enumerate(refs[:2])]
    whole = BatchRef.concat([BatchRef.of_output(output, NAMES) for output in outputs])
    sent = [call(batch=part.to_rank(), mine=i, other={"ref": refs[2]}) for i, part in enumerate(whole.split(2))]
    for i, request in enumerate(requests_of(sent, "group.go", None, {})):
        assert request is not None
        assert (set(request.refs), request.kept) == ({refs[i]}, [refs[2]])
        found = call_of(*request.arguments)
        assert found.settings["mine"] == i
        assert found.settings["other"]["ref"] is refs[2]
        nodes = {id(ref.node) for ref in found.settings["batch"].columns.values()}
        assert len(nodes) == 1  # columns share their node, so that its rows are located once
        (output,) = outputs_of([found.settings["batch"].columns["a"].node])
        assert (output.ref, output.origin) == (refs[i], outputs[i].origin)


class Counted:
    pickled = 0

    def __reduce__(self):
        Counted.pickled += 1
        return Counted, ()


def test_what_ranks_share_is_pickled_once():
    Counted.pickled = 0
    shared, whole = Counted(), written(6, 0)
    requests = requests_of([call(batch=part.to_rank(), loss=shared) for part in whole.split(3)], "group.go", None, {})
    assert Counted.pickled == 1
    assert len({request.head for request in requests if request}) == 1
    some = requests_of([call(batch=part.to_rank(), loss=Counted()) for part in whole.split(3)], "group.go", None, {})
    assert Counted.pickled == 4
    assert all(isinstance(call_of(*request.arguments).settings["loss"], Counted) for request in some if request)


def test_settings_that_cannot_be_sent_are_named():
    with pytest.raises(ConfigError, match=r"group.go: hook=<.* cannot be sent to a host"):
        requests_of([call(lr=1.0, hook=threading.Lock())], "group.go", None, {})
    (request,) = requests_of([call(hook=lambda x: x + 1)], "group.go", None, {})
    assert request is not None
    assert call_of(*request.arguments).settings["hook"](1) == 2

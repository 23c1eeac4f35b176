"""Tracker.samples of batches: fields per token, one iteration behind."""

from __future__ import annotations

import json

import pytest
import torch

from hybridflow.batch.batch import Batch
from hybridflow.batch.ragged import Ragged
from hybridflow.cluster.batch_ref import BatchRef
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import MissingColumnError
from hybridflow.tracking.tracker import Tracker


class Letters:
    """A tokenizer of three letters."""

    def decode(self, ids):
        return "".join("xyz"[one] for one in ids)


def lines(directory, name):
    path = directory / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sampled_batch():
    """Two prompts with two responses each."""
    ids = Ragged.from_rows([[0, 1], [2], [0, 1, 2], [1]], torch.int64)
    columns = {"prompt": list("aabb"), "response": ["xy", "z", "xyz", "y"], "group_id": torch.tensor([7, 7, 9, 9])}
    versions = Ragged.from_lengths(torch.arange(7, dtype=torch.int32), ids.lengths)
    tokens = {"log_probs": ids.map(lambda v: -v.float() / 3), "policy_version": versions, "response_ids": ids}
    return Batch({**columns, **tokens, "rewards": torch.tensor([0.0, 1.0, 0.5, 0.1]), "mark": ["p", "q", "r", "s"]})


@pytest.mark.parametrize("of", [lambda batch: batch, BatchRef.from_batch], ids=["Batch", "BatchRef"])
def test_samples_of_a_batch_have_fields_per_token(tmp_path, of):
    letters = Tokenizer(Letters())
    with Tracker(tmp_path, console=False) as tracker:
        for _ in range(4):
            tracker.log({})
            tracker.samples(of(sampled_batch()), rows=3, every=2, tokenizer=letters, columns=["mark"])
            assert max((row["step"] for row in lines(tmp_path, "samples.jsonl")), default=0) < tracker._step
    rows = lines(tmp_path, "samples.jsonl")
    assert [(row["step"], row["group"]) for row in rows] == [(s, g) for s in (1, 2, 4) for g in (0, 0, 1)]
    assert rows[5] == {
        "step": 2,
        "title": "samples",
        "group": 1,
        "prompt": "b",
        "response": "xyz",
        "rewards": 0.5,
        "mark": "r",
        "tokens": ["x", "y", "z"],
        "log_probs": [0.0, -0.333333, -0.666667],
        "policy_version": [3, 4, 5],
    }


def test_samples_of_a_lost_part_of_the_run_are_not_written(tmp_path):
    tracker = Tracker(tmp_path, console=False)
    tracker.log({})
    state = tracker.state()
    tracker.log({})
    tracker.samples(sampled_batch(), rows=1)
    tracker.load_state(state)
    tracker.log({})
    tracker.samples(sampled_batch(), rows=2)
    tracker.finish()
    assert [row["step"] for row in lines(tmp_path, "samples.jsonl")] == [2, 2]


def test_samples_name_a_column_that_is_missing(tmp_path):
    with pytest.raises(MissingColumnError, match=r"no column 'marks'\. Did you mean 'mark'"):
        Tracker(tmp_path, console=False).samples(sampled_batch(), columns=["marks"])

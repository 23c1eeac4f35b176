"""Metrics of ranks become one dict: by their mean, or as the operation declares."""

from __future__ import annotations

import math

import pytest

import hybridflow as hf
from hybridflow.cluster.future import joined_metrics
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

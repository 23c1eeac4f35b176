"""Estimators and losses as values: they stand wherever a name with options does, travel, and compare."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, is_dataclass

import cloudpickle
import pytest

import hybridflow as hf
from hybridflow.algorithms import policy_loss, value_loss
from hybridflow.algorithms.registry import ESTIMATORS, POLICY_LOSSES, VALUE_LOSSES, find_estimator
from hybridflow.errors import ConfigError

NEEDED = {"gdpo": {"components": ("a",)}, "safe_rlhf": {"lagrange": 0.5}}
MAKERS = {
    **{name: (find_estimator, cls) for name, cls in ESTIMATORS.items()},
    **{f"{name} loss": (lambda loss, given: policy_loss(loss, **given), cls) for name, cls in POLICY_LOSSES.items()},
    **{f"{name} loss": (lambda loss, given: value_loss(loss, **given), cls) for name, cls in VALUE_LOSSES.items()},
}


@pytest.mark.parametrize("case", MAKERS)
def test_a_name_with_options_is_a_frozen_value(case):
    make, cls = MAKERS[case]
    name = case.removesuffix(" loss")
    options = NEEDED.get(name, {})
    value = cls(**options)
    assert make(name, options) == value == make(value, {})
    assert getattr(hf.algorithms, cls.__name__) is cls
    assert is_dataclass(value)
    for send in (pickle, cloudpickle):
        sent = send.loads(send.dumps(value))
        assert sent == value
        assert (sent.reads, repr(sent)) == (value.reads, repr(value))
    first = fields(value)[0].name if fields(value) else "reads"
    with pytest.raises(FrozenInstanceError):
        setattr(value, first, None)
    with pytest.raises(ConfigError, match=f"{cls.__name__} has no setting 'no_such_option'"):
        make(name, {**options, "no_such_option": 1})
    with pytest.raises(ConfigError, match="is a class"):
        make(cls, {})
    with pytest.raises(ConfigError, match="has its options in it"):
        make(value, {"gamma": 1.0})


def test_a_value_of_another_kind_is_refused():
    for make in (lambda: find_estimator(hf.PPO(), {}), lambda: policy_loss(hf.GAE()), lambda: value_loss(hf.GAE())):
        with pytest.raises(ConfigError, match="of another kind"):
            make()

"""Strategy values: validated when written, nearest names in messages, learning-rate schedules."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridflow as hf
from hybridflow.config import SGD, VLLM, Adam, Megatron, Sampling, TrainStrategy
from hybridflow.errors import ConfigError, PlacementError
from hybridflow.settings import constructor_settings, local_path, own_settings
from hybridflow.topology import RankGrid


def test_a_wrong_name_gets_the_nearest_setting():
    assert Adam(lr=1e-3, betas=[0.9, 0.99]) == Adam(lr=1e-3, betas=(0.9, 0.99))
    with pytest.raises(ConfigError, match=r"Adam has no setting 'weight_decai'. Did you mean 'weight_decay'"):
        Adam(lr=1e-3, weight_decai=0.1)
    with pytest.raises(ConfigError, match="Adam needs lr="):
        Adam(eps=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Adam(lr=-1), r"Adam\(lr=-1\)"),
        (lambda: Adam(lr=float("nan")), "lr=nan"),
        (lambda: Adam(lr=None), "lr=None"),
        (lambda: Adam(lr=1, betas=(0.9, 1.0)), "betas"),
        (lambda: Adam(lr=1, betas=(0.9,)), "betas"),
        (lambda: Adam(lr=1, schedule="cosin"), "'cosin'.* Did you mean 'cosine'"),
        (lambda: Adam(lr=1, schedule="linear"), "needs total_steps"),
        (lambda: Adam(lr=1, warmup_steps=1.5), "warmup_steps=1.5"),
        (lambda: SGD(lr=1, momentum=-0.1), "momentum"),
        (lambda: Megatron(tp=0), "tp=0"),
        (lambda: Megatron(packed="no"), r"Megatron\(packed='no'\): give True or False"),
        (lambda: Megatron(pp=True), "pp=True"),
        (lambda: Megatron(micro_tokens=0), "micro_tokens=0"),
        (lambda: Megatron(pp=2, stage_layers=(3,)), r"stage_layers=\(3,\).* each of the pp=2 stages"),
        (lambda: Megatron(pp=2, stage_layers=[3, 0]), r"stage_layers=\(3, 0\).* at least 1"),
        (lambda: Megatron(stage_layers=4), "stage_layers=4"),
        (lambda: Megatron(dtype="bfloat"), "'bfloat'.* Did you mean 'bfloat16'"),
        (lambda: Sampling(max_tokens=0), "max_tokens=0"),
        (lambda: Sampling(n=0), "n=0"),
        (lambda: Sampling(logit_bias={5.7: 1}), "give numbers by ids of tokens, each once"),
        (lambda: Sampling(logit_bias={"5": 1, 5: 2}), "give numbers by ids of tokens, each once"),
        (lambda: Sampling(stop_token_ids=("<|im_end|>",)), "texts go into stop="),
        (lambda: Sampling(stop=("",)), "not empty"),
        (lambda: Sampling(top_p=0), "top_p=0"),
        (lambda: Sampling(top_p=1.5), "top_p=1.5"),
        (lambda: Sampling(top_k=-1), "top_k=-1"),
        (lambda: Sampling(temperature=0), "use greedy=True"),
        (lambda: VLLM(tp=0), "tp=0"),
        (lambda: VLLM(memory_fraction=1), "memory_fraction=1"),
        (lambda: VLLM(sampling=Sampling(top_p=7)), "top_p=7"),
        (lambda: VLLM(dtype="float8"), "'float8'"),
    ],
)
def test_bad_values_say_which(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_config_errors_are_value_errors():
    with pytest.raises(ValueError):
        Sampling(n=-1)


@pytest.mark.parametrize(
    ("strategy", "devices", "grid"),
    [
        (Megatron(), 1, RankGrid()),
        (Megatron(tp=2, pp=2), 8, RankGrid(p=2, t=2, d=2)),
        (Megatron(tp=4, dp=2), 8, RankGrid(t=4, d=2)),
        (Megatron(), 5, RankGrid(d=5)),
    ],
)
def test_data_parallel_size_follows_from_the_pool(strategy, devices, grid):
    assert isinstance(strategy, TrainStrategy)
    assert strategy.grid(devices) == grid


@pytest.mark.parametrize(
    ("strategy", "devices", "message"),
    [
        (Megatron(tp=4, pp=4), 8, r"4\*4\*1 = 16 devices, the pool has 8. Use Megatron\(tp=4, pp=4\) on 16 devices"),
        (Megatron(tp=3), 8, r"^Megatron\(tp=3, pp=1\) needs .* the pool has 8. .* on 9 devices"),
        (Megatron(tp=2, dp=2), 8, r"= 4 devices, the pool has 8. Use Megatron\(tp=2, pp=1, dp=4\)"),
    ],
)
def test_sizes_that_do_not_fit_the_pool(strategy, devices, message):
    with pytest.raises(PlacementError, match=message):
        strategy.grid(devices)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 64))
def test_grid_uses_every_device_or_refuses(tp, pp, devices):
    if devices % (tp * pp):
        with pytest.raises(PlacementError):
            Megatron(tp=tp, pp=pp).grid(devices)
    else:
        assert Megatron(tp=tp, pp=pp).grid(devices).size == devices


def test_learning_rate_schedules():
    assert [SGD(lr=2.0).lr_at(step) for step in (0, 7, 1000)] == [2.0] * 3
    warm = SGD(lr=2.0, warmup_steps=4)
    assert [warm.lr_at(step) for step in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    line = SGD(lr=1.0, schedule="linear", warmup_steps=2, total_steps=12, min_lr=0.5)
    assert [line.lr_at(step) for step in (0, 1, 2, 7, 12, 99)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]
    cosine = Adam(lr=1.0, schedule="cosine", total_steps=10)
    assert cosine.lr_at(5) == pytest.approx(0.5)
    assert cosine.lr_at(2) == pytest.approx(0.5 * (1 + math.cos(0.2 * math.pi)))
    assert cosine.lr_at(10) == pytest.approx(0)


@given(st.sampled_from(["constant", "linear", "cosine"]), st.integers(0, 20), st.integers(1, 50), st.floats(0, 1e-3))
def test_learning_rate_stays_in_range_and_falls_after_warm_up(schedule, warmup, total, low):
    options = {"schedule": schedule, "warmup_steps": warmup, "total_steps": total}
    if schedule != "constant" and warmup > total:
        with pytest.raises(ConfigError, match="the warm-up would not end"):
            Adam(lr=1e-3, **options)
        return
    optimizer = Adam(lr=1e-3, min_lr=low, **options)
    rates = [optimizer.lr_at(step) for step in range(80)]
    assert all(0 < rate <= 1e-3 + 1e-12 or rate >= low - 1e-12 for rate in rates)
    assert all(a >= b - 1e-12 for a, b in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
    if schedule != "constant" and total > warmup:
        assert rates[-1] == pytest.approx(low)


def test_engine_defaults_and_changes_of_sampling():
    engine = VLLM(tp=2, sampling=Sampling(max_tokens=64, temperature=0.7, stop="\n"))
    assert engine == VLLM(tp=2, sampling={"max_tokens": 64, "temperature": 0.7, "stop": ["\n"]})  # of YAML
    assert replace(engine.sampling, greedy=True, n=4).n == 4
    with pytest.raises(ConfigError, match=r"Sampling has no setting 'temprature'. Did you mean 'temperature'"):
        VLLM(sampling={"temprature": 1.0})
    with pytest.raises(ConfigError, match="n=0"):
        replace(engine.sampling, n=0)
    with pytest.raises(ConfigError, match=r"VLLM has no setting 'max_tokens'.*sampling=hf.Sampling\(max_tokens=...\)"):
        VLLM(max_tokens=5)
    with pytest.raises(ConfigError, match=r"VLLM\(sampling=5\)"):
        VLLM(sampling=5)
    assert Sampling(temperature=0, greedy=True).greedy
    assert Sampling().longest == 256


@pytest.mark.parametrize(
    "value",
    [
        Adam(lr=1, betas=[0.9, 0.95]),
        SGD(lr=1),
        Megatron(pp=2, stage_layers=[2, 1]),
        Sampling(stop="a"),
        VLLM(sampling=Sampling(stop=["a", "b"])),
    ],
)
def test_strategies_are_plain_values(value):
    assert pickle.loads(pickle.dumps(value)) == value
    assert hash(value) == hash(pickle.loads(pickle.dumps(value)))
    with pytest.raises(AttributeError):
        value.lr = 3


def test_a_number_that_is_a_text_is_named_as_one():
    with pytest.raises(ConfigError, match=r"Adam\(lr='1e-6'\): must be at least 0, and this is a text"):
        Adam(lr="1e-6")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("made", "wrong", "meant"),
    [
        (lambda **more: hf.PromptLoader([{"prompt": "a"}], **more), "batchsize", "batch_size"),
        (lambda **more: hf.TextLoader(["a"], **more), "maxtokens", "max_tokens"),
        (lambda **more: hf.Tracker("never", **more), "totl", "total"),
        (lambda **more: hf.Checkpoints("never", **more), "evry", "every"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(made, wrong, meant):
    with pytest.raises(ConfigError, match=f": no setting '{wrong}'. Did you mean '{meant}'"):
        made(**{wrong: 1})


@pytest.mark.parametrize("address", ["s3://bucket/run", "gs://bucket", "hf://a/b", Path("s3://bucket/run")])
@pytest.mark.parametrize("made", [hf.Tracker, lambda at: hf.Checkpoints("s3://bucket/run", staging=at)])
def test_an_address_is_no_folder_of_this_machine(made, address, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is an address of another machine"):
        made(address)
    assert not list(tmp_path.iterdir())
    assert local_path("runs/a:b") == "runs/a:b"


class Base:
    def __init__(self, *, model: str, train: int = 1, generate: int | None = None) -> None:
        self.built = {"model": model, "train": train, "generate": generate}


class Passing(Base):
    def __init__(self, *, pace: float, **settings: Any) -> None:
        super().__init__(**settings)


class Fixed(Base):
    def __init__(self, **settings: Any) -> None:
        super().__init__(model="m", train=2, **settings)


class Taking(Passing):
    def __init__(this, **settings: Any) -> None:  # noqa: N805
        this.judge = settings.pop("judge", None)
        super().__init__(**settings)


@pytest.mark.parametrize(
    ("worker", "given", "known", "built"),
    [
        (Base, {"model": "m"}, {"train": 1, "generate": None}, {"train": 1}),
        (Passing, {"pace": 1.0, "model": "m"}, {"train": 1, "generate": None}, {"train": 1}),
        (Passing, {"pace": 1.0, "model": "m", "train": 3}, {"train": 3}, {"train": 3}),
        (Fixed, {}, {"generate": None}, {"model": "m", "train": 2}),
        (Fixed, {"generate": 4}, {"generate": 4}, {"train": 2, "generate": 4}),
        (Taking, {"judge": 5, "pace": 1.0, "model": "m"}, {"judge": 5, "train": 1}, {"model": "m", "train": 1}),
    ],
)
def test_base_classes_have_defaults_for_what_is_passed_on(worker, given, known, built):
    settings = constructor_settings(worker, given)
    assert settings.items() >= (given | known).items()
    assert worker(**own_settings(worker, settings)).built.items() >= built.items()


def test_what_a_constructor_does_not_take_is_refused():
    with pytest.raises(ConfigError, match=r"Base: no setting 'trian'\. Did you mean 'train'"):
        constructor_settings(Base, {"model": "m", "trian": 1})
    with pytest.raises(ConfigError, match="Passing: missing a required argument: 'pace'"):
        constructor_settings(Passing, {"model": "m"})

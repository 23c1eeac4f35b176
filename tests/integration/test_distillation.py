"""Distillation on real hosts: a teacher and a student of different sizes and layouts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import hybridflow as hf
from hybridflow.errors import ConfigError, MissingColumnError
from tests import tiny_models
from tests.contracts.example_models import load_model
from tests.tiny_models import make_rows

ROWS = 9


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("distillation")


@pytest.fixture(scope="module")
def student(directory) -> Path:
    return tiny_models.make_policy(directory / "student", tokenizer=False)


@pytest.fixture(scope="module")
def teacher(directory) -> Path:
    """Another model over the same vocabulary, with other sizes and weights."""
    return tiny_models.make_policy(directory / "teacher", seed=7, tokenizer=False, hidden_size=96)


def mean_divergence(student: Path, teacher: Path, rows: hf.Batch, temperature: float) -> float:
    """KL(student || teacher) over the vocabulary, in transformers and float64."""
    own, other = load_model(student).double(), load_model(teacher).double()
    total, columns = 0.0, ("prompt_ids", "response_ids", "response_mask")
    for prompt, response, mask in zip(*(rows[name].rows() for name in columns), strict=True):
        ids = torch.cat([prompt, response]).long()[None]
        at = slice(len(prompt) - 1, ids.shape[1] - 1)
        with torch.no_grad():
            p, q = ((m(ids).logits[0, at] / temperature).log_softmax(-1) for m in (own, other))
        total += float(((p.exp() * (p - q)).sum(-1) * mask).sum())
    return total / float(rows["response_mask"].values.sum())


def test_a_student_learns_from_a_teacher_in_another_layout(pool, student, teacher):
    """One rank's teacher in FSDP, a student in Megatron on two: the divergence falls, over the vocabulary and top k."""
    rows = make_rows(ROWS).with_columns(temperature=torch.full((ROWS,), 0.7))
    reference = hf.ReferenceWorker.on(pool[:1], name="teacher", model=teacher, train=hf.FSDP())
    actor = hf.ActorWorker.on(
        pool[:2],
        name="student",
        model=student,
        train=hf.Megatron(tp=2, micro_tokens=40),
        optim=hf.Adam(lr=3e-3),
        teacher=teacher,
    )
    batch = hf.BatchRef.from_batch(rows)
    batch |= reference.compute_ref_hidden_states(batch)
    batch |= reference.compute_ref_top_k(batch, k=4)
    found = [actor.update_actor(batch, loss="gkd", beta=1.0).get() for _ in range(6)]
    want = mean_divergence(student, teacher, rows, 0.7)
    assert found[0]["actor/divergence"] == pytest.approx(want, rel=1e-5)
    assert all(metrics["actor/skipped"] == 0 for metrics in found)
    assert found[-1]["actor/divergence"] < 0.9 * want
    top = [actor.update_actor(batch, loss=hf.algorithms.GKD(over="top_k", beta=1.0)).get() for _ in range(3)]
    assert top[-1]["actor/divergence"] < top[0]["actor/divergence"] < found[-1]["actor/divergence"]
    memory = actor.memory()
    assert all("memory/teacher" not in held for held in memory)
    broken = batch.get()
    broken["ref_hidden_states"].values[5] = float("nan")
    skipped = actor.update_actor(hf.BatchRef.from_batch(broken), loss="gkd", minibatches=1).get()
    assert skipped["actor/skipped"] == 1
    half = rows.with_columns(ref_hidden_states=batch.get()["ref_hidden_states"].to(torch.bfloat16))
    assert actor.update_actor(hf.BatchRef.from_batch(half), loss="gkd").get()["actor/skipped"] == 0
    actor.close()
    reference.close()


def test_what_cannot_work_is_refused_on_the_driver(pool, student, teacher, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": config["vocab_size"] + 1}))
    settings = {"model": student, "train": hf.Megatron(), "optim": hf.SGD(lr=0.1)}
    with pytest.raises(ConfigError, match=f"has a vocabulary of {config['vocab_size'] + 1} tokens"):
        hf.ActorWorker.on(pool[:1], **settings, teacher=other)
    (other / "config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    with pytest.raises(ConfigError, match=r"may scale or cap its logits.*over='top_k'"):
        hf.ActorWorker.on(pool[:1], **settings, teacher=other)
    (other / "config.json").write_text(json.dumps(config))
    own = tmp_path / "student"
    shutil.copytree(student, own)
    for home, table in ((own, {"a": 0, "b": 1}), (other, {"a": 1, "b": 0})):
        (home / "tokenizer.json").write_text(json.dumps({"model": {"vocab": table}}))
    with pytest.raises(ConfigError, match="has another tokenizer"):
        hf.ActorWorker.on(pool[:1], **{**settings, "model": own}, teacher=other)
    actor = hf.ActorWorker.on(pool[:1], name="lonely", **settings)
    reference = hf.ReferenceWorker.on(pool[:1], name="teaches", model=teacher, train=hf.Megatron())
    batch = hf.BatchRef.from_batch(make_rows(4))
    with pytest.raises(ConfigError, match=r"give ActorWorker.on\(..., teacher=\)"):
        actor.update_actor(batch, loss="gkd")
    with pytest.raises(MissingColumnError, match="ref_top_ids"):
        actor.update_actor(batch, loss="gkd", over="top_k")
    for k in (0, config["vocab_size"] + 1, 2.0):
        with pytest.raises(ConfigError, match="give a whole number from 1 to"):
            reference.compute_ref_top_k(batch, k=k)
    actor.close()
    reference.close()

"""hf.Run: one call in the loop does what a tracker, checkpoints and an evaluation do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hybridflow as hf
from hybridflow.errors import ConfigError, HostLostError
from recipes.small_model import SmallModel

pytestmark = pytest.mark.usefixtures("no_parts")


class Loader:
    """Counts to `steps`, from where its state says."""

    def __init__(self, steps: int) -> None:
        self.steps, self.at = steps, 0

    def __iter__(self) -> Any:
        while self.at < self.steps:
            self.at += 1
            yield hf.Batch({"prompt": ["1+1="], "answer": ["2"]})

    def state(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class HeldOut:
    """Answers get better, and then worse."""

    name, best, every = "held_out/reward", "held_out/reward", 2

    def __init__(self) -> None:
        self.measured: list[str] = []

    def measure(self, when: str, tracker: hf.Tracker) -> None:
        self.measured.append(when)
        tracker.note(**{f"accuracy_{when}": 0.5})

    def after(self, step: int) -> Any:
        class Evaluation:
            def get(self) -> dict[str, float]:
                return {"held_out/reward": {2: 0.5, 4: 0.9, 6: 0.7}[step]} if step % 2 == 0 else {}

        return Evaluation()


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def make(directory: Path, held_out: Any, **settings: Any) -> hf.Run:
    return hf.Run(directory, console=False, held_out=held_out, **settings)


def train(run: hf.Run, until: int = 6) -> list[int]:
    done = []
    for batch in run.loop(Loader(6)):
        run.step(batch, {"loss": 1.0 / (1 + run.checkpoints.done)})
        done.append(run.checkpoints.done)
        if run.checkpoints.done == until:
            run.checkpoints.save()
            raise KeyboardInterrupt
    return done


def test_a_run_is_a_tracker_checkpoints_and_an_evaluation(tmp_path):
    held_out = HeldOut()
    run = make(tmp_path / "run", held_out, every=2)
    assert train(run, until=7) == [1, 2, 3, 4, 5, 6]
    run.finish()
    assert held_out.measured == ["before", "after"]
    assert [(line["step"], line.get("held_out/reward")) for line in lines(run.directory)] == [
        (1, None),
        (2, 0.5),
        (3, None),
        (4, 0.9),
        (5, None),
        (6, 0.7),
    ]
    assert [line["loss"] for line in lines(run.directory)] == pytest.approx([1 / n for n in range(1, 7)])
    notes = json.loads((run.directory / "notes.json").read_text())
    assert notes["best_checkpoint"] == "step-00000004, held_out/reward 0.900"


def test_a_run_that_was_stopped_continues_without_a_second_first_evaluation(tmp_path):
    directory = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train(make(directory, HeldOut(), every=2), until=4)
    held_out = HeldOut()
    run = make(directory, held_out, every=2)
    assert train(run, until=7) == [5, 6]
    run.finish()
    assert held_out.measured == ["after"]
    assert [line["step"] for line in lines(directory)] == [1, 2, 3, 4, 5, 6]


def test_held_out_prompts_are_those_of_a_file_or_a_batch(tmp_path):
    asked: list[hf.Batch] = []

    class Actor:
        @staticmethod
        def generate_sequences(prompts: hf.Batch, **sampling: Any) -> Any:
            assert sampling == {"greedy": True, "n": 1}
            asked.append(prompts)
            return hf.BatchRef.from_batch(prompts.with_columns(response=["x"] * len(prompts)))

    class Reward:
        @staticmethod
        def compute_reward(batch: hf.BatchRef) -> hf.BatchRef:
            return hf.BatchRef.from_batch(batch.get().with_columns(rewards=torch.tensor([1.0, 0.0])))

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"question": "a", "answer": {"x": 1}}\n{"question": "b", "answer": {"x": 2}}\n')
    actor, reward = Actor(), Reward()
    held_out = hf.HeldOut(actor, reward, file, every=3, options={"prompt": "question"})  # type: ignore[arg-type]
    assert held_out.after(2).get() == {}
    assert held_out.after(3).get() == {"held_out/reward": 0.5}
    assert list(asked[0]["answer"]) == [{"x": 1}, {"x": 2}]
    SmallModel(characters="abq+1= ").tokenizer().save_pretrained(tmp_path / "model")
    kind: dict[str, Any] = {"prompt": "question", "tokenizer": str(tmp_path / "model"), "max_prompt_tokens": 9}
    held_out = hf.HeldOut(actor, reward, file, options=kind)  # type: ignore[arg-type]
    assert len(held_out.prompts["prompt_ids"]) == 2
    with pytest.raises(ConfigError, match=r"toknizer.*tokenizer"):
        hf.HeldOut(actor, reward, file, options={"toknizer": "x"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="these prompts are read"):
        hf.HeldOut(actor, reward, asked[0], options={"prompt": "question"})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="every=-1: give iterations"):
        hf.HeldOut(actor, reward, asked[0], every=-1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"evry.*every"):
        hf.HeldOut(actor, reward, asked[0], evry=1)  # type: ignore[call-arg, arg-type]


def test_held_out_texts_do_not_stay_with_the_hosts_that_a_run_may_lose():
    texts = hf.Batch({"prompt_ids": [[1]], "response_ids": [[2, 3]]})
    held_out = hf.HeldOutLoss(lambda batch: hf.BatchRef.from_batch(texts), hf.BatchRef.from_batch(texts), "sft")
    assert isinstance(held_out.texts, hf.Batch)
    assert held_out.texts.select("prompt_ids", "response_ids").equal(texts)


def test_a_run_stops_by_a_metric_as_if_the_loader_had_ended(tmp_path):
    seen: list[float] = []

    def stop(metrics: Any) -> bool:
        seen.append(metrics["loss"])
        return metrics["loss"] < 0.4

    held_out = HeldOut()
    run = make(tmp_path / "run", held_out, every=4, stop=stop)
    assert train(run, until=7) == [1, 2, 3, 4]  # the third has a loss of 1/3
    run.finish()
    assert seen == pytest.approx([1.0, 1 / 2, 1 / 3])
    assert held_out.measured == ["before", "after"]
    assert run.checkpoints.newest is not None
    assert run.checkpoints.newest.name == "step-00000004"
    assert len(lines(tmp_path / "run")) == 4


def test_the_metrics_of_an_iteration_that_lost_its_host_stop_nothing(tmp_path, monkeypatch):
    class Lost:
        def get(self) -> dict[str, float]:
            raise HostLostError("the host of actor rank 0 is gone")

    seen: list[float] = []
    run = make(tmp_path / "run", None, every=None, stop=lambda metrics: bool(seen.append(metrics["loss"])))
    monkeypatch.setattr(run.tracker, "log", lambda *metrics: None)  # it belongs to the driver that was restarted
    for batch in run.loop(Loader(6)):
        lost = run.checkpoints.done == 2
        run.step(batch, Lost() if lost else {"loss": float(run.checkpoints.done)})
        run.checkpoints.restarts += lost
    assert seen == [0.0, 3.0, 4.0]


@pytest.mark.parametrize(("steps", "continues"), [(6, False), (9, True)])
def test_a_run_that_was_stopped_by_a_metric_has_ended(tmp_path, cluster, caplog, steps, continues):
    for limit in (6, steps):
        run = make(tmp_path / "run", None, stop=lambda metrics: metrics["loss"] < 0.4)
        loader, done = Loader(limit), []
        for batch in run.loop(loader):
            run.step(batch, {"loss": 1.0 / (1 + run.checkpoints.done)})
            done.append(run.checkpoints.done)
        run.finish()
        run.checkpoints._end()  # as the session does
        cluster.parts.clear()
        cluster.iterations.done_before = 0
    assert done[0] == (5 if continues else 1)
    assert ("this run has ended" in caplog.text) != continues


def test_a_step_without_its_batch_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"run.step\(batch, \*metrics\): the batch comes first, and this is a dict"):
        hf.Run(tmp_path / "run", console=False).step({"reward/mean": 1.0})  # type: ignore[arg-type]

"""Checkpoints on real hosts: killed and continued runs, lost hosts, other layouts, damaged files, full disks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hybridflow as hf
from hybridflow.engines.checkpoint.manifest import CheckpointManifest, saved_steps
from hybridflow.protocols.operation import register
from hybridflow.protocols.protocol import ONE_TO_ALL
from tests import tiny_models
from tests.tiny_models import make_rows
from tests.warm_programs import WarmPrograms

DRIVER = Path(__file__).with_name("resuming_driver.py")
ROOT = Path(__file__).resolve().parents[2]
STEPS = 6


@dataclass(frozen=True)
class Runs:
    """Runs `resuming_driver.py` in directories of its own."""

    directory: Path
    model: Path
    prompts: Path
    warm: WarmPrograms

    def run(self, name: str, status: int = 0, **options: Any) -> Path:
        run = self.directory / name
        words = [str(run), str(self.model), str(self.prompts), str(STEPS)]
        words += [f"{key}={value}" for key, value in options.items()]
        (run / "log.txt").write_text(self.warm.run(DRIVER, *words, status=status).stderr)
        return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory, warm) -> Runs:
    directory = tmp_path_factory.mktemp("runs")
    prompts = directory / "prompts.jsonl"
    texts = [f"{'abc xyz'[i % 5 :]} k{'abcdefg'[i % 7]}" for i in range(20)]  # two and a half batches in an epoch
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return Runs(directory, tiny_models.make_policy(directory / "model"), prompts, warm)


@pytest.fixture(scope="module")
def undisturbed(runs) -> Path:
    """The run that nothing disturbs."""
    return runs.run("undisturbed", every=100, record=1)


def records(run: Path) -> dict[int, dict[str, Any]]:
    """By step what the driver saw; the last time, if an iteration was done twice."""
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def check_equal(run: Path, other: Path, steps: Iterable[int]) -> None:
    """Figures, samples and trained parameters are the same, bit for bit, and metrics have every step once."""
    one, two = records(run), records(other)
    for step in steps:
        assert one[step] == two[step], f"iteration {step} differs"
    weights, others = (load_file(path / "model" / "model.safetensors") for path in (run, other))
    assert all(weights[name].equal(others[name]) for name in weights)
    written = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert written == [*range(1, STEPS + 1)]


@pytest.fixture(scope="module")
def killed(runs) -> Path:
    """A run whose driver was killed in the middle of an epoch of the data, an iteration after a checkpoint."""
    run = runs.run("killed", status=-signal.SIGKILL, every=2, die=3, record=1)
    assert [path.name for path in saved_steps(run / "checkpoints")] == ["step-00000002"]
    return run


@pytest.fixture(scope="module")
def stopped(runs, killed) -> Path:
    """The same run, continued until SIGTERM, which saves a checkpoint of its own."""
    return runs.run("killed", status=143, every=100, ask=4, asynchronous=0, record=1)


def test_sigterm_saves_in_a_run_that_was_killed_before(stopped):
    assert [path.name for path in saved_steps(stopped / "checkpoints")] == ["step-00000005", "step-00000002"]


def test_a_killed_and_stopped_driver_continues_exactly(runs, undisturbed, stopped):
    """What was done since a checkpoint is done once more, alike; the same command continues each time. Of iteration 5
    the driver wrote nothing: SIGTERM ended it there."""
    run = runs.run("killed", every=100, asynchronous=0, record=1)
    check_equal(run, undisturbed, [*range(1, 5), 6])


@pytest.mark.slow
def test_lost_hosts_are_replaced(runs, undisturbed):
    """One dies, and one stops to answer."""
    faults = "update_actor:3:SIGKILL,generate_sequences:5:SIGSTOP"
    run = runs.run("lost", every=2, fault=faults, deadline=20, peers=30, record=1, retry=1)
    check_equal(run, undisturbed, range(1, STEPS + 1))
    assert "no answer" in "".join(path.read_text() for path in run.glob("stacks-*.txt"))
    assert "restart 2 of 3" in (run / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["generate_sequences", "update_actor", "update_critic"])
@pytest.mark.parametrize("layout", ["d2", "hsdp", "zero1", "t2"])
def test_a_killed_trainer_continues_from_memory_without_a_checkpoint(runs, layout, fault):
    if not (runs.directory / layout).exists():
        runs.run(layout, every=100, record=1, layout=layout)
    options = {"every": 100, "record": 1, "layout": layout, "retry": 1, "in_memory": 1, "deadline": 20, "peers": 30}
    run = runs.run(f"{layout} {fault}", fault=f"{fault}:4:SIGKILL", **options)
    check_equal(run, runs.directory / layout, range(1, STEPS + 1))
    said = (run / "log.txt").read_text()
    assert re.search(r"continuing after [23] iterations, from memory .*actor: [0-9,]+ bytes from memory of", said)
    assert "continuing from" not in said  # a checkpoint
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert any(event.get("kind") == "restart" and "bytes from memory of" in str(event) for event in events)


@pytest.mark.parametrize("layout", ["t2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp", "zero1"))])
def test_a_host_killed_in_the_middle_of_a_return_is_replaced(runs, undisturbed, layout):
    """While the reference's weights come back from host memory, in iteration 3: results are those without offload."""
    wanted = undisturbed if layout == "t2" else runs.directory / layout
    if not wanted.exists():
        runs.run(layout, every=100, record=1, layout=layout)
    run = runs.run(f"{layout} killed in a copy", dies=1, retry=1, record=1, layout=layout)
    assert (run / "died").exists()
    assert "is lost: its process died" in (run / "log.txt").read_text()
    check_equal(run, wanted, range(1, STEPS + 1))


@pytest.mark.slow
def test_a_host_lost_while_groups_are_built_again_is_one_more_restart(runs, undisturbed):
    faults = "update_actor:3:SIGKILL,__init__:3:SIGKILL"
    run = runs.run("lost-twice", every=2, fault=faults, deadline=20, peers=30, record=1, retry=1)
    check_equal(run, undisturbed, range(1, STEPS + 1))
    assert "restart 2 of 3" in (run / "log.txt").read_text()


@pytest.mark.slow
def test_a_host_lost_while_idle_is_replaced_by_the_loop_itself(runs, undisturbed):
    """No error reaches the driver's loop, which asks for no result."""
    run = runs.run("lost-idle", every=2, fault="idle:3:SIGKILL", pause=3, deadline=20)
    weights, others = (load_file(path / "model" / "model.safetensors") for path in (run, undisturbed))
    assert all(weights[name].equal(others[name]) for name in weights)
    written = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert written == [*range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ways", [{"die": 3}, {"fault": "generate_sequences:4:SIGKILL", "rollout": 1, "retry": 1}], ids=["killed", "lost"]
)
def test_a_moving_average_continues_exactly(runs, ways):
    """In a driver that was killed, and after a lost host of the rollout: the average is that of the checkpoint."""
    apart = {name: ways[name] for name in ("rollout",) if name in ways}
    undisturbed = runs.run(f"average-{len(apart)}", every=100, record=1, ema=0.5, **apart)
    once: dict[str, Any] = {"every": 2, "record": 1, "ema": 0.5, "deadline": 20, "peers": 30, **ways}
    run = runs.run(f"average-lost-{len(apart)}", status=-signal.SIGKILL if "die" in ways else 0, **once)
    if "die" in ways:
        run = runs.run(run.name, every=100, record=1, ema=0.5)
    check_equal(run, undisturbed, range(1, STEPS + 1))


@pytest.fixture(scope="module")
def apart(runs) -> Path:
    """GRPO with a rollout on devices of its own."""
    return runs.run("apart", every=100, rollout=1, record=1)


@pytest.mark.slow
def test_lost_hosts_that_only_generate_cost_no_training(runs, apart):
    """There is no checkpoint to go back to: the iteration that was under way is done again, and no other."""
    faults = "generate_sequences:2:SIGKILL,idle:4:SIGKILL"
    run = runs.run("apart-lost", every=100, rollout=1, record=1, retry=1, fault=faults, pause=4)
    lines = [json.loads(line)["step"] for line in (run / "record.jsonl").read_text().splitlines()]
    assert lines == [*range(1, STEPS + 1)]
    check_equal(run, apart, range(1, STEPS + 1))


@pytest.mark.slow
def test_a_stream_continues_rows_of_lost_hosts(runs):
    """No group is lost or comes twice."""
    options = {"every": 100, "rollout": 1, "stream": 1, "record": 1, "retry": 1}
    run = runs.run("stream-lost", **options, fault="advance_rows:2:SIGKILL")
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
    groups = [group for line in lines for group in line["rows"]["group_id"]]
    assert sorted(groups) == [group for group in range(8 * STEPS) for _ in range(2)]
    for version, line in enumerate(lines):
        versions = line["rows"]["policy_version"]
        assert all(version - 2 <= min(row) <= max(row) <= version for row in versions)
        assert all(len(row) == len(ids) for row, ids in zip(versions, line["rows"]["response_ids"], strict=True))
    assert "placed on new hosts" in (run / "log.txt").read_text()
    assert lines[-1]["figures"]["stream/moved"] > 0  # groups that continue on the new hosts


@pytest.mark.slow
def test_elastic_devices_continue_after_lost_hosts(runs):
    """One dies in a switch, one answers no more while it generates: no group is lost or comes twice."""
    options = {"every": 3, "rollout": 1, "elastic": 1, "record": 1, "retry": 1, "layout": "fsdp"}
    faults = "resize:4:SIGKILL,advance_rows:8:SIGSTOP"
    run = runs.run("elastic-lost", **options, fault=faults, deadline=20, peers=50)
    lines = [json.loads(line) for line in (run / "record.jsonl").read_text().splitlines()]
    last = {line["step"]: line for line in lines}  # those since the checkpoint were done again
    assert list(last) == [*range(1, 2 * STEPS + 1)]
    groups = [group for line in last.values() for group in line["rows"]["group_id"]]
    assert sorted(groups) == [group for group in range(8 * STEPS) for _ in range(2)]
    switches = [json.loads(line) for line in (run / "switches.jsonl").read_text().splitlines()]
    assert {switch["target"]["actor"] for switch in switches} >= {1, 3}
    log = (run / "log.txt").read_text()
    assert "restart 2 of 3" in log
    assert "has not answered for " in log


# In this process


class Counter:
    """Counts its calls; part of checkpoints, because it has a state."""

    def __init__(self) -> None:
        self.calls = 0

    @register(ONE_TO_ALL, blocking=True)
    def count(self) -> int:
        self.calls += 1
        return self.calls

    def state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


LORA = hf.LoRA(rank=3, alpha=8)
LAYOUTS: dict[str, Any] = {
    "p2d2": hf.Megatron(pp=2),
    "t2d2": hf.Megatron(tp=2),
    "fsdp": hf.FSDP(),
    "hsdp": hf.FSDP(replicate=2),
    "zero3": hf.ZeRO(stage=3),
    "zero1": hf.ZeRO(stage=1),
    "lora-fsdp": hf.FSDP(lora=LORA),
    "lora-p2t2": hf.Megatron(pp=2, tp=2, sequence_parallel=True, lora=LORA),
    "lora-t2d2": hf.Megatron(tp=2, lora=LORA),
}
WAYS = [("p2d2", "t2d2", "fsdp"), ("t2d2", "zero3", "zero1"), ("fsdp", "hsdp", "p2d2")]
ADAM = hf.Adam(lr=0.02, eps=1e-3, warmup_steps=2, schedule="cosine", total_steps=8)


def trained(actor: hf.WorkerGroup, seeds: range) -> list[float]:
    rows = [hf.BatchRef.from_batch(make_rows(8, seed=seed)) for seed in seeds]
    return [actor.update_actor(row, minibatches=2).get()["actor/grad_norm"] for row in rows]


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "way", [*WAYS, ("lora-fsdp", "lora-p2t2", "lora-t2d2"), ("lora-t2d2", "lora-fsdp", "lora-p2t2")]
)
def test_training_continues_in_another_layout(pool, place, no_parts, policy, tmp_path, way):
    """Three updates in one layout, and one each in three, through checkpoints: equal norms and weights."""
    alone = place(hf.ActorWorker, pool, name="alone", model=policy, train=LAYOUTS[way[0]], optim=ADAM)
    expected = trained(alone, range(3))
    weights = load_file(Path(alone.save(tmp_path / "expected", merged=True)) / "model.safetensors")
    alone.close()
    found, before = [], None
    for number, layout in enumerate(way):
        actor = place(hf.ActorWorker, pool, name="moving", model=policy, train=LAYOUTS[layout], optim=ADAM)
        if before is not None:
            hf.load(before, parts=[actor])
        found += trained(actor, range(number, number + 1))
        before = hf.save(tmp_path / f"after-{number}", parts=[actor])
        if number == len(way) - 1:
            moved = load_file(Path(actor.save(tmp_path / "moved", merged=True)) / "model.safetensors")
        actor.close()
    assert found == pytest.approx(expected, rel=1e-5)
    assert max(float((weights[name] - moved[name]).abs().max()) for name in weights) < 1e-5


def test_each_rank_writes_its_share(place, pool, no_parts, policy, tmp_path):
    actor = place(hf.ActorWorker, pool, name="shares", model=policy, train=hf.FSDP(replicate=2), optim=ADAM)
    path = Path(hf.save(tmp_path / "saved", parts=[actor]))
    manifest = CheckpointManifest.read(path)
    sizes = [manifest.files[name].bytes for name in manifest.groups["shares"].ranks]
    whole = sum(tensor.numel() for tensor in load_file(policy / "model.safetensors").values()) * 12
    assert whole <= sum(sizes) < whole * 1.2 + 4 * 60_000  # parameters and two moments, once; headers, generators
    assert max(sizes) < 1.2 * sum(sizes) / len(sizes)


@pytest.fixture
def group(place, pool, no_parts, policy) -> hf.WorkerGroup:
    return place(hf.ActorWorker, pool[0:2], name="actor", model=policy, train=hf.FSDP(), optim=ADAM)


def loader(steps: int = 4) -> hf.PromptLoader:
    return hf.PromptLoader([{"prompt": f"p{i}"} for i in range(6)], batch_size=4, steps=steps)


def run(actor: hf.WorkerGroup, checkpoints: hf.Checkpoints, steps: int = 4, stop: int = 99) -> list[float]:
    norms = []
    for _ in checkpoints.resume(loader(steps)):
        norms += trained(actor, range(checkpoints.done, checkpoints.done + 1))
        checkpoints.step({"score": -abs(checkpoints.done - 1.0)})
        if checkpoints.done == stop:
            break
    return norms


def test_checkpoints_are_kept_and_set_aside(group, tmp_path):
    first = hf.Checkpoints(tmp_path / "kept", every=1, keep=1, best="score")
    norms = run(group, first)
    assert [path.name for path in saved_steps(first.directory)] == ["step-00000004", "step-00000002"]
    best = hf.Checkpoints(tmp_path / "kept", best="score").best_checkpoint
    assert best is not None
    assert best[0].name == "step-00000002"
    assert hf.Checkpoints(tmp_path / "kept").best_checkpoint is None
    assert hf.Checkpoints(tmp_path / "kept", best="-absent").best_checkpoint is None
    again = hf.Checkpoints(tmp_path / "kept", every=1, keep=3, resume=first.directory / "step-00000002")
    assert run(group, again) == norms[2:]
    assert (tmp_path / "kept.1" / "step-00000004").is_dir()  # not the past of this run
    run(group, hf.Checkpoints(tmp_path / "kept", every=3, resume="never"))
    assert {path.name for path in saved_steps(tmp_path / "kept")} == {"step-00000003", "step-00000004"}
    assert (tmp_path / "kept.2").is_dir()


def test_a_save_without_the_metric_of_best_is_said(group, tmp_path, caplog):
    """Once: an evaluation that counts iterations anew after a resume misses every save."""
    checkpoints = hf.Checkpoints(tmp_path / "kept", every=1, best="-loss")
    run(group, checkpoints, stop=2)
    checkpoints.save()
    assert caplog.text.count("Checkpoints(best='-loss'): checkpoint 1 has no such metric") == 1


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(group, tmp_path, caplog):
    first = hf.Checkpoints(tmp_path / "c", every=1)
    run(group, first, stop=3)
    newest = first.save()
    file = next(newest.glob("actor/rank-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-40_000] ^= 4
    file.write_bytes(content)
    again = hf.Checkpoints(tmp_path / "c", every=1)
    again.resume(loader())
    assert again.done == 2
    assert str(file) in caplog.text
    for path in saved_steps(tmp_path / "c"):
        shutil.rmtree(path / "actor")
    with pytest.raises(hf.errors.CheckpointError, match="none of the 2 checkpoints"):
        hf.Checkpoints(tmp_path / "c").resume(loader())


def test_what_does_not_belong_together_is_refused(place, group, pool, policy, tmp_path):
    path = hf.save(tmp_path / "saved", parts=[group])
    other = place(hf.ActorWorker, pool[2:4], name="other", model=policy, train=hf.FSDP(), optim=ADAM)
    with pytest.raises(hf.errors.ConfigError, match="other"):
        hf.load(path, parts=[other])
    with pytest.raises(hf.errors.CheckpointError, match="exists already"):
        hf.save(path, parts=[group])
    with pytest.raises(hf.errors.ConfigError, match="state"):
        hf.save(tmp_path / "x", parts=[object()])
    with pytest.raises(hf.errors.CheckpointError, match=r"manifest\.json"):
        hf.load(tmp_path, parts=[group])
    group.close()
    changed = place(hf.ActorWorker, pool[0:2], name="actor", model=policy, train=hf.FSDP(), optim=hf.SGD(lr=0.1))
    with pytest.raises(hf.errors.CheckpointError, match="optimizer"):
        hf.load(path, parts=[changed])


def test_a_checkpoint_of_another_use_is_refused(place, pool, no_parts, policy, tmp_path):
    """Of equal tensors that another model would compute otherwise with: scale of adapters, rotation, frozen weights."""
    lora = hf.LoRA(rank=2, alpha=8)
    turned = tiny_models.make_policy(tmp_path / "turned", rope_parameters={"rope_type": "default", "rope_theta": 99.0})
    drawn = tiny_models.make_policy(tmp_path / "drawn", seed=9)

    def used(model: Path, lora: hf.LoRA) -> hf.WorkerGroup:
        return place(hf.ActorWorker, pool[0:2], name="used", model=model, train=hf.FSDP(lora=lora), optim=ADAM)

    actor = used(policy, lora)
    path = hf.save(tmp_path / "saved", parts=[actor])
    hf.load(path, parts=[actor])
    actor.close()
    for model, asked, said in (
        (policy, hf.LoRA(rank=2, alpha=16), "lora_alpha is 8.* in the checkpoint of used and 16"),
        (turned, lora, "rope_theta is 10000.0 in the checkpoint of used and 99.0 here"),
        (drawn, lora, "the frozen weights of used are not those"),
    ):
        actor = used(model, asked)
        with pytest.raises(hf.errors.CheckpointError, match=said):
            hf.load(path, parts=[actor])
        actor.close()


def test_a_failed_call_is_not_saved(group, tmp_path):
    rows = make_rows(8).with_columns(advantages=make_rows(8)["advantages"].map(lambda values: values * float("nan")))
    for _ in range(8):  # more than max_skipped
        group.update_actor(rows)
    with pytest.raises(hf.errors.HybridFlowError):
        hf.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    assert not list(tmp_path.glob(".saved*"))


def test_a_class_with_a_state_and_objects_of_the_driver_continue(place, pool, no_parts, tmp_path):
    counter = place(Counter, pool[0:2], name="counter")
    texts = loader()
    assert counter.count() == [1, 1]
    next(texts.drawn())
    path = hf.save(tmp_path / "saved", parts={"counter": counter, "texts": texts})
    assert counter.count() == [2, 2]
    hf.load(path, parts={"counter": counter, "texts": texts})
    assert counter.count() == [2, 2]
    assert texts.state()["drawn"] == 1


def test_a_full_disk_leaves_the_checkpoint_before(group, tmp_path, caplog):
    small = tmp_path / "small"
    small.mkdir()
    size = sum(tensor.numel() for tensor in load_file(group.settings["model"] + "/model.safetensors").values()) * 12
    mount = ["mount", "-t", "tmpfs", "-o", f"size={int(1.6 * size) >> 10}k", "tmpfs", str(small)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system needs root")
    try:
        checkpoints = hf.Checkpoints(small / "c", every=1, keep=3, on_failure="continue")
        norms = run(group, checkpoints)
        assert len(norms) == 4
        assert "No space left on device" in caplog.text
        assert [path.name for path in saved_steps(small / "c")] == ["step-00000001"]
        strict = hf.Checkpoints(small / "c", every=1)
        with pytest.raises(hf.errors.CheckpointError, match="No space left"):
            run(group, strict)
        assert CheckpointManifest.read(small / "c" / "step-00000001").step == 1
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_random_numbers_continue(group, no_parts, tmp_path):
    path = hf.save(tmp_path / "saved", parts=[group])
    expected = torch.rand(3)
    hf.load(path, parts=[group])
    assert torch.rand(3).equal(expected)


OPEN = """
import atexit, sys
from pathlib import Path
lock = Path(sys.argv[1]).with_name(".checkpoints.lock")
atexit.register(lambda: print("lock at the end:", lock.exists()))  # the last of all
import hybridflow as hf
hf.init(devices=1)
class One(hf.Worker):
    @hf.register(hf.ONE_TO_ALL)
    def one(self):
        return 1
group = hf.place(One, hf.ResourcePool([1]))
checkpoints = hf.Checkpoints(sys.argv[1], every=1)
group.session.before_shutdown(lambda: print("lock while the session closes:", lock.exists()))
for _ in checkpoints.resume(hf.PromptLoader([{"prompt": "abc"}] * 4, batch_size=2, steps=2, tokenizer=None)):
    group.one().get()
    checkpoints.step()
"""


@pytest.mark.slow
def test_a_session_that_is_open_at_the_end_keeps_its_lock_until_it_is_closed(tmp_path):
    directory = tmp_path / "checkpoints"
    done = subprocess.run([sys.executable, "-c", OPEN, str(directory)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-2:] == ["lock while the session closes: True", "lock at the end: False"]
    assert (directory / "ended").read_text() == "2\n"

"""Saving processes are killed at random moments: what has the name of a checkpoint is one, of one step.

The driver's part is that of `hf.Checkpoints`; pipes carry the calls to ranks that write real files. All of it runs in
a program of its own, which has one thread when it forks them.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridflow.engines.checkpoint.manifest import SavedGroup, leftovers, saved_steps, step_of
from hybridflow.engines.checkpoint.rank_state import RankFile, StateWriter, report_file
from hybridflow.run.checkpoints import Checkpoints
from hybridflow.workers.worker import Worker, rank_file
from tests.example_checkpoints import CPU, even_layout, read_values, storages, verify

RANKS, KILLS, LONGEST, DEADLINE = 3, 50, 0.2, 60.0
PROJECT = Path(__file__).resolve().parents[2]
SHAPES = {"w": (300, 100), "b": (7,), "scale": ()}


def rank_main(rank: int, calls: Connection) -> None:
    """Follows the driver: trains, which changes the tensors in place, and takes snapshots."""
    writer, layout = StateWriter(rank, CPU), even_layout(SHAPES, RANKS)
    held = {kind: storages(layout, torch.float32)[rank] for kind in ("main", "exp_avg")}
    while True:
        method, *arguments = calls.recv()
        if method == "train":
            for tensors in held.values():
                for tensor in tensors.values():
                    tensor.fill_(arguments[0])
            continue
        directory, folder, id, _ = arguments
        extra = {Path(directory, folder, "config"): b"{}"} if not rank else {}
        file = RankFile(Path(directory, rank_file(folder, rank)), report_file(Path(directory), folder, rank), id, extra)
        writer.save(file, {kind: (layout, tensors) for kind, tensors in held.items()})
        calls.send(SavedGroup("Worker", (), tuple(held), SHAPES, {}, beside=(f"{folder}/config",)))


def driver_main(root: Path, ranks: list[Connection]) -> None:
    """Trains and saves from the newest checkpoint on, until it is killed."""
    checkpoints = Checkpoints(root, every=1, keep=2)
    found = [path for path in checkpoints._candidates(None) if path == checkpoints.newest]
    step = verify(found[0]).step if found else 0
    session: Any = session_of(ranks, lambda: step)
    while True:
        step += 1
        for rank in ranks:
            rank.send(("train", float(step)))
        checkpoints._step = step
        checkpoints._report()
        if checkpoints._saving is None:  # one at a time; training continues
            checkpoints._save(session)
        time.sleep(0.002)


def session_of(ranks: list[Connection], step: Callable[[], int]) -> Any:
    def tell(_: Any, *call: Any) -> Callable[[], list[Any]]:
        for rank in ranks:
            rank.send(call)
        return lambda: [rank.recv() for rank in ranks]

    group = SimpleNamespace(
        name="actor",
        worker_class=Worker,
        settings={},
        weights_source=None,
        weights_version=0,
        calls_issued=Counter(),
        ranks=SimpleNamespace(hosts=()),
        grid=SimpleNamespace(size=RANKS),
    )
    loader = SimpleNamespace(state=lambda: {"step": step()}, load_state=None)
    return SimpleNamespace(
        groups={"actor": group},
        parts={"loader": loader},
        backend=SimpleNamespace(tell=tell, deadlines=SimpleNamespace(peers=60.0)),
        iterations=SimpleNamespace(unsettled=list, check_hosts=lambda *call: None),
    )


def started(main: Callable[..., None], *arguments: Any, close: list[Connection]) -> int:
    if child := os.fork():
        return child
    try:
        for end in close:
            end.close()
        main(*arguments)
    except (EOFError, ConnectionError):  # a peer was killed
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def run_until_killed(root: Path, chance: random.Random, complete: bool) -> None:
    """`complete`: not before there is another checkpoint."""
    pipes = [Pipe() for _ in range(RANKS)]
    ours, theirs = [one for one, _ in pipes], [other for _, other in pipes]
    pids = [
        started(rank_main, rank, end, close=[*ours, *(other for other in theirs if other is not end)])
        for rank, end in enumerate(theirs)
    ]
    pids.append(started(driver_main, root, ours, close=theirs))
    for pipe in (*ours, *theirs):
        pipe.close()
    end, before = time.monotonic() + DEADLINE, saved_steps(root)[:1]
    begun = (lambda: saved_steps(root)[:1] != before) if complete else root.exists
    try:
        while not begun():
            assert time.monotonic() < end, f"no checkpoint in {DEADLINE} s: {list(root.parent.rglob('*'))}"
            time.sleep(0.001)
        time.sleep(chance.uniform(0, LONGEST))
    finally:
        chance.shuffle(pids)
        for pid in pids:  # together, or one after the other
            os.kill(pid, signal.SIGKILL)
            time.sleep(chance.choice([0, 0, 0.001, 0.02]))
        for pid in pids:
            os.waitpid(pid, 0)


def kill_often(root: Path) -> str:
    """Kill the saving processes again and again; each time, look at what they left."""
    chance, newest, interrupted, seen = random.Random(0), 0, 0, set[int]()
    for kill in range(KILLS):
        run_until_killed(root, chance, complete=kill % 2 == 1)
        found = saved_steps(root)
        assert {*found, *leftovers(root)} == set(root.iterdir())
        for path in found:
            manifest = verify(path)
            step = manifest.step
            assert step == step_of(path)
            assert read_values(path, manifest, ranks=2) == {float(step)}
            assert manifest.parts == {"loader": {"step": step}}
            seen.add(step)
        latest = max((step_of(path) or 0 for path in found), default=0)
        assert latest >= newest  # what was complete is never lost
        newest, interrupted = latest, interrupted + any(leftovers(root))
    assert len(seen) >= KILLS // 2
    assert interrupted >= KILLS // 4  # most kills come while a checkpoint is written
    return f"{KILLS} kills: {interrupted} inside a save, {len(seen)} checkpoints seen, the last of step {newest}"


@pytest.mark.slow
def test_fifty_of_fifty_kills_leave_checkpoints_of_one_step(tmp_path):
    command = [sys.executable, "-m", "tests.integration.test_torn_writes", tmp_path / "checkpoints"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)


if __name__ == "__main__":
    print(kill_often(Path(sys.argv[1])))

"""Random schedules of losses on three machines: no run hangs, ends silently, or has a wrong figure.

`SCHEDULES=100 pytest tests/multinode/test_loss_schedules.py` runs the seeds 0 to 99; by default there are three.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.multinode.machines import Machines, missing
from tests.multinode.test_several_machines import DEADLINES, Runs, check_equal

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why := missing()), reason=why or "it can")]
STEPS, SECONDS = 5, 380.0
LAYOUTS = {"apart": {"devices": "2", "at": "node1", "rollout": 1}, "together": {"devices": "1+1"}}


@dataclass(frozen=True)
class Loss:
    """`delay` seconds after an iteration has begun, or after the loss before, a machine other than the driver's is lost
    for `away` seconds: one that computes, or the spare one."""

    iteration: int
    delay: float
    how: str
    used: bool
    away: float


@dataclass(frozen=True)
class Schedule:
    kind: str
    options: dict[str, Any]
    losses: tuple[Loss, ...]

    @classmethod
    def of(cls, seed: int) -> Schedule:
        draw = random.Random(seed)
        kind = draw.choice(list(LAYOUTS))
        options = LAYOUTS[kind] | {"every": draw.choice([1, 2, 100]), "wait": 120}
        options |= {"in_memory": 1} if draw.random() < 0.5 else {}
        begun = sorted(draw.sample(range(1, STEPS + 1), draw.choice([1, 2])))
        if draw.random() < 0.3:  # another while the run recovers
            begun.append(0)
        losses = [
            Loss(
                iteration,
                draw.uniform(0.0, 0.4 if iteration else 20.0),  # an iteration takes 0.3 s
                draw.choice(["killed", "link down", "link away"]),
                draw.random() < 0.8,
                draw.uniform(3.0, 25.0),
            )
            for iteration in begun
        ]
        return cls(kind, options, tuple(losses))


def test_a_schedule_is_that_of_its_seed():
    assert Schedule.of(7) == Schedule.of(7)
    found = [Schedule.of(seed) for seed in range(100)]
    losses = [loss for one in found for loss in one.losses]
    assert {loss.how for loss in losses} == {"killed", "link down", "link away"}
    assert {loss.iteration for loss in losses} == set(range(STEPS + 1))
    assert {one.kind for one in found} == set(LAYOUTS)


class Disturber(threading.Thread):
    """Takes machines away as the driver begins iterations, and brings each of them back."""

    def __init__(self, runs: Runs, losses: tuple[Loss, ...], log: Any) -> None:
        super().__init__(daemon=True)
        self.machines, self.starts, self.losses, self.log = runs.machines, runs.thread, losses, log
        self.begun, self.over, self.error = 0, False, ""
        self.used, self.there, self.returns = set[int](), {2, 3}, list[threading.Thread]()
        self.changed = threading.Condition()

    def say(self, begun: int) -> None:
        with self.changed:
            self.begun = max(self.begun, begun)
            self.changed.notify_all()

    def run(self) -> None:
        for loss in self.losses:
            with self.changed:
                self.changed.wait_for(lambda loss=loss: self.begun >= loss.iteration or self.over)
            time.sleep(loss.delay)
            if self.over:
                break
            fit = [machine for machine in self.there if (machine in self.used) == loss.used] or [*self.there]
            if fit:
                self.there.remove(machine := fit[0])
                self.log.write(f"{time.strftime('%T')} machine {machine}: {loss}\n")
                self.returns.append(threading.Thread(target=self._disturb, args=(machine, loss), daemon=True))
                self.returns[-1].start()
        for thread in self.returns:
            thread.join()

    def _disturb(self, machine: int, loss: Loss) -> None:
        try:
            if loss.how == "killed":
                self.machines.kill(machine)
            else:
                self.machines.link(machine, "down")
            time.sleep(loss.away)
            if loss.how == "link away" and loss.away < 8:  # Ray has not given it up
                self.machines.link(machine, "up")
            else:
                if loss.how != "killed":
                    self.machines.kill(machine)
                self.starts.submit(self.machines.start, machine).result()
            self.there.add(machine)
        except Exception as error:
            self.error = repr(error)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Iterator[Runs]:
    with Machines(tmp_path_factory.mktemp("schedules"), 3) as machines:
        yield Runs(machines)


@pytest.fixture(scope="module")
def undisturbed(runs) -> dict[str, Path]:
    return {kind: runs.run(kind, STEPS, layout="d2", record=1, **options) for kind, options in LAYOUTS.items()}


@pytest.mark.timeout(SECONDS + 120)
@pytest.mark.parametrize("seed", range(int(os.environ.get("SCHEDULES", "3"))))
def test_a_run_survives_a_random_schedule(runs, undisturbed, seed):
    schedule = Schedule.of(seed)
    name = f"seed {seed}"
    options = {"layout": "d2", "record": 1, "retry": 1, "tolerate": 8, **DEADLINES, **schedule.options}
    limited = ["timeout", "--signal=KILL", str(SECONDS), *runs.command(name, STEPS, **options)]
    command = runs.machines.command(1, limited)
    with (runs.shared / name / "log.txt").open("w", buffering=1) as log:
        log.write(f"{schedule}\n")
        disturber = Disturber(runs, schedule.losses, log)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as driver:
            disturber.start()
            assert driver.stdout is not None
            for line in driver.stdout:
                log.write(f"{time.strftime('%T')} {line}")
                if line.startswith("nodes"):
                    disturber.used = {int(node.removeprefix("node")) for node in line.split()[1:]}
                if line.startswith("iteration"):
                    disturber.say(int(line.split()[1]))
        disturber.over = True
        disturber.say(0)
        disturber.join()
    said = (runs.shared / name / "log.txt").read_text()
    assert not disturber.error, disturber.error
    assert driver.returncode == 0, said[-6000:]
    check_equal(runs.shared / name, undisturbed[schedule.kind])

"""`hybridflow replay RUN --step N`: one recorded batch of a run through preparation and update again.

The run's program runs again, from its last checkpoint before the step; calls that generate return what they returned in
the run (`cluster.recorded_calls`), all others run, and the program ends after the step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.cluster.recorded_calls import BATCHES, PROGRAM, BatchRecords, RecordedProgram, Replay
from hybridflow.cluster.session import Session
from hybridflow.driver import shutdown
from hybridflow.engines.checkpoint.manifest import complete_steps, is_set_aside, step_of
from hybridflow.errors import ConfigError
from hybridflow.tracking.report.run_files import RunFiles

_MEASURED = ("step", "time/", "perf/")  # of the machine, not of the batch
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class ReplayedStep:
    """The metrics of iteration `step` in the run (empty if it wrote none), and in the replay in `directory`."""

    directory: Path
    step: int
    recorded: Mapping[str, Any]
    replayed: Mapping[str, Any]

    @property
    def differing(self) -> list[str]:
        """The metrics that are not the same, bit for bit."""
        names = dict.fromkeys([*self.recorded, *self.replayed])
        return [name for name in names if self.recorded.get(name) != self.replayed.get(name)]

    def __str__(self) -> str:
        names, differing = sorted({*self.recorded, *self.replayed}), set(self.differing)
        width = max(map(len, names), default=6)
        lines = [f"{'step ' + str(self.step):<{width}}  {'run':>14}  {'replay':>14}"]
        for name in names:
            values = (_shown(name, of) for of in (self.recorded, self.replayed))
            mark = "  differs" if name in differing and self.recorded else ""
            lines.append(f"{name:<{width}}  {'  '.join(values)}{mark}")
        if not self.recorded:
            lines.append(f"The run wrote no metrics of step {self.step}.")
        else:
            lines.append(f"{len(differing)} of {len(names)} metrics differ.")
        return "\n".join([*lines, f"written to {self.directory}"])


def _shown(name: str, metrics: Mapping[str, Any]) -> str:
    value = metrics.get(name, "")
    return f"{'not finite' if value is None else value if isinstance(value, str) else f'{value:.8g}':>14}"


def replay(
    run: str | os.PathLike[str],
    step: int,
    load: Callable[[str, Sequence[str]], Callable[[], Any]],
    driver: str | None = None,
    settings: Sequence[str] = (),
) -> ReplayedStep:
    """Replay iteration `step` of a run. `load(driver, arguments)` returns the program; `driver` replaces that of the
    run, `settings` follow its arguments. What its trackers write goes to `<run>/replay-<step>`.

    Errors: ConfigError for a run or step that is not recorded, and a driver that does other calls or ends before the
    step; those of the driver.
    """
    home = Path(run).absolute()
    records = _records(home)
    program = RecordedProgram.read(records)
    if not (path := driver or program.driver):
        raise ConfigError(f"{home} was recorded in a notebook or shell: give its program, --driver FILE.py.")
    if driver is None and not Path(path.partition(":")[0]).is_file():
        raise ConfigError(f"the program of this run, {path}, is gone: give it with --driver FILE.py.")
    directory = program.directory if os.path.isdir(program.directory) else os.getcwd()
    state = Replay(records, step, _checkpoint(records, step), home)
    main = load(str(Path(path).absolute()), [*program.arguments, *settings])
    Session.replay = state
    try:
        with chdir(directory):
            main()
            shutdown()  # writes the metrics of the last iteration
    finally:
        Session.replay = None
        shutdown()
    if state.ended_at < step:
        raise ConfigError(f"{path} ended after step {state.ended_at}: does its loop call checkpoints.resume and step?")
    places = [state.directory, *(path.parent for path in state.directory.glob(f"*/{METRICS}"))]
    if not (found := next((metrics for metrics in (_metrics(place, step) for place in places) if metrics), {})):
        raise ConfigError(
            f"step {step} has no metrics in {state.directory}: it failed, or the loop calls checkpoints.step before "
            f"tracker.log."
        )
    return ReplayedStep(state.directory, step, _metrics(home, step), found)


def _records(run: Path) -> BatchRecords:
    """Errors: ConfigError for a run without any."""
    if not run.is_dir():
        raise ConfigError(f"{run}: not a directory. Give the directory of a run, such as runs/first.")
    found = [path for path in sorted(run.glob(f"*/{BATCHES}/{PROGRAM}")) if not is_set_aside(path.parents[1])]
    if not found:
        raise ConfigError(
            f"{run}/*/{BATCHES} has no recorded batches. Record with hf.Checkpoints(..., batches=True), "
            f"or record_batches=true of a recipe."
        )
    return BatchRecords(found[0].parent)


def _checkpoint(records: BatchRecords, step: int) -> Path | None:
    """The last checkpoint before `step`; None for the start of the run. Errors: ConfigError for a step without one."""
    steps = records.steps
    if step not in steps:
        raise ConfigError(f"step {step} of this run is not recorded: its records have {records}.")
    before = ((path, step_of(path) or 0) for path, _ in complete_steps(records.directory.parent))
    path, done = next((found for found in before if found[1] < step), (None, 0))
    if path is None and done + 1 < steps[0]:
        raise ConfigError(
            f"step {step} cannot be replayed: the steps before it, from {done + 1}, are not recorded any more, and "
            f"{records.directory.parent} has no checkpoint between. Recorded are {records}."
        )
    return path


def _metrics(run: Path, step: int) -> dict[str, Any]:
    lines = [line for line in RunFiles(run).lines(METRICS) if line.get("step") == step]
    return {name: value for line in lines for name, value in line.items() if not name.startswith(_MEASURED)}

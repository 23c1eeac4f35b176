"""The command line: `run DRIVER.py [settings]`, `plan DRIVER.py --cluster a100:16x8 [settings]`, `profile`, `export`,
`timeline`, `report`, `replay`, `doctor`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError, HybridFlowError

_ROLE_MODEL = re.compile(r"(?P<role>[A-Za-z_]\w*)\.model=(?P<model>.*)")
_INTERRUPTED = 130  # a shell's status for a program ended by Ctrl-C
_EPILOG = """\
examples:
  hybridflow plan recipes/ppo.py --cluster a100:16x8 model=DIR prompts=FILE.jsonl --response 1024
  hybridflow plan recipes/ppo.py --cluster h100:16x8 actor.model=llama3-70b critic.model=llama3-7b --rows 4096 \\
      --prompt 1024 --response 1024 --save plan.yaml --chart plan.png
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. A user's mistake prints one line. Arguments after `--` are the driver's."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    parser = _parser()
    given, rest = parser.parse_known_args(words[:end])
    if unknown := [name for name in rest if name.startswith("-")]:
        parser.error(f"unknown option {unknown[0]}; options of the driver itself go behind --")
    try:
        return given.run(given, [*rest, *words[end + 1 :]]) or 0
    except (HybridFlowError, OSError) as error:
        if given.run is _run:  # a driver's, which has said what a user can do about it
            raise
        print(f"hybridflow: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hybridflow: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridflow", description="Reinforcement learning as one driver script.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_profile(commands)
    _add_export(commands)
    _add_doctor(commands)
    _add_timeline(commands)
    _add_report(commands)
    _add_replay(commands)
    plan = commands.add_parser(
        "plan",
        help="find the best placement of a driver's groups on a cluster, without one",
        description="Traces a driver, searches the best placement of its groups, and explains it. Nothing is started.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.set_defaults(run=_plan)
    add = plan.add_argument
    add("driver", help="a program, such as recipes/ppo.py; or FILE.py:FUNCTION")
    add("settings", nargs="*", help="arguments of the driver; ROLE.model=MODEL plans with another model of that group")
    add("--cluster", required=True, help='what it is planned for: "a100:16x8", "a100:16x8,h100:2x4", "here"')
    add("--rows", type=int, help="responses per iteration (default: those of the driver)")
    add("--prompt", type=_lengths, metavar="TOKENS", help="of a prompt: a number, or MEAN:MAX")
    add("--response", type=_lengths, metavar="TOKENS", help="of a response: a number, or MEAN:MAX")
    add("--dtype", help="of the arithmetic: bfloat16, float16 or float32")
    for name, asked, meaning in (
        ("--pin", "GROUP=DEVICES", "such as actor=0-7,12 or actor=2-4-1 (p-t-d)"),
        ("--cap", "GROUP=DEVICES", "at most this number of devices"),
        ("--apart", "GROUP,GROUP", "never on the same device"),
        ("--together", "GROUP,GROUP", "on the same devices"),
        ("--whole", "GROUP", "one layout for all its calls, but generation"),
    ):
        add(name, action="append", default=[], metavar=asked, help=meaning)
    add("--coefficients", metavar="FILE", help="of a simulator that was fitted to a machine")
    add("--profile", metavar="FILE", help="a layer profile that was measured on the devices")
    add("--budget", type=float, default=10.0, metavar="SECONDS", help="for all searches (default: 10)")
    add("--seed", type=int, default=0)
    searches = ("auto", "auto_mapping", "exact", "mcmc", "similarity")
    meaning = (
        "auto_mapping: a layout for each group; exact, mcmc (random changes): for each call; similarity: all on all"
    )
    add("--search", choices=searches, default="auto", help=f"one search instead of those that suit the size. {meaning}")
    add("--save", metavar="FILE", help="the placement as YAML, for hf.auto(placement=FILE)")
    add("--chart", metavar="FILE", help="devices over time as PNG")
    add("--one-layout", action="store_true", help="one layout for all calls of a group, but generation")
    add("--quiet", action="store_true", help="the table only, no explanation")
    return parser


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run a driver: settings are tried before anything starts, and the start is shown",
        description="Runs a driver's main(arguments), or the file. `hybridflow run DRIVER.py --help` is the driver's.",
    )
    run.set_defaults(run=_run)
    run.add_argument("--no-check", action="store_true", help="leave out the first iteration without processes")
    run.add_argument("driver", help="a program, such as recipes/ppo.py; or FILE.py:FUNCTION")
    run.add_argument("settings", nargs=argparse.REMAINDER, help="arguments of the driver")


def _run(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.cli.launch import run_file

    run_file(given.driver, [*given.settings, *rest], check=not given.no_check)


def _add_profile(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="measure what a model's layers take on the devices at hand, for `plan --profile`",
        description="Builds a few layers of a model on 1, 2, 4, ... devices and times them. No weights are read.",
    )
    profile.set_defaults(run=_profile)
    add = profile.add_argument
    add("model", help="a directory with a config.json, such a file, or a name of the hub")
    add("--devices", type=int, help="of one node (default: all accelerators, or one for each processor core)")
    add("--save", metavar="FILE", default="profile.yaml", help="where the profile goes (default: profile.yaml)")
    add("--length", type=int, default=128, metavar="TOKENS", help="of a row, prompt and response (default: 128)")
    add("--tokens", type=int, default=4096, help="of the largest micro-batch (default: 4096)")
    add("--rows", type=int, default=128, help="of the largest decode step (default: 128)")
    add("--repeats", type=int, default=5, help="of which each figure is the median (default: 5)")


def _add_export(commands: Any) -> None:
    export = commands.add_parser(
        "export",
        help="turn a run's checkpoint into a Hugging Face directory, without a cluster",
        description="Writes the model of one group as `save` of the group did at that step. Nothing is started.",
    )
    export.set_defaults(run=_export)
    add = export.add_argument
    add("checkpoint", help="such as runs/first/checkpoints/step-00000020; of a directory of them or a run the newest")
    add("directory", help="of the model; one that is there is replaced")
    add("--group", default="actor", help="the worker group (default: actor)")
    add("--dtype", help="float32, bfloat16 or float16 (default: that of the files that the model came from)")


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check that this machine can run hybridflow, and say what to do where it cannot",
        description="Checks versions, devices, memory, /dev/shm and RAY_ADDRESS, and trains a tiny model. With "
        "MODEL_DIR it says instead what was understood of a model's directory, and what would be refused.",
    )
    doctor.add_argument("model", nargs="?", metavar="MODEL_DIR", help="a Hugging Face directory")
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--no-run", action="store_true", help="leave out the tiny model, which takes most of the time")


def _doctor(given: argparse.Namespace, rest: Sequence[str]) -> int:
    from hybridflow.cli.doctor import report

    if rest:
        raise ConfigError(f"doctor takes one directory, got {rest[0]!r}.")
    if given.model is not None:
        from hybridflow.cli.model_report import report_model

        return min(1, report_model(Path(given.model), lambda line: print(line, flush=True)))
    if wrong := report(lambda line: print(line, flush=True), run=not given.no_run):
        raise ConfigError(f"{wrong} of the checks failed: the lines above say what to do.")
    return 0


def _add_timeline(commands: Any) -> None:
    timeline = commands.add_parser(
        "timeline",
        help="a run's calls on every device over time, for ui.perfetto.dev",
        description="Writes the events of a run as a Chrome trace, and says what limits its iterations.",
    )
    timeline.set_defaults(run=_timeline)
    timeline.add_argument("directory", metavar="RUN", help="of hf.Tracker, such as runs/first")
    timeline.add_argument("--output", metavar="FILE", help="the trace (default: RUN/timeline.json)")


def _timeline(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.tracking.report.chrome_trace import write_timeline
    from hybridflow.tracking.report.limits import find_limits
    from hybridflow.tracking.report.record import read_events

    if rest:
        raise ConfigError(f"timeline takes one run, got {rest[0]!r} as well.")
    _check_target(given.output)
    print(f"written to {write_timeline(given.directory, given.output)}; open it in ui.perfetto.dev")
    for limit in find_limits(read_events(given.directory))[:3]:
        print(f"{limit.share:4.0%}  {limit.seconds:.3g} s per iteration  {limit.name}: {limit.advice}")


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="one HTML page of a run: curves, timeline, limits, memory, samples; or of two runs compared",
        description="Writes one self-contained HTML file from the files of a run. Nothing is started.",
    )
    report.set_defaults(run=_report)
    report.add_argument("directory", help="of the run, such as runs/first")
    report.add_argument("other", nargs="?", help="a second run, to compare")
    report.add_argument("--output", metavar="FILE", help="the page (default: report.html in the run's directory)")


def _report(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.tracking.report.page import write_report

    if rest:
        raise ConfigError(f"report takes one run or two, got {rest[0]!r} as well.")
    print(f"written to {write_report(given.directory, given.other, given.output)}")


def _add_replay(commands: Any) -> None:
    what = "run one recorded batch through preparation and update again, without generation"
    more = "Arguments after the options follow the program's, such as actor.optim.lr=0. See docs/tracking.md."
    replay = commands.add_parser("replay", help=what, description=f"Runs a run's program again. {more}")
    replay.set_defaults(run=_replay)
    replay.add_argument("directory", metavar="RUN", help="recorded with hf.Checkpoints(..., batches=True)")
    replay.add_argument("--step", type=int, required=True, help="the iteration; its metrics go to RUN/replay-STEP")
    replay.add_argument("--driver", metavar="FILE", help="a program in place of the run's, such as one with a new loss")


def _replay(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.cli.launch import load_driver
    from hybridflow.run.replay import replay

    print(replay(given.directory, given.step, load_driver, given.driver, rest))


def _export(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.engines.checkpoint.export import export

    if rest:
        raise ConfigError(f"export takes a checkpoint and a directory, got {rest[0]!r} as well.")
    print(f"written to {export(given.checkpoint, given.directory, group=given.group, dtype=given.dtype)}")


def _profile(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.cli.profile_run import profile
    from hybridflow.cluster.session import Session
    from hybridflow.models.spec import ModelSpec
    from hybridflow.tracing.trace import configuration

    if rest:
        raise ConfigError(f"profile takes one model, got {rest[0]!r} as well.")
    _check_target(given.save)
    ModelSpec.from_hf_config(configuration(given.model))  # refuse anything but a model before a process starts
    start = time.perf_counter()
    running = Session.existing()
    session = running or Session.open()
    try:
        how = {name: getattr(given, name) for name in ("length", "tokens", "rows", "repeats")}
        found = profile(given.model, _devices(session) if given.devices is None else given.devices, **how)
    finally:
        if running is None:
            session.shutdown()
    found.save(given.save)
    print(f"{found}\n\nmeasured in {time.perf_counter() - start:.0f} s, written to {given.save}")


def _devices(session: Any) -> int:
    """Accelerators of one node of the session, or cores of this machine."""
    return max(session.backend.accelerators) if session.has_cuda else len(os.sched_getaffinity(0))


def _check_target(path: str | None) -> None:
    """Runs before minutes are spent on the file. Errors: ConfigError for a file that cannot be written."""
    if path is None:
        return
    file = Path(path).absolute()
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: give a file in a directory that is there and is yours.")


def _plan(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.cli.launch import load_driver, split_name

    split_name(given.driver)
    for target in (given.save, given.chart):
        _check_target(target)
    from hybridflow.planner.cost.hardware import DEFAULT, Coefficients
    from hybridflow.planner.cost.layer_profile import LayerProfile
    from hybridflow.tracing.auto import plan_driver

    settings = [*given.settings, *rest]
    models = {m["role"]: m["model"] for m in map(_ROLE_MODEL.fullmatch, settings) if m}
    if empty := [role for role, model in models.items() if not model]:
        raise ConfigError(f"{empty[0]}.model=: give a model, such as {empty[0]}.model=llama3-7b.")
    settings = [setting for setting in settings if not _ROLE_MODEL.fullmatch(setting)]
    workload = {name: getattr(given, name) for name in ("rows", "prompt", "response", "dtype")}
    print(f"searching for up to {given.budget:g} s (--budget)", file=sys.stderr, flush=True)
    placement = plan_driver(
        load_driver(given.driver, settings),
        cluster=given.cluster,
        workload={name: value for name, value in workload.items() if value is not None},
        constraints=_constraints(given),
        models=models,
        coefficients=Coefficients.load(given.coefficients) if given.coefficients else DEFAULT,
        profile=LayerProfile.load(given.profile) if given.profile else None,
        budget_s=given.budget,
        seed=given.seed,
        per_call=not given.one_layout,
        search=given.search,
    )
    print(placement)
    if not given.quiet:
        placement = placement.explained()
        print(f"\n{placement.explain()}")
    if given.save:
        placement.save(given.save)
    if given.chart:
        placement.chart(given.chart)


def _constraints(given: argparse.Namespace) -> list[Any]:
    from hybridflow.planner.describe.constraints import Apart, Cap, OneLayout, Pin, Together

    return [
        *(Pin(group, **_pinned(value)) for group, value in _split("--pin", given.pin, "=")),
        *(Cap(group, _whole(value)) for group, value in _split("--cap", given.cap, "=")),
        *(Apart(*pair) for pair in _split("--apart", given.apart, ",")),
        *(Together(*pair) for pair in _split("--together", given.together, ",")),
        *map(OneLayout, given.whole),
    ]


def _split(option: str, texts: Sequence[str], mark: str) -> Iterator[tuple[str, str]]:
    """Both sides of GROUP=VALUE, or of GROUP,GROUP."""
    for text in texts:
        first, _, second = text.partition(mark)
        if not first or not second or (mark == "," and mark in second):
            asked = "write GROUP=VALUE" if mark == "=" else "name two groups, such as actor,critic"
            raise ConfigError(f"{option} {text}: {asked}.")
        yield first, second


def _pinned(value: str) -> dict[str, Any]:
    from hybridflow.planner.describe.mesh import Parallel

    if sizes := re.fullmatch(r"(\d+)-(\d+)-(\d+)", value):
        return {"parallel": Parallel(*map(int, sizes.groups()))}
    devices: list[int] = []
    for part in value.split(","):
        if not (ends := re.fullmatch(r"(\d+)(?:-(\d+))?", part)):
            raise ConfigError(f"--pin ...={value}: give devices such as 0-7,12, or parallel sizes p-t-d such as 2-4-1.")
        found = range(int(ends[1]), int(ends[2] or ends[1]) + 1)
        if not found:
            raise ConfigError(f"--pin ...={value}: {part} counts down. Write the smaller device first.")
        devices += found
    return {"devices": tuple(devices)}


def _whole(text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"--cap ...={text}: give a whole number.")
    return int(text)


def _lengths(text: str) -> float | tuple[float, float]:
    mean, _, most = text.partition(":")
    try:
        return (float(mean), float(most)) if most else float(mean)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of tokens, or MEAN:MAX") from None

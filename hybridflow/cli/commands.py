"""The command line: `run DRIVER.py [settings]`, `plan DRIVER.py --cluster a100:16x8 [settings]`, `estimate`, `profile`,
`export`, `timeline`, `report`, `replay`, `doctor`, `new`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError, HybridFlowError, nearest

_ROLE_MODEL = re.compile(r"(?P<role>[A-Za-z_]\w*)\.model=(?P<model>.*)")
_IMPORT = re.compile(r"^ *from recipes(?:\.(\w+))? import (.+?)(?: *#.*)?$", re.MULTILINE)
_HOME = "parents[1]"  # of a recipe, the folder above `recipes`
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
    parser = argparse.ArgumentParser(prog="hybridflow", description="Reinforcement learning as one driver script.")
    _add_commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    given, rest = parser.parse_known_args(words[:end])
    if unknown := [name for name in rest if name.startswith("-")]:
        parser.error(f"unknown option {unknown[0]}; options of the driver itself go behind --")
    try:
        rest += words[end + 1 :]
        if rest and given.takes:
            raise ConfigError(f"{given.takes}, got {rest[0]!r} as well.")
        return given.run(given, rest) or 0
    except (HybridFlowError, OSError) as error:
        if given.run is _run:  # a driver's, which has said what a user can do about it
            raise
        print(f"hybridflow: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hybridflow: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _command(commands: Any, run: Callable[..., int | None], takes: str, meaning: str, more: str, **how: Any) -> Any:
    """Adds a command, named after `run`; returns what adds its arguments. `takes`: the error for surplus arguments."""
    parser = commands.add_parser(run.__name__[1:], help=meaning, description=more, **how)
    parser.set_defaults(run=run, takes=takes)
    return parser.add_argument


def _add_commands(commands: Any) -> None:
    command = partial(_command, commands)
    meaning = "run a driver: settings are tried before anything starts, and the start is shown"
    more = "Runs a driver's main(arguments), or the file. `hybridflow run DRIVER.py --help` is the driver's."
    add = command(_run, "", meaning, more)
    add("--no-check", action="store_true", help="leave out the first iteration without processes")
    add("--placement", metavar="FILE", help="of `plan --save`: devices and sizes of the driver's groups")
    add("driver", help="a program, such as recipes/ppo.py; or FILE.py:FUNCTION")
    add("settings", nargs=argparse.REMAINDER, help="arguments of the driver")

    meaning = "turn a run's checkpoint into a Hugging Face directory, without a cluster"
    more = "Writes the model of one group as `save` of the group did at that step. Nothing is started."
    add = command(_export, "export takes a checkpoint and a directory", meaning, more)
    add("checkpoint", help="such as runs/first/checkpoints/step-00000020; of a directory of them or a run the newest")
    add("directory", help="of the model; one that is there is replaced")
    add("--group", default="actor", help="the worker group (default: actor)")
    add("--dtype", help="float32, bfloat16 or float16 (default: that of the files that the model came from)")

    meaning = "check that this machine can run hybridflow, and say what to do where it cannot"
    more = "Checks this machine and trains a tiny model; or examines MODEL_DIR; or all machines of RAY_ADDRESS."
    add = command(_doctor, "doctor takes one directory", meaning, more)
    add("model", nargs="?", metavar="MODEL_DIR", help="a Hugging Face directory")
    add("--no-run", action="store_true", help="leave out the tiny model, which takes most of the time")
    add("--cluster", action="store_true", help="check all machines of a Ray cluster, and their connections")
    add("--shared", metavar="DIR", help="with --cluster: a directory that all machines are meant to have")

    meaning = "a run's calls on every device over time, for ui.perfetto.dev"
    more = "Writes the events of a run as a Chrome trace, and says what limits its iterations."
    add = command(_timeline, "timeline takes one run", meaning, more)
    add("directory", metavar="RUN", help="of hf.Tracker, such as runs/first")
    add("--output", metavar="FILE", help="the trace (default: RUN/timeline.json)")

    meaning = "one HTML page of a run: curves, timeline, limits, memory, samples; or of two runs compared"
    more = "Writes one self-contained HTML file from the files of a run. Nothing is started."
    add = command(_report, "report takes one run or two", meaning, more)
    add("directory", help="of the run, such as runs/first")
    add("other", nargs="?", help="a second run, to compare")
    add("--output", metavar="FILE", help="the page (default: report.html in the run's directory)")

    meaning = "run one recorded batch through preparation and update again, without generation"
    more = "Runs a run's program again. Arguments after the options follow the program's, such as actor.optim.lr=0."
    add = command(_replay, "", meaning, more)
    add("directory", metavar="RUN", help="recorded with hf.Checkpoints(..., batches=True)")
    add("--step", type=int, required=True, help="the iteration; its metrics go to RUN/replay-STEP")
    add("--driver", metavar="FILE", help="a program in place of the run's, such as one with a new loss")

    _add_profile(commands)
    _add_plan(commands)
    _add_estimate(commands)
    _add_new(commands)


def _add_profile(commands: Any) -> None:
    meaning = "measure what a model's layers take on the devices at hand, for `plan --profile`"
    more = "Builds a few layers of a model on 1, 2, 4, ... devices and times them. No weights are read."
    add = _command(commands, _profile, "profile takes one model", meaning, more)
    add("model", help="a directory with a config.json, such a file, or a name of the hub")
    add("--devices", type=int, help="of one node (default: all accelerators, or one for each processor core)")
    add("--between-nodes", action="store_true", help="measure messages between two nodes of RAY_ADDRESS, too")
    add("--save", metavar="FILE", default="profile.yaml", help="where the profile goes (default: profile.yaml)")
    add("--length", type=int, default=128, metavar="TOKENS", help="of a row, prompt and response (default: 128)")
    add("--tokens", type=int, default=4096, help="of the largest micro-batch (default: 4096)")
    add("--rows", type=int, default=128, help="of the largest decode step (default: 128)")
    add("--repeats", type=int, default=5, help="of which each value is the median (default: 5)")


def _add_driver(add: Any) -> None:
    """Arguments of commands that trace a driver."""
    add("driver", help="a program, such as recipes/ppo.py; or FILE.py:FUNCTION")
    add("settings", nargs="*", help="arguments of the driver; ROLE.model=MODEL plans with another model of that group")
    add("--cluster", required=True, help='what it is planned for: "a100:16x8", "a100:16x8@200Gbps", "here"')
    add("--rows", type=int, help="responses per iteration (default: those of the driver)")
    add("--prompt", type=_lengths, metavar="TOKENS", help="of a prompt: a number, or MEAN:MAX")
    add("--response", type=_lengths, metavar="TOKENS", help="of a response: a number, or MEAN:MAX")
    add("--dtype", help="of the arithmetic: bfloat16, float16 or float32")


def _add_estimate(commands: Any) -> None:
    meaning = "what the calls of a driver take on a device: bytes by owner, FLOP and collectives, without one"
    more = "Traces a driver and runs its engines on tensors without memory. Nothing is started."
    add = _command(commands, _estimate, "", meaning, more)
    _add_driver(add)
    add("--placement", metavar="FILE", help="of `plan --save` (default: the driver's own sizes, on all devices)")


def _add_plan(commands: Any) -> None:
    meaning = "find the best placement of a driver's groups on a cluster, without one"
    more = "Traces a driver, searches the best placement of its groups, and explains it. Nothing is started."
    how = {"epilog": _EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter}
    add = _command(commands, _plan, "", meaning, more, **how)
    _add_driver(add)
    for name, asked, meaning in (
        ("--pin", "GROUP=DEVICES", "such as actor=0-7,12, actor=2-4-1 (p-t-d) or critic=offload"),
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
    meaning = "mcmc: random changes, whatever the size; heuristic: what an expert would write"
    add("--search", choices=("auto", "mcmc", "heuristic"), default="auto", help=meaning)
    add(
        "--staleness",
        type=int,
        metavar="UPDATES",
        help="bound of the loops that generate ahead (default: the driver's)",
    )
    add("--save", metavar="FILE", help="the placement as YAML, for hf.auto(placement=FILE)")
    add("--chart", metavar="FILE", help="devices over time as PNG")
    add("--one-layout", action="store_true", help="one layout for all calls of a group, but generation")
    add("--quiet", action="store_true", help="the table only, no explanation")


def _add_new(commands: Any) -> None:
    meaning = "write a recipe to start from"
    more = "Writes a recipe as a program of yours, and the files that it imports into recipes/ beside it."
    add = _command(commands, _new, "new takes a recipe and a file", meaning, more)
    add("recipe", help="such as grpo, ppo, sft, dpo")
    add("file", help="the program, such as my_run.py")


def _new(given: argparse.Namespace, rest: Sequence[str]) -> None:
    written, kept = write_recipe(given.recipe, given.file)
    print(f"written: {', '.join(map(str, written))}")
    if kept:
        print(f"kept as they were: {', '.join(map(str, kept))}")
    print(f"python {given.file} runs its small task; python {given.file} --help lists its settings")


def _run(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.cli.launch import run_file

    run_file(given.driver, [*given.settings, *rest], not given.no_check, given.placement)


def _doctor(given: argparse.Namespace, rest: Sequence[str]) -> int:
    if given.cluster and given.model is not None:
        raise ConfigError("doctor looks at a model's directory or at a --cluster: give one of them.")
    if given.shared is not None and not given.cluster:
        raise ConfigError("--shared DIR is what the machines of a --cluster have in common: give both.")
    if given.cluster:
        from hybridflow.cli.cluster_report import examine_cluster

        findings = examine_cluster(os.environ.get("RAY_ADDRESS") or "auto", given.shared)
    elif given.model is not None:
        from hybridflow.cli.model_report import examine_model

        findings = examine_model(Path(given.model))
    else:
        from hybridflow.cli.doctor import examine

        findings = examine(not given.no_run)
    wrong = 0
    for finding in findings:
        print(finding, flush=True)
        wrong += bool(finding.cure)
    if wrong and given.model is None:
        raise ConfigError(f"{wrong} of the checks failed: the lines above say what to do.")
    return min(1, wrong)


def _timeline(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.tracking.report.chrome_trace import write_timeline
    from hybridflow.tracking.report.limits import find_limits
    from hybridflow.tracking.report.record import read_events

    _check_target(given.output)
    print(f"written to {write_timeline(given.directory, given.output)}; open it in ui.perfetto.dev")
    for limit in find_limits(read_events(given.directory))[:3]:
        print(f"{limit.share:4.0%}  {limit.seconds:.3g} s per iteration  {limit.name}: {limit.advice}")


def _report(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.tracking.report.page import write_report

    print(f"written to {write_report(given.directory, given.other, given.output)}")


def _replay(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.cli.launch import load_driver
    from hybridflow.run.replay import replay

    print(replay(given.directory, given.step, load_driver, given.driver, rest))


def _export(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.engines.checkpoint.export import export

    print(f"written to {export(given.checkpoint, given.directory, group=given.group, dtype=given.dtype)}")


def _profile(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.cli.profile_run import profile
    from hybridflow.cluster.session import Session
    from hybridflow.models.spec import ModelSpec
    from hybridflow.tracing.trace import configuration

    _check_target(given.save)
    ModelSpec.from_hf_config(configuration(given.model))  # refuse anything but a model before a process starts
    start = time.perf_counter()
    running = Session.existing()
    session = running or Session.open()
    try:
        how = {name: getattr(given, name) for name in ("length", "tokens", "rows", "repeats", "between_nodes")}
        here = max(session.backend.accelerators) if session.has_cuda else len(os.sched_getaffinity(0))
        found = profile(given.model, here if given.devices is None else given.devices, **how)
    finally:
        if running is None:
            session.shutdown()
    found.save(given.save)
    print(f"{found}\n\nmeasured in {time.perf_counter() - start:.0f} s, written to {given.save}")


def _check_target(path: str | None) -> None:
    """Runs before minutes are spent on the file. Errors: ConfigError for a file that cannot be written."""
    if path is None:
        return
    file = Path(path).absolute()
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigError(f"{path} cannot be written: give a file in a directory that is there and is yours.")


def _traced(given: argparse.Namespace, rest: Sequence[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The driver, and how it is traced. Errors: ConfigError."""
    from hybridflow.cli.launch import load_driver, split_name

    split_name(given.driver)
    settings = [*given.settings, *rest]
    models = {m["role"]: m["model"] for m in map(_ROLE_MODEL.fullmatch, settings) if m}
    if empty := [role for role, model in models.items() if not model]:
        raise ConfigError(f"{empty[0]}.model=: give a model, such as {empty[0]}.model=llama3-7b.")
    settings = [setting for setting in settings if not _ROLE_MODEL.fullmatch(setting)]
    workload = {name: getattr(given, name) for name in ("rows", "prompt", "response", "dtype")}
    workload = {name: value for name, value in workload.items() if value is not None}
    return load_driver(given.driver, settings), {"cluster": given.cluster, "workload": workload, "models": models}


def _estimate(given: argparse.Namespace, rest: Sequence[str]) -> None:
    from hybridflow.placement import Placement
    from hybridflow.tracing.estimate import estimate_driver

    placement = Placement.load(Path(given.placement)) if given.placement else None
    driver, how = _traced(given, rest)
    print(*estimate_driver(driver, **how, placement=placement), sep="\n")


def _plan(given: argparse.Namespace, rest: Sequence[str]) -> None:
    for target in (given.save, given.chart):
        _check_target(target)
    from hybridflow.placement import loop_table
    from hybridflow.planner.cost.hardware import DEFAULT, Coefficients, LayerProfile
    from hybridflow.tracing.auto import plan_driver

    driver, how = _traced(given, rest)
    print(f"searching for up to {given.budget:g} s (--budget)", file=sys.stderr, flush=True)
    placement = plan_driver(
        driver,
        **how,
        constraints=_constraints(given),
        coefficients=Coefficients.load(given.coefficients) if given.coefficients else DEFAULT,
        profile=LayerProfile.load(given.profile) if given.profile else None,
        budget_s=given.budget,
        seed=given.seed,
        per_call=not given.one_layout,
        search=given.search,
        staleness=given.staleness,
    )
    print(placement)
    if not given.quiet:
        print(f"\n{placement.explain()}")
        if placement.loops is not None:
            print(f"\n{loop_table(placement.loops())}")
    if given.save:
        placement.save(given.save)
    if given.chart:
        placement.chart(given.chart)


def _constraints(given: argparse.Namespace) -> list[Any]:
    from hybridflow.planner.describe.constraints import Apart, Cap, OneLayout, Pin, Together

    def sides(option: str, mark: str) -> Iterator[tuple[str, str]]:
        """Both sides of GROUP=VALUE, or of GROUP,GROUP."""
        for text in getattr(given, option):
            first, _, second = text.partition(mark)
            if not first or not second or (mark == "," and mark in second):
                asked = "write GROUP=VALUE" if mark == "=" else "name two groups, such as actor,critic"
                raise ConfigError(f"--{option} {text}: {asked}.")
            yield first, second

    caps = list(sides("cap", "="))
    if wrong := [value for _, value in caps if not value.isdigit()]:
        raise ConfigError(f"--cap ...={wrong[0]}: give a whole number.")
    return [
        *(Pin(group, **_pinned(value)) for group, value in sides("pin", "=")),
        *(Cap(group, int(value)) for group, value in caps),
        *(Apart(*pair) for pair in sides("apart", ",")),
        *(Together(*pair) for pair in sides("together", ",")),
        *map(OneLayout, given.whole),
    ]


def _pinned(value: str) -> dict[str, Any]:
    from hybridflow.planner.describe.mesh import Parallel

    if sizes := re.fullmatch(r"(\d+)-(\d+)-(\d+)(?:-cp(\d+))?(?:-ep(\d+))?", value):
        return {"parallel": Parallel.read([int(size or 1) for size in sizes.groups()])}
    if value in ("offload", "stay"):
        return {"offload": value == "offload"}
    devices: list[int] = []
    for part in value.split(","):
        if not (ends := re.fullmatch(r"(\d+)(?:-(\d+))?", part)):
            raise ConfigError(
                f"--pin ...={value}: give devices such as 0-7,12, sizes p-t-d such as 2-4-1 or 1-2-4-cp2-ep4, offload, "
                "or stay."
            )
        found = range(int(ends[1]), int(ends[2] or ends[1]) + 1)
        if not found:
            raise ConfigError(f"--pin ...={value}: {part} counts down. Write the smaller device first.")
        devices += found
    return {"devices": tuple(devices)}


def _lengths(text: str) -> float | tuple[float, float]:
    mean, _, most = text.partition(":")
    try:
        return (float(mean), float(most)) if most else float(mean)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of tokens, or MEAN:MAX") from None


def recipes_directory() -> Path:
    """Of an installed package inside it, of a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    return package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"


def write_recipe(name: str, target: str) -> tuple[list[Path], list[Path]]:
    """The files that were written, `target` and those of `recipes/` beside it, and others that were there and stay.

    Errors: ConfigError for an unknown recipe, with the nearest one, and for a file that is there.
    """
    source, path = recipes_directory(), Path(target)
    known = sorted(one.stem for one in source.glob("*.py") if "DEFAULTS" in (text := one.read_text()) and _HOME in text)
    if name not in known:
        raise ConfigError(f"there is no recipe {name!r}.{nearest(name, known)}")
    if path.suffix != ".py" or os.path.lexists(path) or not path.parent.is_dir():
        raise ConfigError(f"{target}: give a new file of Python in a folder that is there, such as my_run.py.")
    text = (source / f"{name}.py").read_text()
    beside = [f"{name}.yaml"] if (source / f"{name}.yaml").is_file() else []
    helpers = [path.parent / "recipes" / one for one in [*sorted(set(_imported(source, text))), *beside]]
    if helpers[0].parent.resolve() == source.resolve():
        raise ConfigError(f"{target}: this folder has the recipes themselves. Give another folder.")
    if os.path.lexists(helpers[0].parent) and not helpers[0].parent.is_dir():
        raise ConfigError(f"{helpers[0].parent} is there and no folder. Give a file in another folder, or rename it.")
    kept = [one for one in helpers if os.path.lexists(one)]
    written = [one for one in helpers if one not in kept]
    helpers[0].parent.mkdir(exist_ok=True)
    for one in written:
        one.write_text((source / one.name).read_text())
    path.write_text(text.replace(_HOME, "parents[0]").replace(f"python recipes/{name}.py", f"python {path.name}"))
    return [path, *written], kept


def _imported(source: Path, text: str) -> Iterator[str]:
    """The files that a recipe imports, and those that they do."""
    for module, names in _IMPORT.findall(text):
        for one in [module] if module else re.findall(r"\w+", names):
            yield f"{one}.py"
            yield from _imported(source, (source / f"{one}.py").read_text())

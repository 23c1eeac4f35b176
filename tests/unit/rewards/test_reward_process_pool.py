"""Worker processes of reward functions: limits, deaths, order, and nothing left behind."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import cloudpickle
import pytest

from hybridflow.errors import RewardError
from hybridflow.rewards.function_adapters import Breakdown
from hybridflow.rewards.limited_calls import ProcessPool

ROOT = Path(__file__).resolve().parents[3]


def answers(pool, calls, seconds=20.0, failures=None):
    limits = seconds if isinstance(seconds, list) else [seconds] * len(calls)
    return pool.map(calls, limits, failures=failures)


def failed(answer) -> str | None:
    return answer.reason if isinstance(answer, Breakdown) else None


def behave(what, *args):
    """Does what the call says, good or bad."""
    return ACTS[what](*args)


def print_much():
    for _ in range(64):
        print("x" * 2**20)
    print("the last line", file=sys.stderr)
    return "printed"


def recurse(depth=0):
    sys.setrecursionlimit(10**9)
    return recurse(depth + 1) + 1


def ignore_the_end():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


def leave_daemons(mark):
    """One in the session of the child, one in a session of its own whose parent is gone."""
    subprocess.Popen(["sleep", "600"], env={"MARK": mark})
    subprocess.run(["sh", "-c", "setsid sleep 600 & exit 0"], env=os.environ | {"MARK": mark}, check=True)
    time.sleep(60)


ACTS = {
    "answer": lambda value: value,
    "raise": lambda: {}["nothing"],
    "leave": lambda: sys.exit(2),
    "exit": lambda: os._exit(3),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleep": lambda: time.sleep(60),
    "spin": lambda: [None for _ in iter(int, 1)],
    "hold the lock": lambda: ctypes.PyDLL(None).sleep(60),
    "ignore": ignore_the_end,
    "recurse": recurse,
    "print": print_much,
    "close": lambda: os.closerange(1, 3),
    "no pickle": lambda: threading.Lock(),
    "too large": lambda: bytes(2**28 + 1),
    "daemons": leave_daemons,
}


@pytest.fixture(scope="module")
def children():
    with closing(ProcessPool(behave, 2)) as made:
        yield made


def processes(mark: str) -> list[int]:
    """Processes (not zombies) with `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def gone(mark: str, seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while processes(mark) and time.monotonic() < until:
        time.sleep(0.02)
    return not processes(mark)


def test_answers_come_in_order_and_from_several_processes(children):
    def who(index):
        time.sleep(0.01 * (index % 3))
        return index, os.getpid()

    with closing(ProcessPool(who, 2)) as several:
        found = answers(several, [(index,) for index in range(40)])
    assert [index for index, _ in found] == list(range(40))
    assert len({process for _, process in found} - {os.getpid()}) == 2
    assert answers(children, []) == []


@pytest.mark.parametrize(
    ("act", "failure"),
    [
        ("raise", r"raised KeyError: 'nothing' \(test_reward_process_pool.py:\d+\)"),
        ("leave", r"raised SystemExit: 2 "),
        ("exit", r"exited with code 3"),
        ("crash", r"died with SIGSEGV"),
        ("killed", r"died with SIGKILL \(killed; perhaps"),
        ("sleep", r"took longer than 0\.5 s"),
        ("spin", r"took longer than 0\.5 s"),
        ("hold the lock", r"took longer than 0\.5 s"),
        ("ignore", r"took longer than 0\.5 s"),
        ("recurse", r"died with SIG|took longer than 0\.5 s|raised"),
        ("no pickle", r"answered with what cannot be sent back: raised TypeError"),
        ("too large", r"answered with what cannot be sent back: .* 256 MiB"),
    ],
)
def test_a_call_that_fails_fails_alone(children, act, failure):
    """The other calls of the round, also those after it, are answered."""
    calls = [("answer", 1), (act,), *[("answer", n) for n in (2, 3, 4)]]
    outcomes = answers(children, calls, seconds=[20, 0.5 if "longer" in failure else 20, 20, 20, 20])
    assert [outcomes[0], *outcomes[2:]] == [1, 2, 3, 4]
    assert re.match(failure, failed(outcomes[1])), outcomes[1]
    assert len(failed(outcomes[1])) < 2000


def test_what_a_function_prints_disturbs_nothing(children):
    calls = [("print",), ("print",), ("close",), ("close",), ("answer", 5)]
    values = answers(children, calls)
    assert values == ["printed", "printed", None, None, 5]

    def last_words():
        print("out of ideas")
        sys.stdout.flush()
        os._exit(1)

    with closing(ProcessPool(last_words, 1)) as one:
        assert answers(one, [()]) == [Breakdown("exited with code 1; it printed last: out of ideas")]


def test_limits_hold_per_call(children):
    calls = [("sleep",), ("sleep",), ("answer", 1)]
    failures = [failed(outcome) for outcome in answers(children, calls, seconds=[0.1, 0.2, 20])]
    assert failures == ["took longer than 0.1 s", "took longer than 0.2 s", None]


def test_after_so_many_failures_nothing_more_is_begun(children):
    calls = [("sleep",), ("sleep",), *[("answer", n) for n in (1, 2, 3)]]
    failures = [failed(outcome) for outcome in answers(children, calls, seconds=0.2, failures=1)]
    assert failures[0] == "took longer than 0.2 s"
    assert failures[2:] == ["was not begun: too many others failed"] * 3
    assert answers(children, calls[2:], failures=1) == [1, 2, 3]


def test_async_functions_run_to_their_end():
    async def double(value):
        await asyncio.sleep(0.001)
        return 2 * value

    with closing(ProcessPool(double, 1)) as one:
        assert answers(one, [(i,) for i in range(5)]) == [0, 2, 4, 6, 8]


def test_what_a_call_started_dies_with_it(children):
    mark = f"mark-{uuid.uuid4().hex}"
    (outcome,) = answers(children, [("daemons", mark)], seconds=1)
    assert failed(outcome) == "took longer than 1 s"
    assert gone(mark)


def test_nothing_is_left_after_close():
    mark = f"mark-{uuid.uuid4().hex}"

    def start(how):
        os.environ["MARK"] = mark
        subprocess.Popen(["sh", "-c", how])
        return os.getppid()

    several = ProcessPool(start, 2)
    outcomes = answers(several, [("exec setsid sleep 600",), ("exec sleep 600",)])
    template = outcomes[0]
    end = time.monotonic() + 10  # the programs have the mark once they have begun
    while len(processes(mark)) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(processes(mark)) >= 2, "what has a parent may be meant for the next call"
    several.close()
    assert gone(mark)
    assert not Path(f"/proc/{template}").exists()
    assert not failed(answers(several, [("true",)])[0]), "a closed one starts again"
    several.close()


def test_daemons_that_calls_leave_behind_do_not_pile_up():
    mark = f"mark-{uuid.uuid4().hex}"

    def leave(how):
        subprocess.run(["sh", "-c", how], env=os.environ | {"MARK": mark}, check=True)
        return os.getpid()

    with closing(ProcessPool(leave, 1)) as one:
        for how in ("setsid sleep 600 & exit 0", "sleep 600 & exit 0", "setsid sh -c 'sleep 600 & wait' & exit 0"):
            outcomes = answers(one, [(how,)] * 2)
            assert gone(mark)
            assert outcomes[0] == outcomes[1] is not None, "the child itself goes on"


@pytest.mark.parametrize("ending", ["kill", "forget"])
def test_workers_end_with_the_process_that_started_them(ending):
    """Killed while a child is busy in C code, or left to the garbage collector and the end of the interpreter."""
    mark = f"mark-{uuid.uuid4().hex}"
    last = "children.map([()], [300])" if ending == "kill" else ""
    program = (
        "import ctypes, os\n"
        "from hybridflow.rewards.limited_calls import ProcessPool\n"
        "children = ProcessPool(lambda *a: os.getpid() if a else ctypes.PyDLL(None).sleep(600), 2)\n"
        "children.map([(1,), (2,)], [300, 300])\n"
        f"print('started', flush=True)\n{last}\n"
    )
    env = os.environ | {"MARK": mark}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=env, cwd=ROOT) as owner:
        assert owner.stdout.readline() == b"started\n"
        if ending == "kill":
            owner.kill()
        owner.wait(timeout=30)
    assert gone(mark)


def test_a_thread_that_ends_takes_no_children_with_it():
    made = ProcessPool(behave, 1)
    first = []
    thread = threading.Thread(target=lambda: first.extend(answers(made, [("answer", 1)])))
    thread.start()
    thread.join()
    time.sleep(0.05)
    assert [*first, *answers(made, [("answer", 2)])] == [1, 2]
    made.close()


def test_workers_that_died_between_rounds_are_replaced():
    def who():
        return os.getpid()

    def alive(process):
        stat = Path(f"/proc/{process}/stat")
        with suppress(OSError):
            return ") Z " not in stat.read_text()
        return False

    with closing(ProcessPool(who, 1)) as one:
        (first,) = answers(one, [()])
        os.kill(first, signal.SIGKILL)
        while alive(first):
            time.sleep(0.01)
        (second,) = answers(one, [()])
        assert type(second) is int
        assert second != first


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts, also where the tests run in the background and ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_round_leaves_no_stale_answers(interruptible):
    with closing(ProcessPool(lambda value: time.sleep(0.2) or value, 2)) as slow:
        threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            answers(slow, [(i,) for i in range(100)])
        assert answers(slow, [(i,) for i in (7, 8)]) == [7, 8]


def test_copies_start_children_of_their_own(children):
    answers(children, [("answer", 1)])
    for dumps in (pickle.dumps, cloudpickle.dumps):
        with closing(pickle.loads(dumps(children))) as copy:
            assert copy.workers == 2
            assert answers(copy, [("answer", 2)]) == [2]


def test_functions_that_cannot_be_loaded_are_an_error(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def score(value):\n    return value\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with closing(ProcessPool(only_here.score, 1)) as found:
        assert answers(found, [(1,)]) == [1]
    (tmp_path / "only_here.py").write_text("import no_such_package\n")
    with (
        closing(ProcessPool(only_here.score, 1)) as broken,
        pytest.raises(
            RewardError, match=r"cannot be loaded in a worker process: it raised ModuleNotFoundError.*no_such"
        ),
    ):
        answers(broken, [(1,)])


SLOW_TO_LOAD = """
import os, threading, time
time.sleep(0.3)
with open({log!r}, "a") as log:
    log.write("loaded ")
if {threads}:
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
def score(value):
    if value < 0:
        os._exit(1)
    return value, os.getpid()
"""


@pytest.mark.parametrize("threads", [False, True])
def test_a_function_is_loaded_once_unless_it_starts_threads(tmp_path, monkeypatch, threads):
    """A process with threads must not be forked: then every child loads the function itself."""
    name, log = f"slow_to_load_{threads}", tmp_path / "log"
    (tmp_path / f"{name}.py").write_text(SLOW_TO_LOAD.format(log=str(log), threads=threads))
    monkeypatch.syspath_prepend(tmp_path)
    score = importlib.import_module(name).score
    log.write_text("")
    with closing(ProcessPool(score, 1)) as one:
        outcomes = answers(one, [(value,) for value in (1, -1, -1, 2)])
    assert [failed(outcome) is None for outcome in outcomes] == [True, False, False, True]
    assert len({outcomes[at][1] for at in (0, 3)}) == 2
    assert log.read_text().count("loaded") == (4 if threads else 1)

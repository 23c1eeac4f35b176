"""Contained programs: what they can do, what they cannot, by both mechanisms, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hybridflow.errors import ConfigError, RewardError
from hybridflow.processes.supervisor import ServerProcess
from hybridflow.rewards.sandbox import sandbox as sandbox_module
from hybridflow.rewards.sandbox.sandbox import Limits, Result, Sandbox, unavailable

ROOT = Path(__file__).resolve().parents[3]
FAST = Limits(seconds=20, memory_mb=256)
LATE = Limits(seconds=0.7, memory_mb=256)


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def sandbox(request):
    if reason := unavailable(request.param):
        pytest.skip(f"{request.param}: {reason}")
    with Sandbox(request.param) as made:
        yield made
    assert left_running(os.getpid()) == []


def left_running(caller: int, *, besides: int = 0, seconds: float = 10.0) -> list[str]:
    """Processes forked from zygotes of a caller, waiting a while for the last of them to go."""
    until, found = time.monotonic() + seconds, []
    while time.monotonic() < until:
        found = [line for line in command_lines() if f'"caller": {caller},' in line]
        if len(found) <= besides:
            return []
        time.sleep(0.02)
    return found


def command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        except OSError:
            continue
    return found


def test_a_program_runs_and_its_end_is_told(sandbox):
    assert sandbox.run("print(input() * 2)", stdin="ab\n", limits=FAST) == Result(
        status="ok", reason="", returncode=0, stdout="abab\n", stderr="", seconds=pytest.approx(0, abs=20)
    )
    wrong = sandbox.run("import sys\nprint('said')\nsys.exit(3)", limits=FAST)
    assert (wrong.status, wrong.returncode, wrong.stdout) == ("failed", 3, "said\n")
    assert not wrong.contained
    raised = sandbox.run("def f():\n    return 1 / 0\nf()", limits=FAST)
    assert (raised.status, raised.reason) == ("failed", "exited with code 1: ZeroDivisionError: division by zero")
    assert raised.stderr.splitlines()[1] == '  File "main.py", line 3, in <module>'  # nothing of what runs it


def test_ordinary_programs_find_what_they_need(sandbox):
    program = (
        "import asyncio, heapq, os, re, sqlite3, tempfile, threading, numpy\n"
        "assert numpy.eye(2).sum() == 2\n"
        "async def f():\n    await asyncio.sleep(0)\n    return 5\n"
        "assert asyncio.run(f()) == 5\n"
        "ran = []\n"
        "threads = [threading.Thread(target=ran.append, args=(i,)) for i in range(4)]\n"
        "[t.start() for t in threads], [t.join() for t in threads]\n"
        "assert sorted(ran) == [0, 1, 2, 3]\n"
        "with tempfile.TemporaryFile() as file:\n    file.write(b'x')\n"
        "os.makedirs('a/b')\n"
        "open('a/b/c', 'w').write('d')\n"
        "assert open(os.path.expanduser('~/a/b/c')).read() == 'd'\n"
        "open(os.devnull, 'w').write('x')\n"
        "print(input(), os.environ.get('SECRET'))\n"
    )
    os.environ["SECRET"] = "of the caller"
    try:
        result = sandbox.run(program, stdin="given", limits=FAST)
    finally:
        del os.environ["SECRET"]
    assert (result.status, result.stdout, result.stderr) == ("ok", "given None\n", "")


def test_each_run_has_an_empty_directory(sandbox):
    program = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write('x')"
    assert [sandbox.run(program, limits=FAST).stdout for _ in range(2)] == ["[]\n", "[]\n"]


# What it is called: a program, the limits, the status and a piece of the reason that it ends with.
STOPPED = {
    "infinite loop": ("while True: pass", LATE, "timeout", "longer than 0.7 s"),
    "sleeping": ("import time\ntime.sleep(1000)", LATE, "timeout", "longer than 0.7 s"),
    "ignoring signals": (
        "import signal\nfor s in {*signal.Signals} - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        *(LATE, "timeout", "longer than 0.7 s"),
    ),
    "closing everything": ("import os\nos.closerange(0, 99)\nwhile True: pass", LATE, "timeout", "longer"),
    "processor time": (
        "while True: pass",
        *(Limits(seconds=30, cpu_seconds=1, memory_mb=128), "timeout", "1 s of processor time"),
    ),
    "fork bomb": ("import os\nwhile True: os.fork()", FAST, "forbidden", "BlockingIOError"),
    "stubborn fork bomb": (
        "import os\nwhile True:\n    try: os.fork()\n    except BaseException: pass",
        *(LATE, "timeout", "longer"),
    ),
    "fork bomb beneath Python": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nwhile True: assert libc.fork() == -1",
        *(LATE, "timeout", "longer"),
    ),
    "subprocess": ("import subprocess\nsubprocess.run(['true'])", FAST, "forbidden", "BlockingIOError"),
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
        *(FAST, "forbidden", "can't start new thread"),
    ),
    "many small threads": (
        "import threading, time\nthreading.stack_size(1 << 15)\n"
        "for _ in range(40): threading.Thread(target=time.sleep, args=(99,)).start()",
        *(FAST, "forbidden", "more threads than allowed"),
    ),
    "10 GB": ("x = bytearray(10 * 2**30)", FAST, "memory", "more memory than its 256 MB"),
    "10 GB in pieces": ("x = []\nwhile True: x.append(bytes(10**7))", FAST, "memory", "more memory than its 256 MB"),
    "printing": ("while True: print('x' * 1000)", FAST, "output", "printed more than 64 kB"),
    "printing errors": ("import os\nwhile True: os.write(2, b'x' * 10**6)", FAST, "output", "printed more than 64 kB"),
    "printing much at once": ("print('x' * 2**26)", Limits(seconds=20), "output", "printed more than 64 kB"),
    "a large file": ("f = open('a', 'wb')\nwhile True: f.write(b'x' * 10**6)", FAST, "output", "more than 16 MB"),
    "many files": (
        "import time\nfor i in range(900):\n    open(f'{i}', 'wb').write(b'x' * 10**6)\ntime.sleep(99)",
        *(FAST, "output", "more than 16 MB to files"),
    ),
    "deep recursion": ("def f(n): return f(n + 1)\nf(0)", FAST, "recursion", "maximum recursion depth"),
    "deep recursion in C": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(n): return max(map(f, [n]))\nf(0)",
        *(FAST, "killed", "died with SIGSEGV"),
    ),
    "abort": ("import os\nos.abort()", FAST, "killed", "died with SIGABRT"),
    "socket": ("import socket\nsocket.socket()", FAST, "forbidden", "PermissionError"),
    "unix socket": ("import socket\nsocket.socket(socket.AF_UNIX)", FAST, "forbidden", "PermissionError"),
    "signal to the parent": ("import os\nos.kill(os.getppid(), 9)", FAST, "forbidden", "PermissionError"),
    "deleting": ("import os\nos.remove('/usr/bin/env')", FAST, "forbidden", "/usr/bin/env"),
    "symlink": ("import os\nos.symlink('/tmp', 't')\nopen('t/evil', 'w')", FAST, "forbidden", "t/evil"),
}


@pytest.mark.parametrize("name", STOPPED)
def test_attacks_are_stopped_with_a_reason(sandbox, name):
    program, limits, status, reason = STOPPED[name]
    result = sandbox.run(program, limits=limits)
    assert (result.status, reason in result.reason) == (status, True), result
    assert result.contained
    assert len(result.stdout) <= 64 << 10
    assert len(result.stderr) <= 64 << 10
    # the server waits for the next one, with bubblewrap below two processes of that
    assert left_running(os.getpid(), besides=3 if sandbox.mechanism == "bubblewrap" else 1) == []


@pytest.mark.parametrize("place", ["~", "/tmp", "/var/tmp", "/dev/shm", "/usr", str(ROOT), sys.prefix, sys.base_prefix])
def test_the_kernel_refuses_writing_outside_where_nothing_explains(sandbox, place):
    path = Path(place).expanduser() / "hybridflow-evil"
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        f"assert libc.open({str(path)!r}.encode(), 0o102, 0o666) == -1\n"
        f"assert libc.mkdir({str(path)!r}.encode(), 0o777) == -1\n"
        f"assert libc.symlink(b'x', {str(path)!r}.encode()) == -1\n"
        "assert libc.symlink(b'/', b'up') == 0\n"
        f"assert libc.open(b'up' + {str(path)!r}.encode(), 0o102, 0o666) == -1\n"
        "assert libc.open(b'here', 0o102, 0o666) > 2\n"
        "print('refused')"
    )
    result = sandbox.run(program, limits=FAST)
    assert (result.status, result.stdout) == ("ok", "refused\n"), result
    assert not path.exists()


def test_the_kernel_refuses_what_reaches_beyond_the_program(sandbox):
    program = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "def refused(answer): assert answer == -1, (answer, ctypes.get_errno())\n"
        "for family in (1, 2, 10, 16, 17, 38, 40): refused(libc.socket(family, 1, 0))\n"
        f"for target in ({os.getpid()}, 1, os.getppid()):\n"
        "    refused(libc.ptrace(16, target, 0, 0))\n"
        "    refused(libc.syscall(434, target, 0))\n"  # pidfd_open
        f"refused(libc.kill({os.getpid()}, 0))\n"
        f"refused(libc.kill(-{os.getpid()}, 9))\n"
        "refused(libc.unshare(0x10000000))\n"
        "refused(libc.mount(b'x', b'.', b'tmpfs', 0, None))\n"
        "refused(libc.shmget(0, 1 << 20, 0o1600))\n"
        "refused(libc.syscall(425, 8, 0))\n"  # io_uring_setup
        "refused(libc.memfd_create(b'x', 0))\n"
        "refused(libc.setuid(0))\n"
        "refused(libc.prctl(1, 0, 0, 0, 0))\n"
        "assert os.getuid() != 0 and os.geteuid() != 0\n"
        "print('refused')"
    )
    result = sandbox.run(program, limits=FAST)
    assert (result.status, result.stdout) == ("ok", "refused\n"), result


OWNERS = (
    "import array, ctypes, fcntl, os, signal, socket, sys\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "one, other = socket.socketpair()\nread, write = os.pipe()\n"
    "for target in (os.getppid(), {judge}, 1, -1):\n"
    "    for end in (one.fileno(), read):\n"
    "        for number, command, value in ((72, fcntl.F_SETOWN, target), (72, fcntl.F_SETSIG, signal.SIGKILL),\n"
    "                                       (72, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)):\n"
    "            assert libc.syscall(number, end, command, value) == -1\n"
    "        kind = ctypes.create_string_buffer(array.array('i', [1, target]).tobytes())\n"
    "        assert libc.syscall(72, end, 15, kind) == -1\n"
    "        for command, value in ((0x8901, target), (0x8902, target), (0x5452, 1)):\n"
    "            held = ctypes.create_string_buffer(array.array('i', [value]).tobytes())\n"
    "            assert libc.syscall(16, end, command, held) == -1\n"
    "    other.send(b'x')\n    os.write(write, b'x')\n"
    "print('refused')"
)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86_64")
def test_no_descriptor_sends_a_signal_to_others(sandbox):
    result = sandbox.run(OWNERS.format(judge=os.getpid()), limits=FAST)
    assert (result.status, result.stdout) == ("ok", "refused\n"), result


def test_files_of_the_user_cannot_be_read(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("of the user")
    secret.chmod(0o666)
    for path in (secret, f"/proc/{os.getpid()}/environ", "/proc/1/environ", ROOT / "README.md", "/etc/passwd"):
        program = f"try: print(open({str(path)!r}).read())\nexcept OSError: print('refused')"
        assert sandbox.run(program, limits=FAST).stdout == "refused\n", path
    changed = f"import os\ntry: os.chmod({str(secret)!r}, 0)\nexcept OSError: pass"
    sandbox.run(changed, limits=FAST)
    assert secret.stat().st_mode & 0o777 == 0o666


def test_what_a_program_prints_about_itself_is_no_result(sandbox):
    forged = '{"end": "exit", "exit": 0, "status": "ok", "passed": 9, "total": 9}'
    for end in (1, 2):
        assert sandbox.run(f"import os\nos.write({end}, b'{forged}\\n')\n1 / 0", limits=FAST).status == "failed"
    ends = "import os\nopen_ends = []\nfor end in range(256):\n    try: os.fstat(end)\n    except OSError: continue\n"
    assert sandbox.run(ends + "    open_ends.append(end)\nprint(open_ends)", limits=FAST).stdout == "[0, 1, 2]\n"


@pytest.mark.parametrize("mechanism", ["bubblewrap", "landlock"])
def test_nothing_stays_when_the_caller_is_killed(mechanism):
    if reason := unavailable(mechanism):
        pytest.skip(f"{mechanism}: {reason}")
    program = (
        "import os, threading\nfrom hybridflow.rewards.sandbox.sandbox import Limits\n"
        "from hybridflow.rewards.sandbox.sandbox import Sandbox\n"
        f"with Sandbox({mechanism!r}) as s:\n"
        "    threading.Timer(0.5, lambda: print('started', s._scratch, flush=True)).start()\n"
        "    s.run('while True: pass', limits=Limits(seconds=500))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT) as caller:
        started, scratch = caller.stdout.readline().split()
        assert started == "started"
        assert len([line for line in command_lines() if f'"caller": {caller.pid},' in line]) > 2
        caller.send_signal(signal.SIGKILL)
    assert left_running(caller.pid) == []
    until = time.monotonic() + 10
    while scratch != "None" and Path(scratch).exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert scratch == "None" or not Path(scratch).exists()


# Deleted files of a thread that outlives the first one
HIDDEN = (
    "import ctypes, os, threading, time\ndef more():\n    time.sleep(0.1)\n    for _ in range(6):\n"
    "        file = os.open('a', os.O_CREAT | os.O_RDWR)\n        os.unlink('a')\n"
    "        os.write(file, b'x' * (9 << 20))\n"
    "    time.sleep(60)\nthreading.Thread(target=more).start()\nctypes.CDLL(None).syscall(60, 0)"
)


def test_a_sandbox_that_does_not_start_says_why():
    def command(_: int) -> list[str]:
        return ["sh", "-c", "echo no namespaces here >&2; exit 3"]

    with pytest.raises(OSError, match="exited with code 3; it printed last: no namespaces here"):
        ServerProcess(command, environment=dict(os.environ), seconds=60.0)


def test_an_ordinary_user_can_contain_as_well():
    """Root is not needed; checked as another user with the system's Python, where that can read this checkout."""
    python = Path("/usr/bin/python3")
    if os.getuid() != 0 or not python.exists() or not os.stat(ROOT / "hybridflow").st_mode & 0o001:
        pytest.skip("needs root, and a system's Python")
    program = (
        "import json\nfrom hybridflow.rewards.sandbox.sandbox import Limits\n"
        "from hybridflow.rewards.sandbox.sandbox import Sandbox, unavailable\n"
        "found = {}\n"
        "for name in ('bubblewrap', 'landlock'):\n"
        "    if unavailable(name): continue\n"
        "    with Sandbox(name) as s:\n"
        "        forks = 'import os\\nwhile True: os.fork()'\n"
        "        outside = 'import ctypes\\nprint(ctypes.CDLL(None).open(b\"/tmp/evil\", 0o102, 0o666))'\n"
        "        found[name] = [s.run(forks).status, s.run(outside).stdout.strip()]\n"
        f"        if name == 'landlock': found[name].append(s.run({HIDDEN!r}, limits=Limits(seconds=30)).status)\n"
        "print(json.dumps(found))"
    )
    environment = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [python, "-c", program],
        user=54321,
        group=54321,
        extra_groups=[],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=100,
    )
    if "SyntaxError" in done.stderr or "ImportError" in done.stderr or "PermissionError" in done.stderr:
        pytest.skip("the system's Python cannot load hybridflow")
    found = json.loads(done.stdout)
    wanted = {"bubblewrap": ["forbidden", "-1"], "landlock": ["forbidden", "-1", "output"]}
    assert found == {name: wanted[name] for name in found}


def test_a_machine_without_either_mechanism_is_refused(monkeypatch, caplog):
    reasons = {"bubblewrap": "not installed", "landlock": "no"}
    monkeypatch.setattr(sandbox_module, "unavailable", reasons.__getitem__)
    with pytest.raises(ConfigError, match=r"bubblewrap: not installed; landlock: no"):
        Sandbox()
    with pytest.raises(ConfigError, match=r"bubblewrap works \(bubblewrap: not installed\)"):
        Sandbox("bubblewrap")
    with pytest.raises(ConfigError, match="Did you mean 'landlock'"):
        Sandbox("landlok")
    if unavailable("landlock"):
        return
    reasons["landlock"] = ""
    for _ in range(2):
        Sandbox().close()
    (said,) = [record.message for record in caplog.records]  # once
    assert "not installed" in said


def test_limits_are_checked():
    for wrong in ({"seconds": 0}, {"seconds": "5"}, {"memory_mb": 1}, {"file_mb": 0}, {"output_kb": 0.5}):
        with pytest.raises(ConfigError, match=f"Limits\\({next(iter(wrong))}="):
            Limits(**wrong)


def test_a_closed_sandbox_says_so():
    sandbox = Sandbox()
    sandbox.close()
    with pytest.raises(RewardError, match="could not be started"):
        sandbox.run("print(1)")
    with pytest.raises(RewardError, match="could not be started"):
        sandbox.judge("", {"source": "assert 1", "setup": ""}, limits=FAST)

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
from hybridflow.rewards.sandbox.containment import remove_tree
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


def test_files_of_the_user_cannot_be_read(sandbox):
    program = f"try: print(open({str(ROOT / 'README.md')!r}).read())\nexcept OSError: print('refused')"
    assert sandbox.run(program, limits=FAST).stdout == "refused\n"


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
    another = {"user": 54321, "group": 54321, "extra_groups": [], "env": environment, "cwd": "/"}
    done = subprocess.run([python, "-c", program], **another, capture_output=True, text=True, timeout=100)
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


# The limit on what a contained program writes to files

WRITING = (
    "import mmap, os, time\npiece, total, held = b'x' * (1 << 20), 0, []\n"
    "def new(name): return os.open(name, os.O_CREAT | os.O_RDWR, 0o600)\n"
    "def fill(file):\n    for _ in range(15): said(os.write(file, piece))\n    return file\n"
    "def said(count):\n    global total\n    total += count\n    os.write(1, b'%d\\n' % (total >> 20))\n"
    "    time.sleep(0.005)\n"  # a busy machine measures late
)
# Ways to fill a disk beyond 16 MB; every program prints how many MB it has written, or had the kernel set aside.
FILLING = {
    "one after another": "while True: os.close(fill(new(str(total))))",
    "set aside": "while True: os.posix_fallocate(new('a'), 0, 15 << 20); os.rename('a', str(total)); said(15 << 20)",
    "deleted, open": "for _ in range(50): held.append(new('a')); os.unlink('a'); fill(held[-1])",
    "deleted, mapped": "for _ in range(9):\n    file = new('a')\n    os.unlink('a')\n    os.ftruncate(file, 15 << 20)\n"
    "    held.append(mmap.mmap(file, 15 << 20))\n    os.close(file)\n"
    "    for _ in range(15): said(held[-1].write(piece))",
    "deleted, a page of it mapped": "import ctypes\nfor _ in range(50):\n    file = fill(new('a'))\n"
    "    assert ctypes.CDLL(None).mmap(None, 4096, 1, 2, file, 0) != -1\n    os.unlink('a')\n    os.close(file)",
    "deleted, after the first thread": "import ctypes, threading\ndef more():\n    time.sleep(0.1)\n"
    "    for _ in range(50): held.append(new('a')); os.unlink('a'); fill(held[-1])\n    time.sleep(30)\n"
    "threading.Thread(target=more).start()\nctypes.CDLL(None).syscall(60, 0)",
    "without a name": "for _ in range(50): held.append(fill(os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600)))",
    "a closed directory": "os.mkdir('d', 0o300)\nfor i in range(50): os.close(fill(new(f'd/{i}')))",
    "moved about": "import threading\nfor i in range(60): os.mkdir(f'p{i}')\n"
    "os.mkdir('p0/d')\nhome = os.open('p0/d', 0)\ndef move():\n    at = 0\n    while True:\n"
    "        to = (at + 7) % 60\n        os.rename(f'p{at}/d', f'p{to}/d')\n        at = to\n"
    "threading.Thread(target=move, daemon=True).start()\n"
    "for i in range(50): os.close(fill(os.open(str(i), os.O_CREAT | os.O_RDWR, dir_fd=home)))",
    "beyond reach": "for _ in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
    "for i in range(50): os.close(fill(new(f'{i}')))",
}


@pytest.mark.parametrize("name", FILLING)
def test_all_files_together_keep_to_their_limit(sandbox, name):
    result = sandbox.run(WRITING + FILLING[name] + "\ntime.sleep(30)", limits=FAST)
    stopped = ("output", "killed") if sandbox._scratch else ("output", "killed", "ok")  # its file system is bounded
    assert result.status in stopped, result  # "killed": where a mapped page has no room
    assert int((result.stdout.split() or [0])[-1]) < 300  # 16, and what is written while a busy machine measures
    if sandbox._scratch:
        assert os.listdir(sandbox._scratch) == []


UNDER_WAY = (
    "import array, os, socket\none, other = socket.socketpair()\nfor _ in range(30):\n"
    "    file = os.open('a', os.O_CREAT | os.O_RDWR)\n    os.unlink('a')\n    os.write(file, b'x' * (15 << 20))\n"
    "    one.sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [file]))])\n    os.close(file)\n"
    "print('written')"
)


def test_no_deleted_file_hides_in_a_socketpair(sandbox):
    result = sandbox.run(UNDER_WAY, limits=FAST)
    assert (result.status, result.stdout) == ("forbidden", ""), result


NESTED = "import os\nfor _ in range({depth}):\n    os.mkdir('d', {mode})\n    os.chdir('d')\nprint('d')"


def test_deep_directories_end_the_program_alone(sandbox):
    """They are removed, whatever their depth and modes; and those of many entries."""
    many = "import os\nfor i in range(9000): os.mkdir(str(i))"
    for program in (NESTED.format(depth=1500, mode="0o700"), NESTED.format(depth=3000, mode="0o300"), many):
        result = sandbox.run(program + "\nimport time\ntime.sleep(2)", limits=FAST)
        assert result.status in (("output",) if sandbox._scratch else ("ok", "output")), result
        assert sandbox.run("print(6 * 7)", limits=FAST).stdout == "42\n"
        if sandbox._scratch:
            assert os.listdir(sandbox._scratch) == []
    assert sandbox.run(NESTED.format(depth=30, mode="0o700"), limits=FAST).stdout == "d\n"


def test_a_directory_goes_whatever_is_in_it(tmp_path):
    """Deeper than any path, closed, with links: what links lead to stays."""
    top, kept = tmp_path / "top", tmp_path / "kept"
    top.mkdir()
    kept.write_text("of the user")
    here, mode = os.getcwd(), kept.stat().st_mode
    os.chdir(top)
    for depth in range(2000):
        os.mkdir("d" * 9)
        os.symlink(kept, "link")
        os.symlink(tmp_path, "up")
        if depth % 500 == 0:
            os.mkdir("closed", 0)
        os.chdir("d" * 9)
    os.chdir(here)
    remove_tree(str(top))
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (kept.read_text(), kept.stat().st_mode) == ("of the user", mode)
    remove_tree(str(top))


def test_files_within_the_limit_are_no_overrun(sandbox):
    program = (
        "import os\nopen('a', 'wb').write(b'x' * (9 << 20))\nfor i in range(40): os.link('a', f'b{i}')\n"
        "with open('sparse', 'wb') as f: f.truncate(15 << 20)\n"
        "with open('kept', 'wb') as f: os.posix_fallocate(f.fileno(), 0, 2 << 20)\n"
        "for i in range(30):\n    open('c', 'wb').write(b'x' * (4 << 20))\n    os.remove('c')\nprint('done')"
    )
    result = sandbox.run(program, limits=FAST)
    assert (result.status, result.stdout) == ("ok", "done\n"), result

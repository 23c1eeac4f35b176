"""The limit on what a contained program writes to files, by both mechanisms."""

from __future__ import annotations

import os

import pytest

from hybridflow.rewards.sandbox.containment import remove_tree
from hybridflow.rewards.sandbox.sandbox import Limits, Sandbox, unavailable

FAST = Limits(seconds=20, memory_mb=256)


@pytest.fixture(scope="module", params=["bubblewrap", "landlock"])
def sandbox(request):
    if reason := unavailable(request.param):
        pytest.skip(f"{request.param}: {reason}")
    with Sandbox(request.param) as made:
        yield made


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

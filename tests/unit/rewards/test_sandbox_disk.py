"""The limit on what a contained program writes to files, by both mechanisms."""

from __future__ import annotations

import os

import pytest

from hybridflow.rewards.sandbox.run import Limits
from hybridflow.rewards.sandbox.sandbox import Sandbox, unavailable

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
    "without a name": "for _ in range(50): held.append(fill(os.open('.', os.O_TMPFILE | os.O_RDWR, 0o600)))",
    "a closed directory": "os.mkdir('d', 0o300)\nfor i in range(50): os.close(fill(new(f'd/{i}')))",
    "beyond reach": "for _ in range(30): os.mkdir('d' * 200); os.chdir('d' * 200)\n"
    "for i in range(50): os.close(fill(new(f'{i}')))",
}


@pytest.mark.parametrize("name", FILLING)
def test_all_files_together_keep_to_their_limit(sandbox, name):
    result = sandbox.run(WRITING + FILLING[name] + "\ntime.sleep(30)", limits=FAST)
    assert result.status in ("output", "killed"), result  # "killed": where a mapped page has no room
    assert int((result.stdout.split() or [0])[-1]) < 300  # 16, and what is written while a busy machine measures
    if sandbox._scratch:
        assert os.listdir(sandbox._scratch) == []


def test_files_within_the_limit_are_no_overrun(sandbox):
    program = (
        "import os\nopen('a', 'wb').write(b'x' * (9 << 20))\nfor i in range(40): os.link('a', f'b{i}')\n"
        "with open('sparse', 'wb') as f: f.truncate(15 << 20)\n"
        "with open('kept', 'wb') as f: os.posix_fallocate(f.fileno(), 0, 2 << 20)\n"
        "for i in range(30):\n    open('c', 'wb').write(b'x' * (4 << 20))\n    os.remove('c')\nprint('done')"
    )
    result = sandbox.run(program, limits=FAST)
    assert (result.status, result.stdout) == ("ok", "done\n"), result

"""Attacks on the judge, on other rows and on the machine fail, by each mechanism, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridflow.rewards.sandbox.containment import DIRECTORY
from tests.example_attacks import LEAVING, REACHING, STOPPED, UNSOLVED

ROOT = Path(__file__).resolve().parents[3]
ORDINARY, NOBODY = 54321, 65534
KINDS = [("bubblewrap", None), ("landlock", None), ("landlock", 6), ("landlock", 5), ("landlock", 1)]
pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are of x86_64")


@pytest.fixture
def outside() -> Iterator[tuple[dict[str, object], Path]]:
    """What attacks aim at: a process and files that any user may reach, and sockets that must get nothing."""
    with tempfile.TemporaryDirectory(prefix="hybridflow-canary-") as name, socket.socket(socket.AF_UNIX, 2) as near:
        folder = Path(name)
        folder.chmod(0o777)
        secret, path = folder / "secret", folder / "socket"
        secret.write_text("SECRET")
        secret.chmod(0o666)
        with socket.socket(socket.AF_UNIX, 2) as abstract:
            near.bind(str(path))
            path.chmod(0o777)
            abstract.bind("\0hybridflow-canary")
            user = NOBODY if os.getuid() == 0 else os.getuid()
            with subprocess.Popen(["sleep", "600"], user=user) as canary:
                given = {"canary": canary.pid, "judge": os.getpid(), "folder": name, "path": str(path)}
                affinity, nice = os.sched_getaffinity(canary.pid), os.getpriority(os.PRIO_PROCESS, canary.pid)
                before = secret.stat()
                yield given | {"secret": str(secret)}, folder
                assert canary.poll() is None
                assert os.sched_getaffinity(canary.pid) == affinity
                assert os.getpriority(os.PRIO_PROCESS, canary.pid) == nice
                canary.send_signal(signal.SIGKILL)
            for one in (near, abstract):
                with pytest.raises(BlockingIOError):
                    one.recv(1, socket.MSG_DONTWAIT)
        after = secret.stat()
        assert (after.st_mode, after.st_mtime_ns, after.st_nlink, secret.read_text()) == (
            *(before.st_mode, before.st_mtime_ns, before.st_nlink, "SECRET"),
        )
        assert sorted(one.name for one in folder.iterdir()) == ["secret", "socket"]


def shared() -> list[str]:
    """What attacks have left in places that all processes of a machine share."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    made = [str(path) for top in ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue") for path in Path(top).glob("*evil*")]
    return made + [line for line in mounts if line.split()[4] == DIRECTORY]


def attacked(mechanism: str, version: int | None, given: dict[str, object], user: str, *, slow: bool) -> dict:
    """The verdicts of all attacks; those that are contained leave nothing in the directory for temporary files."""
    root = os.getuid() == 0
    if user == "root" and not root:
        pytest.skip("needs root")
    python = sys.executable if not (root and user == "ordinary") else "/usr/bin/python3"  # which any user may run
    with tempfile.TemporaryDirectory(prefix="hybridflow-attacks-") as scratch:
        os.chmod(scratch, 0o777)
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"TMPDIR": scratch, "API_TOKEN": "SECRET", "SSH_AUTH_SOCK": str(given["path"])}
        as_another = {"user": ORDINARY, "group": ORDINARY, "extra_groups": []} if root and user == "ordinary" else {}
        wanted = json.dumps([mechanism, version, given, slow])
        command = [python, "-m", "tests.example_attacks", wanted]
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=250, **as_another
        )
        if any(error in done.stderr for error in ("PermissionError", "ModuleNotFoundError", "SyntaxError")):
            pytest.skip(f"that user cannot run this checkout: {done.stderr[-200:]}")
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        if isinstance(found, str):
            pytest.skip(f"{mechanism}: {found}")
        assert os.listdir(scratch) == []
    return found


def check(mechanism: str, version: int | None, user: str, given: dict[str, object], *, slow: bool = False) -> None:
    found = attacked(mechanism, version, given, user, slow=slow)
    assert shared() == []
    wanted = dict.fromkeys(STOPPED, 0.0) if slow else dict.fromkeys(UNSOLVED, 0.0) | dict.fromkeys(REACHING, 1.0)
    wanted |= {name: 1.0 for name in found if name.startswith("honest")}
    assert {name: found[name] for name in wanted.keys() & found if found[name] != wanted[name]} == {}
    assert len(wanted.keys() - found) < 3  # those that need numpy, where that user has none
    assert slow or {found[name] for name in LEAVING} <= {0.0, 1.0}


@pytest.mark.parametrize(("mechanism", "version"), KINDS[:2])
def test_no_attack_reaches_its_verdict_other_rows_or_the_machine(mechanism, version, outside):
    check(mechanism, version, "root" if os.getuid() == 0 else "ordinary", outside[0])


@pytest.mark.slow
@pytest.mark.parametrize("user", ["root", "ordinary"])
@pytest.mark.parametrize(("mechanism", "version"), KINDS)
@pytest.mark.parametrize("slow", [False, True], ids=["at once", "at a limit"])
def test_no_attack_succeeds_for_any_user(mechanism, version, user, slow, outside):
    check(mechanism, version, user, outside[0], slow=slow)

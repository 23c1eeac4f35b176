"""Several machines on one: each has its own network address, mounts, host name, shared memory and processes.

A machine is a set of Linux namespaces; a bridge joins their networks, and the root network stays untouched. Needs root,
`ip`, `nsenter` and `unshare`. `python machines.py init N NAMES` is the first process of machine N.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"
PORT = 6379
TOKEN = "hybridflow-tests-of-several-machines-0123456789"
_UP_SECONDS = 20.0
_NUMBERS = itertools.count(1)  # a process may have several clusters at a time


def missing() -> str:
    """Why machines cannot be made here; "" where they can."""
    if os.geteuid() != 0:
        return "namespaces with networks need root"
    if lacking := [name for name in ("ip", "nsenter", "unshare", "setpriv", "mount") if shutil.which(name) is None]:
        return f"there is no {', '.join(lacking)}"
    done = subprocess.run(["unshare", "-m", "-u", "-i", "-n", "-p", "-f", "true"], capture_output=True, text=True)
    return done.stderr.strip()


@dataclass
class Machines:
    """Machines 1 to `count`, whose processes see `shared` at the same path. `names` says how host names resolve:
    "good", "debian" (the own one is 127.0.1.1) or "none". `joined`: Ray runs on them, as one cluster. `fast`: each
    has a second network, 10.78.0.0, which gloo uses."""

    shared: Path
    count: int
    names: str = "good"
    joined: bool = True
    fast: bool = False
    devices: int = 2
    mark: str = field(default_factory=lambda: f"hf{os.getpid() % 10000}.{next(_NUMBERS)}")
    _inits: dict[int, tuple[subprocess.Popen, int]] = field(default_factory=dict)

    def __enter__(self) -> Machines:
        try:
            _run("ip", "netns", "add", self.switch)
            _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self.switch, "link", "set", "br0", "up")
            for number in range(1, self.count + 1):
                self.start(number)
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        for number in list(self._inits):
            self.kill(number)
        subprocess.run(["ip", "netns", "del", self.switch], capture_output=True)

    @property
    def switch(self) -> str:
        return f"{self.mark}-sw"

    @property
    def address(self) -> str:
        """Of Ray's head, on machine 1."""
        return f"{NETWORK}.1:{PORT}"

    def start(self, number: int) -> None:
        """Start a machine and its part of the Ray cluster."""
        net, port = f"{self.mark}-{number}", self._port(number)
        _run("ip", "netns", "add", net)
        _run("ip", "-n", net, "link", "set", "lo", "up")
        _run("ip", "link", "add", port, "netns", self.switch, "type", "veth", "peer", "name", "eth0", "netns", net)
        _run("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
        _run("ip", "-n", net, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        _run("ip", "-n", net, "link", "set", "eth0", "up")
        if self.fast:
            second = f"{port}f"
            _run(
                "ip", "link", "add", second, "netns", self.switch, "type", "veth", "peer", "name", "eth1", "netns", net
            )
            _run("ip", "-n", self.switch, "link", "set", second, "master", "br0", "up")
            _run("ip", "-n", net, "addr", "add", f"10.78.0.{number}/24", "dev", "eth1")
            _run("ip", "-n", net, "link", "set", "eth1", "up")
        own = ["unshare", "-m", "-u", "-i", "-p", "-f", "--kill-child", "--propagation", "private"]
        first = [sys.executable, __file__, "init", str(number), self.names, str(self.shared)]
        outer = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/run/netns/{net}", *own, *first],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert outer.stdout is not None
        assert outer.stdout.readline() == b"up\n", f"machine {number} did not start"
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        self._inits[number] = outer, int(children[0])
        if not self.joined:
            return
        settings = [f"--num-cpus={self.devices}", "--object-store-memory=150000000", "--disable-usage-stats"]
        where = ["--head", f"--node-ip-address={NETWORK}.1", f"--port={PORT}", "--include-dashboard=false"]
        joins = where if number == 1 else [f"--address={self.address}"]
        own = {"GLOO_SOCKET_IFNAME": "eth1"} if self.fast else {}
        ray = str(Path(sys.executable).with_name("ray"))
        done = self.run(number, [ray, "start", *settings, *joins], timeout=60, **own)
        assert done.returncode == 0, done.stdout[-3000:]

    def command(self, number: int, command: Sequence[str], **variables: str) -> list[str]:
        """What runs `command` on a machine, with a clean environment and these variables."""
        own = {"HOME": "/tmp/home", "TERM": "dumb", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        own |= {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        own |= {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": self.address, **variables}
        inside = ["nsenter", "-t", str(self._inits[number][1]), "-m", "-u", "-i", "-n", "-p"]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.shared), *command]
        return [*inside, "env", "-i", *(f"{name}={value}" for name, value in own.items()), *there]

    def run(
        self, number: int, command: Sequence[str], timeout: float = 300, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine; its output has both streams."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "stdin": subprocess.DEVNULL}
        return subprocess.run(self.command(number, command, **variables), timeout=timeout, **streams)

    def link(self, number: int, state: str) -> None:
        """Plug the cable of a machine: "up" or "down"."""
        _run("ip", "-n", self.switch, "link", "set", self._port(number), state)

    def slow(self, number: int, rate: str) -> None:
        """Limit a machine's link, in both directions: "10mbit"."""
        shaped = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        _run("tc", "-n", self.switch, "qdisc", "add", "dev", self._port(number), *shaped)
        _run("tc", "-n", f"{self.mark}-{number}", "qdisc", "add", "dev", "eth0", *shaped)

    def bytes(self, number: int, fast: bool = False) -> tuple[int, int]:
        """Sent and received by a machine over its link so far."""
        port = f"{self._port(number)}{'f' * fast}"
        said = subprocess.run(
            ["ip", "-n", self.switch, "-s", "-j", "link", "show", port], check=True, capture_output=True
        ).stdout
        counted = json.loads(said)[0]["stats64"]
        return counted["rx"]["bytes"], counted["tx"]["bytes"]

    def stop(self, number: int) -> None:
        """Stop all processes of a machine, which stays reachable: what is asked of them next is under way for good."""
        subprocess.run(self.command(number, ["sh", "-c", "kill -STOP -1"]), timeout=10, capture_output=True)

    def kill(self, number: int) -> None:
        """End a machine and all of its processes at once, as a power cut."""
        outer, pid = self._inits.pop(number)
        os.kill(pid, signal.SIGKILL)
        outer.wait(_UP_SECONDS)
        subprocess.run(["ip", "-n", self.switch, "link", "del", self._port(number)], capture_output=True)
        subprocess.run(["ip", "netns", "del", f"{self.mark}-{number}"], capture_output=True)

    def _port(self, number: int) -> str:
        return f"{self.mark}p{number}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def init(number: int, names: str, shared: str) -> None:
    """The file systems and names of a machine; then this process waits, and reaps what has no other parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _run("mount", "-t", "proc", "proc", "/proc")
    _run("mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", "/dev/shm")
    seen = Path("/run")  # of the host's own /tmp what is shared stays visible, at its path
    _run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(seen))
    kept = {path: seen / f"kept{i}" for i, path in enumerate((Path(shared), ROOT, Path(sys.prefix)))}
    for path, place in kept.items():
        place.mkdir()
        _run("mount", "--rbind", str(path), str(place))
    _run("mount", "-t", "tmpfs", "-o", "size=4g,mode=1777", "tmpfs", "/tmp")
    for path, place in kept.items():
        if path.is_relative_to("/tmp"):
            path.mkdir(parents=True, exist_ok=True)
            _run("mount", "--rbind", str(place), str(path))
    home = Path("/tmp/home/.ray")
    home.mkdir(parents=True)
    (home / "auth_token").write_text(TOKEN)
    (home / "auth_token").chmod(0o600)
    hosts = ["127.0.0.1 localhost"]
    for other in range(1, 9):
        own = other == number
        if names == "good" or (names == "debian" and not own):
            hosts.append(f"{NETWORK}.{other} node{other}")
        elif names == "debian":
            hosts.append(f"127.0.1.1 node{other}")
    Path("/tmp/hosts").write_text("\n".join(hosts) + "\n")
    _run("mount", "--bind", "/tmp/hosts", "/etc/hosts")
    _run("hostname", f"node{number}")
    print("up", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    init(int(sys.argv[2]), *sys.argv[3:])
